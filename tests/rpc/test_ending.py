"""How a server ends: gracefully, after a time limit, or at once."""

from __future__ import annotations

import asyncio
import os
import tempfile

import pytest
from rpc.ends import ends
from support import HOST, until

from grapeshot import rpc


async def test_close_waits_for_the_calls_under_way(loop):
    async with ends() as both:
        client = both.client()
        call = asyncio.create_task(client.call("hold", 1))
        await until(lambda: both.methods.begun)
        closing = asyncio.create_task(both.server.close())
        await until(lambda: client._connection is None)
        assert not closing.done()
        both.methods.released.set()
        assert await call == 1
        await closing
        assert both.server.connections == 0


async def test_close_cancels_calls_that_take_too_long(loop):
    async with ends() as both:
        client = both.client()
        call = asyncio.create_task(client.call("hold", 1))
        await until(lambda: both.methods.begun)
        await both.server.close(timeout=0.02)
        with pytest.raises(rpc.RemoteCancelled):
            await call
        assert both.methods.cancelled == [1]


async def test_close_does_not_wait_for_handlers_that_refuse_to_end(loop):
    async with ends() as both:

        @both.server.method
        async def stubborn():
            while not both.methods.released.is_set():
                try:
                    await both.methods.released.wait()
                except asyncio.CancelledError:
                    both.methods.cancelled.append("stubborn")

        call = asyncio.create_task(both.client().call("stubborn"))
        await until(lambda: both.server.calls == 1)
        await both.server.close(timeout=0.02)
        with pytest.raises(rpc.ConnectionLost) as caught:
            await call
        assert caught.value.sent
        both.methods.released.set()
        await until(lambda: both.server.calls == 0)


async def test_cancelling_close_cancels_the_calls(loop):
    async with ends() as both:
        call = asyncio.create_task(both.client().call("hold", 1))
        await until(lambda: both.methods.begun)
        closing = asyncio.create_task(both.server.close(None))
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        with pytest.raises(rpc.RemoteCancelled):
            await call


async def test_serve_forever_ends_with_close(loop):
    server = rpc.Server()
    await server.listen(HOST, 0)
    serving = asyncio.create_task(server.serve_forever())
    await asyncio.sleep(0)
    await server.close()
    await serving
    await server.close()
    with pytest.raises(RuntimeError, match="closed"):
        await server.listen(HOST, 0)


async def test_a_method_may_close_its_server(loop):
    async with ends() as both:
        tasks = []

        @both.server.method
        def stop():
            tasks.append(asyncio.get_running_loop().create_task(both.server.close()))
            return "stopping"

        late = both.client(connect_timeout=0.05)
        assert await both.client().call("stop") == "stopping"
        await tasks[0]
        with pytest.raises(rpc.ConnectionLost):
            await late.call("add", 1)


async def test_the_file_of_a_unix_socket_is_removed_unless_another_server_has_it(loop):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "s")
        first, second = rpc.Server(), rpc.Server()
        await first.listen_unix(path)
        os.unlink(path)
        await second.listen_unix(path)
        await first.close()
        assert os.path.exists(path)
        await second.close()
        assert not os.path.exists(path)


async def test_coming_and_going_clients_leave_nothing(loop):
    async with ends() as both:
        for _ in range(20):
            async with rpc.Client(HOST, both.port) as client:
                assert await client.call("add", 1) == 2
        await until(lambda: both.server.connections == 0)
        assert len(asyncio.all_tasks()) == 1
