"""Coros and processes: fork, multiprocessing, subprocesses."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

import pytest
from support import coro_is_available, gil_is_enabled, run_script

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro


# The head of the scripts below. They run in processes of their own, where pytest's threads do not exist.
HEAD = """
import asyncio, os, sys
import grapeshot
from grapeshot import coro

PARENT = os.getpid()

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def yield_slices(number, count=5):
    try:
        for _ in range(count):
            coro.yield_slice()
        return number
    finally:
        say("end", number, "parent" if os.getpid() == PARENT else "child")

def status(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def run(code, *, flags=("-W", "error", "-X", "faulthandler")):
    """Return the lines that the script prints."""
    return run_script(None, HEAD + code, flags=flags).split("\n")[:-1]


ENDS = [f"end {number} parent" for number in range(3)]


def test_a_fork_in_a_coro():
    """The child continues in the function that forked, and ends there."""
    lines = run(
        """
def child():
    frames = []
    frame = sys._getframe()
    while frame is not None:
        frames.append(frame.f_code.co_name)
        frame = frame.f_back
    say("child", frames, sum(sorted(range(10), key=lambda x: -x)), coro.current().name)
    os._exit(7)

def main():
    others = [coro.spawn(yield_slices, number) for number in range(3)]
    coro.yield_slice()
    pid = os.fork()
    if not pid:
        child()
    say("status", status(pid))
    say([co.join() for co in others])

coro.run(main)
"""
    )
    assert lines == ["child ['child', 'main'] 45 coro 1", "status 7", *ENDS, "[0, 1, 2]"]


@pytest.mark.skipif(not gil_is_enabled(), reason="without a GIL there is no watchdog")
def test_a_fork_waits_for_a_record_of_the_latency_warning():
    """A thread logs the record. If the process forked while that thread ran, CPython 3.12 and later would warn, and
    the warning would be an error here.
    """
    lines = run(
        """
import logging, threading, time

began, forking = threading.Event(), threading.Event()

class Handler(logging.Handler):
    def emit(self, record):
        began.set()
        forking.wait()
        time.sleep(0.1)  # still at work when the process forks, unless the fork waits for the record

logger = logging.getLogger("asyncio")
logger.addHandler(Handler())
logger.propagate = False
os.register_at_fork(before=forking.set)  # runs before grapeshot's function: the one registered last runs first

def main():
    coro.set_latency_warning(0.01, always=True)
    while not began.is_set():
        pass
    pid = os.fork()
    if not pid:
        os._exit(0)
    say([thread.name for thread in threading.enumerate()], status(pid))

coro.run(main)
"""
    )
    assert lines == ["['MainThread'] 0"]


def test_a_child_of_a_coro_cannot_wait():
    """The coro that forked cannot wait in the child. It can run a new loop there, but cannot spawn coros in that
    loop.
    """
    lines = run(
        """
def refused(function, *args):
    try:
        function(*args)
    except RuntimeError as exc:
        say(type(exc).__name__)

async def task():
    await asyncio.sleep(0)
    refused(coro.yield_slice)
    refused(coro.spawn, print)
    return "ran"

def main():
    other = coro.spawn(yield_slices, 0)
    coro.yield_slice()
    pid = os.fork()
    if not pid:
        try:
            refused(coro.yield_slice)
            refused(coro.sleep_relative, 0.001)
            refused(coro.wait)
            say(other.done(), other.join())  # in the child, all other coros count as ended
            refused(coro.await_, asyncio.sleep(0))
            refused(coro.spawn, print)
            say(grapeshot.run(task()))
        finally:
            os._exit(0)
    say("status", status(pid))
    return other.join()

say(coro.run(main))
""",
        flags=("-X", "faulthandler"),  # no `-W error`: the child warns of a coroutine that is never awaited
    )
    refused = ["YieldFromMain"] * 3 + ["True None", "YieldFromMain", "RuntimeError"]
    assert lines == [*refused, "YieldFromMain", "RuntimeError", "ran", "status 0", "end 0 parent", "0"]


def test_the_end_of_a_child():
    lines = run(
        """
def fail():
    raise SystemExit(5)

ENDINGS = {
    3: lambda: os._exit(3),
    4: lambda: sys.exit(4),
    5: fail,
    6: lambda: os.execv("/bin/sh", ["sh", "-c", "exit 6"]),
}

def main():
    others = [coro.spawn(yield_slices, number) for number in range(3)]
    coro.yield_slice()
    for expected, ending in ENDINGS.items():
        pid = os.fork()
        if not pid:
            ending()
        say(expected, status(pid))
    return [co.join() for co in others]

say(coro.run(main))
"""
    )
    assert lines == ["3 3", "4 4", "5 5", "6 6", *ENDS, "[0, 1, 2]"]


def test_a_fork_beside_suspended_coros():
    """A task forks while coros are suspended, and the program forks again after the run. Both children run coros."""
    lines = run(
        """
def fork(function):
    pid = os.fork()
    if not pid:
        try:
            say("child", function())
        finally:
            os._exit(0)
    return status(pid)

def in_child():
    return coro.run(lambda: [co.join() for co in [coro.spawn(yield_slices, number) for number in range(2)]])

async def main():
    others = [coro.spawn(yield_slices, number) for number in range(3)]
    await asyncio.sleep(0)
    say("status", fork(in_child))
    return await asyncio.gather(*others)

say(grapeshot.run(main()))
say("status", fork(in_child))
say(coro.run(yield_slices, 5))
"""
    )
    child = ["end 0 child", "end 1 child", "child [0, 1]", "status 0"]
    assert lines == [*child, *ENDS, "[0, 1, 2]", *child, "end 5 parent", "5"]


def test_a_fork_in_another_thread_that_has_coros():
    lines = run(
        """
import threading

def in_child():
    return coro.run(yield_slices, 3)

def main():
    other = coro.spawn(yield_slices, 0)
    coro.yield_slice()
    pid = os.fork()
    if not pid:
        try:
            thread = threading.Thread(target=lambda: say("thread", in_child()))
            thread.start()
            thread.join()
        finally:
            os._exit(0)
    say("status", status(pid))
    other.join()

def thread():
    coro.run(main)

beside = threading.Event()
blocked = threading.Thread(target=beside.wait)
blocked.start()
runner = threading.Thread(target=thread)
runner.start()
runner.join()
beside.set()
blocked.join()
""",
        flags=("-W", "ignore", "-X", "faulthandler"),  # DeprecationWarning for a fork beside threads
    )
    assert lines == ["end 3 child", "thread 3", "status 0", "end 0 parent"]


def test_fork_hooks_that_yield():
    lines = run(
        """
def hook(name):
    def call():
        try:
            coro.yield_slice()
            say(name, "yielded")
        except coro.YieldFromMain:
            say(name, "refused")
    return call

os.register_at_fork(before=hook("before"), after_in_parent=hook("parent"), after_in_child=hook("child"))

def main():
    other = coro.spawn(yield_slices, 0, 2)
    pid = os.fork()
    if not pid:
        os._exit(0)
    say(status(pid))
    other.join()

coro.run(main)
"""
    )
    assert sorted(lines) == sorted(["before yielded", "child refused", "parent yielded", "0", "end 0 parent"])


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_multiprocessing(method):
    """A coro starts a process that uses a queue. Then the coro starts a process pool. After the run, one more process
    starts.
    """
    lines = run(
        f"""
import concurrent.futures, math, multiprocessing

def start(context):
    queue = context.SimpleQueue()
    process = context.Process(target=queue.put, args=(5,))
    process.start()
    got = queue.get()
    process.join()
    return got, process.exitcode

def in_executor(context):
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        loop = asyncio.get_running_loop()
        return coro.await_(loop.run_in_executor(pool, math.factorial, 5))

def main():
    context = multiprocessing.get_context({method!r})
    others = [coro.spawn(yield_slices, number) for number in range(3)]
    coro.yield_slice()
    first = start(context)
    say(*first, in_executor(context))
    return [co.join() for co in others]

if __name__ == "__main__":
    say(coro.run(main))
    say(*start(multiprocessing.get_context({method!r})))
""",
        flags=("-W", "ignore", "-X", "faulthandler"),  # 3.12+ warns about a fork beside the executor's threads
    )
    assert sorted(lines) == sorted(["5 0 120", *ENDS, "[0, 1, 2]", "5 0"])


def test_a_coro_in_a_forked_process():
    """A process that was forked outside of coros can run coros."""
    lines = run(
        """
import multiprocessing

def in_child():
    say(coro.run(lambda: [co.join() for co in [coro.spawn(yield_slices, number) for number in range(2)]]))

async def main():
    other = coro.spawn(yield_slices, 7)
    await asyncio.sleep(0)
    process = multiprocessing.get_context("fork").Process(target=in_child)
    process.start()
    process.join()
    say(process.exitcode)
    await other

grapeshot.run(main())
"""
    )
    assert lines == ["end 0 child", "end 1 child", "[0, 1]", "0", "end 7 parent"]


def test_subprocesses():
    """`subprocess` blocks the thread; asyncio's subprocesses let other coros run."""

    def blocking(number):
        coro.yield_slice()
        done = subprocess.run([sys.executable, "-c", f"print({number})"], capture_output=True, check=True)
        coro.yield_slice()
        return int(done.stdout)

    async def yielding(number):
        import asyncio

        process = await asyncio.create_subprocess_exec("sh", "-c", f"echo {number}", stdout=subprocess.PIPE)
        return int((await process.communicate())[0])

    def main():
        threads = [coro.spawn(blocking, 5), *(coro.spawn(coro.await_, yielding(number)) for number in range(3))]
        return [thread.join() for thread in threads]

    assert coro.run(main) == [5, 0, 1, 2]


def test_a_subprocess_with_a_preexec_fn():
    seen = []

    def before():
        try:
            coro.yield_slice()
        except coro.YieldFromMain:
            os.write(1, b"refused ")

    def work():
        coro.yield_slice()
        return subprocess.check_output(["echo", "ran"], preexec_fn=before)

    def main():
        other = coro.spawn(seen.append, 1)
        output = coro.spawn(work).join()
        other.join()
        return output

    assert coro.run(main) == b"refused ran\n"
    assert seen == [1]
