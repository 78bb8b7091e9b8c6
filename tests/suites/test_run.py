"""Tests of run.py with a small suite. `.ci/matrix suites` runs the suites of other projects."""

from __future__ import annotations

import collections
import sys
from pathlib import Path
from typing import Any

import pytest
from support import coro_is_available

from tests.suites import run
from tests.suites.run import Outcome

ON_GRAPESHOT = collections.Counter(grapeshot=1)
SUITE: dict[str, Any] = {
    "tests": ["test_toy.py"],
    "arguments": ["-p", "no:cacheprovider"],
    "limit_s": 60,
    "deselected": ["test_toy.py::test_deselected"],
}
TOY = """
import asyncio
import subprocess
import sys

import pytest


def test_runs_on_the_loop():
    async def main():
        assert type(asyncio.get_running_loop()).__module__.partition(".")[0] == LOOP

    asyncio.run(main())
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(main())


def test_its_children_do_too():
    code = "import asyncio; print(type(asyncio.new_event_loop()).__module__.partition('.')[0])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == LOOP


@pytest.mark.parametrize("what", ["a b", "c::d"])
def test_fails(what):
    raise AssertionError(what)


def test_fails_at_first(tmp_path_factory):
    try:
        with open("again", "x"):
            raise AssertionError
    except FileExistsError:
        pass


@pytest.fixture
def broken_end():
    yield
    raise AssertionError("in the end")


def test_fails_in_the_end(broken_end):
    pass


def test_skipped():
    pytest.skip("not here")


@pytest.mark.xfail
def test_expected_to_fail():
    raise AssertionError


def test_deselected():
    raise AssertionError
"""

PATCHED_TOY = """
import asyncio
import subprocess
import sys
import threading


def count_threads():
    return threading.active_count()


def test_a_blocking_function():
    assert asyncio.run(asyncio.to_thread(count_threads)) == COUNT


def test_its_children():
    code = "import asyncio, threading; print(asyncio.run(asyncio.to_thread(lambda: threading.active_count())))"
    assert int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout) == COUNT
"""


