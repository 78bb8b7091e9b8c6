"""Cancellation and deadlines reach the handlers."""

from __future__ import annotations

import asyncio

import pytest
from rpc.ends import ends
from support import until

from grapeshot import rpc


async def test_cancelling_a_call_cancels_its_handler(loop):
    async with ends() as both:
        client = both.client()
        calls = [asyncio.create_task(client.call("hold", number)) for number in range(3)]
        await until(lambda: len(both.methods.begun) == 3)
        calls[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await calls[1]
        await until(lambda: both.methods.cancelled == [1])
        both.methods.released.set()
        assert await calls[0] == 0
        assert await calls[2] == 2
        await until(lambda: client._connection._pending == {})


async def test_a_call_that_is_cancelled_before_it_is_sent_never_runs(loop):
    async with ends(max_calls=1) as both:
        client = both.client()
        first = asyncio.create_task(client.call("hold", "first"))
        await until(lambda: both.methods.begun == ["first"])
        second = asyncio.create_task(client.call("hold", "second"))
        await asyncio.sleep(0)
        second.cancel()
        both.methods.released.set()
        assert await first == "first"
        assert await client.call("add", 1) == 2
        assert both.methods.begun == ["first"]


async def test_calls_that_are_cancelled_in_the_queue_do_not_stay_there(loop):
    async with ends(max_calls=1) as both:
        client = both.client()
        first = asyncio.create_task(client.call("hold", "first"))
        await until(lambda: both.methods.begun == ["first"])
        lasting = asyncio.create_task(client.call("add", 1))
        for _ in range(50):
            calls = [asyncio.create_task(client.call("add", bytes(100))) for _ in range(10)]
            await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)
        assert len(client._connection._queue) < 20
        both.methods.released.set()
        assert await first == "first"
        assert await lasting == 2


async def test_a_result_that_crosses_the_cancellation_is_dropped(loop):
    async with ends() as both:
        client = both.client()
        await client.connect()
        for _ in range(20):
            call = asyncio.create_task(client.call("add", 1))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        assert await client.call("add", 1) == 2
        assert client._connection._pending == {}


async def test_the_loss_of_the_connection_cancels_the_handlers(loop):
    async with ends() as both:
        client = both.client()
        call = asyncio.create_task(client.call("hold", "lonely"))
        await until(lambda: both.methods.begun)
        await client.close()
        with pytest.raises(rpc.ConnectionLost, match="the client is closed") as caught:
            await call
        assert caught.value.sent
        await until(lambda: both.methods.cancelled == ["lonely"])
        with pytest.raises(rpc.ConnectionLost) as caught:
            await client.call("add", 1)
        assert not caught.value.sent


async def test_the_deadline_ends_both_sides(loop):
    async with ends() as both:
        client = both.client()
        await client.connect()
        with pytest.raises(rpc.DeadlineExceeded) as caught:
            await client.call("hold", "long", timeout=0.3)
        assert isinstance(caught.value, TimeoutError)
        await until(lambda: both.methods.cancelled == ["long"])
        await both.idle()
        assert await client.call("add", 1, timeout=5) == 2
        with pytest.raises(rpc.DeadlineExceeded):
            await client.call("hold", "at once", timeout=0)


async def test_the_server_ends_a_call_by_its_own_clock(loop):
    """The client sends no cancellation, as if it had stopped. The server knows the deadline from the request."""
    async with ends() as both:
        client = both.client()
        await client.connect()
        connection = client._connection
        future = connection.new_future()
        connection.start(future, ("hold", ("late",), {}, loop.time() + 0.3, 0))
        with pytest.raises(rpc.DeadlineExceeded, match="the handler was cancelled"):
            await future
        assert both.methods.cancelled == ["late"]


async def test_a_deadline_is_inherited_by_the_calls_of_a_handler(loop):
    async with ends() as inner, ends() as outer:
        client = inner.client()

        @outer.server.method
        async def relay(name):
            return await client.call("hold", name)

        @outer.server.method
        async def relay_patiently(name):
            return await client.call("hold", name, timeout=100)

        for name in ("relay", "relay_patiently"):
            with pytest.raises(rpc.DeadlineExceeded):
                await outer.client().call(name, name, timeout=0.3)
        await until(lambda: inner.methods.cancelled == ["relay", "relay_patiently"])
        inner.methods.released.set()
        assert await outer.client().call("relay", "free") == "free"


async def test_a_timeout_of_asyncio_cancels_the_handler(loop):
    async with ends() as both:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await both.client().call("hold", "timed")
        await until(lambda: both.methods.cancelled == ["timed"])


async def test_a_handler_that_goes_on_keeps_its_place(loop):
    """A call counts towards `max_calls` until the server has answered, even if its caller has stopped waiting."""
    async with ends(max_calls=1) as both:
        release = asyncio.Event()

        @both.server.method
        async def stubborn():
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await release.wait()
            return "late"

        client = both.client()
        with pytest.raises(rpc.DeadlineExceeded):
            await client.call("stubborn", timeout=0.3)
        following = asyncio.create_task(client.call("add", 1))
        for _ in range(50):
            await asyncio.sleep(0)
        assert not following.done()
        release.set()
        assert await following == 2


async def test_cancelling_the_reader_of_a_stream_cancels_the_call(loop):
    """The call is cancelled as soon as the task that reads is cancelled, even if that task is not freed yet."""
    async with ends() as both:
        client = both.client()

        async def read():
            async for _ in client.stream("hold_stream", 1, b""):
                pass

        reader = asyncio.create_task(read())
        await until(lambda: both.methods.begun == [1])
        reader.cancel()
        await asyncio.wait([reader])
        await until(lambda: both.methods.cancelled == [1])
        assert reader.cancelled()
