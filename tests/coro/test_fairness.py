"""Fairness: coros that never wait, and handles that reschedule themselves, do not starve others."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import threading
import time

import pytest
from support import CAP_S, coro_is_available

import grapeshot

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro


class Spinners:
    """Coros that yield but never wait. They run until `stop` is called, and fail if that takes longer than `CAP_S`."""

    def __init__(self, count):
        self.slices = [0] * count
        self.stopped = False
        self._coros = [coro.spawn(self._spin, number) for number in range(count)]

    def _spin(self, number):
        ends = time.monotonic() + CAP_S
        while not self.stopped:
            assert time.monotonic() < ends, "starved"
            self.slices[number] += 1
            coro.yield_slice()

    def stop(self, *_):
        self.stopped = True

    async def end(self):
        for thread in self._coros:
            await thread


@pytest.mark.parametrize("count", [1, 50])
def test_spinning_coros_and_handles_take_turns(count):
    async def main():
        loop = asyncio.get_running_loop()
        spinners = Spinners(count)
        seen = []

        def handle():
            seen.append(sum(spinners.slices))
            if len(seen) < 200:
                loop.call_soon(handle)
            else:
                spinners.stop()

        loop.call_soon(handle)
        await spinners.end()
        return seen

    seen = grapeshot.run(main())
    assert len(seen) == 200
    # First come, first served: between two runs of the handle each coro runs once.
    assert {after - before for before, after in itertools.pairwise(seen)} == {count}


@pytest.mark.parametrize("count", [1, 50])
def test_spinning_coros_take_turns_with_each_other_and_with_tasks(count):
    async def main():
        spinners = Spinners(count)
        for _ in range(300):
            await asyncio.sleep(0)
        slices = list(spinners.slices)
        spinners.stop()
        await spinners.end()
        return slices

    slices = grapeshot.run(main())
    assert max(slices) - min(slices) <= 1
    assert 299 <= min(slices) <= 301


@pytest.mark.parametrize("count", [1, 20])
def test_spinning_coros_do_not_starve_timers(count):
    async def main():
        loop = asyncio.get_running_loop()
        spinners = Spinners(count)
        woken = []

        def sleeper():
            coro.sleep_relative(0.005)
            woken.append("coro")

        async def task():
            await asyncio.sleep(0.005)
            woken.append("task")

        threads = [coro.spawn(sleeper) for _ in range(5)]
        tasks = [asyncio.create_task(task()) for _ in range(5)]
        fired = loop.create_future()
        loop.call_later(0.02, fired.set_result, None)
        await fired
        for one in [*threads, *tasks]:
            await one
        spinners.stop()
        await spinners.end()
        return woken

    assert sorted(grapeshot.run(main())) == ["coro"] * 5 + ["task"] * 5


@pytest.mark.parametrize("count", [1, 20])
def test_spinning_coros_do_not_starve_sockets_and_other_threads(count):
    async def main():
        loop = asyncio.get_running_loop()
        left, right = socket.socketpair()
        for end in (left, right):
            end.setblocking(False)
        spinners = Spinners(count)
        with left, right:
            received = []
            for number in range(50):
                await loop.sock_sendall(left, b"%d" % number)
                received.append(await loop.sock_recv(right, 100))
            readable = loop.create_future()
            loop.add_reader(right, lambda: readable.done() or readable.set_result(right.recv(100)))
            left.send(b"last")
            received.append(await readable)
            loop.remove_reader(right)
        called = loop.create_future()
        thread = threading.Thread(target=loop.call_soon_threadsafe, args=(called.set_result, "called"))
        thread.start()
        received.append(await called)
        received.append(await loop.run_in_executor(None, lambda: "ran"))
        thread.join()
        spinners.stop()
        await spinners.end()
        return received

    assert grapeshot.run(main()) == [b"%d" % number for number in range(50)] + [b"last", "called", "ran"]


@pytest.mark.parametrize("count", [1, 20])
def test_spinning_coros_do_not_starve_signals(count):
    async def main():
        loop = asyncio.get_running_loop()
        spinners = Spinners(count)
        by_loop = loop.create_future()
        by_python = []
        loop.add_signal_handler(signal.SIGUSR1, lambda: by_loop.done() or by_loop.set_result("loop"))
        before = signal.signal(signal.SIGUSR2, lambda *_: by_python.append("python"))
        try:
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGUSR2)
            result = await by_loop
            while not by_python:
                await asyncio.sleep(0)
        finally:
            signal.signal(signal.SIGUSR2, before)
            loop.remove_signal_handler(signal.SIGUSR1)
        spinners.stop()
        await spinners.end()
        return [result, *by_python]

    assert grapeshot.run(main()) == ["loop", "python"]


@pytest.mark.parametrize("kind", ["coro", "task"])
def test_a_coro_that_yields_alone_stops_with_the_loop(kind):
    loop = grapeshot.new_event_loop()
    seen = []

    def work():
        coro.yield_slice()
        loop.stop()
        seen.append("before")
        coro.yield_slice()
        seen.append("after")

    async def task():
        await asyncio.sleep(0)
        loop.stop()
        seen.append("before")
        await asyncio.sleep(0)
        seen.append("after")

    async def begin():
        return coro.spawn(work) if kind == "coro" else asyncio.create_task(task())

    try:
        started = loop.run_until_complete(begin())
        loop.run_forever()
        assert seen == ["before"]
        loop.run_until_complete(started)
        assert seen == ["before", "after"]
    finally:
        loop.close()


def test_written_data_is_sent_at_the_next_yield():
    async def main():
        loop = asyncio.get_running_loop()
        left, right = socket.socketpair()
        right.setblocking(False)
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=left)

        def work():
            received = b""
            for number in range(100):
                transport.write(bytes([number]))
                coro.yield_slice()
                received += right.recv(100)
            return received

        with right:
            received = await coro.spawn(work)
            transport.close()
        return received

    assert grapeshot.run(main()) == bytes(range(100))


def test_a_yield_counts_as_a_switch_even_if_nothing_else_is_ready():
    def main():
        before = coro.stack_info()["switches"]
        for _ in range(1000):
            coro.yield_slice()
        return coro.stack_info()["switches"] - before

    assert coro.run(main) == 1000


def test_handles_that_queue_themselves_again_do_not_starve_coros():
    async def main():
        loop = asyncio.get_running_loop()
        runs = 0
        is_over = False

        def again():
            nonlocal runs
            runs += 1
            if not is_over:
                loop.call_soon(again)

        def work():
            seen = []
            for _ in range(200):
                seen.append(runs)
                coro.yield_slice()
            return seen

        def nap():
            for _ in range(5):
                coro.sleep_relative(0.001)
            return "rested"

        for _ in range(10):
            loop.call_soon(again)
        threads = [coro.spawn(work) for _ in range(3)]
        napping = coro.spawn(nap)
        seen = [await thread for thread in threads]
        rested = await napping
        is_over = True
        await asyncio.sleep(0)
        return seen, rested

    seen, rested = grapeshot.run(main())
    assert rested == "rested"
    for runs in seen:
        # Each of the ten handles runs once between two slices of a coro.
        assert {after - before for before, after in itertools.pairwise(runs)} == {10}


def test_coros_that_start_coros_do_not_starve_the_rest():
    """Each coro of an endless chain spawns its successor and ends."""

    async def main():
        state = {"links": 0, "stopped": False}
        ends = time.monotonic() + CAP_S

        def link():
            assert time.monotonic() < ends, "starved"
            state["links"] += 1
            if not state["stopped"]:
                coro.spawn(link)

        for _ in range(20):
            coro.spawn(link)
        await asyncio.sleep(0.01)
        for _ in range(100):
            await asyncio.sleep(0)
        state["stopped"] = True
        return state["links"]

    assert grapeshot.run(main()) >= 20 * 100


def test_wakers_that_wake_each_other_do_not_starve_the_rest():
    async def main():
        channel = coro.channel()
        state = {"stopped": False, "handed": 0}
        ends = time.monotonic() + CAP_S

        def send():
            while not state["stopped"]:
                assert time.monotonic() < ends, "starved"
                channel.send(1)
            channel.close()

        def receive():
            for _ in channel:
                state["handed"] += 1

        threads = [coro.spawn(send), coro.spawn(receive)]
        await asyncio.sleep(0.005)
        for _ in range(100):
            await asyncio.sleep(0)
        state["stopped"] = True
        for thread in threads:
            await thread
        return state["handed"]

    assert grapeshot.run(main()) > 50
