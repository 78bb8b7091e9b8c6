"""Datagram sockets that are closed while a transport uses them. If another file then gets the number of the descriptor,
nothing is sent to that file.
"""

from __future__ import annotations

import socket
import sys

import pytest
from support import HOST, ForeignSocket, is_closed_error, iterations, until
from transports.udp.endpoints import Datagrams, endpoint, finish, raw_socket

pytestmark = pytest.mark.skip_on(uvloop="sends to whichever file has the number")


def socket_of(transport) -> socket.socket:
    return transport.get_extra_info("socket")._sock


@pytest.mark.parametrize("is_connected", [False, True])
async def test_sending_after_the_socket_was_closed(loop, is_connected):
    """The protocol gets an error for each sendto(). The errors do not close the endpoint."""
    with raw_socket() as peer:
        address = peer.getsockname()
        options = {"remote_addr": address} if is_connected else {"local_addr": (HOST, 0)}
        transport, protocol, _ = await endpoint(loop, **options)
        sock = socket_of(transport)
        fd = sock.fileno()
        sock.close()
        with ForeignSocket(fd, socket.SOCK_DGRAM) as foreign:
            for count in (1, 2):
                transport.sendto(b"lost", None if is_connected else address)
                assert len(protocol.errors) == count
                assert is_closed_error(protocol.errors[-1])
            foreign.theirs.send(b"for the foreign socket")
            await iterations(3)
            assert foreign.ours.recv(100) == b"for the foreign socket"
            assert protocol.received == []
            await finish(protocol)


@pytest.mark.skip_on(asyncio="the loop spins")
async def test_an_event_of_a_duplicate(loop):
    transport, protocol, address = await endpoint(loop)
    sock = socket_of(transport)
    fd = sock.fileno()
    with sock.dup() as duplicate, raw_socket() as peer:
        sock.close()
        with ForeignSocket(fd, socket.SOCK_DGRAM) as foreign:
            foreign.theirs.send(b"not for the protocol")
            peer.sendto(b"nobody reads this", address)
            await until(lambda: protocol.errors)
            await iterations(100)
            assert len(protocol.errors) == 1
            assert is_closed_error(protocol.errors[0])
            assert protocol.received == []
            transport.pause_reading()
            transport.resume_reading()
            assert foreign.ours.recv(100) == b"not for the protocol"
            await finish(protocol)
        assert duplicate.recv(100) == b"nobody reads this"


@pytest.mark.skip_on(asyncio="RuntimeError: the number is used by the old transport")
async def test_a_new_endpoint_with_the_same_number(loop):
    old, old_protocol, _ = await endpoint(loop)
    sock = socket_of(old)
    fd = sock.fileno()
    sock.close()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    if theirs.fileno() == fd:
        ours, theirs = theirs, ours
    assert ours.fileno() == fd
    new, new_protocol = await loop.create_datagram_endpoint(Datagrams, sock=ours)
    with theirs:
        theirs.send(b"one")
        await until(lambda: new_protocol.data == [b"one"])
        await until(lambda: old_protocol.is_lost)
        assert is_closed_error(old_protocol.lost_with[0])
        old.sendto(b"lost", (HOST, 1))
        old.close()
        theirs.send(b"two")
        await until(lambda: new_protocol.data == [b"one", b"two"])
        new.sendto(b"three")
        assert theirs.recv(100) == b"three"
        assert old_protocol.received == []
        new.close()
        await until(lambda: new_protocol.is_lost)


@pytest.mark.skip_on(when=sys.version_info < (3, 12), asyncio="accepts the socket before 3.12")
async def test_a_socket_that_another_endpoint_uses(loop):
    transport, protocol, _ = await endpoint(loop)
    with pytest.raises(RuntimeError, match=r"File descriptor .* is used by transport"):
        await loop.create_datagram_endpoint(Datagrams, sock=socket_of(transport))
    assert socket_of(transport).fileno() >= 0
    await finish(protocol)
