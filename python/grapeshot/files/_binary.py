"""Binary files: :class:`RawFile` makes one call for each method, :class:`BinaryFile` has a buffer.

A file keeps its position itself and passes it to each call, so that an interrupted call does not move it. Files without
positions (pipes, terminals) and files in append mode use the position of the descriptor.
"""

from __future__ import annotations

import asyncio
import errno
import io
import os
import stat
import warnings

from grapeshot._loop import aio

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, Self

    from _typeshed import ReadableBuffer, WriteableBuffer

# How much is read ahead, and how much is collected before it is written, unless `buffering` says otherwise.
_BUFFER_SIZE = 64 * 1024
# The most that one call reads when it reads to the end of a file.
_MAX_READ = 16 * 1024 * 1024


class AsyncFile:
    """What binary files and text files have in common."""

    name: Any
    mode: str

    async def __aenter__(self) -> Self:
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

    async def readline(self, size: int | None = -1, /) -> Any:
        """Return the next line with its end, or at most ``size`` bytes or characters of it; empty at the end."""
        raise NotImplementedError

    async def close(self) -> None:
        """Write what is in the buffer, and close the file. A second call does nothing."""
        raise NotImplementedError

    async def readlines(self, hint: int | None = -1, /) -> list[Any]:
        """Return the rest of the lines as a list; with ``hint``, only until they have so many bytes or characters."""
        lines, length = [], 0
        async for line in self:
            lines.append(line)
            length += len(line)
            if hint is not None and 0 < hint <= length:
                break
        return lines


