"""A server with constant replies, for measurements of clients: `python -m benchmarks.blocking.canned PROTOCOL`.

It looks at no more of a request than it needs to choose the reply. It prints `{"port": ...}` when it listens, and ends
when its stdin is closed.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import sys
from typing import Any

HTTP_REPLY = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 5\r\n\r\nhello"
OK, END = b"\x00\x00\x00\x02\x00\x00\x00", b"\xfe\x00\x00\x02\x00"
# HandshakeV10 of MariaDB's protocol: 20 bytes of scramble, mysql_native_password.
GREETING = (
    b"\x0a5.5.5-canned\x00"
    + struct.pack("<I", 1)
    + b"scramble\x00"
    + struct.pack("<HBHHB", 0xF7FF, 45, 2, 0x0008, 21)
    + bytes(10)
    + b"another-part\x00"
    + b"mysql_native_password\x00"
)
# A column "hello" of type VARCHAR.
COLUMN = b"\x03def\x00\x00\x00\x05hello\x00" + struct.pack("<BHIBHBH", 12, 45, 20, 0xFD, 0, 0, 0)


def packets(first: int, *payloads: bytes) -> bytes:
    """Packets of MariaDB's protocol with consecutive numbers."""
    return b"".join(
        struct.pack("<I", len(payload))[:3] + bytes([number]) + payload
        for number, payload in enumerate(payloads, first)
    )


QUERY_REPLY = packets(1, b"\x01", COLUMN, END, b"\x05hello", END)


class Http(asyncio.Protocol):
    """Answers requests that have no body."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(HTTP_REPLY * data.count(b"\r\n\r\n"))


class Redis(Http):
    """Answers commands sent as arrays of strings; expects each command in one piece."""

    def data_received(self, data: bytes) -> None:
        for command in data.split(b"*")[1:]:
            name = command.split(b"\r\n")[2].upper()
            self.transport.write(b"$5\r\nhello\r\n" if name == b"GET" else b"+OK\r\n")


class MariaDB(Http):
    """Answers commands of one packet."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.is_logged_in = False
        transport.write(packets(0, GREETING))

    def data_received(self, data: bytes) -> None:
        if not self.is_logged_in:
            self.is_logged_in = True
            self.transport.write(packets(2, OK))
        elif data[4:].startswith(b"\x03SELECT"):
            self.transport.write(QUERY_REPLY)
        else:
            self.transport.write(packets(1, OK))


PROTOCOLS: dict[str, type[Http]] = {"requests": Http, "redis": Redis, "pymysql": MariaDB}


async def serve(protocol: type[Http]) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(protocol, "127.0.0.1", 0)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(serve(PROTOCOLS[sys.argv[1]]))
