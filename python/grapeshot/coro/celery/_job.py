"""A task that the worker has handed to the pool: its call, its time limits, and the reports to Celery about it."""

from __future__ import annotations

import asyncio
import time

from billiard.einfo import ExceptionInfo  # type: ignore[import-untyped]
from billiard.exceptions import WorkerLostError  # type: ignore[import-untyped]
from celery.exceptions import SoftTimeLimitExceeded, WorkerShutdown, WorkerTerminate  # type: ignore[import-untyped]
from celery.utils.log import get_logger  # type: ignore[import-untyped]

from grapeshot import coro
from grapeshot.coro import _hiding

from . import _tasks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_logger = get_logger("celery.pool")
# If a task catches the exception of its hard time limit or of its revocation, the exception is raised in the task again
# after this many seconds.
PATIENCE_S = 1.0

# The number of a coro -> the job that it runs. Celery calls this number the task's "pid".
running: dict[int, Job] = {}


class AsyncSoftTimeLimitExceeded(SoftTimeLimitExceeded, asyncio.CancelledError):  # type: ignore[misc]
    """Raised in the code of an ``async def`` task at its soft time limit.

    asyncio's code, such as TaskGroup, ends in an orderly way only if it is interrupted with a CancelledError.
    """


class Job:
    """One call of a task. :meth:`TaskPool.on_apply` makes and returns it."""

    def __init__(self, pool: Any, target: Callable[..., Any], args: Any, kwargs: Any, options: dict[str, Any]) -> None:
        self.pool = pool
        self._call = (target, args, kwargs)
        self._callback = options["callback"]
        self._error_callback = options.get("error_callback")
        self._accept_callback = options.get("accept_callback")
        self._timeout_callback = options.get("timeout_callback")
        self._soft_timeout = options.get("soft_timeout") or pool.options.get("soft_timeout")
        self._timeout = options.get("timeout") or pool.options.get("timeout")
        self._coro: Any = None
        # Whether the task is being called; only then can it be interrupted.
        self._has_begun = False
        # The timers of the limits, and of the repeated interruption.
        self._timers: list[Any] = []
        # The exception of the soft limit. None until it is raised in the task.
        self._soft_limit: BaseException | None = None
        # The exception that ends the task, because of its hard limit, for example. None until something ends the task.
        self._end: BaseException | None = None
        # Whether the task is ended because of its hard limit, not because it was revoked or the worker terminates.
        self._is_over_limit = False
        # Whether the coroutine of an `async def` task runs.
        self.is_async = False

    def terminate(self, signal: int | None = None) -> None:
        """Do nothing: Celery has already called :meth:`TaskPool.terminate_job`, which ends a running task."""

    # ------------------------------------------------------------------ in the pool coro

    def run(self) -> None:
        if self._is_revoked():
            return
        self._coro = coro.current()
        running[self._coro.id] = self
        _tasks.begin(self._coro.id)
        try:
            if self._accept_callback is not None:
                self.pool.acknowledge(self._accept_callback, self._coro.id, time.monotonic())
            if self._end is None:  # otherwise the task was revoked just now, or the worker terminates
                self._call_target()
        finally:
            del running[self._coro.id]

    def _is_revoked(self) -> bool:
        """Whether the task was revoked while it waited for a pool coro. If so, Celery's request has reported it."""
        request = getattr(self._accept_callback, "__self__", None)
        try:
            return request is not None and hasattr(request, "revoked") and bool(request.revoked())
        except Exception as exc:  # the result backend did not accept the report
            _logger.critical("Error in the pool: %r", exc, exc_info=True)
            return False

    def _call_target(self) -> None:
        target, args, kwargs = self._call
        try:
            try:
                self._begin_interruptions()
                result = target(*args, **kwargs)
            finally:
                self._end_interruptions()
        except (WorkerShutdown, WorkerTerminate, coro.Shutdown):
            raise
        except BaseException as exc:
            if self._end is None:
                self._report(exc)
            elif self._is_over_limit and self._timeout_callback is not None:
                self._timeout_callback(False, self._timeout)
        else:
            # Report the result even if the task has caught the exception of its hard limit, but not if the task was
            # revoked: Celery itself has already reported the revocation.
            if self._end is None or self._is_over_limit:
                self.pool.acknowledge(self._callback, result)

    def _report(self, exc: BaseException) -> None:
        """Report an exception that Celery's trace function has not handled, such as SystemExit in a task."""
        if self._error_callback is None:
            raise exc
        try:
            if isinstance(exc, Exception):
                raise exc
            raise WorkerLostError(repr(exc)) from exc
        except Exception:
            info = ExceptionInfo()
        self._error_callback(info)

    def _begin_interruptions(self) -> None:
        self._has_begun = True
        call_later = self._coro._loop.call_later
        if self._soft_timeout:
            self._timers.append(call_later(self._soft_timeout, self._reach_soft_limit))
        if self._timeout:
            self._timers.append(call_later(self._timeout, self._reach_hard_limit))

    def _end_interruptions(self) -> None:
        self._has_begun = False
        for timer in self._timers:
            timer.cancel()
        for exc in (self._soft_limit, self._end):
            if exc is not None:
                self._coro._take_back(exc)

    # ------------------------------------------------------------------ in callbacks and other coros

    def _reach_soft_limit(self) -> None:
        self.interrupt()
        if self._timeout_callback is not None:
            _hiding.spawn_hiding(self._timeout_callback, True, self._soft_timeout)  # Celery logs the limit

    def interrupt(self) -> None:
        """Raise SoftTimeLimitExceeded where the task waits."""
        if not self._has_begun:
            return
        if self._soft_limit is not None:
            self._coro._take_back(self._soft_limit)
        kind = AsyncSoftTimeLimitExceeded if self.is_async else SoftTimeLimitExceeded
        self._soft_limit = kind(self._soft_timeout)
        self._coro._throw_later(self._soft_limit)

    def _reach_hard_limit(self) -> None:
        self._is_over_limit = self._end is None
        self.end("hard time limit")

    def end(self, reason: str) -> None:
        """Raise Interrupted where the task waits, and again each second until the task has ended."""
        if self._end is not None:
            return
        self._end = coro.Interrupted(reason)
        if self._has_begun:  # otherwise the task will not begin, or it has ended and is being reported
            self._interrupt_again()

    def _interrupt_again(self) -> None:
        assert self._end is not None
        self._coro._take_back(self._end)
        self._coro._throw_later(self._end)
        self._timers.append(self._coro._loop.call_later(PATIENCE_S, self._interrupt_again))