class RawFile(AsyncFile):
    """A file without a buffer, from ``open(..., buffering=0)``. Like :class:`io.FileIO`, each method makes one call."""

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
        # The calls that use the descriptor, the interrupted ones among them, and whoever waits for their end.
        self._under_way = 0
        self._idle: asyncio.Future[None] | None = None
        self._can_read = "r" in mode or "+" in mode
        self._can_write = mode.strip("rb") != ""
        self._appends = appends
        self._is_regular = stat.S_ISREG(status.st_mode)
        # None if the file has no positions.
        self._position: int | None = None
        try:
            self._position = os.lseek(fd, 0, os.SEEK_END if appends else os.SEEK_CUR)
        except OSError as error:
            if error.errno != errno.ESPIPE:
                raise

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"fd={self._fd}"
        return f"<{type(self).__name__} name={self.name!r} mode={self.mode!r} {state}>"

    def __del__(self, _warn: Any = warnings.warn) -> None:
        if getattr(self, "_fd", -1) >= 0 and self._closefd:
            _warn(f"unclosed file {self!r}", ResourceWarning, source=self)
            fd, self._fd = self._fd, -1
            os.close(fd)

    # --- the calls ---

    async def _call(self, name: str, *args: Any) -> Any:
        if self._under_way:
            await self._wait_idle()
        self._under_way += 1
        return await self._queue.start(name, self._fd, *args, on_end=self._call_ended)

    def _call_ended(self) -> None:
        self._under_way -= 1
        if not self._under_way and self._idle is not None:
            if not self._idle.done():
                self._idle.set_result(None)
            self._idle = None

    async def _wait_idle(self) -> None:
        """Wait until an interrupted call has ended: it still uses the descriptor."""
        while self._under_way:
            if self._idle is None:
                self._idle = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._idle)

    async def _read_some(self, size: int) -> bytes:
        """Read up to ``size`` bytes at the position, which is moved."""
        if size <= 0:
            return b""
        if self._under_way:
            await self._wait_idle()
        offset = aio.OWN_POSITION if self._position is None else self._position
        data: bytes | None = aio.read_now(self._fd, size, offset)
        if data is None:
            data = await self._call("read", size, offset)
        elif self._queue.is_turn_over(len(data)):
            await aio.others_run()
        if self._position is not None:
            self._position += len(data)
        return data

    async def _write_some(self, data: Any) -> int:
        """Write the front of ``data`` at the position, which is moved."""
        offset = aio.OWN_POSITION if self._position is None or self._appends else self._position
        written: int = await self._call("write", data, offset)
        if self._position is not None:
            self._position = os.lseek(self._fd, 0, os.SEEK_CUR) if self._appends else self._position + written
        return written

    async def _read_rest(self) -> list[bytes]:
        """Read to the end of the file."""
        parts = []
        while data := await self._read_some(self._length_of_rest()):
            parts.append(data)
        return parts

    def _length_of_rest(self) -> int:
        """Return how much to read at once: the rest of the file and a byte, which shows whether it has grown."""
        rest = 0
        if self._is_regular and self._position is not None:
            rest = os.fstat(self._fd).st_size - self._position + 1
        return min(max(rest, _BUFFER_SIZE), _MAX_READ)

    # --- checks ---

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

    def _checked_position(self) -> int:
        self._check_open()
        if self._position is None:
            raise OSError(errno.ESPIPE, os.strerror(errno.ESPIPE))
        return self._position

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
        """Return the descriptor. Its own position is not that of this file."""
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
        return self._position is not None

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
        async with self._lock:
            self._check_readable()
            if size is None or size < 0:
                return b"".join(await self._read_rest())
            return await self._read_some(size)

    async def readall(self) -> bytes:
        """Return everything up to the end. Raises the same exceptions as :meth:`read`."""
        return await self.read()

    async def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Read into a buffer; return the number of bytes, 0 at the end. Raises the same exceptions as :meth:`read`."""
        with memoryview(buffer) as view, view.cast("B") as octets:
            # The call must not write into the caller's buffer: it goes on if the task is cancelled.
            data = await self.read(len(octets))
            octets[: len(data)] = data
        return len(data)

    async def readline(self, size: int | None = -1, /) -> bytes:
        """Return the next line, or at most ``size`` bytes of it. Without a buffer, it reads byte by byte."""
        line = bytearray()
        async with self._lock:
            self._check_readable()
            while size is None or size < 0 or len(line) < size:
                octet = await self._read_some(1)
                line += octet
                if not octet or octet == b"\n":
                    break
        return bytes(line)

    async def write(self, data: ReadableBuffer, /) -> int:
        """Write the data; return the number of bytes written, which may be less than all.

        Raises:
            OSError: the call failed, for example because the disk is full.
            io.UnsupportedOperation: the file is not open for writing.
            ValueError: the file is closed.
        """
        async with self._lock:
            self._check_writable()
            return await self._write_some(data)

    async def writelines(self, lines: Iterable[ReadableBuffer], /) -> None:
        """Write all lines. Raises the same exceptions as :meth:`write`."""
        for line in lines:
            await self.write(line)

    # --- position and length ---

    async def tell(self) -> int:
        """Return the position in bytes. Raises OSError if the file has none."""
        return self._checked_position()

    async def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move the position, and return it. ``whence`` is any of the system's.

        Raises:
            OSError: the file has no positions, or not this one.
            ValueError: the file is closed.
        """
        async with self._lock:
            return self._seek(offset, whence)

    def _seek(self, offset: int, whence: int) -> int:
        position = self._checked_position()
        if whence == os.SEEK_CUR:
            offset, whence = position + offset, os.SEEK_SET
        # The system checks the offset. The descriptor's own position is used only by calls that follow a seek.
        self._position = os.lseek(self._fd, offset, whence)
        return self._position

    async def truncate(self, size: int | None = None, /) -> int:
        """Change the length of the file to ``size``, by default to the position; return it. The position stays.

        Raises:
            OSError: the call failed.
            io.UnsupportedOperation: the file is not open for writing.
        """
        async with self._lock:
            self._check_writable()
            return await self._truncate(size)

    async def _truncate(self, size: int | None) -> int:
        length = self._checked_position() if size is None else size
        await self._call("truncate", length)
        return length

    async def flush(self) -> None:
        """Do nothing: there is no buffer."""
        self._check_open()

    async def fsync(self, *, only_data: bool = False) -> None:
        """Write the buffer, and wait until the system has written the file to its disk.

        With ``only_data``, metadata that is not needed for reading the data may be left out, as by ``fdatasync(2)``.

        Raises:
            OSError: the disk reports an error, or the file is a pipe or another kind without a disk.
        """
        await self.flush()
        async with self._lock:
            self._check_open()
            await self._call("sync", only_data)

    async def close(self) -> None:
        """Close the file. A second call does nothing.

        Raises:
            OSError: the system reports an error of an earlier write. The file is closed nevertheless.
        """
        async with self._lock:
            await self._close()

    async def _close(self) -> None:
        if self._fd < 0:
            return
        await self._wait_idle()
        fd, self._fd = self._fd, -1
        if self._closefd:
            try:
                closing = self._queue.start("close", fd)
            except OSError:  # there is no thread that could do it
                os.close(fd)
            else:
                await closing
        elif self._position is not None:
            os.lseek(fd, self._position, os.SEEK_SET)


