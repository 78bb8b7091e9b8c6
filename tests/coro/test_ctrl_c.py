"""One Ctrl-C reaches a coro that does not yield: KeyboardInterrupt is raised in it, as in other Python code.

test_signals covers coros that wait, and coros that yield within 0.2 seconds after Ctrl-C. For these, Ctrl-C works as
it does in asyncio.
"""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from support import coro_is_available, run_script

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

HEAD = """
import asyncio, os, signal, sys, threading, time
import grapeshot
from grapeshot import coro

CAP_S = 60

def say(*words):
    print(*words, flush=True)

def outcome(function, *args):
    try:
        say("returned", function(*args))
    except BaseException as exc:
        say("raised", type(exc).__name__)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

def interrupt_soon(begun):
    "Send one Ctrl-C shortly after something is in `begun`."
    def wait():
        while not begun:
            time.sleep(0.001)
        time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            # Without a GIL, CPython itself loses a signal that arrives just before a lock's wait begins. Send another.
            time.sleep(10)
            os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=wait, daemon=True).start()

def compute(begun=None, seconds=CAP_S):
    "Compute without a yield."
    if begun is not None:
        begun.append(1)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
"""


def run(code):
    """Return the lines that the script prints."""
    return run_script(None, HEAD + code, flags=("-W", "error", "-X", "faulthandler")).split("\n")[:-1]


