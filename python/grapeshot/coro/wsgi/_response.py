"""Answers: ``start_response``, ``write`` and what PEP 3333 asks of a server about lengths and errors.

The head leaves with the first part of the body, in one call of the system.
"""

from __future__ import annotations

import io
import os
import re
import stat
import time
from email.utils import formatdate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from ._request import Request

_STATUS = re.compile(r"[1-9][0-9]{2} [\t\x20-\x7e\x80-\xff]*")
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_BAD_VALUE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
# About the connection and not the answer: PEP 3333 keeps them from applications.
_HOP_BY_HOP = {"keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailers", "trailer"}
_HOP_BY_HOP |= {"transfer-encoding", "upgrade"}
# The names of fields that were checked, in lower case. Applications choose the names, so it has an end.
_names: dict[str, str] = {}
_MOST_NAMES = 1000
# A body up to this size is joined with the head, which is cheaper than a second call.
_JOIN_LEN = 64 * 1024

_date = b""
_date_s = 0


def date() -> bytes:
    """Return the field Date of now and the end of a head."""
    global _date, _date_s
    now_s = int(time.time())
    if now_s != _date_s:
        _date = f"Date: {formatdate(now_s, usegmt=True)}\r\n\r\n".encode()
        _date_s = now_s
    return _date


class FileWrapper:
    """``wsgi.file_wrapper``: a file in parts. If an application returns it as it is, the system sends the file."""

    def __init__(self, filelike: Any, blksize: int = 65536) -> None:
        self.filelike = filelike
        self._block_len = blksize
        if hasattr(filelike, "close"):
            self.close = filelike.close

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        data: bytes = self.filelike.read(self._block_len)
        if not data:
            raise StopIteration
        return data

    def rest(self) -> tuple[int, int] | None:
        """Return where a regular file is read next and how many bytes follow; None if it is something else."""
        # Others have a fileno(), too, and read something else than what is in that file: gzip's.
        if not isinstance(getattr(self.filelike, "raw", self.filelike), io.FileIO):
            return None
        try:
            state = os.fstat(self.filelike.fileno())
            offset = self.filelike.tell()
        except (OSError, ValueError):
            return None
        return (offset, max(state.st_size - offset, 0)) if stat.S_ISREG(state.st_mode) else None


