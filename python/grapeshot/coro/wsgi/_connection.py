"""One connection. It serves its requests one after the other: each is answered before the next one is handled.

    wait (idle) ---> head arrives ---> application runs, and reads the body ---> response ---> wait, or
         |                |                    |            |                                   |
         '- closed, late -'------- 4xx, 5xx ---|------------'---> send it, stop sending, drain, close
                                               '---> takes over the socket (Upgrade), and returns: close

Each connection runs in a coro of its own, in which the application sees no running asyncio loop.
"""

from __future__ import annotations

import socket
import struct
import sys

from grapeshot import _core
from grapeshot.coro._errors import CancelledError, Interrupted, SimultaneousError
from grapeshot.coro._socket_base import CoroSocket

from ._body import NO_BODY, Body
from ._log import line, line_of_refusal
from ._request import Request, RequestError, RequestParser
from ._response import FileWrapper, Response, plain
from ._upgrade import KEY, UpgradeSocket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ._settings import Settings

# Not time.monotonic, because programs may replace it, for example in their tests.
_monotonic = _core._coro_monotonic
_READ_LEN = 64 * 1024
# Request data that the application has not read must be drained. To keep the connection, up to _MAX_UNREAD bytes
# are drained. Before the connection is closed, up to _MAX_LINGERING bytes are drained for at most _LINGERING_S seconds:
# closing a socket with unread data resets the connection, and the client might lose the response.
_MAX_UNREAD = 64 * 1024
_MAX_LINGERING = 1024 * 1024
_LINGERING_S = 2.0
# The value of SO_LINGER that makes close() reset the connection.
_RESET = struct.pack("ii", 1, 0)


class GoneError(ConnectionError):
    """The connection cannot be used any more. For example, the client has closed it, or is too slow to receive."""


