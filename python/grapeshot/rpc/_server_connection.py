"""One connection of a server, and the calls that it has under way.

    REQUEST ---> the handler ---> ends at once ------------------------> RESULT or ERROR
                     '-----> a Call, which watches the handler ---> done, cancelled, deadline ---> RESULT, ERROR, END

When the transport is full of answers that the client has not read, the server handles at most one more request and
then stops reading. From then on, only the calls under way, whose number is limited, can add answers to those in
memory. This pause cannot cause a deadlock, because a :class:`Client` that stops reading always starts again in its
loop's next iteration.
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

# How long a client may take to send its hello. The TLS handshake before it may take as long again.
HELLO_S = 10.0
_MAX_TEXT = 16 * 1024
# A stream that does not have to wait lets other tasks run after _TURN_ITEMS items or _TURN_S seconds, whichever comes
# first. If many calls of a connection are under way, they share _SHARED_ITEMS: each stream sends its part of them, but
# at least one item, before it lets other tasks run.
_TURN_ITEMS = 128
_SHARED_ITEMS = 1024
_TURN_S = 0.001
_NO_KWARGS: dict[str, Any] = {}


class Request(NamedTuple):
    """The fields of REQUEST and STREAM."""

    number: Any
    method: Any
    args: Any
    kwargs: Any
    left_s: Any
    credit: Any
    # The length of the message.
    size: int


class Owner(Protocol):
    """The server, with its options and its set of connections."""

    codec: Codec
    max_calls: int
    max_call_bytes: int
    max_packet: int
    tracebacks: bool
    keepalive: float | None

    def attach(self, connection: ServerConnection, /) -> None: ...
    def detach(self, connection: ServerConnection, /) -> None: ...


class Call:
    """A call that streams its results, or that did not end at once. For a stream, it is also the outlet."""

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
        # None before the call begins, after it has ended, and after it was cancelled: a handler is cancelled only once,
        # and may then take some time to clean up.
        self._running: Running | None = None

    def run(self, running: Running, deadline: float | None) -> None:
        """Watch a running call: answer it when it ends, and cancel it at the deadline."""
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
        """Send an item; return whether the next one may be sent at once.

        The next one has to wait if the client or the transport does not accept more, or if the stream must yield to
        other tasks. Raises BadResultError if this item cannot be sent.
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
        # if the connection is closed, this waits until the call is cancelled, which is about to happen
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
            raise ValueError(f"stream credit must be at most {messages.MAX_CREDIT}, got {self._credit} + {count}")
        self._credit += count
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class ServerConnection(Connection):
    """The server's end of a connection: it runs the requests and sends the answers."""

    def __init__(self, server: Owner, methods: Mapping[str, Handler]) -> None:
        super().__init__(server.codec, server.max_packet, server.keepalive)
        self._server = server
        self._methods = methods
        # The loop's clock, from connection_made on.
        self.time: Callable[[], float]
        self._max_calls = server.max_calls
        self._max_call_bytes = server.max_call_bytes
        self._calls: dict[int, Call] = {}
        self._last = 0
        self._is_greeted = False
        self._is_leaving = False
        self._hello_timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------ the connection

    @property
    def calls(self) -> int:
        """The number of calls under way."""
        return len(self._calls)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.time = self._loop.time
        self._server.attach(self)
        if self._codec.is_for_one_user:
            try:
                check_same_user(transport.get_extra_info("socket"))
            except PermissionError as error:
                _logger.warning("refused a connection: %s", str(error))
                self.abort()
                return
        self._hello_timer = self._loop.call_later(HELLO_S, self.abort)
        self.send_hello(self._max_calls, self._max_call_bytes)
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
        _logger.warning("a client has violated the protocol: %s", str(error))
        if self._is_greeted:
            self.send((GOODBYE, self._last, self._sendable(str(error))))

    def silent(self, error: TimeoutError) -> None:
        _logger.info("closing a connection: %s", str(error))
        self.abort()

    def say_goodbye(self) -> None:
        """Accept no more calls, and close the connection when the last one is answered."""
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
            raise ProtocolError(f"cannot decode a message: {quoted(error)}") from error
        try:
            if kind == REQUEST:
                if len(fields) == 2:
                    method, args = fields
                    request = Request(number, method, args, _NO_KWARGS, None, 0, len(packet))
                else:
                    method, args, kwargs, left_s = fields
                    request = Request(number, method, args, kwargs, left_s, 0, len(packet))
            elif kind == STREAM:
                method, args, kwargs, left_s, credit = fields
                request = Request(number, method, args, kwargs, left_s, credit, len(packet))
                _check_credit(request.credit)
            else:
                self._take_control(kind, number, fields)
                return
        except (LookupError, TypeError, ValueError) as error:
            raise ProtocolError(f"malformed message: {quoted(error)}") from error
        self._take_request(request, is_stream=kind == STREAM)
        if not self.can_write:
            # Only a request stops the reading. After a CANCEL, reading goes on, because the client may have to cancel
            # more streams before the transport has room again.
            self.hold()

    def _take_hello(self, packet: bytes) -> None:
        self.take_hello(packet)
        self._is_greeted = True
        if self._hello_timer is not None:
            self._hello_timer.cancel()

    def _take_control(self, kind: Any, number: Any, fields: list[Any]) -> None:
        """Handle a message other than a request. The call that it refers to may have ended already."""
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
            raise ValueError(f"unknown kind {quoted(kind)}")

    def _take_request(self, request: Request, is_stream: bool) -> None:
        number, method, args, kwargs, left_s, _, _ = request
        if type(number) is not int or number <= self._last:
            raise ProtocolError(f"request number {quoted(number)} is not an integer above the last one, {self._last}")
        if type(method) is not str or not isinstance(args, list | tuple) or type(kwargs) is not dict:
            raise ProtocolError(
                "malformed request: the method must be a string, its arguments a list, its keyword arguments a dict"
            )
        if self._is_leaving:
            return  # the goodbye tells the client that this call does not run
        self._last = number
        if len(self._calls) >= self._max_calls:
            raise ProtocolError(f"there are already {self._max_calls} calls under way, which is the limit (max_calls)")
        if self.call_bytes >= self._max_call_bytes and request.size >= messages.MIN_COUNTED:
            raise ProtocolError(
                f"the calls under way have {self.call_bytes} bytes, but the limit is {self._max_call_bytes}"
                " (max_call_bytes)"
            )
        if left_s is None:
            self._run(request, is_stream, None)
            return
        if not isinstance(left_s, int | float) or not 0 <= left_s <= messages.MAX_LEFT_S:
            limit = messages.MAX_LEFT_S
            raise ProtocolError(f"the time left must be from 0 to {limit:.0f} seconds, got {quoted(left_s)}")
        deadline = self._loop.time() + left_s
        context = contextvars.copy_context()
        context.run(current_deadline.set, deadline)
        context.run(self._run, request, is_stream, deadline)

    def _run(self, request: Request, is_stream: bool, deadline: float | None) -> None:
        number, method, args, kwargs, _, credit, size = request
        handler = self._methods.get(method)
        if handler is None:
            self._send_error(number, messages.UNKNOWN_METHOD, "UnknownMethod", f"there is no method {quoted(method)}")
            return
        function, start, handler_streams = handler
        if handler_streams != is_stream:
            how = "streams its results: use stream()" if handler_streams else "does not stream: use call()"
            self._send_error(number, messages.BAD_ARGUMENTS, "BadArguments", f"{method} {how}")
            return
        # a call that is not a stream needs a Call only if it does not end at once
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
            self.add_request(number, size)
            call.run(running, deadline)

    # ------------------------------------------------------------------ answers

    def send(self, message: tuple[Any, ...]) -> None:
        """Send a message. Raises PacketTooLarge, or the codec's error."""
        self.send_packet(self._encode(message))

    def finish(self, number: int, handler: Handler, running: Running, is_late: bool = False) -> None:
        """Answer a call that has ended."""
        self._calls.pop(number, None)
        self.remove_request(number)
        if running.cancelled():
            if is_late:
                problem = "the handler was cancelled: its time was over"
                self._send_error(number, messages.DEADLINE, "DeadlineExceeded", problem)
            else:
                self._send_error(number, messages.CANCELLED, "CancelledError", "the handler was cancelled")
        # Not result(), which would add this frame to the exception's traceback. The frame refers to `running`, so the
        # exception and the handler's arguments would stay in memory until the garbage collector finds the cycle.
        elif (error := running.exception()) is not None:
            self._send_exception(number, error)
        elif handler.is_stream:
            self.send((END, number))
        else:
            self._send_result(number, running.result())
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
        """Return the text in a form that UTF-8 can encode, shortened so that three such texts fit into a packet."""
        limit = min(_MAX_TEXT, self.max_sent_packet // 24)  # a character may become six bytes
        return text[:limit].encode("utf-8", "backslashreplace").decode()


def _check_credit(count: Any) -> None:
    if type(count) is not int or not 0 < count <= messages.MAX_CREDIT:
        raise ValueError(f"stream credit must be an integer from 1 to {messages.MAX_CREDIT}, got {quoted(count)}")


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its text cannot be shown)"
