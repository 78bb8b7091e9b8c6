"""The servers that are put under load: `python -m benchmarks.servers <kind> --loop <loop>`.

When a server listens, it prints `{"address": ...}`, where the address is `127.0.0.1:port` or `unix:/path`. If the loop
lacks the feature, the server prints `{"unsupported": why}`. It ends when its stdin is closed. The benchmark reads this
process's CPU time, memory and descriptors from the outside.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import socket
import ssl
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar, cast

from benchmarks import applications
from benchmarks._loops import loop_factory
from benchmarks._machine import raise_descriptor_limit
from benchmarks._serving import BACKLOG, address_of, listen, options, say

# The length of a request, and the lengths of the 4 writes of a reply. A small HTTP server writes in the same way:
# status line, headers, body, end.
SPLIT_REQUEST_LEN = 64
SPLIT_REPLY_PARTS = (32, 160, 768, 64)
SPLIT_REPLY_LEN = sum(SPLIT_REPLY_PARTS)


def pattern(length: int) -> bytes:
    """Return the fixed reply that the load generator expects."""
    return bytes((i * 31 + i // 251 + 7) & 0xFF for i in range(length))


class EchoProtocol(asyncio.Protocol):
    """Send each piece back."""

    __slots__ = ("transport",)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


class BufferedEchoProtocol(asyncio.BufferedProtocol):
    """Send back a copy of each piece, because the next read overwrites the protocol's own buffer."""

    __slots__ = ("buffer", "transport")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.buffer = memoryview(bytearray(256 * 1024))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.transport.write(bytes(self.buffer[:nbytes]))


class SplitReplyProtocol(asyncio.Protocol):
    """Send a fixed reply in 4 writes for each request of a fixed length."""

    __slots__ = ("pending", "transport")

    parts: tuple[bytes, ...] = ()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.pending = 0

    def data_received(self, data: bytes) -> None:
        requests, self.pending = divmod(self.pending + len(data), SPLIT_REQUEST_LEN)
        for _ in range(requests):
            for part in self.parts:
                self.transport.write(part)


class TaskReplyProtocol(SplitReplyProtocol):
    """Like SplitReplyProtocol, but each read starts a task that writes the replies, as in an HTTP server."""

    __slots__ = ()

    tasks: ClassVar[set[asyncio.Task[None]]] = set()

    def data_received(self, data: bytes) -> None:
        task = asyncio.get_running_loop().create_task(self.reply(data))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def reply(self, data: bytes) -> None:
        super().data_received(data)


class DatagramEchoProtocol(asyncio.DatagramProtocol):
    """Send each datagram back to its sender."""

    __slots__ = ("transport",)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, address: object) -> None:
        self.transport.sendto(data, cast("tuple[str, int]", address))


async def serve_protocol(
    factory: Callable[[], asyncio.BaseProtocol], stop: asyncio.Future[None], context: ssl.SSLContext | None = None
) -> None:
    sock = listen()
    address = address_of(sock)  # some loops take over the descriptor, so read the address first
    server = await asyncio.get_running_loop().create_server(factory, sock=sock, backlog=BACKLOG, ssl=context)
    say(address=address)
    await stop
    # Do not call wait_closed(): from Python 3.12 on it waits for clients, and some may still be connected.
    server.close()


async def serve_echo(stop: asyncio.Future[None]) -> None:
    await serve_protocol(EchoProtocol, stop)


async def serve_buffered(stop: asyncio.Future[None]) -> None:
    await serve_protocol(BufferedEchoProtocol, stop)


async def serve_split(stop: asyncio.Future[None], factory: type[SplitReplyProtocol] = SplitReplyProtocol) -> None:
    whole, at, parts = pattern(SPLIT_REPLY_LEN), 0, []
    for length in SPLIT_REPLY_PARTS:
        parts.append(whole[at : at + length])
        at += length
    factory.parts = tuple(parts)
    await serve_protocol(factory, stop)


async def serve_split_task(stop: asyncio.Future[None]) -> None:
    await serve_split(stop, TaskReplyProtocol)


