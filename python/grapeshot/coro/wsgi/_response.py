"""Responses: ``start_response``, ``write``, and the rules of PEP 3333 for lengths and errors.

The head is sent together with the first part of the body, in one system call, unless this part is large or the body is
a file.
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
# Fields that concern the connection and not the response. PEP 3333 does not allow applications to set them.
_HOP_BY_HOP = {"keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailers", "trailer"}
_HOP_BY_HOP |= {"transfer-encoding", "upgrade"}
# A cache: names of fields that were checked -> the name in lower case. Its size is limited, because applications choose
# the names.
_names: dict[str, str] = {}
_MAX_NAMES = 1000
# If the first part of a body is at most this long, it is copied behind the head: that is cheaper than a second system
# call.
_JOIN_LEN = 64 * 1024

_date = b""
_date_s = 0


def date() -> bytes:
    """Return the field Date with the current time, and the empty line that ends a head."""
    global _date, _date_s
    now_s = int(time.time())
    if now_s != _date_s:
        _date = f"Date: {formatdate(now_s, usegmt=True)}\r\n\r\n".encode()
        _date_s = now_s
    return _date


class FileWrapper:
    """``wsgi.file_wrapper``: iterates over a file in blocks.

    If an application returns this object itself and the file is regular, the system call sendfile sends the file.
    """

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
        """Return the position in a regular file and how many bytes follow it; None if this is not a regular file."""
        # Accept only an io.FileIO, or a buffer on top of one. Other objects may have a fileno(), too, but their read()
        # may return data that differs from what the descriptor's file contains. One example is gzip.GzipFile.
        if not isinstance(getattr(self.filelike, "raw", self.filelike), io.FileIO):
            return None
        try:
            state = os.fstat(self.filelike.fileno())
            offset = self.filelike.tell()
        except (OSError, ValueError):
            return None
        return (offset, max(state.st_size - offset, 0)) if stat.S_ISREG(state.st_mode) else None


class Response:
    """The response to one request."""

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
        # Whether sending the head has begun.
        self.has_begun = False
        # An error of the application that was found too late to change the head. The connection logs it.
        self.problem: str | None = None
        self.sent_len = 0
        self._fields = b""
        self._has_body = True
        self._has_date = False
        self._is_chunked = False
        self._is_finished = False
        # How many bytes of Content-Length were not sent yet; -1 if the length is not known.
        self._left = -1
        # The line of the application's own Content-Length, as it is sent.
        self._length_field = b""

    # ------------------------------------------------------------------ for applications

    def start_response(
        self, status: str, headers: list[tuple[str, str]], exc_info: Any = None, /
    ) -> Callable[[bytes], None]:
        """The callable ``start_response`` of PEP 3333.

        It checks its arguments, because a line end in a field would begin another field.
        """
        if exc_info:
            try:
                if self.has_begun:
                    raise exc_info[1].with_traceback(exc_info[2])
            finally:
                exc_info = None
        elif self.status:
            raise AssertionError("start_response() was already called: a second call needs exc_info")
        self._set_head(status, headers)
        return self.write

    def write(self, data: bytes, /) -> None:
        """Send a part of the body at once."""
        if type(data) is not bytes:
            data = _exact_bytes(data)
        if data:
            self._write(data, -1)

    # ------------------------------------------------------------------ for the connection

    @property
    def ends_with_connection(self) -> bool:
        """Whether the body is not complete yet, and only the end of the connection tells the client where it ends."""
        return self._has_body and not self._is_chunked and self._left < 0 and not self._is_finished

    @property
    def is_full(self) -> bool:
        """Whether as many bytes were sent as Content-Length says."""
        return self._left == 0 and self.has_begun

    def write_whole(self, data: bytes) -> None:
        """Send a body that has only this one part."""
        if type(data) is not bytes:
            data = _exact_bytes(data)
        self._write(data, -1 if self.has_begun else len(data))

    def write_file(self, wrapper: FileWrapper) -> bool:
        """Send a file with sendfile; return False if that is not possible."""
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
        # If a write was interrupted, and the application caught the exception, the response is not complete.
        self._is_finished = not self._connection.is_cut

    # ------------------------------------------------------------------ the head

    def _set_head(self, status: Any, headers: Any) -> None:
        status = _exact(status, "the status")
        if _STATUS.fullmatch(status) is None:
            raise ValueError(f"the status must look like '200 OK', got {status!r}")
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
                    raise ValueError(f"Content-Length must be a number, and given only once, got {value!r}")
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
                raise ValueError(f"the field {name} concerns the connection: only the server may set it")
            lines.append(f"{name}: {value}\r\n")
        self.status = status
        self.headers = headers
        self._fields = "".join(lines).encode("latin-1")

    def _begin(self, data: bytes, length: int) -> None:
        """Send the head and the first part of the body. ``length`` is the whole body's length, or -1 if unknown."""
        if not self.status and not self._connection.is_taken:
            raise AssertionError("the application has not called start_response()")
        request, code = self._request, self.status[:3]
        fields = self._fields
        if request.method == "HEAD":
            self._has_body = False
        if code[0] == "1" or code == "204":
            # Responses with these codes must not have a Content-Length. Source: RFC 9110, 8.6.
            self._has_body = False
        elif code == "304":
            self._has_body = False
            fields += self._length_field
        elif self._left < 0:
            if length >= 0:
                # An application may omit the body in its response to HEAD, so 0 is perhaps not the real length.
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
            # 100 Continue must not be sent in the middle of the response. A client that waits for it gets the response
            # instead.
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
        """Return a part of the body in the form in which it is sent, and count its bytes."""
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
    """Return a plain str. Methods of a str subclass could otherwise make the sent text differ from the checked one."""
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, got {value!r}")
    return str.__str__(value)


def _exact_bytes(data: Any) -> bytes:
    if not isinstance(data, bytes):
        raise TypeError(f"the body of a response must consist of bytes, got {type(data).__name__}")
    with memoryview(data) as view:
        return bytes(view)


def _check_name(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r} is not a valid name of a header field")
    lower = name.lower()
    if len(_names) < _MAX_NAMES:
        _names[name] = lower
    return lower


def plain(status: str, text: str) -> bytes:
    """Return a complete response of the server itself, after which the connection is closed."""
    body = f"{text}\n".encode()
    fields = f"Content-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    return f"HTTP/1.1 {status}\r\n{fields}".encode("latin-1") + date() + body
