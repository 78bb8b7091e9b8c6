"""The items of a stream that have arrived but were not yet taken by the reader."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any


class Inbox:
    """The items of one stream. The connection adds items, and a single reader takes them.

    The connection refers only to the inbox and not to the :class:`Stream`. So when the reader drops the Stream, the
    Stream is freed, which cancels the call.
    """

    def __init__(self) -> None:
        self.number = 0
        # How many items the server may send ahead of the reader.
        self.window = 0
        self.items: deque[Any] = deque()
        self._error: BaseException | None = None
        self._is_over = False
        self._waiter: asyncio.Future[None] | None = None

    def done(self) -> bool:
        """Whether no more items will come, because the stream has ended or was cancelled."""
        return self._is_over

    def add(self, item: Any) -> None:
        if len(self.items) >= self.window:
            raise TypeError(f"the server has sent more items of a stream than the {self.window} it may send ahead")
        self.items.append(item)
        self._wake()

    def end(self) -> None:
        self._is_over = True
        self._wake()

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self.end()

    def set_result(self, value: Any) -> None:
        """Raise TypeError. A stream has no result, so a server that sends one violates the protocol."""
        raise TypeError("the server has sent a result for a stream")

    def take_error(self) -> BaseException | None:
        """Return the error that has ended the stream, or None. The error is returned only once."""
        error, self._error = self._error, None
        return error

    # insight.backdoor's Wire waits in the same way. The two share no code, so that rpc could become a separate package.

    async def wait(self) -> None:
        """Wait for an item or the end. Raises RuntimeError if another task is already waiting."""
        if self._waiter is not None:
            raise RuntimeError("another task is already reading this stream")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
