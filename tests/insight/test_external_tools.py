"""What external tools show of running and of suspended coros, as the table in docs/insight.md says."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
from support import Script, coro_is_available

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

PROGRAM = """
    import asyncio, faulthandler, signal, sys, threading
    import grapeshot
    from grapeshot import coro

    faulthandler.register(signal.SIGUSR1)

    def sleep_suspended():
        coro.sleep_relative(1000)

    def run_here():
        print("paused", flush=True)
        sys.stdin.readline()
        frames = []
        frame = sys._current_frames()[threading.get_ident()]
        while frame is not None:
            frames.append(frame.f_code.co_name)
            frame = frame.f_back
        print(" ".join(frames), flush=True)
        print(sorted(task.get_name() for task in asyncio.all_tasks()), flush=True)
        sys.stdin.readline()

    async def wait_in_task():
        await asyncio.sleep(1000)

    async def main():
        task = asyncio.create_task(wait_in_task(), name="idle task")
        asleep = coro.spawn(sleep_suspended, name="suspended coro")
        await coro.spawn(run_here, name="running coro")
        asleep.shutdown()
        task.cancel()

    grapeshot.run(main())
"""


@pytest.fixture
def program():
    with Script("grapeshot", PROGRAM) as script:
        assert script.line() == "paused"
        script.wait_blocked()
        yield script


def go_on(script):
    for _ in range(2):
        script.process.stdin.write("\n")
    script.process.stdin.flush()


def output_of(*command):
    environment = {**os.environ, "PYTHON_COLORS": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    if done.returncode:
        pytest.skip(f"NOT TESTED: this system does not let a process look into another: {done.stderr[-200:]}")
    return done.stdout


@pytest.mark.skipif(sys.version_info < (3, 14), reason="sys.remote_exec is new in 3.14")
def test_a_script_run_by_remote_exec_shows_all_coros_and_tasks(program, tmp_path):
    probe = tmp_path / "probe.py"
    probe.write_text("import grapeshot\nprint(grapeshot.insight.tree(), flush=True)\nprint('looked', flush=True)\n")
    try:
        sys.remote_exec(program.process.pid, os.fspath(probe))
    except (PermissionError, RuntimeError) as exc:
        pytest.skip(f"NOT TESTED: this system does not let a process look into another: {exc}")
    go_on(program)
    lines = []
    while (line := program.line()) != "looked":
        lines.append(line)
    assert any(line.startswith("coro 'suspended coro' sleeps for another") for line in lines)
    assert any(line.endswith("in sleep_suspended") for line in lines)
    assert "coro 'running coro' runs" in lines
    assert any(line.startswith("task 'idle task' waits for a timer") for line in lines)


def test_faulthandler_shows_the_coro_that_runs(program):
    program.process.send_signal(signal.SIGUSR1)
    while "run_here" not in (line := program.process.stderr.readline()):
        assert "sleep_suspended" not in line
    go_on(program)
    _, rest = program.process.communicate(timeout=30)
    assert "sleep_suspended" not in rest


def test_current_frames_have_the_running_coro_and_all_tasks_has_every_task_and_coro(program):
    go_on(program)
    frames = program.line().split()
    assert frames == ["run_here"]
    names = program.line()
    for name in ("idle task", "suspended coro", "running coro"):
        assert f"'{name}'" in names


@pytest.mark.skipif(shutil.which("py-spy") is None, reason="NOT TESTED: py-spy is not installed")
def test_py_spy_shows_the_coro_that_runs(program):
    output = output_of("py-spy", "dump", "--pid", str(program.process.pid))
    functions = re.findall(r"^ +(\w+) \(", output, re.MULTILINE)
    assert "run_here" in functions
    assert "sleep_suspended" not in functions
