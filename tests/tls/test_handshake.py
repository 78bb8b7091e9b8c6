"""The TLS handshake: what is negotiated, what is refused, and how failed connections end."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import socket
import ssl

import pytest
from support import HOST, Echo, Peer, Recorder, iterations, raw_pair, until
from tls.contexts import TlsPeer, authority, certificate, client_context, server_context
from tls.endpoints import SIDES, begin, client_of, connected

TLS12, TLS13 = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3


async def end(transport, protocol, peer):
    transport.abort()
    peer.close()
    await until(lambda: protocol.is_lost, "connection_lost")


async def fails(connecting, expected, match=None):
    """Return the exception that ends the task, without its traceback, which would keep objects alive."""
    with pytest.raises(expected, match=match) as caught:
        await connecting
    exception = caught.value
    exception.__traceback__ = None
    return exception


# ---------------------------------------------------------------- handshakes that are refused


async def refused(loop, expected, match=None, **options):
    """Check that the handshake of the loop's side fails. Return its exception and the exception of the other side."""
    made = []
    connecting, peer = begin(loop, lambda: made.append(Recorder()) or made[-1], **options)
    handshake = asyncio.ensure_future(peer.handshake())
    exception = await fails(connecting, expected, match)
    await asyncio.wait([handshake])
    seen = handshake.exception()
    peer.close()
    await iterations(3)
    assert made[0].events == []
    return exception, seen


async def test_wrong_host_name(loop):
    exception, _ = await refused(
        loop, ssl.SSLCertVerificationError, "Hostname mismatch", server_hostname="somebody.else.test"
    )
    assert exception.verify_code == 62


@pytest.mark.xfail_on(asyncio="closes without an alert", uvloop="closes without an alert")
async def test_the_peer_is_told_why(loop):
    _, seen = await refused(loop, ssl.SSLCertVerificationError, theirs=server_context(version=TLS12), ours=untrusting())
    assert isinstance(seen, ssl.SSLError)
    assert "unknown ca" in str(seen).lower()


def untrusting():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.maximum_version = TLS12
    return context


async def test_unknown_authority(loop):
    await refused(loop, ssl.SSLCertVerificationError, ours=untrusting())


async def test_no_common_version(loop):
    await refused(loop, ssl.SSLError, ours=client_context(TLS12), theirs=server_context(version=TLS13))


async def test_client_certificate(loop, serve):
    context = server_context()
    context.verify_mode = ssl.CERT_REQUIRED
    authority().configure_trust(context)
    seen = []

    class Looks(Echo):
        def connection_made(self, transport):
            super().connection_made(transport)
            seen.append(transport.get_extra_info("peercert")["subjectAltName"])

    server = await serve(Looks, HOST, 0, ssl=context)
    with_certificate = client_context()
    certificate("somebody.test").configure_cert(with_certificate)
    with await client_of(server, with_certificate) as peer:
        await peer.write(b"ping")
        assert await peer.read_exactly(4) == b"ping"
        await peer.unwrap()
    # In TLS 1.3, the client's handshake ends before the server can refuse a client without a certificate.
    with await client_of(server) as peer, pytest.raises((ssl.SSLError, ConnectionResetError)):
        await peer.read()
    assert seen == [(("DNS", "somebody.test"),)]


GARBAGE = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\xff\xff" + b"x" * 100,
    b"\x00" * 20_000,
    b"\x15\x03\x03\x00\x02\x02\x28",
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=["http", "too long", "zeroes", "alert"])
async def test_garbage_instead_of_a_handshake(loop, serve, garbage):
    """The connection of a client that sends garbage is closed; the server continues."""
    made = []
    server = await serve(lambda: made.append(Recorder()) or made[-1], HOST, 0, ssl=server_context())
    with Peer(socket.create_connection(server.sockets[0].getsockname())) as peer:
        await peer.send(garbage)
        peer.shutdown()
        assert await peer.is_ended()
    await until(lambda: made, "the factory")
    await iterations(3)
    assert made[0].events == []
    with await client_of(server) as peer:
        await peer.unwrap()
    await until(lambda: made[1].is_lost, "connection_lost")


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("garbage", [GARBAGE[0], b"\x17\x03\x03\x00\x20" + b"x" * 32], ids=["http", "record"])
async def test_garbage_after_the_handshake(loop, side, garbage):
    transport, protocol, peer = await connected(loop, side=side)
    await peer.write(b"before")
    await until(lambda: protocol.data == b"before", "the data before")
    await peer.peer.send(garbage)
    await until(lambda: protocol.is_lost, "connection_lost")
    assert isinstance(protocol.lost_with[0], ssl.SSLError)
    protocol.lost_with.clear()
    peer.close()


