"""Each event of a descriptor reaches the right operation or callback.

Operations are cancelled and replaced, descriptors are closed, reused and duplicated, and callbacks (`add_reader`,
`add_writer`) are used on the socket of an operation.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
import time

import pytest
from support import blocked_task, connected, iterations, raw_pair, run_script, until


async def cancelled(task, *message):
    task.cancel(*message)
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    return caught.value


async def test_cancelling_leaves_the_socket_usable(loop, pair):
    ours, theirs = pair
    for _ in range(3):
        await cancelled(await blocked_task(loop, loop.sock_recv(ours, 10)))
        theirs.send(b"x")
        assert await loop.sock_recv(ours, 10) == b"x"


@pytest.mark.skip_on(uvloop="receives in the callback of the event, and loses the data")
async def test_cancelling_after_the_event_loses_nothing(loop, pair):
    """When the task is cancelled, the event has arrived, but neither its callback nor the task has run. (In asyncio,
    the callback receives the data. If the task is cancelled between the callback and the task's next step, the data is
    lost.)
    """
    ours, theirs = pair
    for _ in range(20):
        task = await blocked_task(loop, loop.sock_recv(ours, 10), 1)
        theirs.send(b"x")
        await asyncio.sleep(0)
        task.cancel()
        try:
            data = await task
        except asyncio.CancelledError:
            data = await loop.sock_recv(ours, 10)
        assert data == b"x"


async def test_the_message_of_a_cancellation(loop, pair):
    task = await blocked_task(loop, loop.sock_recv(pair[0], 10))
    error = await cancelled(task, "enough")
    assert error.args == ("enough",)


async def test_timeouts(loop, pair):
    ours, theirs = pair
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(loop.sock_recv(ours, 10), 0.001)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await loop.sock_recv(ours, 10)
    theirs.send(b"x")
    assert await asyncio.wait_for(loop.sock_recv(ours, 10), 10) == b"x"


async def test_both_directions_at_once(loop):
    ours, theirs = raw_pair(small=True)
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        content = random.Random(1).randbytes(2_000_000)

        async def receive(sock):
            data = bytearray()
            while len(data) < len(content):
                data += await loop.sock_recv(sock, 50_000)
            return data

        results = await asyncio.gather(
            receive(ours), loop.sock_sendall(ours, content), receive(theirs), loop.sock_sendall(theirs, content)
        )
        assert results == [content, None, content, None]


@pytest.mark.skip_on(uvloop="accepts both waits")
async def test_a_second_operation_takes_the_place_of_the_first(loop, pair):
    ours, theirs = pair
    first = await blocked_task(loop, loop.sock_recv(ours, 10))
    second = await blocked_task(loop, loop.sock_recv(ours, 10))
    theirs.send(b"x")
    assert await second == b"x"
    theirs.send(b"y")
    await iterations(5)
    assert not first.done()
    await cancelled(first)
    assert await loop.sock_recv(ours, 10) == b"y"
    third = await blocked_task(loop, loop.sock_recv(ours, 10))
    theirs.send(b"z")
    assert await third == b"z"


@pytest.mark.skip_on(uvloop="accepts both waits")
async def test_cancelling_the_first_does_not_touch_the_second(loop, pair):
    ours, theirs = pair
    first = await blocked_task(loop, loop.sock_recv(ours, 10))
    second = await blocked_task(loop, loop.sock_recv(ours, 10))
    await cancelled(first)
    theirs.send(b"x")
    assert await second == b"x"


# ---------------------------------------------------------------- callbacks beside operations


async def test_a_reader_beside_sendall(loop):
    ours, theirs = raw_pair(small=True)
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        seen = bytearray()
        loop.add_reader(ours, lambda: seen.extend(ours.recv(100)))
        content = bytes(1_000_000)
        sending = await blocked_task(loop, loop.sock_sendall(ours, content))
        theirs.send(b"meanwhile")
        await until(lambda: seen == b"meanwhile")
        assert not sending.done()
        received = 0
        while received < len(content):
            received += len(await loop.sock_recv(theirs, 1 << 18))
        await sending
        theirs.send(b" and after")
        await until(lambda: seen == b"meanwhile and after")
        loop.remove_reader(ours)
        task = await blocked_task(loop, loop.sock_recv(ours, 10))
        theirs.send(b"x")
        assert await task == b"x"


async def test_a_writer_beside_recv(loop, pair):
    ours, theirs = pair
    task = await blocked_task(loop, loop.sock_recv(ours, 10))
    seen = []
    loop.add_writer(ours, lambda: (seen.append(1), loop.remove_writer(ours)))
    await until(lambda: seen)
    assert not task.done()
    theirs.send(b"x")
    assert await task == b"x"
    task = await blocked_task(loop, loop.sock_recv(ours, 10))
    theirs.send(b"y")
    assert await task == b"y"


@pytest.mark.xfail_on(uvloop="add_reader() raises while sock_recv waits")
async def test_a_reader_takes_the_place_of_recv(loop, pair):
    ours, theirs = pair
    task = await blocked_task(loop, loop.sock_recv(ours, 10))
    seen = []
    loop.add_reader(ours, lambda: seen.append(ours.recv(10)))
    theirs.send(b"x")
    await until(lambda: seen == [b"x"])
    assert not task.done()
    await cancelled(task)
    theirs.send(b"y")
    await until(lambda: seen == [b"x", b"y"])
    assert loop.remove_reader(ours)


async def test_recv_takes_the_place_of_a_reader(loop, pair):
    ours, theirs = pair
    seen = []
    loop.add_reader(ours, seen.append, "called")
    task = await blocked_task(loop, loop.sock_recv(ours, 10))
    theirs.send(b"x")
    assert await task == b"x"
    theirs.send(b"y")
    await iterations(5)
    assert seen == []
    assert not loop.remove_reader(ours)
    assert await loop.sock_recv(ours, 10) == b"y"


@pytest.mark.xfail_on(uvloop="remove_reader() returns None")
async def test_remove_reader_ends_the_wait_of_recv(loop, pair):
    ours, theirs = pair
    task = await blocked_task(loop, loop.sock_recv(ours, 10))
    assert loop.remove_reader(ours) is True
    assert loop.remove_reader(ours) is False
    theirs.send(b"x")
    await iterations(5)
    assert not task.done()
    await cancelled(task)
    assert await loop.sock_recv(ours, 10) == b"x"
    assert loop.remove_reader(ours) is False


async def test_a_reader_after_operations(loop, pair):
    """The loop calls the reader as long as there is data, although sock_recv waited for the same socket before."""
    ours, theirs = pair
    task = await blocked_task(loop, loop.sock_recv(ours, 10))
    theirs.send(b"x")
    await task
    theirs.send(b"abc")
    seen = []
    loop.add_reader(ours, lambda: seen.append(ours.recv(1)))
    await until(lambda: seen == [b"a", b"b", b"c"])
    loop.remove_reader(ours)


async def test_the_descriptor_of_a_transport_is_refused(loop):
    ours, theirs = raw_pair()
    with theirs:
        ours.setblocking(False)
        transport, _ = await loop.connect_accepted_socket(asyncio.Protocol, ours)
        for operation in (
            lambda: loop.sock_recv(ours, 10),
            lambda: loop.sock_recv_into(ours, bytearray(10)),
            lambda: loop.sock_sendall(ours, bytes(20_000_000)),
        ):
            with pytest.raises(RuntimeError, match="is used by transport"):
                await operation()
        transport.abort()
        await iterations(3)


async def test_a_transport_takes_over_a_socket_after_operations(loop, pair):
    ours, theirs = pair
    task = await blocked_task(loop, loop.sock_recv(ours, 10))
    theirs.send(b"x")
    assert await task == b"x"
    received = bytearray()

    class Receiver(asyncio.Protocol):
        def data_received(self, data):
            received.extend(data)

    theirs.send(b"y")
    transport, _ = await loop.create_connection(Receiver, sock=ours.dup())
    await until(lambda: received == b"y")
    theirs.send(b"z")
    await until(lambda: received == b"yz")
    transport.abort()
    await iterations(3)


# ---------------------------------------------------------------- closed, reused, duplicated


async def test_a_closed_socket(loop, pair):
    pair[0].close()
    for operation in (
        lambda: loop.sock_recv(pair[0], 10),
        lambda: loop.sock_recv_into(pair[0], bytearray(10)),
        lambda: loop.sock_sendall(pair[0], b"x"),
        lambda: loop.sock_accept(pair[0]),
    ):
        with pytest.raises((OSError, ValueError)):
            await operation()


@pytest.mark.skip_on(uvloop="libuv aborts the process when a descriptor is reused")
async def test_closing_the_socket_under_an_operation(loop):
    """After the close, no event arrives, the operation can be cancelled, and a new socket can reuse the number."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    number = ours.fileno()
    task = await blocked_task(loop, loop.sock_recv(ours, 10))
    ours.close()
    theirs.close()
    await iterations(3)
    assert not task.done()
    await cancelled(task)
    first, second = socket.socketpair()
    with first, second:
        assert number in (first.fileno(), second.fileno())
        reused, other = (first, second) if first.fileno() == number else (second, first)
        reused.setblocking(False)
        task = await blocked_task(loop, loop.sock_recv(reused, 10))
        other.send(b"x")
        assert await task == b"x"