@pytest.fixture(autouse=True)
def _one_rerun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed tests run again once, not twice, because each run takes seconds."""
    monkeypatch.setattr(run, "RERUNS", 1)


@pytest.mark.parametrize("subject", ["asyncio", "grapeshot"])
def test_run_suite(subject: str, tmp_path: Path) -> None:
    (tmp_path / "test_toy.py").write_text(f"LOOP = {subject!r}\n{TOY}")
    ended = run.run_suite(SUITE, Path(sys.executable), tmp_path, subject, None)
    outcomes = {test.removeprefix("test_toy.py::test_"): (end.outcome, end.runs) for test, end in ended.items()}
    assert outcomes == {
        "runs_on_the_loop": ("passed", 1),
        "its_children_do_too": ("passed", 1),
        "fails[a b]": ("failed", 2),
        "fails[c::d]": ("failed", 2),
        "fails_at_first": ("passed", 2),
        "fails_in_the_end": ("failed", 2),
        "skipped": ("skipped", 1),
        "expected_to_fail": ("xfailed", 1),
    }
    assert "AssertionError: a b" in ended["test_toy.py::test_fails[a b]"].detail
    assert sum((end.loops for end in ended.values()), collections.Counter[str]()) == {subject: 2}


@pytest.mark.skipif(not coro_is_available(), reason="no coros here")
@pytest.mark.parametrize(("subject", "count", "coros"), [("asyncio", 2, 0), ("grapeshot", 1, 1)])
def test_run_suite_with_a_patch(subject: str, count: int, coros: int, tmp_path: Path) -> None:
    (tmp_path / "test_toy.py").write_text(f"COUNT = {count}\n{PATCHED_TOY}")
    ended = run.run_suite(SUITE | {"patch": "to_thread"}, Path(sys.executable), tmp_path, subject, None)
    assert {test: (end.outcome, end.detail) for test, end in ended.items()} == {
        "test_toy.py::test_a_blocking_function": ("passed", ""),
        "test_toy.py::test_its_children": ("passed", ""),
    }
    assert ended["test_toy.py::test_a_blocking_function"].loops == collections.Counter({subject: 1, "coros": coros})


def test_run_suite_ignores_the_settings_around_it(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    (tmp_path / "conftest.py").write_text("raise AssertionError('not of this suite')")
    work = tmp_path / "work"
    work.mkdir()
    (work / "test_toy.py").write_text("import warnings\ndef test_warns(): warnings.warn('not an error')")
    ended = run.run_suite(SUITE, Path(sys.executable), work, "asyncio", None)
    assert {test: end.outcome for test, end in ended.items()} == {"test_toy.py::test_warns": "passed"}


def test_run_suite_that_crashes(tmp_path: Path) -> None:
    lines = ["import os", "def test_before(): pass", "def test_crash(): os.abort()", "def test_after(): pass"]
    (tmp_path / "test_toy.py").write_text("\n".join(lines))
    needed = [f"test_toy.py::test_{name}" for name in ("before", "crash", "after", "gone")]
    ended = run.run_suite(SUITE, Path(sys.executable), tmp_path, "asyncio", needed)
    outcomes = {test.removeprefix("test_toy.py::test_"): end.outcome for test, end in ended.items()}
    assert outcomes == {"before": "passed", "crash": "failed", "after": "passed"}


def judge(exceptions: dict[str, str], baseline: dict[str, str], ended: dict[str, Outcome]) -> run.Report:
    return run.judge("toy", "grapeshot", exceptions, {test: Outcome(how) for test, how in baseline.items()}, ended)


def test_judge_finds_tests_that_do_not_pass() -> None:
    baseline = dict.fromkeys(("good", "bad", "skipped", "gone"), "passed") | {"bad everywhere": "failed"}
    ended = {
        "good": Outcome("passed", loops=ON_GRAPESHOT),
        "bad": Outcome("failed", "Traceback"),
        "skipped": Outcome("skipped"),
        "bad everywhere": Outcome("failed"),
        "only here": Outcome("failed"),
    }
    report = judge({}, baseline, ended)
    assert report.problems == ["FAILED bad\nTraceback", "SKIPPED skipped", "MISSING gone"]


def test_judge_reports_exceptions_that_are_not_needed() -> None:
    exceptions = {"bad[*]": "why", "good*": "because", "gone": "long ago"}
    baseline = dict.fromkeys(("bad[x]", "bad[y]", "good"), "passed")
    ended = {
        "bad[x]": Outcome("failed"),
        "bad[y]": Outcome("missing"),
        "good": Outcome("passed", loops=ON_GRAPESHOT),
    }
    report = judge(exceptions, baseline, ended)
    assert report.problems == [
        "PASSES good, but is listed: because",
        "STALE 'gone' matches no test that passes on the baseline",
    ]


def test_judge_requires_the_subjects_loop() -> None:
    escaped = collections.Counter(asyncio=1)
    report = judge({}, {"test": "passed"}, {"test": Outcome("passed", loops=escaped)})
    assert report.problems == [
        "not one test built a loop of grapeshot: the run proves nothing about it",
        "ESCAPED test: it built a loop of asyncio's own",
    ]


def test_judge_requires_coros_if_the_suite_is_patched() -> None:
    baseline, ended = {"test": Outcome("passed")}, {"test": Outcome("passed", loops=ON_GRAPESHOT)}
    report = run.judge("toy", "grapeshot", {}, baseline, ended, needs_coros=True)
    assert report.problems == ["not one blocking function ran in a coro: the run proves nothing about the patch"]


def test_suites_are_pinned() -> None:
    lines = run.CONSTRAINTS.read_text().splitlines()
    pinned = {line.partition("==")[0].lower() for line in lines if not line.startswith("#")}
    for name, suite in run.load().items():
        for requirement in suite["requirements"]:
            assert requirement.partition("==")[0].partition("[")[0].lower() in pinned, (name, requirement)
