"""Sleeping coros wake on time, in order, and once."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import time
import weakref

import pytest
from support import coro_is_available, sleep_zero

import grapeshot

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro


def test_long_sleeps_that_end_soon_after_one_another_share_a_wakeup():
    seen = []

    def sleeper(number):
        coro.sleep_relative(1 + number * 0.0002)
        seen.append(number)

    def main():
        for thread in [coro.spawn(sleeper, number) for number in range(200)]:
            thread.join()
        return asyncio.get_running_loop().statistics().polls

    assert coro.run(main) < 100
    assert seen == list(range(200))


def test_a_timer_that_is_due_does_not_end_a_later_wait():
    """The sleeper is interrupted when its timer is due but has not fired yet. When the timer fires, the sleeper already
    waits for something else.
    """

    def sleeper(due):
        with pytest.raises(coro.Interrupted):
            coro.sleep_absolute(due)
        return coro.wait()

    def main():
        due = coro.now() + 0.005
        thread = coro.spawn(sleeper, due)
        coro.yield_slice()
        while coro.now() <= due:
            pass
        thread.interrupt()
        for _ in range(5):
            coro.yield_slice()
        assert thread._status == "waiting"
        coro.schedule(thread, "meant")
        return thread.join()

    assert coro.run(main) == "meant"


def test_a_timer_of_a_sleep_that_was_cut_short_does_not_end_a_later_wait():
    def sleeper():
        coro.sleep_relative(0.05)
        return coro.wait()

    def main():
        thread = coro.spawn(sleeper)
        coro.yield_slice()
        coro.schedule(thread)
        coro.sleep_relative(0.1)
        assert thread._status == "waiting"
        coro.schedule(thread, "meant")
        return thread.join()

    assert coro.run(main) == "meant"


def test_ten_thousand_timers_wake_in_order_and_not_early():
    count = 10_000
    order = []

    def sleeper(number, due):
        coro.sleep_absolute(due)
        assert coro.now() >= due
        order.append(number)

    def main():
        due = coro.now() + 0.05
        threads = [coro.spawn(sleeper, number, due) for number in range(count)]
        for thread in threads:
            thread.join()

    coro.run(main)
    assert order == list(range(count))


def test_sleepers_wake_in_the_order_of_their_deadlines():
    generator = random.Random(5)
    order = []

    def sleeper(due):
        coro.sleep_absolute(due)
        assert coro.now() >= due
        order.append(due)

    def main():
        # Even the earliest deadline is late enough that all coros are asleep by then. A coro that began to sleep after
        # its deadline would wake late.
        began = coro.now() + 0.02
        dues = [began + generator.random() / 20 for _ in range(2000)]
        threads = [coro.spawn(sleeper, due) for due in dues]
        for thread in threads:
            thread.join()
        return dues

    dues = coro.run(main)
    assert sorted(order) == sorted(dues)
    assert order == sorted(order)


def test_coros_futures_and_callbacks_that_are_due_together_run_in_order():
    """First the timers' callbacks run in order. In the next iteration, coros and callbacks of futures run in order."""
    order = []

    async def main():
        loop = asyncio.get_running_loop()
        due = loop.time() + 0.03

        def blocking(number):
            coro.sleep_absolute(due)
            assert loop.time() >= due
            order.append(number)

        waiting = []
        for number in range(300):
            kind = number % 3
            if kind == 0:
                waiting.append(coro.spawn(blocking, number))
                await asyncio.sleep(0)  # now the coro sleeps
            elif kind == 1:
                future = loop.create_future()
                loop.call_at(due, lambda future=future, number=number: (order.append(number), future.set_result(None)))
                waiting.append(future)
            else:
                future = loop.create_future()
                loop.call_at(due, future.set_result, number)
                future.add_done_callback(lambda future: order.append(future.result()))
                waiting.append(future)
        for one in waiting:
            await one

    grapeshot.run(main())
    assert sorted(order) == list(range(300))
    assert [number for number in order if number % 3 == 1] == list(range(1, 300, 3))
    assert [number for number in order if number % 3 != 1] == [number for number in range(300) if number % 3 != 1]


