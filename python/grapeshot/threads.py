"""Queues and channels between the loops of several threads, and calls into another loop.

:class:`Queue` and :class:`Channel` work between tasks of any loop (grapeshot's or another package's), coros and real
threads, in any combination and in both directions. Tasks call the methods whose names begin with ``a``, and await them;
coros and threads call the others. All waiters are served in the order in which they came. A wait that is cancelled or
interrupted loses nothing: its item or place goes to the next waiter.

:func:`spawn_on` calls a function in another thread's loop, and :func:`await_on` awaits something there.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import inspect
import math
import queue
import types

from grapeshot import _core

TYPE_CHECKING = False
if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Awaitable, Callable, Generator
    from typing import Any, ParamSpec, Self, TypeVar, overload

    _P = ParamSpec("_P")
    _T = TypeVar("_T")
    _Shared = _core.shared_queue[Any] | _core.shared_channel[Any]

__all__ = ["Channel", "ClosedError", "Queue", "ShutDown", "await_on", "spawn_on"]

if hasattr(queue, "ShutDown") and not TYPE_CHECKING:
    ShutDown = queue.ShutDown
else:

    class ShutDown(Exception):  # noqa: N818  # queue's name
        """The queue was shut down. From Python 3.13 on, this is ``queue.ShutDown``."""


class ClosedError(OSError):
    """A channel or file is closed, or a descriptor was closed while a coro waited on it. The errno is ``EBADF``."""

    def __init__(self, message: str = "it was closed") -> None:
        super().__init__(errno.EBADF, message)

    def __str__(self) -> str:
        return str(self.strerror)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.strerror,)


# The kinds of waiters, as arguments of `_enter` and `_leave`.
_GETTER, _PUTTER, _JOINER = range(3)
# The interval, in seconds, at which a cancelled `await_on` checks that the other loop still runs.
_LOOK_S = 0.1
# The interval, in seconds, at which a call that was not cancelled checks that the other loop is not closed.
_LOOK_FOR_CLOSED_S = 5.0


class _ABSENT:
    """Stands for a missing item. The class itself is used: threads would contend for an instance's reference count."""


def _set_done(future: asyncio.Future[Any]) -> None:
    """Wake a task of another package's loop. Called in the thread of that loop."""
    if not future.done():
        future.set_result(None)


@types.coroutine
def _yield(waiter: Any) -> Generator[Any, Any, None]:
    yield waiter


async def _wait(shared: _Shared, side: int) -> None:
    """Wait in a task until it is the task's turn."""
    future = shared._enter(side, asyncio.get_running_loop())
    if future is None:
        return
    try:
        if isinstance(future, asyncio.Future):
            await future
        else:
            await _yield(future)  # a native waiter of grapeshot's loop
    except BaseException:
        shared._leave(side, future)
        raise


class Queue(_core.shared_queue["_T"]):
    """A ``queue.Queue`` for coros and real threads, with additional methods for tasks of any loop.

    Coros and threads call ``put``, ``get`` and ``join``; tasks await :meth:`aput`, :meth:`aget` and :meth:`ajoin`.
    ``put`` and ``get`` take the arguments ``block`` and ``timeout`` (in seconds), as those of ``queue.Queue`` do.

    ``maxsize`` is the number of items that fit; with 0 or less there is no limit.
    """

    def __init__(self, maxsize: int = 0) -> None:
        self.maxsize = maxsize

    @property
    def maxsize(self) -> int:
        """How many items fit; 0 or less if there is no limit. It can be changed."""
        return self._maxsize

    @maxsize.setter
    def maxsize(self, value: int) -> None:
        self._limit(0 if value <= 0 or value == math.inf else math.ceil(value))
        self._maxsize = value

    def __repr__(self) -> str:
        state = " shut down" if self.is_shutdown else ""
        return f"<{type(self).__name__} maxsize={self.maxsize} items={self.qsize()}{state}>"

    async def aget(self) -> _T:
        """Remove the oldest item and return it. Wait for an item if the queue is empty.

        Raises:
            ShutDown: the queue was shut down, and has no items left.
        """
        item = self._try_get(_ABSENT)
        while item is _ABSENT:
            await _wait(self, _GETTER)
            item = self._get_promised(_ABSENT)
        return item  # type: ignore[no-any-return]

    async def aput(self, item: _T) -> None:
        """Put an item into the queue. Wait for a place if the queue is full.

        Raises:
            ShutDown: the queue was shut down.
        """
        if not self._try_put(item):
            await _wait(self, _PUTTER)
            self._put_reserved(item)

    async def ajoin(self) -> None:
        """Wait until ``task_done`` was called for each item that was put."""
        while not self._is_finished():
            await _wait(self, _JOINER)


