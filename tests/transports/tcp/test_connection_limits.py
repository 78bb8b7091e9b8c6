"""`loop.set_limits()`: at a limit, servers wait before they accept more, and the program gets a LimitError if it tries
to open something.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import sys

import pytest
from support import HOST, Echo, Recorder, address_of, iterations, lowest_free_descriptor, until

import grapeshot

pytestmark = pytest.mark.skip_on(asyncio="has no limits", uvloop="has no limits")


def connect(server):
    """Connect a client. The connection is established, but the server may not have accepted it yet."""
    client = socket.create_connection(address_of(server), 10)
    client.setblocking(False)
    return client


def answer(client):
    """Return the data that has arrived, or None if there is none."""
    try:
        return client.recv(100)
    except BlockingIOError:
        return None


async def echoed(client):
    client.send(b"x")
    await until(lambda: answer(client) == b"x", "the echo")


@pytest.mark.parametrize("how", ["closed by the client", "aborted by the server"])
async def test_a_server_at_the_limit_of_connections_accepts_again_when_one_ends(loop, serve, how, caplog):
    protocols = []

    class Kept(Echo):
        def connection_made(self, transport):
            super().connection_made(transport)
            protocols.append(self)

    server = await serve(Kept, HOST, 0)
    loop.set_limits(connections=2)
    clients = [connect(server) for _ in range(4)]
    try:
        for client in clients[:2]:
            await echoed(client)
        assert loop._open_connections == 2
        clients[2].send(b"x")
        await iterations(20)
        assert answer(clients[2]) is None
        assert len(protocols) == 2
        for index in (0, 1):
            if how == "closed by the client":
                clients[index].close()
            else:
                protocols[index].transport.abort()
            if index == 0:
                await until(lambda: answer(clients[2]) == b"x", "the echo")
            else:
                await echoed(clients[3])
            assert loop._open_connections == 2
        said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(said) == 1, "once, not for each pause"
        assert "has paused accepting: 2 connections of this loop are open" in said[0]
    finally:
        for client in clients:
            client.close()
        protocols.clear()  # caplog keeps the log record, which refers to the server, which refers to the protocols
    await until(lambda: loop._open_connections == 0, "the end of all connections")


async def test_a_higher_limit_lets_the_server_go_on(loop, serve):
    server = await serve(Echo, HOST, 0)
    loop.set_limits(connections=1)
    with connect(server) as first, connect(server) as second:
        await echoed(first)
        second.send(b"x")
        await iterations(20)
        assert answer(second) is None
        loop.set_limits()
        await until(lambda: answer(second) == b"x", "the echo")


async def test_a_server_that_is_closed_while_it_waits_stays_closed(loop, serve):
    server = await serve(Echo, HOST, 0)
    loop.set_limits(connections=1)
    with connect(server) as first, connect(server):
        await echoed(first)
        await iterations(10)
        server.close()
    await until(lambda: loop._open_connections == 0, "the end of the connection")
    assert not server.is_serving()


@pytest.mark.skipif(sys.platform != "linux", reason="only epoll refuses regular files")
async def test_a_server_that_cannot_resume_does_not_keep_other_servers_from_accepting(loop, serve):
    reports = []
    loop.set_exception_handler(lambda loop, context: reports.append(context))
    broken = await serve(Echo, HOST, 0)
    server = await serve(Echo, HOST, 0)
    loop.set_limits(connections=1)
    with connect(broken) as first, connect(server) as second:
        await echoed(first)
        second.send(b"x")
        await iterations(20)
        assert answer(second) is None
        with open(__file__) as file:  # epoll refuses regular files
            os.dup2(file.fileno(), broken.sockets[0].fileno())
        first.close()
        await until(lambda: answer(second) == b"x", "the echo")
    assert [type(report["exception"]) for report in reports] == [PermissionError]
    assert "resume accepting" in reports[0]["message"]
    reports.clear()


async def test_create_connection_at_the_limit_is_refused_before_it_connects(loop, serve):
    server = await serve(Recorder, HOST, 0)
    transport, _ = await loop.create_connection(asyncio.Protocol, *address_of(server))
    await until(lambda: loop._open_connections == 2, "both ends")
    loop.set_limits(connections=2)
    with pytest.raises(grapeshot.LimitError, match="2 connections of this loop are open, and set_limits") as caught:
        await loop.create_connection(asyncio.Protocol, *address_of(server))
    assert caught.value.errno == errno.EMFILE
    assert isinstance(caught.value, OSError)
    assert isinstance(caught.value, RuntimeError)
    await iterations(10)
    assert loop._open_connections == 2, "the server has seen nothing"
    near, far = socket.socketpair()
    with far:
        with pytest.raises(grapeshot.LimitError):
            await loop.create_connection(asyncio.Protocol, sock=near)
        assert near.fileno() == -1, "the socket that was passed in is closed, as after each failure"
    transport.abort()
    await until(lambda: loop._open_connections == 0, "both ends")
    transport, _ = await loop.create_connection(asyncio.Protocol, *address_of(server))
    transport.abort()


async def test_unix_connections_count(loop, tmp_path):
    path = tmp_path / "socket"
    server = await loop.create_unix_server(Echo, path)
    loop.set_limits(connections=2)
    transport, _ = await loop.create_unix_connection(asyncio.Protocol, path)
    await until(lambda: loop._open_connections == 2, "both ends")
    with pytest.raises(grapeshot.LimitError):
        await loop.create_unix_connection(asyncio.Protocol, path)
    transport.abort()
    server.close()
    await until(lambda: loop._open_connections == 0, "both ends")


async def test_a_dropped_connection_is_not_counted_any_more(loop, quiet):
    near, far = socket.socketpair()
    with far:
        # After abort() and del, only the loop refers to the transport, until the loop has called connection_lost.
        with near:
            loop.set_limits(connections=1)
            transport, _ = await loop.create_connection(asyncio.Protocol, sock=near)
            assert loop._open_connections == 1
            transport.abort()
            del transport
        await until(lambda: loop._open_connections == 0, "the end of the connection")


async def test_servers_use_no_descriptors_above_the_limit(loop, serve):
    server = await serve(Echo, HOST, 0)
    clients = [connect(server) for _ in range(3)]
    try:
        loop.set_limits(descriptors=lowest_free_descriptor() + 1)
        await echoed(clients[0])
        clients[1].send(b"x")
        await iterations(20)
        assert answer(clients[1]) is None
        clients[0].close()  # frees two descriptors: the client's and the server's
        await until(lambda: answer(clients[1]) == b"x", "the echo")
    finally:
        for client in clients:
            client.close()


async def test_descriptors_that_are_closed_elsewhere_are_noticed_after_a_while(loop, serve):
    server = await serve(Echo, HOST, 0)
    with connect(server) as client:
        loop.set_limits(descriptors=lowest_free_descriptor() + 1)
        other = os.dup(0)
        client.send(b"x")
        await iterations(20)
        assert answer(client) is None
        os.close(other)
        await until(lambda: answer(client) == b"x", "the echo")


@pytest.mark.parametrize("what", ["connection", "server", "unix server", "datagram endpoint", "subprocess"])
async def test_nothing_is_opened_above_the_limit_of_descriptors(loop, what, tmp_path):
    server = await loop.create_server(Echo, HOST, 0)
    loop.set_limits(descriptors=lowest_free_descriptor())
    free = lowest_free_descriptor()
    with pytest.raises(grapeshot.LimitError, match=f"all descriptors below {free} are open") as caught:
        if what == "connection":
            await loop.create_connection(asyncio.Protocol, *address_of(server))
        elif what == "server":
            await loop.create_server(Echo, HOST, 0)
        elif what == "unix server":
            await loop.create_unix_server(Echo, tmp_path / "socket")
        elif what == "datagram endpoint":
            await loop.create_datagram_endpoint(asyncio.DatagramProtocol, local_addr=(HOST, 0))
        else:
            await loop.subprocess_exec(asyncio.SubprocessProtocol, sys.executable, "-c", "")
    assert caught.value.errno == errno.EMFILE
    assert lowest_free_descriptor() == free
    server.close()


async def test_limits_are_returned_and_checked(loop):
    assert loop.get_limits() == {"connections": None, "descriptors": None, "coros": None}
    loop.set_limits(connections=10, coros=5)
    assert loop.get_limits() == {"connections": 10, "descriptors": None, "coros": 5}
    with pytest.raises(ValueError, match="descriptors must be at least 1"):
        loop.set_limits(descriptors=0)
    with pytest.raises(TypeError):
        loop.set_limits(connections="many")
    assert loop.get_limits() == {"connections": 10, "descriptors": None, "coros": 5}, "nothing has changed"
    loop.set_limits()
    assert set(loop.get_limits().values()) == {None}
