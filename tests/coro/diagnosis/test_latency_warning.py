"""Coros that run long without a yield: the warning in the log, and the watchdog thread that notices them while they
run.
"""

from __future__ import annotations

import itertools
import linecache
import logging
import os
import sys
import threading
import time

import pytest
from support import coro_is_available, gil_is_enabled, run_script, wait_until

pytestmark = [
    pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter"),
    pytest.mark.skipif(not gil_is_enabled(), reason="without a GIL there is no watchdog (test_free_threading.py)"),
]
if coro_is_available():
    import grapeshot
    from grapeshot import coro
    from grapeshot._core import _coro_latency_hint as HINT

CAP_S = 20
# The native module starts the watchdog, so threading.enumerate() does not list it. The tests look for it in /proc.
HAS_TASKS = os.path.isdir("/proc/self/task")


def count_watchdogs(count):
    """Wait until there are `count` watchdog threads. A watchdog gets its name a little later than it starts, and may
    stay in /proc for a moment after it was joined.
    """
    wait_until(lambda: watchdogs() == count, f"{count} watchdogs")


def watchdogs():
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm", encoding="ascii") as file:
                names.append(file.read().strip())
        except OSError:  # the thread has ended
            pass
    return names.count("coro-watchdog")


@pytest.fixture
def warned(caplog):
    """Yield `caplog`, which gets the messages of the asyncio logger. Runs of more than 1 ms are reported."""
    before = coro.set_latency_warning(0.001, always=True, stack=True)
    caplog.set_level(logging.WARNING, "asyncio")
    yield caplog
    coro.set_latency_warning(before, always=False, stack=False)


def texts(warned, name, kind):
    """Return the messages of one kind about the coro with that name. A slow machine may cause messages about others."""
    messages = [text.replace(HINT, "") for text in warned.messages]
    return [text for text in messages if text.startswith(f"coro {name!r} {kind}")]


