"""The watchdog reports code that keeps a loop from its next iteration. The report comes while the code still runs.
Here the code is a task, a callback or a method of a protocol, with and without coros. test_latency_warning covers coros
themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
from support import coro_is_available, gil_is_enabled, wait_until

pytestmark = [
    pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter"),
    pytest.mark.skipif(not gil_is_enabled(), reason="without a GIL there is no watchdog (test_free_threading.py)"),
]
if coro_is_available():
    import grapeshot
    from grapeshot import coro
    from grapeshot._core import _coro_latency_hint as HINT

CAP_S = 20
FIRST, LAST = "has run for", "ran for"


class Records(logging.Handler):
    """The messages of the asyncio logger."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())

    def about(self, what, kind=FIRST):
        """Return the messages of one kind about `what`. A slow machine may cause messages about something else."""
        texts = [text.replace(HINT, "") for text in self.texts]
        return [text for text in texts if text.startswith(f"{what} {kind}")]

    def spin_until_named(self, what):
        """Keep busy until there is a record about `what`."""
        end = time.monotonic() + CAP_S
        while not self.about(what):
            if time.monotonic() > end:
                raise SystemExit(f"{what} is not in {self.texts}")  # SystemExit leaves the loop

    @contextlib.contextmanager
    def lock_until_named(self, what):
        """Yield a lock that another thread releases when there is a record about `what`."""
        lock = threading.Lock()
        lock.acquire()

        def watch():
            try:
                self.spin_until_named(what)
            finally:
                lock.release()

        thread = threading.Thread(target=watch)
        thread.start()
        yield lock
        thread.join()


@pytest.fixture
def records():
    before = coro.set_latency_warning(0.001, always=True, stack=True)
    logger, handler = logging.getLogger("asyncio"), Records()
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    coro.set_latency_warning(before, always=False, stack=False)


def run(main):
    """Run a coroutine in a new loop. The coroutine becomes a task, not a coro."""
    return grapeshot.run(main)


def code_lines(text):
    """Return (function, line of code) for each entry of the stack in a message, the outermost first."""
    lines = text.split("\n")
    assert lines[1] == "Stack (most recent call last):"
    places = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    return [(lines[number].rsplit(" in ", 1)[1], lines[number + 1].strip()) for number in places]


# ------------------------------------------------------------------ code that delays the loop


def test_a_task(records):
    async def work():
        records.spin_until_named("task 'slow one'")

    async def main():
        await asyncio.create_task(work(), name="slow one")

    run(main())
    text = records.about("task 'slow one'")[0]
    head, _, place = text.split("\n")[0].partition(" seconds without a yield, and is at ")
    assert float(head.rsplit(" ", 1)[1]) >= 0.001
    # The callers of the loop are not reported: the stack begins with the coroutine.
    assert code_lines(text)[0] == ("work", "records.spin_until_named(\"task 'slow one'\")")
    assert code_lines(text)[1][0] == "spin_until_named"
    [text] = records.about("task 'slow one'", LAST)
    assert text.endswith(f" it was at {place}")
    assert " seconds without a yield; after " in text


def test_a_task_that_was_woken(records):
    async def work():
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        records.spin_until_named("task 'woken'")

    async def main():
        await asyncio.create_task(work(), name="woken")

    run(main())
    assert [text for text in records.about("task 'woken'", LAST) if "; after " in text]


class Callable:
    def __init__(self, records):
        self.records = records

    def __call__(self):
        self.records.spin_until_named("callback 'Callable'")

    def method(self, records):
        records.spin_until_named("callback 'Callable.method'")


def test_callbacks(records):
    def function():
        records.spin_until_named(f"callback {function.__qualname__!r}")

    def timer(number):
        records.spin_until_named(f"callback {timer.__qualname__!r}")

    def read(end):
        assert end.recv(1)
        records.spin_until_named(f"callback {read.__qualname__!r}")
        loop.remove_reader(end)
        loop.stop()

    own = Callable(records)
    loop = grapeshot.new_event_loop()
    here, there = socket.socketpair()
    with here, there:
        loop.add_reader(here, read, here)
        loop.call_soon(function)
        loop.call_soon(functools.partial(functools.partial(own.method), records))
        loop.call_soon(own)
        loop.call_later(0.001, timer, 5)
        loop.call_later(0.1, there.send, b"x")
        loop.run_forever()
        loop.close()
    names = [function.__qualname__, "Callable.method", "Callable", timer.__qualname__, read.__qualname__]
    for name in names:
        [first] = records.about(f"callback {name!r}")
        assert "without a yield" not in first
        [last] = records.about(f"callback {name!r}", LAST)
        assert " seconds; after " in last


