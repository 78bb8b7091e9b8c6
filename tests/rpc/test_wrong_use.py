"""Incorrect use: an error says what is wrong, and other callers on the connection are not affected."""

from __future__ import annotations

import asyncio
import functools
import math
import os

import pytest
from rpc.ends import ends
from support import HOST, free_port

from grapeshot import rpc


@pytest.mark.parametrize("name", [3, b"add", None, len])
async def test_names_of_methods_are_strings(loop, name):
    async with ends() as both:
        client = both.client()
        held = asyncio.create_task(client.call("hold", "other"))
        with pytest.raises(TypeError, match="name of a method"):
            await client.call(name, 1)
        with pytest.raises(TypeError, match="name of a method"):
            client.stream(name)
        with pytest.raises(TypeError, match="name of a method"):
            both.server.add(name, len)
        both.methods.released.set()
        assert await held == "other"


def test_a_callable_without_a_name_is_refused_as_a_method():
    server = rpc.Server()
    partial = functools.partial(len)
    for wrong in (partial, 3):
        with pytest.raises(TypeError, match=r"has no name: use add"):
            server.method(wrong)
    server.add("partial", partial)
    assert list(server._methods) == ["partial"]


@pytest.mark.parametrize("timeout", [math.inf, 1e300, 1e8])
async def test_a_timeout_may_be_infinite_or_very_long(loop, timeout):
    async with ends() as both:
        client = both.client()
        assert await client.call("add", 1, 2, timeout=timeout) == 3
        assert [number async for number in client.stream("numbers", 2, timeout=timeout)] == [0, 1]
        assert both.server.connections == 1


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ({"stream_window": 1.5}, TypeError),
        ({"max_packet": 1e9}, TypeError),
        ({"max_packet": 511}, ValueError),
        ({"connect_timeout": None}, TypeError),
        ({"connect_timeout": 0}, ValueError),
        ({"codec": "pickle"}, TypeError),
        ({"codec": rpc.Msgpack}, TypeError),
    ],
)
def test_options_that_make_no_sense(option, error):
    with pytest.raises(error):
        rpc.Client(HOST, 1, **option)


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ({"max_calls": 1.5}, TypeError),
        ({"max_calls": 0}, ValueError),
        ({"max_call_bytes": "1"}, TypeError),
        ({"max_call_bytes": 0}, ValueError),
        ({"max_call_bytes": 10**4000}, ValueError),
        ({"max_calls": 10**4000}, ValueError),
        ({"codec": rpc.Pickle}, TypeError),
    ],
)
def test_options_of_a_server_that_make_no_sense(option, error):
    with pytest.raises(error, match=next(iter(option))):
        rpc.Server(**option)


async def test_paths_may_be_bytes(loop, tmp_path):
    path = os.fsencode(tmp_path / "rpc")
    async with rpc.Server() as server:
        server.add("add", lambda a, b: a + b)
        await server.listen_unix(path)
        async with rpc.Client(path=path) as client:
            assert await client.call("add", 1, 2) == 3
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("_round", range(3))
async def test_without_a_connection_the_error_says_why(loop, _round):
    """The error names the refusal of an earlier attempt, even if the last attempt ended because time ran out."""
    client = rpc.Client(HOST, free_port(), connect_timeout=0.5)
    with pytest.raises(rpc.ConnectionLost, match=r"cannot connect: .*refused|Connect call failed") as caught:
        await client.call("add", 1)
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)
    await client.close()


async def test_the_error_says_that_a_server_uses_another_protocol(loop):
    def answer(_reader, writer):
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, HOST, 0)
    client = rpc.Client(*server.sockets[0].getsockname())
    with pytest.raises(rpc.ConnectionLost, match="uses another protocol"):
        await client.call("add", 1)
    await client.close()
    server.close()
    await server.wait_closed()
