"""Programs under `python -m grapeshot.coro`: threads, asyncio and signals.

The other tests of this command are in tests/start/test_program.py.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from support import coro_is_available

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter"),
]

WAYS = ((), ("-m", "grapeshot.coro"))


def run(way, *arguments, cwd=None):
    return subprocess.run(
        [sys.executable, *way, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False, cwd=cwd
    )


def run_both(*arguments, cwd=None):
    """Run a program without and with `-m grapeshot.coro`, check that the outcomes are equal, and return the second."""
    plain, patched = (run(way, *arguments, cwd=cwd) for way in WAYS)
    assert patched.returncode == plain.returncode, patched.stderr
    assert patched.stdout == plain.stdout
    assert patched.stderr == plain.stderr
    return patched


@pytest.fixture
def script(tmp_path):
    def write(code, name="script.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(code))
        return path

    return write


def test_the_main_thread_is_listed_once(script):
    path = script(
        """
        import threading
        print(threading.active_count(), [thread.name for thread in threading.enumerate()])
        start = threading.Barrier(2)
        thread = threading.Thread(target=start.wait, name="other")
        thread.start()
        print(threading.active_count(), sorted(thread.name for thread in threading.enumerate()))
        start.wait()
        thread.join()
        print(threading.active_count())
        """
    )
    assert run_both(path).stdout == "1 ['MainThread']\n2 ['MainThread', 'other']\n1\n"


def test_asyncio_sees_no_running_loop(script):
    path = script(
        """
        import asyncio, threading
        async def main(text):
            await asyncio.sleep(0.01)
            return text
        def work():
            print(asyncio._get_running_loop(), asyncio.run(main("thread")))
        print(asyncio._get_running_loop(), asyncio.run(main("main")))
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        """
    )
    assert run_both(path).stdout == "None main\nNone thread\n"


def test_waits_for_threads_that_are_not_daemons(script):
    path = script(
        """
        import threading, time, sys
        printed = threading.Event()
        def late():
            printed.wait()
            time.sleep(0.05)
            print("late")
        threading.Thread(target=late).start()
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        print("end")
        printed.set()
        sys.exit(3)
        """
    )
    assert run_both(path).stdout == "end\nlate\n"


@pytest.mark.parametrize(
    "code",
    [
        "interrupt(); time.sleep(60)",
        """
        try:
            interrupt()
            threading.Event().wait()
        except KeyboardInterrupt:
            print("caught")
        time.sleep(0.01)
        sys.exit(4)
        """,
        """
        threading.Timer(0.05, interrupt).start()
        try:
            socket.create_server(("127.0.0.1", 0)).accept()
        finally:
            print("finally")
        """,
        "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)",
    ],
    ids=["sleep", "caught", "accept", "term"],
)
def test_signals_reach_the_program(script, code):
    head = """
import os, signal, socket, sys, threading, time, warnings
warnings.simplefilter("ignore")
def interrupt():
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
"""
    path = script(head + textwrap.dedent(code))
    try:
        plain = run(WAYS[0], path)
    except subprocess.TimeoutExpired:
        # CPython does not notice a signal that arrives just before the main thread starts to wait for a lock.
        plain = run(WAYS[0], path)
    patched = run(WAYS[1], path)
    assert (patched.returncode, patched.stdout) == (plain.returncode, plain.stdout), patched.stderr
    assert patched.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:]


def test_usage():
    done = run(WAYS[1])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: python -m grapeshot.coro [option] script.py")
    assert run(WAYS[1], "--help").stdout == done.stderr
    assert run(WAYS[1], "-m").returncode == 2
    wrong = run(WAYS[1], "--latency=3", "app.py")
    assert (wrong.returncode, wrong.stderr) == (2, f"{done.stderr}error: unknown option: --latency=3\n")