@pytest.mark.parametrize("is_buffered", [False, True])
def test_methods_of_protocols(records, is_buffered):
    class Slow(asyncio.BufferedProtocol if is_buffered else asyncio.Protocol):
        def connection_made(self, transport):
            self.spin("connection_made")

        def data_received(self, data):
            self.spin("data_received")

        def get_buffer(self, size_hint):
            return bytearray(100)

        def buffer_updated(self, count):
            self.spin("buffer_updated")

        def connection_lost(self, exc):
            self.spin("connection_lost")
            done.set()

        def spin(self, name):
            records.spin_until_named(f"protocol method '{Slow.__qualname__}.{name}'")

    async def main():
        nonlocal done
        done = asyncio.Event()
        server = await asyncio.get_running_loop().create_server(Slow, "127.0.0.1", 0)
        async with server:
            with socket.create_connection(server.sockets[0].getsockname()) as client:
                client.sendall(b"x")
                await asyncio.sleep(0.01)
            await done.wait()

    done = None
    run(main())
    for name in ("connection_made", "buffer_updated" if is_buffered else "data_received", "connection_lost"):
        what = f"protocol method '{Slow.__qualname__}.{name}'"
        assert code_lines(records.about(what)[0])[0] == (name, f'self.spin("{name}")')
        assert len(records.about(what, LAST)) == 1


def test_c_code_that_releases_the_gil(records):
    async def work(lock):
        lock.acquire()

    async def main(lock):
        await asyncio.create_task(work(lock), name="blocked")

    with records.lock_until_named("task 'blocked'") as lock:
        run(main(lock))
    assert code_lines(records.about("task 'blocked'")[0]) == [("work", "lock.acquire()")]
    # A C function that the loop calls directly.
    loop = grapeshot.new_event_loop()
    with records.lock_until_named("callback 'lock.acquire'") as lock:
        loop.call_soon(lock.acquire)
        loop.call_soon(loop.stop)
        loop.run_forever()
    loop.close()
    [text] = records.about("callback 'lock.acquire'")
    assert text.endswith(" seconds, not in a Python function")
    [text] = records.about("callback 'lock.acquire'", LAST)
    assert text.endswith(" it was not in a Python function")


def test_c_code_that_keeps_the_gil_is_reported_when_it_ends(records):
    async def work():
        sum(range(3_000_000))

    async def main():
        await asyncio.create_task(work(), name="keeps it")

    before = sys.getswitchinterval()
    sys.setswitchinterval(CAP_S)  # the watchdog waits for the GIL
    try:
        run(main())
    finally:
        sys.setswitchinterval(before)
    [text] = records.about("task 'keeps it'", LAST)
    assert text.endswith(" seconds without a yield")
    assert records.about("task 'keeps it'") == []


def test_one_record_for_each_run(records):
    async def work():
        for _ in range(3):
            count = len(records.about("task 'again'"))
            end = time.monotonic() + CAP_S
            while len(records.about("task 'again'")) == count:
                assert time.monotonic() < end
            end = time.monotonic() + 0.03  # many times the limit
            while time.monotonic() < end:
                pass
            await asyncio.sleep(0)

    async def main():
        await asyncio.create_task(work(), name="again")

    run(main())
    # On a slow machine, other steps of the task may be slow, too.
    first, last = records.about("task 'again'"), records.about("task 'again'", LAST)
    assert 3 <= len(first) == len([text for text in last if "; after " in text])


def test_a_loop_that_waits_is_not_late(records):
    # The limit is far above the clock's resolution and the delays of a slow machine.
    coro.set_latency_warning(0.1)

    async def main():
        coro.set_latency_warning(0.1)
        for _ in range(3):
            await asyncio.sleep(0.3)

    run(main())
    assert [text for text in records.texts if "not in a Python function" in text] == []


# ------------------------------------------------------------------ which threads are watched


def test_a_task_beside_coros(records):
    async def work():
        records.spin_until_named("task 'beside'")

    def main():
        coro.spawn(records.spin_until_named, "coro 'also slow'", name="also slow").join()
        coro.await_(asyncio.create_task(work(), name="beside"))

    coro.run(main)
    assert len(records.about("task 'beside'", LAST)) == 1
    assert len(records.about("coro 'also slow'", LAST)) == 1


def test_a_coroutine_that_a_coro_awaits_is_reported_as_the_coro(records):
    async def work():
        records.spin_until_named("coro 'outer'")

    coro.run(lambda: coro.spawn(coro.await_, work(), name="outer").join())
    assert "work" in dict(code_lines(records.about("coro 'outer'")[0]))


