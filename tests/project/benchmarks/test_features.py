"""The feature table is true: its probes pass on grapeshot, its tests exist, and its pages match the JSON."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from project.test_regressions import problems_with

from benchmarks import feature_table, probes
from benchmarks.features import FREE_THREADED, LOOPS
from tests.apps.certificates import Certificates

ROOT = Path(__file__).resolve().parents[3]
ROWS, RESULT = feature_table.load()
HAS_GIL = not sysconfig.get_config_var("Py_GIL_DISABLED")
NEWER = {"eager_tasks": (3, 12), "call_graph": (3, 14)}  # the first Python version that has the feature, on any loop
# The first Python version in which asyncio's own loop has the feature. grapeshot has these features on every version.
ASYNCIO_HAS = {"all_errors": (3, 12), "close_clients": (3, 13), "keep_alive": (3, 13)}


# Each probe runs in a fork of a process that has imported everything, which is ten times faster than a new interpreter.
# After its probe, the fork leaves the `for` loop, and its interpreter exits in the normal way.
FORKING = """
import os, signal, sys
from pathlib import Path
from benchmarks import probes
from benchmarks._loops import loop_factory

folder, loop, *names = sys.argv[1:]
probes.certificate_folder = Path(folder)
every_probe, factory = probes.every_probe(), loop_factory(loop)
for name in names:
    if (pid := os.fork()) == 0:
        signal.alarm(30)
        every_probe[name](factory)
        break
    print(name, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
Outcomes = dict[str, tuple[str, str]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcomes]:
    """For each kind of loop, the exit status of each probe, with the standard error of all probes."""
    folder = tmp_path_factory.mktemp("certificate")
    certificates = Certificates(folder)
    (folder / "cert.pem").write_text(certificates.chain)
    (folder / "key.pem").write_text(certificates.key)
    found: dict[str, Outcomes] = {}
    for loop in ("asyncio", "grapeshot"):
        names = [name for name in probes.every_probe() if why_not_here(name, loop) is None]
        command = [sys.executable, "-c", FORKING, str(folder), loop, *names]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        statuses = (line.split() for line in done.stdout.splitlines())
        found[loop] = {name: (status, done.stderr) for name, status in statuses}
    return found


def why_not_here(name: str, loop: str) -> str | None:
    """Return why a probe cannot succeed with this interpreter, or None if it can."""
    if name == FREE_THREADED and HAS_GIL:
        return "the probe needs a free-threaded interpreter"
    if sys.version_info < NEWER.get(name, (3, 11)):
        return "this Python's asyncio does not have it"
    if loop == "asyncio" and sys.version_info < ASYNCIO_HAS.get(name, (3, 11)):
        return "asyncio has it only in a later version of Python"
    return None


@pytest.mark.parametrize("loop", ["asyncio", "grapeshot"])
@pytest.mark.parametrize("name", list(probes.every_probe()))
def test_a_probe_works_here(name: str, loop: str, outcomes: dict[str, Outcomes]) -> None:
    if (reason := why_not_here(name, loop)) is not None:
        pytest.skip(reason)
    status, errors = outcomes[loop][name]
    assert status == "0", errors


def test_every_probe_is_a_row() -> None:
    assert sorted(row["probe"] for row in ROWS["row"]) == sorted(probes.every_probe())
    assert {row["probe"] for row in ROWS["row"]} == RESULT["outcomes"].keys()
    assert all(outcomes.keys() == set(LOOPS) for outcomes in RESULT["outcomes"].values())


def test_grapeshot_has_all_features() -> None:
    assert {name: outcomes["grapeshot"] for name, outcomes in RESULT["outcomes"].items() if outcomes["grapeshot"]} == {}


def test_every_row_has_tests_that_exist() -> None:
    assert [row["title"] for row in ROWS["row"] if not row["tests"]] == []
    assert [problem for row in ROWS["row"] for test in row["tests"] for problem in problems_with(test)] == []


def test_features_without_a_probe_have_a_source() -> None:
    for row in ROWS["known"]:
        assert all(len(row[loop]) == 2 and row[loop][1] for loop in LOOPS)


def test_the_pages_match_the_outcomes() -> None:
    """The pages are what `make tables` writes. Run it after the outcomes have changed."""
    for path, text in feature_table.expected().items():
        assert path.exists(), f"{path.name} is not written yet"
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is not what the JSON says"
