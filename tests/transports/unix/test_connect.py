"""create_unix_connection: paths, sockets, refusals, and the end of a connection."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest
from support import BufferedRecorder, Peer, Recorder, iterations, until


def listener_at(address, backlog=16):
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(os.fspath(address))
    sock.listen(backlog)
    sock.settimeout(10)
    return sock


async def linked(loop, factory=Recorder):
    """A transport, its protocol and the other end."""
    ours, other = socket.socketpair()
    transport, protocol = await loop.create_unix_connection(factory, sock=ours)
    return transport, protocol, Peer(other)


NO_ABSTRACT_CLIENT = pytest.mark.skip_on(uvloop="cannot connect to abstract names")


@pytest.mark.parametrize(
    "form",
    [
        "str",
        "bytes",
        "pathlike",
        pytest.param("abstract str", marks=NO_ABSTRACT_CLIENT),
        pytest.param("abstract bytes", marks=NO_ABSTRACT_CLIENT),
    ],
)
async def test_connects_to_any_form_of_address(loop, address_of, form):
    address = address_of(form)
    with listener_at(address) as listener:
        transport, protocol = await loop.create_unix_connection(Recorder, address)
        other, _ = listener.accept()
    with Peer(other) as peer:
        await peer.send(b"to the client")
        transport.write(b"to the server")
        assert await peer.read_exactly(13) == b"to the server"
        await until(lambda: protocol.data == b"to the client")
        transport.close()
        assert await peer.read_to_end() == b""
    await until(lambda: protocol.is_lost)
    assert protocol.events == ["made", "data", "lost"]
    assert protocol.lost_with == [None]


async def test_takes_a_connected_socket(loop):
    ours, other = socket.socketpair()
    assert ours.getblocking()
    transport, protocol = await loop.create_unix_connection(Recorder, sock=ours)
    with Peer(other) as peer:
        assert not os.get_blocking(transport.get_extra_info("socket").fileno())
        transport.write(b"x")
        assert await peer.read_exactly(1) == b"x"
        transport.close()
        await until(lambda: protocol.is_lost)
        assert await peer.is_ended()


async def test_a_refused_connection(loop, folder, address_of):
    with pytest.raises(FileNotFoundError):
        await loop.create_unix_connection(Recorder, address_of("str"))
    address = str(folder / "stale")
    listener_at(address).close()
    with pytest.raises(ConnectionRefusedError):
        await loop.create_unix_connection(Recorder, address)


@NO_ABSTRACT_CLIENT
async def test_an_abstract_name_without_a_listener(loop, address_of):
    with pytest.raises(ConnectionRefusedError):
        await loop.create_unix_connection(Recorder, address_of("abstract str"))


@pytest.mark.xfail_on(uvloop="gives the system's message, and does not check the type of a path")
async def test_paths_that_are_refused(loop, folder):
    with pytest.raises(OSError, match="too long"):
        await loop.create_unix_connection(Recorder, str(folder / ("x" * 120)))
    for wrong in (5, 1.5, ["path"]):
        with pytest.raises(TypeError):
            await loop.create_unix_connection(Recorder, wrong)


@pytest.mark.skip_on(uvloop="the texts differ")
async def test_arguments_that_contradict_each_other(loop, address_of):
    address = address_of("str")
    cases = [
        ({"ssl": True}, "you have to pass server_hostname when using ssl"),
        ({"server_hostname": "host"}, "server_hostname is only meaningful with ssl"),
        ({"ssl_handshake_timeout": 1}, "ssl_handshake_timeout is only meaningful with ssl"),
        ({"ssl_shutdown_timeout": 1}, "ssl_shutdown_timeout is only meaningful with ssl"),
        ({}, "no path and sock were specified"),
    ]
    for arguments, text in cases:
        with pytest.raises(ValueError) as caught:
            await loop.create_unix_connection(Recorder, **arguments)
        assert str(caught.value) == text
    with socket.socket(socket.AF_UNIX) as sock:
        with pytest.raises(ValueError, match="path and sock can not be specified at the same time"):
            await loop.create_unix_connection(Recorder, address, sock=sock)
    for family, type_ in ((socket.AF_INET, socket.SOCK_STREAM), (socket.AF_UNIX, socket.SOCK_DGRAM)):
        with socket.socket(family, type_) as sock:
            with pytest.raises(ValueError) as caught:
                await loop.create_unix_connection(Recorder, sock=sock)
            assert str(caught.value) == f"A UNIX Domain Stream Socket was expected, got {sock!r}"


@pytest.mark.skip_on(asyncio="the socket stays open until it is collected", uvloop="the socket stays open")
async def test_a_factory_that_raises_closes_the_socket(loop, address_of):
    def fails():
        raise LookupError

    address = address_of("str")
    with listener_at(address) as listener:
        with pytest.raises(LookupError):
            await loop.create_unix_connection(fails, address)
        other, _ = listener.accept()
        with Peer(other) as peer:
            assert await peer.is_ended()


# ---------------------------------------------------------------- a server that is busy

LATER = "treats EAGAIN like EINPROGRESS, and the connection then fails with ENOTCONN"


@pytest.mark.xfail_on(asyncio=LATER, uvloop="fails with EAGAIN")
async def test_a_connect_waits_while_the_queue_is_full(loop, address_of):
    """While the queue is full, connect() fails with EAGAIN. No event reports free space, so the loop tries again."""
    address = address_of("str")
    with listener_at(address, backlog=1) as listener:
        connecting = [loop.create_task(loop.create_unix_connection(Recorder, address)) for _ in range(8)]
        try:
            await iterations(5)
            assert not all(task.done() for task in connecting)
            accepted = []
            listener.setblocking(False)
            while len(accepted) < len(connecting):
                try:
                    accepted.append(Peer(listener.accept()[0]))
                except BlockingIOError:
                    await asyncio.sleep(0.001)
            made = await asyncio.gather(*connecting)
            for transport, _ in made:
                transport.write(b"heard")
            for peer in accepted:
                assert await peer.read_exactly(5) == b"heard"
        finally:
            for result in await asyncio.gather(*connecting, return_exceptions=True):
                if isinstance(result, tuple):
                    result[0].abort()
            await iterations(3)
        for peer in accepted:
            peer.close()
        await until(lambda: all(protocol.is_lost for _, protocol in made))


@pytest.mark.skip_on(asyncio=LATER, uvloop="fails with EAGAIN")
async def test_cancelled_while_the_queue_is_full(loop, address_of):
    address = address_of("str")
    with listener_at(address, backlog=0) as listener:
        fillers = []
        while True:
            sock = socket.socket(socket.AF_UNIX)
            sock.setblocking(False)
            fillers.append(sock)
            try:
                sock.connect(address)
            except BlockingIOError:
                break
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await loop.create_unix_connection(Recorder, address)
        for sock in fillers:
            sock.close()
        del listener


# ---------------------------------------------------------------- the end


async def test_half_close_both_ways(loop):
    transport, protocol, peer = await linked(loop)
    protocol.keep_open = True
    with peer:
        await peer.send(b"last words")
        peer.shutdown()
        await until(lambda: "eof" in protocol.events)
        assert protocol.data == b"last words"
        assert not transport.is_closing()
        transport.write(b"answer")
        assert transport.can_write_eof()
        transport.write_eof()
        assert await peer.read_to_end() == b"answer"
        transport.close()
    await until(lambda: protocol.is_lost)
    assert protocol.events == ["made", "data", "eof", "lost"]
    assert protocol.lost_with == [None]


async def test_peer_disconnects(loop):
    _, protocol, peer = await linked(loop)
    await peer.send(b"bye")
    peer.close()
    await until(lambda: protocol.is_lost)
    assert protocol.events == ["made", "data", "eof", "lost"]
    assert protocol.lost_with == [None]


async def test_peer_disconnects_with_unread_data(loop):
    transport, protocol, peer = await linked(loop)
    transport.pause_reading()
    transport.write(bytes(1 << 20))
    await until(lambda: not peer.is_silent())
    peer.close()
    await until(lambda: protocol.is_lost)
    [exc] = protocol.lost_with
    assert isinstance(exc, (BrokenPipeError, ConnectionResetError))
    protocol.lost_with.clear()


async def test_flow_control(loop):
    transport, protocol, peer = await linked(loop)
    data = os.urandom(2 << 20)
    with peer:
        transport.write(data)
        await until(lambda: protocol.events == ["made", "pause"])
        assert await peer.read_exactly(len(data)) == data
        await until(lambda: protocol.events == ["made", "pause", "resume"])
        transport.close()
        await until(lambda: protocol.is_lost)


async def test_buffered_protocol(loop):
    transport, protocol, peer = await linked(loop, BufferedRecorder)
    data = os.urandom(100_000)
    with peer:
        await peer.send(data)
        await until(lambda: len(protocol.data) == len(data))
        assert protocol.data == data
        transport.abort()
        await until(lambda: protocol.is_lost)
        assert await peer.is_ended()
