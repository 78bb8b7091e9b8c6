"""gevent's own tests, from its installed package, on a grapeshot loop.

Each test module runs in a process of its own. A test may fail only if it also fails on one of gevent's own
loops, if the module crashes or hangs there, or if ``DIFFERENT`` lists the test. By default some modules run. With
``TEST_GEVENT=all`` (as in `.ci/matrix`) all modules run, except those in ``DIFFERENT_SCRIPTS``.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import gil_is_enabled

SPEC = importlib.util.find_spec("gevent")
pytestmark = [
    pytest.mark.skipif(not gil_is_enabled(), reason="gevent declares that it needs the GIL"),
    pytest.mark.skipif(SPEC is None, reason="gevent is not installed"),
    pytest.mark.watchdog(900),
]
FOLDER = Path(SPEC.origin).parent / "tests" if SPEC is not None and SPEC.origin else Path()
ALL = sorted(path.stem for path in FOLDER.glob("test__*.py"))
SOME = [
    *("test__core", "test__core_async", "test__core_callback", "test__core_fork", "test__core_loop_run"),
    *("test__core_watcher", "test__destroy", "test__event", "test__hub", "test__issue600", "test__loop_callback"),
    *("test__order", "test__os", "test__select", "test__selectors", "test__server", "test__signal"),
    *("test__monkey_sigchld", "test__socket_close", "test__subprocess_poll", "test__systemerror"),
]
# module -> tests that pass on gevent's own loops, with the reason why they do not pass here
DIFFERENT = {
    "test__hub": {
        "test_kill_removes_trace": "the loop sets a trace function, which gives each greenlet its own running loop",
    },
    "test__select": {
        "test_closing_object_while_polling": "the descriptor is polled once more before it is closed",
    },
}
# Modules that are not run. Each is a single script, and one of its lines fails on a grapeshot loop. The script would
# stop at that line.
DIFFERENT_SCRIPTS = {"test__environ": "expects the name of one of libev's or libuv's backends in `loop.backend`"}
LIMIT_S = 240


def failures(module: str, loop: str) -> set[str] | None:
    """Run a module; return the names of the tests that failed, or None if the process failed in another way."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", f"gevent.tests.{module}"],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "GEVENT_LOOP": loop, "PYTHONWARNINGS": "ignore"},
        )
    except subprocess.TimeoutExpired:
        return None
    print(f"--- {module} on {loop}\n{done.stdout}\n{done.stderr}")
    if done.returncode == 0:
        return set()
    failed = set(re.findall(r"^(?:FAIL|ERROR): (\w+)", done.stderr + done.stdout, re.MULTILINE))
    return failed or None


@pytest.mark.parametrize("module", ALL if os.environ.get("TEST_GEVENT") == "all" else SOME)
def test_module(module: str) -> None:
    if module in DIFFERENT_SCRIPTS:
        pytest.skip(DIFFERENT_SCRIPTS[module])
    ours = failures(module, "grapeshot.gevent.Loop")
    if ours is not None:
        ours -= DIFFERENT.get(module, {}).keys()
    if not ours and ours is not None:
        return
    for loop in ("libev-cext", "libuv-cffi"):
        theirs = failures(module, loop)
        if theirs is None or (ours is not None and ours <= theirs):
            return
    pytest.fail(f"fails only on grapeshot: {'the process' if ours is None else sorted(ours)}")
