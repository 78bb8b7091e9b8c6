"""preexec_fn runs Python code in the child between fork and exec, and does not block the loop (uvloop #118)."""

from __future__ import annotations

import asyncio
import contextvars
import os
import subprocess
import sys

import pytest
from process.children import BLOCKED, has_children, sh
from support import run_script, until

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")

PIPE = subprocess.PIPE


@pytest.fixture(autouse=True)
def _the_helper_threads_are_there(loop_kind):
    """Start grapeshot's helper threads before the test. They run until the process ends. tests/leftovers.py knows this,
    and does not count them as left behind.
    """
    if loop_kind != "grapeshot":
        return
    from grapeshot._loop import subprocess as _subprocess

    threads = _subprocess._starter_threads()
    for _ in range(3):
        barrier = [threads.submit(os.getpid) for _ in range(16)]
        assert {done.result() for done in barrier} == {os.getpid()}


@pytest.mark.xfail_on(uvloop="it runs preexec_fn before the redirections")
async def test_preexec_fn_runs_in_the_child(loop):
    process = await asyncio.create_subprocess_exec(
        *sh("echo program"), stdout=PIPE, preexec_fn=lambda: os.write(1, b"before the ")
    )
    assert await process.communicate() == (b"before the program\n", None)


@pytest.mark.xfail_on(uvloop="it runs preexec_fn before the redirections")
async def test_preexec_fn_sees_the_context_of_the_start(loop):
    variable = contextvars.ContextVar("variable", default="outside")
    variable.set("inside")
    process = await asyncio.create_subprocess_exec(
        *sh(":"), stdout=PIPE, preexec_fn=lambda: os.write(1, variable.get().encode())
    )
    assert await process.communicate() == (b"inside", None)


@pytest.mark.skip_on(uvloop="it leaves the child behind")
async def test_an_error_in_preexec_fn_is_an_error_of_the_start(loop):
    def fail():
        raise KeyError("in the child")

    with pytest.raises(subprocess.SubprocessError, match="preexec_fn"):
        await asyncio.create_subprocess_exec(*sh("echo never"), preexec_fn=fail)


@pytest.mark.skip_on(asyncio="it hangs, and so would the test", uvloop="#118")
async def test_the_loop_continues_while_preexec_fn_runs(loop):
    read_end, write_end = os.pipe()
    starting = loop.create_task(
        asyncio.create_subprocess_exec(*sh("exit 3"), preexec_fn=lambda: os.read(read_end, 1), pass_fds=(read_end,))
    )
    for _ in range(20):
        await asyncio.sleep(0.0005)
    assert not starting.done()
    os.write(write_end, b"x")
    process = await starting
    assert await process.wait() == 3
    os.close(read_end)
    os.close(write_end)


@pytest.mark.skip_on(asyncio="it hangs, and so would the test", uvloop="#118")
@pytest.mark.parametrize("is_late", [False, True])
async def test_cancelled_while_preexec_fn_runs(loop, is_late):
    read_end, write_end = os.pipe()
    starting = loop.create_task(
        asyncio.create_subprocess_exec(*BLOCKED, preexec_fn=lambda: os.read(read_end, 1), stdin=PIPE, stdout=PIPE)
    )
    await until(has_children)
    if is_late:
        os.write(write_end, b"x")
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    if not is_late:
        os.write(write_end, b"x")
    await until(lambda: not has_children())
    os.close(read_end)
    os.close(write_end)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has prctl(2)")
def test_the_parents_death_signal_does_not_come_early(loop_kind):
    """With PR_SET_PDEATHSIG, the kernel kills the child as soon as the thread that started the child ends. So this
    thread must keep running.
    """
    out = run_script(
        loop_kind,
        """
        import asyncio, ctypes, signal, subprocess
        libc = ctypes.CDLL(None)
        loop = new_event_loop()
        async def main():
            process = await asyncio.create_subprocess_exec(
                "/bin/sh", "-c", "read line; exit 7", stdin=subprocess.PIPE,
                preexec_fn=lambda: libc.prctl(1, signal.SIGKILL))
            await loop.shutdown_default_executor()
            await asyncio.sleep(0.005)
            await process.communicate(b"line")
            print(process.returncode)
        loop.run_until_complete(main())
        loop.close()
        """,
        flags=("-W", "ignore"),
    )
    assert out.strip() == "7"


def test_after_a_fork_of_the_program(loop_kind):
    out = run_script(
        loop_kind,
        """
        import asyncio, os, sys
        def spawn():
            async def main():
                process = await asyncio.create_subprocess_exec("/bin/sh", "-c", "exit 4", preexec_fn=lambda: None)
                return await process.wait()
            loop = new_event_loop()
            try:
                return loop.run_until_complete(main())
            finally:
                loop.close()
        assert spawn() == 4
        pid = os.fork()
        if pid == 0:
            os._exit(spawn())
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        """,
        flags=("-W", "ignore"),
    )
    assert out.strip() == "4"
