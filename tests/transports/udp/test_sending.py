"""sendto on open and closed endpoints, and flow control with a peer that does not read."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import sys

import pytest
from support import HOST, iterations, until
from transports.udp.endpoints import Datagrams, endpoint, finish, logged, raw_socket, received_by, unused_address

HEADER_LEN = 8 if sys.version_info >= (3, 13) else 0
no_unix = pytest.mark.skip_on(uvloop="#196: no Unix datagrams")


async def test_a_connected_endpoint_refuses_other_addresses(loop):
    with raw_socket() as peer:
        address = peer.getsockname()
        transport, protocol, _ = await endpoint(loop, remote_addr=address)
        for other in [(HOST, 9), ("localhost", address[1]), (HOST, str(address[1])), [*address], "x"]:
            with pytest.raises(ValueError, match=f"^Invalid address: must be None or {re.escape(str(address))}"):
                transport.sendto(b"wrong", other)
        for same in (None, address, (HOST, address[1])):
            transport.sendto(b"right", same)
        assert await received_by(peer, 3) == [b"right"] * 3
        await finish(protocol)


@pytest.mark.xfail_on(uvloop="reports EDESTADDRREQ, and the endpoint stays open")
async def test_no_address_at_all_ends_the_endpoint(loop, reported):
    transport, protocol, _ = await endpoint(loop)
    transport.sendto(b"to whom?")
    assert transport.is_closing()
    await until(lambda: protocol.is_lost)
    [context] = reported
    assert context["message"] == "Fatal write error on datagram transport"
    assert isinstance(context["exception"], TypeError)
    assert context["transport"] is transport
    assert context["protocol"] is protocol
    assert protocol.lost_with == [context["exception"]]
    assert protocol.errors == []
    protocol.lost_with.clear()
    reported.clear()


@pytest.mark.skip_on(uvloop="raises the errors, or closes without a report")
@pytest.mark.parametrize(
    ("address", "kind"),
    [(5, TypeError), ((HOST,), TypeError), ((HOST, "9"), TypeError), ((HOST, 65536), OverflowError)],
)
async def test_impossible_addresses_end_the_endpoint(loop, reported, address, kind):
    transport, protocol, _ = await endpoint(loop)
    transport.sendto(b"to whom?", address)
    await until(lambda: protocol.is_lost)
    assert [type(exception) for exception in reported.exceptions] == [kind]
    assert reported.messages == ["Fatal write error on datagram transport"]
    protocol.lost_with.clear()
    reported.clear()


@pytest.mark.skip_on(uvloop="resolves no names")
async def test_a_name_that_does_not_resolve(loop):
    transport, protocol, _ = await endpoint(loop)
    transport.sendto(b"hello", ("name.invalid", 9))
    assert [type(error) for error in protocol.errors] == [socket.gaierror]
    assert not transport.is_closing()
    await finish(protocol)


async def test_an_address_that_cannot_be_reached(loop):
    """The socket has no permission to broadcast."""
    transport, protocol, _ = await endpoint(loop, family=socket.AF_INET)
    transport.sendto(b"everybody", ("255.255.255.255", 9))
    assert [error.errno for error in protocol.errors] == [errno.EACCES]
    await finish(protocol)


# ---------------------------------------------------------------- after the end


@pytest.mark.skip_on(uvloop="crashes on its own warning")
async def test_connected_endpoints_ignore_datagrams_after_close(loop):
    with raw_socket() as peer, logged() as messages:
        transport, protocol, _ = await endpoint(loop, remote_addr=peer.getsockname())
        transport.close()
        for _ in range(4):
            transport.sendto(b"late")
        assert messages == []
        transport.sendto(b"late")
        transport.sendto(b"late")
        await until(lambda: protocol.is_lost)
        transport.sendto(b"later")
        assert messages == ["socket.send() raised exception."] * 3
        with pytest.raises(BlockingIOError):
            peer.recv(1)


@pytest.mark.skip_on(asyncio="raises AttributeError in its own error handling", uvloop="like asyncio")
async def test_unconnected_endpoints_ignore_datagrams_after_the_end(loop):
    with raw_socket() as peer, logged() as messages:
        transport, protocol, _ = await endpoint(loop)
        await finish(protocol)
        for _ in range(6):
            transport.sendto(b"late", peer.getsockname())
        assert messages == ["socket.send() raised exception."] * 2
        with pytest.raises(BlockingIOError):
            peer.recv(1)


async def test_close_and_abort_end_an_endpoint_once(loop):
    for end in (["close"], ["abort"], ["close", "abort"], ["abort", "close", "close", "abort"]):
        transport, protocol, _ = await endpoint(loop)
        sock = transport.get_extra_info("socket")
        for method in end:
            getattr(transport, method)()
        assert transport.is_closing()
        assert protocol.events == ["made"]  # connection_lost is never called inside close() or abort()
        await until(lambda: protocol.is_lost)
        await iterations(3)
        assert protocol.events == ["made", "lost"]
        assert protocol.lost_with == [None]
        assert sock.fileno() == -1


async def test_nothing_is_delivered_after_close(loop):
    class Closing(Datagrams):
        def datagram_received(self, data, addr):
            super().datagram_received(data, addr)
            if len(self.received) == 3:
                self.transport.close()

    _, protocol, address = await endpoint(loop, Closing)
    with raw_socket() as peer:
        for number in range(10):
            peer.sendto(b"%d" % number, address)
        await until(lambda: protocol.is_lost)
    await iterations(3)
    assert protocol.data == [b"0", b"1", b"2"]


@pytest.mark.skip_on(uvloop="leaves the transport partly closed")
async def test_closed_inside_connection_made(loop):
    class Closing(Datagrams):
        def connection_made(self, transport):
            super().connection_made(transport)
            transport.close()

    transport, protocol, _ = await endpoint(loop, Closing)
    assert transport.is_closing()
    await until(lambda: protocol.is_lost)
    assert protocol.events == ["made", "lost"]


# ---------------------------------------------------------------- flow control


async def stuck(loop, factory=Datagrams, **limits):
    """Return the transport, the protocol, the peer (a Unix socket) and the number of calls of sendto(). The peer's
    queue is full, and the datagram of the last call is pending.
    """
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    peer.setblocking(False)
    peer.bind("peer")
    transport, protocol, _ = await endpoint(loop, factory, remote_addr="peer", family=socket.AF_UNIX)
    transport.set_write_buffer_limits(**limits)
    count = 0
    while not transport.get_write_buffer_size():
        transport.sendto(b"%06d" % count)
        count += 1
        assert count < 100_000
    return transport, protocol, peer, count


@no_unix
async def test_pending_datagrams_are_counted_and_sent_in_order(loop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    transport, protocol, peer, count = await stuck(loop)
    with peer:
        assert transport.get_write_buffer_size() == 6 + HEADER_LEN
        for number in range(count, count + 20):
            transport.sendto(b"%06d" % number)
        assert transport.get_write_buffer_size() == 21 * (6 + HEADER_LEN)
        assert protocol.events == ["made"]
        assert await received_by(peer, count + 20) == [b"%06d" % number for number in range(count + 20)]
        if sys.version_info[:2] != (3, 13):  # 3.13's asyncio adds HEADER_LEN for a datagram, but never subtracts it
            await until(lambda: transport.get_write_buffer_size() == 0)
        transport.sendto(b"direct")  # nothing is pending any more, so it is sent at once
        assert peer.recv(100) == b"direct"
        await finish(protocol)


@no_unix
async def test_pause_and_resume_writing(loop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    entry = 6 + HEADER_LEN
    transport, protocol, peer, count = await stuck(loop, high=10 * entry, low=2 * entry)
    with peer:
        for number in range(9):
            transport.sendto(b"%06d" % number)
        assert protocol.events == ["made"]  # at the mark, not above
        transport.sendto(b"pause.")
        transport.sendto(b"paused")
        assert protocol.events == ["made", "pause"]
        assert transport.get_write_buffer_limits() == (2 * entry, 10 * entry)
        await received_by(peer, count + 11)
        if sys.version_info[:2] != (3, 13):
            await until(lambda: len(protocol.events) == 3)
            assert protocol.events == ["made", "pause", "resume"]
        await finish(protocol)


@no_unix
async def test_limits(loop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    transport, protocol, peer, _ = await stuck(loop)
    with peer:
        assert transport.get_write_buffer_limits() == (16 * 1024, 64 * 1024)
        with pytest.raises(ValueError, match=re.escape("high (1) must be >= low (2) must be >= 0")):
            transport.set_write_buffer_limits(high=1, low=2)
        transport.set_write_buffer_limits(low=100)
        assert transport.get_write_buffer_limits() == (100, 400)
        assert protocol.events == ["made"]
        transport.set_write_buffer_limits(high=0)  # the buffer is already above the new mark
        assert protocol.events == ["made", "pause"]
        transport.abort()
        await until(lambda: protocol.is_lost)


@no_unix
async def test_pending_data_is_a_copy(loop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    transport, protocol, peer, count = await stuck(loop)
    with peer:
        data = bytearray(b"before")
        transport.sendto(data)
        transport.sendto(memoryview(data))
        data[:] = b"after."
        assert (await received_by(peer, count + 2))[-2:] == [b"before", b"before"]
        await finish(protocol)


@no_unix
async def test_close_sends_pending_data(loop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    transport, protocol, peer, count = await stuck(loop)
    with peer:
        transport.sendto(b"before")
        transport.close()
        assert transport.is_closing()
        transport.sendto(b"after.")  # accepted, because datagrams are still pending
        await iterations(3)
        assert not protocol.is_lost
        assert (await received_by(peer, count + 2))[-2:] == [b"before", b"after."]
        await until(lambda: protocol.is_lost)
        assert protocol.lost_with == [None]
        await iterations(2)


@no_unix
async def test_abort_drops_pending_data(loop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    transport, protocol, peer, count = await stuck(loop)
    with peer:
        transport.sendto(b"before")
        transport.abort()
        assert transport.get_write_buffer_size() in (0, 2 * (6 + HEADER_LEN))  # asyncio does not reset the size
        await until(lambda: protocol.is_lost)
        await received_by(peer, count - 1)
        await iterations(3)
        with pytest.raises(BlockingIOError):
            peer.recv(1)


@no_unix
async def test_the_peer_disconnects_while_data_is_pending(loop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    transport, protocol, peer, _ = await stuck(loop)
    peer.close()
    await until(lambda: protocol.errors)
    assert {error.errno for error in protocol.errors} <= {errno.ECONNREFUSED, errno.ECONNRESET, errno.ENOTCONN}
    assert not transport.is_closing()
    await finish(protocol)


@no_unix
async def test_sends_inside_resume_writing(loop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    class Refilling(Datagrams):
        def resume_writing(self):
            super().resume_writing()
            self.transport.sendto(b"resume")

    transport, protocol, peer, count = await stuck(loop, Refilling, high=0)
    with peer:
        assert protocol.events == ["made", "pause"]
        data = await received_by(peer, count + (0 if sys.version_info[:2] == (3, 13) else 1))
        if sys.version_info[:2] != (3, 13):
            assert data[-1] == b"resume"
        transport.abort()
        await until(lambda: protocol.is_lost)


@no_unix
async def test_faults_of_flow_control_are_reported(loop, reported, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    class Broken(Datagrams):
        def pause_writing(self):
            raise LookupError("pause")

        def resume_writing(self):
            raise LookupError("resume")

    transport, protocol, peer, count = await stuck(loop, Broken, high=0)
    with peer:
        await received_by(peer, count)
        if sys.version_info[:2] != (3, 13):
            await until(lambda: len(reported) == 2)
            assert reported.messages == ["protocol.pause_writing() failed", "protocol.resume_writing() failed"]
        assert reported[0]["transport"] is transport
        assert reported[0]["protocol"] is protocol
        reported.clear()
        await finish(protocol)


@no_unix
async def test_pending_datagrams_of_an_unconnected_endpoint(loop, tmp_path, monkeypatch):
    """Pending datagrams keep their addresses, even addresses that the native code leaves to the socket module."""
    monkeypatch.chdir(tmp_path)
    with raw_socket(socket.AF_UNIX, "peer") as peer:
        transport, protocol, _ = await endpoint(loop, local_addr="own", family=socket.AF_UNIX)
        count = 0
        while not transport.get_write_buffer_size():
            transport.sendto(b"%06d" % count, "peer")
            count += 1
        for address in (b"peer", type("Path", (str,), {})("peer"), bytearray(b"peer")):
            transport.sendto(b"%06d" % count, address)
            count += 1
        assert await received_by(peer, count) == [b"%06d" % number for number in range(count)]
        await finish(protocol)


async def test_a_refusal_does_not_stop_the_others(loop):
    """The endpoint sends to two peers, one of which does not exist."""
    deaf = unused_address()
    with raw_socket() as peer:
        transport, protocol, _ = await endpoint(loop)
        for number in range(10):
            transport.sendto(b"%d" % number, deaf)
            transport.sendto(b"%d" % number, peer.getsockname())
        assert await received_by(peer, 10) == [b"%d" % number for number in range(10)]
        assert protocol.errors == []  # an unconnected socket gets no ICMP errors
        assert asyncio.get_running_loop() is loop
        await finish(protocol)