# ---------------------------------------------------------------- handshakes that do not end


@pytest.mark.parametrize("side", SIDES)
async def test_peer_hangs_up(loop, side):
    connecting, peer = begin(loop, side=side)
    if side == "client":
        await peer.peer.recv()
    peer.peer.shutdown()
    await fails(connecting, ConnectionResetError)
    peer.close()


@pytest.mark.parametrize("side", SIDES)
async def test_peer_resets(loop, side):
    connecting, peer = begin(loop, side=side)
    await iterations(3)
    peer.peer.reset()
    await fails(connecting, ConnectionResetError)


@pytest.mark.parametrize("side", SIDES)
async def test_time_limit(loop, side):
    connecting, peer = begin(loop, side=side, ssl_handshake_timeout=0.05)
    text = r"SSL handshake is taking longer than 0.05 seconds: aborting the connection"
    await fails(connecting, ConnectionAbortedError, text)
    assert await peer.peer.is_ended()
    peer.close()


async def test_time_limit_of_a_server(loop, serve):
    made = []
    server = await serve(
        lambda: made.append(Recorder()) or made[-1], HOST, 0, ssl=server_context(), ssl_handshake_timeout=0.05
    )
    with Peer(socket.create_connection(server.sockets[0].getsockname())) as peer:
        assert await peer.is_ended()
    assert made[0].events == []


@pytest.mark.parametrize("name", ["ssl_handshake_timeout", "ssl_shutdown_timeout"])
@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.leaks_on(asyncio="does not close the socket", uvloop="does not close the socket")
async def test_wrong_time_limits(loop, name, value, quiet):
    connecting, peer = begin(loop, **{name: value})
    await fails(connecting, ValueError, f"{name} should be a positive number, got {value}")
    peer.close()


@pytest.mark.parametrize("side", SIDES)
async def test_cancelled(loop, side):
    made = []
    connecting, peer = begin(loop, lambda: made.append(Recorder()) or made[-1], side)
    if side == "client":
        await peer.peer.recv()
    else:
        await until(lambda: made, "the factory")
        await iterations(3)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    assert await peer.peer.is_ended()
    assert made[0].events == []
    peer.close()


async def test_cancelled_before_it_begins(loop):
    """The task is cancelled before the TCP transport under the TLS transport calls connection_made."""
    made = []
    connecting, peer = begin(loop, lambda: made.append(Recorder()) or made[-1])
    await asyncio.sleep(0)
    assert made
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    assert await peer.peer.is_ended()
    assert made[0].events == []
    peer.close()


@pytest.mark.parametrize("side", SIDES)
async def test_the_peers_handshake_in_single_bytes(loop, side):
    """The handshake succeeds although the peer's messages arrive byte by byte."""
    connecting, peer = begin(loop, side=side)
    send = peer.peer.send

    async def drip(data):
        for at in range(len(data)):
            await send(data[at : at + 1])
            await asyncio.sleep(0)

    peer.peer.send = drip
    handshake = asyncio.ensure_future(peer.handshake())
    transport, _ = await connecting
    await handshake
    del peer.peer.send
    protocol = transport.get_protocol()
    await peer.write(b"data")
    await until(lambda: protocol.data == b"data", "the data")
    await end(transport, protocol, peer)


async def test_data_after_the_handshake_in_one_piece(loop):
    """Data that arrives together with the client's last handshake message is delivered."""
    connecting, peer = begin(loop, side="server")
    send, held = peer.peer.send, []

    async def hold(data):
        if peer.object.version() and len(held) == 0 and peer.incoming_seen:
            held.append(data)
        else:
            await send(data)

    peer.incoming_seen = False
    receive = peer.peer.recv

    async def note(limit=65536):
        data = await receive(limit)
        peer.incoming_seen = True
        return data

    peer.peer.send, peer.peer.recv = hold, note
    await peer.handshake()
    assert len(held) == 1
    await send(held[0] + peer.seal(b"first") + peer.seal(b"second"))
    transport, _ = await connecting
    del peer.peer.send, peer.peer.recv
    protocol = transport.get_protocol()
    await until(lambda: protocol.data == b"firstsecond", "the data behind the handshake")
    await end(transport, protocol, peer)


