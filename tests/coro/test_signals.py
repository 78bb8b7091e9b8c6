"""Signals: Ctrl-C in a running coro and while all coros wait, and handlers that run on a coro's stack."""

from __future__ import annotations

import pytest
from support import coro_is_available, run_script

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

HEAD = """
import asyncio, os, signal, sys, threading, time
import grapeshot
from grapeshot import coro

def say(*words):
    print(*words, flush=True)

def in_coro():
    try:
        return coro.current()
    except coro.YieldFromMain:
        return None

def outcome(function, *args):
    try:
        say("returned", function(*args))
    except BaseException as exc:
        say("raised", type(exc).__name__)

def interrupt_soon(condition, number=signal.SIGINT):
    def wait():
        while not condition():
            time.sleep(0.001)
        os.kill(os.getpid(), number)
    threading.Thread(target=wait, daemon=True).start()
"""


def run(code):
    """Return the lines that the script prints."""
    return run_script(None, HEAD + code, flags=("-W", "error", "-X", "faulthandler")).split("\n")[:-1]


def test_no_thread_is_left_when_the_run_is_over():
    """Ctrl-C in a coro starts a helper thread. This thread must end with the run: on CPython 3.11, a thread that is
    still starting while the interpreter exits uses freed memory.
    """
    lines = run(
        """
def main():
    for _ in range(3):
        try:
            signal.raise_signal(signal.SIGINT)
            coro.yield_slice()
        except (asyncio.CancelledError, KeyboardInterrupt):
            say("went on")

outcome(coro.run, main)
say(len(sys._current_frames()))
"""
    )
    assert lines == [*["went on"] * 3, "returned None", "1"]


def test_ctrl_c_works_as_for_a_task():
    """The first Ctrl-C cancels the running coro at its next wait. A second Ctrl-C raises KeyboardInterrupt at once."""
    lines = run(
        """
def once(pause):
    try:
        signal.raise_signal(signal.SIGINT)
        say("went on")
        pause()
    except BaseException as exc:
        say("inside", type(exc).__name__)
        raise

def twice(pause):
    signal.raise_signal(signal.SIGINT)
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        say("finally")

def swallow(pause):
    try:
        signal.raise_signal(signal.SIGINT)
        pause()
    except asyncio.CancelledError:
        return "swallowed"

for function in (once, twice, swallow):
    outcome(coro.run, lambda: function(coro.yield_slice))

async def task():
    try:
        signal.raise_signal(signal.SIGINT)
        say("went on")
        await asyncio.sleep(0)
    except BaseException as exc:
        say("inside", type(exc).__name__)
        raise

outcome(grapeshot.run, task())
"""
    )
    once = ["went on", "inside CancelledError", "raised KeyboardInterrupt"]
    assert lines == [*once, "finally", "raised KeyboardInterrupt", "returned swallowed", *once]


def test_ctrl_c_in_a_coro_that_never_yields():
    lines = run(
        """
began = []

def busy():
    began.append(1)
    while True:
        pass

def main():
    others = [coro.spawn(other, number) for number in range(3)]
    coro.yield_slice()
    try:
        busy()
    finally:
        say("main", sys.exc_info()[0].__name__)

def other(number):
    try:
        coro.wait()
    finally:
        say(number, sys.exc_info()[0].__name__)

interrupt_soon(lambda: began)
interrupted = []
interrupt_soon(lambda: interrupted)

class Noting(asyncio.Runner):
    def _on_sigint(self, *args, **kwargs):
        interrupted.append(1)
        super()._on_sigint(*args, **kwargs)

def run():
    with Noting(loop_factory=grapeshot.new_event_loop) as runner:
        return runner.run(coro.run_sync(main))

outcome(run)
say(coro.get_live_coros())
"""
    )
    assert lines[0] == "main KeyboardInterrupt"
    # The runner cancels the remaining tasks, and coros are among them.
    assert sorted(lines[1:4]) == [f"{number} CancelledError" for number in range(3)]
    assert lines[4:] == ["raised KeyboardInterrupt", "[]"]


