"""Calls and their answers: order, many at a time, errors, limits."""

from __future__ import annotations

import asyncio
import datetime

import pytest
from rpc.ends import ends
from support import until

from grapeshot import rpc

MIB = 1024 * 1024


async def test_a_call_returns_its_result(loop):
    async with ends() as both:
        client = both.client()
        assert await client.call("add", 1, 2) == 3
        assert await client.call("add", 1, b=5) == 6
        assert await client.call("add", "a", "ü") == "aü"
        assert await client.call("later", {"key": [1, 2.5, None, True, b"\0"]}) == {"key": [1, 2.5, None, True, b"\0"]}
        now = datetime.datetime.now(datetime.UTC)
        assert await client.call("later", now) == now


async def test_answers_come_in_any_order(loop):
    async with ends() as both:
        client = both.client()
        order = []

        async def call(method, *args):
            order.append(await client.call(method, *args))

        async with asyncio.TaskGroup() as group:
            group.create_task(call("hold", "first"))
            await until(lambda: both.methods.begun == ["first"])
            group.create_task(call("later", "third", 50))
            group.create_task(call("later", "second", 1))
            await until(lambda: len(order) == 2)
            both.methods.released.set()
        assert order == ["second", "third", "first"]
        assert both.server.connections == 1


async def test_a_thousand_calls_are_under_way_on_one_connection(loop):
    async with ends() as both:
        client = both.client()
        calls = [asyncio.create_task(client.call("hold", number)) for number in range(1000)]
        await until(lambda: len(both.methods.begun) == 1000)
        assert both.server.calls == 1000
        assert both.methods.ended == []
        both.methods.released.set()
        assert await asyncio.gather(*calls) == list(range(1000))
        assert both.server.connections == 1


async def test_calls_beyond_the_servers_limit_wait_at_the_client(loop):
    async with ends(max_calls=3) as both:
        client = both.client()
        calls = [asyncio.create_task(client.call("hold", number)) for number in range(10)]
        await until(lambda: len(both.methods.begun) == 3)
        for _ in range(50):
            await asyncio.sleep(0)
        assert both.methods.begun == [0, 1, 2]
        calls[1].cancel()  # makes room for the next call once the server has answered
        calls[3].cancel()  # this call still waits at the client, so it makes no room
        await until(lambda: len(both.methods.begun) == 4)
        assert both.methods.begun == [0, 1, 2, 4]
        both.methods.released.set()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [result for result in results if isinstance(result, int)] == [0, 2, 4, 5, 6, 7, 8, 9]
        assert both.methods.begun == [0, 1, 2, 4, 5, 6, 7, 8, 9]


async def test_the_calls_of_many_tasks_are_sent_in_one_write(loop):
    """The tasks call in the same iteration of the loop."""
    async with ends() as both:
        client = both.client()
        await client.connect()
        connection = client._connection
        written = []
        transport = connection._transport
        write = transport.write

        class Spy:
            def __getattr__(self, name):
                return getattr(transport, name)

            def write(self, data):
                written.append(bytes(data))
                write(data)

        connection._transport = Spy()
        assert await asyncio.gather(*(client.call("add", number) for number in range(100))) == list(range(1, 101))
        connection._transport = transport
        assert len(written) == 1


async def test_an_exception_of_a_handler_is_a_remote_error(loop):
    async with ends() as both:
        client = both.client()
        with pytest.raises(rpc.RemoteError, match="ValueError: no such thing") as caught:
            await client.call("fail", "no such thing")
        error = caught.value
        assert (type(error), error.type_name, error.message) == (rpc.RemoteError, "ValueError", "no such thing")
        assert error.traceback is None
        with pytest.raises(rpc.RemoteError, match="TypeError"):  # raised in the function's body, so not BadArguments
            await client.call("add", 1, "2")
        with pytest.raises(rpc.RemoteError) as caught:
            await client.call("fail", "x" * 100_000)
        assert len(caught.value.message) < 20_000
        assert await client.call("add", 1) == 2


@pytest.mark.parametrize(
    ("kind", "error"), [(asyncio.CancelledError, rpc.RemoteCancelled), (GeneratorExit, rpc.RemoteError)]
)
async def test_an_exception_of_any_kind_ends_only_its_call(loop, kind, error):
    def leave():
        raise kind

    async with ends() as both:
        both.server.add("leave", leave)
        client = both.client()
        other = asyncio.create_task(client.call("hold", 1))
        await until(lambda: both.methods.begun)
        with pytest.raises(error):
            await client.call("leave")
        both.methods.released.set()
        assert await other == 1


