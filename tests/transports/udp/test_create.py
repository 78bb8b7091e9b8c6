"""create_datagram_endpoint: arguments, addresses, errors."""

from __future__ import annotations

import asyncio
import errno
import os
import pathlib
import re
import socket
import stat
import sys

import pytest
from support import HOST, has_ipv6, link_local_address, until
from transports.udp.endpoints import ANY, Datagrams, EchoDatagrams, endpoint, finish, logged, raw_socket, received_by

from grapeshot._loop.fixes import ACCEPTS_ALL_BUT_STREAMS

IS_ABSTRACT = sys.platform == "linux"


async def test_made_before_it_returns(loop):
    transport, protocol, address = await endpoint(loop)
    assert protocol.transport is transport
    assert protocol.events == ["made"]
    assert address[0] == HOST
    assert address[1]
    assert transport.get_extra_info("peername") is None
    assert not transport.is_closing()
    await finish(protocol)
    assert protocol.lost_with == [None]


@pytest.mark.xfail_on(uvloop="its transports are not asyncio's")
@pytest.mark.xfail_on(when=sys.version_info < (3, 12), asyncio="its transports do not derive from DatagramTransport")
async def test_isinstance(loop):
    transport, protocol, _ = await endpoint(loop)
    assert isinstance(transport, asyncio.DatagramTransport)
    assert isinstance(transport, asyncio.BaseTransport)
    assert isinstance(transport, asyncio.Transport)  # CPython's own tests check this
    await finish(protocol)


@pytest.mark.xfail_on(uvloop="returns a PseudoSocket; for a missing peer, returns the default")
async def test_extra_info(loop):
    transport, protocol, address = await endpoint(loop)
    sock = transport.get_extra_info("socket")
    assert type(sock) is asyncio.trsock.TransportSocket
    assert sock.getsockname() == address
    assert (sock.type, sock.family) == (socket.SOCK_DGRAM, socket.AF_INET)
    assert transport.get_extra_info("peername", "default") is None
    assert transport.get_extra_info("nothing", "default") == "default"
    await finish(protocol)
    assert transport.get_extra_info("sockname") == address


async def test_connected(loop):
    _, server, address = await endpoint(loop)
    transport, client, own = await endpoint(loop, remote_addr=address)
    assert transport.get_extra_info("peername") == address
    transport.sendto(b"hello")
    await until(lambda: server.received)
    assert server.received == [(b"hello", own)]
    await finish(server, client)


async def test_bound_and_connected(loop):
    _, server, address = await endpoint(loop)
    with raw_socket() as sock:
        free = sock.getsockname()
    transport, client, own = await endpoint(loop, local_addr=free, remote_addr=address)
    assert own == free
    transport.sendto(b"hello")
    await until(lambda: server.received)
    assert server.received == [(b"hello", free)]
    await finish(server, client)


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
async def test_ipv6(loop):
    _, server, address = await endpoint(loop, EchoDatagrams, local_addr=("::1", 0))
    assert len(address) == 4
    transport, client, own = await endpoint(loop, remote_addr=address[:2])
    assert transport.get_extra_info("peername") == address
    transport.sendto(b"hello")
    await until(lambda: client.received)
    assert server.received == [(b"hello", own)]
    assert client.received == [(b"hello", address)]
    await finish(server, client)


@pytest.mark.skipif(link_local_address() is None, reason="no link-local address here")
async def test_scope_ids_of_link_local_addresses(loop):
    host, scope_id = link_local_address()
    with raw_socket(socket.AF_INET6, (host, 0, 0, scope_id)) as peer:
        _, protocol, address = await endpoint(loop, EchoDatagrams, local_addr=(f"{host}%{scope_id}", 0))
        assert address[0] == host
        assert address[2:] == (0, scope_id)
        peer.sendto(b"hello", address)
        assert await received_by(peer) == [b"hello"]
        assert protocol.received == [(b"hello", peer.getsockname())]
        await finish(protocol)


