"""The server and the client of the websockets library on the loop under test, over TCP, TLS and unix sockets."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import websockets.sync.client
from support import CAP_S
from websockets.asyncio.client import ClientConnection, connect, unix_connect
from websockets.asyncio.server import Server, ServerConnection, broadcast, serve, unix_serve
from websockets.exceptions import ConnectionClosedError, ConnectionClosedOK, InvalidStatus

from tests.apps.certificates import Certificates

Run = Callable[[Coroutine[Any, Any, Any]], Any]
Handler = Callable[[ServerConnection], Coroutine[Any, Any, None]]
BLOB = random.Random(13).randbytes(4 * 1024 * 1024)
HOST = "127.0.0.1"

# In some tests a connection is closed with a code other than 1000 or 1001. This raises ConnectionClosedError in the
# connection's handler, and the server would log that as an error.
logging.getLogger("websockets.server").setLevel(logging.CRITICAL)


class Way:
    """How servers listen and clients connect: `ws`, `wss` or `unix`."""

    def __init__(self, scheme: str, certificates: Certificates, folder: Path) -> None:
        self.scheme, self.certificates = scheme, certificates
        self.path = str(folder / "socket")
        self.port = 0

    @asynccontextmanager
    async def serve(self, handler: Handler, **options: Any) -> AsyncIterator[Server]:
        options = {"max_size": None, **options}
        if self.scheme == "unix":
            serving = unix_serve(handler, self.path, **options)
        else:
            tls = self.certificates.for_server() if self.scheme == "wss" else None
            serving = serve(handler, HOST, 0, ssl=tls, **options)
        async with serving as server:
            if self.scheme != "unix":
                [listener] = server.sockets
                self.port = listener.getsockname()[1]
            yield server

    def connect(self, **options: Any) -> Any:
        options = {"max_size": None, **options}
        if self.scheme == "unix":
            return unix_connect(self.path, **options)
        if self.scheme == "wss":
            return connect(f"wss://localhost:{self.port}/", ssl=self.certificates.for_client(), **options)
        return connect(f"ws://{HOST}:{self.port}/", **options)

    def blocking_socket(self) -> socket.socket:
        if self.scheme != "unix":
            return socket.create_connection((HOST, self.port), CAP_S)
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(CAP_S)
        sock.connect(self.path)
        return sock


@pytest.fixture(params=["ws", "wss", "unix"])
def way(request: pytest.FixtureRequest, certificates: Certificates, tmp_path: Path) -> Way:
    return Way(request.param, certificates, tmp_path)


async def echo(connection: ServerConnection) -> None:
    async for message in connection:
        await connection.send(message)


@pytest.mark.parametrize("compression", [None, "deflate"])
def test_echo_of_every_size(run: Run, way: Way, compression: str | None) -> None:
    async def main() -> None:
        async with way.serve(echo, compression=compression), way.connect(compression=compression) as client:
            for length in (0, 1, 125, 126, 65535, 65536, len(BLOB)):
                await client.send(BLOB[:length])
                assert await client.recv() == BLOB[:length]
            for number in range(200):
                await client.send(f"message {number}")
            assert [await client.recv() for _ in range(200)] == [f"message {number}" for number in range(200)]

    run(main())


def test_a_message_in_fragments(run: Run, way: Way) -> None:
    async def main() -> None:
        async with way.serve(echo), way.connect() as client:

            async def fragments() -> AsyncIterator[bytes]:
                for start in range(0, 100_000, 1000):
                    yield BLOB[start : start + 1000]
                    await asyncio.sleep(0)

            await client.send(fragments())
            assert await client.recv() == BLOB[:100_000]

    run(main())


def test_send_waits_while_the_peer_does_not_read(run: Run, way: Way) -> None:
    """`send` waits while the other end does not read: flow control works through both transports."""

    async def main() -> None:
        count = 64
        sent = 0

        async def pour(connection: ServerConnection) -> None:
            nonlocal sent
            for _ in range(count):
                await connection.send(BLOB[: 256 * 1024])
                sent += 1

        async with way.serve(pour, compression=None), way.connect(compression=None, max_queue=2) as client:
            assert len(await client.recv()) == 256 * 1024
            assert sent < count
            for _ in range(count - 1):
                assert await client.recv() == BLOB[: 256 * 1024]
            with pytest.raises(ConnectionClosedOK):
                await client.recv()
        assert sent == count

    run(main())


def test_pings_and_keepalive(run: Run, way: Way) -> None:
    async def main() -> None:
        options = {"ping_interval": 0.01, "ping_timeout": CAP_S}
        async with way.serve(echo, **options), way.connect(**options) as client:
            while not client.latency:  # until one of the client's keepalive pings was answered
                await asyncio.sleep(0.001)
            for _ in range(5):
                pong = await client.ping()
                assert await asyncio.wait_for(pong, CAP_S) >= 0.0
            await client.send("still there")
            assert await client.recv() == "still there"

    run(main())


def test_100_clients_and_a_broadcast(run: Run, way: Way) -> None:
    async def main() -> None:
        members: set[ServerConnection] = set()

        async def room(connection: ServerConnection) -> None:
            members.add(connection)
            try:
                await connection.send("welcome")
                async for message in connection:
                    broadcast(members, message)
            finally:
                members.discard(connection)

        async with way.serve(room), AsyncExitStack() as stack:

            async def join() -> ClientConnection:
                client = await way.connect()
                stack.push_async_callback(client.close)
                assert await client.recv() == "welcome"
                return client

            clients = await asyncio.gather(*(join() for _ in range(100)))
            for number in range(5):
                await clients[number].send(f"to all {number}")
                messages = await asyncio.gather(*(client.recv() for client in clients))
                assert messages == [f"to all {number}"] * 100

    run(main())


def test_close_codes_pass_both_ways(run: Run, way: Way) -> None:
    async def main() -> None:
        codes: list[int | None] = []

        async def close_if_asked(connection: ServerConnection) -> None:
            try:
                async for message in connection:
                    await connection.close(4001, str(message))
            finally:
                codes.append(connection.close_code)

        async with way.serve(close_if_asked):
            async with way.connect() as client:
                await client.send("bye")
                with pytest.raises(ConnectionClosedError) as caught:
                    await client.recv()
                assert caught.value.rcvd is not None
                assert (caught.value.rcvd.code, caught.value.rcvd.reason) == (4001, "bye")
            async with way.connect() as client:
                await client.close(4002)
        assert codes == [4001, 4002]

    run(main())


def test_the_server_closes_its_clients(run: Run, way: Way) -> None:
    async def main() -> None:
        async with way.serve(echo) as server:
            clients = [await way.connect() for _ in range(10)]
            receiving = [asyncio.ensure_future(client.recv()) for client in clients]
            await asyncio.sleep(0)
            server.close()
            for outcome in await asyncio.gather(*receiving, return_exceptions=True):
                assert isinstance(outcome, ConnectionClosedOK)
                assert outcome.rcvd is not None
                assert outcome.rcvd.code == 1001
            await server.wait_closed()
            for client in clients:
                await client.wait_closed()
            with pytest.raises(OSError):
                await way.connect()

    run(main())


def test_a_client_vanishes(run: Run, way: Way) -> None:
    async def main() -> None:
        gone: asyncio.Queue[int | None] = asyncio.Queue()

        async def listen(connection: ServerConnection) -> None:
            await connection.wait_closed()
            gone.put_nowait(connection.close_code)

        async with way.serve(listen):
            for _ in range(10):
                client = await way.connect()
                client.transport.abort()
                assert await asyncio.wait_for(gone.get(), CAP_S) == 1006
                await client.wait_closed()

    run(main())


def test_too_large_a_message_closes_only_its_connection(run: Run, way: Way) -> None:
    async def main() -> None:
        async with way.serve(echo, max_size=1000), way.connect() as other:
            async with way.connect() as client:
                await client.send(BLOB[:1001])
                with pytest.raises(ConnectionClosedError) as caught:
                    await client.recv()
                assert caught.value.rcvd is not None
                assert caught.value.rcvd.code == 1009
            await other.send("fine")
            assert await other.recv() == "fine"

    run(main())


def test_a_handshake_is_refused(run: Run, way: Way) -> None:
    async def main() -> None:
        async def refuse(connection: ServerConnection, _request: Any) -> Any:
            return connection.respond(403, "not you\n")

        async with way.serve(echo, process_request=refuse):
            with pytest.raises(InvalidStatus) as caught:
                await way.connect()
            assert caught.value.response.status_code == 403

    run(main())


def test_a_client_without_a_loop(run: Run, way: Way) -> None:
    """websockets' blocking client runs in a thread and uses no loop."""

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def talk() -> list[Any]:
            tls = way.certificates.for_client() if way.scheme == "wss" else None
            url = "wss://localhost/" if tls else "ws://localhost/"
            with (
                way.blocking_socket() as sock,
                websockets.sync.client.connect(url, sock=sock, ssl=tls, max_size=None) as client,
            ):
                client.send(BLOB)
                assert client.recv() == BLOB
                for number in range(100):
                    client.send(str(number))
                return [client.recv() for _ in range(100)]

        async with way.serve(echo):
            assert await loop.run_in_executor(None, talk) == [str(number) for number in range(100)]

    run(main())
