"""Sockets that are closed while a transport or server uses them. If another file gets the descriptor number of such a
socket, the loop neither reads from that file, nor accepts on it, nor writes to it.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys

import pytest
from support import (
    HOST,
    WAYS,
    BufferedRecorder,
    ForeignSocket,
    Peer,
    Recorder,
    connected,
    is_closed_error,
    iterations,
    listening,
    raw_pair,
    until,
)

pytestmark = pytest.mark.skip_on(uvloop="keeps the closed socket open, or goes on using its number")

ENDS = {
    "close": lambda sock: sock.close(),
    "detach": lambda sock: os.close(sock.detach()),
}


def socket_of(transport) -> socket.socket:
    return transport.get_extra_info("socket")._sock


# ---------------------------------------------------------------- transports


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("how", WAYS)
async def test_writing_after_the_socket_was_closed(loop, how, end):
    transport, protocol, peer = await connected(loop, how=how)
    with peer:
        sockname, peername = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
        sock = socket_of(transport)
        fd = sock.fileno()
        ENDS[end](sock)
        assert await peer.read_to_end() == b""
        with ForeignSocket(fd) as foreign:
            foreign.theirs.send(b"for the foreign socket")
            await iterations(3)
            assert foreign.ours.recv(100) == b"for the foreign socket"
            transport.write(b"lost")
            transport.get_write_buffer_size()  # sends the held data
            assert transport.is_closing()
            await until(lambda: protocol.is_lost)
            assert is_closed_error(protocol.lost_with[0])
            assert protocol.data == b""
            assert transport.get_extra_info("sockname") == sockname
            assert transport.get_extra_info("peername") == peername


@pytest.mark.parametrize("write", ["writelines", "corked"])
async def test_other_ways_of_writing(loop, write):
    class Corking(Recorder):
        def data_received(self, data):
            super().data_received(data)
            self.transport.write(b"lost")
            sock.close()
            strangers.append(ForeignSocket(fd))

    transport, protocol, peer = await connected(loop, Corking)
    sock, strangers = socket_of(transport), []
    fd = sock.fileno()
    with peer:
        if write == "corked":
            await peer.send(b"x")
            await until(lambda: protocol.data)
            if not protocol.is_lost and not transport.is_closing():  # asyncio has sent the first write at once
                transport.write(b"lost")
        else:
            sock.close()
            strangers.append(ForeignSocket(fd))
            transport.writelines([b"lo", b"st"])
        await until(lambda: protocol.is_lost)
        with strangers.pop():
            pass


@pytest.mark.skip_on(asyncio="its selector raises, and the transport stays half closed")
@pytest.mark.parametrize("end", ["close", "abort"])
async def test_ending_with_a_buffer(loop, end):
    transport, protocol, peer = await connected(loop, small=True)
    with peer:
        transport.write(bytes(4_000_000))
        sock = socket_of(transport)
        fd = sock.fileno()
        sock.close()
        with ForeignSocket(fd):
            getattr(transport, end)()
            await until(lambda: protocol.is_lost)
            if end == "close":  # the buffered data cannot be sent any more
                assert is_closed_error(protocol.lost_with[0])
            else:
                assert protocol.lost_with == [None]


@pytest.mark.parametrize("action", ["close", "abort"])
async def test_ending_the_transport_later(loop, action):
    transport, protocol, peer = await connected(loop)
    with peer:
        sock = socket_of(transport)
        fd = sock.fileno()
        sock.close()
        with ForeignSocket(fd) as foreign:
            getattr(transport, action)()
            await until(lambda: protocol.is_lost)
            assert protocol.lost_with == [None]
            foreign.check()
        assert "fd=" in repr(transport)


async def test_write_eof(loop):
    transport, protocol, peer = await connected(loop)
    with peer:
        sock = socket_of(transport)
        fd = sock.fileno()
        sock.close()
        with ForeignSocket(fd) as foreign:
            with pytest.raises(OSError, match="Bad file descriptor"):
                transport.write_eof()
            foreign.ours.send(b"still both ways")
            assert foreign.theirs.recv(100) == b"still both ways"
            transport.abort()
            await until(lambda: protocol.is_lost)


@pytest.mark.parametrize("factory", [Recorder, BufferedRecorder])
async def test_an_event_of_a_duplicate(loop, factory):
    """A duplicate keeps the connection open, so the poller still reports its events."""
    transport, protocol, peer = await connected(loop, factory)
    sock = socket_of(transport)
    fd = sock.fileno()
    duplicate = sock.dup()
    with peer, duplicate:
        sock.close()
        with ForeignSocket(fd) as foreign:
            foreign.theirs.send(b"not for the protocol")
            await peer.send(b"nobody reads this")
            await until(lambda: protocol.is_lost)
            assert is_closed_error(protocol.lost_with[0])
            assert protocol.data == b""
            assert foreign.ours.recv(100) == b"not for the protocol"
        assert duplicate.recv(100) == b"nobody reads this"


async def test_a_buffer_closes_the_socket(loop):
    """get_buffer() closes the socket between the event and the read."""
    strangers = []

    class Closing(BufferedRecorder):
        def get_buffer(self, sizehint):
            if not strangers:
                sock = socket_of(self.transport)
                fd = sock.fileno()
                sock.close()
                strangers.append(ForeignSocket(fd))
                strangers[0].theirs.send(b"not for the protocol")
            return super().get_buffer(sizehint)

    _transport, protocol, peer = await connected(loop, Closing)
    with peer:
        await peer.send(b"x")
        await until(lambda: protocol.is_lost)
        assert is_closed_error(protocol.lost_with[0])
        assert protocol.data == b""
        with strangers.pop() as foreign:
            assert foreign.ours.recv(100) == b"not for the protocol"


@pytest.mark.skip_on(asyncio="connection_lost is never called; only the failed add_reader is reported")
async def test_connection_made_closes_the_socket(loop):
    class Closing(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            socket_of(transport).close()

    with listening() as listener:
        _transport, protocol = await loop.create_connection(Closing, *listener.getsockname())
        await until(lambda: protocol.is_lost)
        assert is_closed_error(protocol.lost_with[0])


@pytest.mark.skip_on(asyncio="RuntimeError: the number is used by the old transport")
@pytest.mark.parametrize("is_duplicated", [False, True])
async def test_a_new_transport_with_the_same_number(loop, is_duplicated):
    """Both transports belong to the same loop. Each event reaches the right transport."""
    old, old_protocol, old_peer = await connected(loop)
    sock = socket_of(old)
    fd = sock.fileno()
    duplicate = sock.dup() if is_duplicated else None
    sock.close()
    ours, theirs = raw_pair()
    if ours.fileno() != fd:
        os.dup2(ours.fileno(), fd, inheritable=False)
        ours.close()
        ours = socket.socket(fileno=fd)
    ours.setblocking(False)
    new, new_protocol = await loop.create_connection(Recorder, sock=ours)
    assert socket_of(new).fileno() == fd
    await until(lambda: old_protocol.is_lost)
    assert is_closed_error(old_protocol.lost_with[0])
    with old_peer, Peer(theirs) as new_peer:
        if duplicate is not None:
            await old_peer.send(b"nobody reads this")
        for number in range(3):
            old.write(b"lost")
            await new_peer.send(b"%d" % number)
            await until(lambda number=number: new_protocol.data == b"012"[: number + 1])
            new.write(b"answer")
            assert await new_peer.read_exactly(6) == b"answer"
        new.pause_reading()
        old.pause_reading()
        old.resume_reading()
        await new_peer.send(b"3")
        await iterations(5)
        assert new_protocol.data == b"012"
        new.resume_reading()
        await until(lambda: new_protocol.data == b"0123")
        assert old_protocol.data == b""
        new.close()
        await until(lambda: new_protocol.is_lost)
        if duplicate is not None:
            assert duplicate.recv(100) == b"nobody reads this"
            duplicate.close()


@pytest.mark.skip_on(asyncio="RuntimeError: the number is used by the old transport")
async def test_a_callback_with_the_same_number(loop):
    transport, protocol, peer = await connected(loop)
    with peer:
        sock = socket_of(transport)
        fd = sock.fileno()
        sock.close()
        with ForeignSocket(fd) as foreign:
            seen = []
            loop.add_reader(fd, lambda: seen.append(foreign.ours.recv(100)))
            foreign.theirs.send(b"for the callback")
            await until(lambda: seen == [b"for the callback"])
            await until(lambda: protocol.is_lost)
            assert is_closed_error(protocol.lost_with[0])
            foreign.theirs.send(b"and more")
            await until(lambda: seen == [b"for the callback", b"and more"])
            loop.remove_reader(fd)


@pytest.mark.skip_on(when=sys.version_info < (3, 12), asyncio="accepts the socket before 3.12")
async def test_a_second_transport_for_the_same_socket_is_refused(loop):
    transport, protocol, peer = await connected(loop)
    with peer:
        sock = socket_of(transport)
        with pytest.raises(RuntimeError, match=r"File descriptor .* is used by transport"):
            await loop.create_connection(Recorder, sock=sock)
        with pytest.raises(RuntimeError, match=r"File descriptor .* is used by transport"):
            await loop.connect_accepted_socket(Recorder, sock)
        await peer.send(b"still there")
        await until(lambda: protocol.data == b"still there")
        transport.close()
        await until(lambda: protocol.is_lost)


# ---------------------------------------------------------------- servers


@pytest.mark.skip_on(asyncio="Server.close() raises ValueError: the selector does not find the socket")
async def test_a_server_whose_socket_was_closed(loop, serve, reported):
    """A duplicate keeps the listening socket open, so the poller still reports events. (A forked worker has such a
    duplicate.) The server must not accept on the other socket, which now has the old number.
    """
    made = []

    def factory():
        made.append(Recorder())
        return made[-1]

    sock = socket.socket()
    sock.bind((HOST, 0))
    server = await serve(factory, sock=sock)
    address, fd = sock.getsockname(), sock.fileno()
    with sock.dup() as duplicate, listening() as other:
        sock.close()
        os.dup2(other.fileno(), fd, inheritable=False)
        with socket.socket(fileno=fd) as strange:
            strange.setblocking(False)
            with socket.create_connection(other.getsockname()), socket.create_connection(address):
                await until(lambda: reported)
                assert {error.errno for error in reported.exceptions} == {errno.EBADF}
                accepted, _ = strange.accept()
                accepted.close()
                duplicate.setblocking(False)
                accepted, _ = duplicate.accept()
                accepted.close()
            server.close()
            assert made == []
            with socket.create_connection(other.getsockname()):
                accepted, _ = strange.accept()
                accepted.close()


@pytest.mark.skip_on(asyncio="FileNotFoundError: the selector knows the number already")
async def test_a_new_server_with_the_same_number(loop, serve):
    made = {"old": [], "new": []}

    def factory(name):
        def make():
            made[name].append(Recorder())
            return made[name][-1]

        return make

    sock = socket.socket()
    sock.bind((HOST, 0))
    old = await serve(factory("old"), sock=sock)
    fd = sock.fileno()
    sock.close()
    sock = socket.socket()
    sock.bind((HOST, 0))
    if sock.fileno() != fd:
        os.dup2(sock.fileno(), fd, inheritable=False)
        sock.close()
        sock = socket.socket(fileno=fd)
    new = await serve(factory("new"), sock=sock)
    for count, close in ((1, lambda: None), (2, old.close)):
        close()
        with socket.create_connection(sock.getsockname()) as client:
            client.send(b"x")
            await until(lambda count=count: len(made["new"]) == count and made["new"][-1].data == b"x")
            made["new"][-1].transport.close()
            await until(lambda: made["new"][-1].is_lost)
    assert made["old"] == []
    new.close()


@pytest.mark.skip_on(asyncio="Server.close() raises ValueError: the selector does not find the socket")
async def test_a_factory_closes_the_listening_socket(loop, serve, reported):
    made = []
    sock = socket.socket()
    sock.bind((HOST, 0))

    def factory():
        made.append(Recorder())
        sock.close()
        return made[-1]

    server = await serve(factory, sock=sock)
    address = sock.getsockname()
    with socket.create_connection(address), listening() as other:
        await until(lambda: made and made[0].transport is not None)
        with socket.create_connection(other.getsockname()):
            await iterations(5)
            accepted, _ = other.accept()
            accepted.close()
        made[0].transport.close()
        await until(lambda: made[0].is_lost)
    server.close()
    assert len(made) == 1


# ---------------------------------------------------------------- the poller


needs_epoll = pytest.mark.skipif(not os.path.isdir("/proc/self/fdinfo"), reason="there is no /proc/self/fdinfo")


@needs_epoll
@pytest.mark.skip_on(asyncio="the loop spins")
async def test_events_of_closed_sockets_do_not_keep_the_loop_busy(loop):
    """The loop replaces its epoll when it can no longer remove a registration."""

    def polled():
        lines = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                if os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:[eventpoll]":
                    with open(f"/proc/self/fdinfo/{fd}") as file:
                        lines += [line for line in file if line.startswith("tfd:")]
            except FileNotFoundError:
                continue
        return len(lines)

    living, living_protocol, living_peer = await connected(loop)
    watched, theirs = socket.socketpair()
    watched.setblocking(False)
    seen = []
    loop.add_reader(watched, lambda: seen.append(watched.recv(10)))
    await asyncio.sleep(0.001)  # the loop opens its pipe for signals when it first sleeps
    before = polled()
    ghosts = []
    for _ in range(5):
        transport, protocol, peer = await connected(loop)
        sock = socket_of(transport)
        ghosts.append((sock.dup(), protocol, peer))
        sock.close()
        await peer.send(b"x")
    await until(lambda: all(protocol.is_lost for _, protocol, _ in ghosts))
    await until(lambda: polled() <= before, cap_s=2)
    theirs.send(b"x")
    await until(lambda: seen == [b"x"])
    await living_peer.send(b"y")
    await until(lambda: living_protocol.data == b"y")
    living.write(b"z")
    assert await living_peer.read_exactly(1) == b"z"
    loop.call_soon_threadsafe(seen.append, b"threadsafe")
    await until(lambda: seen[-1] == b"threadsafe")
    for duplicate, _, peer in ghosts:
        duplicate.close()
        peer.sock.close()
    loop.remove_reader(watched)
    watched.close()
    theirs.close()
    living.close()
    await until(lambda: living_protocol.is_lost)
    living_peer.sock.close()