def server_context() -> ssl.SSLContext:
    """Return a context for TLS 1.3; everything else is Python's default."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(options.certificate / "cert.pem", options.certificate / "key.pem")
    return context


async def serve_tls(stop: asyncio.Future[None]) -> None:
    await serve_protocol(EchoProtocol, stop, server_context())


async def serve_unix(stop: asyncio.Future[None]) -> None:
    with tempfile.TemporaryDirectory(prefix="grapeshot-") as folder:
        path = f"{folder}/echo.sock"
        server = await asyncio.get_running_loop().create_unix_server(EchoProtocol, path, backlog=BACKLOG)
        say(address=f"unix:{path}")
        await stop
        server.close()


async def serve_udp(stop: asyncio.Future[None]) -> None:
    address = ("127.0.0.1", 0)
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(DatagramEchoProtocol, local_addr=address)
    say(address=address_of(transport.get_extra_info("socket")))
    await stop
    transport.close()


async def serve_sock(stop: asyncio.Future[None]) -> None:
    """One task per connection, with the loop's sock_* methods."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    async def echo(connection: socket.socket) -> None:
        with connection:
            while data := await loop.sock_recv(connection, options.read_len):
                await loop.sock_sendall(connection, data)

    async def accept(sock: socket.socket) -> None:
        while True:
            connection, _ = await loop.sock_accept(sock)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = asyncio.create_task(echo(connection))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    sock = listen()
    accepting = asyncio.create_task(accept(sock))
    await asyncio.sleep(0)
    if not accepting.done():
        say(address=address_of(sock))
        await asyncio.wait((accepting, stop), return_when=asyncio.FIRST_COMPLETED)
    if accepting.done():
        await accepting
    accepting.cancel()


async def serve_streams(stop: asyncio.Future[None], start_server: Callable[..., Any] = asyncio.start_server) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(options.read_len):
            writer.write(data)
            await writer.drain()
        writer.close()

    sock = listen()
    address = address_of(sock)
    server = await start_server(echo, sock=sock, backlog=BACKLOG)
    say(address=address)
    await stop
    server.close()


async def serve_native_streams(stop: asyncio.Future[None]) -> None:
    """grapeshot's own streams on grapeshot, asyncio's streams on other loops."""
    module = type(asyncio.get_running_loop()).__module__
    if module.partition(".")[0] == "grapeshot":
        await serve_streams(stop, importlib.import_module("grapeshot.streams").start_server)
    else:
        await serve_streams(stop)


KINDS: dict[str, Callable[[asyncio.Future[None]], Awaitable[None]]] = {
    "echo": serve_echo,
    "buffered": serve_buffered,
    "split": serve_split,
    "split-task": serve_split_task,
    "tls": serve_tls,
    "udp": serve_udp,
    "unix": serve_unix,
    "sock": serve_sock,
    "streams": serve_streams,
    "native-streams": serve_native_streams,
    **applications.KINDS,
}


async def serve(kind: str) -> None:
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[None] = loop.create_future()

    def stdin_is_readable() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            stop.set_result(None)

    loop.add_reader(0, stdin_is_readable)
    try:
        await KINDS[kind](stop)
    except NotImplementedError as error:
        say(unsupported=f"{type(error).__name__}: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--loop", required=True, help="grapeshot, uvloop, asyncio or module:factory")
    parser.add_argument("--certificate", type=Path, help="folder with cert.pem and key.pem, for tls")
    parser.add_argument(
        "--read-len", type=int, default=65536, help="bytes that sock and streams ask for at once (65536)"
    )
    parser.add_argument(
        "--body-len", type=int, default=len(applications.HELLO), help="bytes of an HTTP body (%(default)s)"
    )
    parser.parse_args(namespace=options)
    if options.kind == "tls" and options.certificate is None:
        parser.error("tls needs --certificate; `loadgen certificate FOLDER` makes one")
    raise_descriptor_limit()
    with asyncio.Runner(loop_factory=loop_factory(options.loop)) as runner:
        runner.run(serve(options.kind))


if __name__ == "__main__":
    main()