def spin(seconds=0.03):
    """Keep busy for several ticks of the coarse clock that measures runs."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def spin_until(condition):
    end = time.monotonic() + CAP_S
    while not condition():
        assert time.monotonic() < end


# ------------------------------------------------------------------ the coro that delays the others


def test_a_coro_that_does_not_yield_is_seen_while_it_runs(warned):
    def compute():
        while not texts(warned, "slow one", "has run"):  # the busy loop
            assert time.monotonic() < end

    def work():
        compute()
        coro.yield_slice()

    end = time.monotonic() + CAP_S
    coro.run(lambda: coro.spawn(work, name="slow one").join())
    text, *_ = texts(warned, "slow one", "has run")  # a slow machine may cause more messages
    # The innermost frame is the busy loop itself, or something that it calls; the whole stack is shown.
    lines = range(compute.__code__.co_firstlineno + 1, compute.__code__.co_firstlineno + 3)
    stack = text.split("\n")
    assert stack[1] == "Stack (most recent call last):"
    assert stack[2] == f'  File "{__file__}", line {work.__code__.co_firstlineno + 1}, in work'
    assert stack[3] == "    compute()"
    assert stack[4] in [f'  File "{__file__}", line {line}, in compute' for line in lines]
    assert stack[5].strip() in [linecache.getline(__file__, line).strip() for line in lines]
    assert float(text.split(" has run for ")[1].split(" ")[0]) >= 0.001
    record, *_ = [record for record in warned.records if record.getMessage().replace(HINT, "") == text]
    assert (record.levelno, record.name, record.threadName) == (logging.WARNING, "asyncio", "coro-latency")
    # The watchdog leaves no thread object in `threading`.
    assert not [thread.name for thread in threading.enumerate() if "Dummy" in thread.name]


def test_the_last_message_repeats_the_line_of_the_first(warned):
    def work():
        spin_until(lambda: texts(warned, "slow one", "has run"))
        coro.yield_slice()

    coro.run(lambda: coro.spawn(work, name="slow one").join())
    text, *_ = texts(warned, "slow one", "ran")
    first, _, place = text.partition(" without a yield; after ")
    seen, _, place = place.partition(" it was at ")
    assert float(seen) <= float(first.split(" ran for ")[1].split(" ")[0])
    earlier, *_ = texts(warned, "slow one", "has run")
    assert place == earlier.split("\n")[0].partition(" and is at ")[2]
    assert f":{work.__code__.co_firstlineno + 2} " not in place


def test_a_call_of_c_code_is_named_by_its_line(warned):
    seen = threading.Event()

    class Handler(logging.Handler):
        def emit(self, record):
            if "'slow one' has run" in record.getMessage():
                seen.set()

    def work():
        assert seen.wait(CAP_S)

    logger, handler = logging.getLogger("asyncio"), Handler()
    logger.addHandler(handler)
    try:
        coro.run(lambda: coro.spawn(work, name="slow one").join())
    finally:
        logger.removeHandler(handler)
    [text] = texts(warned, "slow one", "has run")
    assert f"line {work.__code__.co_firstlineno + 1}, in work\n    assert seen.wait(CAP_S)" in text
    # Now the coro runs only a C function, so its stack contains no Python function.
    seen.clear()
    logger.addHandler(handler)
    try:
        lock = threading.Lock()
        lock.acquire()
        release = threading.Thread(target=lambda: seen.wait(CAP_S) and lock.release())
        release.start()
        coro.run(lambda: coro.spawn(lock.acquire, name="slow one").join())
        release.join()
    finally:
        logger.removeHandler(handler)
    assert texts(warned, "slow one", "has run")[-1].endswith("without a yield, not in a Python function")


def test_coros_that_yield_are_not_named(warned):
    # The limit is far above the clock's resolution (milliseconds) and the delays of a slow machine.
    coro.set_latency_warning(5)

    def polite():
        end = time.monotonic() + 0.05
        while time.monotonic() < end:
            coro.yield_slice()

    def main():
        others = [coro.spawn(polite) for _ in range(5)]
        for other in others:
            other.join()

    coro.run(main)
    assert warned.messages == []


@pytest.mark.parametrize("limit", [0.001, 0.002])
def test_a_tick_of_the_clock_does_not_make_a_short_run_late(warned, limit):
    coro.set_latency_warning(limit)
    times = [time.monotonic()]

    def work():
        # Each run is short, but some runs span a tick of the coarse clock, which ticks every few milliseconds.
        for _ in range(20_000):
            coro.yield_slice()
            times.append(time.monotonic())

    coro.run(lambda: coro.spawn(work, name="quick").join())
    times.append(time.monotonic())
    if max(after - before for before, after in itertools.pairwise(times)) < limit:  # the machine was fast enough
        assert texts(warned, "quick", "") == []


def test_a_coro_that_raises(warned):
    def work():
        spin_until(lambda: texts(warned, "slow one", "has run"))
        raise LookupError("after all")

    def main():
        with pytest.raises(LookupError, match="after all"):
            coro.spawn(work, name="slow one").join()

    coro.run(main)
    [text] = texts(warned, "slow one", "ran")
    assert " without a yield; after " in text


def test_without_a_sample_the_end_is_named(warned):
    """The watchdog has seen nothing, because C code has kept the GIL. So the message names the place where the coro
    yields.
    """

    def work():
        sum(range(3_000_000))
        coro.yield_slice()

    before = sys.getswitchinterval()
    sys.setswitchinterval(CAP_S)  # the watchdog waits for the GIL
    try:
        coro.run(lambda: coro.spawn(work, name="slow one").join())
    finally:
        sys.setswitchinterval(before)
    text, *_ = texts(warned, "slow one", "ran")  # a slow machine may cause more messages
    line = work.__code__.co_firstlineno + 2
    assert text.endswith(f"without a yield, until {__file__}:{line} in {work.__qualname__}")


# ------------------------------------------------------------------ the limit


def test_latency_warnings_can_be_off(warned):
    assert coro.set_latency_warning(0) == pytest.approx(0.001)
    coro.run(lambda: coro.spawn(spin).join())
    assert coro.set_latency_warning(1000) == 0
    coro.run(lambda: coro.spawn(spin).join())
    assert coro.set_latency_warning(None) == 1000
    coro.run(lambda: coro.spawn(spin).join())
    assert warned.messages == []
    for wrong in (-1, float("nan"), -0.001, float("-inf")):
        with pytest.raises(ValueError, match="limit"):
            coro.set_latency_warning(wrong)
    with pytest.raises(TypeError):
        coro.set_latency_warning("soon")
    assert coro.set_latency_warning(float("inf")) == 0
    coro.run(lambda: coro.spawn(spin).join())
    assert warned.messages == []


def test_the_running_coro_can_set_the_limit(warned):
    coro.set_latency_warning(0)

    def work():
        coro.set_latency_warning(0.001)
        spin_until(lambda: texts(warned, "slow one", "has run"))
        coro.set_latency_warning(1000)
        coro.yield_slice()
        coro.set_latency_warning(1000)
        coro.set_latency_warning(0.001)
        spin_until(lambda: len(texts(warned, "slow one", "has run")) == 2)
        coro.set_latency_warning(0)

    coro.run(lambda: coro.spawn(work, name="slow one").join())
    assert texts(warned, "slow one", "ran") == []


def test_a_logging_filter_that_raises_does_not_disturb_the_coro(warned, monkeypatch):
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    monkeypatch.setattr(threading, "excepthook", unraisable.append)

    def refuse(record):
        raise LookupError("no warnings here")

    logger = logging.getLogger("asyncio")
    logger.addFilter(refuse)
    try:
        assert coro.run(lambda: coro.spawn(lambda: spin() or 5).join()) == 5
    finally:
        logger.removeFilter(refuse)
    assert unraisable
    assert all(isinstance(entry.exc_value, LookupError) for entry in unraisable)


# ------------------------------------------------------------------ threads, loops, processes


def test_several_threads(warned):
    def work():
        spin_until(lambda: texts(warned, name := coro.current().name, "has run") or not name)

    def program(name):
        coro.set_latency_warning(0.001)
        coro.run(lambda: coro.spawn(work, name=name).join())

    names = [f"slow {number}" for number in range(4)]
    threads = [threading.Thread(target=program, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in names:
        assert len(texts(warned, name, "has run")) == 1


@pytest.mark.skipif(not HAS_TASKS, reason="threads cannot be counted here")
def test_the_thread_is_there_while_it_is_needed(warned):
    coro.set_latency_warning(1000)

    def main():
        count_watchdogs(1)
        coro.set_latency_warning(0)
        count_watchdogs(0)
        coro.set_latency_warning(1000)
        count_watchdogs(1)
        names = {thread.name for thread in threading.enumerate()}
        assert not [name for name in names if "coro" in name or "Dummy" in name]

    count_watchdogs(0)
    for _ in range(2):
        coro.run(main)
        count_watchdogs(0)
    loop = grapeshot.new_event_loop()

    async def use():
        await coro.spawn(coro.yield_slice)

    loop.run_until_complete(use())
    count_watchdogs(1)
    loop.close()
    count_watchdogs(0)


@pytest.mark.skipif(not HAS_TASKS, reason="threads cannot be counted here")
def test_a_thread_that_ends_leaves_no_watchdog_behind():
    def program():
        loop = grapeshot.new_event_loop()
        loops.append(loop)

        async def use():
            await coro.spawn(coro.yield_slice)

        loop.run_until_complete(use())
        count_watchdogs(1)

    loops = []
    thread = threading.Thread(target=program)
    thread.start()
    thread.join()
    count_watchdogs(0)
    loops[0].close()


def test_the_watchdog_sleeps_while_nothing_runs(warned):
    def main():
        for number in range(3):
            coro.sleep_relative(0.05)  # long enough for the watchdog to fall asleep
            spin_until(lambda number=number: len(texts(warned, "slow one", "has run")) > number)

    coro.run(lambda: coro.spawn(main, name="slow one").join())


HEAD = """
import asyncio, logging, os, sys, threading, time
import grapeshot
from grapeshot import coro
from grapeshot._core import _coro_latency_hint as HINT

