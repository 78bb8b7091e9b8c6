"""call_soon_threadsafe, and which methods other threads may call."""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
import threading
import time

import pytest
from support import CAP_S, connected, gil_is_enabled, run_script, until


def in_threads(count, function):
    threads = [threading.Thread(target=function, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    return threads


def test_wakes_a_loop_that_sleeps(loop):
    ran = threading.Event()

    def work(_number):
        loop.call_soon_threadsafe(ran.set)
        ran.wait(10)
        loop.call_soon_threadsafe(loop.stop)

    [thread] = in_threads(1, work)
    loop.run_forever()  # the loop has nothing else to do, and sleeps
    thread.join()
    assert ran.is_set()


def test_stop_alone_does_not_lose_the_wakeup(loop):
    for _ in range(200):
        [thread] = in_threads(1, lambda _: loop.call_soon_threadsafe(loop.stop))
        loop.run_forever()
        thread.join()


def test_order_within_a_thread_and_nothing_lost(loop):
    seen = {number: [] for number in range(4)}
    left = [4]

    def done():
        left[0] -= 1
        if not left[0]:
            loop.stop()

    def work(number):
        for index in range(2000):
            loop.call_soon_threadsafe(seen[number].append, index)
            if index % 50 == 0:
                time.sleep(0)
        loop.call_soon_threadsafe(done)

    threads = in_threads(4, work)
    loop.run_forever()
    for thread in threads:
        thread.join()
    assert all(values == list(range(2000)) for values in seen.values())


def test_from_the_loops_own_thread(loop):
    seen = []
    loop.call_soon(seen.append, 1)
    loop.call_soon_threadsafe(seen.append, 2)
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert seen == [1, 2]


def test_before_the_loop_runs(loop):
    seen = []
    [thread] = in_threads(1, lambda _: loop.call_soon_threadsafe(seen.append, 1))
    thread.join()
    loop.run_until_complete(asyncio.sleep(0.001))
    assert seen == [1]


def test_a_handle_cancelled_by_another_thread(loop):
    seen = []
    handles = []

    def work(_number):
        for index in range(500):
            handle = loop.call_soon_threadsafe(seen.append, index)
            handle.cancel()
            handles.append(handle)
        loop.call_soon_threadsafe(loop.stop)

    [thread] = in_threads(1, work)
    loop.run_forever()
    thread.join()
    assert all(handle.cancelled() for handle in handles)
    assert len(seen) <= 500  # some may run before they are cancelled, but none runs twice
    assert len(set(seen)) == len(seen)


async def test_a_timer_cancelled_by_another_thread(loop):
    seen = []
    timers = [loop.call_later(0.05, seen.append, number) for number in range(100)]
    thread = threading.Thread(target=lambda: [timer.cancel() for timer in timers])
    thread.start()
    thread.join()
    fired = loop.create_future()
    loop.call_later(0.06, fired.set_result, None)
    await fired
    assert seen == []


async def test_a_cancelled_handle_does_not_run(loop):
    seen = []
    gate = threading.Event()

    def work():
        loop.call_soon_threadsafe(seen.append, "kept")
        loop.call_soon_threadsafe(seen.append, "cancelled").cancel()
        gate.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert gate.wait(10)  # the loop runs no iteration during this wait
    thread.join()
    await until(lambda: seen)
    await asyncio.sleep(0.001)
    assert seen == ["kept"]


def test_run_coroutine_threadsafe(loop):
    results = []

    async def double(value):
        await asyncio.sleep(0)
        return value * 2

    def work(_number):
        results.extend(asyncio.run_coroutine_threadsafe(double(n), loop).result(10) for n in range(100))
        loop.call_soon_threadsafe(loop.stop)

    [thread] = in_threads(1, work)
    loop.run_forever()
    thread.join()
    assert results == [n * 2 for n in range(100)]


def test_close_while_others_call(new_loop):
    loop = new_loop()
    refused = []

    def work(_number):
        while not refused:
            try:
                loop.call_soon_threadsafe(int)
            except RuntimeError as error:
                refused.append(str(error))

    threads = in_threads(2, work)
    loop.run_until_complete(asyncio.sleep(0.005))
    loop.close()
    for thread in threads:
        thread.join()
    assert set(refused) == {"Event loop is closed"}


def test_two_loops_in_two_threads(new_loop):
    loops = [new_loop(), new_loop()]
    results = {}

    def work(number):
        async def main():
            total = 0
            for index in range(500):
                total += await asyncio.sleep(0, index)
            loops[1 - number].call_soon_threadsafe(int)
            return total

        results[number] = loops[number].run_until_complete(main())

    threads = in_threads(2, work)
    for thread in threads:
        thread.join()
    assert results == {0: 124750, 1: 124750}


def test_a_loop_runs_in_different_threads_one_after_the_other(loop):
    idents = []
    for _ in range(3):
        [thread] = in_threads(1, lambda _: idents.append(loop.run_until_complete(ident())))
        thread.join()
    assert len(idents) == 3


async def ident():
    await asyncio.sleep(0)
    return threading.get_ident()


def test_a_second_thread_cannot_run_the_loop(loop):
    errors = []

    async def main():
        thread = threading.Thread(target=attempt)
        thread.start()
        await until(lambda: errors)
        thread.join()

    def attempt():
        try:
            loop.run_forever()
        except RuntimeError as error:
            errors.append(str(error).lower().rstrip("."))

    loop.run_until_complete(main())
    assert errors == ["this event loop is already running"]


def test_two_loops_serve_in_two_threads(new_loop):
    """Two loops run transports at the same time, each in its own thread, and call each other."""
    others: dict[int, asyncio.AbstractEventLoop] = {}
    barrier = threading.Barrier(2)
    failures = []

    async def serve_and_talk(number):
        async def handle(reader, writer):
            while data := await reader.read(1000):
                writer.write(data)
            writer.close()
            await writer.wait_closed()

        others[number] = asyncio.get_running_loop()
        barrier.wait(30)
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        for round_number in range(20):
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            message = b"%d:%d" % (number, round_number)
            writer.write(message)
            if await reader.readexactly(len(message)) != message:
                failures.append(message)
            writer.close()
            await writer.wait_closed()
            answer = asyncio.run_coroutine_threadsafe(asyncio.sleep(0, number), others[1 - number])
            if await asyncio.wrap_future(answer) != number:
                failures.append(number)
        server.close()
        await asyncio.to_thread(barrier.wait, 30)

    def work(number):
        loop = new_loop()
        try:
            loop.run_until_complete(serve_and_talk(number))
            loop.run_until_complete(loop.shutdown_default_executor())
        except BaseException as exc:
            failures.append(exc)
            raise
        finally:
            loop.close()

    for thread in in_threads(2, work):
        thread.join()
    assert failures == []


def test_handles_cancelled_while_they_may_run(loop):
    """Other threads schedule and cancel callbacks while the loop and the collector run. No callback runs twice."""
    runs: dict[tuple[int, int], int] = {}
    kept: list[tuple[tuple[int, int], asyncio.Handle]] = []

    def ran(key):
        runs[key] = runs.get(key, 0) + 1

    def work(number):
        for index in range(300):
            key = (number, index)
            handle = loop.call_soon_threadsafe(ran, key)
            kept.append((key, handle))
            if index % 3 == 0:
                handle.cancel()
            assert repr(handle)
            if index % 100 == 0:
                gc.collect()
        loop.call_soon_threadsafe(ran, (number, -1))

    threads = in_threads(4, work)
    loop.run_until_complete(until(lambda: sum(index < 0 for _, index in list(runs)) == 4))
    for thread in threads:
        thread.join()
    assert set(runs.values()) == {1}
    assert all(handle.cancelled() for (_, index), handle in kept if index % 3 == 0)
    assert all(key in runs for key, _ in kept if key[1] % 3)
    kept.clear()


@pytest.mark.skipif(sys.version_info < (3, 14), reason="handles of call_soon_threadsafe() got their lock in 3.14")
@pytest.mark.xfail_on(uvloop="its handles have no lock")
@pytest.mark.parametrize("method", ["cancel", "cancelled"])
def test_a_running_handle_makes_other_threads_wait(loop, method):
    begun, may_end, asked = threading.Event(), threading.Event(), threading.Event()
    ended = []

    def callback():
        begun.set()
        may_end.wait(10)
        ended.append(True)

    seen = []

    def work(_number):
        handle = loop.call_soon_threadsafe(callback)
        begun.wait(10)
        asked.set()
        getattr(handle, method)()
        seen.append(list(ended))
        loop.call_soon_threadsafe(loop.stop)

    def let_it_end(_number):
        asked.wait(10)
        may_end.set()

    threads = in_threads(1, work) + in_threads(1, let_it_end)
    loop.run_forever()
    for thread in threads:
        thread.join()
    assert seen == [[True]]


def test_a_loop_that_does_not_run_is_used_by_several_threads(loop):
    ran = []

    def work(number):
        for index in range(200):
            loop.call_soon(ran.append, (number, index))

    for thread in in_threads(4, work):
        thread.join()
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert sorted(ran) == [(number, index) for number in range(4) for index in range(200)]


FUTURES = """
import sys, threading

loop = new_event_loop()
is_over = threading.Event()
wrong = []

def work():
    make = loop.create_future
    while not is_over.is_set():
        for _ in range(100):
            future = make()
            if future.get_loop() is not loop:
                wrong.append(future)

threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
for _ in range({count}):
    loop.call_soon(loop.create_future)
    loop.call_soon(loop.stop)
    loop.run_forever()
is_over.set()
for thread in threads:
    thread.join()
print(len(wrong))
loop.close()
"""


def test_futures_made_by_other_threads_while_runs_begin_and_end(loop_kind):
    count = 300 if gil_is_enabled() else 100_000
    assert run_script(loop_kind, FUTURES.format(count=count)) == "0\n"


@pytest.mark.xfail_on(uvloop="remove_reader() always returns None")
def test_a_run_while_another_thread_is_in_a_method(loop, loop_kind):
    entered, may_go_on = threading.Event(), threading.Event()
    reader, writer = socket.socketpair()

    class File:
        def fileno(self):
            entered.set()
            may_go_on.wait(CAP_S)
            return reader.fileno()

    with reader, writer:
        [thread] = in_threads(1, lambda _: loop.add_reader(File(), print))
        entered.wait(CAP_S)
        loop.call_soon(loop.stop)
        if loop_kind == "grapeshot" and not gil_is_enabled():
            with pytest.raises(RuntimeError, match="another thread"):
                loop.run_forever()
        else:
            loop.run_forever()
        may_go_on.set()
        thread.join()
        loop.call_soon(loop.stop)
        loop.run_forever()
        assert loop.remove_reader(reader)


@pytest.mark.xfail_on(uvloop="remove_reader() always returns None")
def test_a_run_inside_of_a_method(loop):
    """`fileno()`, which add_reader calls, runs the same loop in the same thread."""
    reader, writer = socket.socketpair()

    class File:
        def fileno(self):
            loop.call_soon(loop.stop)
            loop.run_forever()
            return reader.fileno()

    with reader, writer:
        loop.add_reader(File(), print)
        assert loop.remove_reader(reader)


@pytest.mark.skip_on(
    asyncio="it does not notice that the number of a closed object now belongs to another object",
    uvloop="it does not notice that the number of a closed object now belongs to another object",
)
def test_a_finalizer_that_uses_the_loop_while_it_looks_for_a_closed_object(loop, pair):
    """`remove_reader(unknown)` looks for `unknown` among the closed objects whose number now belongs to another object.
    The loop has only weak references to these objects, but holds strong references during the search. Without a GIL,
    another thread may meanwhile drop the only other reference to an object. The object's finalizer then runs in this
    thread, inside `remove_reader`.
    """
    number, this_thread = pair[0].fileno(), threading.current_thread()

    class Closed:
        fd = number

        def fileno(self):
            return self.fd

        def __del__(self):
            if threading.current_thread() is this_thread:
                try:
                    closed_and_replaced(Other)
                except RuntimeError as error:
                    errors.append(error)

    class Other(Closed):
        def __del__(self):
            pass

    def closed_and_replaced(kind):
        closed = kind()
        loop.add_reader(closed, int)
        closed.fd = -1
        loop.add_reader(Other(), int)
        return closed

    def give_up():
        for _ in range(rounds):
            objects.extend(closed_and_replaced(Closed) for _ in range(60))
            together.wait(CAP_S)
            while objects:
                objects.pop()
            together.wait(CAP_S)

    rounds = 20 if gil_is_enabled() else 400
    errors, objects, together = [], [], threading.Barrier(2)
    unknown = Other()
    unknown.fd = -1
    thread = threading.Thread(target=give_up)
    thread.start()
    for _ in range(rounds):
        together.wait(CAP_S)
        while objects:
            with pytest.raises(ValueError, match="-1"):
                loop.remove_reader(unknown)
        together.wait(CAP_S)
    thread.join()
    loop.remove_reader(number)
    assert not errors


async def test_reprs_in_other_threads(loop):
    transport, protocol, peer = await connected(loop)
    datagrams, _ = await loop.create_datagram_endpoint(asyncio.DatagramProtocol, local_addr=("127.0.0.1", 0))
    with peer:
        things = [transport, datagrams, loop.call_soon(print), loop.call_later(1000, print), loop]
        texts = await loop.run_in_executor(None, lambda: [repr(thing) for thing in things for _ in range(100)])
        for thing, text in zip(things, texts[::100], strict=True):
            assert type(thing).__name__.strip("_") in text
        things[3].cancel()
        transport.close()
        datagrams.close()
        await until(lambda: protocol.is_lost)


@pytest.mark.xfail_on(uvloop="no _thread_id")
async def test_calls_that_other_threads_may_make(loop):
    """For example, asyncio's `getaddrinfo()` calls `loop.time()` in a thread of the executor in debug mode."""
    loop.set_debug(True)
    own = threading.get_ident()

    def ask():
        return (
            loop.is_running(),
            loop.is_closed(),
            loop.get_debug(),
            loop.slow_callback_duration,
            loop._thread_id,
            loop.create_future().get_loop() is loop,
            loop.time() > 0,
        )

    assert await loop.run_in_executor(None, ask) == (True, False, True, 0.1, own, True, True)
    assert await loop.getaddrinfo("localhost", 80)