class Response:
    """The answer to one request."""

    __slots__ = (
        "_connection",
        "_fields",
        "_has_body",
        "_has_date",
        "_is_chunked",
        "_is_finished",
        "_left",
        "_length_field",
        "_request",
        "has_begun",
        "headers",
        "keep_alive",
        "problem",
        "sent_len",
        "status",
    )

    def __init__(self, request: Request, connection: Any) -> None:
        self._request = request
        self._connection = connection
        self.status = ""
        self.headers: list[tuple[str, str]] = []
        self.keep_alive = request.keep_alive
        # Whether the head was sent.
        self.has_begun = False
        # What the application did wrong, where the answer could not say so any more.
        self.problem: str | None = None
        self.sent_len = 0
        self._fields = b""
        self._has_body = True
        self._has_date = False
        self._is_chunked = False
        self._is_finished = False
        # How many bytes of Content-Length are still to come; -1 if nobody knows.
        self._left = -1
        # The application's own Content-Length, as it is sent.
        self._length_field = b""

    # ------------------------------------------------------------------ for applications

    def start_response(
        self, status: str, headers: list[tuple[str, str]], exc_info: Any = None, /
    ) -> Callable[[bytes], None]:
        """What PEP 3333 calls so. It checks what it is given, because a line end in a field would begin another."""
        if exc_info:
            try:
                if self.has_begun:
                    raise exc_info[1].with_traceback(exc_info[2])
            finally:
                exc_info = None
        elif self.status:
            raise AssertionError("start_response() was called before, and this call has no exc_info")
        self._set_head(status, headers)
        return self.write

    def write(self, data: bytes, /) -> None:
        """Send a part of the body now."""
        if type(data) is not bytes:
            data = _exact_bytes(data)
        if data:
            self._write(data, -1)

    # ------------------------------------------------------------------ for the connection

    @property
    def ends_with_connection(self) -> bool:
        """Whether only the end of the connection tells the client where the body ends, and it has not ended yet."""
        return self._has_body and not self._is_chunked and self._left < 0 and not self._is_finished

    @property
    def is_full(self) -> bool:
        """Whether everything that Content-Length has announced was sent."""
        return self._left == 0 and self.has_begun

    def write_whole(self, data: bytes) -> None:
        """Send the only part of the body."""
        if type(data) is not bytes:
            data = _exact_bytes(data)
        self._write(data, -1 if self.has_begun else len(data))

    def write_file(self, wrapper: FileWrapper) -> bool:
        """Have the system send a file; return whether it can send this kind of file."""
        rest = wrapper.rest()
        if rest is None or self.has_begun:
            return False
        offset, count = rest
        if self._left < 0:
            self._begin(b"", count)
        else:
            count = min(count, self._left)
            self._begin(b"", -1)
        if self._has_body and count:
            sent = self._connection.send_file(wrapper.filelike, offset, count)
            self.sent_len += sent
            self._left -= sent
        return True

    def finish(self) -> None:
        """End the body."""
        if not self.has_begun:
            self._begin(b"", 0)
        if self._is_chunked:
            self._connection.send(b"0\r\n\r\n")
        elif self._left > 0 and self._has_body:
            self._fail(f"the body ended {self._left} bytes before its Content-Length")
        # An application may have caught what interrupted a write.
        self._is_finished = not self._connection.is_cut

    # ------------------------------------------------------------------ the head

    def _set_head(self, status: Any, headers: Any) -> None:
        status = _exact(status, "the status")
        if _STATUS.fullmatch(status) is None:
            raise ValueError(f"{status!r} is no status")
        lines = [f"HTTP/1.1 {status}\r\n"]
        self.keep_alive = self._request.keep_alive
        self._left = -1
        self._length_field = b""
        self._has_date = False
        for name, value in headers:
            if type(name) is not str:
                name = _exact(name, "the name of a field")  # noqa: PLW2901
            if type(value) is not str:
                value = _exact(value, "the value of a field")  # noqa: PLW2901
            lower = _names.get(name)
            if lower is None:
                lower = _check_name(name)
            if _BAD_VALUE.search(value) is not None:
                raise ValueError(f"the field {name} has a control character in its value: {value!r}")
            if lower == "content-length":
                if not (value.isascii() and value.isdigit()) or self._left >= 0:
                    raise ValueError(f"{value!r} is no Content-Length, or not the only one")
                self._left = int(value)
                self._length_field = f"{name}: {value}\r\n".encode()
                continue
            if lower == "date":
                self._has_date = True
            elif lower == "connection":
                if value.lower() == "close":
                    self.keep_alive = False
                continue
            elif lower in _HOP_BY_HOP:
                raise ValueError(f"the field {name} belongs to the server")
            lines.append(f"{name}: {value}\r\n")
        self.status = status
        self.headers = headers
        self._fields = "".join(lines).encode("latin-1")

    def _begin(self, data: bytes, length: int) -> None:
        """Send the head, and the first part of a body, whose length is ``length`` if that is not negative."""
        if not self.status and not self._connection.is_taken:
            raise AssertionError("the application has not called start_response()")
        request, code = self._request, self.status[:3]
        fields = self._fields
        if request.method == "HEAD":
            self._has_body = False
        if code[0] == "1" or code == "204":
            # RFC 9110, 8.6: without Content-Length.
            self._has_body = False
        elif code == "304":
            self._has_body = False
            fields += self._length_field
        elif self._left < 0:
            if length >= 0:
                # An application may leave the body out of its answer to HEAD, so zero says nothing.
                if length or self._has_body:
                    self._left = length
                    fields += b"Content-Length: %d\r\n" % length
            elif not self._has_body:
                pass
            elif request.is_http11:
                self._is_chunked = True
                fields += b"Transfer-Encoding: chunked\r\n"
            else:
                self.keep_alive = False
        else:
            fields += self._length_field
        if self._connection.is_ending:
            self.keep_alive = False
        if not self.keep_alive:
            fields += b"Connection: close\r\n"
        elif not request.is_http11:
            fields += b"Connection: keep-alive\r\n"
        raw = fields + (b"\r\n" if self._has_date else date())
        self.has_begun = True
        if request.body is not None:
            # Nothing may come into the answer, and a client that waits learns from it that it need not.
            request.body.may_continue = False
        if data and self._has_body:
            data = self._framed(data)
            if len(data) <= _JOIN_LEN:
                self._connection.send(raw + data)
                return
            self._connection.send(raw)
            self._connection.send(data)
        else:
            self._connection.send(raw)

    # ------------------------------------------------------------------ the body

    def _write(self, data: bytes, length: int) -> None:
        if not self.has_begun:
            self._begin(data, length)
        elif data and self._has_body:
            framed = self._framed(data)
            if framed:
                self._connection.send(framed)

    def _framed(self, data: bytes) -> bytes:
        """Return a part of the body as it is sent, and count it."""
        if self._is_chunked:
            self.sent_len += len(data)
            return b"%x\r\n%b\r\n" % (len(data), data)
        if self._left >= 0:
            if len(data) > self._left:
                self._fail("the body is longer than its Content-Length")
                data = data[: self._left]
            self._left -= len(data)
        self.sent_len += len(data)
        return data

    def _fail(self, problem: str) -> None:
        self.problem = problem
        self.keep_alive = False


def _exact(value: Any, what: str) -> str:
    """Return the characters of a string, whatever its class makes of them: what is checked is what is sent."""
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, got {value!r}")
    return str.__str__(value)


def _exact_bytes(data: Any) -> bytes:
    if not isinstance(data, bytes):
        raise TypeError(f"the body of a response consists of bytes, not of {type(data).__name__}")
    with memoryview(data) as view:
        return bytes(view)


def _check_name(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r} is no name of a field")
    lower = name.lower()
    if len(_names) < _MOST_NAMES:
        _names[name] = lower
    return lower


def plain(status: str, text: str) -> bytes:
    """Return a whole answer of the server itself, after which the connection ends."""
    body = f"{text}\n".encode()
    fields = f"Content-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    return f"HTTP/1.1 {status}\r\n{fields}".encode("latin-1") + date() + body