class BinaryFile(RawFile):
    """A binary file with a buffer, like :class:`io.BufferedReader`, ``BufferedWriter`` or ``BufferedRandom``.

    What is read ahead and what waits to be written are never in the buffer at the same time.
    """

    def __init__(self, *args: Any, buffer_size: int = _BUFFER_SIZE, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._buffer_size = buffer_size
        # Read ahead: the bytes, and how many of them the program has got.
        self._ahead = b""
        self._taken = 0
        self._collected: list[bytes] = []
        self._collected_len = 0

    def __del__(self, _warn: Any = warnings.warn) -> None:
        if getattr(self, "_collected_len", 0) and not self.closed:
            _warn(f"{self._collected_len} bytes were not written to {self!r}", ResourceWarning, source=self)
        super().__del__(_warn)

    # --- the buffer ---

    def _rest(self) -> int:
        """The number of bytes that were read ahead and not taken."""
        return len(self._ahead) - self._taken

    def _take(self, count: int) -> bytes:
        """Take up to ``count`` of the bytes that were read ahead."""
        data = self._ahead[self._taken : self._taken + count]
        self._taken += len(data)
        return data

    def _forget_ahead(self) -> None:
        """Move the position back to what the program has got."""
        if self._position is not None:
            self._position -= self._rest()
        self._ahead, self._taken = b"", 0

    def _logical_position(self) -> int:
        """Return the position as the program sees it."""
        return self._checked_position() - self._rest() + self._collected_len

    def _go_back(self, position: int) -> None:
        """Move the position of a file that is being read."""
        self._position, self._ahead, self._taken = position, b"", 0

    async def _fill(self) -> bool:
        """Read ahead once everything is taken; return False at the end of the file."""
        self._ahead, self._taken = await self._read_some(self._buffer_size), 0
        return bool(self._ahead)

    async def _flush(self) -> None:
        """Write what was collected. After an error it stays collected."""
        while self._collected:
            data = b"".join(self._collected)
            self._collected, self._collected_len = [data], len(data)
            try:
                written = await self._write_some(data)
            except OSError:
                raise
            except BaseException:
                # The interrupted call goes on. Data at a fixed position may be written twice; other data must not.
                if self._appends or self._position is None:
                    self._collected, self._collected_len = [], 0
                raise
            data = data[written:]
            self._collected, self._collected_len = [data] if data else [], len(data)

    async def _before_reading(self) -> None:
        self._check_readable()
        if self._collected:
            await self._flush()

    # --- reading ---

    async def read(self, size: int | None = -1, /) -> bytes:
        """Return ``size`` bytes, less only at the end of the file; with -1 or None, everything up to the end.

        Raises:
            OSError: a call failed. The number and the text are the system's.
            io.UnsupportedOperation: the file is not open for reading.
            ValueError: the file is closed.
        """
        async with self._lock:
            await self._before_reading()
            if size is None or size < 0:
                size = None
            elif size <= self._rest():
                return self._take(size)
            return await self._read_on(size)

    async def _read_on(self, size: int | None) -> bytes:
        """Return what was read ahead, and read on until it is ``size`` bytes, or to the end. An error loses nothing."""
        position = self._position
        parts = [self._ahead[self._taken :]]
        left = 1 if size is None else size - len(parts[0])
        try:
            while left > 0:
                # Large reads go around the buffer.
                data = await self._read_some(self._length_of_rest() if size is None else max(left, self._buffer_size))
                if not data:
                    break
                parts.append(data)
                if size is not None:
                    left -= len(data)
        except BaseException:
            if position is None:
                self._ahead, self._taken = b"".join(parts), 0
            else:
                self._position = position
            raise
        self._ahead, self._taken = b"", 0
        if left < 0:
            self._ahead, parts[-1] = parts[-1], parts[-1][:left]
            self._taken = len(self._ahead) + left
        return b"".join(parts)

    async def read1(self, size: int = -1, /) -> bytes:
        """Return up to ``size`` bytes with at most one call. Raises the same exceptions as :meth:`read`."""
        async with self._lock:
            await self._before_reading()
            if size < 0:
                size = self._buffer_size
            if size and not self._rest():
                await self._fill()
            return self._take(size)

    async def readinto1(self, buffer: WriteableBuffer, /) -> int:
        """Read into a buffer with at most one call. Raises the same exceptions as :meth:`read`."""
        with memoryview(buffer) as view, view.cast("B") as octets:
            data = await self.read1(len(octets))
            octets[: len(data)] = data
        return len(data)

    async def peek(self, size: int = 0, /) -> bytes:
        """Return bytes without taking them, with at most one call. Raises the same exceptions as :meth:`read`."""
        async with self._lock:
            await self._before_reading()
            if not self._rest():
                await self._fill()
            return self._ahead[self._taken :]

    async def readline(self, size: int | None = -1, /) -> bytes:
        """Return the next line with its end, or at most ``size`` bytes of it; b"" at the end of the file.

        Raises the same exceptions as :meth:`read`.
        """
        async with self._lock:
            await self._before_reading()
            limit = -1 if size is None else size
            at = self._ahead.find(b"\n", self._taken)
            if at >= 0 and limit < 0:
                return self._take(at + 1 - self._taken)
            return await self._read_line(limit)

    async def _read_line(self, limit: int) -> bytes:
        position, before, taken = self._position, self._ahead, self._taken
        parts: list[bytes] = []
        length = 0
        try:
            while limit < 0 or length < limit:
                if not self._rest() and not await self._fill():
                    break
                at = self._ahead.find(b"\n", self._taken)
                count = self._rest() if at < 0 else at + 1 - self._taken
                parts.append(self._take(count if limit < 0 else min(count, limit - length)))
                length += len(parts[-1])
                if parts[-1].endswith(b"\n"):
                    break
        except BaseException:
            if position is None:
                self._ahead, self._taken = b"".join(parts) + self._ahead[self._taken :], 0
            else:
                self._position, self._ahead, self._taken = position, before, taken
            raise
        return b"".join(parts)

    # --- writing ---

    async def write(self, data: ReadableBuffer, /) -> int:
        """Collect the data, or write it if there is much of it; return its length in bytes.

        Raises:
            OSError: a call failed, for example because the disk is full. What was not written stays in the buffer.
            io.UnsupportedOperation: the file is not open for writing.
            ValueError: the file is closed.
        """
        if isinstance(data, str):
            raise TypeError("a bytes-like object is required, not 'str'")
        async with self._lock:
            self._check_writable()
            if self._ahead:
                self._forget_ahead()
            octets = data if type(data) is bytes else bytes(data)
            if octets:
                self._collected.append(octets)
                self._collected_len += len(octets)
                if self._collected_len > self._buffer_size:
                    await self._flush()
            return len(octets)

    async def flush(self) -> None:
        """Write what is in the buffer. Raises the same exceptions as :meth:`write`."""
        async with self._lock:
            self._check_open()
            await self._flush()

    # --- position and length ---

    async def tell(self) -> int:
        """Return the position in bytes. Raises OSError if the file has none."""
        return self._logical_position()

    async def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Write the buffer, move the position and return it. ``whence`` is any of the system's.

        Raises:
            OSError: the file has no positions, or not this one.
            ValueError: the file is closed.
        """
        async with self._lock:
            self._checked_position()
            await self._flush()
            position = self._checked_position()
            if whence == os.SEEK_CUR:
                offset, whence = position - self._rest() + offset, os.SEEK_SET
            if whence == os.SEEK_SET and position - len(self._ahead) <= offset <= position:
                self._taken = offset - (position - len(self._ahead))
                return offset
            found = self._seek(offset, whence)
            self._ahead, self._taken = b"", 0
            return found

    async def truncate(self, size: int | None = None, /) -> int:
        """Write the buffer, and change the length of the file to ``size``, by default to the position; return it.

        Raises:
            OSError: the call failed.
            io.UnsupportedOperation: the file is not open for writing.
        """
        async with self._lock:
            self._check_writable()
            await self._flush()
            self._forget_ahead()
            return await self._truncate(size)

    async def _close(self) -> None:
        if self._fd < 0:
            return
        try:
            await self._flush()
        finally:
            if self._ahead:
                self._forget_ahead()
            # What could not be written is lost, as in io.BufferedWriter.
            self._collected, self._collected_len = [], 0
            await super()._close()
