"""Reentrant calls: a callback closes the transport when the end of the peer's stream has already arrived, and
OpenSSL's message callback writes or closes while data is encrypted.
"""

from __future__ import annotations

import ssl

import pytest
from support import BufferedRecorder, Recorder, until
from tls.contexts import client_context
from tls.endpoints import SIDES, connected


async def send_close_notify(peer, *messages: bytes) -> None:
    """Sends the messages and `close_notify` so that they arrive together."""
    for message in messages:
        peer.object.write(message)
    with pytest.raises(ssl.SSLWantReadError):
        peer.object.unwrap()
    await peer.flush()


class Closes(Recorder):
    def data_received(self, data):
        super().data_received(data)
        self.transport.write(b"thanks")
        self.transport.close()


class BufferedCloses(BufferedRecorder):
    def buffer_updated(self, nbytes):
        super().buffer_updated(nbytes)
        self.transport.write(b"thanks")
        self.transport.close()

    def eof_received(self):
        super().eof_received()


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    ("factory", "messages"),
    # BufferedCloses is not tested with the large records, because they do not fit into its buffer. asyncio's shutdown
    # would leave some of their data unread, and fail with APPLICATION_DATA_AFTER_CLOSE_NOTIFY.
    [(Closes, (b"x",)), (BufferedCloses, (b"x",)), (Closes, (b"x" * 16384, b"y" * 16384, b"z"))],
    ids=["one record", "one record into a buffer", "several"],
)
async def test_close_when_the_peers_end_has_come(loop, factory, side, messages):
    _, protocol, peer = await connected(loop, factory, side)
    with peer:
        await send_close_notify(peer, *messages)
        await until(lambda: protocol.is_lost, "connection_lost")
        assert protocol.lost_with == [None]
        assert protocol.events[0] == "made"
        assert protocol.events.count("eof") <= 1
        assert b"".join(messages).startswith(bytes(protocol.data))


@pytest.mark.parametrize("side", SIDES)
async def test_close_inside_eof_received(loop, side):
    class ClosesAtTheEnd(Recorder):
        def eof_received(self):
            super().eof_received()
            self.transport.close()

    _, protocol, peer = await connected(loop, ClosesAtTheEnd, side)
    with peer:
        await send_close_notify(peer, b"x")
        await until(lambda: protocol.is_lost, "connection_lost")
        assert protocol.events == ["made", "data", "eof", "lost"]
        assert protocol.lost_with == [None]


class WhileWriting:
    """OpenSSL's message callback. It calls `action` once, for the next message that OpenSSL writes."""

    def __init__(self) -> None:
        self.context = client_context()
        self.action = None
        self.context._msg_callback = self

    def __call__(self, _connection, direction, *_rest):
        if direction == "write" and self.action is not None:
            action, self.action = self.action, None
            action()

    def __enter__(self) -> WhileWriting:
        return self

    def __exit__(self, *_exc) -> None:
        self.context._msg_callback = None


BROKEN = "encrypts the outer data once more: RecursionError, or a broken connection"


@pytest.mark.parametrize("size", [1000, 2_000_000])
@pytest.mark.skip_on(asyncio=BROKEN, uvloop=BROKEN)
async def test_write_while_encrypting(loop, size):
    """Data that is written during another write is sent after the data of that outer write, no matter how much of the
    outer data the socket has taken.
    """
    with WhileWriting() as writing:
        transport, protocol, peer = await connected(loop, ours=writing.context, small=True)
        with peer:
            writing.action = lambda: transport.write(b"inner" * 100)
            outer = bytes(range(250)) * (size // 250)
            transport.write(outer)
            transport.get_write_buffer_size()  # encrypts the data now, because a small write is held at first
            assert writing.action is None
            transport.close()
            assert await peer.read_to_end() == outer + b"inner" * 100
            peer.close()
            await until(lambda: protocol.is_lost, "connection_lost")


@pytest.mark.parametrize("size", [1000, 2_000_000])
@pytest.mark.skip_on(asyncio=BROKEN, uvloop=BROKEN)
async def test_close_while_encrypting(loop, size):
    with WhileWriting() as writing:
        transport, protocol, peer = await connected(loop, ours=writing.context, small=True)
        with peer:
            # The session tickets of TLS 1.3 arrive before this data. If they arrived after close(), they would make the
            # transport continue, and the test would not find a close() that gets stuck.
            await peer.write(b"x")
            await until(lambda: protocol.data == b"x", "the data")
            writing.action = transport.close
            outer = bytes(range(250)) * (size // 250)
            transport.write(outer)
            transport.get_write_buffer_size()  # encrypts the data now, because a small write is held at first
            assert writing.action is None
            assert await peer.read_to_end() == outer
            peer.close()
            await until(lambda: protocol.is_lost, "connection_lost")
