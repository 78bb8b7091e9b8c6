"""What has come of a stream of results and was not taken yet."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any


class Inbox:
    """The items of one stream: the connection fills it, one reader empties it.

    A connection keeps only this, so that a stream that its reader drops is noticed.
    """

    def __init__(self) -> None:
        self.number = 0
        # How many items the server may send ahead.
        self.window = 0
        self.items: deque[Any] = deque()
        self._error: BaseException | None = None
        self._is_over = False
        self._waiter: asyncio.Future[None] | None = None

    def done(self) -> bool:
        """Whether no more items come: the stream has ended, or nobody wants the rest."""
        return self._is_over

    def add(self, item: Any) -> None:
        if len(self.items) >= self.window:
            raise TypeError("more items of a stream than were asked for")
        self.items.append(item)
        self._wake()

    def end(self) -> None:
        self._is_over = True
        self._wake()

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self.end()

    def set_result(self, value: Any) -> None:
        """A stream has no result: the server has broken the protocol."""
        raise TypeError("a result of a stream")

    def take_error(self) -> BaseException | None:
        """Return why the stream has ended, once."""
        error, self._error = self._error, None
        return error

    async def wait(self) -> None:
        """Wait for an item or the end. Raises RuntimeError if somebody else waits already."""
        if self._waiter is not None:
            raise RuntimeError("this stream is being read already")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