records = []

class Handler(logging.Handler):
    def emit(self, record):
        records.append(record.getMessage().replace(HINT, ""))

logger = logging.getLogger("asyncio")
logger.addHandler(Handler())
logger.propagate = False
coro.set_latency_warning(0.001, always=True)

def seen():
    return [text for text in records if "has run" in text]

def spin_until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_fork():
    """The watchdog ends before a fork, because CPython warns about a fork in a process with several threads. Afterwards
    parent and child each start their own watchdog.

    CPython would also warn about the thread that logs the message, so the test waits until that thread has ended.
    """
    assert (
        run_script(
            None,
            HEAD
            + """
def only_watchdog():
    return not os.path.exists("/proc/self/task") or len(os.listdir("/proc/self/task")) <= 2

def check(word):
    records.clear()
    coro.run(lambda: spin_until(seen))
    os.write(1, word)

def main():
    spin_until(seen)
    spin_until(only_watchdog)
    records.clear()
    child = os.fork()
    if not child:
        os._exit(7)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    coro.yield_slice()
    spin_until(seen)
    spin_until(only_watchdog)

coro.run(main)
loop = grapeshot.new_event_loop()

async def use():
    await coro.spawn(coro.yield_slice)

loop.run_until_complete(use())
child = os.fork()  # with a loop that is not closed
if not child:
    check(b"child ")
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
check(b"parent")
loop.close()
""",
        )
        == "child parent"
    )


