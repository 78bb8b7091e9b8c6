"""``await_`` and ``run_sync``: greenlets wait for awaitables, and tasks wait for greenlets."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars

import gevent  # type: ignore[import-untyped]
import gevent.exceptions  # type: ignore[import-untyped]

from ._loop import Loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Any, ParamSpec, TypeVar

    from ._watchers import Callback

    _P = ParamSpec("_P")
    _T = TypeVar("_T")


def _loop_of_hub() -> Loop:
    loop = gevent.get_hub().loop
    if not isinstance(loop, Loop):
        raise RuntimeError(
            f"gevent runs on {loop!r}: set GEVENT_LOOP=grapeshot.gevent.Loop, or start the program with"
            " python -m grapeshot.gevent"
        )
    return loop


def await_(awaitable: Awaitable[_T]) -> _T:
    """Wait in a greenlet until the awaitable is done; return its result or raise its exception.

    A coroutine runs as a task on the hub's loop. If the greenlet is interrupted while it waits (by ``kill`` or
    ``gevent.Timeout``), the task is cancelled, and the exception is raised once the task has ended.

    Raises:
        RuntimeError: gevent does not run on :class:`grapeshot.gevent.Loop`.
        gevent.exceptions.BlockingSwitchOutError: called in the hub, where tasks and callbacks run.
    """
    loop = _loop_of_hub()
    hub = gevent.get_hub()
    if gevent.getcurrent() is hub:
        if asyncio.iscoroutine(awaitable):
            awaitable.close()
        raise gevent.exceptions.BlockingSwitchOutError(
            "await_() was called in a task or callback, which runs in the hub: use await there"
        )
    future = _as_future(loop, awaitable)
    # run() of the hub's loop does not count asyncio's work, and could return during the wait. So hold a reference.
    loop.ref()
    try:
        return _wait(loop, future)
    except BaseException:
        future.cancel()
        while not future.done():
            # A second GreenletExit or Timeout does not end the wait for the task's cleanup.
            with contextlib.suppress(gevent.GreenletExit, gevent.Timeout):
                _wait_for_end(loop, future)
        raise
    finally:
        loop.unref()
        del future  # its exception's traceback refers to this frame: avoid a reference cycle


def _as_future(loop: Loop, awaitable: Awaitable[_T]) -> asyncio.Future[_T]:
    own = asyncio._get_running_loop()
    asyncio._set_running_loop(loop.asyncio_loop)
    try:
        return asyncio.ensure_future(awaitable, loop=loop.asyncio_loop)
    finally:
        asyncio._set_running_loop(own)


def _wait_for_end(loop: Loop, future: asyncio.Future[Any]) -> None:
    if future.done():
        return
    hub, current = gevent.get_hub(), gevent.getcurrent()
    wakeups: list[Callback] = []
    is_over = False

    def wake(_: object) -> None:
        if not is_over:
            wakeups.append(loop.run_callback(current.switch))

    future.add_done_callback(wake)
    try:
        while not future.done():
            hub.switch()
    finally:
        # If the greenlet was interrupted, a late wake-up would interrupt its next wait.
        is_over = True
        future.remove_done_callback(wake)
        for wakeup in wakeups:
            wakeup.stop()


def _wait(loop: Loop, future: asyncio.Future[_T]) -> _T:
    try:
        _wait_for_end(loop, future)
        return future.result()
    finally:
        del future  # break the reference cycle, as in await_()


async def run_sync(fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Call ``fn(*args, **kwargs)`` in a new greenlet; return its result or raise its exception. The task waits.

    If the task is cancelled, GreenletExit is raised in the greenlet, and the task waits until the greenlet has ended.
    The function sees the context variables of the task.

    Raises:
        RuntimeError: the task does not run in gevent's hub.
    """
    loop = asyncio.get_running_loop()
    if loop is not _loop_of_hub().asyncio_loop:
        raise RuntimeError(f"run_sync() works only in tasks of gevent's hub, not on {loop!r}")
    ended = loop.create_future()
    outcome: list[Any] = []

    def call() -> None:
        try:
            outcome[:] = [True, fn(*args, **kwargs)]
        except BaseException as exc:
            outcome[:] = [False, exc]

    def note_end(_: object) -> None:
        if not ended.done():
            ended.set_result(None)

    greenlet = gevent.Greenlet(call)
    greenlet.gr_context = contextvars.copy_context()
    greenlet.start()
    greenlet.rawlink(note_end)  # also called if the greenlet is killed before it has begun
    try:
        await asyncio.shield(ended)
    except asyncio.CancelledError:
        greenlet.kill(block=False)
        while not ended.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(ended)
        raise
    try:
        is_result, value = outcome or (False, gevent.GreenletExit())
        if is_result:
            return value  # type: ignore[no-any-return]
        raise value
    finally:
        outcome.clear()
        del greenlet, value  # an exception's traceback refers to this frame
