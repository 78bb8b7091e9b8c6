"""set_protocol() in the middle of a read: in get_buffer(), or in `SSLContext._msg_callback` while OpenSSL decrypts."""

from __future__ import annotations

import asyncio
import ssl

import pytest
from support import BufferedRecorder, Peer, Recorder, until
from tls.contexts import HOSTNAME, client_context
from tls.endpoints import Carrier, connected, peer_of
from tls.test_start_tls import plain


class Switch:
    """OpenSSL's message callback. It calls `action` once, for the next message that OpenSSL reads."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self.context = context
        self.action = None
        context._msg_callback = self

    def __call__(self, _connection, direction, *_rest):
        if direction == "read" and self.action is not None:
            action, self.action = self.action, None
            action()

    def __enter__(self) -> Switch:
        return self

    def __exit__(self, *_exc) -> None:
        self.context._msg_callback = None


async def replaced_while_decrypting(loop, before, after, size):
    """Check that no byte is lost or out of order, and that data sent after the change reaches only the new protocol."""
    with Switch(client_context()) as switch:
        transport, first, peer = await connected(loop, before, ours=switch.context)
        second = after()
        second.connection_made(transport)
        switch.action = lambda: transport.set_protocol(second)
        data = bytes(range(250)) * (size // 250 + 1)
        await peer.write(data)
        await until(lambda: len(first.data) + len(second.data) == len(data), "the data")
        assert first.data + second.data == data
        first.data.clear()
        await peer.write(b"later")
        await until(lambda: second.data.endswith(b"later"), "the data")
        assert not first.data
        transport.abort()
        await until(lambda: second.is_lost, "connection_lost")
        peer.close()


SIZES = [1, 20_000, 300_000]


@pytest.mark.parametrize("size", SIZES)
async def test_while_decrypting(loop, size):
    await replaced_while_decrypting(loop, Recorder, Recorder, size)


@pytest.mark.skip_on(
    asyncio="reports the data in the old protocol's buffer to the new one, or calls the wrong kind of callback",
    uvloop="like asyncio",
)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("before", "after"),
    [(Recorder, BufferedRecorder), (BufferedRecorder, Recorder), (BufferedRecorder, BufferedRecorder)],
    ids=["to buffers", "from buffers", "other buffers"],
)
async def test_with_buffers_while_decrypting(loop, before, after, size):
    await replaced_while_decrypting(loop, before, after, size)


@pytest.mark.skip_on(
    asyncio="calls the new protocol's buffer_updated(), or never stops calling the old one's", uvloop="like asyncio"
)
@pytest.mark.parametrize("after", [Recorder, BufferedRecorder])
async def test_inside_get_buffer(loop, after):
    """get_buffer() replaces the protocol before the data is decrypted, so all of the data goes to the new protocol."""
    second = after()

    class Leaving(BufferedRecorder):
        def get_buffer(self, sizehint):
            self.transport.set_protocol(second)
            return self.buffer

    transport, protocol, peer = await connected(loop, Leaving)
    second.connection_made(transport)
    await peer.write(b"x" * 10_000)
    await until(lambda: second.data == b"x" * 10_000, "the data")
    assert not protocol.data
    transport.abort()
    await until(lambda: second.is_lost, "connection_lost")
    peer.close()


@pytest.mark.parametrize("after", [Recorder, BufferedRecorder])
@pytest.mark.skip_on(asyncio="calls data_received() of a BufferedProtocol", uvloop="like asyncio")
async def test_of_the_outer_layer_of_tls_while_it_decrypts(loop, after):
    """TLS in TLS: the inner layer is the protocol of the outer one, and is replaced while the outer one decrypts."""
    with Switch(client_context()) as switch:
        transport, protocol, other = await plain(loop)
        peer = peer_of(Peer(other), "client")
        handshake = asyncio.ensure_future(peer.handshake())
        outer = await loop.start_tls(transport, protocol, switch.context, server_hostname=HOSTNAME)
        await handshake
        inner_peer = peer_of(Carrier(peer), "client")
        handshake = asyncio.ensure_future(inner_peer.handshake())
        inner = await loop.start_tls(outer, protocol, client_context(), server_hostname=HOSTNAME)
        await handshake
        await inner_peer.write(b"ping")
        await until(lambda: protocol.data == b"ping", "the data")
        new = after()
        new.connection_made(outer)
        switch.action = lambda: outer.set_protocol(new)
        await peer.write(b"x" * 5000)
        await until(lambda: new.data == b"x" * 5000, "the data")
        outer.abort()
        await until(lambda: new.is_lost, "connection_lost")
        inner.abort()
        peer.close()
