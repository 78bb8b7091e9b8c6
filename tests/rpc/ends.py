"""A server and its clients in one loop, the methods that the tests call, and a raw client that can send anything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from support import HOST, until

from grapeshot import rpc


class Methods:
    """The methods that the tests call. Some record that they have begun, ended or been cancelled."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.ended: list[Any] = []
        self.cancelled: list[Any] = []
        self.released = asyncio.Event()

    def register(self, server: rpc.Server) -> None:
        for name in ("add", "later", "fail", "hold", "hold_stream", "numbers", "endless", "blob"):
            server.add(name, getattr(self, name))

    def add(self, a: Any, b: Any = 1) -> Any:
        return a + b

    async def later(self, value: Any, iterations: int = 0) -> Any:
        for _ in range(iterations):
            await asyncio.sleep(0)
        return value

    async def fail(self, message: str) -> None:
        raise ValueError(message)

    async def hold(self, name: Any = None, content: bytes = b"") -> Any:
        """Runs until `released` is set, or until it is cancelled."""
        self.begun.append(name)
        try:
            await self.released.wait()
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        finally:
            self.ended.append(name)
        return name

    async def hold_stream(self, name: Any, content: bytes) -> AsyncIterator[Any]:
        yield await self.hold(name)

    async def numbers(self, count: int) -> AsyncIterator[int]:
        for number in range(count):
            yield number

    async def endless(self, size: int = 10) -> AsyncIterator[bytes]:
        self.begun.append("endless")
        number = 0
        try:
            while True:
                number += 1
                self.begun[-1] = number
                yield bytes(size)
        finally:
            self.ended.append("endless")

    def blob(self, size: int) -> bytes:
        return bytes(size)


class Ends:
    def __init__(self, server: rpc.Server, methods: Methods, options: dict[str, Any]) -> None:
        self.server, self.methods = server, methods
        self._options = options
        self.clients: list[rpc.Client] = []

    @property
    def port(self) -> int:
        return self.server.addresses[0][1]

    def client(self, **options: Any) -> rpc.Client:
        """Return another client. It connects with its first call."""
        client = rpc.Client(HOST, self.port, **self._options | options)
        self.clients.append(client)
        return client

    async def idle(self) -> None:
        """Wait until the server has no call under way."""
        await until(lambda: self.server.calls == 0, "the calls to end")


@contextlib.asynccontextmanager
async def ends(client_options: dict[str, Any] | None = None, **server_options: Any) -> AsyncIterator[Ends]:
    """Run a server on TCP. At the end, the server and the clients are closed."""
    server = rpc.Server(**server_options)
    methods = Methods()
    methods.register(server)
    await server.listen(HOST, 0)
    both = Ends(server, methods, client_options or {})
    try:
        yield both
    finally:
        for client in both.clients:
            await client.close()
        await server.close(5)


HELLO = {"grapeshot.rpc": 2, "codec": "msgpack", "max_packet": 1 << 20, "max_calls": 0, "max_call_bytes": 0}
SERVER_HELLO = {**HELLO, "max_calls": 1000, "max_call_bytes": 1 << 20}


def framed(packet: bytes) -> bytes:
    return struct.pack(">I", len(packet)) + packet


def framed_messages(*messages: Any) -> bytes:
    return b"".join(framed(msgspec.msgpack.encode(message)) for message in messages)


FRAMED_HELLO = framed(json.dumps(HELLO).encode())
FRAMED_SERVER_HELLO = framed(json.dumps(SERVER_HELLO).encode())


class RawClient:
    """A client on asyncio's streams that checks nothing, so that a test can send malformed packets."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, packet: bytes, length: int | None = None) -> None:
        self.writer.write(struct.pack(">I", len(packet) if length is None else length) + packet)

    def send_message(self, *message: Any) -> None:
        self.send(msgspec.msgpack.encode(message))

    def say_hello(self, **changes: Any) -> None:
        self.send(json.dumps(HELLO | changes).encode())

    async def packet(self) -> bytes:
        (length,) = struct.unpack(">I", await self.reader.readexactly(4))
        return await self.reader.readexactly(length)

    async def message(self) -> Any:
        return msgspec.msgpack.decode(await self.packet())

    async def rest(self) -> bytes:
        """Return everything that arrives until the server closes the connection."""
        try:
            return await self.reader.read()
        except ConnectionError:
            return b""


@contextlib.asynccontextmanager
async def raw_client(port: int) -> AsyncIterator[RawClient]:
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
