"""start_tls for clients and servers: data that arrived before the call, several kinds of transports, and failures."""

from __future__ import annotations

import asyncio
import contextvars
import socket
import ssl
import sys

import pytest
from support import HOST, Echo, Peer, Recorder, iterations, raw_pair, until
from tls.contexts import HOSTNAME, TlsPeer, client_context, server_context
from tls.endpoints import SIDES, Carrier, peer_of


def options(side):
    return {"server_side": True} if side == "server" else {"server_hostname": HOSTNAME}


def context(side):
    return server_context() if side == "server" else client_context()


async def plain(loop, factory=Recorder):
    sock, other = raw_pair()
    sock.setblocking(False)
    transport, _ = await loop.connect_accepted_socket(factory, sock)
    return transport, transport.get_protocol(), other


async def upgraded(loop, side, factory=Recorder):
    transport, protocol, other = await plain(loop, factory)
    peer = peer_of(Peer(other), side)
    handshake = asyncio.ensure_future(peer.handshake())
    above = await loop.start_tls(transport, protocol, context(side), **options(side))
    await handshake
    return transport, above, protocol, peer


@pytest.mark.parametrize("side", SIDES)
async def test_upgrade(loop, side):
    transport, above, protocol, peer = await upgraded(loop, side)
    assert above is not transport
    assert above.get_protocol() is protocol
    assert above.get_extra_info("ssl_object").version() == "TLSv1.3"
    assert above.get_extra_info("socket").fileno() == transport.get_extra_info("socket").fileno()
    await peer.write(b"ping")
    await until(lambda: protocol.data == b"ping", "the data")
    above.write(b"pong" * 10_000)
    assert await peer.read_exactly(40_000) == b"pong" * 10_000
    above.close()
    assert await peer.read() == b""
    await peer.unwrap()
    await until(lambda: protocol.is_lost, "connection_lost")
    assert protocol.events == ["made", "data", "eof", "lost"] or protocol.events == ["made", "data", "lost"]
    assert protocol.lost_with == [None]
    peer.close()


async def test_streams_both_sides(loop):
    async def handle(reader, writer):
        assert await reader.readline() == b"STARTTLS\n"
        writer.write(b"OK\n")
        await writer.start_tls(server_context())
        writer.write((await reader.readline()).upper())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, HOST, 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"STARTTLS\n")
    assert await reader.readline() == b"OK\n"
    await writer.start_tls(client_context(), server_hostname=HOSTNAME)
    assert writer.get_extra_info("ssl_object") is not None
    writer.write(b"hello\n")
    assert await reader.readline() == b"HELLO\n"
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()
    server.close()
    await server.wait_closed()


@pytest.mark.skip_on(uvloop="loses the data and waits forever")
@pytest.mark.skip_on(asyncio="loses the data on this version", when=sys.version_info < (3, 13, 12))
async def test_the_client_does_not_wait_for_the_answer(loop):
    """The client's first handshake message is already in the server's StreamReader when start_tls() is called."""
    done = loop.create_future()

    async def handle(reader, writer):
        assert await reader.readline() == b"STARTTLS\n"
        while not reader._buffer:  # until the handshake message has arrived
            await asyncio.sleep(0)
        await writer.start_tls(server_context())
        done.set_result(await reader.readline())
        writer.close()

    server = await asyncio.start_server(handle, HOST, 0)
    with TlsPeer(Peer(socket.create_connection(server.sockets[0].getsockname())), client_context()) as peer:
        try:
            peer.object.do_handshake()
        except ssl.SSLWantReadError:
            pass
        await peer.peer.send(b"STARTTLS\n" + peer.outgoing.read())
        await peer.handshake()
        await peer.write(b"secret\n")
        assert await done == b"secret\n"
        assert await peer.read() == b""
        await peer.unwrap()
    server.close()
    await server.wait_closed()


