"""File objects for pipes, sockets and terminals, which several coros may use at the same time.

The classes derive from the classes of :mod:`io`. Only one coro at a time can be in a buffer's methods that read, and
only one in its methods that write. So one coro can read while another one writes (see ``_shared_reads``).
"""

from __future__ import annotations

import io
import socket
import sys

from . import _os, _waits
from ._shared_reads import SharedReads, new_lock, wait_for

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Self

# Before 3.12.4, TextIOWrapper.write() lost text that other threads wrote while it waited (gh-119506).
WRITE_FORGETS = sys.version_info < (3, 12, 4)


def _name_as(call: Callable[..., Any], method: Any) -> Callable[..., Any]:
    call.__name__, call.__qualname__, call.__doc__ = method.__name__, method.__qualname__, method.__doc__
    return call


def _read_alone(method: Any) -> Callable[..., Any]:
    def call(self: Any, *args: Any) -> Any:
        # This is SharedReads.read(), inlined to save a call.
        reads = self._reads
        lock = reads.lock
        if not lock.acquire(False):
            wait_for(lock, self)
        try:
            result = method(self, *args)
            if reads.interruption is not None:
                reads.unread_all(result, args)
            return result
        except BaseException:
            if reads.interruption is not None:
                reads.unread_all(None, args)
            raise
        finally:
            lock.release()

    return _name_as(call, method)


def _alone(method: Any) -> Callable[..., Any]:
    def call(self: Any, *args: Any) -> Any:
        lock = self._lock
        if not lock.acquire(False):
            wait_for(lock, self)
        try:
            return method(self, *args)
        finally:
            lock.release()

    return _name_as(call, method)


class Reader(io.BufferedReader):
    """An :class:`io.BufferedReader` over a raw file that has a :class:`SharedReads` object as ``_reads``."""

    _reads = SharedReads()

    def __init__(self, raw: Any, buffer_size: int = io.DEFAULT_BUFFER_SIZE) -> None:
        self._reads = raw._reads
        super().__init__(raw, buffer_size)

    read = _read_alone(io.BufferedReader.read)
    read1 = _read_alone(io.BufferedReader.read1)
    readinto = _read_alone(io.BufferedReader.readinto)
    readinto1 = _read_alone(io.BufferedReader.readinto1)
    readline = _read_alone(io.BufferedReader.readline)
    peek = _read_alone(io.BufferedReader.peek)
    close = _read_alone(io.BufferedReader.close)

    def __repr__(self) -> str:
        return super().__repr__().replace("<Buffered", "<_io.Buffered", 1)


class Writer(io.BufferedWriter):
    """An :class:`io.BufferedWriter` whose methods let in only one coro at a time."""

    _lock: Any

    def __new__(cls, *_: Any) -> Self:
        self = super().__new__(cls)
        self._lock = new_lock()
        return self

    write = _alone(io.BufferedWriter.write)
    flush = _alone(io.BufferedWriter.flush)
    close = _alone(io.BufferedWriter.close)

    def __repr__(self) -> str:
        return super().__repr__().replace("<Buffered", "<_io.Buffered", 1)


class Pair(io.BufferedRWPair):
    """An :class:`io.BufferedRWPair` on which one coro can read while another one writes."""

    def __init__(self, reader: Any, writer: Any, buffer_size: int = io.DEFAULT_BUFFER_SIZE, /) -> None:
        # The buffers of the base class are not used.
        super().__init__(reader, writer, 1)
        self._reader, self._writer = Reader(reader, buffer_size), Writer(writer, buffer_size)

    def read(self, *args: Any) -> Any:
        return self._reader.read(*args)

    def read1(self, *args: Any) -> Any:
        return self._reader.read1(*args)

    def readinto(self, *args: Any) -> Any:
        return self._reader.readinto(*args)

    def readinto1(self, *args: Any) -> Any:
        return self._reader.readinto1(*args)

    def readline(self, *args: Any) -> Any:
        return self._reader.readline(*args)

    def peek(self, *args: Any) -> Any:
        return self._reader.peek(*args)

    def write(self, *args: Any) -> Any:
        return self._writer.write(*args)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        if not hasattr(self, "_writer"):
            return
        try:
            self._writer.close()
        finally:
            self._reader.close()
            super().close()


class Text(io.TextIOWrapper):
    """An :class:`io.TextIOWrapper` on which one coro can read while another one writes."""

    _lock: Any
    _write_lock: Any

    def __new__(cls, *_: Any, **__: Any) -> Self:
        self = super().__new__(cls)
        self._lock, self._write_lock = new_lock(), new_lock()
        return self

    read = _alone(io.TextIOWrapper.read)
    readline = _alone(io.TextIOWrapper.readline)

    def __repr__(self) -> str:
        return super().__repr__().replace("<TextIOWrapper", "<_io.TextIOWrapper", 1)

    if WRITE_FORGETS:

        def write(self, text: Any, /) -> Any:
            with self._write_lock:
                return super().write(text)


for _kind in (Reader, Writer, Pair, Text):
    _kind.__name__ = _kind.__qualname__ = _kind.__mro__[1].__name__
    _kind.__module__ = "io"


def read_raw(raw: Any, size: int | None = -1, /) -> Any:
    """Implements ``read`` of a raw file with its ``readinto``."""
    if size is None or size < 0:
        return raw.readall()
    buffer = bytearray(size)
    count = raw.readinto(buffer)
    return None if count is None else bytes(buffer[:count])


def read_all_raw(raw: Any) -> Any:
    """Implements ``readall`` of a raw file with its ``read``."""
    parts: list[bytes] = []
    while part := raw.read(io.DEFAULT_BUFFER_SIZE * 8):
        parts.append(part)
    return b"".join(parts) if parts or part is not None else None


class PipeFile(io.FileIO):
    """The raw file of a pipe, a socket or a terminal. Other coros run while a coro waits for a read or a write."""

    # True if a BufferedWriter uses this file. The writer calls `write` again with the rest, so `write` may write only a
    # part of the data. Otherwise `write` writes everything.
    _writes_parts = False

    def __init__(self, *args: Any) -> None:
        self._reads = SharedReads()
        super().__init__(*args)

    def _may_wait(self) -> bool:
        return _waits.can_wait() and not self.closed and _waits.may_block(self.fileno())

    def _readinto(self, buffer: Any) -> Any:
        if self._may_wait() and self.readable():
            with memoryview(buffer) as view, view.cast("B") as octets:
                # Leave read-only buffers to the original: it refuses them before it reads anything.
                if octets.nbytes and not octets.readonly:
                    return _os.read_into_as_coro(self.fileno(), octets)
        return super().readinto(buffer)

    def readinto(self, buffer: Any, /) -> Any:
        return self._reads.fill(self._readinto, buffer)

    def read(self, size: int | None = -1, /) -> Any:
        return read_raw(self, size)

    def readall(self) -> Any:
        return read_all_raw(self)

    def write(self, data: Any, /) -> Any:
        if not self._may_wait() or not self.writable():
            return super().write(data)
        return (_os.write_some if self._writes_parts else _os.write_all)(self.fileno(), data)


class SocketFile(socket.SocketIO):
    """The raw file below the file objects of ``socket.makefile()``."""

    def __init__(self, sock: Any, mode: Any) -> None:
        self._reads = SharedReads()
        super().__init__(sock, mode)

    def readinto(self, buffer: Any, /) -> Any:
        return self._reads.fill(super().readinto, buffer)


SocketFile.__name__ = SocketFile.__qualname__ = "SocketIO"
SocketFile.__module__ = "socket"