@pytest.mark.parametrize("way", ["returns", "sys.exit()", "os._exit(0)", "daemon"])
@pytest.mark.parametrize("rest", [0, 0.001, 0.005])
def test_exit(way, rest):
    """The process can exit while the watchdog sleeps or reports."""
    end = {
        "returns": "coro.run(main)",
        "sys.exit()": "coro.run(main); coro.run(lambda: sys.exit())",
        "os._exit(0)": "coro.run(lambda: (main(), os._exit(0)))",
        "daemon": "threading.Thread(target=program, daemon=True).start(); spin_until(seen); time.sleep(0.003)",
    }[way]
    run_script(
        None,
        HEAD
        + f"""
def main():
    spin_until(seen)
    coro.yield_slice()
    time.sleep({rest})

def program():
    coro.set_latency_warning(0.001)
    coro.run(lambda: [(coro.yield_slice(), spin_until(lambda: False)) for _ in range(10)])

loop = grapeshot.new_event_loop()  # never closed

async def use():
    await coro.spawn(time.sleep, 0.006)

loop.run_until_complete(use())
{end}
loop.close()
""",
    )


@pytest.mark.skipif(not HAS_TASKS, reason="the address space cannot be limited here")
def test_no_further_thread_can_be_had():
    """Without a watchdog thread, the warning is logged when the coro yields or ends."""
    run_script(
        None,
        HEAD
        + """
import resource
coro.set_latency_warning(0)
coro.run(lambda: coro.spawn(time.sleep, 0).join())  # creates the stack
with open("/proc/self/statm", encoding="ascii") as file:
    now = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (6 << 20), resource.RLIM_INFINITY))
coro.set_latency_warning(0.001)
coro.run(lambda: coro.spawn(time.sleep, 0.03, name="slow one").join())
[text] = [text for text in records if "'slow one' ran for" in text]
assert text.endswith(" without a yield, until it ended"), text
assert not seen()
""",
    )