@pytest.mark.skip_on(asyncio="delivers before start_tls() returns")
async def test_the_first_data_comes_with_the_end_of_the_handshake(loop, serve):
    """connection_made() starts a task that calls start_tls(). The task gets the new transport before data_received() is
    called.
    """
    made = []

    class Answers(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            made.append(self)
            self.upgrade = asyncio.ensure_future(self.start(transport))

        async def start(self, transport):
            self.transport = await loop.start_tls(transport, self, server_context(), server_side=True)

        def data_received(self, data):
            super().data_received(data)
            self.transport.write(data.upper())

    server = await serve(Answers, HOST, 0)
    with TlsPeer(Peer(socket.create_connection(server.sockets[0].getsockname())), client_context()) as peer:
        await until(lambda: made and made[0].transport.get_protocol() is not made[0], "start_tls()")
        while True:
            try:
                peer.object.do_handshake()
                break
            except ssl.SSLWantReadError:
                await peer.flush()
                peer.incoming.write(await peer.peer.recv())
        peer.object.write(b"first")
        await peer.flush()  # sends the end of the handshake and the data together
        assert await peer.read_exactly(5) == b"FIRST"
        await made[0].upgrade
        await peer.unwrap()
        await until(lambda: made[0].is_lost, "connection_lost")
    assert made[0].events == ["made", "data", "eof", "lost"]
    del made[0].upgrade


@pytest.mark.xfail_on(asyncio="runs callbacks in the context of resume_reading()", when=sys.version_info < (3, 15))
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("side", SIDES)
async def test_contexts(loop, side, layers):
    """All callbacks run in the context of the connection, not in that of start_tls()."""
    variable = contextvars.ContextVar("variable", default="unset")
    seen = []

    class Noting(Recorder):
        def _note(self, event):
            seen.append((event, variable.get()))

    variable.set("connection")
    transport, protocol, other = await plain(loop, Noting)
    raw, above = Peer(other), transport
    peers = []
    for layer in range(layers):
        variable.set(f"start_tls {layer}")
        raw = peer_of(raw, side)
        handshake = asyncio.ensure_future(raw.handshake())
        above = await loop.start_tls(above, protocol, context(side), **options(side))
        await handshake
        peers.append(raw)
        raw = Carrier(raw)
    variable.set("later")
    await peers[-1].write(b"x" * 10_000)
    await until(lambda: len(protocol.data) == 10_000, "the data")
    above.pause_reading()
    above.resume_reading()
    await peers[-1].send_close_notify()
    await until(lambda: protocol.is_lost or not peers[0].peer.is_silent(), "the end")
    peers[0].close()
    await until(lambda: protocol.is_lost, "connection_lost")
    assert dict(seen) == dict.fromkeys(["made", "data", "eof", "lost"], "connection")
    protocol.lost_with.clear()


@pytest.mark.skip_on(asyncio="wants an asyncio.BufferedProtocol")
async def test_to_a_duck_typed_protocol_with_buffers(loop):
    class Duck(asyncio.BaseProtocol):
        def __init__(self):
            self.data = b""
            self.buffer = bytearray(1000)
            self.is_lost = False

        def get_buffer(self, sizehint):
            return memoryview(self.buffer)

        def buffer_updated(self, nbytes):
            self.data += self.buffer[:nbytes]

        def eof_received(self):
            pass

        def connection_lost(self, exc):
            self.is_lost = True

    transport, above, protocol, peer = await upgraded(loop, "client", Duck)
    await peer.write(b"x" * 5000)
    await until(lambda: protocol.data == b"x" * 5000, "the data")
    second = Recorder()
    above.set_protocol(second)
    await peer.write(b"y" * 5000)
    await until(lambda: second.data == b"y" * 5000, "the data")
    above.set_protocol(protocol)
    above.abort()
    await until(lambda: protocol.is_lost, "connection_lost")
    peer.close()


@pytest.mark.parametrize("side", SIDES)
async def test_tls_in_tls(loop, side):
    """A TLS connection inside a TLS connection. The hand-driven peer has two layers, too."""
    _, outer, protocol, peer = await upgraded(loop, side)
    inner_peer = peer_of(Carrier(peer), side)
    handshake = asyncio.ensure_future(inner_peer.handshake())
    inner = await loop.start_tls(outer, protocol, context(side), **options(side))
    await handshake
    assert inner.get_extra_info("ssl_object") is not outer.get_extra_info("ssl_object")
    for size in (1, 50_000):
        await inner_peer.write(b"x" * size)
        protocol.data.clear()
        await until(lambda size=size: len(protocol.data) == size, "the data")
        inner.write(b"y" * size)
        assert await inner_peer.read_exactly(size) == b"y" * size
    inner.close()
    assert await inner_peer.read() == b""
    await inner_peer.unwrap()
    assert await peer.read() == b""
    await peer.unwrap()
    await until(lambda: protocol.is_lost, "connection_lost")
    assert protocol.lost_with == [None]
    peer.close()


class OverEverything(asyncio.Transport):
    """A user's transport that takes its attributes from another transport. It has no `_force_close`."""

    _start_tls_compatible = True

    def __init__(self, lower):
        super().__init__()
        self.lower = lower
        self.calls = []

    def __getattribute__(self, name):
        if name in ("lower", "calls", "_start_tls_compatible", "__class__"):
            return object.__getattribute__(self, name)
        if name == "_force_close":
            raise AttributeError(name)
        object.__getattribute__(self, "calls").append(name)
        return getattr(object.__getattribute__(self, "lower"), name)


@pytest.mark.skip_on(asyncio="wants the private _force_close()", uvloop="accepts only its own transports")
@pytest.mark.parametrize("end", ["close", "abort", "garbage"])
async def test_above_a_transport_of_the_user(loop, end, reported):
    transport, protocol, other = await plain(loop)
    lower = OverEverything(transport)
    peer = peer_of(Peer(other), "server")
    handshake = asyncio.ensure_future(peer.handshake())
    above = await loop.start_tls(lower, protocol, server_context(), server_side=True)
    await handshake
    above.write(b"x" * 50_000)
    assert await peer.read_exactly(50_000) == b"x" * 50_000
    await peer.write(b"y" * 50_000)
    await until(lambda: len(protocol.data) == 50_000, "the data")
    if end == "close":
        above.close()
        assert await peer.read() == b""
        await peer.unwrap()
    elif end == "abort":
        above.abort()
    else:
        await peer.peer.send(b"\x17\x03\x03\x00\x20" + b"x" * 32)
    await until(lambda: protocol.is_lost, "connection_lost")
    assert {"write", "pause_reading", "resume_reading", "set_protocol"} <= set(lower.calls)
    assert not reported
    peer.close()


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("what", ["garbage", "end", "reset", "time"])
async def test_failure(loop, side, what, reported):
    """start_tls raises, the connection is closed, and connection_lost is called once (other loops: at most once)."""
    transport, protocol, other = await plain(loop)
    limit = {"ssl_handshake_timeout": 0.05} if what == "time" else {}
    starting = asyncio.ensure_future(loop.start_tls(transport, protocol, context(side), **options(side), **limit))
    await iterations(3)
    peer = Peer(other)
    if what == "garbage":
        await peer.send(b"no TLS at all\r\n")
    elif what == "end":
        peer.shutdown()
    elif what == "reset":
        peer.reset()
    expected = {"garbage": ssl.SSLError, "time": ConnectionAbortedError}.get(what, ConnectionResetError)
    with pytest.raises(expected) as caught:
        await starting
    caught.value.__traceback__ = None
    await until(lambda: transport.is_closing(), "the transport to close")
    await iterations(5)
    assert protocol.events.count("lost") <= 1
    assert protocol.events[0] == "made"
    if type(loop).__module__.startswith("grapeshot"):
        assert protocol.events[-1] == "lost"
    protocol.lost_with.clear()
    assert not reported
    peer.close()


@pytest.mark.parametrize("end", ["close", "abort"])
@pytest.mark.xfail_on(uvloop="returns a transport")
@pytest.mark.skip_on(asyncio="starts the handshake anyway, and waits for its end", when=sys.version_info < (3, 12))
async def test_of_a_transport_that_was_just_closed(loop, end):
    transport, protocol, other = await plain(loop)
    getattr(transport, end)()
    with other:
        above = await loop.start_tls(transport, protocol, client_context(), server_hostname=HOSTNAME)
        is_none, above = above is None, None
        assert protocol.events == ["made", "lost"]
        assert protocol.lost_with == [None]
    assert is_none


async def test_cancelled(loop):
    transport, protocol, other = await plain(loop)
    starting = asyncio.ensure_future(loop.start_tls(transport, protocol, client_context(), server_hostname=HOSTNAME))
    await iterations(3)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    with Peer(other) as peer:
        assert await peer.is_ended()
    await iterations(3)
    assert protocol.events.count("lost") <= 1


@pytest.mark.parametrize("wrong", [None, True, "context", ssl])
async def test_wants_a_context(loop, wrong):
    transport, protocol, other = await plain(loop)
    with pytest.raises(TypeError, match=r"sslcontext is expected to be an instance of ssl\.SSLContext"):
        await loop.start_tls(transport, protocol, wrong)
    transport.abort()
    other.close()
    await until(lambda: protocol.is_lost, "connection_lost")


async def test_a_transport_that_does_not_support_it_is_refused(loop):
    class Other(asyncio.Transport):
        pass

    with pytest.raises(TypeError, match=r"is not supported by start_tls\(\)"):
        await loop.start_tls(Other(), Recorder(), client_context())


@pytest.mark.parametrize("name", ["ssl_handshake_timeout", "ssl_shutdown_timeout"])
async def test_wrong_time_limits(loop, name):
    transport, protocol, other = await plain(loop)
    with pytest.raises(ValueError, match=f"{name} should be a positive number, got 0"):
        await loop.start_tls(transport, protocol, client_context(), server_hostname=HOSTNAME, **{name: 0})
    transport.abort()
    other.close()
    await until(lambda: protocol.is_lost, "connection_lost")


async def test_between_two_transports_of_one_loop(loop, serve):
    """The transports of the server and of the client are upgraded at the same time."""
    made = []

    class Upgrades(Echo):
        def connection_made(self, transport):
            super().connection_made(transport)
            made.append(self)

        async def upgrade(self):
            self.transport = await loop.start_tls(self.transport, self, server_context(), server_side=True)

    server = await serve(Upgrades, HOST, 0)
    transport, protocol = await loop.create_connection(Recorder, *server.sockets[0].getsockname())
    await until(lambda: made, "the server's side")
    upgrade = asyncio.ensure_future(made[0].upgrade())
    above = await loop.start_tls(transport, protocol, client_context(), server_hostname=HOSTNAME)
    await upgrade
    above.write(b"z" * 200_000)
    await until(lambda: len(protocol.data) == 200_000, "the echo")
    above.close()
    await until(lambda: protocol.is_lost and made[0].transport is None, "both ends")
    made.clear()
