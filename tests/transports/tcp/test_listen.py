"""create_server and the Server object."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import socket
import sys
import weakref

import pytest
from support import CAP_S, HOST, Echo, Peer, Recorder, address_of, has_ipv6, iterations, until

from grapeshot._loop.fixes import SHOWS_WHOLE_ERROR, SKIPS_UNAVAILABLE_ADDRESSES

ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")


class Keeping:
    """A factory that keeps references to its protocols."""

    def __init__(self, make=Recorder):
        self.make = make
        self.made = []

    def __call__(self):
        self.made.append(self.make())
        return self.made[-1]

    async def first(self):
        await until(lambda: self.made and self.made[0].transport is not None)
        return self.made[0]


async def dial(address):
    peer = Peer(socket.create_connection(address[:2], timeout=CAP_S))
    await iterations(1)
    return peer


async def shut(server):
    server.close()
    await server.wait_closed()


async def test_serves(loop, serve):
    server = await serve(Echo, HOST, 0)
    with await dial(address_of(server)) as peer:
        await peer.send(b"hello")
        assert await peer.read_exactly(5) == b"hello"
    await shut(server)


async def test_the_transport_of_an_accepted_connection(loop, serve):
    factory = Keeping()
    server = await serve(factory, HOST, 0)
    with await dial(address_of(server)) as peer:
        protocol = await factory.first()
        transport = protocol.transport
        assert transport.get_extra_info("peername") == peer.sock.getsockname()
        assert transport.get_extra_info("sockname") == peer.sock.getpeername()
        sock = transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
        transport.close()
        assert await peer.read_to_end() == b""
    await until(lambda: protocol.is_lost)
    await shut(server)


async def test_properties(loop, serve):
    server = await serve(Recorder, HOST, 0)
    assert server.is_serving()
    assert server.get_loop() is loop
    assert len(server.sockets) == 1
    assert server.sockets[0].family == socket.AF_INET
    await shut(server)
    assert not server.is_serving()
    assert not server.sockets


@pytest.mark.xfail_on(uvloop="has its own Server and socket types")
async def test_types(loop, serve):
    server = await serve(Recorder, HOST, 0)
    assert isinstance(server, asyncio.AbstractServer)
    assert isinstance(server.sockets[0], asyncio.trsock.TransportSocket)
    assert repr(server).startswith("<Server sockets=")
    await shut(server)


async def test_start_serving_later(loop, serve):
    server = await serve(Echo, HOST, 0, start_serving=False)
    assert not server.is_serving()
    with socket.socket() as early, pytest.raises(ConnectionRefusedError):
        early.connect(address_of(server))
    await server.start_serving()
    await server.start_serving()
    assert server.is_serving()
    with await dial(address_of(server)) as peer:
        await peer.send(b"x")
        assert await peer.read_exactly(1) == b"x"
    await shut(server)


async def test_serve_forever(loop, serve):
    server = await serve(Echo, HOST, 0, start_serving=False)
    task = loop.create_task(server.serve_forever())
    await until(server.is_serving)
    with pytest.raises(RuntimeError, match="already being awaited"):
        await server.serve_forever()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not server.is_serving()
    with pytest.raises(RuntimeError, match="is closed"):
        await server.serve_forever()


@pytest.mark.skip_on(uvloop="waits forever")
async def test_close_ends_serve_forever(loop, serve):
    server = await serve(Echo, HOST, 0)
    task = loop.create_task(server.serve_forever())
    await iterations(3)
    server.close()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_async_with(loop, serve):
    async with await serve(Echo, HOST, 0) as server:
        assert server.is_serving()
    assert not server.is_serving()


async def test_close_twice_and_wait_closed_again(loop, serve):
    server = await serve(Echo, HOST, 0)
    server.close()
    server.close()
    await server.wait_closed()
    await server.wait_closed()


async def test_close_does_not_close_clients(loop, serve):
    factory = Keeping(Echo)
    server = await serve(factory, HOST, 0)
    with await dial(address_of(server)) as peer:
        await peer.send(b"a")
        assert await peer.read_exactly(1) == b"a"
        address = address_of(server)
        server.close()
        await iterations(3)
        await peer.send(b"b")
        assert await peer.read_exactly(1) == b"b"
        with socket.socket() as late, pytest.raises(ConnectionRefusedError):
            late.connect(address)
    await until(lambda: factory.made[0].transport is None)
    await server.wait_closed()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="wait_closed really waits from 3.12 on")
@pytest.mark.skip_on(uvloop="wait_closed() returns at other times")
async def test_wait_closed_waits_for_the_connections(loop, serve):
    factory = Keeping()
    server = await serve(factory, HOST, 0)
    with await dial(address_of(server)):
        protocol = await factory.first()
        server.close()
        waiting = loop.create_task(server.wait_closed())
        await iterations(5)
        assert not waiting.done()
        protocol.transport.close()
        await waiting
        assert protocol.is_lost


@pytest.mark.skipif(sys.version_info < (3, 12), reason="wait_closed really waits from 3.12 on")
async def test_wait_closed_of_an_open_server_waits(loop, serve):
    server = await serve(Recorder, HOST, 0)
    waiting = loop.create_task(server.wait_closed())
    await iterations(5)
    assert not waiting.done()
    server.close()
    await waiting


@pytest.mark.skipif(sys.version_info < (3, 13), reason="new in 3.13")
@pytest.mark.skip_on(uvloop="#683: not there")
async def test_close_clients(loop, serve):
    factory = Keeping(Echo)
    server = await serve(factory, HOST, 0)
    peers = [await dial(address_of(server)) for _ in range(3)]
    for peer in peers:
        await peer.send(b"x")
        await peer.read_exactly(1)
    for protocol in factory.made:
        protocol.transport.write(b"last words")
    server.close()
    server.close_clients()
    for peer in peers:
        assert await peer.read_to_end() == b"last words"
        peer.close()
    await server.wait_closed()


@pytest.mark.skipif(sys.version_info < (3, 13), reason="new in 3.13")
@pytest.mark.skip_on(uvloop="#683: not there")
async def test_abort_clients(loop, serve):
    factory = Keeping()
    server = await serve(factory, HOST, 0)
    with await dial(address_of(server)) as peer:
        protocol = await factory.first()
        protocol.transport.write(bytes(64 << 20))
        assert protocol.transport.get_write_buffer_size() > 0
        server.close()
        server.abort_clients()
        await server.wait_closed()
        assert protocol.is_lost
        assert len(await peer.read_to_end()) < 64 << 20


async def test_several_hosts(loop, serve):
    server = await serve(Echo, [HOST, "127.0.0.2"], 0)
    names = sorted(sock.getsockname()[0] for sock in server.sockets)
    assert names == [HOST, "127.0.0.2"]
    for sock in server.sockets:
        with await dial(sock.getsockname()) as peer:
            await peer.send(b"x")
            assert await peer.read_exactly(1) == b"x"
    await shut(server)


@ipv6
@pytest.mark.parametrize("host", [None, "", ["0.0.0.0", "::"]])
async def test_dual_stack(loop, serve, host):
    server = await serve(Echo, host, 0)
    families = {sock.family for sock in server.sockets}
    assert families == {socket.AF_INET, socket.AF_INET6}
    for sock in server.sockets:
        host = "::1" if sock.family == socket.AF_INET6 else HOST
        with await dial((host, sock.getsockname()[1])) as peer:
            await peer.send(b"x")
            assert await peer.read_exactly(1) == b"x"
    await shut(server)


@ipv6
async def test_family(loop, serve):
    server = await serve(Echo, None, 0, family=socket.AF_INET6)
    assert [sock.family for sock in server.sockets] == [socket.AF_INET6]
    assert server.sockets[0].getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) == 1
    await shut(server)


@pytest.mark.skipif(sys.platform != "linux", reason="the default is the same everywhere, but this check needs Linux")
async def test_reuse_address_is_the_default(loop, serve):
    server = await serve(Echo, HOST, 0)
    assert server.sockets[0].getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) == 1
    await shut(server)
    server = await serve(Echo, HOST, 0, reuse_address=False)
    assert server.sockets[0].getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) == 0
    await shut(server)


async def test_reuse_port(loop, serve):
    first = await serve(Echo, HOST, 0, reuse_port=True)
    assert first.sockets[0].getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT) != 0
    second = await serve(Echo, *address_of(first), reuse_port=True)
    await shut(first)
    await shut(second)


@pytest.mark.skipif(sys.version_info < (3, 13, 1), reason="keep_alive is new in 3.13.1")
@pytest.mark.xfail_on(uvloop="no such argument")
async def test_keep_alive(loop, serve):
    factory = Keeping()
    server = await serve(factory, HOST, 0, keep_alive=True)
    with await dial(address_of(server)):
        protocol = await factory.first()
        sock = protocol.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) != 0
        protocol.transport.close()
        await until(lambda: protocol.is_lost)
    await shut(server)


async def test_backlog(loop, serve):
    server = await serve(Echo, HOST, 0, backlog=1)
    for _ in range(10):
        with await dial(address_of(server)) as peer:
            await peer.send(b"x")
            assert await peer.read_exactly(1) == b"x"
    await shut(server)


async def test_a_given_socket(loop, serve):
    sock = socket.socket()
    sock.bind((HOST, 0))
    server = await serve(Echo, sock=sock)
    assert server.sockets[0].getsockname() == sock.getsockname()
    with await dial(address_of(server)) as peer:
        await peer.send(b"x")
        assert await peer.read_exactly(1) == b"x"
    await shut(server)
    sock.close()


async def test_port_in_use(loop, serve):
    server = await serve(Echo, HOST, 0)
    host, port = address_of(server)
    with pytest.raises(OSError, match=f"error while attempting to bind on address .*{port}") as caught:
        await serve(Echo, host, port)
    assert caught.value.errno == errno.EADDRINUSE
    await shut(server)


@pytest.mark.xfail_on(uvloop="another text, and it does not skip the address")
async def test_an_address_that_this_machine_does_not_have(loop, serve):
    missing = "192.0.2.1"
    if SKIPS_UNAVAILABLE_ADDRESSES:
        with pytest.raises(OSError, match=r"^could not bind on any address out of \[\('192\.0\.2\.1', 0\)\]$"):
            await serve(Echo, missing, 0)
        server = await serve(Echo, [missing, HOST], 0)
        assert [sock.getsockname()[0] for sock in server.sockets] == [HOST]
        await shut(server)
    else:
        text = (
            f"[errno {errno.EADDRNOTAVAIL}] cannot assign requested address"
            if SHOWS_WHOLE_ERROR
            else "cannot assign requested address"
        )
        for hosts in (missing, [missing, HOST]):
            with pytest.raises(OSError) as caught:
                await serve(Echo, hosts, 0)
            assert caught.value.errno == errno.EADDRNOTAVAIL
            assert caught.value.strerror == f"error while attempting to bind on address {(missing, 0)!r}: {text}"


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "Neither host/port nor sock were specified"),
        ({"host": HOST, "port": 0, "sock": True}, "host/port and sock can not be specified at the same time"),
        ({"host": HOST, "port": 0, "ssl_handshake_timeout": 1}, "ssl_handshake_timeout is only meaningful with ssl"),
        ({"host": HOST, "port": 0, "ssl_shutdown_timeout": 1}, "ssl_shutdown_timeout is only meaningful with ssl"),
    ],
)
async def test_arguments_that_do_not_go_together(loop, serve, kwargs, message):
    with socket.socket() as sock:
        if "sock" in kwargs:
            kwargs = {**kwargs, "sock": sock}
        with pytest.raises(ValueError, match=message):
            await serve(Echo, **kwargs)


async def test_other_wrong_arguments(loop, serve):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        with pytest.raises(ValueError, match="A Stream Socket was expected"):
            await serve(Echo, sock=sock)
    with pytest.raises(TypeError):
        await serve(Echo, HOST, 0, ssl=True)
    with pytest.raises(OSError):
        await serve(Echo, "192.0.2.1", 0)


async def test_one_bad_address_closes_the_others(loop, serve):
    server = await serve(Echo, HOST, 0)
    port = address_of(server)[1]
    with pytest.raises(OSError):
        await serve(Echo, ["127.0.0.2", HOST], port)
    with socket.socket() as sock:
        sock.bind(("127.0.0.2", port))
    await shut(server)


async def test_many_connections_at_once(loop, serve):
    factory = Keeping(Echo)
    server = await serve(factory, HOST, 0)
    peers = [await dial(address_of(server)) for _ in range(200)]
    for number, peer in enumerate(peers):
        await peer.send(b"%03d" % number)
    for number, peer in enumerate(peers):
        assert await peer.read_exactly(3) == b"%03d" % number
        peer.close()
    await until(lambda: all(protocol.transport is None for protocol in factory.made))
    assert len(factory.made) == 200
    await shut(server)


async def test_clients_see_the_end_of_transports_that_are_kept(loop, serve):
    """`close()` closes the descriptor, even if something still refers to the transport."""

    class Leaves(Recorder):
        def data_received(self, data):
            self.transport.write(data)
            self.transport.close()

    factory = Keeping(Leaves)
    server = await serve(factory, HOST, 0)
    peers = [await dial(address_of(server)) for _ in range(150)]
    await until(lambda: len(factory.made) == 150 and all(protocol.transport for protocol in factory.made))
    kept = [(protocol.transport, protocol.transport.get_extra_info("socket")) for protocol in factory.made]
    for peer in peers:
        await peer.send(b"bye")
    for peer in peers:
        with peer:
            assert await peer.read_to_end() == b"bye"
    await until(lambda: all(protocol.is_lost for protocol in factory.made))
    assert [sock.fileno() for _, sock in kept] == [-1] * 150
    await shut(server)


async def test_close_with_connections_in_the_backlog(loop, serve):
    made = []

    def factory():
        made.append(Recorder())
        return made[-1]

    server = await serve(factory, HOST, 0, start_serving=False)
    await server.start_serving()
    peers = [socket.create_connection(address_of(server)) for _ in range(5)]
    server.close()
    assert not server.sockets
    await iterations(3)
    assert not made
    for peer in peers:
        with peer, contextlib.suppress(ConnectionResetError):
            peer.settimeout(10)
            assert peer.recv(1) == b""
    await server.wait_closed()


async def test_close_inside_connection_made(loop, serve):
    """When a callback closes the server, the batch of accepts ends."""
    made = []

    class Closing(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            made.append(self)
            server.close()

    server = await serve(Closing, HOST, 0)
    peers = [socket.create_connection(address_of(server)) for _ in range(5)]
    await until(lambda: made)
    await iterations(5)
    for protocol in made:
        if protocol.transport is not None:
            protocol.transport.close()
    for peer in peers:
        peer.close()
    await until(lambda: all(protocol.is_lost for protocol in made))


async def test_the_server_is_collected(loop):
    import gc

    class Factory:
        def __call__(self):
            return Echo()

    factory = Factory()
    server = await loop.create_server(factory, HOST, 0)
    with await dial(address_of(server)) as peer:
        await peer.send(b"x")
        await peer.read_exactly(1)
    await shut(server)
    await iterations(5)
    reference = weakref.ref(factory)
    del factory, server
    gc.collect()
    assert reference() is None


def test_a_loop_closed_before_its_server_and_connection_are_freed(new_loop, quiet):
    """Nothing crashes, and all descriptors are closed."""
    import gc

    loop = new_loop()
    factory = Keeping()

    async def main():
        server = await loop.create_server(factory, HOST, 0)
        peer = await dial(address_of(server))
        protocol = await factory.first()
        protocol.transport.write(b"x" * 100)
        return server, peer, protocol

    server, peer, protocol = loop.run_until_complete(main())
    server.close()
    protocol.transport.abort()
    loop.run_until_complete(asyncio.sleep(0.001))
    loop.close()
    peer.close()
    del server, protocol
    factory.made.clear()
    gc.collect()


@pytest.mark.xfail_on(uvloop="all connections share one context")
async def test_connections_run_in_copies_of_the_servers_context(loop):
    """The factory and the protocol see the server's context, and change only their own copy of it."""
    variable = contextvars.ContextVar("variable", default="default")
    variable.set("at the server")
    seen = []

    class Noting(asyncio.Protocol):
        def __init__(self):
            seen.append(("factory", variable.get()))

        def connection_made(self, transport):
            self.transport = transport
            seen.append(("made", variable.get()))
            variable.set("changed")

        def data_received(self, data):
            seen.append(("data", variable.get()))
            self.transport.close()

        def connection_lost(self, exc):
            seen.append(("lost", variable.get()))

    server = await loop.create_server(Noting, HOST, 0)
    variable.set("after the server")
    for _ in range(2):
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"x")
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
    await until(lambda: len(seen) == 8)
    server.close()
    assert {where: value for where, value in seen if where != "factory"}.keys() == {"made", "data", "lost"}
    assert [value for where, value in seen if where in ("factory", "made")] == ["at the server"] * 4
    assert variable.get() == "after the server"
