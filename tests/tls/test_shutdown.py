"""The end of TLS connections: close_notify, ends without close_notify, time limits, and data that is still
on its way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
import sys

import pytest
from support import HOST, BufferedRecorder, Echo, Recorder, iterations, until
from tls.contexts import server_context
from tls.endpoints import SIDES, client_of, connected


@pytest.mark.parametrize("side", SIDES)
async def test_close(loop, side):
    """The loop sends close_notify, waits for the peer's, and calls connection_lost(None)."""
    transport, protocol, peer = await connected(loop, side=side)
    transport.close()
    assert transport.is_closing()
    assert await peer.read() == b""
    assert not protocol.is_lost
    await peer.unwrap()
    assert await peer.peer.is_ended()
    await until(lambda: protocol.is_lost, "connection_lost")
    assert protocol.lost_with == [None]
    assert protocol.events[-1] == "lost"
    transport.close()
    peer.close()


@pytest.mark.parametrize("side", SIDES)
async def test_peer_says_close_notify(loop, side):
    transport, protocol, peer = await connected(loop, side=side)
    await peer.write(b"last words")
    await peer.unwrap()  # returns only when the loop has answered with its own close_notify
    await until(lambda: protocol.is_lost, "connection_lost")
    assert protocol.events == ["made", "data", "eof", "lost"]
    assert protocol.data == b"last words"
    assert protocol.lost_with == [None]
    assert transport.is_closing()
    peer.close()


@pytest.mark.skip_on(uvloop="does not call eof_received()")
@pytest.mark.parametrize("side", SIDES)
async def test_end_without_close_notify(loop, side):
    transport, protocol, peer = await connected(loop, side=side)
    await peer.write(b"last words")
    peer.peer.shutdown()
    await until(lambda: protocol.is_lost, "connection_lost")
    assert protocol.events == ["made", "data", "eof", "lost"]
    assert protocol.data == b"last words"
    assert protocol.lost_with == [None]
    peer.close()


async def test_end_inside_a_record(loop):
    transport, protocol, peer = await connected(loop)
    await peer.peer.send(peer.seal(b"whole") + peer.seal(b"cut")[:-1])
    peer.peer.shutdown()
    await until(lambda: protocol.is_lost, "connection_lost")
    assert protocol.data == b"whole"
    assert protocol.lost_with == [None]
    peer.close()


async def test_reset(loop):
    transport, protocol, peer = await connected(loop)
    peer.peer.reset()
    await until(lambda: protocol.is_lost, "connection_lost")
    assert isinstance(protocol.lost_with[0], ConnectionResetError)
    protocol.lost_with.clear()


async def test_abort(loop):
    transport, protocol, peer = await connected(loop)
    transport.abort()
    assert transport.is_closing()
    assert not protocol.is_lost
    await until(lambda: protocol.is_lost, "connection_lost")
    assert protocol.lost_with == [None]
    transport.abort()
    transport.close()
    assert await peer.peer.is_ended()
    peer.close()


@pytest.mark.parametrize("size", [1, 100_000, 3_000_000])
@pytest.mark.parametrize("where", ["inside", "outside"])
async def test_data_written_before_close_arrives(loop, size, where):
    """All data arrives, even if the socket's buffer is full."""
    data = os.urandom(size)

    class Answers(Recorder):
        def data_received(self, received):
            super().data_received(received)
            self.transport.write(data)
            self.transport.close()

    transport, protocol, peer = await connected(loop, Answers if where == "inside" else Recorder, small=True)
    if where == "inside":
        await peer.write(b"?")
    else:
        transport.write(data)
        transport.close()
    assert await peer.read_exactly(size) == data
    assert await peer.read() == b""
    await peer.unwrap()
    await until(lambda: protocol.is_lost, "connection_lost")
    assert protocol.lost_with == [None]
    peer.close()


async def test_eof_received_cannot_keep_the_connection_open(loop):
    """TLS transports have no half-closed state: the peer's close_notify ends the connection, whatever eof_received
    returns.
    """

    class KeepsOpen(Recorder):
        keep_open = True

        def eof_received(self):
            super().eof_received()
            return True

    transport, protocol, peer = await connected(loop, KeepsOpen)
    await peer.unwrap()
    await until(lambda: protocol.is_lost, "connection_lost")
    assert protocol.events == ["made", "eof", "lost"]
    peer.close()


async def test_no_half_close(loop):
    transport, protocol, peer = await connected(loop)
    assert not transport.can_write_eof()
    with pytest.raises(NotImplementedError):
        transport.write_eof()
    transport.abort()
    peer.close()
    await until(lambda: protocol.is_lost, "connection_lost")


