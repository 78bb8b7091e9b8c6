"""`coro.waitpid`: the end of child processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from support import coro_is_available, in_thread, run_script, until_waiting

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro


class Child:
    """A process that ends with `code` when it is told to."""

    def __init__(self, code=0):
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", f"import sys; sys.stdin.read(); sys.exit({code})"], stdin=subprocess.PIPE
        )
        self.pid = self.process.pid

    def end(self):
        self.process.stdin.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()
        # The test has fetched the status, so Popen finds no status.
        self.process.wait()


def test_the_status_of_a_child():
    def main():
        with Child(7) as child, Child() as killed:
            assert coro.waitpid(child.pid, os.WNOHANG) == (0, 0)
            waiting = coro.spawn(coro.waitpid, child.pid)
            other = coro.spawn(coro.waitpid, killed.pid)
            until_waiting(waiting, other)
            child.end()
            pid, status = waiting.join()
            assert (pid, os.waitstatus_to_exitcode(status)) == (child.pid, 7)
            killed.process.send_signal(signal.SIGKILL)
            assert other.join() == (killed.pid, signal.SIGKILL)

    coro.run(main)


@pytest.mark.parametrize("patch", ["", "coro.patch()"])
def test_a_python_without_pidfd_open(patch):
    """CPython has no `os.pidfd_open` if it was built with the headers of an old kernel."""
    code = f"""
        import os, subprocess, sys
        if hasattr(os, "pidfd_open"):
            del os.pidfd_open
        from grapeshot import coro
        {patch}

        def main():
            command = [sys.executable, "-S", "-c", "import sys; sys.stdin.read(); sys.exit(7)"]
            child = subprocess.Popen(command, stdin=subprocess.PIPE)
            waiting = coro.spawn((os if {bool(patch)} else coro).waitpid, child.pid, 0)
            coro.sleep_relative(0.01)
            child.stdin.close()
            print(waiting.join() == (child.pid, 7 << 8))

        coro.run(main)
    """
    assert run_script(None, code, flags=("-W", "ignore")) == "True\n"


def test_a_child_that_has_ended():
    def main():
        with Child(3) as child:
            child.end()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            assert coro.waitpid(child.pid) == (child.pid, 3 << 8)

    coro.run(main)


def test_many_children():
    def main():
        children = [Child(number) for number in range(12)]
        waiting = [coro.spawn(coro.waitpid, child.pid) for child in children]
        until_waiting(*waiting)
        for child in reversed(children):
            child.end()
        for number, (child, co) in enumerate(zip(children, waiting, strict=True)):
            assert co.join() == (child.pid, number << 8)
            child.__exit__()

    coro.run(main)


def test_a_process_that_is_not_a_child():
    def main():
        for call in (
            lambda: coro.waitpid(os.getpid()),
            lambda: coro.waitpid(1),
            lambda: coro.waitpid(2**22 + 5),
        ):
            with pytest.raises(ChildProcessError):
                call()

    coro.run(main)


def test_waiting_for_any_child_without_children():
    """The call is made in a new process, because this process may still have children of earlier tests, such as helper
    processes of the standard library.
    """
    code = """
        from grapeshot import coro

        def main():
            try:
                coro.waitpid(-1)
            except ChildProcessError:
                print("none")

        coro.run(main)
    """
    assert run_script(None, code) == "none\n"


def test_a_child_that_somebody_else_has_waited_for():
    def main():
        with Child() as child:
            waiting = coro.spawn(coro.waitpid, child.pid)
            until_waiting(waiting)
            child.end()
            # `os.waitpid` blocks the thread until it has fetched the status, so the coro cannot fetch the status first.
            assert os.waitpid(child.pid, 0) == (child.pid, 0)
            with pytest.raises(ChildProcessError):
                waiting.join()
            with pytest.raises(ChildProcessError):
                coro.waitpid(child.pid)

    coro.run(main)


def test_only_one_of_several_gets_the_status():
    def main():
        with Child(1) as child:
            waiting = [coro.spawn(coro.waitpid, child.pid) for _ in range(3)]
            until_waiting(*waiting)
            child.end()
            coro.wait(waiting)
            failures = [co.exception() for co in waiting]
            assert [type(exc) for exc in failures].count(ChildProcessError) == 2
            assert [co.result() for co in waiting if co.exception() is None] == [(child.pid, 1 << 8)]

    coro.run(main)


def test_a_wait_that_is_interrupted_leaves_the_status():
    def main():
        with Child(5) as child:
            waiting = coro.spawn(coro.waitpid, child.pid)
            until_waiting(waiting)
            waiting.shutdown()
            waiting.join()
            with pytest.raises(TimeoutError):
                coro.waitpid(child.pid, timeout=0.001)
            with pytest.raises(coro.TimeoutError), coro.timeout(0.001):
                coro.waitpid(child.pid)
            # Now the child ends first, and the coro is interrupted before it runs again.
            waiting = coro.spawn(coro.waitpid, child.pid)
            until_waiting(waiting)
            child.end()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            waiting.shutdown()
            waiting.join()
            assert coro.waitpid(child.pid, timeout=10) == (child.pid, 5 << 8)

    coro.run(main)


def test_any_child_and_stopped_ones():
    def main():
        with Child(1) as first, Child(2) as second:
            waiting = coro.spawn(coro.waitpid, -1)
            until_waiting(waiting)
            second.end()
            assert waiting.join() == (second.pid, 2 << 8)
            waiting = coro.spawn(coro.waitpid, first.pid, os.WUNTRACED)
            until_waiting(waiting)
            os.kill(first.pid, signal.SIGSTOP)
            pid, status = waiting.join()
            assert pid == first.pid
            assert os.WIFSTOPPED(status)
            os.kill(first.pid, signal.SIGCONT)
            with pytest.raises(TimeoutError):
                coro.waitpid(-1, timeout=0.001)
            first.end()
            assert coro.waitpid(-1) == (first.pid, 1 << 8)

    coro.run(main)


def test_in_a_thread_without_coros():
    def main():
        with Child(4) as child:
            with pytest.raises(TimeoutError):
                coro.waitpid(child.pid, timeout=0.001)
            child.end()
            assert coro.waitpid(child.pid) == (child.pid, 4 << 8)

    in_thread(main)