async def test_only_a_family(loop):
    transport, protocol, address = await endpoint(loop, family=socket.AF_INET)
    assert address == ("0.0.0.0", 0)
    with raw_socket() as peer:
        transport.sendto(b"hello", peer.getsockname())
        assert await received_by(peer) == [b"hello"]
    assert transport.get_extra_info("sockname") == address  # the address that the endpoint had when it was made
    await finish(protocol)


async def test_names_are_resolved(loop):
    _, server, address = await endpoint(loop, local_addr=("localhost", 0), family=socket.AF_INET)
    transport, client, own = await endpoint(loop, remote_addr=("localhost", address[1]), family=socket.AF_INET)
    transport.sendto(b"hello")
    await until(lambda: server.received)
    assert server.received == [(b"hello", own)]
    await finish(server, client)


@pytest.mark.xfail_on(uvloop="connects the socket anyway")
async def test_broadcast_with_a_remote_address(loop):
    _, server, address = await endpoint(loop)
    transport, client, _ = await endpoint(loop, remote_addr=address, allow_broadcast=True)
    assert transport.get_extra_info("peername") is None
    assert transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST)
    transport.sendto(b"one")
    transport.sendto(b"two", address)
    with pytest.raises(ValueError, match=re.escape(f"Invalid address: must be None or {address}")):
        transport.sendto(b"three", (HOST, 9))
    await until(lambda: len(server.received) == 2)
    assert server.data == [b"one", b"two"]
    await finish(server, client)


@pytest.mark.skipif(not hasattr(socket, "SO_REUSEPORT"), reason="no SO_REUSEPORT here")
async def test_reuse_port(loop):
    transport, first, address = await endpoint(loop, local_addr=ANY, reuse_port=True)
    assert transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT)
    _, second, again = await endpoint(loop, local_addr=address, reuse_port=True)
    assert again == address
    await finish(first, second)


async def test_reuse_address_is_gone(loop):
    with pytest.raises((TypeError, ValueError), match="reuse_address"):
        await loop.create_datagram_endpoint(Datagrams, local_addr=ANY, reuse_address=True)


@pytest.mark.xfail_on(uvloop="its error has no errno")
async def test_a_port_in_use(loop):
    with raw_socket() as other, pytest.raises(OSError) as caught:
        await loop.create_datagram_endpoint(Datagrams, local_addr=other.getsockname())
    assert caught.value.errno == errno.EADDRINUSE


# ---------------------------------------------------------------- sock


async def test_a_socket_of_ones_own(loop):
    with socket.socket(type=socket.SOCK_DGRAM) as sock:
        sock.bind(ANY)
        transport, protocol, address = await endpoint(loop, sock=sock)
        assert address == sock.getsockname()
        assert sock.gettimeout() == 0
        with raw_socket() as peer:
            transport.sendto(b"hello", peer.getsockname())
            assert await received_by(peer) == [b"hello"]
        await finish(protocol)
        assert sock.fileno() == -1


@pytest.mark.xfail_on(uvloop="sends to the address")
async def test_a_connected_socket_ignores_the_address_of_sendto(loop):
    with raw_socket() as peer, raw_socket(address=None) as sock:
        sock.connect(peer.getsockname())
        transport, protocol, _ = await endpoint(loop, sock=sock)
        assert transport.get_extra_info("peername") == peer.getsockname()
        transport.sendto(b"one")
        transport.sendto(b"two", (HOST, 9))
        assert await received_by(peer, 2) == [b"one", b"two"]
        await finish(protocol)


@pytest.mark.xfail_on(asyncio="behaves as if a peer without a name did not exist")
async def test_a_socket_pair(loop):
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with right:
        right.setblocking(False)
        transport, protocol, _ = await endpoint(loop, sock=left)
        transport.sendto(b"there")
        assert await received_by(right) == [b"there"]
        right.send(b"back")
        await until(lambda: protocol.received)
        assert protocol.received == [(b"back", None)]
        await finish(protocol)


@pytest.mark.skip_on(uvloop="accepts only a type of exactly SOCK_DGRAM")
@pytest.mark.skipif(not ACCEPTS_ALL_BUT_STREAMS, reason="this asyncio accepts only SOCK_DGRAM")
async def test_a_socket_that_is_neither_stream_nor_datagram(loop):
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with right:
        _, protocol, _ = await endpoint(loop, sock=left)
        right.send(b"packet")
        await until(lambda: protocol.received)
        assert protocol.received == [(b"packet", None)]
        await finish(protocol)


