"""Results of a handshake: certificates, names, protocols, sessions, and the values of get_extra_info."""

from __future__ import annotations

import asyncio
import ssl
import sys

import pytest
from support import HOST, BufferedRecorder, Echo, Recorder, iterations, until
from tls.contexts import HOSTNAME, authority, client_context, server_context
from tls.endpoints import SIDES, begin, client_of, connected
from tls.test_handshake import TLS12, TLS13, end, fails


@pytest.mark.skip_on(uvloop="its transports do not derive from asyncio.Transport")
@pytest.mark.parametrize("side", SIDES)
async def test_extra_info(loop, side):
    ours = client_context() if side == "client" else server_context()
    transport, protocol, peer = await connected(loop, side=side, ours=ours)
    assert isinstance(transport, asyncio.Transport)
    assert "ssl" in type(transport).__name__.lower()
    assert transport.get_extra_info("sslcontext") is ours
    ssl_object = transport.get_extra_info("ssl_object")
    assert isinstance(ssl_object, ssl.SSLObject)
    assert ssl_object.version() == "TLSv1.3"
    assert transport.get_extra_info("cipher") == ssl_object.cipher()
    assert transport.get_extra_info("compression") is None
    assert transport.get_extra_info("peername") == peer.peer.sock.getsockname()
    assert transport.get_extra_info("socket").fileno() > 0
    assert transport.get_extra_info("nothing", "default") == "default"
    names = transport.get_extra_info("peercert")
    if side == "client":
        assert names["subjectAltName"] == (("DNS", HOSTNAME),)
    else:
        assert names is None
    await end(transport, protocol, peer)


@pytest.mark.skip_on(uvloop="has other names")
async def test_private_names_that_programs_look_at(loop):
    ours = client_context()
    transport, protocol, peer = await connected(loop, ours=ours)
    inside = transport._ssl_protocol
    assert inside._sslcontext is ours
    assert inside._sslobj is transport.get_extra_info("ssl_object")
    assert inside._app_protocol is protocol
    assert inside._app_transport is transport
    assert inside._transport.get_extra_info("peername") == transport.get_extra_info("peername")
    assert not inside._app_reading_paused
    assert not inside._transport._paused
    transport.pause_reading()
    assert inside._app_reading_paused
    transport.resume_reading()
    inside._transport.pause_reading()
    assert inside._transport._paused
    inside._transport.resume_reading()
    await end(transport, protocol, peer)


