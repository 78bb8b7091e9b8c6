"""One connection of a server: the calls that it has under way.

    REQUEST ---> the handler ---> ends at once ------------------------> RESULT or ERROR
                     '----------> a Call, which knows what runs ---> done, cancelled, deadline ---> RESULT, ERROR, END

No more requests are taken while the client does not read its answers: what a connection holds in memory is bounded by
its limits. A client keeps reading, so that this cannot stop both.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from . import _messages as messages
from ._codecs import MIN_CHECKED, Codec
from ._connection import Connection
from ._deadline import current_deadline
from ._errors import ProtocolError
from ._handlers import BadCallError, BadResultError, Handler, Running, accepts
from ._messages import CANCEL, CREDIT, END, ERROR, GOODBYE, ITEM, PING, PONG, REQUEST, RESULT, STREAM, quoted
from ._peer import check_same_user

_logger = logging.getLogger("grapeshot.rpc")

# How long a client may take until it has said hello, and before that for the handshake of TLS.
HELLO_S = 10.0
_MAX_TEXT = 16 * 1024
# A stream that need not wait gives the loop back after this many items or this time, whichever comes first.
# The streams of a connection share its items, and each sends at least one.
_TURN_ITEMS = 128
_SHARED_ITEMS = 1024
_TURN_S = 0.001
_NO_KWARGS: dict[str, Any] = {}


class Request(NamedTuple):
    """What REQUEST and STREAM say."""

    number: Any
    method: Any
    args: Any
    kwargs: Any
    left_s: Any
    credit: Any


class Owner(Protocol):
    """The server: its options, and its list of connections."""

    codec: Codec
    max_calls: int
    max_packet: int
    tracebacks: bool
    keepalive: float | None

    def attach(self, connection: ServerConnection, /) -> None: ...
    def detach(self, connection: ServerConnection, /) -> None: ...


class Call:
    """A call that did not end at once; the outlet of its stream, if it is one."""

    __slots__ = (
        "_connection",
        "_credit",
        "_handler",
        "_is_late",
        "_number",
        "_running",
        "_timer",
        "_turn_end",
        "_turn_left",
        "_waiter",
    )

    def __init__(self, connection: ServerConnection, number: int, handler: Handler, credit: int) -> None:
        self._connection = connection
        self._number = number
        self._handler = handler
        self._credit = credit
        self._turn_left = 0
        self._turn_end = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_late = False
        # None before it begins, and once it was cancelled: a handler is cancelled once, and may then take its time.
        self._running: Running | None = None

    def run(self, running: Running, deadline: float | None) -> None:
        """Wait for the end of what runs, and for the deadline."""
        self._running = running
        running.add_done_callback(self._finish)
        if deadline is not None:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._expire)

    def cancel(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.cancel()

    def _expire(self) -> None:
        self._is_late = self._running is not None
        self.cancel()

    def _finish(self, running: Running) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._running = None
        self._connection.finish(self._number, self._handler, running, is_late=self._is_late)

    # ------------------------------------------------------------------ the outlet

    def send_item(self, item: Any) -> bool:
        """Send an item. Return whether the next one may be sent at once: the client takes it, the transport too, and
        the stream's turn is not over. Raises BadResultError if this one cannot be sent.
        """
        self._credit -= 1
        self._turn_left -= 1
        connection = self._connection
        try:
            connection.send((ITEM, self._number, item))
        except Exception as error:
            raise BadResultError(error) from error
        return (
            self._credit > 0
            and self._turn_left > 0
            and connection.can_write
            and connection.is_open
            and connection.time() < self._turn_end
        )

    async def wait_ready(self) -> None:
        if self._turn_end and (self._turn_left <= 0 or self._connection.time() >= self._turn_end):
            await asyncio.sleep(0)
        # on a connection that is closed the call is about to be cancelled
        while not (self._credit > 0 and self._connection.can_write and self._connection.is_open):
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._begin_turn()

    def _begin_turn(self) -> None:
        self._turn_left = min(_TURN_ITEMS, _SHARED_ITEMS // (self._connection.calls + 1))
        self._turn_end = self._connection.time() + _TURN_S

    def add_credit(self, count: int) -> None:
        if self._credit + count > messages.MAX_CREDIT:
            raise ValueError(f"stream credit must be at most {messages.MAX_CREDIT}, got {count} beside {self._credit}")
        self._credit += count
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class ServerConnection(Connection):
    def __init__(self, server: Owner, methods: Mapping[str, Handler]) -> None:
        super().__init__(server.codec, server.max_packet, server.keepalive)
        self._server = server
        self._methods = methods
        # The loop's clock, from connection_made on.
        self.time: Callable[[], float]
        self._max_calls = server.max_calls
        self._calls: dict[int, Call] = {}
        self._last = 0
        self._is_greeted = False
        self._is_leaving = False
        self._hello_timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------ the connection

    @property
    def calls(self) -> int:
        """How many calls are under way."""
        return len(self._calls)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.time = self._loop.time
        self._server.attach(self)
        if self._codec.is_for_one_user:
            try:
                check_same_user(transport.get_extra_info("socket"))
            except PermissionError as error:
                _logger.warning("a connection was refused: %s", str(error))
                self.abort()
                return
        self._hello_timer = self._loop.call_later(HELLO_S, self.abort)
        self.send_hello(self._max_calls)
        self.start_keepalive()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        self.cancel_calls()
        self._server.detach(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        for call in list(self._calls.values()):
            call.wake()
        self.take_again()

    def closing(self, error: ProtocolError) -> None:
        _logger.warning("a client has broken the protocol: %s", str(error))
        if self._is_greeted:
            self.send((GOODBYE, self._last, self._sendable(str(error))))

    def silent(self, error: TimeoutError) -> None:
        _logger.info("a connection is closed: %s", str(error))
        self.abort()

    def say_goodbye(self) -> None:
        """Take no more calls; close the connection when the last one is answered."""
        if self._is_leaving or not self.is_open:
            return
        self._is_leaving = True
        self.send((GOODBYE, self._last, None))
        self._close_if_done()

    def cancel_calls(self) -> None:
        for call in list(self._calls.values()):
            call.cancel()

    def _close_if_done(self) -> None:
        if self._is_leaving and not self._calls:
            self.close()

    # ------------------------------------------------------------------ requests

    def packet_received(self, packet: bytes) -> None:
        if not self._is_greeted:
            self._take_hello(packet)
            return
        try:
            kind, number, *fields = (self._decode_short if len(packet) < MIN_CHECKED else self._decode)(packet)
        except Exception as error:
            raise ProtocolError(f"a message cannot be decoded: {quoted(error)}") from error
        try:
            if kind == REQUEST:
                if len(fields) == 2:
                    method, args = fields
                    request = Request(number, method, args, _NO_KWARGS, None, 0)
                else:
                    method, args, kwargs, left_s = fields
                    request = Request(number, method, args, kwargs, left_s, 0)
            elif kind == STREAM:
                request = Request(number, *fields)
                _check_credit(request.credit)
            else:
                self._take_control(kind, number, fields)
                return
        except (LookupError, TypeError, ValueError) as error:
            raise ProtocolError(f"a wrong message: {quoted(error)}") from error
        self._take_request(request, is_stream=kind == STREAM)
        if not self.can_write:
            # Only requests wait: a stream that keeps the transport full is cancelled by what is read.
            self.hold()

    def _take_hello(self, packet: bytes) -> None:
        self.take_hello(packet)
        self._is_greeted = True
        if self._hello_timer is not None:
            self._hello_timer.cancel()

    def _take_control(self, kind: Any, number: Any, fields: list[Any]) -> None:
        """Cancel a call, or let a stream send more; the call may have ended meanwhile."""
        call = self._calls.get(number)
        if kind == CANCEL:
            if call is not None:
                call.cancel()
        elif kind == CREDIT:
            [count] = fields
            _check_credit(count)
            if call is not None:
                call.add_credit(count)
        elif kind == PING:
            self.take_ping()
        elif kind != PONG:
            raise ValueError(f"its kind is {quoted(kind)}")

    def _take_request(self, request: Request, is_stream: bool) -> None:
        number, method, args, kwargs, left_s, _ = request
        if type(number) is not int or number <= self._last:
            raise ProtocolError(f"a request with the number {quoted(number)} after {self._last}")
        if type(method) is not str or not isinstance(args, list | tuple) or type(kwargs) is not dict:
            raise ProtocolError("a wrong request")
        if self._is_leaving:
            return  # the goodbye has told the client that it does not run
        self._last = number
        if len(self._calls) >= self._max_calls:
            raise ProtocolError(f"more than {self._max_calls} calls under way")
        if left_s is None:
            self._run(request, is_stream, None)
            return
        if not isinstance(left_s, int | float) or not 0 <= left_s <= messages.MAX_LEFT_S:
            raise ProtocolError(f"{quoted(left_s)} seconds left")
        deadline = self._loop.time() + left_s
        context = contextvars.copy_context()
        context.run(current_deadline.set, deadline)
        context.run(self._run, request, is_stream, deadline)

    def _run(self, request: Request, is_stream: bool, deadline: float | None) -> None:
        number, method, args, kwargs, _, credit = request
        handler = self._methods.get(method)
        if handler is None:
            self._send_error(number, messages.UNKNOWN_METHOD, "UnknownMethod", f"there is no method {quoted(method)}")
            return
        function, start, handler_streams = handler
        if handler_streams != is_stream:
            why = f"{method} streams its results" if handler_streams else f"{method} does not stream"
            self._send_error(number, messages.BAD_ARGUMENTS, "BadArguments", why)
            return
        # one that is not streamed and ends at once needs none
        call = Call(self, number, handler, credit) if is_stream else None
        try:
            if start is None:
                value = function(*args, **kwargs)
            else:
                running = start(call, function, args, kwargs)
        except (SystemExit, KeyboardInterrupt):
            raise
        except asyncio.CancelledError:
            self._send_error(number, messages.CANCELLED, "CancelledError", "the handler was cancelled")
            return
        except BaseException as error:
            if isinstance(error, TypeError) and not accepts(function, args, kwargs):
                error = BadCallError(error)
            self._send_exception(number, error)
            return
        if start is None:
            self._send_result(number, value)
        elif running.done():
            self.finish(number, handler, running)
        else:
            call = self._calls[number] = call or Call(self, number, handler, 0)
            call.run(running, deadline)

    # ------------------------------------------------------------------ answers

    def send(self, message: tuple[Any, ...]) -> None:
        """Send a message. Raises what the codec raises, or PacketTooLarge."""
        self.send_packet(self._encode(message))

    def finish(self, number: int, handler: Handler, running: Running, is_late: bool = False) -> None:
        """Answer a call that has ended."""
        self._calls.pop(number, None)
        if running.cancelled():
            if is_late:
                self._send_error(number, messages.DEADLINE, "DeadlineExceeded", "the handler was cancelled in time")
            else:
                self._send_error(number, messages.CANCELLED, "CancelledError", "the handler was cancelled")
        else:
            try:
                value = running.result()
            except BaseException as error:
                self._send_exception(number, error)
            else:
                if handler.is_stream:
                    self.send((END, number))
                else:
                    self._send_result(number, value)
        if self._is_leaving:
            self._close_if_done()

    def _send_result(self, number: int, value: Any) -> None:
        try:
            self.send_packet(self._encode((RESULT, number, value)))
        except Exception as error:
            self._send_error(number, messages.BAD_RESULT, type(error).__qualname__, _text_of(error))

    def _send_exception(self, number: int, error: BaseException) -> None:
        _logger.debug("call %d has raised", number, exc_info=error)
        code = messages.RAISED
        if isinstance(error, BadCallError | BadResultError):
            code = messages.BAD_ARGUMENTS if isinstance(error, BadCallError) else messages.BAD_RESULT
            error = error.args[0]
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        lines = "".join(traceback.format_exception(error)) if self._server.tracebacks else None
        self._send_error(number, code, name, _text_of(error), lines)

    def _send_error(self, number: int, code: int, type_name: str, message: str, lines: str | None = None) -> None:
        texts = [None if text is None else self._sendable(text) for text in (type_name, message, lines)]
        self.send((ERROR, number, code, *texts))

    def _sendable(self, text: str) -> str:
        """The text, or its beginning, without what UTF-8 has no bytes for. Three of them fit into each packet."""
        limit = min(_MAX_TEXT, self.max_sent_packet // 24)  # a character may become six bytes
        return text[:limit].encode("utf-8", "backslashreplace").decode()


def _check_credit(count: Any) -> None:
    if type(count) is not int or not 0 < count <= messages.MAX_CREDIT:
        raise ValueError(f"stream credit must be an integer from 1 to {messages.MAX_CREDIT}, got {quoted(count)}")


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its text cannot be made)"