@pytest.mark.xfail_on(when=ACCEPTS_ALL_BUT_STREAMS, uvloop="another text")
async def test_stream_sockets_are_refused(loop):
    expected = "A datagram socket was expected" if ACCEPTS_ALL_BUT_STREAMS else "A UDP Socket was expected"
    with socket.socket() as sock, pytest.raises(ValueError, match=f"{expected}, got {re.escape(repr(sock))}"):
        await loop.create_datagram_endpoint(Datagrams, sock=sock)


@pytest.mark.xfail_on(uvloop="the message lists more arguments")
async def test_arguments_that_a_socket_excludes(loop):
    with socket.socket(type=socket.SOCK_DGRAM) as sock:
        for given, shown in [
            ({"local_addr": ANY}, f"local_addr={ANY}"),
            ({"remote_addr": (HOST, 9), "proto": 17}, f"remote_addr={(HOST, 9)}, proto=17"),
            ({"family": 2, "flags": 1}, "family=2, flags=1"),
            ({"reuse_port": True, "allow_broadcast": True}, "reuse_port=True, allow_broadcast=True"),
        ]:
            text = f"socket modifier keyword arguments can not be used when sock is specified. ({shown})"
            with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
                await loop.create_datagram_endpoint(Datagrams, sock=sock, **given)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({}, ValueError, "unexpected address family"),
        ({"local_addr": "localhost"}, TypeError, "2-tuple is expected"),
        ({"local_addr": ("localhost", 1, 2, 3)}, TypeError, "2-tuple is expected"),
        ({"remote_addr": [HOST, 9]}, TypeError, "2-tuple is expected"),
        ({"local_addr": (HOST, 0), "remote_addr": ("::1", 9)}, ValueError, "can not get address information"),
        ({"local_addr": ("::1", 0), "family": socket.AF_INET}, socket.gaierror, None),
        ({"local_addr": 5, "family": socket.AF_UNIX}, TypeError, "string is expected"),
        ({"remote_addr": (HOST, 9), "family": socket.AF_UNIX}, TypeError, "string is expected"),
    ],
)
@pytest.mark.skip_on(uvloop="has other checks, in another order")
async def test_arguments_that_are_refused(loop, arguments, error, text):
    with pytest.raises(error, match=text):
        await loop.create_datagram_endpoint(Datagrams, **arguments)


@pytest.mark.skip_on(uvloop="its methods cannot be replaced")
async def test_the_error_of_the_first_address_is_raised(loop, monkeypatch):
    with raw_socket() as other:
        taken = other.getsockname()

        async def getaddrinfo(*_args, **_options):
            infos = [("127.0.0.1", taken[1]), ("192.0.2.1", 9)]
            return [
                (socket.AF_INET, socket.SOCK_DGRAM, proto, "", info) for proto, info in zip((17, 0), infos, strict=True)
            ]

        monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
        with pytest.raises(OSError) as caught:
            await loop.create_datagram_endpoint(Datagrams, local_addr=("name", taken[1]))
    assert caught.value.errno == errno.EADDRINUSE


class Broken(LookupError):
    pass


@pytest.mark.skip_on(uvloop="its transport stays partly initialized", asyncio="the socket is left to the collector")
async def test_a_factory_that_raises(loop):
    def factory():
        raise Broken

    with pytest.raises(Broken):
        await loop.create_datagram_endpoint(factory, local_addr=ANY)


@pytest.mark.skip_on(uvloop="its transport stays partly initialized")
async def test_cancelled_while_it_is_made(loop):
    made = []

    def factory():
        made.append(Datagrams())
        loop.call_soon(task.cancel)
        return made[0]

    task = loop.create_task(loop.create_datagram_endpoint(factory, local_addr=ANY))
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: made[0].is_lost)
    assert made[0].events == ["made", "lost"]


# ---------------------------------------------------------------- Unix


