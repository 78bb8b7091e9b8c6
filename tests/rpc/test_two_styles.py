"""`grapeshot.coro.rpc`: coros call coros, and coros and tasks (`grapeshot.rpc`) call each other."""

from __future__ import annotations

import asyncio
import gc

import pytest
from support import HOST, coro_is_available

import grapeshot
from grapeshot import rpc as async_rpc

if not coro_is_available():
    pytest.skip("no coros on this interpreter", allow_module_level=True)

from grapeshot import coro
from grapeshot.coro import rpc


def wait_for(condition):
    with coro.timeout(10):
        while not condition():
            coro.yield_slice()


class Methods:
    """Methods in blocking style, and one async method."""

    def __init__(self, server: rpc.Server) -> None:
        self.begun, self.ended = [], []
        self.released = coro.event()
        for name in ("add", "hold", "count", "echo_later", "fail"):
            server.add(name, getattr(self, name))

    def add(self, a, b=1):
        coro.sleep_relative(0)
        return a + b

    def hold(self, name):
        self.begun.append(name)
        try:
            self.released.wait()
        finally:
            self.ended.append(name)
        return name

    def count(self, limit):
        try:
            for number in range(limit):
                self.begun.append(number)
                coro.yield_slice()
                yield number
        finally:
            self.ended.append("count")

    async def echo_later(self, value):
        await asyncio.sleep(0.001)
        return value

    def fail(self, message):
        coro.yield_slice()
        raise ValueError(message)


def with_ends(test, **options):
    """Run test(client, methods, server) as a coro. Fail if the loop's exception handler is called."""
    reported = []

    def main():
        loop = coro.current()._loop
        loop.set_exception_handler(lambda _loop, context: reported.append(context))
        with rpc.Server(**options) as server:
            methods = Methods(server)
            server.listen(HOST, 0)
            with rpc.Client(*server.addresses[0]) as client:
                test(client, methods, server)

    coro.run(main)
    assert reported == []


def test_coros_call_coros():
    def test(client, methods, server):
        assert client.call("add", 1) == 2
        assert client.call("add", 1, b=5) == 6
        assert client.call("echo_later", "x") == "x"
        with pytest.raises(rpc.RemoteError, match="ValueError: no"):
            client.call("fail", "no")
        with pytest.raises(rpc.UnknownMethod):
            client.call("nothing")
        for args in ((), (1, 2, 3)):
            with pytest.raises(rpc.BadArguments):
                client.call("add", *args)
        with pytest.raises(rpc.RemoteError, match="TypeError") as caught:
            client.call("add", 1, "2")
        assert type(caught.value) is rpc.RemoteError
        assert server.connections == 1
        assert server.calls == 0

    with_ends(test)


def test_many_coros_call_at_the_same_time():
    def test(client, methods, server):
        callers = [coro.spawn(client.call, "hold", number) for number in range(1000)]
        wait_for(lambda: len(methods.begun) == 1000)
        assert server.calls == 1000
        methods.released.set()
        assert [caller.join() for caller in callers] == list(range(1000))
        assert server.connections == 1

    with_ends(test)


@pytest.mark.parametrize("how", ["shutdown", "interrupt", "cancel", "timeout"])
def test_interrupting_the_caller_cancels_the_handler(how):
    def call(client):
        if how == "timeout":
            with coro.timeout(0.02):
                client.call("hold", how)
        client.call("hold", how)

    def test(client, methods, server):
        caller = coro.spawn(call, client)
        wait_for(lambda: methods.begun == [how])
        if how == "timeout":
            with pytest.raises(coro.TimeoutError):
                caller.join()
        else:
            getattr(caller, how)()
            caller.join()
        wait_for(lambda: methods.ended == [how])
        assert client.call("add", 1) == 2
        wait_for(lambda: server.calls == 0)

    with_ends(test)


def test_deadlines():
    def test(client, methods, server):
        client.call("add", 1)  # the first call connects, so the timeout below is only for the call
        with pytest.raises(rpc.DeadlineExceeded):
            client.call("hold", 1, timeout=0.3)
        wait_for(lambda: methods.ended == [1])
        assert client.call("add", 1, timeout=5) == 2
        # a call also works while call_blocking hides the running loop
        assert coro.call_blocking(client.call, "add", 1, timeout=5) == 2

    with_ends(test)


def test_streams():
    def test(client, methods, server):
        assert list(client.stream("count", 100)) == list(range(100))
        assert methods.ended == ["count"]
        methods.begun.clear()
        with client.stream("count", 1000) as stream:
            for number in stream:
                if number == 5:
                    break
        wait_for(lambda: methods.ended == ["count", "count"])
        assert len(methods.begun) < 40  # 6 items were read, and the handler runs at most one window (16) ahead
        for _ in client.stream("count", 1000):
            break
        gc.collect()
        wait_for(lambda: len(methods.ended) == 3)
        with pytest.raises(rpc.BadArguments):
            next(client.stream("count"))
        with pytest.raises(rpc.BadArguments):
            next(client.stream("add", 1))
        wait_for(lambda: server.calls == 0)

    with_ends(test)


def test_a_lost_connection_ends_the_handlers():
    def test(client, methods, server):
        other = rpc.Client(*server.addresses[0])
        caller = coro.spawn(other.call, "hold", 1)
        wait_for(lambda: methods.begun)
        other.close()
        with pytest.raises(rpc.ConnectionLost) as caught:
            caller.join()
        assert caught.value.sent
        wait_for(lambda: methods.ended == [1])

    with_ends(test)


def test_a_graceful_end():
    def test(client, methods, server):
        caller = coro.spawn(client.call, "hold", 1)
        wait_for(lambda: methods.begun)
        closer = coro.spawn(server.close)
        serving = coro.spawn(server.serve_forever)
        coro.yield_slice()
        methods.released.set()
        assert caller.join() == 1
        closer.join()
        serving.join()

    with_ends(test)


def test_tasks_and_coros_share_clients_and_servers():
    """In one loop, a coro calls a server of tasks, and then a task calls a server of coros."""

    async def double(value):
        await asyncio.sleep(0)
        return value * 2

    def calling(port):
        with rpc.Client(HOST, port) as client:
            return [client.call("double", number) for number in range(10)]

    async def main():
        async with async_rpc.Server() as server:
            server.add("double", double)
            await server.listen(HOST, 0)
            assert await coro.run_sync(calling, server.addresses[0][1]) == list(range(0, 20, 2))

        def serving():
            server = rpc.Server()
            Methods(server)
            server.listen(HOST, 0)
            return server

        coro_server = await coro.run_sync(serving)
        async with async_rpc.Client(*coro_server.addresses[0]) as client:
            assert await asyncio.gather(*(client.call("add", number) for number in range(10))) == list(range(1, 11))
            assert [item async for item in client.stream("count", 50)] == list(range(50))
        await coro.run_sync(coro_server.close)

    grapeshot.run(main())


def test_both_styles_have_the_same_names():
    assert set(rpc.__all__) == set(async_rpc.__all__) - {"PacketStream"}
    for name in ("Client", "Server", "Stream"):
        own = {name for name in dir(getattr(rpc, name)) if not name.startswith("_")}
        other = {name for name in dir(getattr(async_rpc, name)) if not name.startswith("_")}
        assert own <= other | {"close"}, name
        assert other - own <= {"attach", "detach", "aclose", "cancel"}, name
