"""Helpers of the datagram tests: a recording protocol, raw sockets, free addresses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from typing import Any

from support import HOST, iterations, until

ANY = (HOST, 0)

opened: list[Any] = []
"""The transports that the running test has made with `endpoint()`."""


class Datagrams(asyncio.DatagramProtocol):
    """Records its callbacks in order, and the datagrams that it received."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.events: list[str] = []
        self.received: list[tuple[bytes, Any]] = []
        self.errors: list[OSError] = []
        self.lost_with: list[BaseException | None] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.events.append("made")

    def datagram_received(self, data: bytes, addr: Any) -> None:
        assert type(data) is bytes
        self.received.append((data, addr))

    def error_received(self, exc: Exception) -> None:
        assert isinstance(exc, OSError)
        self.errors.append(exc)

    def pause_writing(self) -> None:
        self.events.append("pause")

    def resume_writing(self) -> None:
        self.events.append("resume")

    def connection_lost(self, exc: BaseException | None) -> None:
        self.events.append("lost")
        self.lost_with.append(exc)
        self.transport = None

    @property
    def data(self) -> list[bytes]:
        return [data for data, _ in self.received]

    @property
    def is_lost(self) -> bool:
        return bool(self.lost_with)


class EchoDatagrams(Datagrams):
    """Sends every datagram back."""

    def datagram_received(self, data: bytes, addr: Any) -> None:
        super().datagram_received(data, addr)
        self.transport.sendto(data, addr)


async def endpoint(
    loop: asyncio.AbstractEventLoop, factory: Any = Datagrams, /, **arguments: Any
) -> tuple[Any, Any, Any]:
    """Return the transport, the protocol and the address of a new endpoint, bound to a free port by default."""
    transport, protocol = await loop.create_datagram_endpoint(factory, **(arguments or {"local_addr": ANY}))
    opened.append(transport)
    return transport, protocol, transport.get_extra_info("sockname")


async def finish(*protocols: Datagrams) -> None:
    """Close the transports; return when their sockets are closed."""
    for protocol in protocols:
        if protocol.transport is not None:
            protocol.transport.close()
    await until(lambda: all(protocol.is_lost for protocol in protocols), "connection_lost")
    await iterations(2)


@contextlib.contextmanager
def raw_socket(family: int = socket.AF_INET, address: Any = ANY) -> Iterator[socket.socket]:
    """A non-blocking datagram socket that the loop does not drive. It is bound unless `address` is None."""
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        if address is not None:
            sock.bind(address)
        yield sock


async def received_by(sock: socket.socket, count: int = 1) -> list[bytes]:
    """Return the next datagrams of a raw socket."""
    found: list[bytes] = []

    def take() -> bool:
        with contextlib.suppress(BlockingIOError):
            while len(found) < count:
                found.append(sock.recv(1 << 18))
        return len(found) == count

    await until(take, f"{count} datagrams")
    return found


def unused_address() -> Any:
    """Return an address without a listener: a port that was free a moment ago."""
    with raw_socket() as sock:
        return sock.getsockname()


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Yield the messages that reach asyncio's logger."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("asyncio")
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.propagate = False  # pytest keeps the root logger's records, which would keep the transports alive
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = True