async def test_tracebacks_are_sent_if_the_server_wants_it(loop):
    async with ends(tracebacks=True) as both:
        with pytest.raises(rpc.RemoteError) as caught:
            await both.client().call("fail", "here")
        assert "raise ValueError(message)" in caught.value.traceback
        assert "raise ValueError(message)" in str(caught.value)


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (UnprintableError, "", "(its text cannot be shown)"),
        (ValueError, "a lone surrogate \ud800", "a lone surrogate \\ud800"),
        (asyncio.CancelledError, "", "the handler was cancelled"),
    ],
)
async def test_errors_that_are_hard_to_send(loop, kind, text, message):
    async with ends() as both:

        @both.server.method
        async def fail_so():
            raise kind(text)

        with pytest.raises(rpc.RemoteError) as caught:
            await both.client().call("fail_so")
        assert caught.value.type_name.endswith(kind.__name__)
        assert caught.value.message == message


async def test_wrong_calls(loop):
    async with ends() as both:
        client = both.client()
        with pytest.raises(rpc.UnknownMethod, match="no method 'nothing'"):
            await client.call("nothing")
        for call in (
            client.call("add"),
            client.call("later"),
            client.call("add", 1, 2, 3),
            client.call("add", 1, c=2),
            client.call("numbers", 3),  # `numbers` is a method for client.stream()
        ):
            with pytest.raises(rpc.BadArguments):
                await call
        for stream in (client.stream("add", 1), client.stream("numbers"), client.stream("numbers", 1, 2)):
            with pytest.raises(rpc.BadArguments):
                await anext(stream)
        assert await client.call("add", 1) == 2
        assert both.server.connections == 1


async def test_values_that_cannot_be_encoded(loop):
    async with ends() as both:
        client = both.client()
        both.server.add("opaque", lambda: object())
        both.server.add("recursive", _recursive)
        with pytest.raises(TypeError, match="object"):
            await client.call("later", object())
        with pytest.raises(rpc.BadResult, match="TypeError"):
            await client.call("opaque")
        with pytest.raises(rpc.BadResult, match="RecursionError"):
            await client.call("recursive")
        assert await client.call("add", 1) == 2


def _recursive():
    value = []
    value.append(value)
    return value


async def test_packets_that_are_too_long_are_not_sent(loop):
    async with ends({"max_packet": 2000}, max_packet=1000) as both:
        client = both.client()
        with pytest.raises(rpc.PacketTooLarge, match="max_packet is 1000"):
            await client.call("later", bytes(1000))
        with pytest.raises(rpc.BadResult, match="max_packet is 2000"):
            await client.call("blob", 2000)
        assert len(await client.call("blob", 1900)) == 1900
        assert both.server.connections == 1


async def test_large_packets_arrive_whole(loop):
    async with ends({"max_packet": 16 * MIB}, max_packet=16 * MIB) as both:
        client = both.client()
        sizes = [3_000_000, 65_530, 0, 10_000_000, 70_000]
        assert [len(blob) for blob in await asyncio.gather(*(client.call("blob", size) for size in sizes))] == sizes
        assert await client.call("later", b"ab" * 2_000_000) == b"ab" * 2_000_000


async def test_a_task_factory_makes_the_handlers_tasks(loop):
    names = []

    def factory(loop, coroutine, **options):
        names.append(coroutine.__qualname__)
        return asyncio.Task(coroutine, loop=loop, **options)

    async with ends() as both:
        loop.set_task_factory(factory)
        assert await both.client().call("later", 1, 3) == 1
        loop.set_task_factory(None)
    assert "Methods.later" in names


def test_methods_are_registered_once_and_by_any_name():
    server = rpc.Server()

    @server.method
    def one() -> int:
        return 1

    @server.method("two.three")
    async def other() -> int:
        return 2

    assert one() == 1
    assert sorted(server._methods) == ["one", "two.three"]
    with pytest.raises(ValueError, match="already"):
        server.add("one", one)
    with pytest.raises(TypeError, match="callable"):
        server.add("three", 3)
    with pytest.raises(TypeError, match="async generator"):
        server.add("four", lambda: (yield))


@pytest.mark.parametrize(
    "options",
    [{}, {"host": "a"}, {"port": 1}, {"host": "a", "port": 1, "path": "b"}, {"path": "b", "stream_window": 0}],
)
def test_addresses_that_make_no_sense(options):
    with pytest.raises(ValueError, match=r"pass either|stream_window|max_packet"):
        rpc.Client(**options)
