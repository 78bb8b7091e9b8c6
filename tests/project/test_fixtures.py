"""The fixtures of all tests: a test that hangs does not stop the others, and a test that leaves things behind fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

from project.markdown import ROOT


def run_pytest(tmp_path: Path, code: str, *options: str, grace_s: str = "60") -> dict[str, set[str]]:
    """Run the tests in `code`. Return their names by outcome, as in pytest's short summary."""
    (tmp_path / "test_sample.py").write_text(textwrap.dedent(code), encoding="utf-8")
    place = os.pathsep.join([str(ROOT / "tests"), str(ROOT)])
    where = ["-c", str(ROOT / "pyproject.toml"), f"--rootdir={tmp_path}", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "conftest", *options, *where],
        env={**os.environ, "PYTHONPATH": place, "TEST_CAP_S": "1", "TEST_AGAIN_S": "1", "TEST_GRACE_S": grace_s},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    outcomes: dict[str, set[str]] = {}
    for line in done.stdout.partition("short test summary info")[2].splitlines():
        outcome, _, rest = line.partition(" ")
        if "::" in rest:
            outcomes.setdefault(outcome, set()).add(rest.partition("::")[2].partition(" ")[0])
    assert outcomes, done.stdout + done.stderr
    return outcomes


HANGING = """
    import threading
    import time

    import pytest

    pytestmark = pytest.mark.watchdog(0.5)

    @pytest.fixture
    def hangs_before():
        threading.Event().wait()

    @pytest.fixture
    def hangs_after():
        yield
        threading.Event().wait()

    @pytest.fixture
    def hangs_after_too():
        yield
        threading.Event().wait()

    def test_body():
        threading.Event().wait()

    def test_body_and_handler(hangs_after):
        try:
            threading.Event().wait()
        finally:
            threading.Event().wait()

    def test_setup(hangs_before):
        pass

    def test_teardown(hangs_after, hangs_after_too):
        pass

    def test_others_run():
        pass
"""


def test_a_test_that_hangs_fails_alone(tmp_path):
    outcomes = run_pytest(tmp_path, HANGING)
    assert outcomes["FAILED"] == {"test_body", "test_body_and_handler"}
    assert outcomes["ERROR"] == {"test_body_and_handler", "test_setup", "test_teardown"}
    assert outcomes["PASSED"] == {"test_teardown", "test_others_run"}


def test_a_test_that_no_signal_interrupts_ends_only_its_process(tmp_path):
    outcomes = run_pytest(
        tmp_path,
        """
        import signal
        import threading

        import pytest

        @pytest.mark.watchdog(0.5)
        def test_deaf():
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
            threading.Event().wait()

        @pytest.mark.parametrize("number", range(5))
        def test_others_run(number):
            pass
        """,
        *("-n", "1", "--dist", "loadfile"),
        grace_s="1",
    )
    assert outcomes["FAILED"] == {"test_deaf"}
    assert len(outcomes["PASSED"]) == 5


LEAVING = """
    import json
    import os
    import signal
    import socket
    import subprocess
    import sys
    import threading
    import time
    import types

    import grapeshot

    kept = []
    pair = socket.socketpair()
    pair[0].setblocking(False)

    def test_thread():
        thread = threading.Thread(target=threading.Event().wait, daemon=True, name="left")
        thread.start()
        kept.append(thread)

    def test_descriptor():
        kept.append(os.open(os.devnull, os.O_RDONLY))

    def test_child():
        kept.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))

    def test_patch():
        time.sleep = lambda seconds: None

    def test_attribute():
        socket.has_ipv6 = None

    def test_module():
        sys.modules["json"] = types.ModuleType("json")

    def test_absent_module():
        del sys.modules["json"]

    def test_policy():
        grapeshot.install()

    def test_wakeup_fd():
        signal.set_wakeup_fd(pair[0].fileno())

    def test_closed_wakeup_fd():
        with socket.socket() as sock:
            sock.setblocking(False)
            signal.set_wakeup_fd(sock.fileno())

    def test_signal_handler():
        signal.signal(signal.SIGUSR1, lambda *_args: None)

    def test_environment():
        os.environ["GRAPESHOT_DEBUG"] = "1"

    def test_settings():
        sys.setrecursionlimit(sys.getrecursionlimit() + 1)
        socket.setdefaulttimeout(1)

    def test_nothing(monkeypatch, tmp_path):
        monkeypatch.setattr(time, "sleep", None)
        monkeypatch.setenv("GRAPESHOT_DEBUG", "1")
        monkeypatch.chdir(tmp_path)
        thread = threading.Thread(target=threading.Event().wait, args=(0.1,))
        thread.start()
"""


def test_a_test_that_leaves_something_behind_has_an_error(tmp_path):
    outcomes = run_pytest(tmp_path, LEAVING)
    everything = set(re.findall(r"def (test_\w+)", LEAVING))
    assert outcomes["ERROR"] == everything - {"test_nothing"}
    assert outcomes["PASSED"] == everything
