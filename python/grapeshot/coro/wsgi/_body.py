"""``wsgi.input``: the body of a request, which is received while the application reads it."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Body:
    """The body of one request. Reads stop at the end of the request, even if there is no Content-Length."""

    __slots__ = (
        "_length",
        "_pull",
        "buffer",
        "expects_continue",
        "framing_len",
        "is_complete",
        "may_continue",
        "received",
    )

    def __init__(self, pull: Callable[[Body], None], length: int, expects_continue: bool) -> None:
        # A function that waits for the next part of the body, and appends it to `buffer`.
        self._pull = pull
        # Content-Length, or -1 if the body comes in chunks.
        self._length = length
        # Whether the client waits for 100 Continue before it sends the body.
        self.expects_continue = expects_continue
        # Whether 100 Continue may be sent: only until the response has begun.
        self.may_continue = True
        self.buffer = bytearray()
        self.is_complete = False
        self.received = 0
        # How many bytes of chunk sizes, chunk extensions and trailers have come. Bytes that came together with the head
        # or with the end of the body do not count.
        self.framing_len = 0

    def left(self) -> int:
        """Return how many bytes have not arrived yet; negative if that is not known."""
        return self._length - self.received

    def read(self, size: int | None = -1) -> bytes:
        """Return ``size`` bytes, or fewer at the end of the body. If ``size`` is negative or None, return the rest."""
        if size is None or size < 0:
            while not self.is_complete:
                self._pull(self)
            return self._take(len(self.buffer))
        while len(self.buffer) < size and not self.is_complete:
            self._pull(self)
        return self._take(size)

    def readline(self, size: int | None = -1) -> bytes:
        """Return the bytes up to and including the next newline or up to the end of the body, but at most ``size``."""
        limit = sys.maxsize if size is None or size < 0 else size
        searched = 0
        while True:
            end = self.buffer.find(b"\n", searched, limit) + 1
            searched = len(self.buffer)
            if end or self.is_complete or searched >= limit:
                return self._take(min(end or searched, limit))
            self._pull(self)

    def readlines(self, hint: int | None = None) -> list[bytes]:
        """Return the lines that are left. With ``hint``, stop after the line that reaches this number of bytes."""
        lines, total = [], 0
        for line in self:
            lines.append(line)
            total += len(line)
            if hint is not None and 0 < hint <= total:
                break
        return lines

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        line = self.readline()
        if not line:
            raise StopIteration
        return line

    def _take(self, count: int) -> bytes:
        with memoryview(self.buffer) as view:
            data = bytes(view[:count])
        del self.buffer[:count]
        return data


class _NoBody:
    """The input of requests without a body. It has no state, so all of these requests share one object."""

    __slots__ = ()

    def read(self, size: int | None = -1) -> bytes:
        return b""

    readline = read

    def readlines(self, hint: int | None = None) -> list[bytes]:
        return []

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        raise StopIteration


NO_BODY = _NoBody()