class Connection:
    """A connection of a client to a server."""

    def __init__(self, settings: Settings, coro: Any, sock: Any, address: Any, is_secure: bool) -> None:
        self._settings = settings
        self._application = settings.application
        self._sock = sock
        self._is_secure = is_secure
        self._coro = coro
        self._peer = address[0] if isinstance(address, tuple) else ""
        self._parser = RequestParser(_template(sock, address, is_secure), settings, self._pull)
        self._timeout_s = settings.keepalive_timeout_s
        # True while the connection waits for a request of which nothing has arrived yet.
        self.is_idle = False
        # True if no further request is served. A response that begins while this is true says so (Connection: close).
        self.is_ending = False
        # True if a part of the response was not sent completely. Then nothing more may be sent.
        self.is_cut = False
        # True once the application has taken over the socket.
        self.is_taken = False
        sock.settimeout(self._timeout_s)

    def serve(self) -> None:
        """Serve until the connection ends."""
        try:
            while (request := self._next()) is not None:
                if not self._answer(request):
                    return
        except RequestError as error:
            self._refuse(error)
        except GoneError:
            pass
        finally:
            self._parser.close()

    def end(self) -> None:
        """End the connection after the requests that have already been received. An idle connection ends now.

        An application that has taken over the socket reads the end of the stream.
        """
        self.is_ending = True
        if self.is_taken:
            self._end_receiving()
        elif self.is_idle:
            if self._is_secure:
                self._coro.raise_exception(GoneError("the server is closing"))
                return
            self._end_receiving()  # a request that is already in the socket's buffer is still read and answered

    def _end_receiving(self) -> None:
        try:
            # Not the method of TLS sockets, which would drop the TLS state.
            CoroSocket.shutdown(self._sock, socket.SHUT_RD)
        except OSError:
            pass  # the client has closed the connection first

    # ------------------------------------------------------------------ receiving

    def _next(self) -> Request | None:
        """Return the next request, or None if the connection has ended."""
        parser = self._parser
        request = parser.take()
        if request is not None:
            return request
        if parser.error is None and not parser.is_in_head:
            if self.is_ending:
                return None
            self._set_timeout(self._settings.keepalive_timeout_s)
            self.is_idle = True
            try:
                data = self._sock.recv(_READ_LEN)
            except OSError:
                return None  # an error, or no request came in time
            finally:
                self.is_idle = False
            if not data:
                return None
            parser.feed(data)
            if parser.requests:
                return parser.requests.popleft()
        return self._rest_of_head()

    def _rest_of_head(self) -> Request | None:
        """Receive the rest of a head. The timeout is for the whole head, because it may come byte by byte."""
        parser = self._parser
        end_s = _monotonic() + self._settings.timeout_s
        while not parser.requests:
            if parser.error is not None:
                raise parser.error
            self._set_timeout(max(end_s - _monotonic(), 0.001))
            try:
                data = self._sock.recv(_READ_LEN)
            except TimeoutError:
                if not parser.is_in_head:
                    return None
                raise RequestError("408 Request Timeout", "the head of the request took too long") from None
            except OSError:
                return None
            if not data:
                return None
            parser.feed(data)
        return parser.requests.popleft()

    def _pull(self, body: Body) -> None:
        """Receive the next part of a body. Raises OSError if that is not possible."""
        parser = self._parser
        if parser.error is not None:
            raise parser.error
        if body.expects_continue:
            body.expects_continue = False
            if body.may_continue:
                self.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        received, timeout_s, end_s = body.received, self._settings.timeout_s, 0.0
        while body.received == received and not body.is_complete:
            self._set_timeout(timeout_s)
            try:
                data = self._sock.recv(_READ_LEN)
            except TimeoutError:
                parser.error = RequestError("408 Request Timeout", "the body of the request took too long")
            except OSError as error:
                parser.error = GoneError(str(error))
            else:
                if data:
                    parser.feed(data)
                else:
                    parser.error = GoneError("the client closed the connection before the end of the request's body")
            if parser.error is not None:
                break
            # Only data of the body restarts the timeout. Chunk extensions and trailers do not.
            now_s = _monotonic()
            end_s = end_s or now_s + timeout_s
            timeout_s = max(end_s - now_s, 0.001)
        if parser.error is not None and not body.is_complete:
            raise parser.error

    def _set_timeout(self, timeout_s: float) -> None:
        if timeout_s != self._timeout_s:
            self._timeout_s = timeout_s
            self._sock.settimeout(timeout_s)

    # ------------------------------------------------------------------ sending

    def send(self, data: Any) -> None:
        """Send all of the data. The timeout begins again with each part that the client receives."""
        self._begin_sending()
        try:
            sent = self._sock.send(data)
            if sent < len(data):
                rest = memoryview(data)[sent:]
                while rest:
                    rest = rest[self._sock.send(rest) :]
        except OSError as error:
            raise GoneError(str(error)) from error
        self.is_cut = False

    def send_file(self, file: Any, offset: int, count: int) -> int:
        self._begin_sending()
        try:
            sent: int = self._sock.sendfile(file, offset, count)
        except OSError as error:
            raise GoneError(str(error)) from error
        self.is_cut = False
        return sent

    def _begin_sending(self) -> None:
        if self.is_taken:
            raise GoneError("the application has taken over the connection")
        # An application that caught the exception of an interrupted write must not send more data: the client would
        # take the new data for the rest of the old.
        if self.is_cut:
            raise GoneError("a part of the response was not sent")
        self.is_cut = True
        self._set_timeout(self._settings.timeout_s)

    # ------------------------------------------------------------------ a request

    def _answer(self, request: Request) -> bool:
        """Call the application and send its response; return whether the connection can go on."""
        begin_s = _monotonic() if self._settings.access_log is not None else 0.0
        response = Response(request, self)
        offer = self._offer(request, response) if request.asks_upgrade else None
        try:
            self._run(request, response)
        except GoneError as error:
            self._settings.error_log.debug("%s: %s", _name(request), error)
            response.keep_alive = False
            self.is_cut = True
        except BaseException as error:
            if self._is_told_to_end(error):
                self._cut(response)
                raise
            self._fail(request, response, error)
        finally:
            if offer is not None:
                offer.expire()
                if self.is_taken:
                    response.status, response.sent_len = "101 Switching Protocols", offer.sent_len
            if self._settings.access_log is not None:
                elapsed_s = _monotonic() - begin_s
                self._settings.access_log.info("%s", line(request, response, elapsed_s))
        if response.problem is not None:
            self._settings.error_log.error("%s: %s", _name(request), response.problem)
        if self.is_taken:
            self._end_sending()
            return False
        if self.is_cut:
            self._cut(response)
            return False
        if not _is_complete(request):
            return self._skip_body(request, response.keep_alive)
        if not response.keep_alive:
            self._end_sending()
        return response.keep_alive

    def _cut(self, response: Response) -> None:
        """Close the connection in a way that shows the client that the response is not complete."""
        if self.is_taken or not response.has_begun:
            return
        try:
            if response.ends_with_connection:
                # The body of this response ends with the connection, so a normal close would make it look complete:
                # reset the connection. (On unix sockets this has no effect, and there is no other way.)
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._sock.close()
        except OSError:
            pass  # it is already closed

    def _is_told_to_end(self, error: BaseException) -> bool:
        """Whether an exception ends this coro, rather than being an error of the application.

        A CancelledError is an error of the application if no code has cancelled this coro.
        """
        if isinstance(error, CancelledError):
            return isinstance(error, Interrupted) or self._coro.cancelling() > 0
        return isinstance(error, KeyboardInterrupt)

    def _run(self, request: Request, response: Response) -> None:
        result = self._application(request.environ, response.start_response)
        try:
            if type(result) is list and len(result) == 1:
                response.write_whole(result[0])
            elif type(result) is not FileWrapper or not response.write_file(result):
                self._write_parts(result, response)
            if not self.is_taken:
                response.finish()
        finally:
            if hasattr(result, "close"):
                result.close()

    def _write_parts(self, result: Any, response: Response) -> None:
        try:
            is_single = len(result) == 1
        except (TypeError, AttributeError, NotImplementedError):
            is_single = False
        for part in result:
            if is_single:
                response.write_whole(part)
            else:
                response.write(part)
            if response.is_full and response.problem is not None:
                break

    def _fail(self, request: Request, response: Response, error: BaseException) -> None:
        """Send an error response. If the application's own response has begun, cut the connection instead."""
        log = self._settings.error_log
        refusal = self._parser.error if self._parser.error is error else None
        response.keep_alive = False
        if self.is_taken and isinstance(error, (OSError, StopIteration)):
            # Libraries raise these exceptions after an upgrade, to tell the server to send no response, because the
            # connection has ended.
            log.debug("%s: %r after an upgrade", _name(request), error)
            return
        if isinstance(refusal, RequestError):
            log.debug("%s: %s", _name(request), refusal)
            status = refusal.status
        else:
            status = "500 Internal Server Error"
            log.error("Error in the application while it handled %s", _name(request), exc_info=error)
        if response.has_begun:
            self.is_cut = True
        elif not self.is_taken:
            response.status = status
            try:
                self.send(plain(status, status[4:]) if request.method != "HEAD" else _head_only(status))
            except GoneError as gone:
                log.debug("%s: %s", _name(request), gone)

    def _refuse(self, error: RequestError) -> None:
        """Send an error response to a request that was refused by the parser."""
        self._settings.error_log.debug("Refused a request from %s: %s", self._peer or "a client", error)
        if self._settings.access_log is not None:
            self._settings.access_log.info("%s", line_of_refusal(self._peer, error.status))
        try:
            self.send(plain(error.status, f"{error.status[4:]}: {error}"))
        except GoneError:
            return
        self._end_sending()

    # ------------------------------------------------------------------ the end of a request

    def _skip_body(self, request: Request, keep_alive: bool) -> bool:
        """Drain the part of a body that the application has not read, if it is short. Return whether it was drained."""
        body = request.body
        if body is None or not keep_alive or body.expects_continue or self._parser.error is not None:
            self._end_sending()
            return False
        most = body.received + body.framing_len + _MAX_UNREAD
        end_s = _monotonic() + self._settings.timeout_s
        try:
            while not body.is_complete and body.received + body.framing_len <= most and _monotonic() < end_s:
                body.buffer.clear()
                self._pull(body)
        except OSError:
            pass
        if not body.is_complete:
            self._end_sending()
        return body.is_complete

    def _end_sending(self) -> None:
        """Stop sending, and drain unread data. Otherwise closing would reset the connection, and lose the response."""
        sock, skipped = self._sock, 0
        if self._is_secure:
            return  # coro.serve ends the TLS stream when the handler returns
        end_s = _monotonic() + _LINGERING_S
        try:
            sock.shutdown(socket.SHUT_WR)
            while skipped <= _MAX_LINGERING and (left_s := end_s - _monotonic()) > 0:
                self._set_timeout(left_s)
                data = sock.recv(_READ_LEN)
                if not data:
                    return
                skipped += len(data)
        except (OSError, SimultaneousError):
            pass  # SimultaneousError: the application has taken over the socket, and still reads from it

    # ------------------------------------------------------------------ another protocol

    def _offer(self, request: Request, response: Response) -> UpgradeSocket:
        """Put an UpgradeSocket into the environ, and return it."""
        offer = request.environ[KEY] = UpgradeSocket(self, response, self._sock)
        return offer

    def hand_over(self, response: Response) -> None:
        """Hand the socket over to the application, with the data that the client has sent after the request."""
        if response.has_begun:
            raise RuntimeError("the response to this request has begun, so its socket cannot be taken over any more")
        self.is_taken = True
        self._sock.settimeout(None)
        if rest := self._parser.take_rest():
            self._sock._put_back(rest)
        if self.is_ending:
            self._end_receiving()


def _is_complete(request: Request) -> bool:
    return request.body is None or request.body.is_complete


def _name(request: Request) -> str:
    return f"{request.method} {request.target}"


def _head_only(status: str) -> bytes:
    return plain(status, "").partition(b"\r\n\r\n")[0] + b"\r\n\r\n"


def _template(sock: Any, address: Any, is_secure: bool) -> dict[str, Any]:
    """Return the entries that the environs of all requests of a connection have in common."""
    here = sock.getsockname()
    template: dict[str, Any] = {
        "SCRIPT_NAME": "",
        "SERVER_NAME": "localhost",
        "SERVER_PORT": "443" if is_secure else "80",
        "SERVER_SOFTWARE": "grapeshot",
        "REMOTE_ADDR": "",
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "https" if is_secure else "http",
        "wsgi.input": NO_BODY,
        "wsgi.input_terminated": True,
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
        "wsgi.file_wrapper": FileWrapper,
    }
    if isinstance(here, tuple):
        template.update(SERVER_NAME=here[0], SERVER_PORT=str(here[1]))
    if isinstance(address, tuple):
        template.update(REMOTE_ADDR=address[0], REMOTE_PORT=str(address[1]))
    return template
