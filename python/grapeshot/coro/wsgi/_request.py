"""Parses requests with httptools, makes their environs, and refuses requests that are not safe to serve.

Each connection has one parser. It never waits: received bytes are passed to ``feed``, which appends to ``requests``.

    feed(bytes) ---> llhttp ---> on_header ... on_headers_complete ---> requests ---> on_body ... on_message_complete
                       |                |
                       '---- error <----'     handled after the requests before it are answered

llhttp, the parser in httptools, is strict about everything that request smuggling uses: bare LF, folded lines, spaces
before a colon, Content-Length twice or together with Transfer-Encoding, chunk sizes. This module adds checks that
llhttp does not make: of sizes, of the method, of the field Host, of repeated fields and of trailers. It also refuses
RTSP requests, which llhttp accepts.
"""

from __future__ import annotations

import re
from collections import deque
from urllib.parse import unquote_to_bytes

try:
    import httptools
except ImportError as error:
    raise ImportError("grapeshot.coro.wsgi needs httptools: pip install 'grapeshot[wsgi]'", name="httptools") from error

from ._body import Body

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ._settings import Settings

# Methods that llhttp knows but that do not belong to HTTP: the methods of RTSP, and SOURCE of Icecast.
_NOT_HTTP = {"ANNOUNCE", "DESCRIBE", "FLUSH", "GET_PARAMETER", "PAUSE", "PLAY", "RECORD", "REDIRECT", "SET_PARAMETER"}
_NOT_HTTP |= {"SETUP", "SOURCE", "TEARDOWN"}
# Fields that may appear only once. If one appears twice, a proxy might use one value and the application the other.
_SINGLE = {"HTTP_HOST", "CONTENT_TYPE", "CONTENT_LENGTH", "HTTP_TRANSFER_ENCODING"}
# Fields that must not be trailers, because they change how the message is read, or say who sent it.
_NO_TRAILERS = {b"authorization", b"content-length", b"host", b"te", b"trailer", b"transfer-encoding"}
# A host (or nothing), perhaps with a port. Source: RFC 3986, 3.2.2 and 3.2.3.
_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]*)?")
_ABSOLUTE = re.compile(r"(?i:https?)://([^/?#]+)(.*)", re.DOTALL)
# A cache: names of fields -> their keys in an environ. Its size is limited, because clients choose the names.
_keys: dict[bytes, str] = {b"Content-Type": "CONTENT_TYPE", b"Content-Length": "CONTENT_LENGTH"}
_MAX_KEYS = 1000
_methods: dict[bytes, str] = {}
# Except for bodies, only this many bytes are parsed at once. This limits how many small requests are kept in memory.
_PIECE_LEN = 4096
# How many bytes of chunk sizes, chunk extensions and trailers are allowed per byte of a body, in addition to
# _max_fed_len bytes.
_MAX_FRAMING = 16
# llhttp accepts request lines of RTSP (the protocol of cameras), and does not tell which protocol it has read.
_RTSP = re.compile(rb"[A-Z_-]+ +[^ ]+ +RTSP/")


