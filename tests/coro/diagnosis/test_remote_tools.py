"""Coros in tools that run in another process: `asyncio ps` and `pstree`, the sampling profiler, `sys.remote_exec`.

`ps`, `pstree` and the profiler read the memory of the process that has the coros; `sys.remote_exec` makes that process
run a file. The profiler discards a chain of frames that does not end at the thread's base frame, so the chains of coros
must end there, too.
"""

from __future__ import annotations

import collections
import os
import re
import subprocess
import sys

import pytest
from support import Script, coro_is_available

pytestmark = [
    pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter"),
    pytest.mark.skipif(sys.version_info < (3, 14), reason="tools can attach to a process from 3.14 on"),
]
NEW_IN_3_15 = pytest.mark.skipif(sys.version_info < (3, 15), reason="profiling.sampling came with 3.15")
FORBIDDEN = "ermission|not permitted|not supported"

HEAD = """
    import asyncio, functools, sys
    import grapeshot
    from grapeshot import coro
"""

# Three coros are in calls that C code (`sorted`) has made. One of them blocks the process until the test writes a line.
PAUSED = (
    HEAD
    + """
    def inner(number):
        for _ in range(3):
            coro.yield_slice()
        if number == 1:
            print("paused", flush=True)
            sys.stdin.readline()
        coro.yield_slice()

    def outer(number):
        sorted([number], key=inner)

    async def waiting():
        await asyncio.sleep(1000)

    async def main():
        task = asyncio.create_task(waiting(), name="idle")
        for co in [coro.spawn(outer, number, name=name) for number, name in enumerate(["zero", "one", "two"])]:
            await co
        task.cancel()

    grapeshot.run(main())
"""
)


def look(*command):
    """Return the output of a tool."""
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHON_COLORS": "0"},
    )
    if done.returncode and re.search(FORBIDDEN, done.stdout + done.stderr):
        pytest.skip(f"this system does not let a process look into another: {(done.stdout + done.stderr)[-200:]}")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def go_on(script):
    """End the pause. The program must end as if nothing had happened."""
    script.process.stdin.write("\n")
    script.process.stdin.flush()
    assert script.finish() == ""


@pytest.mark.parametrize("command", ["ps", "pstree"])
def test_asyncio_shows_tasks_and_no_coros(command):
    with Script("grapeshot", PAUSED) as script:
        assert script.line() == "paused"
        script.wait_blocked()
        output = look("asyncio", command, script.process.pid)
        go_on(script)
    assert re.search(r"\bidle\b", output), output
    assert "waiting" in output
    assert not re.search(r"\b(zero|one|two)\b", output), output


@NEW_IN_3_15
def test_a_dump_shows_the_frames_of_the_running_coro():
    with Script("grapeshot", PAUSED) as script:
        assert script.line() == "paused"
        script.wait_blocked()
        output = look("profiling.sampling", "dump", script.process.pid)
        go_on(script)
    assert re.findall(r", in (\S+)", output)[-2:] == ["outer", "inner"], output


# Each coro calls different functions: a sample with functions of two coros would be wrong.
BUSY = (
    HEAD
    + """
    import textwrap, time
    SOURCE = textwrap.dedent('''
        def first_{n}(stop):
            while not stop():
                coro.yield_slice()
                second_{n}(3)

        def second_{n}(level):
            if level:
                sorted([level], key=third_{n})

        def third_{n}(level):
            second_{n}(level - 1)
            coro.yield_slice()
            sum(range(3000))
    ''')
    for number in range(4):
        exec(SOURCE.format(n=number))
    end = time.monotonic() + 3
    def stop():
        return time.monotonic() > end
    def main():
        for co in [coro.spawn(globals()[f"first_{number}"], stop) for number in range(4)]:
            co.join()
    coro.run(main)
"""
)


def kind(functions):
    """Return the numbers of the coros whose functions a sample contains."""
    return {name[-1] for name in functions if re.fullmatch(r"(first|second|third)_\d", name)}


@NEW_IN_3_15
def test_samples_do_not_mix_coros(tmp_path):
    """The process is stopped for each sample, so that the sample is consistent."""
    with Script("grapeshot", BUSY) as script:
        target = tmp_path / "samples"
        command = ["attach", "--blocking", "--collapsed", "-r", "500", "-d", "1", "-o", target, script.process.pid]
        output = look("profiling.sampling", *command)
        assert script.finish() == ""
    seen = collections.Counter()
    for line in target.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        functions = [entry.split(":")[-2].rpartition(".")[2] for entry in stack.split(";") if entry.count(":") >= 2]
        coros = kind(functions)
        assert len(coros) <= 1, line
        if coros:
            assert next(name for name in functions if kind([name])).startswith("first_"), line
            seen[coros.pop()] += int(count)
    assert set(seen) == set("0123"), (seen, output)


def test_code_of_another_process_runs_in_a_coro(tmp_path):
    """The process waits in a call that a coro has made. When the process continues, that coro runs the code."""
    probe = tmp_path / "probe.py"
    probe.write_text(
        "import sys\n"
        "from grapeshot import coro\n"
        "names, frame = [], sys._getframe(1)\n"
        "while frame is not None:\n"
        "    names.append(frame.f_code.co_name)\n"
        "    frame = frame.f_back\n"
        "print(names[-1], coro.current().name)\n"
        "coro.yield_slice()\n"
        "print('looked')\n"
    )
    with Script("grapeshot", PAUSED) as script:
        assert script.line() == "paused"
        script.wait_blocked()
        try:
            sys.remote_exec(script.process.pid, os.fspath(probe))
        except (PermissionError, RuntimeError) as exc:
            pytest.skip(f"this system does not let a process look into another: {exc}")
        script.process.stdin.write("\n")
        assert script.finish() == "outer one\nlooked\n"