WAYS = {
    "run": "outcome(coro.run, main)",
    "event_loop": "coro.spawn(main); outcome(coro.event_loop)",
    "grapeshot.run": "outcome(lambda: grapeshot.run(coro.run_sync(main)))",
    "run_until_complete": """
loop = grapeshot.new_event_loop()
outcome(loop.run_until_complete, coro.run_sync(main))
try:
    # While close() runs the loop, the task that waits for `main` gets main's KeyboardInterrupt. close() raises it.
    loop.close()
except KeyboardInterrupt:
    pass
""",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_coro_that_computes(way):
    lines = run(
        f"""
begun = []

def main():
    other = coro.spawn(waiting, name="other")
    coro.yield_slice()
    try:
        compute(begun)
    finally:
        say("main", sys.exc_info()[0].__name__)

def waiting():
    try:
        coro.wait()
    finally:
        say("other")

interrupt_soon(begun)
{WAYS[way]}
say(coro.get_live_coros())
"""
    )
    assert lines[0] == "main KeyboardInterrupt"
    assert sorted(lines[1:]) == ["[]", "other", "raised KeyboardInterrupt"]


@pytest.mark.parametrize("way", ["run", "grapeshot.run"])
def test_another_coro_computes(way):
    """The coro that computes gets the KeyboardInterrupt; the first coro is cancelled."""
    lines = run(
        f"""
begun = []

def main():
    other = coro.spawn(busy)
    try:
        coro.wait()
    finally:
        say("main", sys.exc_info()[0].__name__)

def busy():
    try:
        compute(begun)
    finally:
        say("busy", sys.exc_info()[0].__name__)

interrupt_soon(begun)
{WAYS[way]}
"""
    )
    assert lines == ["busy KeyboardInterrupt", "main CancelledError", "raised KeyboardInterrupt"]


def test_cleanup_may_wait():
    lines = run(
        """
begun = []

def main():
    try:
        compute(begun)
    finally:
        coro.sleep_relative(0.01)
        say("slept", coro.await_(answer()))

async def answer():
    await asyncio.sleep(0.01)
    return 42

interrupt_soon(begun)
outcome(coro.run, main)
"""
    )
    assert lines == ["slept 42", "raised KeyboardInterrupt"]


@pytest.mark.parametrize(
    "call",
    [
        "time.sleep(CAP_S)",
        "lock.acquire()",
        "os.read(reader, 1)",
        "sorted(range(3), key=lambda number: compute())",
        "coro.await_(coroutine())",
        "coro.await_(nested())",
    ],
)
def test_blocking_calls_and_nested_code(call):
    lines = run(
        f"""
begun = []
lock = threading.Lock()
lock.acquire()
reader, writer = os.pipe()

async def coroutine():
    await asyncio.sleep(0)
    try:
        compute()
    finally:
        say("coroutine", sys.exc_info()[0].__name__)

async def nested():
    await asyncio.sleep(0)
    await coro.run_sync(coro.await_, coroutine())

def main():
    try:
        begun.append(1)
        {call}
    finally:
        say("main", sys.exc_info()[0].__name__)

interrupt_soon(begun)
outcome(coro.run, main)
"""
    )
    if call == "coro.await_(nested())":
        # The inner coro computes, and the outer one waits for it.
        assert lines[0] == "coroutine KeyboardInterrupt"
        assert lines[1] in ("main KeyboardInterrupt", "main CancelledError")
        assert lines[2:] == ["raised KeyboardInterrupt"]
    elif "coroutine" in call:
        assert lines == ["coroutine KeyboardInterrupt", "main KeyboardInterrupt", "raised KeyboardInterrupt"]
    else:
        assert lines == ["main KeyboardInterrupt", "raised KeyboardInterrupt"]


def test_a_coro_that_yields_in_time_is_cancelled_only():
    """Ctrl-C cancels a coro that yields within 0.2 seconds. Its cleanup may then run for longer without a yield."""
    lines = run(
        """
def main():
    try:
        signal.raise_signal(signal.SIGINT)
        coro.yield_slice()
    except asyncio.CancelledError:
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            coro.yield_slice()
        compute(seconds=0.3)
        say("clean")
        raise

outcome(coro.run, main)
"""
    )
    assert lines == ["clean", "raised KeyboardInterrupt"]


def test_the_exception_may_be_caught():
    """After the coro has caught KeyboardInterrupt, the next Ctrl-C raises it again at once, as in asyncio."""
    lines = run(
        """
begun = []

def main():
    try:
        compute(begun)
    except KeyboardInterrupt:
        say("caught")
    coro.yield_slice()
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        say("caught again")
    coro.sleep_relative(0.3)
    return "as always"

interrupt_soon(begun)
outcome(coro.run, main)
outcome(coro.run, lambda: "and again")
"""
    )
    assert lines == ["caught", "caught again", "returned as always", "returned and again"]


@pytest.mark.parametrize("handler", ["lambda *_: got.append(1)", "signal.SIG_DFL"])
def test_a_handler_that_is_set_after_ctrl_c_is_not_called_for_it(handler):
    lines = run(
        f"""
got = []

def main():
    signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, {handler})
    compute(seconds=0.5)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        coro.yield_slice()
    except asyncio.CancelledError:
        return got

outcome(coro.run, main)
"""
    )
    assert lines == ["returned []"]


def test_a_second_ctrl_c_is_raised_at_once():
    lines = run(
        """
def main():
    signal.raise_signal(signal.SIGINT)
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        say("at once")
    compute(seconds=0.5)
    return "went on"

outcome(coro.run, main)
"""
    )
    assert lines == ["at once", "returned went on"]


def test_the_process_ends_by_the_signal():
    code = (
        HEAD
        + """
def main():
    try:
        say("begun")
        compute()
    finally:
        say("finally")

coro.run(main)
"""
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert out == "finally\n"
    # The latency warning about this coro may come before, after or between these lines.
    assert "\nKeyboardInterrupt" in err
    assert "in compute\n" in err
    assert process.returncode == -signal.SIGINT


def test_ctrl_c_in_a_finalizer_is_not_lost():
    lines = run(
        """
begun = []

class Slow:
    def __del__(self):
        compute(begun, 0.6)

def main():
    Slow()
    say("after")
    coro.sleep_relative(1)
    say("lost")

interrupt_soon(begun)
outcome(coro.run, main)
"""
    )
    # Exceptions in __del__ are ignored, so Ctrl-C cancels the coro at its next wait, as it cancels a task.
    assert lines == ["after", "raised KeyboardInterrupt"]
