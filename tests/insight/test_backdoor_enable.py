"""`backdoor.enable`: no back door is open until a signal or an environment variable asks for one."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest
from insight.callers import call
from support import Script, coro_is_available, until, wait_blocked, wait_until

import grapeshot
from grapeshot._loop import hooks
from grapeshot.insight import backdoor

pytestmark = pytest.mark.usefixtures("tasks")


@pytest.fixture(autouse=True)
def untouched():
    handler = signal.getsignal(signal.SIGUSR2)
    yield
    assert signal.getsignal(signal.SIGUSR2) == handler
    assert hooks.on_run is None


async def test_a_signal_opens_the_back_door(loop, path, caplog):
    with backdoor.enable(path) as switch:
        await asyncio.sleep(0.001)
        assert not path.exists()
        assert switch.server is None
        for _ in range(2):  # a second signal changes nothing
            os.kill(os.getpid(), signal.SIGUSR2)
            await until(path.exists, "the back door to open")
            with await call(path) as caller:
                assert await caller.ask("1 + 1") == "2\n"
        assert caplog.text.count("is open") == 1
    assert not path.exists()


async def test_a_signal_reaches_a_loop_that_sleeps(loop, path):
    """The loop sleeps in the kernel when another process sends the signal."""
    with backdoor.enable(path, signum=signal.SIGUSR1):
        child = await asyncio.create_subprocess_exec("/bin/sh", "-c", f"kill -USR1 {os.getpid()}")
        await child.wait()
        await until(path.exists, "the back door to open")


async def test_a_variable_opens_the_back_door(loop, path, monkeypatch):
    monkeypatch.setenv("GRAPESHOT_BACKDOOR", "1")
    with backdoor.enable(path, namespace={"answer": 42}), await call(path) as caller:
        assert await caller.ask("answer") == "42\n"
    assert not path.exists()


async def test_a_variable_may_name_the_path_or_say_no(loop, path, monkeypatch):
    other = path.parent / "other.bd"
    monkeypatch.setenv("MY_DOOR", str(other))
    with backdoor.enable(path, signum=None, variable="MY_DOOR"):
        assert other.exists()
        assert not path.exists()
    for value in ("", "0"):
        monkeypatch.setenv("MY_DOOR", value)
        with backdoor.enable(path, signum=None, variable="MY_DOOR"):
            assert os.listdir(path.parent) == []


def test_a_signal_that_the_program_handles_is_refused(path):
    signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        with pytest.raises(ValueError, match="the program has a handler for SIGUSR2"):
            backdoor.enable(path)
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


async def test_errors_are_logged(loop, path, caplog, monkeypatch):
    monkeypatch.setenv("GRAPESHOT_BACKDOOR", "1")
    path.write_text("precious")
    with backdoor.enable(path) as switch:
        assert switch.server is None
    assert "the back door cannot be opened: " in caplog.text
    assert "not a socket already exists there" in caplog.text
    assert path.read_text() == "precious"


def test_called_before_a_loop_runs(path, monkeypatch):
    """The back door opens with the next grapeshot loop, and again with the loop after that."""

    async def main():
        await until(path.exists, "the back door to open")
        with await call(path) as caller:
            return await caller.ask("1 + 1")

    monkeypatch.setenv("GRAPESHOT_BACKDOOR", "1")
    with backdoor.enable(path):
        assert not path.exists()
        for _ in range(2):
            assert grapeshot.run(main()) == "2\n"
            assert not path.exists()


def test_a_signal_before_a_loop_runs(path):
    async def main():
        await until(path.exists, "the back door to open")

    with backdoor.enable(path):
        os.kill(os.getpid(), signal.SIGUSR2)
        grapeshot.run(main())


@pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
def test_in_a_patched_program(path):
    """A program of threads and blocking calls needs only one call of enable(). Later a signal opens the back door."""
    code = f"""
        from grapeshot.insight import backdoor
        backdoor.enable({os.fspath(path)!r})
        import runpy, sys, time, threading
        sys.argv = ["coro", "-c", '''if True:
            import threading, time
            def work():
                while True:
                    time.sleep(0.01)
            threading.Thread(target=work, daemon=True, name="worker").start()
            print("runs", flush=True)
            input()
        ''']
        runpy.run_module("grapeshot.coro", run_name="__main__", alter_sys=True)
    """
    with Script("grapeshot", code) as script:
        assert script.line() == "runs"
        script.process.send_signal(signal.SIGUSR2)
        wait_until(path.exists, "the back door to open")

        async def talk():
            with await call(path) as caller:
                text = await caller.ask("where('worker')")
                assert "in work\n" in text
                assert await caller.ask("import time; time.sleep(0.01); 'slept'") == "'slept'\n"

        asyncio.run(talk())
        script.process.stdin.write("\n")
        _, err = script.process.communicate(timeout=30)
        assert script.process.returncode == 0, err
        assert err.strip() == f"the back door {path} is open"
    assert not path.exists()


@pytest.mark.skipif(sys.version_info < (3, 14), reason="sys.remote_exec is new in 3.14")
@pytest.mark.parametrize("kind", ["asyncio", "grapeshot"])
@pytest.mark.parametrize("is_idle", [False, True], ids=["busy", "idle"])
def test_a_process_that_was_not_prepared(path, tmp_path, kind, is_idle):
    """The test injects a script into the process, as a debugger would. The script opens the back door.

    The interpreter runs the script before its next bytecode. A loop without events sleeps and runs no bytecode, so the
    test stops and continues the process, which ends the sleep.
    """
    probe = tmp_path / "open.py"
    probe.write_text(f"from grapeshot.insight import backdoor\nbackdoor.serve({os.fspath(path)!r})\n")
    code = f"""
        import asyncio
        async def tick():
            while True:
                await asyncio.sleep(0.01)
        async def main():
            ticker = None if {is_idle} else asyncio.create_task(tick())
            print("runs", flush=True)
            await asyncio.sleep(3600)
        loop = new_event_loop()
        loop.run_until_complete(main())
    """
    with Script(kind, code) as script:
        assert script.line() == "runs"
        if is_idle:
            wait_blocked(script.process.pid)
        try:
            sys.remote_exec(script.process.pid, os.fspath(probe))
        except (PermissionError, RuntimeError) as exc:
            pytest.skip(f"this system does not let a process look into another: {exc}")
        if is_idle:
            script.process.send_signal(signal.SIGSTOP)
            script.process.send_signal(signal.SIGCONT)
        wait_until(path.exists, "the back door to open")

        async def talk():
            with await call(path) as caller:
                return await caller.ask("tasks()")

        assert "task 'Task-1' waits for a timer" in asyncio.run(talk())
        script.process.kill()


def test_a_signal_serves_one_enable(path):
    with backdoor.enable(path):
        with pytest.raises(ValueError, match=r"another enable\(\) uses SIGUSR2"):
            backdoor.enable(path)
        backdoor.enable(path, signum=signal.SIGUSR1).close()
