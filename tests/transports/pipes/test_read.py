"""connect_read_pipe: data, the end of the stream, pausing, and protocols that raise."""

from __future__ import annotations

import asyncio
import errno
import os

import pytest
from support import PIPE_KINDS, BufferedRecorder, Recorder, is_open, iterations, pipe_ends, until


class Broken(LookupError):
    pass


def failing(name):
    """Return a subclass of Recorder whose method `name` records all calls, and raises in the first one."""

    def fails(self, *args):
        answer = getattr(Recorder, name)(self, *args)
        if not getattr(self, "has_failed", False):
            self.has_failed = True
            raise Broken(name)
        return answer

    return type("Failing", (Recorder,), {name: fails})


@pytest.mark.parametrize("kind", PIPE_KINDS)
async def test_delivers_written_data(loop, kind):
    with pipe_ends(kind, "read") as ends:
        transport, protocol = await loop.connect_read_pipe(Recorder, ends.file)
        assert protocol.events == ["made"]
        ends.send(b"one")
        await until(lambda: protocol.data == b"one")
        ends.send(b"two")
        await until(lambda: protocol.data == b"onetwo")
        transport.close()
        await until(lambda: protocol.is_lost)
        assert protocol.events == ["made", "data", "lost"]
        assert protocol.lost_with == [None]
        assert ends.file.closed


@pytest.mark.parametrize("kind", ["pipe", "fifo", "socket"])
async def test_end_of_the_stream(loop, kind):
    with pipe_ends(kind, "read") as ends:
        transport, protocol = await loop.connect_read_pipe(Recorder, ends.file)
        ends.send(b"last")
        ends.close_other()
        await until(lambda: protocol.is_lost)
        assert protocol.data == b"last"
        assert protocol.events == ["made", "data", "eof", "lost"]
        assert protocol.lost_with == [None]
        assert transport.is_closing()
        assert ends.file.closed


@pytest.mark.skip_on(uvloop="stays open if eof_received() is true")
async def test_an_ended_pipe_is_closed_even_if_eof_received_returns_true(loop):
    with pipe_ends("pipe", "read") as ends:
        transport, protocol = await loop.connect_read_pipe(Recorder, ends.file)
        protocol.keep_open = True
        ends.close_other()
        await until(lambda: protocol.events[-1] != "made")
        await iterations(5)
        assert protocol.events == ["made", "eof", "lost"]
        del transport


async def test_closed_by_eof_received(loop):
    order = []

    class Closing(Recorder):
        def eof_received(self):
            order.append("eof")
            self.transport.close()
            return super().eof_received()

        def connection_lost(self, exc):
            order.append("lost")
            super().connection_lost(exc)

    with pipe_ends("pipe", "read") as ends:
        _, protocol = await loop.connect_read_pipe(Closing, ends.file)
        ends.close_other()
        await until(lambda: protocol.is_lost)
        await iterations(3)
        assert order == ["eof", "lost"]
        assert protocol.lost_with == [None]


@pytest.mark.skip_on(uvloop="libuv treats the hangup as the end of the stream")
async def test_terminal_that_hangs_up(loop):
    with pipe_ends("tty", "read") as ends:
        _, protocol = await loop.connect_read_pipe(Recorder, ends.file)
        ends.send(b"line")
        await until(lambda: protocol.data == b"line")
        ends.close_other()
        await until(lambda: protocol.is_lost)
        assert protocol.events == ["made", "data", "lost"]
        [exc] = protocol.lost_with
        assert isinstance(exc, OSError)
        assert exc.errno == errno.EIO
        assert ends.file.closed
        protocol.lost_with.clear()


@pytest.mark.parametrize("size", [1 << 16, 3 << 20])
async def test_much_data_arrives_whole(loop, size):
    data = os.urandom(1 << 16) * (size >> 16)
    with pipe_ends("pipe", "read") as ends:
        _, protocol = await loop.connect_read_pipe(Recorder, ends.file)
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(ends.other, view) :]
            except BlockingIOError:
                await asyncio.sleep(0)
        ends.close_other()
        await until(lambda: protocol.is_lost)
        assert protocol.data == data


async def test_pause_and_resume(loop):
    with pipe_ends("pipe", "read") as ends:
        transport, protocol = await loop.connect_read_pipe(Recorder, ends.file)
        assert transport.is_reading()
        transport.pause_reading()
        transport.pause_reading()
        assert not transport.is_reading()
        ends.send(b"later")
        await iterations(5)
        assert protocol.events == ["made"]
        transport.resume_reading()
        transport.resume_reading()
        assert transport.is_reading()
        await until(lambda: protocol.data == b"later")
        transport.close()
        assert not transport.is_reading()
        transport.resume_reading()
        transport.pause_reading()
        assert not transport.is_reading()
        await until(lambda: protocol.is_lost)
        assert protocol.events == ["made", "data", "lost"]


async def test_the_end_waits_for_resume(loop):
    with pipe_ends("pipe", "read") as ends:
        transport, protocol = await loop.connect_read_pipe(Recorder, ends.file)
        transport.pause_reading()
        ends.send(b"rest")
        ends.close_other()
        await iterations(5)
        assert protocol.events == ["made"]
        transport.resume_reading()
        await until(lambda: protocol.is_lost)
        assert protocol.events == ["made", "data", "eof", "lost"]


