"""What all files have in common, and :class:`RawFile`, which has no buffer.

If a file was opened by its path, the file object usually keeps the position itself, and passes it to the system with
each call that reads or writes. So an interrupted read does not move the position. Pipes, files in append mode, and
files that were opened by a descriptor use the descriptor's own position instead. Bytes that an interrupted read has
taken from such a file are given to the next read.

The number of bytes that a call has written is recorded when the call ends (``_written``), even if nobody waits for the
call any longer. So data is neither lost nor written twice after an interruption.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import io
import operator
import os
import stat
import warnings
from functools import partial

from grapeshot._loop import aio

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any, NoReturn, Self

    from _typeshed import ReadableBuffer, WriteableBuffer

# How much is read ahead, and how much is collected before it is written, unless `buffering` says otherwise.
BUFFER_SIZE = 64 * 1024
# The most that one call reads when it reads to the end of a file.
_MAX_READ = 16 * 1024 * 1024


def checked_size(size: int | None) -> int:
    """Return ``size`` as an int, and -1 for None. Raises TypeError if it is neither an integer nor None."""
    return -1 if size is None else operator.index(size)


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def read_into(buffer: WriteableBuffer, read: Callable[[int], Any]) -> int:
    with memoryview(buffer) as view, view.cast("B") as octets:
        if view.readonly:
            raise TypeError("readinto() argument must be read-write bytes-like object")
        # The call must not write into the caller's buffer, because the call goes on if the task is cancelled.
        data = await read(len(octets))
        octets[: len(data)] = data
    return len(data)


class AsyncFile:
    """The base class of binary files and text files."""

    name: Any
    mode: str
    _lock: asyncio.Lock

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        if self.closed:
            raise ValueError("I/O operation on closed file.")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        line = await self.readline()
        if not line:
            raise StopAsyncIteration
        return line

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise TypeError(f"cannot pickle {type(self).__name__!r} object")

    async def readline(self, size: int | None = -1, /) -> Any:
        """Return the next line, or at most ``size`` bytes or characters of it; empty at the end of the file."""
        async with self._lock:
            await self._before_reading()
            return await self._line(checked_size(size))

    async def readlines(self, hint: int | None = -1, /) -> list[Any]:
        """Return the rest of the lines as a list; with ``hint``, stop after that many bytes or characters."""
        lines, length, hint = [], 0, checked_size(hint)
        async with self._lock:
            await self._before_reading()
            mark = self._mark()
            try:
                while line := await self._line(-1):
                    lines.append(line)
                    length += len(line)
                    if 0 < hint <= length:
                        break
            except BaseException:
                self._rewind(mark, lines)
                raise
        return lines

    async def close(self) -> None:
        """Write what is in the buffer, and close the file. A second call does nothing."""
        raise NotImplementedError

    async def _before_reading(self) -> None:
        """Check that the file can be read, and wait until nothing else uses it."""
        raise NotImplementedError

    async def _line(self, limit: int) -> Any:
        raise NotImplementedError

    def _mark(self) -> Any:
        """Return what :meth:`_rewind` needs to undo the reads that follow."""
        raise NotImplementedError

    def _rewind(self, mark: Any, taken: list[Any]) -> None:
        """Undo the reads since ``mark``, which have returned ``taken``."""
        raise NotImplementedError


class RawFile(AsyncFile):
    """A file without a buffer, from ``open(..., buffering=0)``.

    As in :class:`io.FileIO`, ``read(size)`` and ``write`` make at most one call.
    """

    def __init__(
        self,
        queue: aio.AioQueue,
        fd: int,
        name: Any,
        mode: str,
        *,
        closefd: bool,
        appends: bool,
        status: os.stat_result,
    ) -> None:
        self.name = name
        self.mode = mode
        self._queue = queue
        self._fd = fd
        self._closefd = closefd
        self._lock = asyncio.Lock()
        # The number of calls that use the descriptor, including interrupted ones.
        self._under_way = 0
        # Called once no call uses the descriptor any longer.
        self._when_idle: list[Callable[[], object]] = []
        self._can_read = "r" in mode or "+" in mode
        self._can_write = mode.strip("rb") != ""
        self._is_regular = stat.S_ISREG(status.st_mode)
        self._is_seekable = True
        self._position = 0
        try:
            self._position = os.lseek(fd, 0, os.SEEK_END if appends else os.SEEK_CUR)
        except OSError as error:
            if error.errno != errno.ESPIPE:
                raise
            self._is_seekable = False
        is_own = self._is_seekable and not isinstance(name, int)
        # Whether this object keeps the position.
        self._tracks = is_own and not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND
        # Bytes that an interrupted read has taken from a file whose position this object does not keep.
        self._returned = b""

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"fd={self._fd}"
        return f"<{type(self).__name__} name={self.name!r} mode={self.mode!r} {state}>"

    def __del__(self, _warn: Any = warnings.warn) -> None:
        if getattr(self, "_fd", -1) >= 0 and self._closefd:
            _warn(f"unclosed file {self!r}", ResourceWarning, source=self)
            fd, self._fd = self._fd, -1
            os.close(fd)

    # --- the calls ---

    async def _ready(self) -> None:
        """Wait until interrupted calls have ended, because they still use the descriptor and may change this object."""
        self._check_loop()
        while self._under_way:
            idle = self._queue.loop.create_future()
            self._when_idle.append(partial(_set_done, idle))
            await idle

    async def _call(self, name: str, *args: Any, on_end: Callable[[Any], object] | None = None) -> Any:
        def ended(outcome: Any) -> None:
            try:
                if on_end is not None:
                    on_end(outcome)
            finally:
                self._under_way -= 1
                if not self._under_way:
                    actions, self._when_idle = self._when_idle, []
                    for action in actions:
                        action()

        self._under_way += 1
        return await self._queue.start(name, self._fd, *args, on_end=ended)

    def _offset(self) -> int:
        """Return the offset for the next call."""
        return self._position if self._tracks else aio.OWN_POSITION

    async def _read_some(self, size: int) -> bytes:
        """Read up to ``size`` bytes at the position, and move the position."""
        if size <= 0:
            return b""
        if self._returned:
            data, self._returned = self._returned[:size], self._returned[size:]
            return data
        data_or_none = aio.read_now(self._fd, size, self._offset())
        if data_or_none is None:
            data = await self._read_call(size)
        else:
            data = data_or_none
            if self._queue.is_turn_over(len(data)):
                try:
                    await aio.others_run()
                except BaseException:
                    self._put_back(data)
                    raise
        if self._tracks:
            self._position += len(data)
        return data

    async def _read_call(self, size: int) -> bytes:
        def on_end(outcome: Any) -> None:
            if isinstance(outcome, bytes):
                self._put_back(outcome)  # the task takes them out again when it goes on, unless it was cancelled

        data: bytes = await self._call("read", size, self._offset(), on_end=on_end)
        if not self._tracks and data:
            self._returned = self._returned[len(data) :]
        return data

    def _put_back(self, data: bytes) -> None:
        """Keep bytes for the next read, unless the next read gets them from the file again."""
        if not self._tracks:
            self._returned += data

    async def _write_some(self, data: bytes) -> int:
        """Write ``data``, or only its beginning, at the position, and move the position when the call ends."""

        def on_end(outcome: Any) -> None:
            if isinstance(outcome, int):
                self._written(outcome)

        return await self._call("write", data, self._offset(), on_end=on_end)  # type: ignore[no-any-return]

    def _written(self, count: int) -> None:
        if self._tracks:
            self._position += count

    def _length_of_rest(self) -> int:
        """Return how much to read at once: the rest of the file, and one byte more to see whether it has grown."""
        rest = 0
        if self._is_regular:
            rest = os.fstat(self._fd).st_size - self._raw_position() + 1
        return min(max(rest, BUFFER_SIZE), _MAX_READ)

    # --- checks ---

    def _check_loop(self) -> None:
        if self._queue.loop is not asyncio.get_running_loop():
            raise RuntimeError(f"{self!r} belongs to another event loop")

    def _check_open(self) -> None:
        if self._fd < 0:
            raise ValueError("I/O operation on closed file.")

    def _check_readable(self) -> None:
        self._check_open()
        if not self._can_read:
            raise io.UnsupportedOperation("File not open for reading")

    def _check_writable(self) -> None:
        self._check_open()
        if not self._can_write:
            raise io.UnsupportedOperation("File not open for writing")

    async def _before_reading(self) -> None:
        self._check_readable()
        await self._ready()
        self._check_readable()

    # --- state ---

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""
        return self._fd < 0

    @property
    def closefd(self) -> bool:
        """Whether closing the file closes its descriptor."""
        return self._closefd

    def fileno(self) -> int:
        """Return the descriptor. The descriptor's own position may differ from the position of this file."""
        self._check_open()
        return self._fd

    def readable(self) -> bool:
        """Whether the file was opened for reading."""
        self._check_open()
        return self._can_read

    async def writable(self) -> bool:
        """Whether the file was opened for writing."""
        self._check_open()
        return self._can_write

    async def seekable(self) -> bool:
        """Whether the file has positions."""
        self._check_open()
        return self._is_seekable

    async def isatty(self) -> bool:
        """Whether the file is a terminal."""
        self._check_open()
        return os.isatty(self._fd)

    # --- reading and writing ---

    async def read(self, size: int | None = -1, /) -> bytes:
        """Return up to ``size`` bytes, b"" at the end; with -1 or None, everything up to the end.

        Raises:
            OSError: the call failed. The number and the text are the system's.
            io.UnsupportedOperation: the file is not open for reading.
            ValueError: the file is closed.
        """
        size = checked_size(size)
        async with self._lock:
            await self._before_reading()
            if size >= 0:
                return await self._read_some(size)
            mark, parts = self._mark(), []
            try:
                while data := await self._read_some(self._length_of_rest()):
                    parts.append(data)
            except BaseException:
                self._rewind(mark, parts)
                raise
            return b"".join(parts)

    async def readall(self) -> bytes:
        """Return everything up to the end. Raises the same exceptions as :meth:`read`."""
        return await self.read()

    async def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Read into a buffer; return the number of bytes, 0 at the end. Raises the same exceptions as :meth:`read`."""
        return await read_into(buffer, self.read)

    async def _line(self, limit: int) -> bytes:
        """Without a buffer, a line is read byte by byte."""
        mark, octets = self._mark(), bytearray()
        try:
            while limit < 0 or len(octets) < limit:
                octet = await self._read_some(1)
                octets += octet
                if not octet or octet == b"\n":
                    break
        except BaseException:
            self._rewind(mark, [bytes(octets)])
            raise
        return bytes(octets)

    def _mark(self) -> int:
        return self._position

    def _rewind(self, mark: int, taken: list[bytes]) -> None:
        if self._tracks:
            self._position = mark
        else:
            self._returned = b"".join(taken) + self._returned

    async def write(self, data: ReadableBuffer, /) -> int:
        """Write the data; return the number of bytes written, which may be fewer than all.

        Raises:
            OSError: the call failed, for example because the disk is full.
            io.UnsupportedOperation: the file is not open for writing.
            ValueError: the file is closed.
        """
        octets = aio.octets(data)
        async with self._lock:
            self._check_writable()
            await self._ready()
            self._check_writable()
            return await self._write_some(octets)

    async def writelines(self, lines: Iterable[ReadableBuffer], /) -> None:
        """Write all lines. Raises the same exceptions as :meth:`write`."""
        self._check_writable()
        for line in lines:
            await self.write(line)

    # --- position and length ---

    def _raw_position(self) -> int:
        """Return where the next call reads or writes. Raises OSError if the file has no positions."""
        self._check_open()
        if self._tracks:
            return self._position
        return os.lseek(self._fd, 0, os.SEEK_CUR) - len(self._returned)

    def _move_to(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move the position, and return it. The system checks the offset."""
        if whence == os.SEEK_CUR:
            offset, whence = self._raw_position() + offset, os.SEEK_SET
        self._position = os.lseek(self._fd, offset, whence)
        self._returned = b""
        return self._position

    async def tell(self) -> int:
        """Return the position in bytes. Raises OSError if the file has none."""
        return self._raw_position()

    async def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move the position, and return it. ``whence`` is any value that the system supports.

        Raises:
            OSError: the file has no positions, or this position is not possible.
            ValueError: the file is closed.
        """
        offset = operator.index(offset)
        async with self._lock:
            self._raw_position()
            await self._ready()
            return self._move_to(offset, whence)

    async def truncate(self, size: int | None = None, /) -> int:
        """Change the file's length to ``size`` (by default the position), and return that length. Keep the position.

        Raises:
            OSError: the call failed.
            io.UnsupportedOperation: the file is not open for writing.
        """
        async with self._lock:
            self._check_writable()
            await self._ready()
            return await self._truncate(size)

    async def _truncate(self, size: int | None) -> int:
        length = self._raw_position() if size is None else operator.index(size)
        await self._call("truncate", length)
        return length

    async def flush(self) -> None:
        """Do nothing: there is no buffer."""
        self._check_open()

    async def fsync(self, *, only_data: bool = False) -> None:
        """Write the buffer, and wait until the system has written the file to its disk.

        With ``only_data``, metadata that is not needed for reading the data may be left out, as by ``fdatasync(2)``.

        Raises:
            OSError: the disk reports an error, or the file is not on a disk (a pipe, for instance).
        """
        await self.flush()
        async with self._lock:
            self._check_open()
            await self._ready()
            self._check_open()
            await self._call("sync", only_data)

    # --- closing ---

    async def close(self) -> None:
        """Close the file. A second call does nothing.

        Raises:
            OSError: the system reports an error of an earlier write. The file is closed nevertheless.
        """
        async with self._lock:
            if self._fd >= 0:
                await self._close()

    async def _close(self) -> None:
        self._check_loop()
        await self._start_closing()

    def _start_closing(self) -> asyncio.Future[None]:
        """Close the file once the last call has ended.

        Return a future that is done when the file is closed. Cancelling the future has no effect.
        """
        fd, self._fd = self._fd, -1
        closed: asyncio.Future[None] = self._queue.loop.create_future()

        def close() -> None:
            if not self._closefd:
                end(None)
                return
            try:
                call = self._queue.start("close", fd)
            except (OSError, RuntimeError):  # there is no thread that could do it, or the loop is closed
                os.close(fd)
                end(None)
            else:
                call.add_done_callback(lambda call: end(call.exception()))

        def end(error: BaseException | None) -> None:
            if closed.done():
                return
            if error is not None:
                closed.set_exception(error)
            else:
                closed.set_result(None)

        if self._under_way:
            self._when_idle.append(lambda: self._before_closing(fd, close))
        else:
            self._before_closing(fd, close)
        return closed

    def _before_closing(self, _fd: int, close: Callable[[], object]) -> None:
        close()
