"""Binary files with a buffer: :class:`BinaryFile`."""

from __future__ import annotations

import asyncio
import operator
import os
import warnings

from grapeshot._loop import aio

from ._raw import BUFFER_SIZE, RawFile, checked_size, read_into

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from _typeshed import ReadableBuffer, WriteableBuffer

_WHENCES = {os.SEEK_SET, os.SEEK_CUR, os.SEEK_END} | {
    getattr(os, name) for name in ("SEEK_DATA", "SEEK_HOLE") if hasattr(os, name)
}


class BinaryFile(RawFile):
    """A binary file with a buffer, like :class:`io.BufferedReader`, ``BufferedWriter`` or ``BufferedRandom``.

    The buffer holds data that was read ahead or data that waits to be written, but never both.
    """

    def __init__(self, *args: Any, buffer_size: int = BUFFER_SIZE, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._buffer_size = buffer_size
        # The bytes that were read ahead, and how many of them the program has got.
        self._ahead = b""
        self._taken = 0
        self._collected: list[bytes] = []
        self._collected_len = 0

    def __del__(self, _warn: Any = warnings.warn) -> None:
        if getattr(self, "_collected_len", 0) and not self.closed and not self._under_way:
            try:
                self._write_at_once()
            except OSError as error:
                _warn(
                    f"{self._collected_len} bytes were not written to {self!r}: {error}", ResourceWarning, source=self
                )
        super().__del__(_warn)

    def _write_at_once(self) -> None:
        data = b"".join(self._collected)
        while data:
            count = os.pwrite(self._fd, data, self._position) if self._tracks else os.write(self._fd, data)
            self._collected = [data]
            self._written(count)
            data = data[count:]

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
        """Move the position back to the end of the data that the program has got."""
        if self._rest() and self._is_seekable:
            self._move_to(-self._rest(), os.SEEK_CUR)
        self._ahead, self._taken = b"", 0

    def _logical_position(self) -> int:
        """Return the position as the program sees it."""
        return self._raw_position() - self._rest() + self._collected_len

    def _go_back(self, position: int) -> None:
        """Move the position of a file that is being read, and forget what was read ahead."""
        self._ahead, self._taken = b"", 0
        self._move_to(position)

    async def _fill(self) -> bool:
        """Read ahead; return False at the end of the file. This drops data that was read ahead earlier."""
        self._ahead, self._taken = await self._read_some(self._buffer_size), 0
        return bool(self._ahead)

    async def _flush(self) -> None:
        """Write the collected data. What a system call does not write stays collected."""
        while self._collected:
            data = b"".join(self._collected)
            self._collected = [data]
            await self._write_some(data)

    def _written(self, count: int) -> None:
        super()._written(count)
        rest = self._collected[0][count:]
        self._collected[:1] = [rest] if rest else []
        self._collected_len -= count

    async def _before_reading(self) -> None:
        await super()._before_reading()
        if self._collected:
            await self._flush()

    # --- reading ---

    async def read(self, size: int | None = -1, /) -> bytes:
        """Return ``size`` bytes, fewer only at the end of the file; with -1 or None, everything up to the end.

        Raises:
            OSError: a call failed. The number and the text are the system's.
            io.UnsupportedOperation: the file is not open for reading.
            ValueError: the file is closed.
        """
        size = checked_size(size)
        async with self._lock:
            await self._before_reading()
            if 0 <= size <= self._rest():
                return self._take(size)
            mark = self._mark()
            # An empty piece is left out, because join() copies nothing if there is only one piece.
            parts = [self._take(self._rest())] if self._rest() else []
            left = size - len(parts[0]) if parts else size
            try:
                while size < 0 or left > 0:
                    # Large reads go around the buffer.
                    data = await self._read_some(self._length_of_rest() if size < 0 else max(left, self._buffer_size))
                    if not data:
                        break
                    parts.append(data)
                    left -= len(data)
            except BaseException:
                self._rewind(mark, parts)
                raise
            self._ahead, self._taken = b"", 0
            if size >= 0 and left < 0:
                self._ahead, parts[-1] = parts[-1], parts[-1][:left]
                self._taken = len(self._ahead) + left
            return b"".join(parts)

    async def read1(self, size: int = -1, /) -> bytes:
        """Return up to ``size`` bytes with at most one call. Raises the same exceptions as :meth:`read`."""
        size = checked_size(size)
        async with self._lock:
            await self._before_reading()
            return await self._read1(self._buffer_size if size < 0 else size)

    async def _read1(self, size: int) -> bytes:
        if size and not self._rest():
            await self._fill()
        return self._take(size)

    async def readinto1(self, buffer: WriteableBuffer, /) -> int:
        """Read into a buffer with at most one call. Raises the same exceptions as :meth:`read`."""
        return await read_into(buffer, self.read1)

    async def peek(self, size: int = 0, /) -> bytes:
        """Return bytes without taking them, with at most one call. Raises the same exceptions as :meth:`read`."""
        async with self._lock:
            await self._before_reading()
            if not self._rest():
                await self._fill()
            return self._ahead[self._taken :]

    async def _line(self, limit: int) -> bytes:
        at = self._ahead.find(b"\n", self._taken)
        if at >= 0 and limit < 0:
            return self._take(at + 1 - self._taken)
        mark, parts, length = self._mark(), [], 0
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
            self._rewind(mark, parts)
            raise
        return b"".join(parts)

    def _mark(self) -> int:
        return self._position - self._rest()

    def _rewind(self, mark: int, taken: list[bytes]) -> None:
        if self._tracks:
            self._position, self._ahead, self._taken = mark, b"", 0
        else:
            self._ahead, self._taken = b"".join(taken) + self._ahead[self._taken :], 0

    # --- writing ---

    async def write(self, data: ReadableBuffer, /) -> int:
        """Collect the data, and write all collected data if it exceeds the buffer size; return the length of ``data``.

        Raises:
            OSError: a call failed, for example because the disk is full. Data that was not written stays in the buffer.
            io.UnsupportedOperation: the file is not open for writing.
            ValueError: the file is closed.
        """
        octets = aio.octets(data)
        async with self._lock:
            self._check_writable()
            await self._ready()
            self._check_writable()
            if self._ahead:
                self._forget_ahead()
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
            await self._ready()
            await self._flush()

    # --- position and length ---

    async def tell(self) -> int:
        """Return the position in bytes. Raises OSError if the file has none."""
        return self._logical_position()

    async def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Write the buffer, move the position and return it. ``whence`` is any value that the system supports.

        Raises:
            OSError: the file has no positions, or this position is not possible.
            ValueError: the file is closed, or ``whence`` is unknown.
        """
        offset = operator.index(offset)
        if whence not in _WHENCES:
            raise ValueError(f"whence value {whence} unsupported")
        async with self._lock:
            self._raw_position()
            await self._ready()
            await self._flush()
            position = self._raw_position()
            if whence == os.SEEK_CUR:
                offset, whence = position - self._rest() + offset, os.SEEK_SET
            if whence == os.SEEK_SET and position - len(self._ahead) <= offset <= position:
                self._taken = offset - (position - len(self._ahead))
                return offset
            found = self._move_to(offset, whence)
            self._ahead, self._taken = b"", 0
            return found

    async def truncate(self, size: int | None = None, /) -> int:
        """Write the buffer, change the file's length to ``size`` (by default the position), and return that length.

        Raises:
            OSError: the call failed.
            io.UnsupportedOperation: the file is not open for writing.
        """
        async with self._lock:
            self._check_writable()
            await self._ready()
            await self._flush()
            self._forget_ahead()
            return await self._truncate(size)

    async def _close(self) -> None:
        try:
            await self._ready()
            await self._flush()
        except asyncio.CancelledError:
            self._start_closing()
            raise
        except OSError:
            # Data that could not be written is lost, as in io.BufferedWriter.
            self._collected, self._collected_len = [], 0
            await super()._close()
            raise
        if self._ahead and not self._closefd:
            self._forget_ahead()
        await super()._close()

    def _before_closing(self, fd: int, close: Callable[[], object]) -> None:
        """Write what a cancelled ``close()`` has left in the buffer, then call the argument ``close``.

        If the write fails, asyncio logs the exception. If the loop is closed, the data is lost, as in asyncio's
        transports.
        """
        if not self._collected:
            close()
            return
        data = b"".join(self._collected)
        self._collected = [data]

        def on_end(outcome: Any) -> None:
            if isinstance(outcome, int) and outcome > 0:
                self._written(outcome)
                self._before_closing(fd, close)
            else:
                close()

        try:
            self._queue.start("write", fd, data, self._offset(), on_end=on_end)
        except RuntimeError:  # the loop is closed
            pass  # `start` has called on_end, which closes the file
        except OSError as exc:  # there is no thread that could write; on_end was called in this case, too
            context = {"message": "the buffered data of a file was not written", "exception": exc, "file": self}
            self._queue.loop.call_exception_handler(context)
