"""The loop holds the small writes of a step (one callback, or one run of a task or coro) and sends them together.

The callbacks, tasks and coros that are ready in one iteration form a batch. The loop sends the held writes of a batch
after the last step, or after an earlier one if much data is held or has been held for long. It sends the held writes
of any other step (such as a `data_received` that writes to another connection) when that step ends. Calls that would
reveal held data send it first.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
import time

import pytest
from support import Recorder, connected, coro_is_available, until
from transports.tcp.socket_pairs import arrived, finish, unix_pair

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads counters that only Linux has")
WORDS = (b"HTTP/1.1 200 OK\r\n", b"Content-Length: 5\r\n", b"\r\n", b"hello")
REPLY = b"".join(WORDS)


def segments_sent(transport) -> int:
    """Return how many TCP segments with data this end has sent (Source: `struct tcp_info` of linux/tcp.h)."""
    sock = transport.get_extra_info("socket")
    [segments] = struct.unpack_from("=I", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192), 156)
    return segments


def write_words(transport) -> None:
    for word in WORDS[:2]:
        transport.write(word)
    transport.writelines(WORDS[2:])


# ---------------------------------------------------------------- one step, one system call


async def in_task(_loop, transport):
    write_words(transport)


async def in_call_soon(loop, transport):
    loop.call_soon(write_words, transport)


async def in_timer(loop, transport):
    loop.call_later(0.0001, write_words, transport)


async def in_reader(loop, transport):
    ours, theirs = socket.socketpair()
    done = loop.create_future()

    def on_readable():
        write_words(transport)
        loop.remove_reader(ours)
        done.set_result(None)

    with ours, theirs:
        loop.add_reader(ours, on_readable)
        theirs.send(b"x")
        await done


async def in_callback_of_another_connection(loop, transport):
    class Other(Recorder):
        def data_received(self, data):
            super().data_received(data)
            write_words(transport)

    other, protocol, peer = await unix_pair(loop, Other)
    with peer:
        await peer.send(b"x")
        await until(lambda: protocol.data, "the data")
        await finish(other, protocol)


async def in_future_callback(loop, transport):
    future = loop.create_future()
    future.add_done_callback(lambda _future: write_words(transport))
    future.set_result(None)


async def in_eager_task(loop, transport):
    async def write():
        write_words(transport)

    task = asyncio.Task(write(), loop=loop, eager_start=True)
    assert task.done()


STEPS = [in_task, in_call_soon, in_timer, in_reader, in_callback_of_another_connection, in_future_callback]
if sys.version_info >= (3, 12):
    STEPS.append(in_eager_task)


@linux_only
@pytest.mark.parametrize("is_debug", [False, True], ids=["plain", "debug"])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
@pytest.mark.xfail_on(asyncio="makes a system call for each write", uvloop="makes a system call for each write")
async def test_writes_of_one_step_leave_together(loop, step, is_debug):
    """TCP_NODELAY is set, so each system call sends a segment. If the system suspends the process during a step,
    the step takes long, and its later writes are sent at once. So the best of three steps counts.
    """
    loop.set_debug(is_debug)
    transport, protocol, peer = await connected(loop)
    with peer:
        counts = []
        for _ in range(3):
            before = segments_sent(transport)
            await step(loop, transport)
            assert await peer.read_exactly(len(REPLY)) == REPLY
            counts.append(segments_sent(transport) - before)
        assert min(counts) == 1
        await finish(transport, protocol)


@linux_only
@pytest.mark.xfail_on(asyncio="makes a system call for each write", uvloop="makes a system call for each write")
async def test_writes_of_a_stream_writer_leave_together(loop):
    transport, protocol, peer = await connected(loop, lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()))
    writer = asyncio.StreamWriter(transport, protocol, asyncio.StreamReader(), loop)
    with peer:
        counts = []
        for _ in range(3):
            before = segments_sent(transport)
            for word in WORDS:
                writer.write(word)
            await writer.drain()
            assert await peer.read_exactly(len(REPLY)) == REPLY
            counts.append(segments_sent(transport) - before)
        writer.close()
        await writer.wait_closed()
    assert min(counts) == 1


@pytest.mark.skipif(not coro_is_available(), reason="no coros here")
@pytest.mark.skip_on(asyncio="has no coros", uvloop="has no coros")
async def test_writes_of_a_coro_leave_when_it_waits(loop):
    from grapeshot import coro

    transport, protocol, peer = await unix_pair(loop)
    seen = []

    def run():
        write_words(transport)
        seen.append(arrived(peer))
        coro.yield_slice()
        seen.append(arrived(peer))
        transport.write(b"end")

    with peer:
        await coro.run_sync(run)
        seen.append(arrived(peer))
        assert seen == [b"", REPLY, b"end"]
        await finish(transport, protocol)


@pytest.mark.skipif(not coro_is_available(), reason="no coros here")
@pytest.mark.skip_on(asyncio="has no coros", uvloop="has no coros")
async def test_writes_of_coros_leave_before_the_coros_continue(loop):
    from grapeshot import coro

    pairs = [await unix_pair(loop) for _ in range(3)]
    seen = []

    def run(number):
        transport, _, peer = pairs[number]
        for _ in range(3):
            transport.write(b"%d" % number)
            coro.yield_slice()
            seen.append(arrived(peer))

    await asyncio.gather(*[coro.run_sync(run, number) for number in range(3)])
    assert sorted(seen) == sorted([b"0", b"1", b"2"] * 3)
    for transport, protocol, peer in pairs:
        with peer:
            await finish(transport, protocol)


async def test_many_transports_in_one_step(loop):
    """Each transport sends its own data, in order, even if others are aborted or closed in between."""
    pairs = [await unix_pair(loop) for _ in range(10)]
    for number, (transport, _, _) in enumerate(pairs):
        transport.write(b"%d" % number)
        transport.write(b".")
    pairs[3][0].abort()
    pairs[4][0].close()
    for transport, _, _ in pairs:
        if not transport.is_closing():
            transport.write(b"!")
    await asyncio.sleep(0)
    for number, (transport, protocol, peer) in enumerate(pairs):
        with peer:
            end = b"" if number in {3, 4} else b"!"
            assert arrived(peer) == b"%d." % number + end
            await finish(transport, protocol)


# ---------------------------------------------------------------- what leaves before the end of the step


async def test_large_writes_leave_at_once(loop):
    transport, protocol, peer = await unix_pair(loop)
    with peer:
        transport.write(b"head")
        transport.write(b"x" * 50_000)
        assert arrived(peer) == b"head" + b"x" * 50_000
        transport.writelines([b"y" * 30_000, b"z" * 20_000])
        assert arrived(peer) == b"y" * 30_000 + b"z" * 20_000
        for _ in range(100):
            transport.write(b"w" * 1000)
        assert len(arrived(peer)) > 50_000  # most of the 100,000 bytes leave before the end of the step
        await finish(transport, protocol)


async def test_nothing_is_held_beyond_the_high_mark(loop):
    """With a high mark of 0, drain() returns only when the kernel has taken all data, so the loop must not hold any."""
    transport, protocol, peer = await unix_pair(loop)
    with peer:
        transport.set_write_buffer_limits(high=0)
        transport.write(b"a")
        assert arrived(peer) == b"a"
        transport.set_write_buffer_limits(high=10)
        transport.write(b"b" * 6)
        transport.write(b"c" * 6)
        assert arrived(peer) == b"b" * 6 + b"c" * 6
        await finish(transport, protocol)


LOOKS = {
    "get_write_buffer_size": lambda transport: transport.get_write_buffer_size() == 0,
    "is_reading": lambda transport: transport.is_reading(),
    "socket": lambda transport: transport.get_extra_info("socket").fileno() >= 0,
    "_sock": lambda transport: transport._sock.fileno() >= 0,
    "set_write_buffer_limits": lambda transport: transport.set_write_buffer_limits(high=100) is None,
    "set_protocol": lambda transport: transport.set_protocol(transport.get_protocol()) is None,
    "write_eof": lambda transport: transport.write_eof() is None,
    "close": lambda transport: transport.close() is None,
    "abort": lambda transport: transport.abort() is None,
    "_force_close": lambda transport: transport._force_close(None) is None,
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.skip_on(uvloop="sends at the end of the iteration")
async def test_calls_that_could_reveal_held_data_send_it_first(loop, loop_kind, look):
    transport, protocol, peer = await unix_pair(loop)
    with peer:
        if look is LOOKS["socket"]:
            look(transport)  # makes the socket object: the call below only returns it, and must still send
        transport.write(b"held, ")
        transport.write(b"both")
        assert peer.is_silent() == (loop_kind == "grapeshot")
        assert look(transport)
        assert arrived(peer) == b"held, both"
        if not transport.is_closing() and look is not LOOKS["write_eof"]:
            transport.write(b"; again")
            await asyncio.sleep(0)
            assert arrived(peer) == b"; again"
        await finish(transport, protocol)


@pytest.mark.skip_on(uvloop="sends at the end of the iteration")
async def test_is_closing_does_not_send_held_data(loop, loop_kind):
    """Servers call is_closing() after each reply. If that call sent held data, each reply would need a system call."""
    transport, protocol, peer = await unix_pair(loop)
    with peer:
        transport.write(b"held")
        assert not transport.is_closing()
        assert peer.is_silent() == (loop_kind == "grapeshot")
        await asyncio.sleep(0)
        assert arrived(peer) == b"held"
        await finish(transport, protocol)


@pytest.mark.skip_on(uvloop="sends at the end of the iteration")
async def test_a_step_that_takes_long_sends_at_once(loop):
    transport, protocol, peer = await unix_pair(loop)
    with peer:
        transport.write(b"first, ")
        began = time.monotonic()
        while time.monotonic() < began + 0.03:  # longer than a tick of the kernel's coarse clock
            pass
        transport.write(b"second")
        assert arrived(peer) == b"first, second"
        transport.write(b"third")
        assert arrived(peer) == b"third"
        await asyncio.sleep(0)
        transport.write(b"fourth")
        await asyncio.sleep(0)
        assert arrived(peer) == b"fourth"
        await finish(transport, protocol)


@pytest.mark.skip_on(uvloop="has no sendfile")
async def test_sendfile_sends_held_writes_first(loop, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"content")
    transport, protocol, peer = await unix_pair(loop)
    with peer, path.open("rb") as file:
        transport.write(b"head ")
        await loop.sendfile(transport, file)
        transport.write(b" tail")
        assert await peer.read_exactly(17) == b"head content tail"
        await finish(transport, protocol)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("how", ["write", "writelines"])
async def test_a_failed_write_is_seen_in_the_same_step(loop, how):
    """The error has the same effect as if the data had been sent at once."""
    transport, protocol, peer = await unix_pair(loop)
    transport.pause_reading()
    peer.close()
    if how == "write":
        transport.write(b"lost")
    else:
        transport.writelines([b"lo", b"st"])
    transport.get_write_buffer_size()
    assert transport.is_closing()
    assert not transport.is_reading()
    assert protocol.events == ["made"]
    await until(lambda: protocol.is_lost, "connection_lost")
    assert [type(error) for error in protocol.lost_with] == [BrokenPipeError]


@pytest.mark.skip_on(uvloop="reports a failed write later")
async def test_drain_raises_the_error_of_the_write(loop):
    protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader())
    transport, _, peer = await unix_pair(loop, lambda: protocol)
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    transport.pause_reading()
    peer.close()
    writer.write(b"lost")
    with pytest.raises(ConnectionError):
        await writer.drain()  # raises on asyncio's loop, where write() has already failed
        await asyncio.sleep(0)
        await writer.drain()
    with pytest.raises(BrokenPipeError):
        await writer.wait_closed()


async def test_a_write_that_fails_at_the_end_of_a_step(loop):
    transport, protocol, peer = await unix_pair(loop)
    transport.pause_reading()
    peer.close()
    transport.write(b"lost")
    await until(lambda: protocol.is_lost, "connection_lost")
    assert protocol.events == ["made", "lost"]
    assert [type(error) for error in protocol.lost_with] == [BrokenPipeError]