class Channel(_core.shared_channel["_T"]):
    """A queue that can be closed and iterated over, for tasks of any loop, coros and real threads.

    Coros and threads call ``send`` and ``receive`` and use ``for item in channel``; tasks await :meth:`asend` and
    :meth:`areceive` and use ``async for item in channel``. A loop over a channel ends when the channel is closed and
    all items were received. ``send`` and ``receive`` take the arguments ``block`` and ``timeout`` (in seconds).

    ``capacity`` is the number of items that fit, 1 or more; ``math.inf`` means no limit. (``channel.capacity`` is 0
    then.)

    A ``with`` block closes the channel at its end.
    """

    def __init__(self, capacity: float) -> None:
        if capacity == math.inf:
            self._limit(0)
        elif not isinstance(capacity, int):
            raise TypeError(f"the capacity of a channel must be an integer or math.inf, not {capacity!r}")
        elif capacity < 1:
            raise ValueError(f"the capacity of a channel must be 1 or more, got {capacity}")
        else:
            self._limit(capacity)

    def __repr__(self) -> str:
        state = " closed" if self.is_closed else ""
        return f"<{type(self).__name__} capacity={self.capacity or math.inf} items={self.qsize()}{state}>"

    async def areceive(self) -> _T:
        """Remove the oldest item and return it. Wait for an item if the channel is empty.

        Raises:
            ClosedError: the channel is closed, and has no items left.
        """
        item = self._try_get(_ABSENT)
        while item is _ABSENT:
            await _wait(self, _GETTER)
            item = self._get_promised(_ABSENT)
        return item  # type: ignore[no-any-return]

    async def asend(self, item: _T) -> None:
        """Send an item. Wait for a place if the channel is full.

        Raises:
            ClosedError: the channel is closed.
        """
        if not self._try_put(item):
            await _wait(self, _PUTTER)
            self._put_reserved(item)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> _T:
        try:
            return self.receive()
        except ClosedError:
            raise StopIteration from None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> _T:
        try:
            return await self.areceive()
        except ClosedError:
            raise StopAsyncIteration from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---------------------------------------------------------------- calls into another loop

