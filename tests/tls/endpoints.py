"""Connections of the TLS tests: a transport of the loop on one side, a hand-driven TLS peer on the other."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Any

from support import HOST, Peer, Recorder, listening, raw_pair
from tls.contexts import HOSTNAME, TlsPeer, client_context, server_context

SIDES = ("client", "server")


async def connected(
    loop: asyncio.AbstractEventLoop,
    factory: Callable[[], Any] = Recorder,
    side: str = "client",
    *,
    ours: ssl.SSLContext | None = None,
    theirs: ssl.SSLContext | None = None,
    small: bool = False,
    **options: Any,
) -> tuple[Any, Any, TlsPeer]:
    """Return (transport, protocol, peer) after the handshake. The loop is on `side` of the connection."""
    connecting, peer = begin(loop, factory, side, ours=ours, theirs=theirs, small=small, **options)
    try:
        handshake = asyncio.ensure_future(peer.handshake())
        try:
            transport, _ = await connecting
            protocol = transport.get_protocol()  # uvloop's connect_accepted_socket returns a protocol of its own
        finally:
            await asyncio.wait([handshake])
        handshake.result()
    except BaseException:
        peer.close()
        raise
    return transport, protocol, peer


def begin(
    loop: asyncio.AbstractEventLoop,
    factory: Callable[[], Any] = Recorder,
    side: str = "client",
    *,
    ours: ssl.SSLContext | None = None,
    theirs: ssl.SSLContext | None = None,
    small: bool = False,
    **options: Any,
) -> tuple[asyncio.Future[Any], TlsPeer]:
    """Return the task that makes the loop's transport, and a peer that has not begun its handshake."""
    sock, other = raw_pair(small)
    sock.setblocking(False)
    if side == "client":
        options.setdefault("server_hostname", HOSTNAME)
        connecting = loop.create_connection(factory, sock=sock, ssl=ours or client_context(), **options)
        peer = TlsPeer(Peer(other), theirs or server_context(), server_side=True)
    else:
        connecting = loop.connect_accepted_socket(factory, sock, ssl=ours or server_context(), **options)
        peer = TlsPeer(Peer(other), theirs or client_context())
    return asyncio.ensure_future(connecting), peer


async def client_of(server: Any, context: ssl.SSLContext | None = None, **options: Any) -> TlsPeer:
    """Return a hand-driven TLS client of a server of the loop, after its handshake."""
    sock = socket.create_connection(server.sockets[0].getsockname())
    peer = TlsPeer(Peer(sock), context or client_context(), **options)
    try:
        return await peer.handshake()
    except BaseException:
        peer.close()
        raise


class Carrier:
    """Takes the place of the raw peer of a TlsPeer, and sends through another TlsPeer: two layers of TLS."""

    def __init__(self, outer: TlsPeer) -> None:
        self.outer = outer

    async def send(self, data: bytes) -> None:
        await self.outer.write(data)

    async def recv(self, limit: int = 65536) -> bytes:
        return await self.outer.read(limit)

    def close(self) -> None:
        self.outer.close()


def peer_of(raw: Any, side: str) -> TlsPeer:
    """Return the TLS peer of a loop that is on `side` of the connection. `raw` is a raw peer or a Carrier."""
    if side == "server":
        return TlsPeer(raw, client_context())
    return TlsPeer(raw, server_context(), server_side=True)


def plain_listener() -> socket.socket:
    return listening(socket.AF_INET, HOST)