async def test_write_after_close(loop, caplog):
    transport, protocol, peer = await connected(loop)
    transport.close()
    for _ in range(10):
        transport.write(b"too late")
    assert "SSL connection is closed" in caplog.text
    assert await peer.read_to_end() == b""
    await peer.unwrap()
    await until(lambda: protocol.is_lost, "connection_lost")
    peer.close()


async def test_shutdown_time_limit(loop):
    """The loop gives up on a peer that never answers close_notify."""
    transport, protocol, peer = await connected(loop, ssl_shutdown_timeout=0.05)
    transport.close()
    await until(lambda: protocol.is_lost, "connection_lost")
    assert isinstance(protocol.lost_with[0], TimeoutError)
    assert "SSL shutdown timed out" in str(protocol.lost_with[0])
    protocol.lost_with.clear()
    peer.close()


async def test_shutdown_time_limit_while_the_socket_is_full(loop):
    transport, protocol, peer = await connected(loop, ssl_shutdown_timeout=0.05, small=True)
    transport.write(bytes(3_000_000))
    transport.close()
    await until(lambda: protocol.is_lost, "connection_lost")
    assert isinstance(protocol.lost_with[0], TimeoutError)
    protocol.lost_with.clear()
    peer.close()


@pytest.mark.skip_on(asyncio="waits forever before 3.14.10 and 3.15.1", uvloop="waits forever")
@pytest.mark.parametrize("closes_first", [True, False])
async def test_shutdown_time_limit_after_the_end_of_a_peer_that_does_not_read(loop, closes_first):
    transport, protocol, peer = await connected(loop, ssl_shutdown_timeout=0.05, small=True)
    transport.write(bytes(3_000_000))
    if closes_first:
        transport.close()
    peer.peer.shutdown()
    await until(lambda: protocol.is_lost, "connection_lost")
    assert isinstance(protocol.lost_with[0], TimeoutError)
    protocol.lost_with.clear()
    peer.close()


@pytest.mark.skip_on(uvloop="continues the download")
async def test_peer_continues_to_send_after_close(loop):
    """close() ends the download. The connection does not wait until the peer has sent all its data."""
    transport, protocol, peer = await connected(loop, small=True)
    await peer.write(b"begin")
    await until(lambda: protocol.data == b"begin", "the first data")
    transport.close()
    with pytest.raises((ConnectionResetError, BrokenPipeError, AssertionError)):
        for _ in range(2000):
            await peer.write(bytes(16_000))
            await asyncio.sleep(0)
    await until(lambda: protocol.is_lost, "connection_lost")
    assert protocol.lost_with[0] is None or isinstance(protocol.lost_with[0], OSError)
    protocol.lost_with.clear()
    peer.close()


@pytest.mark.skip_on(uvloop="loses the data")
async def test_end_while_paused(loop):
    """Data that arrived before the end is delivered when the application reads again."""
    transport, protocol, peer = await connected(loop)
    transport.pause_reading()
    await peer.write(b"x" * 40_000)
    peer.peer.shutdown()
    await iterations(10)
    assert protocol.events == ["made"]
    transport.resume_reading()
    await until(lambda: protocol.is_lost, "connection_lost")
    assert protocol.events == ["made", "data", "eof", "lost"]
    assert len(protocol.data) == 40_000
    peer.close()


@pytest.mark.skip_on(asyncio="reports nothing before resume_reading()", uvloop="does not call eof_received()")
@pytest.mark.parametrize("says_goodbye", [False, True])
@pytest.mark.parametrize("side", SIDES)
async def test_end_while_paused_with_nothing_before_it(loop, side, says_goodbye):
    """No data is pending, so the application gets the end at once."""
    transport, protocol, peer = await connected(loop, side=side)
    await peer.write(b"read")
    await until(lambda: protocol.data == b"read", "the data")
    transport.pause_reading()
    if says_goodbye:
        await peer.send_close_notify()
    peer.peer.shutdown()
    await until(lambda: protocol.is_lost, "connection_lost")
    assert protocol.events == ["made", "data", "eof", "lost"]
    assert protocol.lost_with == [None]
    peer.close()


async def end_while_paused_again_and_again(loop, kind):
    """Data before the end is delivered, also to an application that pauses after each piece."""

    class Pausing(kind):
        def data_received(self, data):
            super().data_received(data)
            self.transport.pause_reading()

        def buffer_updated(self, nbytes):
            super().buffer_updated(nbytes)
            self.transport.pause_reading()

    transport, protocol, peer = await connected(loop, Pausing)
    transport.pause_reading()
    data = os.urandom(100_000)
    for start in range(0, len(data), 10_000):
        await peer.write(data[start : start + 10_000])
    peer.peer.shutdown()
    await iterations(10)
    while not protocol.is_lost:
        transport.resume_reading()
        await asyncio.sleep(0)
    assert protocol.data == data
    assert protocol.events[-2:] == ["eof", "lost"]
    assert protocol.lost_with == [None]
    peer.close()


