"""The layers hold: nothing imports upward or sideways, in Rust or in Python. docs/architecture.md draws the rooms."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from project.rust_source import module_of, read

ROOT = Path(__file__).resolve().parents[2]

# ---------------------------------------------------------------- Rust

ROOMS = {"sys": 0, "queue": 1, "event_loop": 2, "transports": 3, "process": 3, "coro": 3, "tls": 4, "lib": 5}
WITHOUT_PYTHON = {"sys", "queue"}
RUST_DEPENDENCIES = {"pyo3", "libc", "nix", "crossbeam-queue"}


def rust_errors(root: Path) -> Iterator[str]:
    """Every edge of src/ that the layers forbid, as `file:line: why`."""
    for path in sorted((root / "src").rglob("*.rs")):
        inside = PurePosixPath(path.relative_to(root / "src").as_posix())
        module = module_of(inside)
        room = module[0] if module else "lib"
        if room not in ROOMS:
            yield f"src/{inside}: {room} is no room"
            continue
        file = read(path.read_text(encoding="utf-8"), module)
        for line, why in file.hidden:
            yield f"src/{inside}:{line}: {why}"
        for mention in file.mentions:
            target = mention.target[0] if mention.target and mention.target[0] in ROOMS else "lib"
            if target != room and ROOMS[target] >= ROOMS[room]:
                named = "::".join(("crate", *mention.target))
                yield f"src/{inside}:{mention.line}: {room} may not use {target} ({named})"
        if room in WITHOUT_PYTHON:
            for name, line in file.identifiers.items():
                if name == "pyo3" or name.startswith("pyo3_"):
                    yield f"src/{inside}:{line}: {room} knows no Python ({name})"


# ---------------------------------------------------------------- Python

PACKAGE = "grapeshot"
# The border, the class that asyncio sees as a task, and the exceptions that it sees as a cancellation.
TOUCHES_ASYNCIO = {"coro.bridge", "coro._coroutine", "coro._errors"}


def python_layer(module: str) -> int:
    """Native core, topic modules, the loop, what is made with the loop, the package itself."""
    if module in {"", "__main__"}:
        return 4
    if module in {"_policy", "_run"} or module.split(".")[0] == "coro":
        return 3
    return {"_core": 0, "_loop": 2}.get(module, 1)


def python_modules(root: Path) -> dict[str, Path]:
    """Names within the package ("" is the package itself) and their files."""
    package = root / "python" / PACKAGE
    modules = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def python_imports(path: Path, module: str, known: set[str]) -> Iterator[tuple[int, str]]:
    """What a file imports, wherever in it: absolute names, our own modules' among them."""
    is_package = path.name == "__init__.py"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = [PACKAGE, *(module.split(".") if module else [])]
                here = here[: len(here) - node.level + is_package]
                base = ".".join([*here, *([node.module] if node.module else [])])
            for alias in node.names:
                deeper = f"{base}.{alias.name}"
                yield node.lineno, deeper if deeper.removeprefix(f"{PACKAGE}.") in known else base
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            name = node.args[0] if node.args else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node.lineno, (PACKAGE + name.value if name.value.startswith(".") else name.value)
            else:
                yield node.lineno, "<computed>"


def python_errors(root: Path) -> Iterator[str]:
    """Every import of python/grapeshot that the layers forbid, as `file:line: why`."""
    modules = python_modules(root)
    edges: dict[str, set[str]] = {module: set() for module in modules}
    for module, path in modules.items():
        where = path.relative_to(root).as_posix()
        for line, name in python_imports(path, module, {*modules, "_core"}):
            top = name.split(".")[0]
            if top != PACKAGE:
                if top not in sys.stdlib_module_names:
                    yield f"{where}:{line}: the package needs the standard library only, not {name}"
                if top == "asyncio" and module.startswith("coro") and module not in TOUCHES_ASYNCIO:
                    yield f"{where}:{line}: in coro only {', '.join(sorted(TOUCHES_ASYNCIO))} touch asyncio"
                continue
            target = name.removeprefix(PACKAGE).removeprefix(".")
            layers = python_layer(module), python_layer(target)
            if target != module and layers[0] < layers[1]:
                yield f"{where}:{line}: {module} may not import {name}"
            edges[module].add(target)
    yield from (f"python/{PACKAGE}: a circle of imports: {' -> '.join(circle)}" for circle in circles(edges))


def circles(edges: dict[str, set[str]]) -> Iterator[list[str]]:
    done: set[str] = set()

    def visit(module: str, way: list[str]) -> Iterator[list[str]]:
        if module in way:
            yield [name or PACKAGE for name in (*way[way.index(module) :], module)]
        elif module not in done:
            for target in sorted(edges.get(module, ())):
                if target != module:
                    yield from visit(target, [*way, module])
            done.add(module)

    for module in edges:
        yield from visit(module, [])


# ---------------------------------------------------------------- the tree as it is


def test_rust_rooms_import_downward_only():
    assert {path.name for path in (ROOT / "src").iterdir()} >= {"lib.rs", "sys", "queue", "event_loop", "transports"}
    assert list(rust_errors(ROOT)) == []


def test_python_modules_import_downward_only():
    assert {"", "_loop", "_connect", "_serve", "_dns"} <= python_modules(ROOT).keys()
    assert list(python_errors(ROOT)) == []


def test_the_extension_depends_on_the_listed_crates_only():
    cargo = tomllib.loads((ROOT / "Cargo.toml").read_text(encoding="utf-8"))
    tables = [cargo["dependencies"], *(target.get("dependencies", {}) for target in cargo.get("target", {}).values())]
    assert {name for table in tables for name in table} == RUST_DEPENDENCIES


