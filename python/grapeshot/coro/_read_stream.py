"""``read_stream``: reads lines, delimited parts and fixed lengths from a source that delivers data in pieces."""

from __future__ import annotations

import io
import socket

from . import _errors
from ._files import file_sock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_CHUNK_LEN = 65536
_LONGEST_READ_LEN = 1 << 20


class read_stream:  # noqa: N801  # Shrapnel's name
    """Reads lines, delimited parts or exact lengths from a socket, an :class:`fd_sock`, a :class:`file_sock` or a file.

    ``read_stream(source, limit=65536)``

    If a read is interrupted, times out or fails, the data that it has already got from the source is kept for the next
    read. ``limit`` is the greatest length, in bytes, of a line or a delimited part.

    A file must be binary. If it has a descriptor, it is read through a :class:`file_sock`, unless
    ``socket.makefile()`` made it. The stream never closes its source.

    ::

        stream = coro.read_stream(sock)
        for line in stream:
            ...
    """

    def __init__(self, source: Any, limit: int = 65536) -> None:
        if limit < 1:
            raise ValueError(f"the limit must be at least 1 byte, got {limit}")
        self._limit = limit
        self._recv = _receiver(source)
        self._unread = bytearray()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self._unread)} bytes unread>"

    @property
    def unread(self) -> int:
        """How many bytes were read from the source and not returned yet."""
        return len(self._unread)

    def recv(self, count: int, /) -> bytes:
        """Return the data that has arrived, at most ``count`` bytes; wait if there is none. Return b"" at the end."""
        if count < 0:
            raise ValueError(f"the count must not be negative, got {count}")
        if count > 0 and not self._unread:
            return self._read(count)
        return self._take(min(count, len(self._unread)))

    def read_exact(self, count: int, /) -> bytes:
        """Return exactly ``count`` bytes. Raises EOFError if the stream ends earlier; the data read so far is kept."""
        if count < 0:
            raise ValueError(f"the count must not be negative, got {count}")
        while (missing := count - len(self._unread)) > 0:
            if not self._fill(max(missing, _CHUNK_LEN)):
                raise EOFError(f"the stream ended after {len(self._unread)} of {count} bytes")
        return self._take(count)

    def read_until(self, delimiter: bytes, limit: int | None = None) -> bytes:
        """Return the data up to and including the delimiter.

        After an error, the data read so far is kept for the next read.

        Raises:
            EOFError: the stream ends before the delimiter.
            asyncio.LimitOverrunError: the result would be longer than ``limit`` (None: the limit of the stream).
        """
        end = self._find(delimiter, limit)
        if end is None:
            raise EOFError(f"the stream ended after {len(self._unread)} bytes without {bytes(delimiter)!r}")
        return self._take(end)

    def read_line(self, limit: int | None = None) -> bytes:
        r"""Return the next line with its ``\n``, which the last line may lack. Return b"" at the end of the stream.

        Raises:
            asyncio.LimitOverrunError: the line is longer than ``limit`` (None: the limit of the stream). The data read
                so far is kept for the next read.
        """
        end = self._find(b"\n", limit)
        return self._take(len(self._unread) if end is None else end)

    def read_all(self, limit: int | None = None) -> bytes:
        """Return everything up to the end of the stream. Without ``limit``, the length is not limited.

        Raises:
            asyncio.LimitOverrunError: there are more than ``limit`` bytes. The data read so far is kept for the next
                read.
        """
        while True:
            if limit is not None and len(self._unread) > limit:
                raise _overrun(limit, len(self._unread))
            if not self._fill(_CHUNK_LEN):
                return self._take(len(self._unread))

    def __iter__(self) -> read_stream:
        return self

    def __next__(self) -> bytes:
        line = self.read_line()
        if not line:
            raise StopIteration
        return line

    def _find(self, delimiter: bytes, limit: int | None) -> int | None:
        """Read until the delimiter has come. Return the position after it, or None if the stream ends earlier."""
        if not delimiter:
            raise ValueError("the delimiter must not be empty")
        if limit is None:
            limit = self._limit
        searched = 0
        while True:
            at = self._unread.find(delimiter, searched)
            if at >= 0 and at + len(delimiter) <= limit:
                return at + len(delimiter)
            if at >= 0 or len(self._unread) > limit:
                raise _overrun(limit, at if at >= 0 else len(self._unread))
            # Search the last bytes again after the next read: they may be the beginning of the delimiter.
            searched = max(len(self._unread) - len(delimiter) + 1, 0)
            if not self._fill(_CHUNK_LEN):
                return None

    def _fill(self, count: int) -> bool:
        """Read once from the source; return False at the end."""
        data = self._read(min(count, _LONGEST_READ_LEN))
        self._unread += data
        return bool(data)

    def _read(self, count: int) -> bytes:
        data = self._recv(count)
        if data is None:
            raise BlockingIOError("the source is nonblocking, and has no data now")
        return data

    def _take(self, count: int) -> bytes:
        with memoryview(self._unread) as view:
            data = bytes(view[:count])
        del self._unread[:count]
        return data


def _overrun(limit: int, consumed: int) -> Exception:
    return _errors.LimitOverrunError(f"the data to return is longer than the limit of {limit} bytes", consumed)


def _receiver(source: Any) -> Callable[[int], bytes | None]:
    """Return the function that reads from the source; its argument is the greatest number of bytes to read."""
    if hasattr(source, "recv"):
        return source.recv  # type: ignore[no-any-return]
    if isinstance(source, io.TextIOBase) or not hasattr(source, "read"):
        raise TypeError(f"a socket or a binary file is required, not {type(source).__name__}")
    # A file made by socket.makefile() needs no file_sock: its socket lets other coros run.
    if not isinstance(getattr(source, "raw", source), socket.SocketIO):
        try:
            source.fileno()
        except (AttributeError, OSError):
            pass  # a file in memory, for instance
        else:
            return file_sock(source, closefd=False).recv
    return getattr(source, "read1", source.read)  # type: ignore[no-any-return]
