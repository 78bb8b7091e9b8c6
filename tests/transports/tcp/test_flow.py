"""Flow control: watermarks, pause_writing and resume_writing, pausing of reads."""

from __future__ import annotations

import asyncio
import sys

import pytest
from support import Recorder, connected, iterations, until


async def drop(protocol):
    if protocol.transport is not None:
        protocol.transport.abort()
    await until(lambda: protocol.is_lost)


@pytest.mark.parametrize(
    ("arguments", "limits"),
    [
        ({}, (16384, 65536)),
        ({"high": 1000}, (250, 1000)),
        ({"low": 1000}, (1000, 4000)),
        ({"high": 1000, "low": 10}, (10, 1000)),
        ({"high": 0}, (0, 0)),
        ({"high": 3}, (0, 3)),
        ({"high": 1000, "low": 1000}, (1000, 1000)),
    ],
)
async def test_limits(loop, arguments, limits):
    transport, protocol, peer = await connected(loop)
    with peer:
        transport.set_write_buffer_limits(**arguments)
        assert transport.get_write_buffer_limits() == limits
        transport.set_write_buffer_limits()
        assert transport.get_write_buffer_limits() == (16384, 65536)
        await drop(protocol)


@pytest.mark.parametrize("arguments", [{"high": 10, "low": 11}, {"high": -1}, {"low": -1}, {"high": 5, "low": -1}])
async def test_wrong_limits(loop, arguments):
    transport, protocol, peer = await connected(loop)
    with peer:
        limits = transport.get_write_buffer_limits()
        with pytest.raises(ValueError, match="must be >= low"):
            transport.set_write_buffer_limits(**arguments)
        assert transport.get_write_buffer_limits() == limits
        await drop(protocol)


@pytest.mark.xfail_on(uvloop="its low mark is 16 bytes")
async def test_default_limits(loop):
    transport, protocol, peer = await connected(loop)
    with peer:
        assert transport.get_write_buffer_limits() == (16384, 65536)
        await drop(protocol)


async def fill(transport, peer):
    """Fills the kernel's buffers, so that the transport has to buffer every further byte."""
    size = -1
    while transport.get_write_buffer_size() == 0 or size != transport.get_write_buffer_size():
        if transport.get_write_buffer_size() == 0:
            transport.write(bytes(65536))
        size = transport.get_write_buffer_size()
        await asyncio.sleep(0.002)
    return size


@pytest.mark.skip_on(uvloop="data that a system call has sent in part counts as buffered until all of it is sent")
async def test_exact_thresholds(loop):
    transport, protocol, peer = await connected(loop, small=True)
    with peer:
        transport.set_write_buffer_limits(high=10**9)
        waiting = await fill(transport, peer)
        high, low = waiting + 1000, waiting // 2
        transport.set_write_buffer_limits(high=high, low=low)
        assert protocol.events == ["made"]
        transport.write(bytes(1000))
        assert transport.get_write_buffer_size() == high
        assert protocol.events == ["made"], "the high mark itself does not pause"
        transport.write(b"x")
        assert protocol.events == ["made", "pause"], "called inside write()"
        transport.write(b"x")
        transport.write(b"x")
        assert protocol.events == ["made", "pause"]
        sizes = []
        protocol.resume_writing = lambda: sizes.append(transport.get_write_buffer_size())
        await peer.read_exactly(1000)
        while not sizes:
            assert transport.get_write_buffer_size() > low or transport.get_write_buffer_size() == 0
            await peer.recv()
            await iterations(2)
        assert sizes[0] <= low
        await drop(protocol)


async def test_zero_limits(loop):
    transport, protocol, peer = await connected(loop, small=True)
    with peer:
        transport.set_write_buffer_limits(0)
        transport.write(b"fits")
        assert protocol.events == ["made"]
        assert await peer.read_exactly(4) == b"fits"
        total = 1 << 20
        transport.write(bytes(total))
        assert protocol.events == ["made", "pause"]
        await peer.read_exactly(total)
        await until(lambda: protocol.events == ["made", "pause", "resume"])
        assert transport.get_write_buffer_size() == 0
        await drop(protocol)


async def test_pause_and_resume_alternate(loop):
    transport, protocol, peer = await connected(loop, small=True)
    with peer:
        for _ in range(5):
            transport.write(bytes(1 << 20))
            assert protocol.events[-1] == "pause"
            await peer.read_exactly(1 << 20)
            await until(lambda: protocol.events[-1] == "resume")
        assert protocol.events == ["made"] + ["pause", "resume"] * 5
        await drop(protocol)


@pytest.mark.skip_on(asyncio="early 3.12 and 3.13 do not pause", when=(3, 12) <= sys.version_info < (3, 14))
async def test_writelines_pauses_too(loop):
    transport, protocol, peer = await connected(loop, small=True)
    with peer:
        transport.writelines([bytes(1 << 20), bytes(1 << 20)])
        assert protocol.events == ["made", "pause"]
        await peer.read_exactly(2 << 20)
        await until(lambda: protocol.events == ["made", "pause", "resume"])
        await drop(protocol)


async def test_new_limits_take_effect_at_once(loop):
    transport, protocol, peer = await connected(loop, small=True)
    with peer:
        transport.set_write_buffer_limits(high=10**9)
        transport.write(bytes(1 << 20))
        assert protocol.events == ["made"]
        transport.set_write_buffer_limits(high=10)
        assert protocol.events == ["made", "pause"]
        await drop(protocol)


