"""Writing: types, order, close, half-close, abort, errors of the connection."""

from __future__ import annotations

import array
import asyncio
import errno
import random
import sys

import pytest
from support import WAYS, Recorder, connected, iterations, run_script, until


async def close(protocol):
    if protocol.transport is not None:
        protocol.transport.close()
    await until(lambda: protocol.is_lost)


@pytest.mark.parametrize("how", WAYS)
async def test_bytes_arrive(loop, how):
    transport, protocol, peer = await connected(loop, how=how)
    with peer:
        transport.write(b"hello ")
        transport.write(b"world")
        assert await peer.read_exactly(11) == b"hello world"
        await close(protocol)


@pytest.mark.parametrize(
    "data",
    [
        b"bytes",
        bytearray(b"bytearray"),
        memoryview(b"view"),
        memoryview(b"0123456789")[2:7],
        memoryview(bytearray(b"0123456789"))[::1],
        memoryview(array.array("I", [1, 2, 3])),
    ],
    ids=lambda data: f"{type(data).__name__}{len(data)}",
)
async def test_types_that_can_be_written(loop, data):
    transport, protocol, peer = await connected(loop)
    with peer:
        transport.write(data)
        expected = bytes(data)
        assert await peer.read_exactly(len(expected)) == expected
        await close(protocol)


@pytest.mark.skipif(sys.platform != "linux", reason="the memory limit is computed from /proc")
@pytest.mark.skip_on(asyncio="keeps a view of the data", uvloop="keeps a view of the data")
def test_no_memory_for_unsent_data(loop_kind):
    """If the data of a view cannot be sent at once, it is copied, which fails if there is no memory."""
    out = run_script(
        loop_kind,
        """
        import asyncio, mmap, resource, socket

        async def main():
            loop = asyncio.get_running_loop()
            ours, theirs = socket.socketpair()
            transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
            with theirs, mmap.mmap(-1, 1 << 30) as memory, memoryview(memory) as data:
                with open("/proc/self/statm") as numbers:
                    used = int(numbers.read().split()[0]) * resource.getpagesize()
                _, hard = resource.getrlimit(resource.RLIMIT_AS)
                resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28), hard))
                for write in transport.write, lambda data: transport.writelines([data]):
                    try:
                        write(data)
                    except MemoryError:
                        print("MemoryError")
                transport.abort()

        loop = new_event_loop()
        loop.run_until_complete(main())
        loop.close()
        """,
    )
    assert out.splitlines() == ["MemoryError", "MemoryError"]


@pytest.mark.parametrize("data", ["text", 5, object(), [b"list"]])
async def test_types_that_cannot_be_written(loop, data):
    transport, protocol, peer = await connected(loop)
    with peer:
        with pytest.raises(TypeError):
            transport.write(data)
        assert not transport.is_closing()
        transport.write(b"still works")
        assert await peer.read_exactly(11) == b"still works"
        await close(protocol)


async def test_the_message_for_a_wrong_type(loop):
    transport, protocol, peer = await connected(loop)
    with peer:
        with pytest.raises(TypeError, match=r"bytes.*'?str\b"):
            transport.write("text")
        await close(protocol)


async def test_writing_nothing(loop):
    transport, protocol, peer = await connected(loop)
    with peer:
        transport.write(b"")
        transport.write(bytearray())
        await iterations(3)
        assert peer.is_silent()
        assert transport.get_write_buffer_size() == 0
        await close(protocol)


@pytest.mark.skip_on(asyncio="the connection is never closed after an empty writelines()")
async def test_writelines_of_nothing(loop):
    transport, protocol, peer = await connected(loop)
    with peer:
        transport.writelines([])
        transport.writelines([b"", b""])
        await iterations(3)
        assert peer.is_silent()
        assert transport.get_write_buffer_size() == 0
        await close(protocol)


async def test_writelines(loop):
    transport, protocol, peer = await connected(loop)
    with peer:
        transport.writelines([b"a", bytearray(b"b"), memoryview(b"c"), b"", b"d"])
        transport.writelines(bytes([number]) for number in range(100))
        assert await peer.read_exactly(104) == b"abcd" + bytes(range(100))
        await close(protocol)