class RequestError(OSError):
    """A request is refused with an HTTP error. If the application is reading the body, it gets this exception."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Request:
    """A request whose head has arrived. Applications may change the environ; the other attributes stay as received."""

    __slots__ = ("asks_upgrade", "body", "environ", "is_http11", "keep_alive", "method", "target")

    def __init__(
        self, environ: dict[str, Any], method: str, target: str, body: Body | None, is_http11: bool, keep_alive: bool
    ) -> None:
        self.environ = environ
        self.method = method
        self.target = target
        # None if the request has no body; its wsgi.input is then empty.
        self.body = body
        self.is_http11 = is_http11
        self.keep_alive = keep_alive
        # Whether the client asks to switch to another protocol on this connection after this request.
        self.asks_upgrade = False


class RequestParser:
    """Parses the bytes that a connection receives. ``template`` has the entries that all environs begin with."""

    def __init__(self, template: dict[str, Any], settings: Settings, pull: Callable[[Body], None]) -> None:
        self._template = template
        self._settings = settings
        self._pull: Any = pull
        self._parser: Any = httptools.HttpRequestParser(self)
        # The requests whose heads have arrived, in order. The body of the last one may not be complete yet.
        self.requests: deque[Request] = deque()
        self.error: BaseException | None = None
        # Bytes that were received but not parsed yet. They come after the last request of `requests`.
        self.rest = b""
        # The exception that a callback has raised.
        self._raised: BaseException | None = None
        self._environ: dict[str, Any] = {}
        self._url = b""
        self._current: Request | None = None
        # True while a message has begun, but its head is not complete yet.
        self.is_in_head = False
        self._is_replaying = False
        self._fields = 0
        self._head_len = 0
        # How many bytes were parsed since the last part of a body or the last request, and the limit for that.
        self._fed_len = 0
        self._max_fed_len = settings.max_target_size + settings.max_head_size + 4 * settings.max_headers
        # The beginning of a line that is not complete yet and may be a request line; else None.
        self._line: bytearray | None = None
        # How many bytes at the beginning of this line may belong to the body before it.
        self._glued_len = 0
        self._checked_host: str | None = None

    def feed(self, data: bytes) -> None:
        """Parse received bytes. An error is stored in ``error``, because requests before it have to be answered first.

        If many small requests come at once, only some are parsed, because environs take far more memory than the bytes.
        Bytes after a request that asks for an upgrade are not parsed before that request is answered. Bytes that are
        not parsed wait in ``rest``.
        """
        left = len(data)
        if left <= _PIECE_LEN:
            left = self._parse(data)
        elif self._is_body(left):
            left = self._execute(data)
        while left and self.error is None:
            if self.requests and self._current is None:
                self.rest = data[-left:]
                return
            start = len(data) - left
            piece = data[start : start + _PIECE_LEN]
            left += self._parse(piece) - len(piece)

    def take(self) -> Request | None:
        """Return the next request that has arrived, or None."""
        while self.rest and not self.requests and self.error is None:
            rest, self.rest = self.rest, b""
            self.feed(rest)
        return self.requests.popleft() if self.requests else None

    def take_rest(self) -> bytes:
        """Give up parsing, and return the bytes that come after the last request that :meth:`take` returned."""
        rest, self.rest = self.rest, b""
        return rest

    def close(self) -> None:
        """Break the reference cycles with llhttp's callbacks, the connection, and the body of a request."""
        self._parser = self._pull = self._current = self.error = None
        self._environ = {}
        self.requests.clear()

    # ------------------------------------------------------------------ in pieces

    def _is_body(self, length: int) -> bool:
        """Whether the next ``length`` bytes all belong to the body of a request with Content-Length."""
        request = self._current
        return request is not None and request.body is not None and request.body.left() >= length

    def _parse(self, data: bytes) -> int:
        """Parse, but stop after a request that asks for an upgrade; return how many bytes were not parsed."""
        if self._line is not None:
            end = data.find(b"\n") + 1 or len(data)
            self._line += data[:end]
            if b" RTSP/" in self._line[-end - 6 :] and self._is_of_rtsp(self._line):
                self._execute(data[:end])
                self._refuse_rtsp()
                return 0
            if data[end - 1 : end] == b"\n":
                self._line = None
        request = self._current
        is_body_end = request is not None and request.body is not None and 0 < request.body.left() < len(data)
        if is_body_end or b" RTSP/" in data:
            return self._parse_lines(data)
        was_in_head = self.is_in_head
        left = self._execute(data)
        if self.is_in_head and self._line is None and not (was_in_head and b"\n" not in data):
            self._keep_line(data)
        return left

    def _parse_lines(self, data: bytes) -> int:
        """Parse line by line, to find the beginnings of requests, and refuse RTSP requests."""
        start = 0
        while start < len(data) and self.error is None:
            end = data.find(b"\n", start) + 1 or len(data)
            request = self._current
            if request is not None and request.body is not None and 0 < request.body.left() < end - start:
                end = start + request.body.left()
            line = data[start:end]
            is_first = request is None and not self.is_in_head
            if is_first and line[-1:] != b"\n":
                self._line, self._glued_len = bytearray(line.lstrip(b"\r\n")), 0
            unparsed = self._execute(line)
            if unparsed:
                return len(data) - end + unparsed
            if is_first and _RTSP.match(line.lstrip(b"\r\n")) is not None:
                self._refuse_rtsp()
            start = end
        return 0

    def _keep_line(self, data: bytes) -> None:
        """Store an incomplete line, which may be a request line.

        If the previous request's body does not end with a line end, its last bytes may be at the beginning of this
        line. The line may also be a header field. This does no harm: a request line of RTSP has a space after the
        method, so a field cannot look like one.
        """
        line = bytearray(data[data.rfind(b"\n") + 1 :].lstrip(b"\r"))
        self._glued_len = 0
        body = self.requests[-1].body if self.requests else None
        if body is not None and body.left() == 0:
            end = body.buffer[body.buffer.rfind(b"\n") + 1 :]
            if line.startswith(end):
                self._glued_len = len(end)
        self._line = line

    def _refuse_rtsp(self) -> None:
        if self.error is None:
            self.error = RequestError("400 Bad Request", "this is an RTSP request, not an HTTP request")

    def _is_of_rtsp(self, line: bytearray) -> bool:
        return _RTSP.match(line) is not None or _RTSP.match(line, self._glued_len) is not None

    def _execute(self, data: bytes) -> int:
        """Let llhttp parse; return how many bytes follow a request that asks for an upgrade."""
        request = self._current
        body = None if request is None else request.body
        received_len = 0 if body is None else body.received
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            parsed_len: int = upgrade.args[0]
            is_upgrade = True
        except httptools.HttpParserError as error:
            self._refuse(error)
            return 0
        else:
            parsed_len = len(data)
            is_upgrade = False
        if is_upgrade:
            self._ignore_upgrade()
        elif request is None:
            if self._current is None and not self.requests:
                # llhttp accepts any number of empty lines before a request, and stores incomplete parts: limit both.
                self._fed_len += parsed_len
                if self._fed_len > self._max_fed_len:
                    self.error = _too_long()
        elif body is not None and self._current is request:
            body_len = body.received - received_len
            if body_len < parsed_len:
                self._count_framing(body, parsed_len - body_len, body_len > 0)
        return len(data) - parsed_len

    def _count_framing(self, body: Body, count: int, is_with_body: bool) -> None:
        """Limit chunk sizes, chunk extensions and trailers. llhttp stores these until they are complete."""
        body.framing_len += count
        self._fed_len = count if is_with_body else self._fed_len + count
        max_len = self._max_fed_len + _MAX_FRAMING * body.received
        if self._fed_len > self._max_fed_len or body.framing_len > max_len:
            self.error = _too_long()

    def _refused(self, error: BaseException) -> BaseException:
        """Store an exception that a callback is about to raise, and return it.

        httptools then raises an error of its own, and :meth:`_refuse` needs the exception of the callback. The
        ``__context__`` of httptools' error is that exception only if no other exception is being handled, so the
        exception is stored.
        """
        self._raised = error
        return error

    def _refuse(self, error: Exception) -> None:
        """Set ``self.error`` to the reason why a request is refused."""
        raised, self._raised = self._raised, None
        if isinstance(raised, Exception) and not isinstance(raised, RequestError):
            refusal = RequestError("400 Bad Request", f"{type(raised).__name__}: {raised}")
            refusal.__cause__ = raised
            raised = refusal
        elif raised is None and isinstance(error.__context__, KeyboardInterrupt):
            raised = error.__context__
        self.error = raised or _refusal(error)

    # ------------------------------------------------------------------ callbacks, which httptools calls

    def on_message_begin(self) -> None:
        if self._is_replaying:
            return
        self._environ = self._template.copy()
        self._url = b""
        self._fields = self._head_len = 0
        self.is_in_head = True

    def on_url(self, url: bytes) -> None:
        if self._is_replaying:
            return
        self._url = self._url + url if self._url else url
        if len(self._url) > self._settings.max_target_size:
            raise self._refused(RequestError("414 URI Too Long", "the target of the request is too long"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_replaying:
            return
        self._fields += 1
        settings, field_len = self._settings, len(name) + len(value) + 4  # 4: colon, space, CR and LF
        self._head_len += field_len
        if (
            self._fields > settings.max_headers
            or field_len > settings.max_header_size
            or self._head_len > settings.max_head_size
        ):
            raise self._refused(_too_long())
        if not self.is_in_head:
            # This is a trailer. Trailers are not put into the environ.
            if name.lower() in _NO_TRAILERS:
                raise self._refused(RequestError("400 Bad Request", f"the field {name.decode()} must not be a trailer"))
            return
        key = _keys.get(name)
        if key is None:
            key = _remember(name)
        if not key:
            return
        text = value.decode("latin-1").rstrip(" \t")
        environ = self._environ
        if key in environ:
            if key in _SINGLE:
                raise self._refused(RequestError("400 Bad Request", f"the field {name.decode()} appears twice"))
            text = f"{environ[key]}{'; ' if key == 'HTTP_COOKIE' else ','}{text}"
        environ[key] = text

    def on_headers_complete(self) -> None:
        if self._is_replaying:
            return
        try:
            parser, environ = self._parser, self._environ
            version = parser.get_http_version()
            if version == "1.1":
                is_http11 = True
            elif version == "1.0":
                is_http11 = False
            else:
                raise RequestError("505 HTTP Version Not Supported", f"HTTP/{version} is not supported")
            environ["SERVER_PROTOCOL"] = "HTTP/1.1" if is_http11 else "HTTP/1.0"
            raw_method = parser.get_method()
            method = _methods.get(raw_method)
            if method is None:
                method = _method(raw_method)
            environ["REQUEST_METHOD"] = method
            self._set_target(environ, method)
            self._check_host(environ, is_http11)
            request = Request(environ, method, environ["RAW_URI"], None, is_http11, parser.should_keep_alive())
            if "CONTENT_LENGTH" in environ or "HTTP_TRANSFER_ENCODING" in environ:
                self._set_body(request, environ)
            elif "HTTP_EXPECT" in environ:
                _expects_continue(environ)
            if "HTTP_UPGRADE" in environ:
                request.asks_upgrade = is_http11 and request.body is None and parser.should_upgrade()
            self.is_in_head = False
            self._fed_len = 0
            self._line = None
            self._current = request
            self.requests.append(request)
        except BaseException as error:
            raise self._refused(error) from None

    def on_body(self, data: bytes) -> None:
        request = self._current
        if request is not None and request.body is not None:
            body = request.body
            if body.received + len(data) > self._settings.max_body:
                raise self._refused(_too_large())
            body.buffer += data
            body.received += len(data)

    def on_message_complete(self) -> None:
        request = self._current
        if request is None or (request.body is not None and self._parser.should_upgrade()):
            return  # llhttp does not parse the body that follows; see _ignore_upgrade()
        if request.body is not None:
            request.body.is_complete = True
            self._fed_len = 0
        self._current = None

    # ------------------------------------------------------------------ parts of a head

    def _set_target(self, environ: dict[str, Any], method: str) -> None:
        target = self._url.decode("ascii")
        environ["RAW_URI"] = environ["REQUEST_URI"] = target
        path = target
        if path[0] != "/":
            if path == "*":
                if method != "OPTIONS":
                    raise RequestError("400 Bad Request", "the target * is allowed only with OPTIONS")
                path = ""
            else:
                match = _ABSOLUTE.fullmatch(path)
                if match is None:
                    raise RequestError("400 Bad Request", "the target of the request has an unknown form")
                authority, path = match.groups()
                # The host in the target replaces the host in the field Host. Source: RFC 9112, 3.2.2.
                if "HTTP_HOST" in environ:
                    self._check_host(environ, True)
                environ["HTTP_HOST"] = authority
                if path[:1] != "/":
                    path = f"/{path}"
        if "#" in path:
            path = path[: path.index("#")]
        path, _, environ["QUERY_STRING"] = path.partition("?")
        if "%" in path:
            path = unquote_to_bytes(path).decode("latin-1")
        environ["PATH_INFO"] = path

    def _check_host(self, environ: dict[str, Any], is_http11: bool) -> None:
        host = environ.get("HTTP_HOST")
        if host is None:
            if is_http11:
                raise RequestError("400 Bad Request", "an HTTP/1.1 request needs the field Host")
        elif host != self._checked_host:
            if _HOST.fullmatch(host) is None:
                raise RequestError("400 Bad Request", "the field Host is not a valid host")
            self._checked_host = host

    def _set_body(self, request: Request, environ: dict[str, Any]) -> None:
        coding = environ.get("HTTP_TRANSFER_ENCODING")
        if coding is not None:
            if not request.is_http11:
                raise RequestError("400 Bad Request", "Transfer-Encoding is not allowed in an HTTP/1.0 request")
            if coding.lower() != "chunked":
                raise RequestError("501 Not Implemented", "the only supported Transfer-Encoding is chunked")
            length = -1
        else:
            # llhttp has checked the digits. Strip leading zeros, because int() refuses strings of very many digits.
            digits = environ["CONTENT_LENGTH"] = environ["CONTENT_LENGTH"].lstrip("0") or "0"
            length = int(digits)
            if length > self._settings.max_body:
                raise _too_large()
        is_asked = _expects_continue(environ)
        if length:
            body = Body(self._pull, length, is_asked and request.is_http11)
            request.body = environ["wsgi.input"] = body

    # ------------------------------------------------------------------ Upgrade

    def _ignore_upgrade(self) -> None:
        """Go on parsing HTTP after a request that asks for an upgrade, which a server may ignore (RFC 9110, 7.8).

        llhttp treats the bytes that follow as data of the other protocol. But if the request has a body, these bytes
        are the body, and a proxy in front of this server may also read them as the body. So a new parser takes over.
        It is first fed a head with the same framing, but without Upgrade.
        """
        request = self._current
        self._parser = httptools.HttpRequestParser(self)
        if request is None or request.body is None:
            self._current = None
            return
        length = request.environ.get("CONTENT_LENGTH")
        framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
        self._is_replaying = True
        try:
            self._parser.feed_data(f"POST / HTTP/1.1\r\n{framing}\r\n\r\n".encode())
        finally:
            self._is_replaying = False


def _remember(name: bytes) -> str:
    """Return the key of a field in an environ, or "" for a name that would get the same key as another one."""
    text = name.decode("ascii").upper()
    if "_" in text:
        # X_Forwarded_For would get the key of X-Forwarded-For. A proxy may check only the name with hyphens.
        key = ""
    elif text in ("CONTENT-TYPE", "CONTENT-LENGTH"):
        key = text.replace("-", "_")
    else:
        key = f"HTTP_{text.replace('-', '_')}"
    if len(_keys) < _MAX_KEYS:
        _keys[name] = key
    return key


def _method(raw: bytes) -> str:
    method = raw.decode("ascii")
    if method in _NOT_HTTP or method == "CONNECT":
        raise RequestError("501 Not Implemented", f"the method {method} is not supported")
    _methods[raw] = method
    return method


def _expects_continue(environ: dict[str, Any]) -> bool:
    expected = environ.get("HTTP_EXPECT")
    if expected is not None and expected.lower() != "100-continue":
        raise RequestError("417 Expectation Failed", "the only supported expectation is 100-continue")
    return expected is not None


def _too_long() -> RequestError:
    return RequestError("431 Request Header Fields Too Large", "the head of the request is too long")


def _too_large() -> RequestError:
    return RequestError("413 Content Too Large", "the body of the request is too large")


def _refusal(error: Exception) -> RequestError:
    """Return the error response for an error of llhttp, chosen by the class and the text of the error."""
    words = str(error)
    if isinstance(error, httptools.HttpParserInvalidMethodError):
        return RequestError("501 Not Implemented", words)
    if "HTTP version" in words or "PRI/Upgrade" in words:
        return RequestError("505 HTTP Version Not Supported", words)
    return RequestError("400 Bad Request", words)
