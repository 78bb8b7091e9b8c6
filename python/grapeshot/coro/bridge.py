"""Across the border: asyncio awaitables in coros, blocking-style functions in asyncio, real threads.

The only module of the coro mode that knows asyncio's tasks and futures. A coroutine that a coro awaits runs on the
coro's own stack, and the coro is the task that it sees: ``asyncio.timeout``, TaskGroup and cancellation work on it.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import warnings
from collections.abc import Awaitable, Callable

from grapeshot import _core, _run
from grapeshot._loop import Loop

from ._coroutine import Coro, Wakeup

TYPE_CHECKING = False  # typing is not imported at run time: from Python 3.14 on asyncio does without it
if TYPE_CHECKING:
    from typing import Any

# Turns that suspended coros get to end in when their loop is closed.
_UNWINDING_TURNS = 1000


def await_(awaitable: Awaitable[Any]) -> Any:
    """Run an asyncio awaitable to its end while this coro waits; return its result or raise its exception.

    Raises:
        YieldFromMain: not in a coro.
        TypeError: ``awaitable`` is none.
    """
    coro = _core._coro_current()
    if asyncio.isfuture(awaitable):
        if not awaitable.done():
            _wait_for_future(coro, awaitable)
        return awaitable.result()
    if inspect.iscoroutine(awaitable) or not hasattr(type(awaitable), "__await__"):
        if not asyncio.iscoroutine(awaitable):
            raise TypeError(f"an awaitable is required, not {awaitable!r}")
        steps: Any = awaitable
    else:
        steps = type(awaitable).__await__(awaitable)
    return _drive(coro, steps)


def _drive(coro: Coro, steps: Any) -> Any:
    """Run a coroutine, or the iterator of an awaitable, on this coro's stack."""
    raised: BaseException | None = None
    while True:
        try:
            if raised is None:
                awaited = steps.send(None) if hasattr(steps, "send") else next(steps)
            else:
                error, raised = raised, None
                awaited = steps.throw(error)
        except StopIteration as stop:
            return stop.value
        try:
            if awaited is None:
                _core._coro_yield_slice()
            elif getattr(awaited, "_asyncio_future_blocking", None):
                awaited._asyncio_future_blocking = False
                _wait_for_future(coro, awaited)
            else:
                raised = RuntimeError(f"Task got bad yield: {awaited!r}")
        except BaseException as error:
            raised = error


def _wait_for_future(coro: Coro, future: Any) -> None:
    """Wait until ``future`` is done. Cancelled meanwhile, it is cancelled, and the wait goes on until it is."""
    if future is coro:
        raise RuntimeError(f"Task cannot await on itself: {coro!r}")
    wakeup = Wakeup(coro)
    future.add_done_callback(wakeup)
    coro._awaited = future
    try:
        _core._coro_wait()
    except BaseException:
        wakeup.is_over = True
        future.remove_done_callback(wakeup)
        raise
    finally:
        coro._awaited = None


async def run_sync(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run blocking-style code in a coro while the calling task waits; return its result.

    The function may itself wait with everything in :mod:`grapeshot.coro`, ``await_`` included. Cancelling the task
    cancels the coro.
    """
    return await _core._coro_spawn(fn, *args, **kwargs)


def run(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make a loop, run ``fn`` as its first coro, close the loop; return the function's result or raise its exception.

    Coros that are left then are shut down, as asyncio's runner cancels the tasks that are left.
    """
    return _run.run(run_sync(fn, *args, **kwargs))


def run_in_thread(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``fn`` in a real thread, of the loop's default executor, while this coro waits. Source: asyncio.to_thread."""
    coro = _core._coro_current()
    call = functools.partial(contextvars.copy_context().run, fn, *args, **kwargs)
    return await_(coro._loop.run_in_executor(None, call))


def unwind(loop: Loop) -> None:
    """Shut down the coros of a loop that is about to be closed, and let them end: their ``finally`` blocks run.

    Those that do not end within a number of turns are given up, with a RuntimeWarning.
    """
    for _ in range(_UNWINDING_TURNS):
        left = [co for co in _core._coro_live() if co._loop is loop]
        if not left:
            return
        for co in left:
            if co._status in ("waiting", "ready"):
                co.shutdown()
        loop.call_soon(loop.stop)
        loop.run_forever()
    left = [co for co in _core._coro_live() if co._loop is loop]
    if left:
        warnings.warn(f"coros did not end when their loop was closed: {left}", RuntimeWarning, stacklevel=3)
