"""The rooms (top-level modules) of the two crates form layers: a room uses only rooms below it.

`lint-imports` checks the rooms of the Python package.

cargo keeps the two crates apart: grapeshot-core can use only what core/Cargo.toml lists, and crates cannot depend on
each other in a circle. Inside a crate, the compiler allows each module to use all others. So these tests let cargo
check each room in a crate that has only this room and the rooms that it may use. A room that uses any other room does
not compile there.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

# The limit is long, because the first test compiles pyo3, and tests that run in parallel wait for each other.
pytestmark = pytest.mark.watchdog(900)

ROOT = Path(__file__).resolve().parents[2]

# ---------------------------------------------------------------- Rust

# For each source folder: the rooms of its crate, each with the rooms that it uses. A room may also use the rooms that
# those rooms use.
USES = {
    "src": {
        "binding": [],
        "event_loop": ["binding"],
        "transports": ["event_loop"],
        "sock": ["event_loop"],
        "process": ["event_loop"],
        "gevent": ["event_loop"],
        "coro": ["event_loop"],
        "tls": ["transports"],
        "streams": ["transports"],
        "dns": ["sock"],
        "rpc": ["binding"],
        "aio": ["binding"],
    },
    "core/src": {"sys": [], "arch": [], "probing": [], "queue": ["sys"], "stack": ["sys"], "msgpack": ["probing"]},
}
PACKAGES = {"src": "grapeshot", "core/src": "grapeshot-core"}
DEPENDENCIES = {
    "Cargo.toml": {"bitflags", "grapeshot-core", "libc", "pyo3"},
    "core/Cargo.toml": {"crossbeam-queue", "io-uring", "libc", "nix"},
}
# The build script of the crates that `make_tree` writes. They cannot use the project's build.rs, because it reads files
# of the room `coro`, and most of these crates do not have that room.
BUILD_SCRIPT = """
#[path = "build_stub.rs"]
mod stub;

fn main() {
    pyo3_build_config::use_pyo3_cfgs();
    stub::pass_to_compiler().unwrap();
}
"""


def with_rooms_below(source: str, room: str) -> list[str]:
    """Return the names of all rooms that the room may use, followed by the name of the room itself."""
    rooms = [below for used in USES[source][room] for below in with_rooms_below(source, used)]
    return [*dict.fromkeys(rooms), room]


def make_tree(tree: Path, source: str, rooms: list[str]) -> None:
    """Writes a workspace in which the crate of `source` has only these rooms."""
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(ROOT / "core", tree / "core", ignore=shutil.ignore_patterns("target"))
    (tree / "python" / "grapeshot").mkdir(parents=True)
    for name in ("Cargo.toml", "Cargo.lock", "build_stub.rs", "python/grapeshot/_core.pyi"):
        shutil.copy(ROOT / name, tree / name)
    (tree / "build.rs").write_text(BUILD_SCRIPT, encoding="utf-8")
    (tree / "src").mkdir()
    (tree / "src" / "lib.rs").touch()
    shutil.rmtree(tree / source)
    for room in rooms:
        folder = ROOT / source / room
        if folder.is_dir():
            shutil.copytree(folder, tree / source / room)
        else:
            (tree / source).mkdir(exist_ok=True)
            shutil.copy(folder.with_suffix(".rs"), tree / source)
    modules = "".join(f"pub mod {room};\n" for room in rooms)
    (tree / source / "lib.rs").write_text(f"#![allow(warnings)]\n{modules}", encoding="utf-8")


def check(source: str, room: str, planted: str = "") -> subprocess.CompletedProcess[str]:
    """Runs `cargo check` for a room and the rooms that it may use. The text `planted` becomes a module of the room."""
    cargo = shutil.which("cargo") or shutil.which("cargo", path=os.path.expanduser("~/.cargo/bin"))
    if cargo is None:
        pytest.skip("cargo is not installed (https://rustup.rs)")
    package = PACKAGES[source]
    # The same path each time, so that cargo finds the dependencies that it has checked before.
    layers = ROOT / "target" / "layers" / package
    layers.mkdir(parents=True, exist_ok=True)
    tree = layers / "tree"
    command = [cargo, "check", "--quiet", "--locked", "--message-format=short", "--lib", "-p", package]
    environment = os.environ | {
        "CARGO_TARGET_DIR": str(layers / "target"),
        "CARGO_TERM_COLOR": "never",
        "PYO3_PYTHON": sys.executable,
    }
    with (layers / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        make_tree(tree, source, with_rooms_below(source, room))
        if planted:
            (tree / source / room / "planted.rs").write_text(planted, encoding="utf-8")
            with (tree / source / room / "mod.rs").open("a", encoding="utf-8") as module:
                module.write("mod planted;\n")
        return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


def crates_below(name: str, lock: str) -> set[str]:
    """Return all crates that this crate is built or tested with, by their names in Cargo.lock."""
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


@pytest.mark.parametrize("source", USES)
def test_each_folder_and_file_of_a_crate_is_a_room(source):
    assert {path.stem for path in (ROOT / source).iterdir()} == {*USES[source], "lib"}


@pytest.mark.parametrize(("source", "room"), [(source, room) for source, rooms in USES.items() for room in rooms])
def test_a_room_compiles_with_only_the_rooms_that_it_may_use(source, room):
    done = check(source, room)
    assert done.returncode == 0, done.stderr


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

# In each of these texts, every line is refused except the last one, which uses a room below.
FORBIDDEN = {
    ("src", "event_loop"): """\
use crate::transports::stream;
use {std::fmt, crate::coro::{scheduler as s}};
fn f() -> u8 { crate::sock::limit::<u8>() }
mod inner { use super::super::super::tls; }
use crate as grapeshot; use grapeshot::dns;
use crate::binding::log as _;
""",
    ("src", "transports"): """\
use crate::coro;
use crate::process::child;
use crate::streams::*;
use crate::event_loop::source as _;
""",
    ("core/src", "queue"): """\
use pyo3::prelude::*;
use pyo3_ffi as ffi;
use grapeshot::event_loop;
use _core::event_loop as loop_;
use crate::event_loop::source;
use crate::stack::Slot;
fn f(o: &::pyo3::Py<()>) {}
use crate::sys::clock as _;
""",
}


@pytest.mark.parametrize(("source", "room"), FORBIDDEN)
def test_a_planted_edge_is_refused(source, room):
    planted = FORBIDDEN[source, room]
    done = check(source, room, planted)
    assert done.returncode != 0
    errors = re.findall(r"^(\S+?):(\d+):\d+: error", done.stderr, re.MULTILINE)
    lines = len(planted.splitlines())
    assert sorted({(file, int(line)) for file, line in errors}) == [
        (f"{source}/{room}/planted.rs", number) for number in range(1, lines)
    ], done.stderr


@pytest.mark.parametrize("text", ['include!("../tls/mod.rs");', '#[path = "../tls/mod.rs"]\nmod tls;'])
def test_the_files_of_another_room_cannot_be_included(text):
    done = check("src", "transports", text)
    assert done.returncode != 0
    assert "src/transports/planted.rs:" in done.stderr