def test_ctrl_c_while_all_wait():
    lines = run(
        """
waiting = []

def main():
    others = [coro.spawn(other, number) for number in range(3)]
    coro.yield_slice()
    waiting.append(1)
    try:
        coro.sleep_relative(60)
    finally:
        say("main", sys.exc_info()[0].__name__)

def other(number):
    try:
        coro.wait()
    except asyncio.CancelledError:
        coro.yield_slice()
        say(number)
        raise

interrupt_soon(lambda: waiting)
outcome(coro.run, main)
say(coro.get_live_coros())
outcome(coro.run, lambda: "again")
"""
    )
    assert lines[0] == "main CancelledError"
    assert sorted(lines[1:4]) == ["0", "1", "2"]
    assert lines[4:] == ["raised KeyboardInterrupt", "[]", "returned again"]


def test_a_handler_runs_on_the_stack_of_the_coro():
    """The handler may wait, and an exception from it is raised in the running coro."""
    lines = run(
        """
def handle(number, frame):
    say("handler in", in_coro().name, frame.f_code.co_name)
    coro.yield_slice()
    coro.sleep_relative(0.001)
    say("handled in", in_coro().name)

def fail(number, frame):
    coro.yield_slice()
    raise LookupError(in_coro().name)

signal.signal(signal.SIGUSR1, handle)
signal.signal(signal.SIGUSR2, fail)

def victim():
    signal.raise_signal(signal.SIGUSR1)
    return "went on"

def failing():
    try:
        signal.raise_signal(signal.SIGUSR2)
    except LookupError as exc:
        coro.yield_slice()
        return exc.args[0]

def other():
    for _ in range(50):
        coro.yield_slice()
    say("other ended")

def main():
    beside = coro.spawn(other, name="other")
    say(coro.spawn(victim, name="victim").join())
    beside.join()
    say(coro.spawn(failing, name="failing").join())

coro.run(main)
"""
    )
    lines.remove("other ended")
    assert lines == ["handler in victim victim", "handled in victim", "went on", "failing"]


def test_a_handler_on_the_threads_own_stack_cannot_wait():
    lines = run(
        """
def handle(number, frame):
    try:
        coro.yield_slice()
        say("yielded")
    except coro.YieldFromMain:
        say("refused")

signal.signal(signal.SIGUSR1, handle)

async def main():
    co = coro.spawn(coro.wait)
    await asyncio.sleep(0)
    signal.raise_signal(signal.SIGUSR1)
    coro.schedule(co)
    await co

grapeshot.run(main())
"""
    )
    assert lines == ["refused"]


def test_handlers_of_the_loop():
    lines = run(
        """
def main():
    arrived = coro.fifo()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, arrived.push, "signal")
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGUSR1)
        say(coro.with_timeout(10, arrived.pop))
    loop.remove_signal_handler(signal.SIGUSR1)

coro.run(main)
"""
    )
    assert lines == ["signal"] * 3


@pytest.mark.parametrize("handler", ["counts", "yields"])
def test_a_thousand_signals_a_second(handler):
    """Signals arrive at any moment: during switches, in Python code, and in C functions that call Python."""
    lines = run(
        f"""
counts = [0, 0]
yielding = {handler == "yields"}

def handle(number, frame):
    counts[0] += 1
    if yielding and counts[0] % 3 == 0 and in_coro() is not None:
        counts[1] += 1
        coro.yield_slice()

signal.signal(signal.SIGALRM, handle)

def numbers(count):
    for number in range(count):
        coro.yield_slice()
        yield number

def key(number):
    coro.yield_slice()
    return -number

def work(number):
    rounds = 0
    while counts[0] < 150 or rounds < 5:
        rounds += 1
        items = sorted(numbers(number + 3), key=key)
        assert items == list(reversed(range(number + 3)))
        try:
            raise KeyError(number)
        except KeyError as exc:
            coro.sleep_relative(0)
            assert sys.exc_info()[1] is exc
    return number

def main():
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        return [co.join() for co in [coro.spawn(work, number) for number in range(8)]]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)

say(coro.run(main))
say(counts[0] >= 150, bool(counts[1]) == yielding)
"""
    )
    assert lines == [str([*range(8)]), "True True"]
