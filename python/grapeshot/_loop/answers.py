"""What name lookups and calls on files have in common: native code answers later, and a future waits for each answer.

The native object (``_core._Resolver``, ``_core._AioQueue``) returns a ticket for each question. The object's descriptor
is readable when answers may have arrived. The object's method ``take`` appends them to a list, each with its ticket.

A forked child never uses the native object of its parent, and never frees it. At the time of the fork, a thread of the
parent, which does not exist in the child, may have held a lock of the object or may have been changing it.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from functools import partial

from grapeshot import _core

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# How many forks have led to this process. By this number, `Answers` notices that it is in the child of a fork. The pid
# would not be enough for that: a parent and its child have the same pid if each is the first process of a pid
# namespace.
_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class Answers:
    """Keeps the questions of a loop that are under way, and gives each answer to the future that waits for it."""

    # The type of the native object.
    _kind: type[Any]

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        # None until `_open` has made it, and after the loop was closed.
        self._native: Any = None
        self._forks = _forks
        # ticket -> the future, and the function to call with the answer when it has arrived
        self._waiting: dict[int, tuple[asyncio.Future[Any], Callable[[Any], object] | None]] = {}
        # Answers that were taken and not delivered yet, each with its ticket.
        self._arrived: list[tuple[int, Any]] = []

    def forget_parent(self) -> None:
        """In the child of a fork: leave everything that is under way to the parent."""
        self._own()

    def _open(self) -> Any:
        """Return the native object of this process; make it if there is none.

        Raises:
            RuntimeError: the loop is closed.
            OSError: the process has no descriptor left.
        """
        native = self._own()
        if native is None:
            if self._loop.is_closed():
                raise RuntimeError("Event loop is closed")
            native = self._kind()
            if isinstance(self._loop, _core.Loop):
                # Take the method from the class, because CPython's tests replace the loop's own attribute with a mock.
                add_reader = partial(_core.Loop._add_reader, self._loop)
            else:
                add_reader = self._loop.add_reader
            # In an empty context: otherwise the first caller's context, with all its values, would live as long as the
            # loop.
            contextvars.Context().run(add_reader, native.fileno(), self._deliver)
            self._native = native
        return native

    def _own(self) -> Any:
        """Return the native object of this process, or None if there is none.

        In the child of a fork, first put the parent's object aside, without freeing it.
        """
        if self._forks != _forks:
            _core._keep_forever((self._native, self._waiting, self._arrived))
            self._native, self._waiting, self._arrived, self._forks = None, {}, [], _forks
        return self._native

    def _release(self) -> Any:
        """Detach the native object and return it. Return None if this process has none."""
        native, self._native = self._own(), None
        self._arrived = []
        return native

    def _future_of(
        self, ticket: int, on_end: Callable[[Any], object] | None = None, *, can_be_withdrawn: bool = True
    ) -> asyncio.Future[Any]:
        """Return a future of the answer with this ticket.

        ``on_end`` is called with the answer, even if nobody waits for it any longer, or with None if the question was
        withdrawn.
        """
        future: asyncio.Future[Any] = self._loop.create_future()
        self._waiting[ticket] = future, on_end
        if can_be_withdrawn:
            future.add_done_callback(partial(self._on_done, ticket))
        return future

    def _withdraw(self, native: Any, ticket: int) -> bool:
        """Tell native code that nobody waits for this answer any longer; return True if it will never arrive."""
        raise NotImplementedError

    def _on_done(self, ticket: int, future: asyncio.Future[Any]) -> None:
        native = self._own()
        waiting, on_end = self._waiting.get(ticket, (None, None))
        if native is not None and waiting is future and self._withdraw(native, ticket):
            del self._waiting[ticket]
            if on_end is not None:
                on_end(None)

    def _deliver(self) -> None:
        """Give the answers that have arrived to their futures.

        If an exception such as KeyboardInterrupt interrupts this method, the loop calls the method again in the next
        iteration, and the method begins with the same answer.
        """
        native = self._own()
        if native is None:
            return
        has_more = False
        try:
            native.take(self._arrived)
            while self._arrived:
                self._end(*self._arrived[0])
                del self._arrived[0]
        except MemoryError:
            has_more = True  # take() keeps what it cannot append
            raise
        finally:
            if has_more or self._arrived:
                native.wake()  # makes the loop call this method again; wake() allocates no memory

    def _end(self, ticket: int, answer: Any) -> None:
        future, on_end = self._waiting.get(ticket, (None, None))
        if future is None:
            return
        if on_end is not None:
            self._waiting[ticket] = future, None  # if this is interrupted, on_end must not be called again
            on_end(answer)
        if not future.done():
            if isinstance(answer, BaseException):
                future.set_exception(answer)
            else:
                future.set_result(answer)
        self._waiting.pop(ticket, None)
