"""If one end is slow, the other end keeps only a bounded amount of data in memory."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
from rpc.ends import ends, raw_client
from support import until

from grapeshot import rpc

MIB = 1024 * 1024


async def test_a_client_buffers_little_for_a_server_that_does_not_read(loop):
    async with ends({"max_packet": 2 * MIB}, max_packet=2 * MIB) as both:
        client = both.client()
        await client.call("add", 1)
        [connection] = both.server._connections
        connection._transport.pause_reading()
        calls = [asyncio.create_task(client.call("later", bytes(MIB))) for _ in range(100)]
        await until(lambda: not client._connection.can_write)
        for _ in range(100):
            await asyncio.sleep(0)
            assert client._connection.pending_bytes() < 3 * MIB
        waiting = len(client._connection._queue)
        assert waiting > 50
        cancelled = calls.pop()  # the last call still waits in the queue
        cancelled.cancel()
        connection._transport.resume_reading()
        results = await asyncio.gather(*calls)
        assert [len(result) for result in results] == [MIB] * 99
        assert cancelled.cancelled()


async def test_a_server_buffers_little_for_a_client_that_does_not_read(loop):
    """Small requests with large answers: the server stops taking requests, even those that have already arrived."""
    async with ends() as both, raw_client(both.port) as raw:
        raw.say_hello(max_packet=2 * MIB)
        for number in range(1, 201):
            raw.send_message(1, number, "blob", [MIB])
        await until(lambda: both.server._connections and not next(iter(both.server._connections)).can_write)
        [connection] = both.server._connections
        for _ in range(100):
            await asyncio.sleep(0)
            assert connection.pending_bytes() < 3 * MIB
        assert connection._last < 100
        await raw.packet()
        numbers = [(await raw.message())[1] for _ in range(200)]
        assert numbers == list(range(1, 201))


async def test_a_client_beyond_the_limit_of_calls_is_refused(loop):
    async with ends(max_calls=2) as both, raw_client(both.port) as raw:
        raw.say_hello()
        for number in (1, 2, 3):
            raw.send_message(1, number, "hold", [number])
        await raw.packet()
        assert await raw.message() == [9, 3, "there are already 2 calls under way, which is the limit (max_calls)"]
        assert await raw.rest() == b""
        await until(lambda: sorted(both.methods.cancelled) == [1, 2])
        assert await both.client().call("add", 1) == 2


async def test_a_client_beyond_the_limit_of_bytes_is_refused(loop):
    async with ends(max_call_bytes=5000) as both, raw_client(both.port) as raw:
        raw.say_hello()
        for number in (1, 2, 3):
            raw.send_message(1, number, "hold", [number, bytes(2500)])
        await raw.packet()
        kind, last, text = await raw.message()
        assert (kind, last) == (9, 3)
        assert text.startswith("the calls under way have 50")
        assert text.endswith("(max_call_bytes)")
        await until(lambda: sorted(both.methods.cancelled) == [1, 2])


@pytest.mark.parametrize("is_stream", [False, True])
async def test_calls_beyond_the_limit_of_bytes_wait_at_the_client(loop, is_stream):
    async with ends(max_call_bytes=5000) as both:
        client = both.client()

        async def call(number):
            await client.call("hold", number, bytes(2500))

        async def stream(number):
            async with client.stream("hold_stream", number, bytes(2500)) as items:
                assert [item async for item in items] == [number]

        begun = both.methods.begun
        tasks = [asyncio.create_task((stream if is_stream else call)(number)) for number in range(6)]
        await until(lambda: len(begun) == 2)
        for _ in range(50):
            await asyncio.sleep(0)
        assert begun == [0, 1]
        tasks[0].cancel()  # makes room for the next call once the server has answered
        await until(lambda: len(begun) == 3)
        both.methods.released.set()
        await asyncio.gather(*tasks[1:])
        assert begun == [0, 1, 2, 3, 4, 5]
        [connection] = both.server._connections
        assert connection.call_bytes == 0


async def test_a_short_call_does_not_wait_for_large_ones(loop):
    """The large calls wait until the short call `release` lets them end."""
    async with ends(max_call_bytes=5000) as both:
        both.server.add("release", both.methods.released.set)
        client = both.client()
        calls = [asyncio.create_task(client.call("hold", number, bytes(2500))) for number in range(6)]
        await until(lambda: len(both.methods.begun) == 2)
        with pytest.raises(TypeError):
            await client.call("release", object())  # cannot be encoded
        assert await client.call("add", bytes(500), bytes(100)) == bytes(600)
        await client.call("release")
        assert await asyncio.gather(*calls) == list(range(6))


async def test_a_stream_that_is_cancelled_in_the_queue_leaves_nothing_there(loop):
    async with ends(max_call_bytes=1000) as both:
        client = both.client()
        call = asyncio.create_task(client.call("hold", 0, bytes(2500)))
        await until(lambda: len(both.methods.begun) == 1)
        stream = client.stream("hold_stream", 1, bytes(2500))
        reader = asyncio.create_task(anext(stream))
        connection = client._connection
        await until(lambda: len(connection._queue) == 1)
        reader.cancel()
        await asyncio.wait([reader])
        assert not connection._queue
        both.methods.released.set()
        assert await call == 0


async def test_the_request_of_a_handler_that_raises_is_freed_at_once(loop):
    """The local variables of the handler are freed without the garbage collector, which might run only much later."""

    class Content:
        pass

    alive = []

    async def fail(is_at_once):
        content = Content()
        alive.append(weakref.ref(content))
        if not is_at_once:
            await asyncio.sleep(0)
        raise ValueError(repr(content))

    async def fail_stream(is_at_once):
        await fail(is_at_once)
        yield

    async with ends() as both:
        both.server.add("fail_later", fail)
        both.server.add("fail_stream", fail_stream)
        client = both.client()
        gc.disable()
        try:
            for is_at_once in (False, True):
                with pytest.raises(rpc.RemoteError):
                    await client.call("fail_later", is_at_once)
                with pytest.raises(rpc.RemoteError):
                    await anext(client.stream("fail_stream", is_at_once))
            for _ in range(3):
                await asyncio.sleep(0)
            assert [reference() for reference in alive] == [None] * 4
        finally:
            gc.enable()


async def test_short_calls_and_calls_that_end_at_once_do_not_count(loop):
    async with ends(max_call_bytes=1) as both:
        client = both.client()
        calls = [asyncio.create_task(client.call("hold", number)) for number in range(100)]
        await until(lambda: len(both.methods.begun) == 100)
        assert await asyncio.gather(*(client.call("add", bytes(5000), b"") for _ in range(10))) == [bytes(5000)] * 10
        both.methods.released.set()
        await asyncio.gather(*calls)


async def test_clients_do_not_hold_up_each_other(loop):
    async with ends(max_calls=2) as both:
        slow, quick = both.client(), both.client()
        calls = [asyncio.create_task(slow.call("hold", number)) for number in range(5)]
        await until(lambda: len(both.methods.begun) == 2)
        assert await quick.call("add", 1) == 2
        both.methods.released.set()
        assert await asyncio.gather(*calls) == list(range(5))


async def test_a_client_that_says_no_hello_is_closed_in_time(loop, monkeypatch):
    monkeypatch.setattr("grapeshot.rpc._server_connection.HELLO_S", 0.02)
    async with ends() as both, raw_client(both.port) as raw:
        await raw.packet()
        assert await raw.rest() == b""
        await until(lambda: both.server.connections == 0)


async def test_closing_does_not_wait_for_a_peer_that_does_not_read(loop, monkeypatch):
    monkeypatch.setattr("grapeshot.rpc._packet_stream._LINGER_S", 0.05)
    async with ends() as both, raw_client(both.port) as raw:
        raw.say_hello(max_packet=20 * MIB)
        raw.send_message(1, 1, "blob", [15 * MIB])
        await until(lambda: both.server._connections and not next(iter(both.server._connections)).can_write)
        await both.server.close()
        assert both.server.connections == 0
