"""The client's side of a stream: the results of a call, one by one as they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any

from ._client_connection import ClientConnection, Request
from ._deadline import earliest
from ._errors import DeadlineExceeded, NotSent
from ._inbox import Inbox


class Stream(AsyncIterator[Any]):
    """The results of a streaming call, for ``async for item in stream``. :meth:`Client.stream` returns a Stream.

    The call begins when the first item is requested. The server sends at most ``stream_window`` items ahead of the
    reader. If the reader stops early, the handler is cancelled: at once with ``async with`` or :meth:`aclose`,
    otherwise when the stream object is freed.
    """

    def __init__(
        self, connect: Callable[[], Awaitable[ClientConnection]], request: Request, timeout: float | None
    ) -> None:
        self._connect = connect
        self._request = request
        # None if there is no limit, or once the call has begun: the request then contains the deadline.
        self._timeout_s = timeout
        self._inbox: Inbox | None = None
        self._connection: ClientConnection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._taken = 0

    async def __anext__(self) -> Any:
        inbox = self._inbox
        if inbox is None or not inbox.items:
            inbox = await self._wait()
        item = inbox.items.popleft()
        self._taken += 1
        if self._taken * 2 >= self._request[4] and self._connection is not None:
            self._connection.credit(inbox.number, self._taken)
            self._taken = 0
        return item

    async def _wait(self) -> Inbox:
        """Wait for the next item. Raises StopAsyncIteration at the end."""
        if self._timeout_s is not None:
            method, args, kwargs, deadline, window = self._request
            self._request = (method, args, kwargs, earliest(deadline, self._timeout_s), window)
            self._timeout_s = None
        try:
            async with asyncio.timeout_at(self._request[3]):
                return await self._wait_for_item()
        except TimeoutError as error:
            self.cancel()
            if isinstance(error, DeadlineExceeded):
                raise
            raise DeadlineExceeded(f"{self._request[0]} did not end in time") from None

    async def _wait_for_item(self) -> Inbox:
        while True:
            inbox = self._inbox
            if inbox is None:
                connection = await self._connect()
                if self._inbox is not None:
                    continue  # in the meantime, the stream was cancelled, or another task has begun the call
                self._connection = connection
                inbox = self._inbox = Inbox()
                self._loop = asyncio.get_running_loop()
                try:
                    self._connection.start(inbox, self._request)
                except BaseException:
                    inbox.end()
                    raise
            while not inbox.items and not inbox.done():
                try:
                    await inbox.wait()
                except RuntimeError:  # another task is reading this stream, so do not cancel the call
                    raise
                except BaseException:
                    # __del__ would cancel the call too late, because the exception's traceback keeps this stream alive.
                    self.cancel()
                    raise
            if inbox.items:
                return inbox
            error = inbox.take_error()
            if isinstance(error, NotSent):
                self._inbox = None
            elif error is not None:
                raise error
            else:
                raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancel the call if it is still running. The same as :meth:`cancel`."""
        self.cancel()

    def cancel(self) -> None:
        """Cancel the call if it is still running. The stream yields no items after this."""
        inbox = self._inbox
        if inbox is None:
            self._inbox = inbox = Inbox()
        elif self._connection is not None and not inbox.done():
            _drop(self._connection, inbox)
        inbox.items.clear()
        inbox.end()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        inbox, connection, loop = self._inbox, self._connection, self._loop
        if inbox is None or inbox.done() or connection is None or loop is None or loop.is_closed():
            return
        # the garbage collector may call this in any thread and at any point, so leave the work to the loop
        loop.call_soon_threadsafe(_drop, connection, inbox)


def _drop(connection: ClientConnection, inbox: Inbox) -> None:
    inbox.end()  # first, so that the connection can drop a request that it has not sent
    connection.abandon(inbox.number, inbox)
