"""``read_stream``: reads of lines, delimited and counted parts from what comes in pieces."""

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
    """Reads a socket, a :class:`fd_sock`, a :class:`file_sock` or a binary file in parts of the caller's choice.

    ``read_stream(source, limit=65536)``

    What was read from the source and not returned yet is kept: also if a read is interrupted, times out or fails. The
    next read gets it. ``limit`` is the length of the longest line or delimited part.

    A file object with a descriptor is read by a :class:`file_sock`, and stays open. The source is never closed.

    ::

        stream = coro.read_stream(sock)
        for line in stream:
            ...
    """

    def __init__(self, source: Any, limit: int = 65536) -> None:
        if limit < 1:
            raise ValueError("a limit is 1 or above")
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
        """Return what is there, ``count`` bytes at most; wait until there is something. Empty at the end."""
        if count > 0 and not self._unread:
            return self._read(count)
        return self._take(min(count, len(self._unread)))

    def read_exact(self, count: int, /) -> bytes:
        """Return exactly ``count`` bytes. Raises EOFError if the stream ends before; what has come is kept."""
        if count < 0:
            raise ValueError("a count is 0 or above")
        while (missing := count - len(self._unread)) > 0:
            if not self._fill(max(missing, _CHUNK_LEN)):
                raise EOFError(f"the stream has ended after {len(self._unread)} of {count} bytes")
        return self._take(count)

    def read_until(self, delimiter: bytes, limit: int | None = None) -> bytes:
        """Return everything up to the delimiter, and the delimiter.

        Raises:
            EOFError: the stream ends before; what has come is kept.
            asyncio.LimitOverrunError: that would be longer than ``limit``; what has come is kept.
        """
        end = self._find(delimiter, limit)
        if end is None:
            raise EOFError(f"the stream has ended after {len(self._unread)} bytes without {bytes(delimiter)!r}")
        return self._take(end)

    def read_line(self, limit: int | None = None) -> bytes:
        r"""Return a line with its ``\n``; the last one may have none. Empty at the end.

        Raises:
            asyncio.LimitOverrunError: the line is longer than ``limit``; what has come is kept.
        """
        end = self._find(b"\n", limit)
        return self._take(len(self._unread) if end is None else end)

    def read_all(self, limit: int | None = None) -> bytes:
        """Return everything up to the end of the stream, of any length unless there is a ``limit``.

        Raises:
            asyncio.LimitOverrunError: there is more than that; what has come is kept.
        """
        while self._fill(_CHUNK_LEN):
            if limit is not None and len(self._unread) > limit:
                raise _overrun(limit, len(self._unread))
        return self._take(len(self._unread))

    def __iter__(self) -> read_stream:
        return self

    def __next__(self) -> bytes:
        line = self.read_line()
        if not line:
            raise StopIteration
        return line

    def _find(self, delimiter: bytes, limit: int | None) -> int | None:
        """Read until the delimiter has come. Return the position behind it, None if the stream ends before."""
        if not delimiter:
            raise ValueError("a delimiter has one byte at least")
        if limit is None:
            limit = self._limit
        searched = 0
        while True:
            at = self._unread.find(delimiter, searched)
            if at >= 0 and at + len(delimiter) <= limit:
                return at + len(delimiter)
            if at >= 0 or len(self._unread) >= limit:
                raise _overrun(limit, at if at >= 0 else len(self._unread))
            # A part of the delimiter may be there already.
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
            raise BlockingIOError("the source does not wait, and has nothing now")
        return data

    def _take(self, count: int) -> bytes:
        with memoryview(self._unread) as view:
            data = bytes(view[:count])
        del self._unread[:count]
        return data


def _overrun(limit: int, consumed: int) -> Exception:
    return _errors.LimitOverrunError(f"more than {limit} bytes", consumed)


def _receiver(source: Any) -> Callable[[int], bytes | None]:
    """Return what reads from a source."""
    if hasattr(source, "recv"):
        return source.recv  # type: ignore[no-any-return]
    if isinstance(source, io.TextIOBase) or not hasattr(source, "read"):
        raise TypeError(f"a socket or a binary file is required, not {type(source).__name__}")
    # The file of a socket waits by the socket.
    if not isinstance(getattr(source, "raw", source), socket.SocketIO):
        try:
            source.fileno()
        except (AttributeError, OSError):
            pass  # in memory, or the like
        else:
            return file_sock(source, closefd=False).recv
    return getattr(source, "read1", source.read)  # type: ignore[no-any-return]