async def test_write_in_resume_writing(loop):
    class Refilling(Recorder):
        rounds = 0

        def resume_writing(self):
            super().resume_writing()
            if self.rounds < 5:
                self.rounds += 1
                self.transport.write(bytes(300_000))

    transport, protocol, peer = await connected(loop, Refilling, small=True)
    with peer:
        transport.write(bytes(300_000))
        await peer.read_exactly(6 * 300_000)
        await until(lambda: protocol.events.count("resume") == 6)
        assert protocol.events == ["made"] + ["pause", "resume"] * 6
        await drop(protocol)


async def test_close_while_paused(loop):
    transport, protocol, peer = await connected(loop, small=True)
    with peer:
        transport.write(bytes(1 << 20))
        transport.close()
        assert len(await peer.read_to_end()) == 1 << 20
        await until(lambda: protocol.is_lost)
        assert protocol.events[:2] == ["made", "pause"]
        assert protocol.events[-1] == "lost"


@pytest.mark.parametrize("name", ["pause_writing", "resume_writing"])
async def test_a_failing_callback_is_reported(loop, reported, name):
    class Failing(Recorder):
        pass

    def fails(_self):
        raise LookupError(name)

    setattr(Failing, name, fails)
    transport, protocol, peer = await connected(loop, Failing, small=True)
    with peer:
        transport.write(bytes(1 << 20))
        await peer.read_exactly(1 << 20)
        await until(lambda: reported)
        assert reported.messages == [f"protocol.{name}() failed"]
        assert str(reported.exceptions[0]) == name
        assert reported[0]["transport"] is transport
        assert reported[0]["protocol"] is protocol
        assert not transport.is_closing()
        await drop(protocol)
        reported.clear()


async def test_pause_reading(loop):
    transport, protocol, peer = await connected(loop)
    with peer:
        assert transport.is_reading()
        transport.pause_reading()
        assert not transport.is_reading()
        transport.pause_reading()
        await peer.send(b"hello")
        await asyncio.sleep(0.003)
        assert protocol.data == b""
        transport.resume_reading()
        transport.resume_reading()
        assert transport.is_reading()
        await until(lambda: protocol.data == b"hello")
        await drop(protocol)
        assert not transport.is_reading()


async def test_a_paused_transport_stops_the_sender(loop):
    transport, protocol, peer = await connected(loop, small=True)
    with peer:
        transport.pause_reading()
        sent = 0
        with pytest.raises(BlockingIOError):
            while sent < 64 << 20:
                sent += peer.sock.send(bytes(65536))
        transport.resume_reading()
        await until(lambda: len(protocol.data) == sent)
        await drop(protocol)


async def test_pause_in_data_received(loop):
    """After each piece of data, no more arrives until resume_reading(). In the end, all data has arrived, in order."""

    class Pausing(Recorder):
        def data_received(self, data):
            super().data_received(data)
            self.transport.pause_reading()
            self.calls = getattr(self, "calls", 0) + 1

    transport, protocol, peer = await connected(loop, Pausing)
    expected = bytes(range(256)) * 4096
    with peer:
        sending = loop.create_task(peer.send(expected))
        calls = 0
        while len(protocol.data) < len(expected):
            await until(lambda n=calls: getattr(protocol, "calls", 0) > n)
            await iterations(3)
            calls += 1
            assert protocol.calls == calls
            transport.resume_reading()
        await sending
        assert protocol.data == expected
        await drop(protocol)


async def test_pause_and_resume_in_data_received(loop):
    class Toggling(Recorder):
        def data_received(self, data):
            super().data_received(data)
            self.transport.pause_reading()
            self.transport.resume_reading()

    _, protocol, peer = await connected(loop, Toggling)
    with peer:
        await peer.send(bytes(1 << 20))
        await until(lambda: len(protocol.data) == 1 << 20)
        await drop(protocol)


@pytest.mark.xfail_on(uvloop="reading starts after connection_made in any case")
async def test_pause_reading_in_connection_made(loop):
    class Paused(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            transport.pause_reading()

    for how in ("accepted", "client", "server"):
        transport, protocol, peer = await connected(loop, Paused, how)
        with peer:
            await peer.send(b"hello")
            await asyncio.sleep(0.003)
            assert protocol.data == b""
            assert not transport.is_reading()
            transport.resume_reading()
            await until(lambda p=protocol: p.data == b"hello")
            await drop(protocol)


async def test_end_of_stream_is_held_back_while_paused(loop):
    transport, protocol, peer = await connected(loop)
    with peer:
        transport.pause_reading()
        await peer.send(b"last")
        peer.close()
        await asyncio.sleep(0.003)
        assert protocol.events == ["made"]
        transport.resume_reading()
        await until(lambda: protocol.is_lost)
        assert protocol.events == ["made", "data", "eof", "lost"]
        assert protocol.data == b"last"


async def test_pause_and_resume_after_close(loop):
    transport, protocol, peer = await connected(loop)
    with peer:
        transport.close()
        transport.pause_reading()
        transport.resume_reading()
        assert not transport.is_reading()
        await until(lambda: protocol.is_lost)
        transport.pause_reading()
        transport.resume_reading()
        await iterations(2)


async def test_close_while_reading_is_paused(loop):
    transport, protocol, peer = await connected(loop)
    with peer:
        transport.pause_reading()
        await peer.send(b"never read")
        await iterations(2)
        transport.close()
        await until(lambda: protocol.is_lost)
        assert protocol.events == ["made", "lost"]