def test_the_limit_can_be_set_while_the_loop_runs(records):
    coro.set_latency_warning(0)

    async def main():
        asyncio.current_task().set_name("main")
        await asyncio.sleep(0)
        coro.set_latency_warning(0.001)
        records.spin_until_named("task 'main'")
        coro.set_latency_warning(0.1)
        await asyncio.sleep(0.3)  # the slow call has ended, and the loop waits
        coro.set_latency_warning(0.001)
        await asyncio.sleep(0)
        await asyncio.create_task(later(), name="later")
        coro.set_latency_warning(0)
        count = len(records.texts)
        time.sleep(0.03)
        await asyncio.sleep(0)
        assert len(records.texts) == count

    async def later():
        records.spin_until_named("task 'later'")

    def callback():
        coro.set_latency_warning(0.001)
        records.spin_until_named(f"callback {callback.__qualname__!r}")
        loop.stop()

    run(main())
    assert [text for text in records.texts if "not in a Python function" in text] == []
    coro.set_latency_warning(0)
    loop = grapeshot.new_event_loop()
    loop.call_soon(callback)
    loop.run_forever()
    loop.close()


def sleeps_of_the_watchdog():
    """If the watchdog's thread sleeps without a time limit, return how often it has slept; otherwise return 0."""
    for thread in Path("/proc/self/task").iterdir():
        if (thread / "comm").read_text() == "coro-watchdog\n":
            call = (thread / "syscall").read_text().split()
            is_asleep = len(call) > 4 and int(call[4], 16) == 0  # the timeout argument of futex(2) is NULL
            count = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", (thread / "status").read_text(), re.MULTILINE)
            return int(count[1]) if is_asleep else 0
    return 0


@pytest.mark.skipif(not Path("/proc/self/syscall").exists(), reason="system calls cannot be seen on this system")
def test_a_new_limit_in_a_long_run_wakes_the_watchdog(records):
    """After the watchdog has reported a run, it sleeps until another run begins. A new limit wakes it earlier. After
    that it still reports later runs.
    """

    def long():
        records.spin_until_named(f"callback {long.__qualname__!r}")
        wait_until(sleeps_of_the_watchdog, "the watchdog to sleep")
        before = sleeps_of_the_watchdog()
        coro.set_latency_warning(0.002)
        wait_until(lambda: sleeps_of_the_watchdog() > before, "the watchdog to sleep again")

    def later():
        records.spin_until_named(f"callback {later.__qualname__!r}")

    async def main():
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        loop.call_soon(long)
        loop.call_soon(later)
        loop.call_soon(ended.set_result, None)
        await ended

    run(main())
    assert records.about(f"callback {later.__qualname__!r}")


def test_threads_are_watched_if_they_have_coros_or_a_limit(records):
    """Nothing is logged about a thread that has neither coros nor a limit, or that has switched its limit off."""

    def program(name, is_watched, prepare):
        async def work():
            if is_watched:
                records.spin_until_named(f"task {name!r}")
            else:
                time.sleep(0.3)  # longer than the default limit of 0.2 s

        async def main():
            prepare()
            await asyncio.sleep(0)
            await asyncio.create_task(work(), name=name)

        run(main())

    cases = [
        ("plain", False, lambda: None),
        ("off", False, lambda: (coro.spawn(coro.yield_slice), coro.set_latency_warning(None))),
        ("with coros", True, lambda: coro.spawn(coro.yield_slice)),
        ("with a limit", True, lambda: coro.set_latency_warning(0.001)),
    ]
    for case in cases:
        thread = threading.Thread(target=program, args=case)
        thread.start()
        thread.join()
    assert [text for text in records.texts if "'plain'" in text or "'off'" in text] == []


def test_debug_mode_logs_slow_steps_too(records):
    async def work():
        records.spin_until_named("task 'debugged'")

    async def main():
        loop = asyncio.get_running_loop()
        loop.slow_callback_duration = 0.001
        await asyncio.create_task(work(), name="debugged")

    grapeshot.run(main(), debug=True)
    assert len(records.about("task 'debugged'", LAST)) == 1
    assert [text for text in records.texts if text.startswith(("Executing <Handle", "Executing <Task"))]


def test_a_callback_that_leaves_the_loop(records):
    def leave():
        records.spin_until_named(f"callback {leave.__qualname__!r}")
        raise SystemExit(5)

    loop = grapeshot.new_event_loop()
    loop.call_soon(leave)
    with pytest.raises(SystemExit):
        loop.run_forever()
    assert len(records.about(f"callback {leave.__qualname__!r}", LAST)) == 1
    coro.set_latency_warning(0.1)
    time.sleep(0.3)  # nothing runs
    loop.close()
    assert [text for text in records.texts if "not in a Python function" in text] == []


def test_callables_whose_names_cannot_be_read(records):
    """Objects whose attributes cannot be read are named by their class."""

    class Odd:
        def __getattribute__(self, name):
            raise LookupError(name)

        def __call__(self):
            records.spin_until_named(f"callback {Odd.__qualname__!r}")

    loop = grapeshot.new_event_loop()
    loop.call_soon(Odd())
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    assert len(records.about(f"callback {Odd.__qualname__!r}", LAST)) == 1
