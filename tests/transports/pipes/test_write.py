"""connect_write_pipe: writes at once and later, flow control, the ends of transports, and wrong use."""

from __future__ import annotations

import asyncio
import errno
import os

import pytest
from support import PIPE_KINDS, Recorder, is_open, iterations, pipe_ends, until

BIG = 1 << 20  # more than any of the kernel's buffers takes at once


class Flow(asyncio.BaseProtocol):
    """A protocol with the methods of asyncio.BaseProtocol only. A write pipe's transport needs no other methods."""

    def __init__(self):
        self.events = []

    def connection_made(self, transport):
        self.events.append("made")

    def pause_writing(self):
        self.events.append("pause")

    def resume_writing(self):
        self.events.append("resume")

    def connection_lost(self, exc):
        self.events.append("lost" if exc is None else type(exc).__name__)

    @property
    def is_lost(self):
        return self.events[-1] not in ("made", "pause", "resume")


@pytest.mark.parametrize("kind", PIPE_KINDS)
async def test_a_write_leaves_at_once(loop, kind):
    with pipe_ends(kind, "write") as ends:
        transport, protocol = await loop.connect_write_pipe(Flow, ends.file)
        transport.write(b"one")
        transport.write(bytearray(b"two"))
        transport.write(memoryview(b"xthreex")[1:-1])
        assert transport.get_write_buffer_size() == 0
        assert await ends.read_exactly(11) == b"onetwothree"
        assert not transport.is_closing()
        transport.close()
        await until(lambda: protocol.is_lost)
        assert protocol.events == ["made", "lost"]
        assert ends.file.closed


@pytest.mark.skip_on(uvloop="queues writes until the end of the iteration")
async def test_a_write_needs_no_iteration_of_the_loop(loop):
    with pipe_ends("pipe", "write") as ends:
        transport, protocol = await loop.connect_write_pipe(Flow, ends.file)
        transport.write(b"now")
        assert os.read(ends.other, 10) == b"now"
        transport.writelines([b"these", b"", bytearray(b" too")])
        assert os.read(ends.other, 10) == b"these too"
        transport.close()
        await until(lambda: protocol.is_lost)


@pytest.mark.skip_on(uvloop="sends the later content of a bytearray")
@pytest.mark.parametrize("kind", PIPE_KINDS)
async def test_data_that_does_not_fit_is_sent_later(loop, kind):
    data = os.urandom(BIG)
    changing = bytearray(b"before")
    with pipe_ends(kind, "write") as ends:
        transport, protocol = await loop.connect_write_pipe(Flow, ends.file)
        transport.write(data)
        transport.write(changing)
        changing[:] = b"after!"
        transport.writelines([b"and", b"the", b"rest"])
        assert await ends.read_exactly(BIG) == data
        assert await ends.read_exactly(16) == b"beforeandtherest"
        await until(lambda: transport.get_write_buffer_size() == 0)
        assert protocol.events == ["made", "pause", "resume"]
        transport.close()
        await until(lambda: protocol.is_lost)


async def test_many_chunks_stay_in_order(loop):
    chunks = [b"%05d" % number * (1 + number % 700) for number in range(1500)]
    with pipe_ends("pipe", "write") as ends:
        transport, protocol = await loop.connect_write_pipe(Flow, ends.file)
        for index in range(0, len(chunks), 3):
            transport.write(chunks[index])
            transport.writelines(chunks[index + 1 : index + 3])
        transport.close()
        assert await ends.read_to_end() == b"".join(chunks)
        await until(lambda: protocol.is_lost)
        assert protocol.events[-1] == "lost"


@pytest.mark.skip_on(uvloop="the low watermark is 16 bytes unless set")
async def test_watermarks(loop):
    with pipe_ends("pipe", "write") as ends:
        transport, protocol = await loop.connect_write_pipe(Flow, ends.file)
        assert transport.get_write_buffer_limits() == (16 * 1024, 64 * 1024)
        transport.set_write_buffer_limits(high=1000, low=100)
        assert transport.get_write_buffer_limits() == (100, 1000)
        for wrong in ({"high": 1, "low": 2}, {"high": -1}):
            with pytest.raises(ValueError, match=r"must be >= "):
                transport.set_write_buffer_limits(**wrong)
        transport.write(bytes(BIG))
        waiting = transport.get_write_buffer_size()
        assert waiting > 1000
        assert protocol.events == ["made", "pause"]
        await ends.read_exactly(BIG)
        await until(lambda: protocol.events == ["made", "pause", "resume"])
        assert transport.get_write_buffer_size() <= 100
        transport.close()
        await until(lambda: protocol.is_lost)


