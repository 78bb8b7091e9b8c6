"""The rules of CONTRIBUTING.md that a program can check and no linter does."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

import pytest
from project.rust_source import tokenize

ROOT = Path(__file__).resolve().parents[2]
RUST_DIRS = ("src", "core/src", "core/fuzz/targets", "benchmarks/loadgen/src", "examples/tokio_bridge/src")
PYTHON_DIRS = ("python", "tests", "benchmarks", "examples")
VAGUE_NAMES = {"util", "utils", "helper", "helpers", "misc", "common"}

# Where `cfg` may choose between systems, processors and interpreters. Elsewhere only `cfg(test)`.
CFG_PLACES = {
    "src": re.compile(r"(.*/)?mod\.rs|lib\.rs|coro/pystate/.*"),
    "core/src": re.compile(r"(.*/)?mod\.rs|lib\.rs|(arch|sys)/.*"),
}


def source_files():
    rust = [path for folder in RUST_DIRS for path in (ROOT / folder).rglob("*.rs")]
    python = [
        path for folder in PYTHON_DIRS for path in (ROOT / folder).rglob("*.py*") if path.suffix in {".py", ".pyi"}
    ]
    return sorted(path for path in rust + python if "target" not in path.relative_to(ROOT).parts)


def misplaced_cfg(crate: str, inside: PurePosixPath, text: str):
    """Lines with a `cfg` other than `cfg(test)` in a file where it is not allowed."""
    if CFG_PLACES[crate].fullmatch(str(inside)):
        return []
    tokens = tokenize(text)
    texts = [token.text for token in tokens]
    return [
        token.line
        for index, token in enumerate(tokens)
        if (token.text == "cfg" and texts[index + 1] == "!")
        or texts[index : index + 2] in (["cfg", "("], ["cfg_attr", "("])
        if texts[index + 1 : index + 3] != ["(", "test"]
    ]


def test_cfg_stays_in_its_places():
    found = {
        str(path.relative_to(ROOT)): lines
        for crate in CFG_PLACES
        for path in (ROOT / crate).rglob("*.rs")
        if (lines := misplaced_cfg(crate, PurePosixPath(path.relative_to(ROOT / crate)), path.read_text("utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("crate", "inside", "text", "lines"),
    [
        ("src", "event_loop/reactor.rs", '\n#[cfg(target_os = "linux")]\nfn f() {}', [2]),
        ("src", "event_loop/reactor.rs", "fn f() -> bool { cfg!(unix) }", [1]),
        ("src", "event_loop/reactor.rs", "#[cfg_attr(unix, inline)] fn f() {}", [1]),
        ("src", "event_loop/reactor.rs", "#[cfg(test)]\nmod tests { /* #[cfg(unix)] */ }", []),
        ("src", "binding/freelist/mod.rs", "#[cfg(Py_GIL_DISABLED)] mod none;", []),
        ("src", "transports/sys.rs", "#[cfg(unix)] fn f() {}", [1]),
        ("core/src", "sys/poller/epoll.rs", '#[cfg(target_os = "linux")] fn f() {}', []),
        ("core/src", "queue/fd_table.rs", "#[cfg(unix)] fn f() {}", [1]),
    ],
)
def test_a_misplaced_cfg_is_caught(crate, inside, text, lines):
    assert misplaced_cfg(crate, PurePosixPath(inside), text) == lines


def test_files_are_named_for_what_they_hold():
    files = source_files()
    assert len(files) > 20
    assert [str(path.relative_to(ROOT)) for path in files if path.stem in VAGUE_NAMES] == []


def test_nothing_is_left_for_later_in_a_comment():
    later = re.compile(r"\b(T[O]DO|F[I]XME|X[X]X)\b")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in source_files()
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if later.search(line)
    ]
    assert found == []


def test_every_module_says_what_it_is_for():
    opens = re.compile(r'(#!.*\n)?(//!|""")')
    missing = [
        str(path.relative_to(ROOT))
        for path in source_files()
        if (text := path.read_text("utf-8").lstrip()) and not opens.match(text)
    ]
    assert missing == []


# One word for one thing: names that the project no longer uses, and what they are called now.
RETIRED = {
    r"\bunfit\b": "skip_on",
    r"\bdeviates\(": "xfail_on",
    r"\bmark\.leaves\b": "leaks_on",
    r"\btraps\.toml|\btest_traps\b": "regressions.toml",
    r"\btest_border\b": "test_bridge",
    r"\btest_neighbours\b": "test_interop",
    r"\b(has|have|more|spare|free|enough) room\b": "capacity, or space",
    r"[Ee]vacuat": "evict",
    r"\bMachine\b": "Fiber",
    r"\bParcels\b": "ItemQueue",
    r"\b(struct|enum|impl) Line\b": "WaitQueue",
    r"\bfn (departure|arrival|conclude)\b": "prepare_switch, take_wakeup, record_outcome",
    r"\bfacade\b|_facade\b": "task_api",
    r"\b(crate|super|coro)::(making|waiting)\b|\bmod making\b": "spawn, sync",
    r"\bWindow::lend\b": "BufferView::with",
    r"\bTold\b": "Notified",
    r"\bgo_on_shaking\b": "continue_handshake",
    r"\bsealed\b": "ciphertext",
    r"\bexclusively\(|[:`]exclusively": "with_loop_access",
    r"\bone_at_a_time\b": "with_critical_section",
    r"\b(a|the|one|two|few|each|every|next|same|last|this|whole) turns?\b|\bturn\.rs|\b(run_)?turns?\(": "iteration",
    r"\b_topics\b|\bTopic\(|\bclass Topic\b": "LazyModule",
    r"\b_Later\b": "_LazyMethod",
    r"\b_StandIn\b": "_WrappedInterrupt",
}
READ_FOR_NAMES = ("src", "core", "python", "docs", "tests", "README.md", "CONTRIBUTING.md")


@pytest.mark.parametrize("pattern", RETIRED)
def test_retired_names_are_gone(pattern):
    retired = re.compile(pattern)
    paths = [
        path for name in READ_FOR_NAMES for path in ((ROOT / name).rglob("*") if "." not in name else [ROOT / name])
    ]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {RETIRED[pattern]}"
        for path in paths
        if path.suffix in {".rs", ".py", ".pyi", ".md", ".toml", ".c"} and path != Path(__file__).resolve()
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if retired.search(line)
    ]
    assert found == []