def paths(folder):
    kinds = [str(folder / "text"), os.fsencode(folder / "bytes"), folder / "pathlike", str(folder / "ü\udcff")]
    return [*kinds, "\0grapeshot-test-ü", b"\0grapeshot-\xff"] if IS_ABSTRACT else kinds


@pytest.mark.skip_on(uvloop="#196: no Unix datagrams")
@pytest.mark.parametrize("kind", range(6 if IS_ABSTRACT else 4))
async def test_unix_addresses(loop, loop_kind, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)  # for short, relative paths: a socket's path can have about a hundred bytes
    path = paths(pathlib.Path())[kind]
    if loop_kind == "asyncio" and not isinstance(path, str):
        pytest.skip("asyncio takes only str")
    _, server, address = await endpoint(loop, local_addr=path, family=socket.AF_UNIX)
    assert address == server.transport.get_extra_info("socket").getsockname()
    with raw_socket(socket.AF_UNIX, "peer") as peer:
        peer.sendto(b"one", address)
        await until(lambda: server.received)
        assert server.received == [(b"one", "peer")]
        server.transport.sendto(b"answer", server.received[0][1])
        assert await received_by(peer) == [b"answer"]
    transport, client, own = await endpoint(loop, remote_addr=path, family=socket.AF_UNIX)
    assert own == ""
    assert transport.get_extra_info("peername") == address
    transport.sendto(b"two")
    await until(lambda: len(server.received) == 2)
    assert server.received[1] == (b"two", None)  # the client's socket has no name
    await finish(client)
    sender, third, _ = await endpoint(loop, local_addr="third", family=socket.AF_UNIX)
    sender.sendto(b"three", address)
    await until(lambda: len(server.received) == 3)
    assert server.received[2] == (b"three", "third")
    await finish(third, server)


@pytest.mark.skip_on(uvloop="#196: no Unix datagrams")
async def test_no_answer_to_a_sender_without_a_name(loop, reported, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    transport, server, _ = await endpoint(loop, local_addr="server", family=socket.AF_UNIX)
    with raw_socket(socket.AF_UNIX, None) as peer:
        peer.sendto(b"hello", "server")
        await until(lambda: server.received)
    transport.sendto(b"answer", server.received[0][1])
    await until(lambda: server.is_lost)
    assert server.errors == []
    assert [type(exception) for exception in reported.exceptions] == [TypeError]


@pytest.mark.skip_on(uvloop="#196: no Unix datagrams")
async def test_a_stale_socket_file_is_removed(loop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        _, protocol, _ = await endpoint(loop, local_addr="stale", family=socket.AF_UNIX)
        await finish(protocol)
        assert stat.S_ISSOCK(os.stat("stale").st_mode)  # closing does not remove the file
    pathlib.Path("file").touch()
    with pytest.raises(OSError, match="Address already in use"):
        await loop.create_datagram_endpoint(Datagrams, local_addr="file", family=socket.AF_UNIX)


@pytest.mark.skip_on(uvloop="#196: no Unix datagrams")
async def test_a_stale_file_that_cannot_be_looked_at(loop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("file").touch()
    with logged() as messages, pytest.raises(NotADirectoryError):
        await loop.create_datagram_endpoint(Datagrams, local_addr="file/socket", family=socket.AF_UNIX)
    assert [message.partition(":")[0] for message in messages] == [
        "Unable to check or remove stale UNIX socket 'file/socket'"
    ]


# ---------------------------------------------------------------- debug


@pytest.mark.xfail_on(uvloop="logs nothing")
async def test_debug_mode_logs_a_new_endpoint(loop):
    loop.set_debug(True)
    loop.slow_callback_duration = 60
    with logged() as messages:
        _, server, address = await endpoint(loop)
        _, client, _ = await endpoint(loop, remote_addr=address)
    told = [message for message in messages if message.startswith("Datagram endpoint")]
    assert [message.partition(": ")[0] for message in told] == [
        f"Datagram endpoint local_addr={ANY!r} remote_addr=None created",
        f"Datagram endpoint remote_addr={address!r} created",
    ]
    await finish(server, client)