async def test_drain_of_a_stream_writer(loop):
    data = os.urandom(BIG)
    with pipe_ends("pipe", "write") as ends:
        transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, ends.file)
        writer = asyncio.StreamWriter(transport, protocol, None, loop)
        writer.write(data)
        draining = asyncio.ensure_future(writer.drain())
        await iterations(3)
        assert not draining.done()
        assert await ends.read_exactly(BIG) == data
        await draining
        transport.close()
        await until(lambda: ends.file.closed)


@pytest.mark.skip_on(uvloop="write_eof() fails with ENOTSOCK, or leaves the pipe open")
@pytest.mark.parametrize("end", ["close", "write_eof"])
@pytest.mark.parametrize("kind", ["pipe", "fifo", "socket"])
async def test_buffered_data_is_sent_before_the_end(loop, kind, end):
    with pipe_ends(kind, "write") as ends:
        transport, protocol = await loop.connect_write_pipe(Flow, ends.file)
        assert transport.can_write_eof()
        transport.write(bytes(BIG))
        getattr(transport, end)()
        getattr(transport, end)()
        await iterations(3)
        assert not protocol.is_lost
        assert len(await ends.read_to_end()) == BIG
        await until(lambda: protocol.is_lost)
        assert protocol.events == ["made", "pause", "resume", "lost"] or protocol.events == ["made", "pause", "lost"]
        assert ends.file.closed


async def test_close_calls_connection_lost_later_and_once(loop):
    with pipe_ends("pipe", "write") as ends:
        transport, protocol = await loop.connect_write_pipe(Flow, ends.file)
        transport.close()
        assert transport.is_closing()
        assert protocol.events == ["made"]
        assert is_open(ends.number)
        transport.write_eof()
        transport.close()
        await until(lambda: protocol.is_lost)
        transport.close()
        await iterations(3)
        assert protocol.events == ["made", "lost"]
        assert await ends.read_to_end() == b""


@pytest.mark.skip_on(uvloop="libuv aborts the process when the loop is closed")
async def test_abort_drops_buffered_data(loop):
    with pipe_ends("pipe", "write") as ends:
        transport, protocol = await loop.connect_write_pipe(Flow, ends.file)
        transport.write(bytes(BIG))
        left = transport.get_write_buffer_size()
        transport.abort()
        assert transport.is_closing()
        assert transport.get_write_buffer_size() == 0
        await until(lambda: protocol.is_lost)
        assert protocol.events == ["made", "pause", "lost"]
        assert len(await ends.read_to_end()) == BIG - left


@pytest.mark.skip_on(uvloop="libuv aborts the process when the loop is closed")
@pytest.mark.xfail_on(asyncio="calls connection_lost() twice")
async def test_abort_after_close(loop, reported):
    with pipe_ends("pipe", "write") as ends:
        transport, protocol = await loop.connect_write_pipe(Flow, ends.file)
        transport.write(bytes(BIG))
        transport.close()
        transport.abort()
        transport.abort()
        await until(lambda: protocol.is_lost)
        await iterations(3)
        assert protocol.events == ["made", "pause", "lost"]
        assert not reported


# ---------------------------------------------------------------- readers that go away


@pytest.mark.parametrize("kind", ["pipe", "fifo", "socket"])
async def test_reader_closes(loop, kind):
    with pipe_ends(kind, "write") as ends:
        transport, protocol = await loop.connect_write_pipe(Flow, ends.file)
        transport.write(b"heard")
        assert await ends.read_exactly(5) == b"heard"
        await iterations(2)
        ends.close_other()
        await until(lambda: protocol.is_lost)
        assert protocol.events == ["made", "lost"]
        assert transport.is_closing()
        assert ends.file.closed


@pytest.mark.parametrize("is_closed", [False, True], ids=["open", "closing"])
@pytest.mark.parametrize("kind", ["pipe", "fifo", "socket"])
async def test_reader_closes_with_unread_data(loop, kind, is_closed):
    with pipe_ends(kind, "write") as ends:
        transport, protocol = await loop.connect_write_pipe(Flow, ends.file)
        transport.write(bytes(BIG))
        if is_closed:
            transport.close()
        await iterations(2)
        ends.close_other()
        await until(lambda: protocol.is_lost)
        await iterations(2)
        assert protocol.events in (["made", "pause", "BrokenPipeError"], ["made", "pause", "ConnectionResetError"])
        assert transport.get_write_buffer_size() == 0
        assert ends.file.closed


