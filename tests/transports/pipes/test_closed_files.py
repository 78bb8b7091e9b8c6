"""Pipes whose file object is closed while the transport uses it. asyncio keeps using the descriptor number, even if
another file gets that number. grapeshot does not read from the other file or write to it.
"""

from __future__ import annotations

import os
import socket

import pytest
from support import ForeignSocket, Recorder, is_closed_error, iterations, pipe_ends, until

pytestmark = pytest.mark.skip_on(asyncio="reads and writes whichever file has the number", uvloop="like asyncio")


class Wrapper:
    """A file object of a user's own class."""

    def __init__(self, file):
        self.file = file

    def fileno(self):
        return self.file.fileno()

    def close(self):
        self.file.close()


KINDS = {
    "raw": lambda number, mode: open(number, mode, buffering=0),
    "buffered": lambda number, mode: open(number, mode),
    "text": lambda number, mode: open(number, mode.rstrip("b")),
    "own": lambda number, mode: Wrapper(open(number, mode, buffering=0)),
    "socket": lambda number, _mode: socket.socket(fileno=number),
}


def ends_of(kind, direction):
    ends = pipe_ends("socket" if kind == "socket" else "pipe", direction)
    number = os.dup(ends.file.fileno())
    ends.file.close()
    ends.file = KINDS[kind](number, "rb" if direction == "read" else "wb")
    ends.number = number
    return ends


@pytest.mark.parametrize("kind", KINDS)
async def test_writing_after_the_file_was_closed(loop, reported, kind):
    with ends_of(kind, "write") as ends:
        transport, protocol = await loop.connect_write_pipe(Recorder, ends.file)
        transport.write(b"before")
        assert await ends.read_exactly(6) == b"before"
        ends.file.close()
        with ForeignSocket(ends.number):
            transport.write(b"lost")
            await until(lambda: protocol.is_lost)
            assert is_closed_error(protocol.lost_with[0])
        assert reported == []


@pytest.mark.parametrize("is_duplicated", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_reading_after_the_file_was_closed(loop, reported, kind, is_duplicated):
    with ends_of(kind, "read") as ends:
        transport, protocol = await loop.connect_read_pipe(Recorder, ends.file)
        ends.send(b"before")
        await until(lambda: protocol.data == b"before")
        duplicate = os.dup(ends.number)
        if not is_duplicated:
            os.close(duplicate)
        ends.file.close()
        with ForeignSocket(ends.number) as foreign:
            foreign.theirs.send(b"not for the protocol")
            if is_duplicated:
                ends.send(b"nobody reads this")
                await until(lambda: protocol.is_lost)
                assert is_closed_error(protocol.lost_with[0])
                assert [is_closed_error(error) for error in reported.exceptions] == [True]
                assert os.read(duplicate, 100) == b"nobody reads this"
                os.close(duplicate)
            else:
                await iterations(3)
                transport.close()
                await until(lambda: protocol.is_lost)
                assert protocol.lost_with == [None]
                assert reported == []
            assert protocol.data == b"before"
            assert foreign.ours.recv(100) == b"not for the protocol"


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_ending_with_a_buffer(loop, how):
    with ends_of("raw", "write") as ends:
        transport, protocol = await loop.connect_write_pipe(Recorder, ends.file)
        transport.write(bytes(1_000_000))
        assert transport.get_write_buffer_size()
        ends.file.close()
        with ForeignSocket(ends.number):
            getattr(transport, how)()
            await until(lambda: protocol.is_lost)
            if how == "close":
                assert is_closed_error(protocol.lost_with[0])
            else:
                assert protocol.lost_with == [None]


async def test_a_raw_file_that_was_taken_out_of_its_buffer_lives_on(loop, reported):
    with ends_of("buffered", "read") as ends:
        _transport, protocol = await loop.connect_read_pipe(Recorder, ends.file)
        raw = ends.file.detach()
        ends.send(b"still read")
        await until(lambda: protocol.data == b"still read")
        ends.close_other()
        await until(lambda: protocol.is_lost)
        ends.file = raw
    assert reported.messages == ["Exception in callback pipe.close()"]  # after detach(), the buffer's close() raises
