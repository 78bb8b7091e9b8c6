"""Run CPython's own asyncio tests on grapeshot's loop, module by module, and test the harness that runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.run import shipped_tests

HERE = Path(__file__).resolve().parent
RUNNER = HERE / "run.py"
DATA = tomllib.loads((HERE / "exclusions.toml").read_text())
MODULES = DATA["modules"]
TIMEOUT_S = 300.0
pytestmark = pytest.mark.no_audit("while a test runs, processes for other modules start and end")
# How many modules run in parallel: one more than there are processors (because the tests mostly wait), but at most 4.
# The longest modules start first.
WORKERS = min(4, 1 + (os.cpu_count() or 1))
LONGEST = ("test_tasks", "test_ssl", "test_subprocess")
NOT_SHIPPED = (
    f"CONFORMANCE NOT RUN: {sys.executable} was installed without its own tests (test.test_asyncio); "
    "nothing here shows that this version's asyncio tests pass on grapeshot"
)


@pytest.fixture(scope="session")
def folder() -> Path:
    found = shipped_tests()
    if found is None:
        pytest.skip(NOT_SHIPPED)
    return found


def run(tmp_path: Path, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    """Return the reports of `run.py` and what it printed."""
    result = tmp_path / "reports.json"
    done = subprocess.run(
        [sys.executable, str(RUNNER), "--json", str(result), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        # This function runs in a thread. If it passed no environment, posix_spawn() would read the C library's, which
        # another thread may be changing on a free-threaded build.
        env=os.environ.copy(),
    )
    assert result.exists(), done.stdout
    reports: list[dict[str, Any]] = json.loads(result.read_text())
    assert (done.returncode != 0) == any(report["problems"] for report in reports), done.stdout
    return reports, done.stdout


def test_interpreter_ships_its_own_tests(summaries: list[str]) -> None:
    if shipped_tests() is None:
        summaries.append(NOT_SHIPPED)
        pytest.skip(NOT_SHIPPED)


def test_every_module_is_run_or_left_out_with_a_reason(folder: Path) -> None:
    left_out = [module for entry in DATA["left_out"] for module in entry["modules"] if entry["reason"].strip()]
    assert len({*MODULES, *left_out}) == len(MODULES) + len(left_out)
    shipped = {path.stem for path in folder.glob("test_*.py")}
    assert shipped - {*MODULES, *left_out} == set()


Outcome = tuple[list[dict[str, Any]], str]


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Outcome]]]:
    """Run the chosen modules in parallel and return their future outcomes."""
    chosen = [
        item.callspec.params["module"]
        for item in request.session.items
        if hasattr(item, "callspec") and getattr(item, "originalname", "") == "test_cpythons_own"
    ]
    with ThreadPoolExecutor(WORKERS) as pool:
        yield {
            module: pool.submit(run, tmp_path_factory.mktemp(module), "--subject", "grapeshot", module)
            for module in sorted(chosen, key=lambda module: module not in LONGEST)
            if (folder / f"{module}.py").exists()
        }
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("module", MODULES)
def test_cpythons_own(module: str, outcomes: dict[str, Future[Outcome]], summaries: list[str]) -> None:
    if module not in outcomes:
        pytest.skip(f"this version of Python has no {module}")
    [report], output = outcomes[module].result()
    summaries.append(output.splitlines()[0])
    assert not report["problems"], "\n\n".join(report["problems"])
    assert report["on_subject"] > 0


def test_cpythons_own_with_native_streams(folder: Path, tmp_path: Path, summaries: list[str]) -> None:
    """Run CPython's tests of streams with the classes and functions of grapeshot.streams under asyncio's names."""
    [report], output = run(tmp_path, "--subject", "grapeshot-streams", "test_streams")
    summaries.append(output.splitlines()[0])
    assert not report["problems"], "\n\n".join(report["problems"])
    assert report["on_subject"] > 50


# ---------------------------------------------------------------- the harness itself


@pytest.mark.parametrize("module", ["test_server", "test_runners", "test_pep492"])
def test_harness_passes_with_asyncios_own_loop(module: str, folder: Path, tmp_path: Path) -> None:
    [report], output = run(tmp_path, "--subject", "asyncio", module)
    assert not report["problems"], output
    assert list(report["loops"]) == ["asyncio.unix_events._UnixSelectorEventLoop"]
    assert report["on_subject"] > 0


def exclusions(tmp_path: Path, text: str) -> str:
    file = tmp_path / "exclusions.toml"
    file.write_text(f'modules = []\n{text}\nreason = "a test of the harness"\n')
    return str(file)


def test_harness_reports_an_excluded_test_that_passes(folder: Path, tmp_path: Path) -> None:
    file = exclusions(tmp_path, '[[fail]]\ntests = ["test_context.DecimalContextTest.*"]')
    [report], _ = run(tmp_path, "--subject", "asyncio", "--exclusions", file, "test_context")
    assert report["counts"] == {"unexpected pass": 1}
    assert "PASSES test_context.DecimalContextTest" in report["problems"][0]


def test_harness_reports_a_pattern_without_a_test(folder: Path, tmp_path: Path) -> None:
    file = exclusions(tmp_path, '[[skip]]\ntests = ["test_context.Gone.*"]')
    [report], _ = run(tmp_path, "--subject", "asyncio", "--exclusions", file, "test_context")
    assert report["problems"] == ["STALE [[skip]] pattern 'test_context.Gone.*' matches no test of this interpreter"]


def test_harness_reports_a_module_that_never_uses_the_loop(folder: Path, tmp_path: Path) -> None:
    file = exclusions(tmp_path, '[[skip]]\ntests = ["test_context.DecimalContextTest.*"]')
    [report], _ = run(tmp_path, "--subject", "asyncio", "--exclusions", file, "test_context")
    assert [problem.split(":")[1].strip() for problem in report["problems"]] == ["not one test built a loop of asyncio"]


def test_harness_reports_a_failure_with_its_traceback(folder: Path, tmp_path: Path) -> None:
    [report], _ = run(tmp_path, "--subject", "builtins:object", "test_context")
    assert report["counts"] == {"fail": 1}
    assert report["problems"][0].startswith("FAIL test_context.DecimalContextTest")
    assert "Traceback" in report["problems"][0]


def test_harness_reports_a_crash(folder: Path, tmp_path: Path) -> None:
    [report], _ = run(tmp_path, "--subject", "os:abort", "test_context")
    assert report["counts"] == {"crash": 1}
    assert "ended with code -6" in report["problems"][0]


def test_harness_reports_a_loop_of_asyncios_own(folder: Path, tmp_path: Path) -> None:
    file = exclusions(tmp_path, '[[skip]]\ntests = ["test_base_events.BaseEvent*"]')
    [report], _ = run(tmp_path, "--subject", "asyncio", "--exclusions", file, "test_base_events")
    escaped = [problem for problem in report["problems"] if problem.startswith("ESCAPED")]
    assert escaped
    assert all("BaseLoopSockSendfileTests" in problem for problem in escaped)
