"""Transports on socket pairs. Data arrives at the other end as soon as it is sent."""

from __future__ import annotations

import socket

from support import Peer, Recorder, until


async def unix_pair(loop, factory=Recorder):
    """Return a transport on one end of a socket pair, its protocol, and a `Peer` on the other end."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    transport, protocol = await loop.connect_accepted_socket(factory, ours)
    return transport, protocol, Peer(theirs)


def arrived(peer: Peer) -> bytes:
    """Return the data that has arrived since the last call."""
    try:
        return peer.sock.recv(1 << 20)
    except BlockingIOError:
        return b""


async def finish(transport, protocol):
    transport.abort()
    await until(lambda: protocol.is_lost, "connection_lost")