def test_thousands_of_short_sleeps_beside_tasks():
    generator = random.Random(6)
    naps = [[generator.random() / 500 for _ in range(10)] for _ in range(200)]

    def blocking(delays):
        for delay in delays:
            began = time.monotonic()
            coro.sleep_relative(delay)
            assert time.monotonic() >= began + delay
        return len(delays)

    async def waiting(delays):
        for delay in delays:
            began = time.monotonic()
            await asyncio.sleep(delay)
            assert time.monotonic() >= began + delay
        return len(delays)

    async def main():
        makers = itertools.cycle([lambda delays: coro.spawn(blocking, delays), waiting])
        return await asyncio.gather(*(maker(delays) for maker, delays in zip(makers, naps, strict=False)))

    assert grapeshot.run(main()) == [10] * 200


def test_sleeps_that_were_cut_short_keep_nothing_alive():
    """The timers of the interrupted sleeps are due in an hour, but no longer refer to anything."""

    def sleeper():
        with pytest.raises(coro.Interrupted):
            coro.sleep_relative(3600)

    def main():
        references = []
        for _ in range(5):
            threads = [coro.spawn(sleeper) for _ in range(500)]
            references += [weakref.ref(thread) for thread in threads]
            coro.yield_slice()
            for thread in threads:
                thread.interrupt()
            for thread in threads:
                thread.join()
            del thread, threads
        coro.yield_slice()
        gc.collect()
        return sum(reference() is not None for reference in references)

    assert coro.run(main) == 0


def test_sleeps_follow_a_clock_that_the_program_has_set():
    """A coro's sleep follows a replaced `loop.time`, as asyncio's sleep does: both use the loop's timers."""

    async def main():
        loop = asyncio.get_running_loop()
        now = loop.time()
        loop.time = lambda: now
        try:
            sleeper = coro.spawn(coro.sleep_relative, 1000)
            await sleep_zero(5)
            assert not sleeper.done()
            now += 1000
            await sleep_zero(5)
            assert sleeper.done()
        finally:
            del loop.time

    grapeshot.run(main())


LIMITED = {
    "pop": lambda: coro.fifo().pop(timeout=1000),
    "push": lambda: full().push(2, timeout=1000),
    "acquire": lambda: coro.semaphore(0).acquire(timeout=1000),
    "receive": lambda: coro.channel().receive(timeout=1000),
    "event": lambda: coro.event().wait(1000),
    "join": lambda: coro.spawn(coro.wait).join(1000),
    "wait": lambda: coro.wait([coro.spawn(coro.wait)], timeout=1000),
    "timeout": lambda: coro.with_timeout(1000, coro.wait),
    "sleep_absolute": lambda: coro.sleep_absolute(coro.now() + 1000),
}


def full():
    fifo = coro.fifo(1)
    fifo.push(1)
    return fifo


@pytest.mark.parametrize("ahead_s", [-1e6, 1e6])
@pytest.mark.parametrize("way", LIMITED)
def test_limits_follow_a_clock_that_the_program_has_set(way, ahead_s):
    async def main():
        loop = asyncio.get_running_loop()
        now = loop.time() + ahead_s
        loop.time = lambda: now
        try:
            waiter = coro.spawn(LIMITED[way])
            await sleep_zero(10)
            assert not waiter.done()
            now += 1000
            await sleep_zero(10)
            assert waiter.done()
            assert isinstance(waiter.exception(), coro.TimeoutError | None)
            for co in coro.get_live_coros():
                co.shutdown()
        finally:
            del loop.time

    grapeshot.run(main())


def test_a_wait_for_several_follows_a_clock_that_the_program_has_set():
    """When the first coro has ended, `wait` asks the loop's clock how much of its timeout is left."""

    async def main():
        loop = asyncio.get_running_loop()
        now = loop.time()
        loop.time = lambda: now
        try:
            coros = [coro.spawn(coro.sleep_relative, 600), coro.spawn(coro.sleep_relative, 2000)]
            waiter = coro.spawn(coro.wait, coros, timeout=1000)
            for step in (600, 399, 1):
                for _ in range(10):
                    await asyncio.sleep(0)
                assert not waiter.done()
                now += step
            for _ in range(10):
                await asyncio.sleep(0)
            assert waiter.result() == coros[:1]
            coros[1].shutdown()
        finally:
            del loop.time

    grapeshot.run(main())


def test_a_sleep_returns_nothing_of_an_earlier_wait():
    def sleeper():
        with pytest.raises(coro.Interrupted):
            coro.wait()
        return coro.sleep_relative(0)

    def main():
        co = coro.spawn(sleeper)
        coro.yield_slice()
        coro.schedule(co, "of the wait")
        co.interrupt()
        assert co.join() is None

    coro.run(main)
