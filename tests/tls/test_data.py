"""Data over TLS: every size, both directions, Protocol and BufferedProtocol, flow control."""

from __future__ import annotations

import asyncio
import os
import ssl

import pytest
from support import HOST, BufferedRecorder, Echo, Recorder, iterations, until
from tls.contexts import HOSTNAME, client_context, server_context
from tls.endpoints import SIDES, client_of, connected

VERSIONS = (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)


class BufferedEcho(BufferedRecorder):
    def buffer_updated(self, nbytes):
        super().buffer_updated(nbytes)
        self.transport.write(self.buffer[:nbytes])


class KeepsEcho(Recorder):
    def data_received(self, data):
        super().data_received(data)
        self.transport.write(data)


async def finish(transport, protocol, peer):
    """Close both sides with close_notify, and check that the protocol sees no error."""
    transport.close()
    with peer:
        await peer.read_to_end()
        await peer.unwrap()
    await until(lambda: protocol.is_lost, "connection_lost")
    assert protocol.lost_with == [None]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("factory", [KeepsEcho, BufferedEcho])
@pytest.mark.parametrize("size", [1, 1000, 16384, 16385, 100_000, 1_000_000])
async def test_echo(loop, factory, size, version):
    transport, protocol, peer = await connected(loop, factory, "server", ours=server_context(version=version))
    assert peer.object.version() == version.name.replace("_", ".")
    data = os.urandom(size)
    sending = asyncio.ensure_future(peer.write(data))
    assert await peer.read_exactly(size) == data
    await sending
    assert bytes(protocol.data) == data
    await finish(transport, protocol, peer)


async def test_a_loop_talks_to_itself(loop, serve):
    server = await serve(Echo, HOST, 0, ssl=server_context())
    transport, protocol = await loop.create_connection(
        Recorder, *server.sockets[0].getsockname(), ssl=client_context(), server_hostname=HOSTNAME
    )
    data = os.urandom(3_000_000)
    transport.write(data)
    await until(lambda: len(protocol.data) == len(data), "the echo")
    assert protocol.data == data
    transport.close()
    await until(lambda: protocol.is_lost, "connection_lost")


async def test_streams(loop, serve):
    async def handle(reader, writer):
        while line := await reader.readline():
            writer.write(line.upper())
            await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(handle, HOST, 0, ssl=server_context())
    reader, writer = await asyncio.open_connection(
        *server.sockets[0].getsockname(), ssl=client_context(), server_hostname=HOSTNAME
    )
    for word in (b"one\n", b"x" * 60_000 + b"\n"):
        writer.write(word)
        assert await reader.readline() == word.upper()
    writer.close()
    await writer.wait_closed()
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("side", SIDES)
async def test_ciphertext_in_single_bytes(loop, side):
    transport, protocol, peer = await connected(loop, side=side)
    ciphertext = peer.seal(b"first ") + peer.seal(b"second")
    for at in range(len(ciphertext)):
        await peer.peer.send(ciphertext[at : at + 1])
        await asyncio.sleep(0)
    await until(lambda: protocol.data == b"first second", "both records")
    await finish(transport, protocol, peer)


async def test_many_records_at_once(loop):
    transport, protocol, peer = await connected(loop)
    parts = [bytes([number % 256]) * (number % 50 + 1) for number in range(1000)]
    await peer.peer.send(b"".join(map(peer.seal, parts)))
    await until(lambda: len(protocol.data) == sum(map(len, parts)), "all records")
    assert protocol.data == b"".join(parts)
    await finish(transport, protocol, peer)


async def test_buffer_smaller_than_a_record(loop):
    transport, protocol, peer = await connected(loop, lambda: BufferedRecorder(7))
    data = os.urandom(5000)
    await peer.write(data)
    await until(lambda: len(protocol.data) == len(data), "the whole record through the small buffer")
    assert protocol.data == data
    await finish(transport, protocol, peer)


@pytest.mark.parametrize("pieces", [[b"a"], [b"a" * 100, b"b" * 40_000, b"c"], [b"%d" % n for n in range(3000)]])
@pytest.mark.parametrize("where", ["inside", "outside", "writelines"])
async def test_writes_arrive_in_order(loop, pieces, where):
    class Replies(Recorder):
        def data_received(self, data):
            super().data_received(data)
            for piece in pieces:
                self.transport.write(piece)

    transport, protocol, peer = await connected(loop, Replies if where == "inside" else Recorder)
    expected = b"".join(pieces)
    if where == "inside":
        await peer.write(b"?")
    elif where == "outside":
        for piece in pieces:
            transport.write(piece)
    else:
        transport.writelines([bytearray(piece) if at % 2 else piece for at, piece in enumerate(pieces)])
    assert await peer.read_exactly(len(expected)) == expected
    await finish(transport, protocol, peer)


async def test_data_may_change_after_write(loop):
    """Buffered data is a copy, so the owner of the bytearray may change it."""
    transport, protocol, peer = await connected(loop, small=True)
    transport.write(bytes(2_000_000))  # so that the next writes have to wait
    data = bytearray(b"x" * 10_000)
    transport.write(data)
    transport.write(memoryview(data)[:5])
    data[:] = b"y" * 10_000
    await peer.read_exactly(2_000_000)
    assert await peer.read_exactly(10_005) == b"x" * 10_005
    await finish(transport, protocol, peer)


