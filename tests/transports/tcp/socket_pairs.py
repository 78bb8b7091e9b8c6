"""Transports whose other end is a raw socket, at which data arrives as soon as it is sent."""

from __future__ import annotations

import socket

from support import Peer, Recorder, until


async def unix_pair(loop, factory=Recorder):
    """Return a transport, its protocol and the raw other end of a socket pair, at which data arrives as soon as it is
    sent.
    """
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    transport, protocol = await loop.connect_accepted_socket(factory, ours)
    return transport, protocol, Peer(theirs)


def arrived(peer: Peer) -> bytes:
    """Return what has arrived so far."""
    try:
        return peer.sock.recv(1 << 20)
    except BlockingIOError:
        return b""


async def finish(transport, protocol):
    transport.abort()
    await until(lambda: protocol.is_lost, "connection_lost")
