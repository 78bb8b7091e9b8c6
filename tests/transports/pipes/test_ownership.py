"""Ownership of pipes: after a call that fails, the caller still owns the pipe; a transport closes its pipe exactly
once. The extra info and the reprs of transports are tested here, too.
"""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import warnings
import weakref

import pytest
from support import Ends, Recorder, is_open, iterations, pipe_ends, until

DIRECTIONS = ("read", "write")


def connect(loop, direction, factory, pipe):
    return {"read": loop.connect_read_pipe, "write": loop.connect_write_pipe}[direction](factory, pipe)


REFUSALS = {
    "read": "Pipe transport is for pipes/sockets only.",
    "write": "Pipe transport is only for pipes, sockets and character devices",
}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.skip_on(uvloop="accepts regular files")
async def test_regular_files_are_refused_and_stay_open(loop, direction):
    with tempfile.TemporaryFile() as file:
        with pytest.raises(ValueError) as caught:
            await connect(loop, direction, Recorder, file)
        assert str(caught.value) == REFUSALS[direction]
        assert not file.closed
        assert os.get_blocking(file.fileno())
        assert is_open(file.fileno())


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.leaks_on(asyncio="on Python 3.14, it warns of its own unfinished transport")
async def test_closed_files_are_refused(loop, direction):
    ends = pipe_ends("pipe", direction)
    ends.close_other()
    ends.file.close()
    with pytest.raises(ValueError, match="closed file"):
        await connect(loop, direction, Recorder, ends.file)


@pytest.mark.parametrize("direction", DIRECTIONS)
async def test_a_factory_that_raises_leaves_the_pipe_to_the_caller(loop, direction):
    def fails():
        raise LookupError

    with pipe_ends("pipe", direction) as ends:
        with pytest.raises(LookupError):
            await connect(loop, direction, fails, ends.file)
        await iterations(3)
        assert is_open(ends.number)
        assert not ends.file.closed


@pytest.mark.skip_on(uvloop="never calls connection_lost()")
@pytest.mark.parametrize("direction", DIRECTIONS)
async def test_cancelled_while_it_connects(loop, direction):
    protocol = Recorder()
    with pipe_ends("pipe", direction) as ends:
        task = loop.create_task(connect(loop, direction, lambda: protocol, ends.file))
        loop.call_soon(task.cancel)  # runs after the task's first step, while the task waits for connection_made()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: protocol.is_lost)
        assert protocol.events == ["made", "lost"]
        assert ends.file.closed


@pytest.mark.parametrize("direction", DIRECTIONS)
async def test_the_descriptor_is_closed_once(loop, direction):
    """uvloop #763: a second close would close whichever file has the number by then."""
    with pipe_ends("pipe", direction) as ends:
        transport, protocol = await connect(loop, direction, Recorder, ends.file)
        transport.close()
        await until(lambda: protocol.is_lost)
        await until(lambda: not is_open(ends.number))
        taken = []
        while ends.number not in taken:
            taken.append(os.dup(ends.other))
        transport.close()
        ends.file.close()
        await iterations(3)
        transport = protocol = None
        ends.file = open(os.devnull, "rb")
        gc.collect()
        await iterations(3)
        for number in taken:
            os.close(number)  # raises if the transport has closed one of them


@pytest.mark.parametrize("direction", DIRECTIONS)
async def test_the_pipe_object_is_closed_once(loop, direction):
    class Counting:
        def __init__(self, file):
            self.file = file
            self.closed = 0

        def fileno(self):
            return self.file.fileno()

        def close(self):
            self.closed += 1
            self.file.close()

    with pipe_ends("pipe", direction) as ends:
        pipe = Counting(ends.file)
        transport, protocol = await connect(loop, direction, Recorder, pipe)
        transport.close()
        await until(lambda: protocol.is_lost)
        await iterations(2)
        del transport
        gc.collect()
        assert pipe.closed == 1


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.skip_on(uvloop="drops the exception of close()")
@pytest.mark.leaks_on(asyncio="warns that the transport is not closed")
async def test_an_error_in_close_of_a_pipe_is_reported(loop, reported, direction):
    class Stubborn:
        def __init__(self, file):
            self.file = file

        def fileno(self):
            return self.file.fileno()

        def close(self):
            self.file.close()
            raise OSError("stubborn")

    with pipe_ends("pipe", direction) as ends:
        transport, protocol = await connect(loop, direction, Recorder, Stubborn(ends.file))
        transport.close()
        await until(lambda: reported)
        assert protocol.lost_with == [None]
        assert [str(error) for error in reported.exceptions] == ["stubborn"]
        reported.clear()


@pytest.mark.parametrize("kind", ["pipe", "socket", "tty"])
@pytest.mark.parametrize("direction", DIRECTIONS)
async def test_is_set_to_non_blocking(loop, direction, kind):
    with pipe_ends(kind, direction) as ends:
        os.set_blocking(ends.number, True)
        transport, protocol = await connect(loop, direction, Recorder, ends.file)
        assert not os.get_blocking(ends.number)
        transport.close()
        await until(lambda: protocol.is_lost)