@pytest.mark.skip_on(
    uvloop="libuv aborts the process when a descriptor is reused",
    asyncio="the selector still has the number, and the second wait never ends",
)
async def test_a_reused_number_while_the_old_operation_still_waits(loop):
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    number = ours.fileno()
    old = await blocked_task(loop, loop.sock_recv(ours, 10))
    ours.close()
    theirs.close()
    first, second = socket.socketpair()
    with first, second:
        reused, other = (first, second) if first.fileno() == number else (second, first)
        assert reused.fileno() == number
        reused.setblocking(False)
        task = await blocked_task(loop, loop.sock_recv(reused, 10))
        await cancelled(old)
        other.send(b"x")
        assert await task == b"x"


async def test_numbers_are_reused_between_operations(loop):
    """Again and again, a pair of sockets is closed, in either order, and a new pair is opened. The loop is not told."""
    pattern = random.Random(3)
    open_pairs = [socket.socketpair() for _ in range(6)]
    for ours, _ in open_pairs:
        ours.setblocking(False)
    for number in range(200):
        index = pattern.randrange(len(open_pairs))
        ours, theirs = open_pairs[index]
        task = loop.create_task(loop.sock_recv(ours, 10))
        await asyncio.sleep(0)
        theirs.send(b"%d" % number)
        assert await asyncio.wait_for(task, 10) == b"%d" % number
        if pattern.random() < 0.5:
            closing = [ours, theirs]
            pattern.shuffle(closing)
            for sock in closing:
                sock.close()
            open_pairs[index] = socket.socketpair()
            open_pairs[index][0].setblocking(False)
            del ours, theirs, closing
    for ours, theirs in open_pairs:
        ours.close()
        theirs.close()


