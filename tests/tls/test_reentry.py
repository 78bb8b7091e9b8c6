"""What a callback causes at once: the peer's end has come with the data in which the protocol closes or pauses."""

from __future__ import annotations

import ssl

import pytest
from support import BufferedRecorder, Recorder, until
from tls.endpoints import SIDES, connected


async def say_goodbye(peer, *messages: bytes) -> None:
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
    # With records left in it behind a small buffer asyncio's shutdown fails: APPLICATION_DATA_AFTER_CLOSE_NOTIFY.
    [(Closes, (b"x",)), (BufferedCloses, (b"x",)), (Closes, (b"x" * 16384, b"y" * 16384, b"z"))],
    ids=["one record", "one record into a buffer", "several"],
)
async def test_close_when_the_peers_end_has_come(loop, factory, side, messages):
    _, protocol, peer = await connected(loop, factory, side)
    with peer:
        await say_goodbye(peer, *messages)
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
        await say_goodbye(peer, b"x")
        await until(lambda: protocol.is_lost, "connection_lost")
        assert protocol.events == ["made", "data", "eof", "lost"]
        assert protocol.lost_with == [None]
