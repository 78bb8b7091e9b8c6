"""HTTP/1.1 clients that do not use the loop under test: one on a blocking socket, one on asyncio's streams."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Coroutine
from typing import Any, BinaryIO, TypeVar

TIMEOUT_S = 30.0
HOST = "127.0.0.1"
Result = TypeVar("Result")


def head(method: str, path: str, *fields: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: test", *fields, "", ""]).encode()


def chunk(data: bytes) -> bytes:
    """Return one chunk of the chunked transfer coding. Empty data gives the last chunk."""
    return b"%x\r\n%s\r\n" % (len(data), data)


@dataclasses.dataclass
class Reply:
    status: int
    fields: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


def parse_head(lines: list[bytes]) -> tuple[int, dict[str, str]]:
    status = int(lines[0].split()[1])
    fields = (line.decode().partition(":") for line in lines[1:])
    return status, {name.lower(): value.strip() for name, _, value in fields}


class Wire:
    """A client on a blocking socket, with TLS if a context is given."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self.sock = socket.create_connection((HOST, port), TIMEOUT_S)
        if tls is not None:
            self.sock = tls.wrap_socket(self.sock, server_hostname=HOST)
        self.file: BinaryIO = self.sock.makefile("rb")

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        self.file.close()
        self.sock.close()

    def reset(self) -> None:
        """Close the connection with RST instead of FIN."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def get(self, path: str, *fields: str) -> Reply:
        self.send(head("GET", path, *fields))
        return self.reply()

    def reply(self) -> Reply:
        status, fields = self.reply_head()
        if fields.get("transfer-encoding") == "chunked":
            body = bytearray()
            while length := int(self.line(), 16):
                body += self.exactly(length)
                assert self.line() == b""
            assert self.line() == b""
        else:
            body = bytearray(self.exactly(int(fields["content-length"])))
        return Reply(status, fields, bytes(body))

    def reply_head(self) -> tuple[int, dict[str, str]]:
        lines = [self.line()]
        while line := self.line():
            lines.append(line)
        return parse_head(lines)

    def line(self) -> bytes:
        line = self.file.readline()
        assert line.endswith(b"\r\n"), f"the server closed in the middle: {line!r}"
        return line[:-2]

    def line_lf(self) -> bytes:
        """Return the next line without its end. This is for protocols whose lines end with LF alone."""
        return self.file.readline().rstrip(b"\n")

    def exactly(self, length: int) -> bytes:
        data = self.file.read(length)
        assert len(data) == length, f"the server closed after {len(data)} of {length} bytes"
        return data

    def is_at_end(self) -> bool:
        """Wait for data or the end of the stream; return whether the server has closed."""
        return self.file.read(1) == b""


class Stream:
    """A client on asyncio's streams."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, port: int, tls: ssl.SSLContext | None = None) -> Stream:
        return cls(*await asyncio.open_connection(HOST, port, ssl=tls, limit=2**20))

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()

    async def get(self, path: str) -> Reply:
        self.writer.write(head("GET", path))
        return await self.reply()

    async def reply(self) -> Reply:
        lines = (await self.reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
        status, fields = parse_head(lines)
        return Reply(status, fields, b"".join([piece async for piece in self._body(fields)]))

    async def _body(self, fields: dict[str, str]) -> AsyncIterator[bytes]:
        if fields.get("transfer-encoding") != "chunked":
            yield await self.reader.readexactly(int(fields["content-length"]))
            return
        while length := int(await self.reader.readuntil(b"\r\n"), 16):
            yield await self.reader.readexactly(length)
            assert await self.reader.readexactly(2) == b"\r\n"
        assert await self.reader.readexactly(2) == b"\r\n"


def on_asyncio(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a client's coroutine on asyncio's own loop, no matter which loop is installed."""

    async def capped() -> Result:
        return await asyncio.wait_for(coroutine, 2 * TIMEOUT_S)

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        return runner.run(capped())