@pytest.mark.xfail_on(uvloop="takes None for empty data")
async def test_none_cannot_be_written(loop):
    transport, protocol, peer = await connected(loop)
    with peer:
        with pytest.raises(TypeError):
            transport.write(None)
        await close(protocol)


@pytest.mark.skip_on(uvloop="the transport no longer works after the error")
@pytest.mark.parametrize("lines", [["text"], [b"good", 5], 5])
async def test_writelines_of_a_wrong_type(loop, lines):
    transport, protocol, peer = await connected(loop)
    with peer:
        with pytest.raises(TypeError):
            transport.writelines(lines)
        await close(protocol)


async def test_many_lines_in_one_call(loop):
    """The call has more chunks than one writev takes."""
    transport, protocol, peer = await connected(loop)
    with peer:
        lines = [b"%05d" % number for number in range(5000)]
        transport.writelines(lines)
        assert await peer.read_exactly(25_000) == b"".join(lines)
        await close(protocol)


async def test_a_large_write(loop):
    transport, protocol, peer = await connected(loop)
    data = random.Random(1).randbytes(8 << 20)
    with peer:
        transport.write(data)
        transport.write(b"end")
        assert await peer.read_exactly(len(data) + 3) == data + b"end"
        assert transport.get_write_buffer_size() == 0
        await close(protocol)


async def test_writes_of_all_sizes_keep_their_order(loop):
    transport, protocol, peer = await connected(loop, small=True)
    rng = random.Random(2)
    expected = bytearray()
    with peer:
        for number in range(300):
            data = rng.randbytes(rng.choice((1, 10, 100, 5000, 40_000)))
            expected += data
            if number % 3:
                transport.write(data)
            else:
                middle = len(data) // 2
                transport.writelines([data[:middle], b"", data[middle:]])
            if number % 7 == 0:
                await asyncio.sleep(0)
        assert await peer.read_exactly(len(expected)) == expected
        await close(protocol)


async def test_the_buffer_size_counts_pending_data(loop):
    transport, protocol, peer = await connected(loop, small=True)
    with peer:
        assert transport.get_write_buffer_size() == 0
        total = 4 << 20
        transport.write(bytes(total))
        waiting = transport.get_write_buffer_size()
        assert 0 < waiting <= total
        transport.write(bytes(1000))
        assert transport.get_write_buffer_size() == waiting + 1000
        await peer.read_exactly(total + 1000)
        await until(lambda: transport.get_write_buffer_size() == 0)
        await close(protocol)


async def test_close_flushes(loop):
    transport, protocol, peer = await connected(loop, small=True)
    with peer:
        data = random.Random(3).randbytes(1 << 20)
        transport.write(data)
        transport.close()
        assert transport.is_closing()
        await iterations(5)
        assert not protocol.is_lost
        assert await peer.read_to_end() == data
        await until(lambda: protocol.is_lost)
        assert protocol.lost_with == [None]


async def test_close_calls_connection_lost_from_the_loop(loop):
    transport, protocol, peer = await connected(loop)
    with peer:
        transport.close()
        assert not protocol.is_lost
        transport.close()
        await until(lambda: protocol.is_lost)
        transport.close()
        await iterations(3)
        assert protocol.events == ["made", "lost"]
        assert protocol.lost_with == [None]
        assert await peer.read_to_end() == b""


async def test_nothing_is_received_after_close(loop):
    transport, protocol, peer = await connected(loop, small=True)
    with peer:
        transport.write(bytes(1 << 20))
        transport.close()
        await peer.send(b"too late")
        await iterations(5)
        assert protocol.data == b""
        transport.abort()
        await until(lambda: protocol.is_lost)
        assert "data" not in protocol.events


@pytest.mark.xfail_on(uvloop="#506: RuntimeError")
@pytest.mark.skip_on(asyncio="TypeError in early 3.12 and 3.13", when=(3, 12) <= sys.version_info < (3, 14))
async def test_write_after_close_is_not_sent(loop):
    transport, protocol, peer = await connected(loop)
    with peer:
        transport.write(b"before")
        transport.close()
        await until(lambda: protocol.is_lost)
        transport.write(b"after")
        transport.writelines([b"after"])
        assert await peer.read_to_end() == b"before"


