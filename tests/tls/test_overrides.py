"""TLS on a transport whose methods a program replaces, on the object or on its class, at any time."""

from __future__ import annotations

import asyncio
from unittest import mock

import pytest
from support import Peer, Recorder, iterations, raw_pair, until
from tls.contexts import HOSTNAME, TlsPeer, client_context, server_context
from tls.endpoints import connected

pytestmark = pytest.mark.skip_on(uvloop="its transports take no attributes")


def below(transport):
    return transport._ssl_protocol._transport


async def finish(transport, protocol, peer):
    transport.abort()
    await until(lambda: protocol.is_lost, "connection_lost")
    peer.close()


async def test_ciphertext_is_written_by_the_replaced_method(loop):
    transport, protocol, peer = await connected(loop)
    lower, seen = below(transport), []
    transport.write(b"one ")
    await asyncio.sleep(0)  # writes are encrypted no later than at the end of this step of the task
    own = lower.write
    lower.write = lambda data: (seen.append(len(data)), own(data))
    transport.write(b"two ")
    await asyncio.sleep(0)
    assert len(seen) == 1
    assert seen[0] > len(b"two ")
    del lower.write
    transport.write(b"three")
    await asyncio.sleep(0)
    assert len(seen) == 1
    assert await peer.read_exactly(13) == b"one two three"
    await finish(transport, protocol, peer)


async def test_an_unrelated_attribute_changes_nothing(loop):
    transport, protocol, peer = await connected(loop)
    below(transport).note = "mine"
    transport.note = "mine"
    transport.write(b"hello")
    assert await peer.read_exactly(5) == b"hello"
    await peer.write(b"hello")
    await until(lambda: protocol.data == b"hello", "the data")
    await finish(transport, protocol, peer)


async def test_ciphertext_is_written_by_the_method_replaced_on_the_class(loop):
    transport, protocol, peer = await connected(loop)
    lower, seen = below(transport), []
    transport.write(b"one ")
    await asyncio.sleep(0)
    own = type(lower).write
    with mock.patch.object(type(lower), "write", lambda self, data: (seen.append(self), own(self, data))):
        transport.write(b"two ")
        await asyncio.sleep(0)
        assert seen == [lower]
    transport.write(b"three")
    await asyncio.sleep(0)
    assert seen == [lower]
    assert await peer.read_exactly(13) == b"one two three"
    await finish(transport, protocol, peer)


async def test_another_method_of_the_class_is_replaced(loop):
    transport, protocol, peer = await connected(loop)
    with mock.patch.object(type(below(transport)), "writelines", autospec=True):
        transport.write(b"hello")
        assert await peer.read_exactly(5) == b"hello"
    await finish(transport, protocol, peer)


async def test_an_error_in_the_replaced_method_ends_the_connection(loop, reported):
    transport, protocol, peer = await connected(loop)
    error = LookupError("no")
    with mock.patch.object(below(transport), "write", side_effect=error):
        transport.write(b"hello")
        await until(lambda: protocol.is_lost, "connection_lost")
    assert protocol.lost_with == [error]
    assert reported.exceptions == [error]
    peer.close()


async def test_a_replacement_from_inside_data_received(loop):
    class Protocol(Recorder):
        def data_received(self, data):
            super().data_received(data)
            lower = below(self.transport)
            own = lower.write
            lower.write = lambda data: (seen.append(len(data)), own(data))
            self.transport.write(b"answer")

    seen = []
    transport, protocol, peer = await connected(loop, Protocol)
    await peer.write(b"x")
    assert await peer.read_exactly(6) == b"answer"
    assert len(seen) == 1
    await finish(transport, protocol, peer)


async def test_the_end_uses_the_replaced_methods(loop):
    transport, protocol, peer = await connected(loop)
    lower, ended = below(transport), []
    own = lower._force_close
    lower._force_close = lambda exc: (ended.append(exc), own(exc))
    transport.abort()
    await until(lambda: protocol.is_lost, "connection_lost")
    assert ended == [None]
    peer.close()


async def test_close_and_flow_control_use_the_replaced_methods(loop):
    transport, protocol, peer = await connected(loop)
    lower, calls = below(transport), []
    for name in ("close", "pause_reading", "resume_reading"):
        own = getattr(lower, name)
        setattr(lower, name, lambda own=own, name=name: (calls.append(name), own()))
    transport.pause_reading()
    await peer.peer.send(peer.seal(b"x" * 1_000_000))
    await until(lambda: calls, "the transport below to be paused")
    assert calls == ["pause_reading"]
    transport.resume_reading()
    await until(lambda: len(protocol.data) == 1_000_000, "the data")
    assert calls == ["pause_reading", "resume_reading"]
    transport.close()
    assert await peer.read() == b""
    await peer.unwrap()
    await until(lambda: protocol.is_lost, "connection_lost")
    assert calls == ["pause_reading", "resume_reading", "close"]
    peer.close()


async def test_methods_of_the_tls_transport_itself(loop):
    transport, protocol, peer = await connected(loop)
    own = transport.write
    transport.write = lambda data: own(data.upper())
    transport.write(b"hello")
    assert await peer.read_exactly(5) == b"HELLO"
    del transport.write
    transport.write(b"hello")
    assert await peer.read_exactly(5) == b"hello"
    await finish(transport, protocol, peer)


async def test_tls_above_tls_with_a_replacement_between(loop):
    sock, other = raw_pair()
    sock.setblocking(False)
    transport, protocol = await loop.connect_accepted_socket(Recorder, sock)
    outer = TlsPeer(Peer(other), server_context(), server_side=True)
    shaking = asyncio.ensure_future(outer.handshake())
    middle = await loop.start_tls(transport, protocol, client_context(), server_hostname=HOSTNAME)
    await shaking
    seen = []
    own = middle.write
    middle.write = lambda data: (seen.append(len(data)), own(data))
    starting = asyncio.ensure_future(
        loop.start_tls(middle, protocol, client_context(), server_hostname=HOSTNAME, ssl_handshake_timeout=5)
    )
    await until(lambda: seen, "the client's first message")
    hello = await outer.read(65536)
    assert len(hello) == seen[0]
    starting.cancel()
    await asyncio.wait([starting])
    middle.abort()
    await until(lambda: transport.get_protocol() is None or transport.is_closing(), "the end")
    await iterations(3)
    outer.close()