@pytest.mark.skip_on(uvloop="never ends")
async def test_both_directions_over_one_descriptor(loop):
    """The program reads and writes a terminal through the same file."""
    with pipe_ends("tty", "write") as ends:
        file = open(os.dup(ends.number), "r+b", buffering=0)
        ends.file.close()
        with Ends(file, os.dup(ends.other)) as both:
            reading, reader = await loop.connect_read_pipe(Recorder, file)
            writing, writer = await loop.connect_write_pipe(Recorder, file)
            both.send(b"in")
            writing.write(b"out")
            assert await both.read_exactly(3) == b"out"
            await until(lambda: reader.data == b"in")
            writing.write(bytes(1 << 17))
            both.send(b"put")
            assert await both.read_exactly(1 << 17) == bytes(1 << 17)
            await until(lambda: reader.data == b"input")
            reading.close()
            writing.close()
            await until(lambda: reader.is_lost and writer.is_lost)
            assert file.closed


@pytest.mark.skip_on(uvloop="close() of the loop hangs")
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_dropped_unclosed(new_loop, direction):
    loop = new_loop()
    with pipe_ends("pipe", direction) as ends:
        transport, protocol = loop.run_until_complete(connect(loop, direction, Recorder, ends.file))
        protocol.transport = None
        text = repr(transport)
        loop.close()
        assert "fd=" in text
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del transport, protocol
            gc.collect()
        messages = [str(warning.message) for warning in caught if warning.category is ResourceWarning]
        assert any(message.startswith("unclosed transport <") for message in messages)
        assert ends.file.closed
        assert not is_open(ends.number)


@pytest.mark.parametrize("direction", DIRECTIONS)
async def test_cycles_are_collected(loop, direction):
    with pipe_ends("pipe", direction) as ends:
        transport, protocol = await connect(loop, direction, Recorder, ends.file)
        protocol.own = transport
        refs = [weakref.ref(protocol)]
        transport.close()
        await until(lambda: protocol.is_lost)
        transport = protocol = None
        gc.collect()
        assert [ref() for ref in refs] == [None]


# ---------------------------------------------------------------- extra info and reprs


@pytest.mark.xfail_on(uvloop="its transports do not derive from asyncio's")
@pytest.mark.parametrize("direction", DIRECTIONS)
async def test_is_one_of_asyncios_transports(loop, direction):
    with pipe_ends("pipe", direction) as ends:
        transport, protocol = await connect(loop, direction, Recorder, ends.file)
        transport.close()
        await until(lambda: protocol.is_lost)
        assert isinstance(transport, asyncio.BaseTransport)
        assert isinstance(transport, {"read": asyncio.ReadTransport, "write": asyncio.WriteTransport}[direction])


@pytest.mark.parametrize("direction", DIRECTIONS)
async def test_extra_info(loop, direction):
    with pipe_ends("pipe", direction) as ends:
        transport, protocol = await connect(loop, direction, Recorder, ends.file)
        assert transport.get_extra_info("pipe") is ends.file
        assert transport.get_extra_info("no such thing", 5) == 5
        transport.close()
        await until(lambda: protocol.is_lost)
        assert transport.get_extra_info("pipe") is ends.file


@pytest.mark.skip_on(uvloop="other messages; after a failed test, close() of the loop hangs")
async def test_repr(loop):
    with pipe_ends("pipe", "read") as read_ends, pipe_ends("pipe", "write") as write_ends:
        reading, reader = await loop.connect_read_pipe(Recorder, read_ends.file)
        writing, writer = await loop.connect_write_pipe(Recorder, write_ends.file)

        def words(transport):
            name, *words = repr(transport).strip("<>").split()
            assert name.lstrip("_").removeprefix("Unix") in ("ReadPipeTransport", "WritePipeTransport")
            return " ".join(words)

        read_fd, write_fd = f"fd={read_ends.number}", f"fd={write_ends.number}"
        assert words(reading) == f"{read_fd} polling"
        reading.pause_reading()
        assert words(reading) == f"{read_fd} idle"
        assert words(writing) == f"{write_fd} idle bufsize=0"
        writing.write(bytes(1 << 20))
        left = writing.get_write_buffer_size()
        assert words(writing) == f"{write_fd} polling bufsize={left}"
        writing.close()
        assert words(writing) == f"closing {write_fd} polling bufsize={left}"
        writing.abort()
        reading.close()
        assert words(reading) == f"closing {read_fd} idle"
        await until(lambda: reader.is_lost and writer.is_lost)
        assert words(reading).startswith(f"closed {read_fd}")
        assert words(writing).startswith(f"closed {write_fd}")


@pytest.mark.skip_on(uvloop="other messages; after a failed test, close() of the loop hangs")
@pytest.mark.parametrize("direction", DIRECTIONS)
async def test_debug_log(loop, caplog, direction):
    loop.set_debug(True)
    caplog.set_level("DEBUG", "asyncio")
    with pipe_ends("pipe", direction) as ends:
        transport, protocol = await connect(loop, direction, Recorder, ends.file)
        texts = [record.getMessage() for record in caplog.records]
        assert f"{direction.capitalize()} pipe {ends.number} connected: ({transport!r}, {protocol!r})" in texts
        if direction == "read":
            transport.pause_reading()
            transport.resume_reading()
        caplog.clear()
        ends.close_other()
        await until(lambda: protocol.is_lost)
        texts = [record.getMessage() for record in caplog.records]
        assert any("was closed by peer" in text for text in texts)
        caplog.clear()