@pytest.mark.xfail_on(uvloop="RuntimeError")
async def test_writes_after_the_connection_is_lost_warn(loop, caplog):
    transport, protocol, peer = await connected(loop)
    peer.reset()
    await until(lambda: protocol.is_lost)
    for _ in range(10):
        transport.write(b"x")
    await iterations(2)
    assert any("socket.send() raised exception" in record.message for record in caplog.records)
    assert protocol.events.count("lost") == 1
    caplog.clear()


async def test_abort(loop):
    transport, protocol, peer = await connected(loop, small=True)
    with peer:
        total = 4 << 20
        transport.write(bytes(total))
        transport.abort()
        assert transport.is_closing()
        assert not protocol.is_lost
        await until(lambda: protocol.is_lost)
        assert protocol.lost_with == [None]
        assert len(await peer.read_to_end()) < total
        transport.abort()
        await iterations(3)
        assert protocol.events.count("lost") == 1


async def test_abort_after_close(loop):
    transport, protocol, peer = await connected(loop, small=True)
    with peer:
        transport.write(bytes(4 << 20))
        transport.close()
        transport.abort()
        await until(lambda: protocol.is_lost)
        assert protocol.events.count("lost") == 1


async def test_write_eof(loop):
    transport, protocol, peer = await connected(loop)
    with peer:
        assert transport.can_write_eof() is True
        transport.write(b"request")
        transport.write_eof()
        assert not transport.is_closing()
        assert await peer.read_to_end() == b"request"
        await peer.send(b"reply")
        await until(lambda: protocol.data == b"reply")
        peer.close()
        await until(lambda: protocol.is_lost)
        assert protocol.events == ["made", "data", "eof", "lost"]


async def test_write_eof_follows_pending_data(loop):
    transport, protocol, peer = await connected(loop, small=True)
    with peer:
        data = random.Random(4).randbytes(1 << 20)
        transport.write(data)
        transport.write_eof()
        transport.write_eof()
        assert await peer.read_to_end() == data
        await peer.send(b"reply")
        await until(lambda: protocol.data == b"reply")
        await close(protocol)


async def test_write_after_write_eof(loop):
    transport, protocol, peer = await connected(loop)
    with peer:
        transport.write_eof()
        with pytest.raises(RuntimeError, match="after write_eof"):
            transport.write(b"x")
        await close(protocol)


async def test_writelines_after_write_eof(loop):
    transport, protocol, peer = await connected(loop)
    with peer:
        transport.write_eof()
        with pytest.raises(RuntimeError, match="after write_eof"):
            transport.writelines([b"x"])
        await close(protocol)


@pytest.mark.xfail_on(uvloop="RuntimeError")
async def test_write_eof_after_close(loop):
    transport, protocol, peer = await connected(loop)
    with peer:
        transport.close()
        transport.write_eof()
        await until(lambda: protocol.is_lost)
        transport.write_eof()


async def test_half_close_by_the_peer(loop):
    transport, protocol, peer = await connected(loop)
    protocol.keep_open = True
    with peer:
        await peer.send(b"request")
        peer.shutdown()
        await until(lambda: "eof" in protocol.events)
        await iterations(5)
        assert not protocol.is_lost
        assert not transport.is_closing()
        transport.write(b"reply")
        transport.close()
        assert await peer.read_to_end() == b"reply"
        await until(lambda: protocol.is_lost)
        assert protocol.events == ["made", "data", "eof", "lost"]


async def test_half_close_by_the_peer_closes_by_default(loop):
    transport, protocol, peer = await connected(loop)
    with peer:
        peer.shutdown()
        await until(lambda: protocol.is_lost)
        assert protocol.events == ["made", "eof", "lost"]
        assert protocol.lost_with == [None]
        assert await peer.read_to_end() == b""
        assert transport.is_closing()


async def test_a_half_closed_connection_does_not_spin(loop):
    """The poller must not keep reporting a half-closed connection as readable."""
    import time

    transport, protocol, peer = await connected(loop)
    protocol.keep_open = True
    with peer:
        peer.shutdown()
        await until(lambda: "eof" in protocol.events)
        before = time.process_time()
        await asyncio.sleep(0.2)
        assert time.process_time() - before < 0.15
        assert protocol.events.count("eof") == 1
        await close(protocol)