async def test_a_write_finds_that_the_reader_is_gone(loop):
    class Lost(Recorder):
        pass

    with pipe_ends("pipe", "write") as ends:
        transport, protocol = await loop.connect_write_pipe(Lost, ends.file)
        ends.close_other()
        transport.write(b"too late")
        await until(lambda: protocol.is_lost)
        await iterations(2)
        [exc] = protocol.lost_with
        assert isinstance(exc, BrokenPipeError)
        assert exc.errno == errno.EPIPE
        protocol.lost_with.clear()


async def test_unread_data_is_not_taken_for_a_lost_reader(loop):
    with pipe_ends("fifo", "write") as ends:
        transport, protocol = await loop.connect_write_pipe(Flow, ends.file)
        for _ in range(3):
            transport.write(b"unread")
            await iterations(5)
            assert not transport.is_closing()
        assert await ends.read_exactly(18) == b"unread" * 3
        transport.close()
        await until(lambda: protocol.is_lost)


# ---------------------------------------------------------------- devices, late writes, wrong data, protocols' errors


@pytest.mark.skip_on(uvloop="treats a character device as a terminal")
async def test_device_that_takes_everything(loop):
    transport, protocol = await loop.connect_write_pipe(Flow, open(os.devnull, "wb", buffering=0))
    transport.write(bytes(BIG))
    assert transport.get_write_buffer_size() == 0
    await iterations(2)
    transport.close()
    await until(lambda: protocol.is_lost)
    assert protocol.events == ["made", "lost"]


@pytest.mark.skip_on(uvloop="warns earlier, with another message")
@pytest.mark.parametrize(("end", "quiet_writes"), [("close", 5), ("abort", 5), ("lost", 4)])
async def test_writes_that_come_too_late_are_ignored_and_then_logged(loop, caplog, end, quiet_writes):
    with pipe_ends("pipe", "write") as ends:
        transport, protocol = await loop.connect_write_pipe(Flow, ends.file)
        if end == "lost":
            ends.close_other()
            transport.write(b"finds out")
        else:
            getattr(transport, end)()
        for _ in range(quiet_writes):
            transport.write(b"late")
        assert not caplog.records
        transport.write(b"late")
        transport.writelines([b"late", b"later"])
        transport.write(b"")
        texts = [record.getMessage() for record in caplog.records]
        assert texts == ["pipe closed by peer or os.write(pipe, data) raised exception."] * 2
        caplog.clear()
        await until(lambda: protocol.is_lost)


@pytest.mark.skip_on(uvloop="accepts None as bytes")
async def test_only_bytes_can_be_written(loop):
    with pipe_ends("pipe", "write") as ends:
        transport, protocol = await loop.connect_write_pipe(Flow, ends.file)
        for wrong in ("text", 1, None, [b"list"]):
            with pytest.raises((TypeError, AssertionError)):  # asyncio raises AssertionError
                transport.write(wrong)
        with pytest.raises(TypeError):
            transport.writelines([b"good", "text"])
        transport.write(b"")
        transport.writelines([])
        transport.close()
        assert await ends.read_to_end() == b""
        await until(lambda: protocol.is_lost)


@pytest.mark.parametrize("name", ["pause_writing", "resume_writing"])
async def test_flow_control_that_raises_is_reported(loop, reported, name):
    def fails(self):
        raise LookupError(name)

    with pipe_ends("pipe", "write") as ends:
        factory = type("Failing", (Flow,), {name: fails})
        transport, protocol = await loop.connect_write_pipe(factory, ends.file)
        transport.write(bytes(BIG))
        transport.close()
        assert len(await ends.read_to_end()) == BIG
        await until(lambda: protocol.is_lost)
        [context] = reported
        assert context["message"] == f"protocol.{name}() failed"
        assert isinstance(context["exception"], LookupError)
        assert context["transport"] is transport
        assert context["protocol"] is protocol


@pytest.mark.xfail_on(asyncio="loses the data of the last write", uvloop="accepts writes after close()")
async def test_resume_writing_writes_and_closes(loop):
    class More(Flow):
        def resume_writing(self):
            super().resume_writing()
            transport.write(b"more")
            transport.close()
            transport.write(b"too late")

    with pipe_ends("pipe", "write") as ends:
        transport, protocol = await loop.connect_write_pipe(More, ends.file)
        transport.write(bytes(BIG))
        assert await ends.read_to_end() == bytes(BIG) + b"more"
        await until(lambda: protocol.is_lost)
        assert protocol.events == ["made", "pause", "resume", "lost"]