@pytest.mark.skip_on(uvloop="loses the data")
async def test_end_while_paused_again_and_again(loop):
    await end_while_paused_again_and_again(loop, Recorder)


@pytest.mark.skip_on(asyncio="loses the data that does not fit into the first buffer", uvloop="loses the data")
async def test_end_while_paused_again_and_again_with_buffers(loop):
    await end_while_paused_again_and_again(loop, BufferedRecorder)


@pytest.mark.skip_on(asyncio="ends with APPLICATION_DATA_AFTER_CLOSE_NOTIFY (bpo-39951)")
@pytest.mark.parametrize("size", [1, 100_000])
@pytest.mark.parametrize("side", SIDES)
async def test_data_that_crosses_our_close_notify(loop, side, size):
    """Data that the peer sends after our close_notify is discarded. The peer's close_notify completes the shutdown."""
    transport, protocol, peer = await connected(loop, side=side)
    transport.close()
    await peer.write(bytes(size))
    assert await peer.read() == b""
    await peer.unwrap()
    await until(lambda: protocol.is_lost, "connection_lost")
    assert protocol.events == ["made", "eof", "lost"]
    assert protocol.lost_with == [None]
    peer.close()


@pytest.mark.skip_on(asyncio="ends with APPLICATION_DATA_AFTER_CLOSE_NOTIFY (bpo-39951)")
@pytest.mark.parametrize("size", [1, 100_000, 1_000_000])
async def test_close_while_paused(loop, size):
    """Pending data is discarded, even if there is so much of it that the transport below is paused."""
    transport, protocol, peer = await connected(loop)
    transport.pause_reading()
    sending = asyncio.ensure_future(peer.write(bytes(size)))
    await until(lambda: transport.get_read_buffer_size() >= min(size, 256 * 1024), "the data")
    transport.close()
    await sending
    assert await peer.read() == b""
    await peer.unwrap()
    await until(lambda: protocol.is_lost, "connection_lost")
    assert protocol.events == ["made", "eof", "lost"]
    assert protocol.lost_with == [None]
    peer.close()


@pytest.mark.xfail_on(asyncio="delivers data that it received before close()")
async def test_nothing_is_delivered_after_close(loop):
    transport, protocol, peer = await connected(loop)
    transport.pause_reading()
    await peer.write(b"unread")
    await until(lambda: transport.get_read_buffer_size(), "the data")
    transport.resume_reading()
    transport.close()
    assert await peer.read() == b""
    await peer.unwrap()
    await until(lambda: protocol.is_lost, "connection_lost")
    peer.close()
    assert protocol.events == ["made", "eof", "lost"]


async def test_a_peer_that_has_closed_receives_all_data(loop):
    """The peer's close_notify arrives while much of the written data is still buffered. All of this data is sent before
    the loop's own close_notify.
    """
    data = os.urandom(3_000_000)
    transport, protocol, peer = await connected(loop, small=True)
    transport.write(data)
    await peer.send_close_notify()
    received = bytearray()
    while more := await peer.read():
        received += more
    assert received == data
    await until(lambda: protocol.is_lost, "connection_lost")
    assert [event for event in protocol.events if event not in ("pause", "resume")] == ["made", "eof", "lost"]
    assert protocol.lost_with == [None]
    peer.close()


async def test_abort_inside_data_received(loop):
    class Aborts(Recorder):
        def data_received(self, data):
            super().data_received(data)
            self.transport.abort()

    transport, protocol, peer = await connected(loop, Aborts)
    await peer.write(b"x")
    await until(lambda: protocol.is_lost, "connection_lost")
    assert protocol.events == ["made", "data", "lost"]
    assert await peer.peer.is_ended()
    peer.close()


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize("end", ["close", "abort"])
async def test_close_inside_data_received_after_the_peers_end(loop, buffered, end):
    """Data and close_notify arrive in one piece. eof_received is called at most once."""
    seen = []

    class Ends(BufferedRecorder if buffered else Recorder):
        def data_received(self, data):
            super().data_received(data)
            getattr(self.transport, end)()

        def buffer_updated(self, nbytes):
            super().buffer_updated(nbytes)
            getattr(self.transport, end)()

        def eof_received(self):
            seen.append("eof")

    transport, protocol, peer = await connected(loop, Ends)
    await peer.peer.send(peer.seal(b"data") + close_notify(peer))
    await until(lambda: protocol.is_lost, "connection_lost")
    assert protocol.data == b"data"
    assert protocol.lost_with == [None]
    assert len(seen) <= 1
    peer.close()