async def test_a_reset_is_the_reason_of_connection_lost(loop):
    transport, protocol, peer = await connected(loop)
    peer.reset()
    await until(lambda: protocol.is_lost)
    [error] = protocol.lost_with
    assert isinstance(error, ConnectionResetError)
    assert error.errno == errno.ECONNRESET
    assert transport.is_closing()
    assert protocol.events == ["made", "lost"]


async def test_a_reset_in_the_middle_of_a_write(loop):
    transport, protocol, peer = await connected(loop, small=True)
    transport.pause_reading()
    transport.write(bytes(8 << 20))
    await peer.read_exactly(1000)
    peer.reset()
    await until(lambda: protocol.is_lost)
    assert isinstance(protocol.lost_with[0], (ConnectionResetError, BrokenPipeError))
    assert protocol.events.count("lost") == 1
    assert transport.get_write_buffer_size() == 0


async def test_write_to_a_reset_connection(loop):
    """connection_lost gets the error of the failed send, and is called once. write() does not raise."""
    transport, protocol, peer = await connected(loop)
    transport.pause_reading()
    peer.reset()
    for _ in range(3):
        transport.write(b"x" * 100)
        transport.write(b"y")
    await until(lambda: protocol.is_lost)
    assert isinstance(protocol.lost_with[0], (ConnectionResetError, BrokenPipeError))
    assert len(protocol.lost_with) == 1


async def test_no_warning_for_ordinary_ends_of_connections(loop, caplog):
    """Resets and broken pipes are not logged as errors."""
    for _ in range(5):
        transport, protocol, peer = await connected(loop)
        peer.reset()
        transport.write(b"x")
        await until(lambda: protocol.is_lost)
    assert [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []


async def test_extra_info(loop):
    transport, protocol, peer = await connected(loop)
    with peer:
        assert transport.get_extra_info("sockname") == peer.sock.getpeername()
        assert transport.get_extra_info("peername") == peer.sock.getsockname()
        assert transport.get_extra_info("socket").getsockname() == peer.sock.getpeername()
        assert transport.get_extra_info("nothing") is None
        assert transport.get_extra_info("nothing", 5) == 5
        assert transport.get_extra_info("sslcontext") is None
        await close(protocol)
        assert transport.get_extra_info("peername") == peer.sock.getsockname()


@pytest.mark.xfail_on(uvloop="a PseudoSocket")
async def test_the_socket_of_extra_info(loop):
    transport, protocol, peer = await connected(loop)
    with peer:
        sock = transport.get_extra_info("socket")
        assert isinstance(sock, asyncio.trsock.TransportSocket)
        assert sock is transport.get_extra_info("socket")
        await close(protocol)


@pytest.mark.xfail_on(uvloop="its transports are not asyncio's")
@pytest.mark.parametrize("how", WAYS)
async def test_isinstance(loop, how):
    transport, protocol, peer = await connected(loop, how=how)
    with peer:
        for kind in (asyncio.Transport, asyncio.ReadTransport, asyncio.WriteTransport, asyncio.BaseTransport):
            assert isinstance(transport, kind)
        assert not isinstance(transport, asyncio.DatagramTransport)
        await close(protocol)


async def test_repr(loop):
    transport, protocol, peer = await connected(loop)
    with peer:
        assert "Transport" in repr(transport)
        await close(protocol)
        assert "clos" in repr(transport)


async def test_a_transport_in_a_weak_dictionary(loop):
    import weakref

    transport, protocol, peer = await connected(loop)
    with peer:
        mapping = weakref.WeakKeyDictionary({transport: 1})
        assert mapping[transport] == 1
        assert {transport: 2}[transport] == 2
        await close(protocol)


async def test_two_connections_at_once(loop):
    """Each connection writes what the other one received."""

    class Relay(Recorder):
        other = None

        def data_received(self, data):
            super().data_received(data)
            self.other.transport.write(data)

    (_, left, left_peer), (_, right, right_peer) = await connected(loop, Relay), await connected(loop, Relay)
    left.other, right.other = right, left
    with left_peer, right_peer:
        for number in range(50):
            await left_peer.send(b"%04d" % number)
            assert await right_peer.read_exactly(4) == b"%04d" % number
            await right_peer.send(b"%04d" % -number)
            assert await left_peer.read_exactly(4) == b"%04d" % -number
        await close(left)
        await close(right)
