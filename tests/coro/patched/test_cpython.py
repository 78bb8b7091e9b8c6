"""Run CPython's own test modules, "patched" and "plain".

"Patched" means with `python -m grapeshot.coro`, inside a coro, and "plain" means with `python`.

EXCEPTIONS lists the tests that do not pass patched, with a reason each. Tests in this list that would never end are
not run. The other ones are run, and if one of them passes, it must be removed from the list.

TEST_CPYTHON=all, which .ci/matrix sets, runs every module both plain and patched and compares all outcomes. In this
mode, a test that passes plain must not be skipped when the module runs patched. Without the variable, as in .ci/run,
only the modules of `QUICK` run. They run patched; a module with a failed test also runs plain, to see whether the test
passes plain.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import coro_is_available

pytest.importorskip("test.support")
pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

SUBJECT = Path(__file__).with_name("cpython_subject.py")
LIMIT_S = 360
RUNS_ALL = os.environ.get("TEST_CPYTHON") == "all"


class LeftOut(NamedTuple):
    """The reason why a test does not pass patched."""

    reason: str
    # False for a test that would not end.
    is_run: bool = True


NONBLOCKING = LeftOut("the test looks at the flag O_NONBLOCK, which patched sockets set even without a timeout")
NATIVE = LeftOut("to the system, all coros of a thread are one thread, with one id and one name")
PREEMPTION = LeftOut(
    "a thread computes in a loop, without ever waiting, until another thread has run: coros are not preempted",
    is_run=False,
)

# module -> the tests that do not pass. Not every version of Python has all of them.
EXCEPTIONS: dict[str, dict[str, LeftOut]] = {
    "test_logging": {
        "RotatingFileHandlerTest.test_should_not_rollover_named_pipe": LeftOut(
            "open() of a named pipe blocks the thread until somebody opens the other end", is_run=False
        ),
    },
    "test_socket": {
        "GeneralModuleTests.testRefCountGetNameInfo": LeftOut(
            "the patched function is written in Python, so the traceback of its error keeps the arguments alive"
        ),
        "NonBlockingTCPTests.testSetBlocking": NONBLOCKING,
        **({"NonBlockingTCPTests.testSetBlocking_overflow": NONBLOCKING} if sys.version_info < (3, 12) else {}),
        "NonblockConstantTest.test_SOCK_NONBLOCK": NONBLOCKING,
    },
    "test_threading": {
        "ThreadTests.test_PyThreadState_SetAsyncExc": LeftOut(
            "PyThreadState_SetAsyncExc takes the ident of a real thread, but a patched thread is a coro", is_run=False
        ),
        "InterruptMainTests.test_can_interrupt_tight_loops": PREEMPTION,
        # The next three exist up to 3.12, where threading has no thread handles.
        "ThreadTests.test_disallow_instantiation": LeftOut(
            "the type of grapeshot's lock can be called in every version; the type of CPython's lock from 3.13 on"
        ),
        "ThreadTests.test_shutdown_locks": LeftOut(
            "the program's first coro, and not threading, waits at the exit for threads that are coros", is_run=False
        ),
        "ThreadTests.test_tstate_lock": LeftOut(
            "_tstate_lock.acquire() only waits until the thread has ended, and does not acquire the lock"
        ),
        "MiscTestCase.test_change_name": NATIVE,
        "MiscTestCase.test_set_name": NATIVE,
        "ThreadTests.test_various_ops": NATIVE,
        "ThreadTests.test_various_ops_large_stack": NATIVE,
        "ThreadTests.test_various_ops_small_stack": NATIVE,
    },
    "test_signal": {
        "StressTest.test_stress_modifying_handlers": PREEMPTION,
    },
}

MODULES = [
    "test_concurrent_futures",
    "test_concurrent_futures as coros",
    "test_epoll",
    "test_ftplib",
    "test_httplib",
    "test_imaplib",
    "test_logging",
    "test_poll",
    "test_poplib",
    "test_queue",
    "test_select",
    "test_selectors",
    "test_signal",
    "test_smtplib",
    "test_socket",
    "test_socketserver",
    "test_ssl",
    "test_subprocess",
    "test_thread",
    "test_threading",
    "test_threading_local",
    "test_time",
    "test_timeout",
    "test_urllib2",
    "test_urllib2_localnet",
    "test_wsgiref",
    "test_xmlrpc",
]

# Together these modules need five seconds of CPU time, and twenty seconds from start to end.
QUICK = {
    "test_epoll",
    "test_httplib",
    "test_poll",
    "test_select",
    "test_smtplib",
    "test_socketserver",
    "test_thread",
    "test_threading_local",
    "test_time",
    "test_timeout",
    "test_urllib2",
    "test_urllib2_localnet",
    "test_wsgiref",
    "test_xmlrpc",
}

# Leave out the tests of process pools, which are not about threads, and the test of VSOCK: where VSOCK exists without a
# hypervisor, that test hangs even when it runs plain.
WITHOUT = {"test_concurrent_futures": "Process", "test_socket": "ThreadedVSOCK"}


# module -> its outcome when it runs plain. A module may run patched several times: with and without executors as coros
# (see `MODULES`), and once for each value of TEST_EVICTION (conftest.py). It need not run plain again each time.
plain_outcomes: dict[str, dict[str, Any]] = {}


def run(module: str, directory: Path, *, is_patched: bool, skipped: list[str]) -> dict[str, Any]:
    name, _, kind = module.partition(" ")
    path = directory / "outcome.json"
    arguments = [str(SUBJECT), name, str(path)]
    if name in WITHOUT:
        arguments += ["--without", WITHOUT[name]]
    if kind and is_patched:
        arguments += ["--futures"]
    done = subprocess.run(
        [sys.executable, *(("-m", "grapeshot.coro") if is_patched else ()), *arguments, "--skip", *skipped],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    outcome: dict[str, Any] = json.loads(path.read_text())
    assert len(outcome["passed"]) > len(outcome["skipped"])
    return outcome


@pytest.mark.parametrize("module", MODULES)
def test_module(module, tmp_path, record_property):
    if not RUNS_ALL and module not in QUICK:
        pytest.skip("only with TEST_CPYTHON=all")
    name = module.partition(" ")[0]
    if importlib.util.find_spec(f"test.{name}") is None:
        pytest.skip(f"{sys.executable} was installed without test.{name}")
    exceptions = EXCEPTIONS.get(name, {})
    hanging = [name for name, why in exceptions.items() if not why.is_run]
    patched = run(module, tmp_path, is_patched=True, skipped=hanging)
    problems = {name: text for name, text in patched["bad"].items() if name not in exceptions}
    if RUNS_ALL or problems:
        if name not in plain_outcomes:
            plain_outcomes[name] = run(module, tmp_path, is_patched=False, skipped=[])
        plain = plain_outcomes[name]
        problems = {name: text for name, text in problems.items() if name not in plain["bad"]}
        for name in {*plain["passed"]} - {*patched["passed"], *patched["bad"], *exceptions}:
            problems[name] = "it was not run patched"
        record_property("passed plain", len(plain["passed"]))
    for name in exceptions.keys() & {*patched["passed"]}:
        problems[name] = "it passes, so remove it from the exceptions"
    record_property("passed patched", len(patched["passed"]))
    record_property("exceptions", len(patched["left_out"]) + len(exceptions.keys() & patched["bad"].keys()))
    assert not problems, "\n".join(f"{name}\n{text}" for name, text in problems.items())
