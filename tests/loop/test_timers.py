"""call_later and call_at: order, precision, cancelling, memory."""

from __future__ import annotations

import asyncio
import gc
import random
import time
import weakref

import pytest
from support import iterations, until

import grapeshot


def run_until_seen(loop, seen, count):
    def check():
        if len(seen) >= count:
            loop.stop()
        else:
            loop.call_later(0.001, check)

    check()
    loop.run_forever()


def test_time_is_the_monotonic_clock(loop):
    before = time.monotonic()
    now = loop.time()
    after = time.monotonic()
    assert type(now) is float
    assert before - 0.002 <= now <= after + 0.002


@pytest.mark.xfail_on(uvloop="loop.time() has a resolution of 1 ms")
def test_time_has_a_fine_resolution(loop):
    readings = set()
    until_s = time.monotonic() + 0.0005
    while time.monotonic() < until_s:
        readings.add(loop.time())
    readings.add(loop.time())
    assert len(readings) > 2


def test_deadlines_order_the_callbacks(loop):
    seen = []
    delays = [0.08, 0.02, 0.06, 0.0, 0.04, 0.1]
    now = loop.time()
    for delay in delays:
        loop.call_at(now + delay, seen.append, delay)
    run_until_seen(loop, seen, len(delays))
    assert seen == sorted(delays)


def test_equal_deadlines_of_call_at_all_run(loop):
    seen = []
    when = loop.time() + 0.005
    for number in range(200):
        loop.call_at(when, seen.append, number)
    run_until_seen(loop, seen, 200)
    assert sorted(seen) == list(range(200))


@pytest.mark.skip_on(asyncio="its heap is not stable for equal deadlines", uvloop="its clock advances between calls")
def test_equal_deadlines_keep_their_order(loop):
    seen = []
    when = loop.time() + 0.005
    for number in range(200):
        loop.call_at(when, seen.append, number)
    run_until_seen(loop, seen, 200)
    assert seen == list(range(200))


@pytest.mark.xfail_on(uvloop="a negative delay becomes zero")
def test_negative_delays_keep_their_order(loop):
    seen = []
    for delay in (-1, -3, -2, -0.5):
        loop.call_later(delay, seen.append, delay)
    run_until_seen(loop, seen, 4)
    assert seen == [-3, -2, -1, -0.5]


@pytest.mark.xfail_on(uvloop="timers with deadlines in the past run in the order of their creation")
def test_call_at_in_the_past_orders_by_deadline(loop):
    seen = []
    now = loop.time()
    for ago in (10, 30, 20):
        loop.call_at(now - ago, seen.append, ago)
    run_until_seen(loop, seen, 3)
    assert seen == [30, 20, 10]


def run_many_due(loop, later, choices):
    """Make many timers that are already due, so that the loop sorts them instead of taking each from its heap. Return
    two lists: the timers in the order in which they ran, and the timers in the order of their deadlines.
    """
    seen, handles = [], []
    order = random.Random(5)
    offsets = [number % choices for number in range(6000)]
    order.shuffle(offsets)
    far = [loop.call_later(1000 + number * 7919 % 1009, seen.append, "far") for number in range(later)]
    now = loop.time() - 10
    for number, offset in enumerate(offsets):
        handles.append((offset, number, loop.call_at(now + offset * 1e-3, seen.append, (offset, number))))
    cancelled = {number for _, number, _ in handles if number % 7 == 3}
    for _, number, handle in handles:
        if number in cancelled:
            handle.cancel()
    due = sorted((offset, number) for offset, number, _ in handles if number not in cancelled)
    run_until_seen(loop, seen, len(due))
    for handle in far:
        handle.cancel()
    return seen, due


@pytest.mark.skip_on(uvloop="a deadline in the past becomes now")
@pytest.mark.parametrize("later", [0, 100, 20_000])
def test_many_due_together_run_by_deadline(loop, later):
    seen, due = run_many_due(loop, later, 6000)
    assert seen == due