def test_the_package_needs_nothing_at_run_time():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["dependencies"] == []


# ---------------------------------------------------------------- a planted edge is caught


@pytest.fixture
def tree(tmp_path):
    """The least that has the shape of the sources, to spoil."""
    for name in ("src/lib.rs", "src/event_loop/mod.rs", f"python/{PACKAGE}/__init__.py", f"python/{PACKAGE}/_loop.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "python" / PACKAGE / "_run.py").write_text("from ._loop import Loop\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("file", "line", "why"),
    [
        ("sys/planted.rs", "use crate::queue::ready::ReadyQueue;", "sys may not use queue"),
        ("sys/planted.rs", "use pyo3::prelude::*;", "sys knows no Python"),
        ("queue/planted.rs", "fn f(o: &::pyo3::Py<()>) {}", "queue knows no Python"),
        ("queue/planted.rs", "use pyo3_ffi as ffi;", "queue knows no Python"),
        ("queue/planted.rs", "use super::super::transports::stream;", "queue may not use transports"),
        ("event_loop/planted.rs", "use crate::{sys::clock, transports::{stream as s}};", "not use transports"),
        ("event_loop/planted.rs", "use {std::fmt, crate::coro::Scheduler};", "event_loop may not use coro"),
        ("event_loop/planted.rs", "fn f() -> u8 { crate::transports::stream::limit::<u8>() }", "not use transports"),
        ("event_loop/deep/planted.rs", "mod t { use super::super::super::super::tls::E; }", "may not use tls"),
        ("transports/planted.rs", "use crate::process::child;", "transports may not use process"),
        ("transports/planted.rs", "use crate::coro;", "transports may not use coro"),
        ("process/planted.rs", "use crate::transports::pipe;", "process may not use transports"),
        ("coro/planted.rs", "use crate::transports::stream;", "coro may not use transports"),
        ("transports/planted.rs", "use crate::*;", "transports may not use lib"),
        ("transports/planted.rs", "use crate as grapeshot;", "transports may not use lib"),
        ("transports/planted.rs", 'include!("../tls/engine.rs");', "include! pulls in"),
        ("transports/planted.rs", '#[path = "../tls/engine.rs"] mod engine;', "#[path] takes"),
        ("helpers/planted.rs", "pub fn help() {}", "helpers is no room"),
    ],
)
def test_a_planted_rust_edge_is_caught(tree, file, line, why):
    path = tree / "src" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"//! A module.\n\n{line}\n", encoding="utf-8")
    errors = list(rust_errors(tree))
    assert len(errors) == 1
    assert errors[0].startswith(f"src/{file}")
    assert why in errors[0]


@pytest.mark.parametrize(
    "text",
    [
        "// use crate::transports::stream;",
        "/* outer /* use crate::transports::a; */ use crate::transports::b; */",
        "/// Like [`crate::transports::stream`].\npub fn f() {}",
        'const TEXT: &str = "use crate::transports::stream;";',
        'const RAW: &str = r#"a " quote, use crate::transports::stream;"#;',
        "fn f<'a>(quote: char, x: &'a str) -> bool { quote == '\"' || quote == '\\'' }\nuse crate::sys::clock;",
        "pub(in crate::event_loop) fn f() {}",
        "use std::process::Command;",
        '#[cfg_attr(unix, path = "unix.rs")]\n#[path = "pool.rs"]\nmod imp;',
        "use super::handle::Handle;\n#[cfg(test)]\nmod tests { use super::*; use super::super::reactor::Reactor; }",
        "use crate::sys::{self, poller::{Poller, Token}};\nuse self::inner::Thing;",
        "impl Thing { fn f(&self) -> Self { crate::queue::slots::make(self.x) } }",
    ],
)
def test_what_is_allowed_passes(tree, text):
    (tree / "src" / "event_loop" / "planted.rs").write_text(text + "\n", encoding="utf-8")
    assert list(rust_errors(tree)) == []


@pytest.mark.parametrize(
    ("file", "line", "why"),
    [
        ("_planted.py", "from ._loop import Loop", "_planted may not import grapeshot._loop"),
        ("_planted.py", "from . import _loop", "_planted may not import grapeshot._loop"),
        ("_planted.py", "import grapeshot._loop", "_planted may not import grapeshot._loop"),
        ("_planted.py", "def f():\n    from grapeshot import run", "_planted may not import grapeshot"),
        ("_planted.py", "import importlib\nimportlib.import_module('._run', 'grapeshot')", "not import grapeshot._run"),
        ("_planted.py", "import aiohttp", "standard library only, not aiohttp"),
        ("coro/planted.py", "import asyncio", "touch asyncio"),
        ("coro/planted.py", "from .. import install", "coro.planted may not import grapeshot"),
    ],
)
def test_a_planted_python_edge_is_caught(tree, file, line, why):
    path = tree / "python" / PACKAGE / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(line + "\n", encoding="utf-8")
    errors = list(python_errors(tree))
    assert len(errors) == 1
    assert errors[0].startswith(f"python/{PACKAGE}/{file}")
    assert why in errors[0]


def test_a_planted_circle_is_caught(tree):
    package = tree / "python" / PACKAGE
    (package / "_here.py").write_text("from . import _there\n", encoding="utf-8")
    (package / "_there.py").write_text("from ._here import thing\n", encoding="utf-8")
    assert list(python_errors(tree)) == [f"python/{PACKAGE}: a circle of imports: _here -> _there -> _here"]
