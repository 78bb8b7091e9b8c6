"""Streaming results: order, credit, early ends."""

from __future__ import annotations

import asyncio
import gc

import pytest
from rpc.ends import ends
from support import until

from grapeshot import rpc


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 1000])
@pytest.mark.parametrize("window", [1, 2, 16])
async def test_all_items_come_in_order(loop, count, window):
    async with ends({"stream_window": window}) as both:
        assert [item async for item in both.client().stream("numbers", count)] == list(range(count))
        await both.idle()


async def test_streams_and_calls_share_the_connection(loop):
    async with ends() as both:
        client = both.client()

        async def read(count):
            return [item async for item in client.stream("numbers", count)]

        results = await asyncio.gather(
            *(read(count) for count in range(50)), *(client.call("add", n) for n in range(50))
        )
        assert results == [list(range(count)) for count in range(50)] + list(range(1, 51))
        assert both.server.connections == 1


async def test_a_cancellation_while_the_stream_connects(loop):
    """The call is not sent."""
    async with ends() as both:
        stream = both.client().stream("endless")
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)  # lets the stream begin to connect
        assert not reading.done()
        stream.cancel()
        with pytest.raises(StopAsyncIteration):
            await reading
        await both.idle()
        assert both.methods.begun == []


async def test_a_slow_reader_stops_the_handler(loop):
    """The handler runs at most one window ahead of the reader, so the server's memory does not grow."""
    async with ends({"stream_window": 8}) as both:
        client = both.client()
        async with client.stream("endless") as stream:
            for taken in range(1, 30):
                await anext(stream)
                for _ in range(10):
                    await asyncio.sleep(0)
                assert both.methods.begun[-1] <= taken + 8
            await until(lambda: both.methods.begun[-1] > 30)
        await until(lambda: both.methods.ended == ["endless"])


async def test_a_stream_of_large_items_waits_for_the_transport(loop):
    async with ends({"stream_window": 1000}) as both:
        client = both.client()
        async with client.stream("endless", 1_000_000) as stream:
            await anext(stream)
            client._connection._transport.pause_reading()
            await until(lambda: not next(iter(both.server._connections)).can_write)
            [connection] = both.server._connections
            for _ in range(100):
                await asyncio.sleep(0)
                assert connection.pending_bytes() < 3_000_000
            assert both.methods.begun[-1] < 100  # the socket buffers fill up long before the window of 1,000 items does
            client._connection._transport.resume_reading()
            for _ in range(20):
                await anext(stream)
        await until(lambda: both.methods.ended == ["endless"])


async def test_leaving_the_iteration_early_cancels_the_handler(loop):
    async with ends() as both:
        client = both.client()
        async for _ in client.stream("endless"):
            break
        gc.collect()
        await until(lambda: both.methods.ended == ["endless"])
        await until(lambda: client._connection._pending == {})
        assert await client.call("add", 1) == 2


async def test_closing_a_stream_cancels_the_handler_at_once(loop):
    async with ends() as both:
        stream = both.client().stream("endless")
        await anext(stream)
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await until(lambda: both.methods.ended == ["endless"])
        unread = both.client().stream("endless")
        await unread.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(unread)


async def test_cancelling_the_reader_cancels_the_handler(loop):
    async with ends() as both:
        client = both.client()

        @both.server.method
        async def silent():
            both.methods.begun.append("silent")
            try:
                await asyncio.Event().wait()
            finally:
                both.methods.ended.append("silent")
            yield

        async def read():
            async for _ in client.stream("silent"):
                pass

        reader = asyncio.create_task(read())
        await until(lambda: both.methods.begun)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        del reader
        gc.collect()
        await until(lambda: both.methods.ended == ["silent"])


async def test_a_deadline_applies_to_the_whole_stream(loop):
    async with ends() as both:

        @both.server.method
        async def ticks():
            try:
                while True:
                    yield 1
                    await asyncio.sleep(0.005)
            finally:
                both.methods.ended.append("ticks")

        with pytest.raises(rpc.DeadlineExceeded):
            async for _ in both.client().stream("ticks", timeout=0.3):
                pass
        await until(lambda: both.methods.ended == ["ticks"])


async def test_an_error_arrives_after_the_items_before_it(loop):
    async with ends() as both:

        @both.server.method
        async def broken(kind):
            yield 1
            yield 2
            if kind == "raises":
                raise ValueError("broken")
            yield object()

        for kind, expected in (("raises", rpc.RemoteError), ("opaque", rpc.BadResult)):
            items = []
            with pytest.raises(expected):
                async for item in both.client().stream("broken", kind):
                    items.append(item)
            assert items == [1, 2]


async def test_one_reader_at_a_time(loop):
    async with ends() as both:

        @both.server.method
        async def silent():
            await asyncio.Event().wait()
            yield

        async with both.client().stream("silent") as stream:
            first = asyncio.create_task(anext(stream))
            await until(lambda: both.server.calls == 1)
            with pytest.raises(RuntimeError, match="already reading"):
                await anext(stream)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first


async def test_the_loss_of_the_connection_ends_a_stream(loop):
    async with ends() as both:
        client = both.client()
        stream = client.stream("endless")
        await anext(stream)
        [connection] = both.server._connections
        connection.abort()
        with pytest.raises(rpc.ConnectionLost) as caught:
            async for _ in stream:
                pass
        assert caught.value.sent