@pytest.mark.skip_on(asyncio="its heap is not stable for equal deadlines", uvloop="a deadline in the past becomes now")
def test_many_due_together_keep_their_order(loop):
    seen, due = run_many_due(loop, 100, 50)
    assert seen == due


@pytest.mark.xfail_on(uvloop="libuv runs due timers before callbacks of call_soon")
def test_ready_callbacks_run_before_a_timer_that_becomes_due(loop):
    seen = []
    loop.call_later(0, seen.append, "timer")
    loop.call_soon(seen.append, "ready")
    run_until_seen(loop, seen, 2)
    assert seen == ["ready", "timer"]


@pytest.mark.xfail_on(uvloop="timers fire up to 1 ms early")
async def test_a_timer_is_never_early(loop):
    rng = random.Random(1)
    early = []
    pending = 300

    def fired(index):
        nonlocal pending
        pending -= 1
        late = loop.time() - handles[index].when()
        if late < 0:
            early.append(late)

    handles = [loop.call_later(rng.uniform(0, 0.05), fired, index) for index in range(pending)]
    await until(lambda: pending == 0)
    handles.clear()
    assert early == []


def test_long_timers_that_are_due_soon_after_one_another_share_a_wakeup():
    """200 timers are due within 40 ms. Each may run up to a millisecond late."""
    loop = grapeshot.new_event_loop()
    try:
        seen = []
        numbers = list(range(200))
        random.Random(1).shuffle(numbers)

        def fired(number):
            seen.append((number, loop.time() - handles[number].when()))

        handles = {number: loop.call_later(1 + number * 0.0002, fired, number) for number in numbers}
        # Another timer ends the run shortly after the last deadline.
        loop.call_at(max(handle.when() for handle in handles.values()) + 0.0001, loop.stop)
        polls = loop.statistics().polls
        loop.run_forever()
        assert [number for number, _ in seen] == sorted(numbers, key=lambda number: handles[number].when())
        assert min(late for _, late in seen) >= 0
        assert loop.statistics().polls - polls < 100
    finally:
        loop.close()


def test_the_loop_does_not_sleep_when_a_long_timer_is_already_due():
    loop = grapeshot.new_event_loop()
    try:
        handle = loop.call_later(1, loop.stop)
        while loop.time() < handle.when():
            pass
        loop.run_forever()
        assert loop.statistics().polling_s == 0
    finally:
        loop.close()


async def test_short_sleeps_are_never_short(loop):
    for _ in range(50):
        start = time.monotonic()
        await asyncio.sleep(0.0007)
        if loop.__class__.__module__.startswith("uvloop"):
            continue  # uvloop's clock counts in ms
        assert time.monotonic() - start >= 0.0007


@pytest.mark.xfail_on(uvloop="#482: it returns a plain Handle")
def test_call_later_zero_gives_a_timer_handle(loop):
    handle = loop.call_later(0, print)
    assert isinstance(handle, asyncio.TimerHandle)
    assert handle.when() <= loop.time()
    handle.cancel()


@pytest.mark.xfail_on(uvloop="its handles are not asyncio's")
def test_when_is_the_deadline(loop):
    when = loop.time() + 1000
    handle = loop.call_at(when, print)
    assert handle.when() == pytest.approx(when, abs=0.002)
    assert isinstance(handle, asyncio.TimerHandle)
    before = loop.time()
    later = loop.call_later(50, print)
    assert before + 49.99 <= later.when() <= loop.time() + 50.01
    handle.cancel()
    later.cancel()


@pytest.mark.xfail_on(uvloop="when() is rounded to ms")
def test_when_of_call_at_is_exact(loop):
    when = loop.time() + 1000.123456789
    handle = loop.call_at(when, print)
    assert handle.when() == when
    handle.cancel()


