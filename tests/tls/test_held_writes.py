"""When TLS encrypts and sends: small writes of one step are sent together, in as few records as possible."""

from __future__ import annotations

import time

import pytest
from support import Recorder, until
from tls.endpoints import connected

WORDS = (b"HTTP/1.1 200 OK\r\n", b"Content-Length: 5\r\n", b"\r\n", b"hello")
REPLY = b"".join(WORDS)
APPLICATION_DATA = 23
AT_ONCE = "encrypts each write in a record of its own"


async def finish(transport, protocol, peer):
    transport.abort()
    await until(lambda: protocol.is_lost, "connection_lost")
    peer.close()


async def quiet(loop, factory=Recorder):
    """Like `connected`, but data of the peer has arrived, and with it all TLS messages that follow the handshake."""
    transport, protocol, peer = await connected(loop, factory)
    await peer.write(b"x")
    await until(lambda: protocol.data == b"x", "the data")
    return transport, protocol, peer


async def records_of(peer, plain: bytes) -> list[int]:
    """Read `plain`. Return the lengths of the records that carried it (Source: RFC 8446, 5.1)."""
    raw, got = bytearray(), bytearray()
    while len(got) < len(plain):
        data = await peer.peer.recv()
        raw += data
        peer.incoming.write(data)
        while peer.incoming.pending:
            try:
                got += peer.object.read(1 << 20)
            except OSError:  # the rest of a record has not arrived yet
                break
    assert bytes(got) == plain
    lengths = []
    while raw:
        assert raw[0] == APPLICATION_DATA
        lengths.append(int.from_bytes(raw[3:5], "big"))
        del raw[: 5 + lengths[-1]]
    return lengths


def write_words(transport) -> None:
    for word in WORDS[:2]:
        transport.write(word)
    transport.writelines(WORDS[2:])


@pytest.mark.parametrize("where", ["task", "call_soon", "timer"])
@pytest.mark.xfail_on(asyncio=AT_ONCE, uvloop=AT_ONCE)
async def test_writes_of_one_step_share_a_record(loop, where):
    transport, protocol, peer = await quiet(loop)
    if where == "task":
        write_words(transport)
    elif where == "call_soon":
        loop.call_soon(write_words, transport)
    else:
        loop.call_later(0.0001, write_words, transport)
    lengths = await records_of(peer, REPLY)
    await finish(transport, protocol, peer)
    assert len(lengths) == 1


@pytest.mark.xfail_on(asyncio=AT_ONCE, uvloop=AT_ONCE)
async def test_full_records(loop):
    """40 writes of 1,000 bytes need three records, because a record holds at most 16 KiB."""
    transport, protocol, peer = await quiet(loop)
    pieces = [b"%c" % (65 + number) * 1000 for number in range(40)]
    for _ in range(50):
        began_s = time.perf_counter()
        for piece in pieces:
            transport.write(piece)
        took_s = time.perf_counter() - began_s
        lengths = await records_of(peer, b"".join(pieces))
        if took_s < 0.0005:
            break  # otherwise try again: after a millisecond, the loop sends what it holds
    await finish(transport, protocol, peer)
    assert len(lengths) == 3


async def test_large_and_small_writes_keep_their_order(loop):
    transport, protocol, peer = await quiet(loop)
    sent = b""
    for number, length in enumerate((5, 50_000, 7, 9, 20_000, 1)):
        sent += b"%d" % number * length
        transport.write(b"%d" % number * length)
    assert await peer.read_exactly(len(sent)) == sent
    await finish(transport, protocol, peer)


LOOKS = {
    "get_write_buffer_size": lambda transport: transport.get_write_buffer_size() == 0,
    "socket": lambda transport: transport.get_extra_info("socket").fileno() >= 0,
    "set_write_buffer_limits": lambda transport: transport.set_write_buffer_limits(high=100) is None,
    "set_protocol": lambda transport: transport.set_protocol(transport.get_protocol()) is None,
    "close": lambda transport: transport.close() is None,
    "abort": lambda transport: transport.abort() is None,
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.skip_on(uvloop="sends at the end of the iteration")
async def test_calls_that_could_reveal_held_data_send_it_first(loop, loop_kind, look):
    transport, protocol, peer = await quiet(loop)
    transport.write(b"held, ")
    transport.write(b"both")
    assert peer.peer.is_silent() == (loop_kind == "grapeshot")
    assert look(transport)
    assert not peer.peer.is_silent()
    assert await peer.read_exactly(10) == b"held, both"
    await finish(transport, protocol, peer)


@pytest.mark.skip_on(uvloop="sends at the end of the iteration")
async def test_is_closing_does_not_send_held_data(loop, loop_kind):
    transport, protocol, peer = await quiet(loop)
    transport.write(b"held")
    assert not transport.is_closing()
    assert peer.peer.is_silent() == (loop_kind == "grapeshot")
    assert await peer.read_exactly(4) == b"held"
    await finish(transport, protocol, peer)


async def test_steps_of_several_connections_in_one_iteration(loop):
    """A later step aborts one of the connections. The data written to that connection is sent all the same."""
    ends = [await quiet(loop) for _ in range(4)]
    for number, (transport, _, _) in enumerate(ends):
        loop.call_soon(transport.write, b"%d, " % number)
        loop.call_soon(transport.write, b"held")
    loop.call_soon(ends[1][0].abort)
    for number, (transport, protocol, peer) in enumerate(ends):
        assert await peer.read_exactly(7) == b"%d, held" % number
        await finish(transport, protocol, peer)


async def test_close_sends_everything_and_close_notify(loop):
    transport, protocol, peer = await quiet(loop)
    transport.write(b"the ")
    transport.write(b"end")
    transport.close()
    assert await peer.read_to_end() == b"the end"
    await peer.unwrap()
    await until(lambda: protocol.is_lost, "connection_lost")
    assert protocol.lost_with == [None]
    peer.close()


async def test_a_write_that_fails(loop):
    transport, protocol, peer = await quiet(loop)
    peer.peer.reset()
    transport.write(b"lost")
    await until(lambda: protocol.is_lost, "connection_lost")
    assert isinstance(protocol.lost_with[0], OSError)
    peer.close()


@pytest.mark.parametrize("before", [b"", b"first, "], ids=["alone", "after a step"])
async def test_writes_of_a_callback_that_raises(loop, reported, before):
    class Raises(Recorder):
        def data_received(self, data):
            super().data_received(data)
            if data == b"y":
                self.transport.write(b"last words")
                raise LookupError("no")

    transport, protocol, peer = await quiet(loop, Raises)
    if before:
        transport.write(before)
    await peer.write(b"y")
    await until(lambda: protocol.is_lost, "connection_lost")
    assert await peer.read_exactly(len(before) + 10) == before + b"last words"
    assert [type(error) for error in protocol.lost_with] == [LookupError]
    assert len(reported.exceptions) == 1
    peer.close()
