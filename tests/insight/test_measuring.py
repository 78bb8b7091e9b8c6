"""`loop.measure_callbacks()` and slow listeners: how long callbacks take, and how long they wait for their turn."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from unittest import mock

import pytest
from support import CAP_S, HOST, coro_is_available, gil_is_enabled, raw_pair, run_script, until

import grapeshot
from grapeshot.insight import _measuring
from grapeshot.insight._statistics import Histogram

BUSY_S = 0.02
needs_coros = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")


@pytest.fixture
def loop():
    loop = grapeshot.new_event_loop()
    yield loop
    loop.close()


def compute(seconds=BUSY_S):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


class Busy(asyncio.Protocol):
    def data_received(self, data):
        compute()


def run(loop, *callbacks):
    """Run one iteration with these callbacks, and with `loop.stop` as the last one."""
    for callback in callbacks:
        loop.call_soon(callback)
    loop.call_soon(loop.stop)
    loop.run_forever()


def long_ones(histogram, least_s=BUSY_S):
    return sum(number for end_s, number in histogram.buckets if end_s > least_s)


@pytest.mark.parametrize("delay_s", [0.01, 1])
def test_the_delay_of_a_timer_that_a_callback_holds_up_counts_from_its_deadline(loop, delay_s):
    """With `delay_s=1` the timer has slack: the loop may sleep a little beyond the deadline, and then the delay counts
    from the end of that sleep. Here a callback makes the timer late, so the delay counts from the deadline.
    """
    loop.measure_callbacks()

    def hold_up():
        while loop.time() < handle.when() + 0.0008:
            pass

    handle = loop.call_later(delay_s, loop.stop)
    loop.call_at(handle.when() - 0.2, hold_up)
    loop.run_forever()
    assert loop.statistics().scheduling_delays.max_s >= 0.0008


def test_nothing_is_measured_before_somebody_asks(loop):
    run(loop, compute)
    found = loop.statistics()
    assert found.callback_durations is None
    assert found.scheduling_delays is None


def test_durations(loop):
    loop.measure_callbacks()
    run(loop, *[int] * 100, compute, *[int] * 100, compute)
    durations = loop.statistics().callback_durations
    assert durations.count == loop.statistics().callbacks == 203
    assert long_ones(durations) == 2
    assert durations.sum_s >= 2 * BUSY_S
    assert BUSY_S <= durations.max_s <= durations.sum_s - BUSY_S
    assert durations.percentile(100) == durations.max_s
    assert durations.percentile(99.5) >= BUSY_S > durations.percentile(50)


def test_the_numbers_stay_after_measuring_has_ended(loop):
    loop.measure_callbacks()
    run(loop, int)
    loop.measure_callbacks(False)
    run(loop, int)
    assert loop.statistics().callback_durations.count == 2
    run(loop, loop.measure_callbacks, int)  # the callback that begins the measuring is not measured itself
    assert loop.statistics().callback_durations.count == 4


def test_cancelled_handles_do_not_count_as_callbacks(loop):
    loop.measure_callbacks()
    loop.call_soon(int).cancel()
    run(loop, compute)
    found = loop.statistics()
    assert found.callback_durations.count == found.scheduling_delays.count == 2


def test_delays_behind_another_callback(loop):
    loop.measure_callbacks()

    def schedule():
        compute()  # does not delay the callbacks below, because they are scheduled after this call
        loop.call_soon(int)
        loop.call_soon(compute)
        loop.call_soon(int)
        loop.call_soon(loop.stop)

    loop.call_soon(schedule)
    loop.run_forever()
    delays = loop.statistics().scheduling_delays
    assert delays.count == 5
    assert long_ones(delays) == 2  # the second int, and the stop
    assert 2 * BUSY_S <= delays.sum_s


def test_delays_of_timers(loop):
    loop.measure_callbacks()
    loop.call_later(0.001, loop.stop)
    loop.call_soon(compute)
    loop.run_forever()
    delays = loop.statistics().scheduling_delays
    assert delays.count == 2
    assert delays.max_s >= BUSY_S - 0.001


def test_delays_of_timers_by_a_clock_that_the_program_has_set(loop):
    loop.time = lambda: time.monotonic() / 2 - 1000
    loop.measure_callbacks()
    loop.call_later(0.001, loop.stop)
    loop.call_soon(compute)
    loop.run_forever()
    delays = loop.statistics().scheduling_delays
    assert delays.count == 2
    assert BUSY_S / 2 - 0.002 <= delays.max_s


def test_delays_of_other_threads_and_many_iterations(loop):
    loop.measure_callbacks()
    left = 200

    def chain():
        nonlocal left
        left -= 1
        loop.call_soon(chain if left else loop.stop)

    loop.call_soon(lambda: threading.Thread(target=loop.call_soon_threadsafe, args=(chain,)).start())
    started = time.monotonic()
    loop.run_forever()
    took_s = time.monotonic() - started
    found = loop.statistics()
    assert found.scheduling_delays.count == found.callback_durations.count == 202
    assert found.scheduling_delays.sum_s + found.callback_durations.sum_s <= took_s


async def test_protocol_callbacks_are_counted_and_delay_each_other(loop):
    loop.measure_callbacks()
    pairs = [raw_pair() for _ in range(2)]
    transports = [(await loop.connect_accepted_socket(Busy, ours))[0] for ours, _ in pairs]
    for _, theirs in pairs:
        theirs.sendall(b"x")
    await until(lambda: long_ones(loop.statistics().callback_durations) >= 2)
    assert long_ones(loop.statistics().scheduling_delays) >= 1
    for transport, (_, theirs) in zip(transports, pairs, strict=True):
        transport.close()
        theirs.close()
    await asyncio.sleep(0)


async def test_another_thread_reads_the_statistics(loop):
    loop.measure_callbacks()
    found = []
    thread = threading.Thread(target=lambda: found.extend(loop.statistics() for _ in range(200)))
    thread.start()
    while thread.is_alive():
        await asyncio.sleep(0)
    counts = [each.callback_durations.count for each in found]
    assert counts == sorted(counts)


# ---------------------------------------------------------------- slow listeners


async def test_slow_listeners(loop):
    told = []
    loop.add_slow_listener(told.append, BUSY_S)

    async def task():
        compute()

    loop.call_soon(functools.partial(compute, BUSY_S))
    loop.call_soon(int)
    before = loop.time()
    await asyncio.create_task(task(), name="busy task")
    ours, theirs = raw_pair()
    transport, _ = await loop.connect_accepted_socket(Busy, ours)
    theirs.sendall(b"x")
    await until(lambda: len(told) >= 3)
    assert [(slow.kind, slow.name) for slow in told] == [
        ("callback", "compute"),
        ("task", "busy task"),
        ("protocol", "Busy"),
    ]
    for slow in told:
        assert slow.duration_s >= BUSY_S
        assert before <= slow.started_s <= loop.time() - slow.duration_s
        assert slow.stack == ()
    transport.close()
    theirs.close()
    await asyncio.sleep(0)
    assert loop.remove_slow_listener(told.append)
    assert not loop.remove_slow_listener(told.append)
    await asyncio.sleep(0)  # the step that removed the listener is the last one that is measured
    count = loop.statistics().callback_durations.count
    compute()
    await asyncio.sleep(0)
    assert len(told) == 3
    assert loop.statistics().callback_durations.count == count  # callbacks are not measured any more


async def test_each_listener_has_its_own_limit(loop):
    low, high = [], []
    loop.add_slow_listener(low.append, BUSY_S)
    loop.add_slow_listener(high.append, 3600)
    await asyncio.sleep(0)
    compute()
    await asyncio.sleep(0)
    assert len(low) == 1
    assert high == []
    with pytest.raises(ValueError):
        loop.add_slow_listener(print, 0)


def recorders():
    """Return how many threads sample the running callbacks."""
    code = _measuring._StackRecorder.run.__code__
    return sum(
        code in {frame.f_code for frame, _ in traceback.walk_stack(top)} for top in sys._current_frames().values()
    )


@pytest.mark.skipif(not gil_is_enabled(), reason="without a GIL, stacks of other threads cannot be read")
def test_stacks(loop):
    told = []
    loop.add_slow_listener(told.append, 0.05, stacks=True)

    def until_seen():
        recorder = loop._measuring.recorder
        started = time.monotonic()
        give_up = started + 10
        while time.monotonic() - started < 0.05 or recorder._seen[0] == 0:
            assert time.monotonic() < give_up

    run(loop, until_seen)
    assert recorders() == 1
    assert any("in until_seen" in line for line in told[0].stack), told
    assert not any("run_forever" in line for line in told[0].stack)
    loop.remove_slow_listener(told.append)
    assert recorders() == 0


@pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
@pytest.mark.skipif(not gil_is_enabled(), reason="without a GIL, stacks of other threads cannot be read")
def test_stacks_in_a_patched_program():
    """The sampling thread is a real thread. Threads of a patched `threading` are coros, which could not run during the
    slow callback.
    """
    code = """
        from grapeshot import coro
        coro.patch()
        import threading, time

        def burn():
            recorder = loop._measuring.recorder
            give_up = time.monotonic() + 10
            end = time.monotonic() + 0.05
            while time.monotonic() < end or recorder._seen[0] == 0:
                assert time.monotonic() < give_up

        def main():
            global loop
            from grapeshot.insight._tree import running_loop
            loop = running_loop()
            told = []
            loop.add_slow_listener(told.append, 0.05, stacks=True)
            thread = threading.Thread(target=burn, name="burner")
            thread.start()
            thread.join()
            time.sleep(0.001)
            [slow] = [each for each in told if each.name == "burner"]
            assert any("in burn" in line for line in slow.stack), slow
            loop.remove_slow_listener(told.append)
            print("seen")

        coro.run(main)
    """
    assert run_script("grapeshot", code) == "seen\n"


def test_a_forked_child_closes_the_loop(loop):
    """The child has no sampling thread, and must not wait for one to end."""
    loop.add_slow_listener(print, 3600, stacks=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            _measuring._END_S = 3600
            signal.alarm(30)
            loop.close()
            os._exit(0)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    loop.remove_slow_listener(print)


def test_a_closed_loop_has_no_thread_left(loop):
    loop.add_slow_listener(print, 3600, stacks=True)
    run(loop, int)
    loop.close()
    assert recorders() == 0
    assert loop.statistics().callback_durations.count == 2


def test_an_exception_in_a_listener_is_reported(loop):
    reports = []
    loop.set_exception_handler(lambda _loop, context: reports.append(context))

    def broken(slow):
        raise ZeroDivisionError

    loop.add_slow_listener(broken, BUSY_S)
    told = []
    loop.add_slow_listener(told.append, BUSY_S)
    run(loop, compute)
    assert [type(report["exception"]) for report in reports] == [ZeroDivisionError]
    assert "slow listener" in reports[0]["message"]
    assert len(told) == 1
    reports.clear()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_system_exit_from_a_listener_leaves_the_loop(loop, kind):
    def leave(slow):
        raise kind

    loop.add_slow_listener(leave, BUSY_S)
    with pytest.raises(kind):
        run(loop, compute)
    run(loop)
    client, other = raw_pair()
    transport, _ = loop.run_until_complete(loop.create_connection(Busy, sock=client))
    with other:
        other.send(b"x")
        timer = loop.call_later(CAP_S, loop.stop)
        with pytest.raises(kind):
            loop.run_forever()
        timer.cancel()
        transport.abort()
        run(loop, int)


def test_callbacks_without_a_name(loop):
    told = []
    loop.add_slow_listener(told.append, BUSY_S)
    run(loop, mock.Mock(side_effect=compute), functools.partial(functools.partial(compute), BUSY_S))
    assert [(slow.kind, slow.name) for slow in told] == [("callback", "Mock"), ("callback", "compute")]


@pytest.mark.parametrize("seconds", [math.inf, 1e300])
def test_a_listener_with_an_unreachable_threshold(loop, seconds):
    loop.add_slow_listener(print, seconds, stacks=True)
    run(loop, compute)
    told = []
    loop.add_slow_listener(told.append, BUSY_S)
    run(loop, compute)
    assert len(told) == 1
    assert loop.remove_slow_listener(print)


def test_beside_debug_mode(loop, caplog):
    loop.set_debug(True)
    loop.slow_callback_duration = BUSY_S
    told = []
    loop.add_slow_listener(told.append, BUSY_S)
    with caplog.at_level(logging.WARNING, logger="asyncio"):
        run(loop, compute)
    assert len(told) == len([record for record in caplog.records if "Executing" in record.getMessage()]) == 1


def test_callbacks_that_raise_are_measured(loop):
    loop.set_exception_handler(lambda _loop, context: None)
    told = []
    loop.add_slow_listener(told.append, BUSY_S)

    def broken():
        compute()
        raise ZeroDivisionError

    def leave():
        compute()
        raise SystemExit

    run(loop, broken)
    with pytest.raises(SystemExit):
        run(loop, leave)
    assert len(told) == 2
    run(loop, int)


@needs_coros
async def test_coros(loop):
    from grapeshot import coro

    told = []
    loop.add_slow_listener(told.append, BUSY_S)

    def busy():
        for _ in range(3):
            coro.yield_slice()  # so that each run is measured separately
            compute()

    co = coro.spawn(busy, name="busy")
    await until(co.done)
    assert [(slow.kind, slow.name) for slow in told] == [("coro", "busy")] * 3
    assert long_ones(loop.statistics().callback_durations) == 3


@needs_coros
@pytest.mark.parametrize("way", ["histogram", "observer"])
async def test_each_turn_of_a_coro_that_has_the_loop_for_itself_is_measured(loop, way):
    from grapeshot import coro

    turns = []
    if way == "histogram":
        loop.measure_callbacks()
    else:
        loop._set_step_observer(lambda what, *_: turns.append(what))
    await coro.spawn(lambda: [coro.yield_slice() for _ in range(10)])
    count = loop.statistics().callback_durations.count if way == "histogram" else len(turns)
    loop._set_step_observer(None)
    assert 11 <= count <= 15  # a few belong to this test's own task


async def test_an_echo_server_works_while_callbacks_are_measured(loop):
    loop.measure_callbacks()

    class Echo(asyncio.Protocol):
        def connection_made(self, transport):
            self.transport = transport

        def data_received(self, data):
            self.transport.write(data)

        def connection_lost(self, exc):
            lost.set()

    lost = asyncio.Event()
    server = await loop.create_server(Echo, HOST, 0)
    before = loop.statistics()
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), family=socket.AF_INET)
    for _ in range(20):
        writer.write(b"ping")
        assert await reader.readexactly(4) == b"ping"
    found = loop.statistics()
    assert found.writes - before.writes == 40
    assert found.callback_durations.count - before.callback_durations.count >= 60
    writer.close()
    await writer.wait_closed()
    await lost.wait()
    server.close()


def test_an_empty_histogram():
    assert Histogram(count=0, sum_s=0.0, max_s=0.0, buckets=()).percentile(50) == 0.0