@pytest.mark.skip_on(uvloop="reads anyway")
async def test_paused_by_connection_made(loop):
    class Paused(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            transport.pause_reading()

    with pipe_ends("pipe", "read") as ends:
        ends.send(b"early")
        transport, protocol = await loop.connect_read_pipe(Paused, ends.file)
        await iterations(5)
        assert protocol.events == ["made"]
        transport.resume_reading()
        await until(lambda: protocol.data == b"early")
        transport.close()
        await until(lambda: protocol.is_lost)


async def test_paused_by_data_received(loop):
    class OneByOne(Recorder):
        def data_received(self, data):
            super().data_received(data)
            self.transport.pause_reading()

    with pipe_ends("pipe", "read") as ends:
        transport, protocol = await loop.connect_read_pipe(OneByOne, ends.file)
        for count in range(1, 4):
            ends.send(b"x")
            await until(lambda count=count: len(protocol.data) == count)
            ends.send(b"y")
            await iterations(4)
            assert len(protocol.data) == count
            assert os.read(ends.file.fileno(), 1) == b"y"
            transport.resume_reading()
        transport.close()
        await until(lambda: protocol.is_lost)


async def test_close_calls_connection_lost_later_and_once(loop):
    with pipe_ends("pipe", "read") as ends:
        transport, protocol = await loop.connect_read_pipe(Recorder, ends.file)
        transport.close()
        assert transport.is_closing()
        assert not protocol.is_lost
        assert is_open(ends.number)
        transport.close()
        ends.send(b"unheard")
        await until(lambda: protocol.is_lost)
        transport.close()
        await iterations(3)
        assert protocol.events == ["made", "lost"]
        assert protocol.lost_with == [None]


@pytest.mark.skip_on(uvloop="closes the pipe")
async def test_data_received_that_raises_is_reported_and_called_again(loop, reported):
    with pipe_ends("pipe", "read") as ends:
        transport, protocol = await loop.connect_read_pipe(failing("data_received"), ends.file)
        ends.send(b"bad")
        await until(lambda: reported)
        ends.send(b"good")
        await until(lambda: protocol.data == b"badgood")
        assert not transport.is_closing()
        [error] = reported.exceptions
        assert isinstance(error, Broken)
        transport.close()
        await until(lambda: protocol.is_lost)
        assert protocol.lost_with == [None]


@pytest.mark.skip_on(uvloop="closes the pipe")
async def test_connection_made_that_raises_is_reported_and_the_pipe_is_still_read(loop, reported):
    with pipe_ends("pipe", "read") as ends:
        transport, protocol = await loop.connect_read_pipe(failing("connection_made"), ends.file)
        assert [type(error) for error in reported.exceptions] == [Broken]
        ends.send(b"heard")
        await until(lambda: protocol.data == b"heard")
        transport.close()
        await until(lambda: protocol.is_lost)


@pytest.mark.parametrize("name", ["eof_received", "connection_lost"])
async def test_the_pipe_is_closed_though_the_last_callbacks_raise(loop, reported, name):
    with pipe_ends("pipe", "read") as ends:
        _, protocol = await loop.connect_read_pipe(failing(name), ends.file)
        ends.close_other()
        await until(lambda: protocol.is_lost)
        await until(lambda: ends.file.closed)
        assert [type(error) for error in reported.exceptions] == [Broken]
        protocol.lost_with.clear()


@pytest.mark.skip_on(uvloop="reads into the buffer")
async def test_a_buffered_protocol_needs_data_received_as_well(loop, reported):
    class Both(BufferedRecorder):
        def data_received(self, data):
            self.data += data

    with pipe_ends("pipe", "read") as ends:
        transport, protocol = await loop.connect_read_pipe(Both, ends.file)
        ends.send(b"objects")
        await until(lambda: protocol.data == b"objects")
        assert not protocol.hints
        transport.set_protocol(BufferedRecorder())
        ends.send(b"nobody")
        await until(lambda: reported)
        assert [type(error) for error in reported.exceptions] == [AttributeError]
        transport.set_protocol(protocol)
        transport.close()
        await until(lambda: protocol.is_lost)


async def test_set_protocol(loop):
    with pipe_ends("pipe", "read") as ends:
        transport, first = await loop.connect_read_pipe(Recorder, ends.file)
        assert transport.get_protocol() is first
        ends.send(b"first")
        await until(lambda: first.data == b"first")
        second = Recorder()
        transport.set_protocol(second)
        assert transport.get_protocol() is second
        ends.send(b"second")
        ends.close_other()
        await until(lambda: second.is_lost)
        assert (first.data, second.data) == (b"first", b"second")
        assert first.events == ["made", "data"]
        first.transport = None


@pytest.mark.parametrize("limit", [1, 64, 1 << 16])
async def test_stream_reader(loop, limit):
    lines = b"".join(b"line %d\n" % number for number in range(2000))
    with pipe_ends("pipe", "read") as ends:
        reader = asyncio.StreamReader(limit=limit)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), ends.file)
        ends.send(lines)
        ends.close_other()
        assert await reader.read(-1) == lines
        assert reader.at_eof()
        transport.close()
        await until(lambda: ends.file.closed)


@pytest.mark.skip_on(uvloop="reports the interrupt like any error")
def test_an_interrupt_in_connection_made_keeps_the_pipe(loop):
    """In the next run of the loop, the pipe and the task that waits for the pipe continue."""

    class Leaving(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            raise KeyboardInterrupt

    with pipe_ends("pipe", "read") as ends:

        async def main():
            transport, protocol = await loop.connect_read_pipe(Leaving, ends.file)
            ends.send(b"works")
            await until(lambda: protocol.data == b"works", "the data")
            transport.close()
            await until(lambda: protocol.is_lost, "connection_lost")

        task = loop.create_task(main())
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(task)
        loop.run_until_complete(task)