async def test_events_of_a_duplicate_do_not_reach_the_next_owner(loop):
    """epoll continues to watch a closed descriptor while a duplicate is open."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    task = await blocked_task(loop, loop.sock_recv(ours, 10))
    theirs.send(b"x")
    assert await task == b"x"
    number = ours.fileno()
    duplicate = ours.dup()
    ours.close()
    fresh, other = socket.socketpair()
    with duplicate, theirs, fresh, other:
        fresh.setblocking(False)
        if fresh.fileno() != number:
            os.dup2(fresh.fileno(), number)
            fresh.close()
            fresh = socket.socket(fileno=number)
            fresh.setblocking(False)
        with fresh:
            task = await blocked_task(loop, loop.sock_recv(fresh, 10))
            for _ in range(5):
                theirs.send(b"to the duplicate")
                await iterations(3)
                assert not task.done()
            other.send(b"y")
            assert await task == b"y"
            assert duplicate.recv(1000) == b"to the duplicate" * 5


async def test_a_duplicate_of_a_closed_socket_does_not_call_the_reader_of_the_next_owner(loop):
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    task = await blocked_task(loop, loop.sock_recv(ours, 10))
    theirs.send(b"x")
    assert await task == b"x"
    number = ours.fileno()
    duplicate = ours.dup()
    ours.close()
    reading, writing = os.pipe()
    if reading != number:
        os.dup2(reading, number)
        os.close(reading)
    try:
        with duplicate, theirs:
            seen = []
            loop.add_reader(number, lambda: seen.append(os.read(number, 10)))
            theirs.send(b"to the duplicate")
            await iterations(5)
            assert seen == []
            os.write(writing, b"y")
            await until(lambda: seen == [b"y"])
            assert loop.remove_reader(number) in (True, None)
    finally:
        os.close(number)
        os.close(writing)


async def test_a_closed_socket_with_a_duplicate_does_not_keep_the_loop_busy(loop):
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    task = await blocked_task(loop, loop.sock_recv(ours, 10))
    theirs.send(b"x")
    await task
    with ours.dup(), theirs:
        ours.close()
        theirs.send(b"nobody reads this")
        await asyncio.sleep(0.01)
        before_s = time.process_time()
        await asyncio.sleep(0.2)
        assert time.process_time() - before_s < 0.1


async def test_unread_data_does_not_keep_the_loop_busy(loop, pair):
    ours, theirs = pair
    task = await blocked_task(loop, loop.sock_recv(ours, 10))
    theirs.send(b"x")
    await task
    theirs.send(b"abc")
    await asyncio.sleep(0.01)
    before_s = time.process_time()
    await asyncio.sleep(0.2)
    assert time.process_time() - before_s < 0.1
    for expected in (b"a", b"b", b"c"):
        assert await loop.sock_recv(ours, 1) == expected
    task = await blocked_task(loop, loop.sock_recv(ours, 10))
    theirs.send(b"d")
    assert await task == b"d"


@pytest.mark.skip_on(uvloop="the exception drops the callbacks of the same poll")
def test_an_interrupt_in_another_callback_loses_no_event(loop):
    """KeyboardInterrupt leaves run_forever in the middle of the events of a poll. Each event is still reported once."""
    pairs = [socket.socketpair() for _ in range(30)]
    received = []

    class Interrupting(asyncio.Protocol):
        def data_received(self, data):
            raise KeyboardInterrupt

    async def receive(sock):
        received.append(await loop.sock_recv(sock, 10))

    async def begin():
        transport, _, peer = await connected(loop, Interrupting)
        for ours, _ in pairs:
            ours.setblocking(False)
            loop.create_task(receive(ours))
        await iterations(3)
        return transport, peer

    transport, peer = loop.run_until_complete(begin())
    for _, theirs in pairs[:15]:
        theirs.send(b"x")
    peer.sock.send(b"interrupt")
    for _, theirs in pairs[15:]:
        theirs.send(b"x")
    with pytest.raises(KeyboardInterrupt):
        loop.run_forever()

    async def finish():
        await until(lambda: len(received) == 30, "all of them to be received")
        transport.abort()
        await iterations(3)

    loop.run_until_complete(finish())
    peer.close()
    for ours, theirs in pairs:
        ours.close()
        theirs.close()


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="from 3.12 on, no collection runs inside an allocation")
def test_a_finalizer_that_runs_while_a_wait_begins_does_not_end_it():
    """A garbage collection in the middle of sock_recv() runs a finalizer that calls remove_reader() for the socket."""
    run_script(
        "grapeshot",
        """
        import gc, socket

        loop = new_event_loop()
        removed = []

        class Garbage:
            def __del__(self):
                removed.append(loop.remove_reader(ours))

        # The first rounds fill caches and free lists. So in the last round, the first allocation that can start a
        # collection is that of the weak reference to the socket, in the middle of sock_recv().
        for threshold in [1000, 1000, 1000, 50]:
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            gc.collect()
            gc.disable()
            garbage = Garbage()
            garbage.itself = garbage
            del garbage
            lists = [[] for _ in range(100)]
            receiving = loop.sock_recv(ours, 1)
            gc.set_threshold(threshold, 1, 1)
            gc.enable()
            removed.clear()
            receiving.send(None)
            gc.disable()
            is_waiting = loop.remove_reader(ours)
            receiving.close()
            ours.close()
            theirs.close()
        assert removed == [False]
        assert is_waiting
        loop.close()
        """,
    )
