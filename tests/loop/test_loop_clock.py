"""A clock supplied by the program: set on one loop, defined in a subclass, or temporarily patched on the class."""

from __future__ import annotations

import asyncio
from unittest import mock

import pytest
from support import iterations, loop_factory

pytestmark = pytest.mark.skip_on(uvloop="its timers are libuv's, whatever loop.time() says")


class Clock:
    """A clock that changes only when the test sets it."""

    def __init__(self, now=100.0):
        self.now = now

    def __call__(self):
        return self.now


@pytest.fixture
def clock(loop):
    clock = Clock()
    loop.time = clock
    yield clock
    if "time" in vars(loop):
        del loop.time


async def due(*counted):
    """Let the loop run two iterations; return the entries of all given lists afterwards."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return [name for names in counted for name in names]


async def test_call_later_and_call_at(loop, clock):
    seen = []
    later = loop.call_later(10, seen.append, "later")
    loop.call_at(105, seen.append, "at")
    assert later.when() == 110
    assert await due(seen) == []
    clock.now = 105
    assert await due(seen) == ["at"]
    clock.now = 109.9
    assert await due(seen) == ["at"]
    clock.now = 110
    assert await due(seen) == ["at", "later"]


async def test_a_timer_is_due_at_exactly_its_deadline(loop, clock):
    """The rounding of floats makes no difference."""
    for number in range(200):
        clock.now = 0.1 * number
        seen = []
        loop.call_at(sum([0.1] * number), seen.append, number)
        assert await due(seen) == [number]


async def test_asyncios_timeouts_and_sleeps(loop, clock):
    sleeping = asyncio.ensure_future(asyncio.sleep(5, "slept"))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3):
            await asyncio.sleep(0)
            clock.now += 3
            await loop.create_future()
    assert not sleeping.done()
    clock.now += 2
    assert await sleeping == "slept"


async def test_a_clock_that_is_ahead(loop):
    """asyncio.timeout() computes its deadline with the program's clock. The loop compares the deadline with the same
    clock, so the timeout expires after 0.01 seconds.
    """
    real = loop.time
    loop.time = lambda: real() + 1000
    try:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await loop.create_future()
    finally:
        del loop.time


async def test_the_real_clock_comes_back(loop, clock):
    del loop.time
    assert loop.time() > 0
    seen = []
    loop.call_later(0.001, seen.append, 1)
    await asyncio.sleep(0.005)
    assert seen == [1]


async def test_mock(loop):
    """aiohttp's tests set the clock to a deadline, and run two iterations of the loop."""
    seen = []
    now = loop.time()
    with mock.patch.object(loop, "time") as clock:
        clock.return_value = now
        loop.call_at(now + 100, seen.append, 1)
        assert await due(seen) == []
        clock.return_value = now + 100
        assert await due(seen) == [1]
    assert loop.time() < now + 100


async def test_patched_on_the_class_in_the_middle_of_a_run(loop):
    seen = []
    loop.call_later(1000, seen.append, "before")
    real = type(loop).time
    with mock.patch.object(type(loop), "time", lambda self: real(self) + 2000):
        loop.call_later(1000, seen.append, "within")
        assert await due(seen) == ["before"]
    handle = loop.call_later(1000, seen.append, "after")
    assert handle.when() < loop.time() + 1001
    handle.cancel()
    await iterations(2)
    assert seen == ["before"]


def type_of(loop_kind):
    loop = loop_factory(loop_kind)()
    loop.close()
    return type(loop)


def test_a_subclass(loop_kind, _audit):
    base = type_of(loop_kind)

    class Own(base):
        ahead_s = 1000

        def time(self):
            return super().time() + self.ahead_s

    loop = Own()

    async def main():
        async with asyncio.timeout(0.2):
            await asyncio.sleep(0.001)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await loop.create_future()
        seen = []
        loop.call_later(50, seen.append, 1)
        loop.ahead_s += 50
        assert await due(seen) == [1]

    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


def test_a_virtual_clock_that_jumps(loop_kind, _audit):
    """The clock jumps to the next deadline, so ten days of sleep take no time."""
    base = type_of(loop_kind)

    class Virtual(base):
        now = 0.0

        def time(self):
            return self.now

        def call_at(self, when, callback, *args, context=None):
            def jump():
                self.now = max(self.now, when)

            self.call_soon(jump)
            return super().call_at(when, callback, *args, context=context)

    loop = Virtual()

    async def main():
        for _ in range(10):
            await asyncio.sleep(24 * 3600)
        return loop.time()

    try:
        assert loop.run_until_complete(main()) == 10 * 24 * 3600
    finally:
        loop.close()


async def test_call_later_goes_through_call_at(loop):
    calls = []
    original = loop.call_at

    def call_at(when, callback, *args, context=None):
        calls.append(when)
        return original(when, callback, *args, context=context)

    loop.call_at = call_at
    before = loop.time()
    try:
        handle = loop.call_later(5, print, "never", context=None)
        handle.cancel()
    finally:
        del loop.call_at
    assert before + 5 <= calls[0] == handle.when()
    loop.call_later(5, print).cancel()
    assert len(calls) == 1


def test_a_clock_in_the_dict(new_loop):
    loop = new_loop()
    seen = []
    loop.run_until_complete(asyncio.sleep(0.001))
    vars(loop)["time"] = Clock(50.0)
    loop.call_at(49, seen.append, 1)
    loop.call_at(51, seen.append, 2)
    loop.run_until_complete(asyncio.sleep(0))
    loop.run_until_complete(asyncio.sleep(0))
    assert seen == [1]
    del vars(loop)["time"]


def test_an_error_in_the_clock_ends_the_run(new_loop):
    loop = new_loop()
    loop.call_later(1000, print)

    def broken():
        raise LookupError

    loop.time = broken
    with pytest.raises(LookupError):
        loop.run_forever()
    with pytest.raises(LookupError):
        loop.call_later(1, print)
    del loop.time
    loop.call_soon(loop.stop)
    loop.run_forever()


@pytest.mark.parametrize("method", ["call_later", "call_at"])
def test_errors_are_the_same_as_with_the_native_clock(new_loop, method):
    loop = new_loop()
    loop.time = Clock()
    with pytest.raises(TypeError):
        getattr(loop, method)(None, print)
    with pytest.raises(TypeError):
        getattr(loop, method)(1)
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        getattr(loop, method)(1, print)
    del loop.time


async def test_the_order_of_timers(loop, clock):
    seen = []
    for delay in (3, 1, 2, 1):
        loop.call_later(delay, seen.append, delay)
    cancelled = loop.call_later(0.5, seen.append, "cancelled")
    cancelled.cancel()
    clock.now += 10
    assert await due(seen) == [1, 1, 2, 3]


async def test_blocking_waits_follow_the_clock(loop):
    """The loop sleeps for the time that is left according to the program's clock, and then reads that clock again."""
    real, jumps = loop.time, []

    def fast():
        jumps.append(1)
        return real() * 1000

    loop.time = fast
    try:
        await asyncio.sleep(1)  # takes up to a real second, although this clock runs 1,000 times as fast
    finally:
        del loop.time
    assert jumps


def test_attributes_of_a_loop_are_ordinary(new_loop):
    loop = new_loop()
    loop.something = 1
    object.__setattr__(loop, "other", 2)
    assert (loop.something, loop.other) == (1, 2)
    del loop.something
    with pytest.raises(AttributeError):
        loop.something  # noqa: B018
