"""Prepares tasks for coros: each call gets a request of its own, and the pool waits for the result of an async task.

Celery keeps the current task and its request in stacks, one per thread. It tells threads apart by their greenlet, if
greenlet is installed, but all coros of a thread run in the same greenlet. So here a context variable tells coros apart.
The asyncio tasks that an ``async def`` task starts inherit the variable, so that ``self.request`` and ``self.retry()``
work there, too.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import sys
import weakref

from celery import _state  # type: ignore[import-untyped]
from celery.exceptions import SoftTimeLimitExceeded  # type: ignore[import-untyped]
from celery.utils import threads  # type: ignore[import-untyped]

from grapeshot import coro

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# The number of the coro that runs the task, 0 outside of tasks.
_ident: contextvars.ContextVar[int] = contextvars.ContextVar("_ident", default=0)
_prepared: weakref.WeakSet[Any] = weakref.WeakSet()
# The patched function, which returns the id of the running coro.
_thread_ident: Callable[[], int] = sys.modules["threading"].get_ident


def _get_ident() -> int:
    return _ident.get() or _thread_ident()


def begin(number: int) -> None:
    """Record that the running coro, which has this number, runs a task."""
    _ident.set(number)


def prepare(app: Any) -> None:
    """Prepare Celery, and all tasks of the application."""
    threads.get_ident = _get_ident
    _use_idents(_state._task_stack)
    for task in list(app.tasks.values()) if app is not None else ():
        prepare_task(task)


def _use_idents(stack: Any) -> None:
    # With USE_FAST_LOCALS, the stack is a threading.local and does not have this attribute. patch() has replaced that
    # class, so each coro has a stack of its own anyway.
    if hasattr(stack, "__ident_func__"):
        stack.__ident_func__ = _get_ident


def prepare_task(task: Any) -> None:
    """Prepare a task. If it is an ``async def`` task, make the coro that calls it wait for its result.

    Code that calls the task directly gets a coroutine, as with Celery's other pools.
    """
    if task in _prepared:
        return
    _prepared.add(task)
    _use_idents(task.request_stack)
    name = "_orig_run" if hasattr(task, "_orig_run") else "run"  # with autoretry_for, `run` calls `_orig_run`
    run = getattr(task, name)
    if inspect.iscoroutinefunction(inspect.unwrap(run)):
        setattr(task, name, _waiting(task, run))


def _waiting(task: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    from ._job import AsyncSoftTimeLimitExceeded, running

    @functools.wraps(run)
    def run_in_coro(*args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        request, job = task.request, running.get(_ident.get())
        # The task itself may call its function again, with the same request. Such a call returns the awaitable.
        if job is None or request.called_directly or hasattr(request, "_is_awaited") or not inspect.isawaitable(result):
            return result
        request._is_awaited = True
        current, was_async = coro.current(), job.is_async
        job.is_async = True
        try:
            return coro.await_(result)
        except AsyncSoftTimeLimitExceeded as exc:
            raise SoftTimeLimitExceeded(*exc.args).with_traceback(exc.__traceback__) from None
        except asyncio.CancelledError as exc:
            if isinstance(exc, coro.Interrupted):
                raise
            # The task has cancelled itself. Celery reports only exceptions that `except Exception` catches.
            raise coro.CoroCancelled(*exc.args) from exc
        finally:
            job.is_async = was_async
            # Drop a cancellation that the task has requested and that is still pending: the coro will run other tasks.
            current._cancel_count = 0
            current._throw_later(None)

    return run_in_coro