async def test_ssl_object_comes_with_the_handshake(loop):
    """The transport has its SSLObject, with the negotiated version, during connection_made."""
    seen = []

    class Looks(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            seen.append(transport.get_extra_info("ssl_object").version())

    transport, protocol, peer = await connected(loop, Looks)
    assert seen == ["TLSv1.3"]
    await end(transport, protocol, peer)


@pytest.mark.parametrize("side", SIDES)
async def test_alpn(loop, side):
    ours = client_context() if side == "client" else server_context()
    theirs = server_context() if side == "client" else client_context()
    ours.set_alpn_protocols(["h2", "http/1.1"])
    theirs.set_alpn_protocols(["http/1.1"])
    transport, protocol, peer = await connected(loop, side=side, ours=ours, theirs=theirs)
    assert transport.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
    assert peer.object.selected_alpn_protocol() == "http/1.1"
    await end(transport, protocol, peer)


async def test_sni_switches_the_context(loop, serve):
    other = server_context("other.test")
    first, asked = server_context(), []

    def switch(ssl_object, name, _context):
        asked.append(name)
        if name == "other.test":
            ssl_object.context = other

    first.sni_callback = switch
    server = await serve(Echo, HOST, 0, ssl=first)
    for name in (HOSTNAME, "other.test"):
        with await client_of(server, server_hostname=name) as peer:
            assert peer.object.getpeercert()["subjectAltName"] == (("DNS", name),)
            await peer.write(b"ping")
            assert await peer.read_exactly(4) == b"ping"
            await peer.unwrap()
    assert asked == [HOSTNAME, "other.test"]


async def test_sni_callback_refuses(loop, serve):
    context = server_context()
    context.sni_callback = lambda *_: ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
    made = []
    server = await serve(lambda: made.append(Recorder()) or made[-1], HOST, 0, ssl=context)
    with pytest.raises((ssl.SSLError, ConnectionResetError)):
        await client_of(server)
    await iterations(3)
    assert [protocol.events for protocol in made] == [[]]


async def test_sni_callback_raises(loop, serve, _contexts):
    context = server_context()

    def fail(*_args):
        raise RuntimeError("in the SNI callback")

    context.sni_callback = fail
    raised = []
    hook, sys.unraisablehook = sys.unraisablehook, lambda args: raised.append(str(args.exc_value))
    try:
        server = await serve(Recorder, HOST, 0, ssl=context)
        with pytest.raises((ssl.SSLError, ConnectionResetError)):
            await client_of(server)
    finally:
        sys.unraisablehook = hook
    assert raised == ["in the SNI callback"]


@pytest.mark.parametrize("version", [TLS12, TLS13])
async def test_session_reuse_by_clients(loop, serve, version):
    """A server of the loop resumes sessions."""
    server = await serve(Echo, HOST, 0, ssl=server_context(version=version))
    context, reused, session = client_context(version), [], None
    for _ in range(3):
        with await client_of(server, context, session=session) as peer:
            await peer.write(b"ping")
            assert await peer.read_exactly(4) == b"ping"  # the tickets of TLS 1.3 arrive before this
            session = peer.object.session
            reused.append(peer.object.session_reused)
            await peer.unwrap()
    assert reused == [False, True, True]


async def test_session_reuse_as_client(loop):
    """A context class may supply the session; `ssl_object.session_reused` shows the result."""

    class Remembering(ssl.SSLContext):
        last = None

        def wrap_bio(self, *args, **kwargs):
            return super().wrap_bio(*args, session=self.last, **kwargs)

    ours = Remembering(ssl.PROTOCOL_TLS_CLIENT)
    authority().configure_trust(ours)
    theirs, reused = server_context(version=TLS12), []
    for _ in range(2):
        transport, protocol, peer = await connected(loop, ours=ours, theirs=theirs)
        ssl_object = transport.get_extra_info("ssl_object")
        reused.append(ssl_object.session_reused)
        ours.last = ssl_object.session
        transport.close()
        with peer:
            assert await peer.read() == b""
            await peer.unwrap()
        await until(lambda: protocol.is_lost, "connection_lost")
    assert reused == [False, True]
    ours.last = None


async def test_own_ssl_object_class(loop):
    """The loop calls the methods of an SSLObject subclass."""
    calls = []

    class Counting(ssl.SSLObject):
        def read(self, *args):
            calls.append("read")
            return super().read(*args)

        def write(self, data):
            calls.append("write")
            return super().write(data)

        def do_handshake(self):
            calls.append("handshake")
            return super().do_handshake()

        def unwrap(self):
            calls.append("unwrap")
            return super().unwrap()

    ours = client_context()
    ours.sslobject_class = Counting
    transport, protocol, peer = await connected(loop, ours=ours)
    assert type(transport.get_extra_info("ssl_object")) is Counting
    transport.write(b"x" * 100_000)
    await peer.read_exactly(100_000)
    await peer.write(b"y" * 50_000)
    await until(lambda: len(protocol.data) == 50_000, "the data")
    transport.close()
    with peer:
        assert await peer.read() == b""
        await peer.unwrap()
    await until(lambda: protocol.is_lost, "connection_lost")
    assert {"read", "write", "handshake", "unwrap"} == set(calls)


class Views(BufferedRecorder):
    def get_buffer(self, sizehint):
        return memoryview(super().get_buffer(sizehint))


@pytest.mark.parametrize("kind", [Recorder, Views])
@pytest.mark.parametrize("count", [1, 3, 20])
async def test_records_that_hold_more_than_their_length(loop, kind, count):
    """With compression in TLS 1.2, the data of a record may be longer than the record itself. Few builds of OpenSSL
    compress, so a subclass of SSLObject imitates this.
    """

    class Expanding(ssl.SSLObject):
        rest = b""

        def read(self, len=1024, buffer=None):
            self.rest = self.rest or super().read(16384) * 50
            taken, self.rest = self.rest[:len], self.rest[len:]
            if buffer is None:
                return taken
            size = memoryview(taken).nbytes
            buffer[:size] = taken
            return size

        def pending(self):
            return memoryview(self.rest).nbytes + super().pending()

    ours = client_context()
    ours.sslobject_class = Expanding
    transport, protocol, peer = await connected(loop, kind, ours=ours)
    messages = [bytes([number]) * 1000 for number in range(count)]
    await peer.peer.send(b"".join(map(peer.seal, messages)))
    expected = b"".join(message * 50 for message in messages)
    await until(lambda: len(protocol.data) == len(expected), "the data")
    assert protocol.data == expected
    transport.abort()
    await until(lambda: protocol.is_lost, "connection_lost")
    peer.close()


async def test_default_context(loop):
    """ssl=True stands for asyncio's default context, which does not trust the test authority."""
    connecting, peer = begin(loop, ours=True)
    handshake = asyncio.ensure_future(peer.handshake())
    await fails(connecting, ssl.SSLCertVerificationError)
    await asyncio.wait([handshake])
    assert handshake.exception() is not None
    peer.close()