async def test_write_wants_bytes(loop):
    transport, protocol, peer = await connected(loop)
    with pytest.raises(TypeError):
        transport.write("text")
    transport.write(b"")
    await finish(transport, protocol, peer)


async def test_pause_reading(loop):
    transport, protocol, peer = await connected(loop)
    assert transport.is_reading()
    transport.pause_reading()
    assert not transport.is_reading()
    await peer.write(b"x" * 30_000)
    await iterations(20)
    assert not protocol.data
    transport.resume_reading()
    await until(lambda: len(protocol.data) == 30_000, "the data after resume_reading()")
    await finish(transport, protocol, peer)


async def test_pause_reading_inside_data_received(loop):
    class Stops(Recorder):
        def data_received(self, data):
            super().data_received(data)
            self.transport.pause_reading()

    transport, protocol, peer = await connected(loop, Stops)
    await peer.write(b"1")
    await until(lambda: protocol.data == b"1", "the first byte")
    await peer.write(b"2")
    await iterations(20)
    assert protocol.data == b"1"
    transport.resume_reading()
    await until(lambda: protocol.data == b"12", "the second byte")
    await finish(transport, protocol, peer)


async def test_a_paused_reader_stops_the_peer(loop):
    """The buffers between a paused application and a sending peer are limited."""
    transport, protocol, peer = await connected(loop, small=True)
    transport.pause_reading()
    piece, sent = peer.seal(bytes(16_000)), 0
    quiet = 0
    while quiet < 30:
        try:
            sent += peer.peer.sock.send(piece[sent % len(piece) :])
            quiet = 0
        except BlockingIOError:
            quiet += 1
        if sent % len(piece) == 0:
            piece, sent = peer.seal(bytes(16_000)), 0
            protocol.pieces = getattr(protocol, "pieces", 0) + 1
            assert protocol.pieces < 2000, "32 MB went into a paused transport"
        await iterations(2)
    assert not protocol.data
    transport.abort()
    peer.close()
    await until(lambda: protocol.is_lost, "connection_lost")


@pytest.mark.parametrize("where", ["inside", "outside"])
async def test_pause_and_resume_writing(loop, where):
    piece, written = os.urandom(50_000), 0

    def write_until_paused(protocol):
        nonlocal written
        while "pause" not in protocol.events:
            protocol.transport.write(piece)
            written += 1
            assert written < 200, "10 MB were written without pause_writing()"

    class Writes(Recorder):
        def data_received(self, _data):
            write_until_paused(self)

    transport, protocol, peer = await connected(loop, Writes, small=True)
    if where == "inside":
        await peer.write(b"go")
        await until(lambda: "pause" in protocol.events, "pause_writing()")
    else:
        write_until_paused(protocol)
    assert transport.get_write_buffer_size() > transport.get_write_buffer_limits()[0]
    assert "resume" not in protocol.events
    assert await peer.read_exactly(len(piece) * written) == piece * written
    await until(lambda: "resume" in protocol.events, "resume_writing()")
    await until(lambda: transport.get_write_buffer_size() == 0, "an empty buffer")
    assert protocol.events.count("pause") == protocol.events.count("resume") == 1
    await finish(transport, protocol, peer)


async def test_big_transfers_both_ways_at_once(loop):
    transport, protocol, peer = await connected(loop, small=True)
    there, back = os.urandom(2_000_000), os.urandom(2_000_000)
    transport.write(there)
    for at in range(0, len(back), 50_000):
        sending = asyncio.ensure_future(peer.write(back[at : at + 50_000]))
        assert await peer.read_exactly(50_000) == there[at : at + 50_000]
        await sending
    await until(lambda: len(protocol.data) == len(back), "all of it")
    assert protocol.data == back
    await finish(transport, protocol, peer)


async def test_write_buffer_limits(loop):
    transport, protocol, peer = await connected(loop)
    assert transport.get_write_buffer_limits() == (128 * 1024, 512 * 1024)
    transport.set_write_buffer_limits(high=1000)
    assert transport.get_write_buffer_limits() == (250, 1000)
    transport.set_write_buffer_limits(low=100)
    assert transport.get_write_buffer_limits() == (100, 400)
    with pytest.raises(ValueError, match="must be >="):
        transport.set_write_buffer_limits(high=1, low=2)
    await finish(transport, protocol, peer)


async def test_set_protocol_takes_effect_at_once(loop):
    transport, protocol, peer = await connected(loop)
    other, buffered = Recorder(), BufferedRecorder()
    await peer.write(b"one")
    await until(lambda: protocol.data == b"one", "data for the first protocol")
    transport.set_protocol(other)
    assert transport.get_protocol() is other
    await peer.write(b"two")
    await until(lambda: other.data == b"two", "data for the second protocol")
    transport.set_protocol(buffered)
    buffered.events.append("made")
    await peer.write(b"three")
    await until(lambda: buffered.data == b"three", "data for the third protocol")
    transport.set_protocol(protocol)
    await finish(transport, protocol, peer)


async def test_clients_of_one_server(loop, serve):
    """Fifty clients at once, each with its own data."""
    server = await serve(KeepsEcho, HOST, 0, ssl=server_context())

    async def one(number):
        with await client_of(server) as peer:
            data = bytes([number]) * 5000
            await peer.write(data)
            assert await peer.read_exactly(5000) == data
            await peer.unwrap()

    await asyncio.gather(*map(one, range(50)))