if TYPE_CHECKING:

    @overload
    def spawn_on(
        loop: asyncio.AbstractEventLoop, fn: Callable[_P, Awaitable[_T]], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> concurrent.futures.Future[_T]: ...
    @overload
    def spawn_on(
        loop: asyncio.AbstractEventLoop, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> concurrent.futures.Future[_T]: ...


def spawn_on(
    loop: asyncio.AbstractEventLoop, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> concurrent.futures.Future[Any]:
    """Call ``fn(*args, **kwargs)`` in the thread of a loop, from any thread. Return a future of the result.

    An async function runs in a task of that loop, a plain function in a coro. ``cancel()`` cancels the task or coro. A
    thread waits for the future with ``result()``, a task with ``await asyncio.wrap_future(future)``, and a coro with
    ``coro.await_(asyncio.wrap_future(future))``.

    Raises:
        RuntimeError: the loop is closed.
        ImportError: ``fn`` is a plain function, and this interpreter has no coros.
    """
    if not (inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))):  # noqa: B004
        from grapeshot import coro

        fn = functools.partial(coro.run_sync, fn)
    call = _call(fn, args, kwargs)
    try:
        return asyncio.run_coroutine_threadsafe(call, loop)
    except BaseException:
        call.close()
        raise


async def _call(fn: Callable[..., Awaitable[_T]], args: Any, kwargs: Any) -> _T:
    return await fn(*args, **kwargs)


async def await_on(loop: asyncio.AbstractEventLoop, awaitable: Awaitable[_T]) -> _T:
    """Await something in the thread of another loop, and return its result.

    A cancellation is passed on to that loop. This call then waits until the awaitable has ended there, and returns or
    raises what the awaitable did, just as when a task awaits another task. If the other loop is stopped before the
    awaitable has ended, this call waits until that loop runs again or this call is cancelled.

    Raises:
        RuntimeError: the loop is closed, or was closed before the awaitable had ended. (If the loop is closed during
            the call, this is noticed after some seconds.)
        Exception: whatever the awaitable raises.
    """
    here = asyncio.get_running_loop()
    if loop is here:
        return await awaitable
    return await _Call(here, loop, awaitable).run()  # type: ignore[no-any-return]


class _Call:
    """One call of ``await_on``. Methods run in the thread of the caller's loop (here) or of the other loop (there)."""

    def __init__(
        self, here: asyncio.AbstractEventLoop, there: asyncio.AbstractEventLoop, awaitable: Awaitable[Any]
    ) -> None:
        self._here = here
        self._there = there
        self._awaitable = awaitable
        self._ended = here.create_future()
        self._task: Any = None
        self._error: BaseException | None = None
        # Whether the task there was cancelled before it had ended.
        self._is_passed_on = False

    async def run(self) -> Any:
        """Start the call and wait for its end. (here)"""
        try:
            self._there.call_soon_threadsafe(self._start)
        except RuntimeError:
            if inspect.iscoroutine(self._awaitable):
                self._awaitable.close()
            raise
        cancellation: BaseException | None = None
        while not self._ended.done():
            if cancellation is not None and not self._there.is_running():
                if self._has_ended():
                    break
                raise cancellation
            try:
                await asyncio.wait([self._ended], timeout=_LOOK_FOR_CLOSED_S if cancellation is None else _LOOK_S)
                if cancellation is None and self._is_lost():
                    raise RuntimeError(f"{self._there!r} was closed before the awaitable had ended")
            except asyncio.CancelledError as exc:
                cancellation = exc
                with contextlib.suppress(RuntimeError):  # the other loop is closed
                    self._there.call_soon_threadsafe(self._cancel, *exc.args[:1])
        if cancellation is not None and not self._is_passed_on:
            raise cancellation
        if self._error is not None:
            raise self._error
        return self._task.result()

    def _has_ended(self) -> bool:
        """Whether the awaitable has ended, even if its loop was stopped and did not call ``_report``. (here)"""
        return self._error is not None or (self._task is not None and self._task.done())

    def _is_lost(self) -> bool:
        """Whether the awaitable can never end, because its loop is closed. (here)"""
        is_closed = self._there.is_closed()
        if self._has_ended():
            self._end()
        if not is_closed or self._ended.done():
            return False
        if self._task is None and inspect.iscoroutine(self._awaitable):
            self._awaitable.close()
        return True

    def _start(self) -> None:
        """Start a task. (there)"""
        try:
            self._task = asyncio.ensure_future(self._awaitable)
        except Exception as exc:
            self._error = exc
            self._report(None)
        else:
            self._task.add_done_callback(self._report)

    def _cancel(self, *message: Any) -> None:
        """Cancel the task. (there)"""
        if self._task is not None and self._task.cancel(*message):
            self._is_passed_on = True

    def _report(self, _: object) -> None:
        """Tell the caller that the call has ended. (there)"""
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed
            self._here.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        """Wake the caller. (here)"""
        if not self._ended.done():
            self._ended.set_result(None)