async def test_connection_made_raises(loop, reported):
    class Fails(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            raise RuntimeError("in connection_made")

    made = []
    connecting, peer = begin(loop, lambda: made.append(Fails()) or made[-1])
    handshake = asyncio.ensure_future(peer.handshake())
    await fails(connecting, RuntimeError, "in connection_made")
    await asyncio.gather(handshake, return_exceptions=True)
    del handshake
    assert await peer.peer.is_ended()
    peer.close()
    await until(lambda: made[0].is_lost, "connection_lost")
    assert [str(exception) for exception in reported.exceptions] == ["in connection_made"]
    assert str(made[0].lost_with[0]) == "in connection_made"
    made.clear()
    reported.clear()


@pytest.mark.leaks_on(asyncio="does not close the socket", uvloop="does not close the socket")
async def test_factory_raises(loop):
    def fail():
        raise RuntimeError("in the factory")

    connecting, peer = begin(loop, fail)
    await fails(connecting, RuntimeError, "in the factory")
    peer.close()


@pytest.mark.skip_on(uvloop="gives no message")
async def test_debug_mode_reports_failed_clients(loop, serve, reported, caplog):
    loop.set_debug(True)
    caplog.set_level(logging.DEBUG, logger="asyncio")
    server = await serve(Recorder, HOST, 0, ssl=server_context())
    with Peer(socket.create_connection(server.sockets[0].getsockname())) as peer:
        await peer.send(b"GET / HTTP/1.1\r\n\r\n")
        assert await peer.is_ended()
    await until(lambda: reported, "the report")
    assert reported.messages == ["Error on transport creation for incoming connection"]
    assert isinstance(reported.exceptions[0], ssl.SSLError)
    reported.clear()
    caplog.clear()
    loop.set_debug(False)


async def test_context_of_callbacks(loop):
    """Callbacks run in the context in which the connection was made."""
    variable = contextvars.ContextVar("variable", default="unset")
    seen = []

    class Looks(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            seen.append(variable.get())

        def data_received(self, data):
            super().data_received(data)
            seen.append(variable.get())

    variable.set("set")
    transport, protocol, peer = await connected(loop, Looks)
    variable.set("changed")
    await peer.write(b"x")
    await until(lambda: protocol.data, "the data")
    await end(transport, protocol, peer)
    assert seen == ["set"] * 2


@pytest.mark.parametrize("count", [40])
async def test_many_handshakes_at_once_some_fail(loop, serve, count):
    made = []
    server = await serve(lambda: made.append(Recorder()) or made[-1], HOST, 0, ssl=server_context())
    address = server.sockets[0].getsockname()

    async def one(number):
        kind = number % 4
        if kind == 0:
            with await client_of(server) as peer:
                await peer.unwrap()
        elif kind == 1:
            with Peer(socket.create_connection(address)) as plain:
                await plain.send(b"hello?\r\n")
                await plain.is_ended()
        elif kind == 2:
            Peer(socket.create_connection(address)).reset()
        else:
            untrusting_client = functools.partial(client_of, server, untrusting())
            with pytest.raises(ssl.SSLError):
                await untrusting_client()

    await asyncio.gather(*map(one, range(count)))
    await until(lambda: sum(protocol.is_lost for protocol in made) >= count // 4, "the ends of the good ones")
    assert sum("made" in protocol.events for protocol in made) >= count // 4
    assert all(protocol.events in ([], ["made", "eof", "lost"], ["made", "lost"]) for protocol in made)


@pytest.mark.leaks_on(asyncio="does not close the socket")
@pytest.mark.skip_on(uvloop="also reports the error to the exception handler")
async def test_wrap_bio_refuses(loop):
    """create_connection raises the error that the context's `wrap_bio` has raised, and closes the socket."""
    connecting, peer = begin(loop, server_hostname="x" * 300)
    await fails(connecting, ValueError)
    peer.close()


async def test_peer_is_another_engine(loop):
    """Two TlsPeers talk to each other without a loop's TLS, which shows that TlsPeer works."""
    one, other = (Peer(sock) for sock in raw_pair())
    left, right = TlsPeer(one, client_context()), TlsPeer(other, server_context(), server_side=True)
    with left, right:
        await asyncio.gather(left.handshake(), right.handshake())
        await left.write(b"hello")
        assert await right.read_exactly(5) == b"hello"
