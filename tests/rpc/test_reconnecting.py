"""Connections that are lost and made again: methods run at most once, and callers learn what happened."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
from pathlib import Path

import pytest
from rpc.ends import FRAMED_SERVER_HELLO, ends, raw_client
from support import HOST, Script, free_port, until

from grapeshot import rpc

SERVER = """
import asyncio, os, sys
from grapeshot import rpc

async def main(path, log):
    server = rpc.Server()

    @server.method
    async def note(number):
        with open(log, "a") as file:
            print(number, file=file)
        return number

    @server.method
    async def hang(number):
        await note(number)
        await asyncio.Event().wait()

    @server.method
    def pid():
        return os.getpid()

    await server.listen_unix(path)
    print("ready")
    await server.serve_forever()

with asyncio.Runner(loop_factory=new_event_loop) as runner:
    runner.run(main({path!r}, {log!r}))
"""


@pytest.fixture
def place():
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def server_process(kind: str, place: Path) -> Script:
    script = Script(
        kind, SERVER.replace("{path!r}", repr(str(place / "s"))).replace("{log!r}", repr(str(place / "log")))
    )
    assert script.line() == "ready", script.process.communicate()
    return script


def noted(place: Path) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return [int(line) for line in (place / "log").read_text().split()]
    return []


async def test_a_killed_server_is_reported_honestly(loop, loop_kind, place):
    """Calls that the killed server has received may have run; later calls run on the next server, each exactly once."""
    client = rpc.Client(path=place / "s")
    with server_process(loop_kind, place) as first:
        pid = await client.call("pid")
        hanging = [asyncio.create_task(client.call("hang", number)) for number in range(3)]
        await until(lambda: noted(place) == [0, 1, 2])
        first.process.kill()
        results = await asyncio.gather(*hanging, return_exceptions=True)
    for result in results:
        assert isinstance(result, rpc.ConnectionLost)
        assert result.sent
        assert "may have run" in str(result)
    # no server runs now: these calls wait until one does
    later = [asyncio.create_task(client.call("note", number)) for number in (10, 11)]
    await until(lambda: client._trouble_since is not None)
    with server_process(loop_kind, place):
        assert await asyncio.gather(*later) == [10, 11]
        assert await client.call("pid") != pid
        await client.close()
    assert noted(place) == [0, 1, 2, 10, 11]


async def test_an_idle_connection_that_is_lost_later_is_no_trouble(loop, loop_kind, place, monkeypatch):
    """The next call has the whole time limit to connect, no matter how long ago the lost connection was opened."""
    monkeypatch.setattr("grapeshot.rpc._client._STABLE_S", 0.01)
    client = rpc.Client(path=place / "s", connect_timeout=5)
    with server_process(loop_kind, place) as first:
        await client.connect()
        client._trouble_since -= 100
        await asyncio.sleep(0.02)
        first.process.kill()
        await until(lambda: client._connection is None)
    with server_process(loop_kind, place):
        assert await client.call("note", 1) == 1
        await client.close()


async def test_a_server_killed_under_load_runs_nothing_twice(loop, loop_kind, place):
    client = rpc.Client(path=place / "s")
    outcomes: dict[int, str] = {}

    async def caller(numbers: range) -> None:
        for number in numbers:
            try:
                assert await client.call("note", number) == number
                outcomes[number] = "answered"
            except rpc.ConnectionLost as error:
                assert error.sent
                outcomes[number] = "may have run"

    callers = asyncio.gather(*(caller(range(start, start + 40)) for start in range(0, 800, 40)))
    for count in (100, 300):
        with server_process(loop_kind, place) as server:
            await until(lambda: len(noted(place)) > count)
            server.process.kill()
    with server_process(loop_kind, place):
        await callers
        await client.close()
    runs = noted(place)
    assert len(runs) == len(set(runs)), "a call has run twice"
    assert outcomes.keys() == set(range(800))
    assert {number for number, outcome in outcomes.items() if outcome == "answered"} <= set(runs)


async def test_without_a_server_calls_end_in_time(loop):
    client = rpc.Client(HOST, free_port(), connect_timeout=0.2)
    results = await asyncio.gather(*(client.call("add", 1) for _ in range(10)), return_exceptions=True)
    for result in results:
        assert isinstance(result, rpc.ConnectionLost)
        assert not result.sent
        assert isinstance(result.__cause__, OSError)
    with pytest.raises(rpc.DeadlineExceeded):
        await rpc.Client(HOST, free_port()).call("add", 1, timeout=0.05)
    await client.close()


async def test_a_listener_that_never_says_hello(loop):
    with socket.create_server((HOST, 0)) as listener:
        client = rpc.Client(*listener.getsockname(), connect_timeout=0.1)
        with pytest.raises(rpc.ConnectionLost, match="has not run"):
            await client.call("add", 1)
        await client.close()


async def test_closing_ends_a_client_that_is_connecting(loop):
    client = rpc.Client(HOST, free_port())
    calls = [asyncio.create_task(client.call("add", 1)) for _ in range(3)]
    await until(lambda: client._delay_s > 0.05)
    await client.close()
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, rpc.ConnectionLost)
        assert "the client is closed" in str(result)


async def test_unsent_calls_go_through_the_next_connection(loop):
    async with ends() as both:
        client = both.client()
        await client.call("add", 1)
        first = client._connection
        calls = [asyncio.create_task(client.call("later", number)) for number in range(5)]
        await asyncio.sleep(0)  # the calls are numbered, but not written yet
        assert first._last == 6
        first.abort()
        assert await asyncio.gather(*calls) == list(range(5))
        assert client._connection is not first


async def test_connecting_to_a_server_that_closes_each_connection_slows_down(loop):
    """The client connects again at growing intervals to send its call, until `connect_timeout` is over."""
    connections = 0

    class Closing(asyncio.Protocol):
        def connection_made(self, transport):
            nonlocal connections
            connections += 1
            transport.write(FRAMED_SERVER_HELLO + b"\0\0\0\x04\x93\x09\x00\xc0")
            transport.close()

    server = await loop.create_server(Closing, HOST, 0)
    client = rpc.Client(*server.sockets[0].getsockname(), connect_timeout=1)
    with pytest.raises(rpc.ConnectionLost) as caught:
        await client.call("add", 1)
    assert not caught.value.sent
    assert 1 < connections < 50
    await client.close()
    server.close()


async def test_a_goodbye_moves_calls_to_the_next_server(loop):
    """A server that ends gracefully loses no call: calls that it has not accepted run on the next server."""
    path = os.path.join(tempfile.mkdtemp(), "s")
    servers = []

    async def start() -> rpc.Server:
        server = rpc.Server()
        index = len(servers)

        @server.method
        async def where(iterations):
            for _ in range(iterations):
                await asyncio.sleep(0)
            return index

        servers.append(server)
        await server.listen_unix(path)
        return server

    first = await start()
    client = rpc.Client(path=path)
    before = [asyncio.create_task(client.call("where", 200)) for _ in range(20)]
    await until(lambda: first.calls == 20)
    during = [asyncio.create_task(client.call("where", 0)) for _ in range(20)]
    closing = asyncio.create_task(first.close())
    await until(lambda: not first._servers[0].is_serving())
    second = await start()
    after = [asyncio.create_task(client.call("where", 0)) for _ in range(20)]
    assert await asyncio.gather(*before) == [0] * 20
    assert set(await asyncio.gather(*during)) <= {0, 1}
    assert await asyncio.gather(*after) == [1] * 20
    await closing
    await client.close()
    await second.close()
    os.rmdir(os.path.dirname(path))


async def test_a_call_after_the_goodbye_is_not_run_by_the_server_that_leaves(loop):
    async with ends() as both, raw_client(both.port) as raw:
        raw.say_hello()
        raw.send_message(1, 1, "hold", ["first"])
        await until(lambda: both.methods.begun)
        closing = asyncio.create_task(both.server.close())
        await raw.packet()
        assert await raw.message() == [9, 1, None]
        raw.send_message(1, 2, "hold", ["second"])
        raw.send_message(3, 1)
        assert (await raw.message())[:3] == [6, 1, 5]
        assert await raw.rest() == b""
        await closing
        assert both.methods.begun == ["first"]