@pytest.mark.xfail_on(uvloop="when() is rounded to ms")
def test_when_of_an_int_is_an_int(loop):
    when = int(loop.time()) + 1000
    handle = loop.call_at(when, print)
    assert handle.when() == when
    assert type(handle.when()) is int
    assert f"when={when} " in repr(handle)
    handle.cancel()


def test_cancel_before_it_is_due(loop):
    seen = []
    handle = loop.call_later(0.001, seen.append, "cancelled")
    handle.cancel()
    assert handle.cancelled()
    loop.call_later(0.01, seen.append, "kept")
    run_until_seen(loop, seen, 1)
    assert seen == ["kept"]


def test_a_due_timer_cancels_another_due_timer(loop):
    seen = []
    when = loop.time() + 0.002
    loop.call_at(when, lambda: victim.cancel())
    victim = loop.call_at(when + 0.00001, seen.append, "victim")
    time.sleep(0.005)  # both become due in one iteration
    loop.call_later(0.01, seen.append, "end")
    run_until_seen(loop, seen, 1)
    assert seen == ["end"]


def test_cancel_after_it_ran_does_nothing(loop):
    seen = []
    handle = loop.call_later(0, seen.append, 1)
    run_until_seen(loop, seen, 1)
    handle.cancel()
    handle.cancel()
    assert handle.cancelled()


def test_timers_added_by_timers(loop):
    seen = []

    def step(number):
        seen.append(number)
        if number < 20:
            loop.call_later(0, step, number + 1)

    loop.call_later(0, step, 0)
    run_until_seen(loop, seen, 21)
    assert seen == list(range(21))


def test_a_far_deadline_does_not_overflow(loop):
    handles = [loop.call_later(delay, print) for delay in (1e6, 1e9, 86400 * 365 * 200)]
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.run_until_complete(asyncio.sleep(0.001))
    for handle in handles:
        handle.cancel()


def test_an_infinite_delay_never_fires(loop):
    seen = []
    handle = loop.call_later(float("inf"), seen.append, 1)
    loop.run_until_complete(asyncio.sleep(0.002))
    assert seen == []
    handle.cancel()


@pytest.mark.parametrize("delay", ["1", object()])
def test_delay_of_the_wrong_type(loop, delay):
    with pytest.raises(TypeError):
        loop.call_later(delay, print)


def test_no_deadline(loop):
    with pytest.raises(TypeError):
        loop.call_at(None, print)
    with pytest.raises(TypeError):
        loop.call_later(None, print)


def test_a_wrong_number_of_arguments_is_refused(loop):
    with pytest.raises(TypeError):
        loop.call_later(1)
    with pytest.raises(TypeError):
        loop.call_at(1)


async def test_a_cancel_storm_frees_the_callbacks(loop):
    """A cancelled timer frees its callback and its arguments long before its deadline."""

    class Payload:
        pass

    payloads = []
    for _ in range(2000):
        payload = Payload()
        payloads.append(weakref.ref(payload))
        loop.call_later(10_000, id, payload).cancel()
    del payload
    await iterations(3)
    gc.collect()
    assert [reference for reference in payloads if reference() is not None] == []


async def test_a_cancel_storm_frees_the_handles(loop):
    kept = loop.call_later(10_000, print)
    references = []
    for _ in range(20):
        handles = [loop.call_later(10_000 + number % 7, print) for number in range(500)]
        references.append(len(handles))
        for handle in handles:
            handle.cancel()
        del handle, handles
        await iterations(2)
    gc.collect()
    alive = [thing for thing in gc.get_objects() if type(thing).__name__ == "TimerHandle"]
    assert len(alive) < 600, "cancelled handles pile up"
    kept.cancel()


async def test_wait_for_and_timeout(loop):
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(loop.create_future(), 0.002)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.002):
            await loop.create_future()
    assert await asyncio.wait_for(asyncio.sleep(0, "done"), 100) == "done"
