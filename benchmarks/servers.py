"""The servers that are put under load: `python -m benchmarks.servers <kind> --loop <loop>`.

A server prints `{"address": ...}` when it listens (`127.0.0.1:port`, `unix:/path`), or `{"unsupported": why}` if the
loop lacks the feature. It ends when stdin is closed. The runner reads CPU time, memory and descriptors from outside.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import ssl
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

from benchmarks._loops import loop_factory
from benchmarks._machine import raise_descriptor_limit

BACKLOG = 4096
# The reply in 4 writes: what a small HTTP-like server does (status line, headers, body, end).
SPLIT_REQUEST_LEN = 64
SPLIT_REPLY_PARTS = (32, 160, 768, 64)
SPLIT_REPLY_LEN = sum(SPLIT_REPLY_PARTS)


class Options(argparse.Namespace):
    """The command line; filled by main."""

    kind: str
    loop: str
    certificate: Path
    read_len: int


options = Options()


def pattern(length: int) -> bytes:
    """The fixed reply, as the load generator expects it."""
    return bytes((i * 31 + i // 251 + 7) & 0xFF for i in range(length))


class EchoProtocol(asyncio.Protocol):
    """Send each piece back."""

    __slots__ = ("transport",)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


class BufferedEchoProtocol(asyncio.BufferedProtocol):
    """The same with its own buffer; it writes a copy, since the buffer is filled again."""

    __slots__ = ("buffer", "transport")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.buffer = memoryview(bytearray(256 * 1024))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.transport.write(bytes(self.buffer[:nbytes]))


class SplitReplyProtocol(asyncio.Protocol):
    """A fixed reply in 4 writes to each request of a fixed length."""

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


class DatagramEchoProtocol(asyncio.DatagramProtocol):
    """Send each datagram back to its sender."""

    __slots__ = ("transport",)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, address: object) -> None:
        self.transport.sendto(data, cast("tuple[str, int]", address))


def listen() -> socket.socket:
    # The protocol is named because asyncio sets TCP_NODELAY only where it is: without that, a reply in several writes
    # waits 40 ms for the client's delayed ACK.
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    sock.listen(BACKLOG)
    sock.setblocking(False)
    return sock


def say(**ready: str) -> None:
    print(json.dumps(ready), flush=True)


def address_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()
    return f"{host}:{port}"


async def serve_protocol(
    factory: Callable[[], asyncio.BaseProtocol], stop: asyncio.Future[None], context: ssl.SSLContext | None = None
) -> None:
    sock = listen()
    address = address_of(sock)  # before a loop that takes the descriptor over
    server = await asyncio.get_running_loop().create_server(factory, sock=sock, backlog=BACKLOG, ssl=context)
    say(address=address)
    await stop
    # No wait_closed: from 3.12 on it waits for clients, which may well be there.
    server.close()


async def serve_echo(stop: asyncio.Future[None]) -> None:
    await serve_protocol(EchoProtocol, stop)


async def serve_buffered(stop: asyncio.Future[None]) -> None:
    await serve_protocol(BufferedEchoProtocol, stop)


async def serve_split(stop: asyncio.Future[None]) -> None:
    whole, at, parts = pattern(SPLIT_REPLY_LEN), 0, []
    for length in SPLIT_REPLY_PARTS:
        parts.append(whole[at : at + length])
        at += length
    SplitReplyProtocol.parts = tuple(parts)
    await serve_protocol(SplitReplyProtocol, stop)


def server_context() -> ssl.SSLContext:
    """TLS 1.3; everything else is Python's default."""
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
    """One task per connection, with the loop's calls for plain sockets."""
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


async def serve_streams(stop: asyncio.Future[None]) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(options.read_len):
            writer.write(data)
            await writer.drain()
        writer.close()

    sock = listen()
    address = address_of(sock)
    server = await asyncio.start_server(echo, sock=sock, backlog=BACKLOG)
    say(address=address)
    await stop
    server.close()


async def serve_aiohttp(stop: asyncio.Future[None]) -> None:
    """An aiohttp application: `/` says hello, `/users/{user_id}` answers with JSON."""
    from aiohttp import web

    async def hello(request: web.Request) -> web.Response:
        return web.Response(text="Hello, world!")

    async def user(request: web.Request) -> web.Response:
        user_id = int(request.match_info["user_id"])
        return web.json_response({"id": user_id, "name": f"user {user_id}", "tags": ["reader", "writer"]})

    app = web.Application()
    app.add_routes([web.get("/", hello), web.get("/users/{user_id}", user)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    sock = listen()
    await web.SockSite(runner, sock, backlog=BACKLOG).start()
    say(address=address_of(sock))
    await stop
    await runner.cleanup()


async def serve_uvicorn(stop: asyncio.Future[None]) -> None:
    """A bare ASGI application under uvicorn with httptools, which must really be in use."""
    import uvicorn
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    headers = [(b"content-type", b"text/plain"), (b"content-length", b"13")]

    async def hello(scope: object, receive: object, send: Callable[[dict[str, object]], Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"Hello, world!"})

    config = uvicorn.Config(hello, http="httptools", lifespan="off", access_log=False, log_level="warning")
    config.load()
    if config.http_protocol_class is not HttpToolsProtocol:
        raise SystemExit(f"uvicorn uses {config.http_protocol_class}, not httptools")
    server = uvicorn.Server(config)
    sock = listen()
    serving = asyncio.ensure_future(server.serve(sockets=[sock]))
    say(address=address_of(sock))
    await asyncio.wait((serving, stop), return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    await serving


KINDS: dict[str, Callable[[asyncio.Future[None]], Awaitable[None]]] = {
    "echo": serve_echo,
    "buffered": serve_buffered,
    "split": serve_split,
    "tls": serve_tls,
    "udp": serve_udp,
    "unix": serve_unix,
    "sock": serve_sock,
    "streams": serve_streams,
    "aiohttp": serve_aiohttp,
    "uvicorn": serve_uvicorn,
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
    parser.parse_args(namespace=options)
    if options.kind == "tls" and options.certificate is None:
        parser.error("tls needs --certificate; `loadgen certificate FOLDER` makes one")
    raise_descriptor_limit()
    with asyncio.Runner(loop_factory=loop_factory(options.loop)) as runner:
        runner.run(serve(options.kind))


if __name__ == "__main__":
    main()
