"""``wsgi.input``: the body of a request, which arrives while the application reads it."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Body:
    """The body of one request. It ends where the request ends, also without a Content-Length."""

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
        # Waits for the next part of the request, which comes into `buffer`.
        self._pull = pull
        # -1 if it comes in chunks.
        self._length = length
        # Whether the client waits to be told that it may send the body.
        self.expects_continue = expects_continue
        # Whether it can still be told: not once the answer has begun.
        self.may_continue = True
        self.buffer = bytearray()
        self.is_complete = False
        self.received = 0
        # What came between the chunks, and behind the last one.
        self.framing_len = 0

    def left(self) -> int:
        """Return how many bytes have not arrived yet, negative if nobody knows."""
        return self._length - self.received

    def read(self, size: int | None = -1) -> bytes:
        """Return ``size`` bytes, or fewer at the end; all that is left if it is negative or None."""
        if size is None or size < 0:
            while not self.is_complete:
                self._pull(self)
            return self._take(len(self.buffer))
        while len(self.buffer) < size and not self.is_complete:
            self._pull(self)
        return self._take(size)

    def readline(self, size: int | None = -1) -> bytes:
        """Return bytes up to the next newline, the end, or ``size`` of them."""
        limit = sys.maxsize if size is None or size < 0 else size
        searched = 0
        while True:
            end = self.buffer.find(b"\n", searched, limit) + 1
            searched = len(self.buffer)
            if end or self.is_complete or searched >= limit:
                return self._take(min(end or searched, limit))
            self._pull(self)

    def readlines(self, hint: int | None = None) -> list[bytes]:
        """Return the lines that are left, or about ``hint`` bytes of them."""
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
    """The input of requests without a body. It has no state, and all of them share it."""

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
