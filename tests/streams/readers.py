"""A StreamReader on one end of a socket pair, a plain socket on the other end, and a record of the Python calls."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from typing import Any

from support import Peer, iterations


class PlainReader(asyncio.StreamReader):
    """A subclass that changes nothing.

    Because it is a subclass, grapeshot's loop does not feed it natively. On every loop, asyncio's Python code feeds it.
    """


class Stream:
    """One connection of a test."""

    def __init__(self, reader: asyncio.StreamReader, protocol: Any, transport: Any, peer: Peer) -> None:
        self.reader: Any = reader
        self.protocol = protocol
        self.transport = transport
        self.peer = peer

    async def send(self, data: bytes) -> None:
        """Send data, then run a few iterations of the loop, so that the data can reach the reader."""
        await self.peer.send(data)
        await iterations(3)

    def close(self) -> None:
        self.transport.abort()
        self.peer.close()


opened: list[Stream] = []
# The module whose classes a test uses by default: asyncio or grapeshot.streams.
usual: Any = asyncio


async def open_stream(
    loop: asyncio.AbstractEventLoop,
    limit: int = 2**16,
    reader_type: type[asyncio.StreamReader] | None = None,
    protocol_type: type[asyncio.StreamReaderProtocol] | None = None,
    prepare: Callable[[Any, Any], None] = lambda reader, protocol: None,
) -> Stream:
    """Connect. `prepare` is called with the reader and the protocol before the transport is made."""
    reader = (reader_type or usual.StreamReader)(limit=limit, loop=loop)
    protocol = (protocol_type or usual.StreamReaderProtocol)(reader, loop=loop)
    prepare(reader, protocol)
    ours, other = socket.socketpair()
    for sock in (ours, other):
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    transport, _ = await loop.connect_accepted_socket(lambda: protocol, ours)
    opened.append(Stream(reader, protocol, transport, Peer(other)))
    return opened[-1]


class PythonCalls:
    """Records the calls to the Python functions with which asyncio feeds a reader."""

    NAMES = ("data_received", "feed_data", "_wakeup_waiter")

    def __init__(self) -> None:
        self.names: list[str] = []

    def __enter__(self) -> PythonCalls:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_exc: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: Any, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code.co_name in self.NAMES:
            self.names.append(frame.f_code.co_name)
