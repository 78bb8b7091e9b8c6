"""One connection of a client: it numbers calls, and keeps the calls that wait to be sent or wait for an answer.

    start() --- full? ---> queue ---.        full: the transport is full, or the server has as many calls as it accepts
        |                           | an answer has come, or the transport has written
        v                           v
    pending[number] <---------------'  ---- RESULT, ERROR, END, loss of the connection ----> the target is done

A target receives the outcome of a call. It is a future, or the inbox of a stream, with ``done``, ``set_result`` and
``set_exception``. When a call is cancelled, its entry in ``pending`` becomes None and stays there, because the call
counts as under way until the server has answered it.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import Any

from . import _messages as messages
from ._codecs import MIN_CHECKED, Codec
from ._connection import Connection
from ._errors import ConnectionLost, NotSent, ProtocolError
from ._inbox import Inbox
from ._messages import (
    CANCEL,
    CREDIT,
    END,
    ERROR,
    GOODBYE,
    ITEM,
    MIN_COUNTED,
    PING,
    PONG,
    REQUEST,
    RESULT,
    STREAM,
    quoted,
)
from ._peer import check_same_user

Target = asyncio.Future[Any] | Inbox
# Method, positional arguments, keyword arguments, deadline, and how many items of a stream the server may send at first
# (0: this is not a stream).
Request = tuple[str, tuple[Any, ...], dict[str, Any], float | None, int]


class ClientConnection(Connection):
    """Calls ``on_leaving(self)`` when the connection stops accepting calls, and again when the connection is lost."""

    def __init__(
        self,
        codec: Codec,
        max_packet: int,
        keepalive: float | None,
        on_leaving: Callable[[ClientConnection], None],
    ) -> None:
        super().__init__(codec, max_packet, keepalive)
        self._on_leaving = on_leaving
        # Done when the server's hello has come. If the connection ends without a hello, this future has the error.
        self.made: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Whether a request has to wait in the queue.
        self.is_full = True
        self.has_answers = False
        # Whether new calls may be sent: True between the server's hello and its goodbye.
        self.takes_calls = False
        self._max_calls = 0
        self._max_call_bytes = 0
        self._pending: dict[int, Target | None] = {}
        self._queue: deque[tuple[Target, Request]] = deque()
        # How many queued calls were cancelled since cancelled calls were last removed from the queue.
        self._cancelled = 0
        self._last = 0
        # The number of the last request that was passed to the transport.
        self._last_flushed = 0
        # From the server's goodbye: calls after this number have not run.
        self._last_taken: int | None = None
        self._reason: BaseException | str | None = None

    # ------------------------------------------------------------------ calls

    def new_future(self) -> asyncio.Future[Any]:
        return self._loop.create_future()

    def start(self, target: Target, request: Request) -> int:
        """Send a request and return its number, or queue it and return 0.

        Raises PacketTooLarge, or the codec's error. The request is then neither sent nor queued.
        """
        if not self.is_full:
            return self._send_request(target, request)
        # A short call does not wait for large ones to end, because a large call may depend on the short one.
        if self._takes_short_calls() and (number := self._send_request(target, request, MIN_COUNTED)):
            return number
        self._queue.append((target, request))
        if not self.is_open:  # connection_lost() may have run already, so nothing else would end the queued calls
            self._fail_queue()
        return 0

    def abandon(self, number: int, target: Target) -> None:
        """Cancel a call whose caller no longer waits. If it is still queued, it will not be sent."""
        if not number:
            # it was queued, and may have been sent since
            number = next((key for key, value in self._pending.items() if value is target), 0)
        if self._pending.get(number) is target:
            self._pending[number] = None
            self.send_packet(self._encode((CANCEL, number)))
        elif not number:
            self._cancelled += 1
            if 2 * self._cancelled > len(self._queue):
                # remove cancelled calls, which would otherwise stay in the queue until their turn to be sent comes
                self._queue = deque(entry for entry in self._queue if not entry[0].done())
                self._cancelled = 0

    def credit(self, number: int, count: int) -> None:
        """Allow the server to send ``count`` more items."""
        if number in self._pending:
            self.send_packet(self._encode((CREDIT, number, count)))

    def _encode_request(self, number: int, request: Request) -> bytes:
        method, args, kwargs, deadline, window = request
        if window:
            return self._encode((STREAM, number, method, args, kwargs, self._left_s(deadline), window))
        if kwargs or deadline is not None:
            return self._encode((REQUEST, number, method, args, kwargs, self._left_s(deadline)))
        return self._encode((REQUEST, number, method, args))

    def _send_request(self, target: Target, request: Request, limit: float = math.inf) -> int:
        """Send a request and return its number. If it has ``limit`` bytes or more, send nothing and return 0."""
        # set before sending, because flush() records it
        self._last = number = self._last + 1
        packet = self._encode_request(number, request)
        if len(packet) >= limit:
            return 0  # no request gets this number
        if isinstance(target, Inbox):
            target.number, target.window = number, request[4]
        self.send_packet(packet)
        self._pending[number] = target
        self.add_request(number, len(packet))
        if not self._has_room():
            self.is_full = True
        return number

    def _has_room(self) -> bool:
        """Whether the server accepts another call, however long its request is."""
        return len(self._pending) < self._max_calls and self.call_bytes < self._max_call_bytes

    def _takes_short_calls(self) -> bool:
        """Whether only ``max_call_bytes`` keeps calls in the queue."""
        return (
            self.call_bytes >= self._max_call_bytes
            and len(self._pending) < self._max_calls
            and self.takes_calls
            and self.can_write
        )

    def _left_s(self, deadline: float | None) -> float | None:
        return None if deadline is None else min(max(0.0, deadline - self._loop.time()), messages.MAX_LEFT_S)

    def _send_queue(self) -> None:
        """Send queued requests, as many as are possible now."""
        queue = self._queue
        while queue and self.takes_calls and self.can_write and self._has_room():
            target, request = queue.popleft()
            if target.done():
                continue
            try:
                self._send_request(target, request)
            except Exception as error:
                target.set_exception(error)
        self.is_full = bool(queue) or not (self.takes_calls and self.can_write and self._has_room())

    def flush(self) -> None:
        if self.is_open:
            self._last_flushed = self._last
        super().flush()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.is_full = True

    def resume_writing(self) -> None:
        super().resume_writing()
        self._send_queue()

    # ------------------------------------------------------------------ the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._codec.is_for_one_user:
            try:
                check_same_user(transport.get_extra_info("socket"))
            except PermissionError as error:
                self._reason = error
                self.abort()
                return
        self.send_hello(max_calls=0, max_call_bytes=0)
        self.start_keepalive()

    def leave(self, reason: str) -> None:
        """Close the connection. Calls under way fail with this reason."""
        if self._reason is None:
            self._reason = reason
        self._stop_taking()
        self.flush()
        if self.pending_bytes():
            self.abort()
        self.close()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.take_rest()  # it may contain answers
        super().connection_lost(exc)
        if self._reason is None:
            self._reason = exc
        self._stop_taking()
        if not self.made.done():
            reason = self._reason
            error = reason if isinstance(reason, Exception) else ConnectionLost(self._text(), sent=False)
            self.made.set_exception(error)
        last_sent = self._last_flushed if self._last_taken is None else min(self._last_flushed, self._last_taken)
        pending, self._pending = self._pending, {}
        for number, target in pending.items():
            self._fail(target, is_sent=number <= last_sent)
        self._fail_queue()
        self.lost.set_result(None)

    def closing(self, error: ProtocolError) -> None:
        self._reason = error
        self._stop_taking()

    def silent(self, error: TimeoutError) -> None:
        self._reason = error
        self._stop_taking()
        self.abort()

    def _stop_taking(self) -> None:
        self.takes_calls = False
        self.is_full = True
        self._on_leaving(self)

    def _fail_queue(self) -> None:
        queue, self._queue = self._queue, deque()
        for target, _ in queue:
            self._fail(target, is_sent=False)

    def _fail(self, target: Target | None, is_sent: bool) -> None:
        if target is None or target.done():
            return
        error: Exception = NotSent()
        if is_sent:
            error = ConnectionLost(self._text(), sent=True)
            error.__cause__ = self._reason if isinstance(self._reason, BaseException) else None
        target.set_exception(error)

    def _text(self) -> str:
        return f"the connection was lost: {self._reason}" if self._reason else "the server has closed the connection"

    # ------------------------------------------------------------------ answers

    def packet_received(self, packet: bytes) -> None:
        if not self.made.done():
            self._take_hello(packet)
            return
        try:
            message = (self._decode_short if len(packet) < MIN_CHECKED else self._decode)(packet)
            kind, number = message[0], message[1]
        except Exception as error:
            raise ProtocolError(f"cannot decode a message from the server: {quoted(error)}") from error
        # The target is removed only after its message has turned out to be valid. If it is not valid, the connection is
        # closed, and that completes the target.
        try:
            if kind == RESULT:
                target = self._pending[number]
                if target is not None and not target.done():
                    target.set_result(message[2])
            elif kind == ITEM:
                target = self._pending[number]
                if target is not None:
                    target.add(message[2])  # type: ignore[union-attr]  # AttributeError: the call is not a stream
                return
            elif kind == ERROR:
                target = self._pending[number]
                remote = messages.error_of(message[2:])
                if target is not None and not target.done():
                    target.set_exception(remote)
            elif kind == END:
                target = self._pending[number]
                if target is not None:
                    target.end()  # type: ignore[union-attr]
            elif kind == GOODBYE:
                self._take_goodbye(number, message[2])
                return
            elif kind == PING:
                self.take_ping()
                return
            elif kind == PONG:
                return
            else:
                raise ProtocolError(f"the server has sent a message of an unknown kind: {quoted(kind)}")
        except (LookupError, TypeError, AttributeError) as wrong:
            raise ProtocolError(f"the server has sent a malformed message: {quoted(wrong)}") from wrong
        del self._pending[number]
        self.remove_request(number)
        self.has_answers = True
        if self.is_full:
            self._send_queue()
            self._close_if_done()

    def _take_hello(self, packet: bytes) -> None:
        hello = self.take_hello(packet)
        if hello.max_calls < 1 or hello.max_call_bytes < 1:
            raise ProtocolError("the peer did not identify itself as a grapeshot.rpc server: it accepts no calls")
        self._max_calls, self._max_call_bytes = hello.max_calls, hello.max_call_bytes
        self.takes_calls = True
        self.made.set_result(None)
        self._send_queue()

    def _take_goodbye(self, last_taken: int, reason: str | None) -> None:
        """Handle a goodbye. Calls up to ``last_taken`` will be answered; later ones go through the next connection."""
        if type(last_taken) is not int or not isinstance(reason, str | None):
            raise TypeError(f"malformed goodbye: {quoted(last_taken)}, {quoted(reason)}")
        self._last_taken = last_taken
        if reason is not None:
            self._reason = ProtocolError(f"the server has closed the connection: {reason}")
        self._stop_taking()
        for number in [number for number in self._pending if number > last_taken]:
            self._fail(self._pending.pop(number), is_sent=False)
        self._fail_queue()
        self._close_if_done()

    def _close_if_done(self) -> None:
        if not self.takes_calls and not self._pending:
            self.close()
