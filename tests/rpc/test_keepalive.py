"""A peer that vanishes silently is noticed; a peer that is alive keeps its connection."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import msgspec
import pytest
from rpc.ends import ends, raw_client
from support import HOST, coro_is_available, until

from grapeshot import rpc

pytestmark = pytest.mark.only_on("asyncio", "grapeshot")  # most files of tests/rpc also run on uvloop
PING, PONG = [10, 0], [11, 0]
PING_BYTES = msgspec.msgpack.encode(PING)

SERVER = """
import asyncio
from grapeshot import rpc

async def hold():
    print("begun", flush=True)
    await asyncio.Event().wait()

async def main():
    server = rpc.Server()
    server.add("hold", hold)
    await server.listen("127.0.0.1", 0)
    print(server.addresses[0][1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


@contextlib.contextmanager
def server_process():
    """Run a server in a process that can be stopped; yield the process and its port."""
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


class Proxy:
    """A proxy between a client and a server. With `is_cut` it drops all data, as if the cable were pulled."""

    def __init__(self, port: int, chunk: int, pause_s: float) -> None:
        self._port, self._chunk, self._pause_s = port, chunk, pause_s
        self.is_cut = False
        self.to_client = self.to_server = b""
        self.tasks: list[asyncio.Task[None]] = []

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind = await asyncio.open_connection(HOST, self._port)
        loop = asyncio.get_running_loop()
        self.tasks.append(loop.create_task(self._pump(reader, behind[1], "to_server")))
        self.tasks.append(loop.create_task(self._pump(behind[0], writer, "to_client")))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> None:
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            while data := await reader.read(self._chunk):
                setattr(self, name, (getattr(self, name) + data)[-1000:])
                if not self.is_cut:
                    writer.write(data)
                    await writer.drain()
                    if len(data) > 1000:
                        await asyncio.sleep(self._pause_s)


@contextlib.asynccontextmanager
async def proxied(port: int, chunk: int = 65536, pause_s: float = 0) -> AsyncIterator[tuple[Proxy, int]]:
    proxy = Proxy(port, chunk, pause_s)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    sock.bind((HOST, 0))
    server = await asyncio.start_server(proxy.accept, sock=sock, limit=chunk)
    try:
        yield proxy, sock.getsockname()[1]
    finally:
        server.close()
        for task in proxy.tasks:
            task.cancel()
        await asyncio.gather(*proxy.tasks, return_exceptions=True)
        await server.wait_closed()


async def test_a_stopped_server_ends_the_calls(loop):
    run = functools.partial(loop.run_in_executor, None)
    with server_process() as (process, port):
        client = rpc.Client(HOST, port, keepalive=0.3, connect_timeout=0.1)
        call = asyncio.create_task(client.call("hold"))
        assert await run(process.stdout.readline) == "begun\n"
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(rpc.ConnectionLost, match="the peer has sent nothing") as caught:
            await call
        assert caught.value.sent
        assert isinstance(caught.value.__cause__, TimeoutError)
        with pytest.raises(rpc.ConnectionLost) as caught:
            await client.call("hold")  # the kernel still accepts connections for a stopped process
        assert not caught.value.sent
        await client.close()


@pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
def test_a_stopped_server_ends_the_calls_of_coros():
    from grapeshot import coro
    from grapeshot.coro import rpc as coro_rpc
    from grapeshot.coro._bridge import run_in_thread

    def main(process, port):
        client = coro_rpc.Client(HOST, port, keepalive=0.3)
        call = coro.spawn(client.call, "hold")
        assert run_in_thread(process.stdout.readline) == "begun\n"
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(coro_rpc.ConnectionLost, match="the peer has sent nothing") as caught:
            call.join()
        assert caught.value.sent
        client.close()

    with server_process() as (process, port):
        coro.run(main, process, port)


async def test_a_client_that_has_vanished_leaves_no_call_behind(loop):
    async with ends(keepalive=0.1) as both, proxied(both.port) as (proxy, port):
        client = rpc.Client(HOST, port, keepalive=None)
        call = asyncio.create_task(client.call("hold", 1))
        await until(lambda: both.methods.begun)
        proxy.is_cut = True
        await until(lambda: both.methods.cancelled == [1] and both.server.connections == 0)
        call.cancel()
        await asyncio.wait([call])
        await client.close()


async def test_a_handler_that_runs_long_keeps_its_connection(loop):
    async with ends(keepalive=None) as both, proxied(both.port) as (proxy, port):
        client = rpc.Client(HOST, port, keepalive=0.1)
        call = asyncio.create_task(client.call("hold", "long"))
        await until(lambda: both.methods.begun)
        await until(lambda: proxy.to_server.count(PING_BYTES) >= 4)
        both.methods.released.set()
        assert await call == "long"
        await client.close()


async def test_a_busy_loop_does_not_drop_its_peer(loop):
    """The loop of both ends and of the proxy is busy until the answer to a ping is overdue. So when the client checks
    whether the answer has come, the proxy has not been able to deliver it.
    """
    async with ends(keepalive=None) as both, proxied(both.port) as (_, port):
        client = rpc.Client(HOST, port, keepalive=0.2)
        call = asyncio.create_task(client.call("hold", "busy"))
        await until(lambda: both.methods.begun)
        [connection] = both.server._connections
        answer, asked = connection.take_ping, []

        def answer_late():
            asked.append(1)
            time.sleep(0.3)
            answer()

        connection.take_ping = answer_late
        await until(lambda: len(asked) == 2 or call.done())
        both.methods.released.set()
        assert await call == "busy"
        await client.close()


async def test_a_slow_network_is_not_taken_for_a_dead_peer(loop):
    """The ping arrives late, because 4 MiB of other data are sent before it, so the answer is late, too."""
    limit = 5 * 1024 * 1024
    async with ends(keepalive=None, max_packet=limit) as both, proxied(both.port, pause_s=0.01) as (_, port):
        client = rpc.Client(HOST, port, keepalive=0.2, max_packet=limit)
        value = bytes(4 * 1024 * 1024)
        assert await client.call("add", value, b"x") == value + b"x"
        await client.close()


async def test_a_silent_client_is_asked_until_it_does_not_answer(loop):
    async with ends(keepalive=0.05) as both, raw_client(both.port) as raw:
        raw.say_hello()
        await raw.packet()
        for _ in range(4):
            assert await raw.message() == PING
            raw.send_message(*PONG)
        assert await raw.message() == PING
        assert await raw.rest() == b""


async def test_a_server_that_cannot_write_does_not_store_answers_to_pings(loop):
    async with ends() as both, raw_client(both.port) as raw:
        raw.say_hello()
        await raw.packet()
        raw.send_message(*PING)
        assert await raw.message() == PONG
        [connection] = both.server._connections
        connection.pause_writing()
        connection.was_heard = False
        raw.send_message(*PING)
        await until(lambda: connection.was_heard)
        connection.resume_writing()
        raw.send_message(1, 1, "add", [1])
        assert await raw.message() == [5, 1, 2]


async def test_no_pings_without_keepalive(loop):
    async with ends(keepalive=None) as both, proxied(both.port) as (proxy, port):
        clients = [rpc.Client(HOST, port, keepalive=None)]
        calls = [asyncio.create_task(clients[0].call("hold", 1))]
        await until(lambda: len(both.methods.begun) == 1)
        proxy.is_cut = True
        before = proxy.to_server, proxy.to_client
        assert clients[0]._connection._keepalive_timer is None
        async with proxied(both.port) as (other, other_port):
            clients.append(rpc.Client(HOST, other_port, keepalive=0.1))
            calls.append(asyncio.create_task(clients[-1].call("hold", 2)))
            await until(lambda: len(both.methods.begun) == 2)
            other.is_cut = True
            with pytest.raises(rpc.ConnectionLost):
                await calls[1]
        assert (proxy.to_server, proxy.to_client) == before
        assert not calls[0].done()
        calls[0].cancel()
        await asyncio.wait(calls)
        for client in clients:
            await client.close()


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
def test_a_keepalive_that_makes_no_sense(value):
    with pytest.raises(ValueError, match="keepalive"):
        rpc.Client(HOST, 1, keepalive=value)
    with pytest.raises(ValueError, match="keepalive"):
        rpc.Server(keepalive=value)
    with pytest.raises(TypeError, match="keepalive"):
        rpc.Client(HOST, 1, keepalive="1")
