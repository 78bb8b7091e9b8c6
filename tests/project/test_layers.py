"""The modules of the two crates form layers: each uses only modules in lower layers. (`lint-imports` checks Python.)

cargo keeps the two crates apart: grapeshot-core can use only what core/Cargo.toml lists, and crates cannot depend on
each other in a circle. Inside a crate every module could name every other one, so this test checks the order.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from project.rust_source import module_of, read

ROOT = Path(__file__).resolve().parents[2]

# ---------------------------------------------------------------- Rust

# The layers of each crate, by source folder. A folder may use those with smaller numbers.
ROOMS = {
    "src": {
        "binding": 0,
        "event_loop": 1,
        "transports": 2,
        "sock": 2,
        "process": 2,
        "coro": 2,
        "tls": 3,
        "dns": 3,
        "rpc": 3,
        "streams": 3,
        "lib": 4,
    },
    "core/src": {"sys": 0, "arch": 0, "probing": 0, "queue": 1, "stack": 1, "msgpack": 1, "lib": 2},
}
# Modules of one folder that use each other in a circle on purpose: docs/internals/layers.md says why.
CIRCLES = {
    "src/binding": [["deallocation", "native_type"]],
    "src/event_loop": [["handle", "probe", "pyloop", "reactor"]],
    "src/coro": [["coroutine", "fiber", "wait_queue"]],
    "src/process": [],
    "src/sock": [["attempts", "operation"]],
    "src/streams": [["operation", "protocol", "reader", "writer"]],
    "src/tls": [["lifecycle", "reading", "shutdown", "writing"]],
    "src/transports": [["protocol", "stream_reader"]],
    "core/src/arch": [],
    "core/src/queue": [],
    "core/src/stack": [],
    "core/src/sys": [],
}
DEPENDENCIES = {
    "Cargo.toml": {"bitflags", "grapeshot-core", "libc", "pyo3"},
    "core/Cargo.toml": {"crossbeam-queue", "libc", "nix"},
}


def rust_errors(root: Path) -> Iterator[str]:
    """Yields every edge between rooms of one crate that the layers forbid, as `file:line: why`."""
    for source, rooms in ROOMS.items():
        for path in sorted((root / source).rglob("*.rs")):
            inside = PurePosixPath(path.relative_to(root / source))
            module = module_of(inside)
            room = module[0] if module else "lib"
            if room not in rooms:
                yield f"{source}/{inside}: {room} is not a room"
                continue
            file = read(path.read_text(encoding="utf-8"), module)
            for line, why in file.hidden:
                yield f"{source}/{inside}:{line}: {why}"
            for mention in file.mentions:
                target = mention.target[0] if mention.target and mention.target[0] in rooms else "lib"
                if target != room and rooms[target] >= rooms[room]:
                    named = "::".join(("crate", *mention.target))
                    yield f"{source}/{inside}:{mention.line}: {room} may not use {target} ({named})"


def rust_circles(root: Path, room: str) -> list[list[str]]:
    """The groups of modules in a room that use each other in a circle. A folder is one module."""
    source, _, name = room.rpartition("/")
    modules = {path.stem for path in (root / room).iterdir()} - {"mod"}
    edges: dict[str, set[str]] = {module: set() for module in modules}
    for path in sorted((root / room).rglob("*.rs")):
        inside = module_of(PurePosixPath(path.relative_to(root / source)))
        if len(inside) > 1:
            mentions = read(path.read_text(encoding="utf-8"), inside).mentions
            used = {mention.target[1] for mention in mentions if mention.target[:1] == (name,) and mention.target[1:]}
            edges[inside[1]] |= (used & modules) - {inside[1]}
    below: dict[str, set[str]] = {}
    for module in modules:
        found, wanted = set[str](), list(edges[module])
        while wanted:
            if (used_module := wanted.pop()) not in found:
                found.add(used_module)
                wanted.extend(edges[used_module])
        below[module] = found
    groups = {frozenset(other for other in below[module] if module in below[other]) for module in modules}
    return sorted(sorted(group) for group in groups if group)


def crates_below(name: str, lock: str) -> set[str]:
    """Every crate that this one is built from or tested with, under its real name."""
    packages = {package["name"]: package for package in tomllib.loads(lock)["package"]}
    found: set[str] = set()
    wanted = [name]
    while wanted:
        for dependency in packages[wanted.pop()].get("dependencies", ()):
            crate = dependency.split()[0]
            if crate not in found:
                found.add(crate)
                wanted.append(crate)
    return found


# ---------------------------------------------------------------- the tree as it is


def test_rust_rooms_import_downward_only():
    for source, rooms in ROOMS.items():
        assert {path.stem for path in (ROOT / source).iterdir()} == rooms.keys()
    assert list(rust_errors(ROOT)) == []


@pytest.mark.parametrize("room", CIRCLES)
def test_only_the_named_modules_of_a_room_use_each_other_in_a_circle(room):
    assert rust_circles(ROOT, room) == CIRCLES[room]


@pytest.mark.parametrize("manifest", DEPENDENCIES)
def test_a_crate_depends_on_the_listed_crates_only(manifest):
    cargo = tomllib.loads((ROOT / manifest).read_text(encoding="utf-8"))
    tables = [cargo["dependencies"], *(target.get("dependencies", {}) for target in cargo.get("target", {}).values())]
    assert {name for table in tables for name in table} == DEPENDENCIES[manifest]


def test_the_core_is_built_without_python():
    below = crates_below("grapeshot-core", (ROOT / "Cargo.lock").read_text(encoding="utf-8"))
    assert {"libc", "nix", "proptest"} <= below
    assert [name for name in sorted(below) if re.match("py|python|grapeshot", name)] == []


def test_the_package_needs_nothing_at_run_time():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["dependencies"] == []


# ---------------------------------------------------------------- a planted edge is caught


@pytest.fixture
def tree(tmp_path):
    """A minimal tree with the structure of the sources. Tests plant errors in it."""
    for name in (
        "src/lib.rs",
        "src/event_loop/mod.rs",
        "core/src/lib.rs",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("file", "line", "why"),
    [
        ("core/src/sys/planted.rs", "use crate::queue::ready::ReadyQueue;", "sys may not use queue"),
        ("core/src/sys/planted.rs", "use crate::{sys::clock, stack::Slot};", "sys may not use stack"),
        ("core/src/queue/planted.rs", "use super::super::stack::Slot;", "queue may not use stack"),
        ("core/src/arch/planted.rs", "use crate::sys::clock;", "arch may not use sys"),
        ("core/src/event_loop/planted.rs", "pub fn help() {}", "event_loop is not a room"),
        ("src/binding/planted.rs", "use crate::event_loop::pyloop::LoopObject;", "binding may not use event_loop"),
        ("src/event_loop/planted.rs", "use crate::{binding::log, transports::{stream as s}};", "not use transports"),
        ("src/event_loop/planted.rs", "use {std::fmt, crate::coro::Scheduler};", "event_loop may not use coro"),
        (
            "src/event_loop/planted.rs",
            "fn f() -> u8 { crate::transports::stream::limit::<u8>() }",
            "not use transports",
        ),
        ("src/event_loop/deep/planted.rs", "mod t { use super::super::super::super::tls::E; }", "may not use tls"),
        ("src/transports/planted.rs", "use crate::process::child;", "transports may not use process"),
        ("src/transports/planted.rs", "use crate::coro;", "transports may not use coro"),
        ("src/process/planted.rs", "use crate::transports::pipe;", "process may not use transports"),
        ("src/coro/planted.rs", "use crate::transports::stream;", "coro may not use transports"),
        ("src/transports/planted.rs", "use crate::*;", "transports may not use lib"),
        ("src/transports/planted.rs", "use crate as grapeshot;", "transports may not use lib"),
        ("src/transports/planted.rs", 'include!("../tls/engine.rs");', "include! pulls in"),
        ("src/transports/planted.rs", '#[path = "../tls/engine.rs"] mod engine;', "#[path] takes"),
        ("src/helpers/planted.rs", "pub fn help() {}", "helpers is not a room"),
    ],
)
def test_a_planted_rust_edge_is_caught(tree, file, line, why):
    path = tree / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"//! A module.\n\n{line}\n", encoding="utf-8")
    errors = list(rust_errors(tree))
    assert len(errors) == 1
    assert errors[0].startswith(file)
    assert why in errors[0]


@pytest.mark.parametrize(
    ("source", "upper", "lower"),
    [
        (source, upper, lower)
        for source, rooms in ROOMS.items()
        for lower in rooms
        for upper in rooms
        if "lib" not in (upper, lower) and lower != upper and rooms[lower] <= rooms[upper]
    ],
)
def test_each_forbidden_edge_is_caught(tree, source, upper, lower):
    """From every room to every other one of its layer and above."""
    path = tree / source / lower / "planted.rs"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"//! A module.\n\nuse crate::{upper}::thing;\n", encoding="utf-8")
    where = f"{source}/{lower}/planted.rs"
    assert list(rust_errors(tree)) == [f"{where}:3: {lower} may not use {upper} (crate::{upper}::thing)"]


@pytest.mark.parametrize(
    "text",
    [
        "// use crate::transports::stream;",
        "/* outer /* use crate::transports::a; */ use crate::transports::b; */",
        "/// Like [`crate::transports::stream`].\npub fn f() {}",
        'const TEXT: &str = "use crate::transports::stream;";',
        'const RAW: &str = r#"a " quote, use crate::transports::stream;"#;',
        "fn f<'a>(quote: char, x: &'a str) -> bool { quote == '\"' || quote == '\\'' }\nuse crate::binding::log;",
        "pub(in crate::event_loop) fn f() {}",
        "use std::process::Command;",
        "use grapeshot_core::sys::{self, poller::{Poller, Token}};",
        '#[cfg_attr(unix, path = "unix.rs")]\n#[path = "pool.rs"]\nmod imp;',
        "use super::handle::Handle;\n#[cfg(test)]\nmod tests { use super::*; use super::super::reactor::Reactor; }",
        "use crate::event_loop::{self, handle::{Handle, HandleRef}};\nuse self::inner::Thing;",
        "impl Thing { fn f(&self) -> Self { crate::binding::names::make(self.x) } }",
    ],
)
def test_allowed_edges_pass(tree, text):
    (tree / "src" / "event_loop" / "planted.rs").write_text(text + "\n", encoding="utf-8")
    assert list(rust_errors(tree)) == []


# Lines that cargo refuses in grapeshot-core, except the last one.
ACROSS_CRATES = """\
use pyo3::prelude::*;
use pyo3_ffi as ffi;
use grapeshot::event_loop;
use _core::event_loop as loop_;
use crate::event_loop::source;
fn f(o: &::pyo3::Py<()>) {}
use crate::sys::clock as _;
"""


def test_cargo_refuses_python_and_the_extension_in_the_core(tmp_path):
    cargo = shutil.which("cargo") or shutil.which("cargo", path=os.path.expanduser("~/.cargo/bin"))
    if cargo is None:
        pytest.skip("cargo is not installed (https://rustup.rs)")
    for name in ("Cargo.toml", "Cargo.lock", "build.rs", "build_offsets.rs"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "src").mkdir()
    shutil.copy(ROOT / "src/lib.rs", tmp_path / "src")
    shutil.copytree(ROOT / "core", tmp_path / "core", ignore=shutil.ignore_patterns("target"))
    (tmp_path / "core/src/queue/planted.rs").write_text(f"//! A module.\n{ACROSS_CRATES}", encoding="utf-8")
    with (tmp_path / "core/src/queue/mod.rs").open("a", encoding="utf-8") as module:
        module.write("mod planted;\n")
    command = [cargo, "check", "--quiet", "--locked", "--message-format=short", "-p", "grapeshot-core"]
    environment = os.environ | {"CARGO_TARGET_DIR": str(ROOT / "target" / "layers"), "CARGO_TERM_COLOR": "never"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode != 0
    errors = re.findall(r"^(\S+?):(\d+):\d+: error", done.stderr, re.MULTILINE)
    lines = len(ACROSS_CRATES.splitlines())
    assert sorted({(file, int(line) - 1) for file, line in errors}) == [
        ("core/src/queue/planted.rs", number) for number in range(1, lines)
    ], done.stderr


def test_a_planted_circle_of_rust_modules_is_caught(tree):
    room = tree / "src" / "coro"
    (room / "deep").mkdir(parents=True)
    (room / "mod.rs").write_text("mod deep;\nmod here;\nmod there;\nuse here::thing;\n", encoding="utf-8")
    (room / "here.rs").write_text("use super::there::thing;\n", encoding="utf-8")
    (room / "there.rs").write_text("fn f() { crate::coro::deep::inner::thing() }\n", encoding="utf-8")
    (room / "deep" / "inner.rs").write_text("use super::super::here;\n", encoding="utf-8")
    assert rust_circles(tree, "src/coro") == [["deep", "here", "there"]]
    (room / "deep" / "inner.rs").write_text("use super::other;\n", encoding="utf-8")
    assert rust_circles(tree, "src/coro") == []
