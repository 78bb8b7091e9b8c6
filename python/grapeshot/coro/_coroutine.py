"""``Coro``: a function with a stack of its own, and, for asyncio, a task.

The stack, the switch and the waiting are native (``grapeshot._core``). What is here runs once per coro or per
interruption: the interface of :class:`asyncio.Task`, under which asyncio sees a coro as the running task, and
Shrapnel's ways to interrupt one.

Interruptions are delivered where the coro waits. One that comes while it is ready replaces what it was woken with: the
primitives in :mod:`grapeshot.coro` then give back what they had granted.
"""

from __future__ import annotations

import asyncio
import contextvars

from grapeshot import _core

from . import _errors

TYPE_CHECKING = False  # typing is not imported at run time: from Python 3.14 on asyncio does without it
if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import FrameType
    from typing import Any


class Coro(_core.Coro):
    """Made by :func:`grapeshot.coro.spawn` and :func:`grapeshot.coro.new`. It belongs to the thread of its loop.

    ``await co`` (in asyncio) and :meth:`join` (in a coro) give its result or raise its exception.
    """

    _asyncio_future_blocking = False
    # cancel() calls that uncancel() has not taken back
    _cancel_count = 0
    # the future that await_() waits for
    _awaited: Any = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} {self._status}>"

    # ------------------------------------------------------------------ interruption

    def raise_exception(self, exc: BaseException | type[BaseException]) -> None:
        """Raise ``exc`` where the coro waits; at once if it is the running one.

        Raises:
            DeadCoroutine, NotStartedError: it has ended, or was not started.
            ScheduleError: it belongs to another thread.
        """
        self._throw(exc() if isinstance(exc, type) else exc)

    def interrupt(self, value: Any = None) -> None:
        """Raise ``Interrupted(value)`` where the coro waits. Raises: as :meth:`raise_exception`."""
        self._throw(_errors.Interrupted(value))

    def shutdown(self) -> None:
        """Raise ``Shutdown`` where the coro waits, so that it ends. Raises: as :meth:`raise_exception`."""
        self._throw(_errors.Shutdown())

    # ------------------------------------------------------------------ the outcome

    def join(self, timeout: float | None = None) -> Any:
        """Wait in a coro until this one has ended; return its result or raise its exception.

        Raises:
            TimeoutError: it has not ended after ``timeout`` seconds.
            RuntimeError: a coro joins itself.
            YieldFromMain: not called in a coro.
        """
        if not self.done():
            waiter = _core._coro_current()
            if waiter is self:
                raise RuntimeError("a coro cannot wait for itself")
            wait_for_end(self, waiter, timeout)
        return self._outcome()

    def result(self) -> Any:
        """Return the result, or raise the exception. ``asyncio.InvalidStateError`` before the end."""
        if not self.done():
            raise asyncio.InvalidStateError("Result is not set.")
        return self._outcome()

    def exception(self) -> BaseException | None:
        """Return the exception, or None. ``asyncio.InvalidStateError`` before the end; CancelledError if cancelled."""
        if not self.done():
            raise asyncio.InvalidStateError("Exception is not set.")
        exc = self._failure()
        if isinstance(exc, asyncio.CancelledError):
            raise exc
        return exc

    def add_done_callback(self, fn: Callable[[Any], object], *, context: contextvars.Context | None = None) -> None:
        """Call ``fn(self)`` from the loop once the coro has ended, as :meth:`asyncio.Future.add_done_callback`."""
        context = contextvars.copy_context() if context is None else context
        if self.done():
            self._loop.call_soon(fn, self, context=context)
        else:
            self._on_done(fn, context)

    def __await__(self) -> Generator[Any, None, Any]:
        if not self.done():
            if _core._coro_current_or_none() is self:
                raise RuntimeError(f"Task cannot await on itself: {self!r}")
            self._asyncio_future_blocking = True
            yield self
        if not self.done():
            raise RuntimeError("await wasn't used with future")
        return self._outcome()

    __iter__ = __await__

    # ------------------------------------------------------------------ asyncio.Task's interface

    def cancel(self, msg: Any = None) -> bool:
        """Raise :class:`asyncio.CancelledError` where the coro waits, as :meth:`asyncio.Task.cancel` does for a task.

        A future that it waits for with ``await_`` is cancelled instead, and its error is raised there. Several calls
        before the coro runs raise one error, that of the first.
        """
        if self.done():
            return False
        self._check_thread()
        self._cancel_count += 1
        awaited = self._awaited
        if awaited is not None and (awaited.cancel(msg=msg) or awaited.cancelled()):
            return True
        self._throw_later(asyncio.CancelledError() if msg is None else asyncio.CancelledError(msg))
        return True

    def cancelling(self) -> int:
        """Return the number of :meth:`cancel` calls that :meth:`uncancel` has not taken back."""
        return self._cancel_count

    def uncancel(self) -> int:
        """Take one :meth:`cancel` back; return the number that is left."""
        count = self.cancelling()
        if count:
            count = self._cancel_count = count - 1
            if not count and self is _core._coro_current_or_none():
                self._throw_later(None)
        return count

    def cancelled(self) -> bool:
        """Whether the coro has ended with :class:`asyncio.CancelledError`."""
        return self.done() and isinstance(self._failure(), asyncio.CancelledError)

    def get_name(self) -> str:
        """Return the name, as :meth:`asyncio.Task.get_name`."""
        return self.name

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop that runs the coro."""
        loop: asyncio.AbstractEventLoop = self._loop
        return loop

    def get_context(self) -> contextvars.Context | None:
        """Return the context that the coro runs in, None once it has ended."""
        return self._context

    def get_coro(self) -> None:
        """Return None: there is no coroutine object behind a coro."""
        return

    def get_stack(self, *, limit: int | None = None) -> list[FrameType]:
        """Return the frames where the coro is suspended, the outermost first; the ``limit`` innermost of them."""
        frames: list[FrameType] = []
        frame = self.get_frame()
        while frame is not None and (limit is None or len(frames) < limit):
            frames.append(frame)
            frame = frame.f_back
        frames.reverse()
        return frames

    def remove_done_callback(self, fn: Callable[[Any], object]) -> int:
        """Take callbacks back; return how many there were."""
        return self._forget_done(fn)

    def __del__(self) -> None:
        exc = self._failure_unseen()
        if exc is None or isinstance(exc, asyncio.CancelledError) or self._loop is None or self._loop.is_closed():
            return
        message = f"{type(self).__name__} exception was never retrieved"
        self._loop.call_exception_handler({"message": message, "exception": exc, "coro": self})


class Wakeup:
    """Something that wakes a coro at most once, and only out of the wait that it was made for."""

    __slots__ = ("_coro", "is_over")

    def __init__(self, coro: Coro) -> None:
        self._coro = coro
        self.is_over = False

    def __call__(self, *_: object) -> None:
        if not self.is_over:
            self.is_over = True
            if self._coro._status == "waiting":
                self._coro._wake()


def wait_for_end(coro: Coro, waiter: Coro, timeout_s: float | None) -> None:
    """Wait in ``waiter`` until ``coro`` has ended. TimeoutError after ``timeout_s``."""
    wakeup = Wakeup(waiter)
    coro._on_done(wakeup, contextvars.copy_context())
    timer = None if timeout_s is None else coro._loop.call_later(timeout_s, wakeup)
    try:
        _core._coro_wait()
    finally:
        wakeup.is_over = True
        if timer is not None:
            timer.cancel()
    if not coro.done():
        raise _errors.TimeoutError