def close_notify(peer):
    """Encrypts a close_notify and does not send it."""
    with contextlib.suppress(ssl.SSLWantReadError):
        peer.object.unwrap()
    return peer.outgoing.read()


@pytest.mark.skip_on(asyncio="waits for resume_reading() forever", uvloop="loses the data")
async def test_close_after_the_end_while_paused(loop):
    transport, protocol, peer = await connected(loop)
    transport.pause_reading()
    await peer.write(b"never read")
    peer.peer.shutdown()
    await iterations(10)
    transport.close()
    await until(lambda: protocol.is_lost, "connection_lost")
    assert not protocol.data
    assert protocol.lost_with == [None]
    peer.close()


async def test_close_inside_connection_made(loop):
    class Closes(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            transport.write(b"hello and goodbye")
            transport.close()

    transport, protocol, peer = await connected(loop, Closes)
    assert await peer.read_to_end() == b"hello and goodbye"
    await peer.unwrap()
    await until(lambda: protocol.is_lost, "connection_lost")
    peer.close()


@pytest.mark.xfail_on(
    asyncio="sends no close_notify", uvloop="has no close_clients()", when=sys.version_info >= (3, 13)
)
@pytest.mark.skip_on(asyncio="has no close_clients()", when=sys.version_info < (3, 13))
@pytest.mark.xfail_on(uvloop="has no close_clients()", when=sys.version_info < (3, 13))
async def test_close_clients_says_close_notify(loop, serve):
    made = []
    server = await serve(lambda: made.append(Recorder()) or made[-1], HOST, 0, ssl=server_context())
    peer = await client_of(server)
    with peer:
        await until(lambda: made[0].transport, "connection_made")
        server.close()
        server.close_clients()
        assert await peer.read() == b""  # without a close_notify, this would raise SSLEOFError
        await peer.unwrap()
        await server.wait_closed()
        await until(lambda: made[0].is_lost, "connection_lost")
    assert made[0].lost_with == [None]


@pytest.mark.skip_on(uvloop="has no abort_clients()")
@pytest.mark.skip_on(asyncio="has no abort_clients()", when=sys.version_info < (3, 13))
async def test_abort_clients(loop, serve):
    made = []
    server = await serve(lambda: made.append(Recorder()) or made[-1], HOST, 0, ssl=server_context())
    with await client_of(server) as peer:
        await until(lambda: made[0].transport, "connection_made")
        server.close()
        server.abort_clients()
        await server.wait_closed()
        await until(lambda: made[0].is_lost, "connection_lost")
        assert await peer.peer.is_ended()
    assert made[0].lost_with == [None]


async def test_extra_info_after_the_end(loop):
    transport, protocol, peer = await connected(loop)
    ssl_object = transport.get_extra_info("ssl_object")
    transport.abort()
    await until(lambda: protocol.is_lost, "connection_lost")
    assert transport.get_extra_info("ssl_object") is ssl_object
    assert transport.get_extra_info("cipher")
    peer.close()


@pytest.mark.skip_on(uvloop="logs other messages")
async def test_debug_mode(loop, caplog):
    loop.set_debug(True)
    caplog.set_level(logging.DEBUG, logger="asyncio")
    transport, protocol, peer = await connected(loop)
    await peer.write(b"x")
    await until(lambda: protocol.data, "the data")
    peer.peer.shutdown()
    await until(lambda: protocol.is_lost, "connection_lost")
    for text in ("handshake", "received EOF"):
        assert text in caplog.text
    caplog.clear()
    peer.close()
    loop.set_debug(False)


async def test_echo_server_survives_a_storm_of_ends(loop, serve):
    """Thirty clients end at once, in five ways. The server's count of connections returns to zero."""
    server = await serve(Echo, HOST, 0, ssl=server_context())

    async def one(number):
        peer = await client_of(server)
        with peer:
            await peer.write(b"x" * 1000)
            kind = number % 5
            if kind == 0:
                await peer.read_exactly(1000)
                await peer.unwrap()
            elif kind == 1:
                peer.peer.reset()
            elif kind == 2:
                await peer.peer.send(b"garbage garbage")
                await peer.peer.is_ended()
            elif kind == 3:
                await peer.send_close_notify()
            else:
                assert await peer.read_exactly(1000) == b"x" * 1000

    await asyncio.gather(*map(one, range(30)), return_exceptions=False)
    server.close()
    await server.wait_closed()
