"""Servers that answer late, and servers that misbehave, for the tests of blocking clients.

They run on asyncio's own loop, in a real thread of the test's process. A slow server delays one answer to each
client until a given number of clients wait at the same time. DELAY_S later, it answers all of them.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Self

from support import HOST

DELAY_S = 0.2

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
Serve = Callable[[Reader, Writer], Awaitable[None]]


class Crowd:
    """A barrier: when `size` waiters have arrived, it releases all of them DELAY_S later."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.most = 0  # the largest number that waited at once
        self._now = 0
        self._is_complete = asyncio.Event()

    async def wait(self) -> None:
        self._now += 1
        self.most = max(self.most, self._now)
        if self._now == self.size:
            self._is_complete.set()
        try:
            await self._is_complete.wait()
            await asyncio.sleep(DELAY_S)
        finally:
            self._now -= 1


class SlowServers:
    """`with` starts the thread; each method returns the port of a server."""

    def __init__(self, crowd_size: int) -> None:
        self._size = crowd_size
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.crowds: list[Crowd] = []  # one per slow server
        self.signed: list[bytes] = []  # the first line of each HTTP request that was signed for AWS

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_error: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        self._silent.close()

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []
        self._silent = socket.create_server((HOST, 0), backlog=100)
        self._ready.set()
        await self._stop.wait()
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def start(self, serve: Serve) -> int:
        """Start a server that runs this coroutine function for each connection."""
        return asyncio.run_coroutine_threadsafe(self._start(serve), self._loop).result(30)

    async def _start(self, serve: Serve) -> int:
        async def connected(reader: Reader, writer: Writer) -> None:
            task = asyncio.current_task()
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            try:
                await serve(reader, writer)
            except (ConnectionError, asyncio.IncompleteReadError):
                pass  # the client is gone
            finally:
                writer.close()

        server = await asyncio.start_server(connected, HOST, 0, backlog=1000)
        self._servers.append(server)
        port: int = server.sockets[0].getsockname()[1]
        return port

    # ---------------------------------------------------------------- trouble

    def resetting(self, greeting: bytes) -> int:
        """Start a server that resets each connection as soon as the client has sent something."""

        async def serve(reader: Reader, writer: Writer) -> None:
            writer.write(greeting)
            await reader.read(1)
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

        return self.start(serve)

    def silent(self) -> int:
        """Return the port of a listening socket. The kernel accepts connections, and nothing is ever sent."""
        port: int = self._silent.getsockname()[1]
        return port

    # ---------------------------------------------------------------- late answers

    def _crowd(self) -> Crowd:
        self.crowds.append(Crowd(self._size))
        return self.crowds[-1]

    def proxy(self, port: int) -> int:
        """Start a proxy for a server. On each connection, the first data from the server is delayed."""
        crowd = self._crowd()

        async def serve(reader: Reader, writer: Writer) -> None:
            far_reader, far_writer = await asyncio.open_connection(HOST, port)

            async def forward() -> None:
                while data := await reader.read(1 << 16):
                    far_writer.write(data)
                    await far_writer.drain()
                far_writer.write_eof()

            forwarding = asyncio.create_task(forward())
            try:
                is_first = True
                while data := await far_reader.read(1 << 16):
                    if is_first:
                        await crowd.wait()
                    is_first = False
                    writer.write(data)
                    await writer.drain()
            finally:
                forwarding.cancel()
                far_writer.close()

        return self.start(serve)

    def http(self) -> int:
        """Start a server that answers each request with its path."""
        crowd = self._crowd()

        async def serve(reader: Reader, writer: Writer) -> None:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if b"\r\nAuthorization: AWS4-HMAC-SHA256 Credential=" in head:
                    self.signed.append(head.split(b"\r\n")[0])
                path = head.split()[1]
                await crowd.wait()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(path), path))
                await writer.drain()

        return self.start(serve)

    def lines(self, greeting: bytes, answer: Callable[[bytes], bytes | None]) -> int:
        """Start a server of a line protocol. `answer` returns the reply to a line. A reply that ends with LATE is
        delayed.
        """
        crowd = self._crowd()

        async def serve(reader: Reader, writer: Writer) -> None:
            writer.write(greeting)
            while line := await reader.readline():
                reply = answer(line.rstrip(b"\r\n"))
                if reply is None:
                    continue
                if reply.endswith(LATE):
                    reply = reply.removesuffix(LATE)
                    await crowd.wait()
                writer.write(reply)
                await writer.drain()

        return self.start(serve)


LATE = b"\0"


# The answers of the line servers. Each client sends a number of its own, which the delayed answer repeats.


def smtp() -> tuple[bytes, Callable[[bytes], bytes | None]]:
    def answer(line: bytes) -> bytes | None:
        word = line[:4].upper()
        if word == b"MAIL":
            return b"250 ok\r\n"
        if word == b"VRFY":
            return b"252 %b\r\n" % line[5:] + LATE
        return {b"EHLO": b"250 here\r\n", b"QUIT": b"221 bye\r\n"}.get(word, b"500 what?\r\n")

    return b"220 here\r\n", answer


def pop3() -> tuple[bytes, Callable[[bytes], bytes | None]]:
    def answer(line: bytes) -> bytes | None:
        if line.startswith(b"TOP "):
            return b"+OK\r\nSubject: %b\r\n.\r\n" % line.split()[1] + LATE
        return b"+OK\r\n"

    return b"+OK here\r\n", answer


def imap() -> tuple[bytes, Callable[[bytes], bytes | None]]:
    def answer(line: bytes) -> bytes | None:
        tag, command, *rest = line.split()
        if command == b"CAPABILITY":
            return b"* CAPABILITY IMAP4REV1\r\n%b OK done\r\n" % tag
        if command == b"SELECT":
            return b"* %b EXISTS\r\n%b OK [READ-WRITE] done\r\n" % (rest[0], tag) + LATE
        if command == b"LOGOUT":
            return b"* BYE\r\n%b OK done\r\n" % tag
        return b"%b OK done\r\n" % tag

    return b"* OK here\r\n", answer


def ftp() -> tuple[bytes, Callable[[bytes], bytes | None]]:
    def answer(line: bytes) -> bytes | None:
        word, _, rest = line.partition(b" ")
        if word == b"SIZE":
            return b"213 %b\r\n" % rest + LATE
        replies = {
            b"USER": b"331 password\r\n",
            b"PASS": b"230 in\r\n",
            b"TYPE": b"200 ok\r\n",
            b"QUIT": b"221 bye\r\n",
        }
        return replies.get(word, b"500 what?\r\n")

    return b"220 here\r\n", answer


LINE_SERVERS: dict[str, Any] = {"smtp": smtp, "pop3": pop3, "imap": imap, "ftp": ftp}
