"""A pool for Celery's worker whose tasks run in coros: ``CELERY_CUSTOM_WORKER_POOL=grapeshot.coro.celery:TaskPool``.

::

    $ CELERY_CUSTOM_WORKER_POOL=grapeshot.coro.celery:TaskPool celery -A tasks worker -P custom -c 200

Importing this module calls ``coro.patch()``. The worker itself is a coro, too: it waits for the broker like any other
blocking-style code. The coros that call the tasks (here: workers) live on from one task to the next, like threads of a
thread pool, so that connections in thread-locals are used again.

::

    the worker's main coro --- apply_async() ---> jobs ---> workers: Celery's trace function, and in it the task
                                                              ^
    soft and hard time limits (timers), revoke ---------------'  an exception is raised where the task waits
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import inspect
import itertools
import math
import signal as signals
import sys
import time

from grapeshot import _core, coro
from grapeshot.coro import _hiding
from grapeshot.coro._patching import _thread

# Before the imports below: their modules take functions out of patched modules.
coro.patch()
# Modules of grapeshot that import threading get the original.
_Thread: type[threading.Thread] = sys.modules["threading"].Thread

try:
    from billiard.einfo import ExceptionInfo  # type: ignore[import-untyped]
    from billiard.exceptions import WorkerLostError  # type: ignore[import-untyped]
    from celery import concurrency  # type: ignore[import-untyped]
    from celery.concurrency.base import BasePool  # type: ignore[import-untyped]
    from celery.exceptions import (  # type: ignore[import-untyped]
        SoftTimeLimitExceeded,
        WorkerShutdown,
        WorkerTerminate,
    )
    from celery.signals import worker_init  # type: ignore[import-untyped]
    from celery.utils.log import get_logger  # type: ignore[import-untyped]
except ImportError as error:
    raise ImportError("grapeshot.coro.celery needs Celery: pip install 'grapeshot[celery]'", name=error.name) from error

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from collections.abc import Callable
    from typing import Any

__all__ = ["TaskPool"]

_logger = get_logger("celery.pool")
# A task that catches the exception of its hard time limit, or of its revocation, gets it again after this many seconds.
_PATIENCE_S = 1.0
_current_or_none = _core._coro_current_or_none

# The number of a coro -> the job that it runs. Celery calls this number the task's "pid".
_running: dict[int, _Job] = {}


class _AsyncSoftTimeLimitExceeded(SoftTimeLimitExceeded, asyncio.CancelledError):  # type: ignore[misc]
    """What the code of an ``async def`` task gets at its soft time limit.

    asyncio's code, such as TaskGroup, ends in an orderly way only if it is interrupted with a CancelledError.
    """


class _Job:
    """A task that the worker has handed to the pool."""

    def __init__(
        self,
        target: Callable[..., Any],
        args: Any,
        kwargs: Any,
        callback: Callable[..., Any],
        error_callback: Callable[..., Any] | None,
        accept_callback: Callable[..., Any] | None,
        soft_timeout: float | None,
        timeout: float | None,
        timeout_callback: Callable[..., Any] | None,
    ) -> None:
        self._call = (target, args or (), kwargs or {})
        self._callback, self._error_callback = callback, error_callback
        self._accept_callback, self._timeout_callback = accept_callback, timeout_callback
        self._soft_timeout, self._timeout = soft_timeout, timeout
        self._coro: Any = None
        # Whether the task is being called, so that it can be interrupted.
        self._has_begun = False
        # The timers of the limits, and of the repeated interruption.
        self._timers: list[Any] = []
        # The exceptions that were raised in the coro because of the soft limit, and in order to end the task.
        self._soft_limit: BaseException | None = None
        self._end: BaseException | None = None
        # Whether the task was ended by its hard limit. Otherwise it was revoked.
        self._is_over_limit = False
        # The coroutine of an `async def` task runs.
        self.is_async = False

    def terminate(self, signal: int | None = None) -> None:
        """Celery calls this after :meth:`TaskPool.terminate_job`, which has ended the task if it was running."""

    # ------------------------------------------------------------------ in the worker

    def run(self, report: Callable[..., None]) -> None:
        """Call the task. ``report(callback, *args)`` calls one of Celery's callbacks."""
        if self._is_revoked():
            return
        self._coro = coro.current()
        _running[self._coro.id] = self
        try:
            if self._accept_callback is not None:
                report(self._accept_callback, self._coro.id, time.monotonic())
            if self._end is None:  # else the task was revoked just now
                self._call_target(report)
        finally:
            del _running[self._coro.id]

    def _is_revoked(self) -> bool:
        """Whether the task was revoked while it waited for a worker. If so, Celery's request has reported it."""
        request = getattr(self._accept_callback, "__self__", None)
        revoked = getattr(request, "revoked", None)
        return revoked is not None and bool(revoked())

    def _call_target(self, report: Callable[..., None]) -> None:
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
                self._report(report, exc)
            elif self._is_over_limit and self._timeout_callback is not None:
                report(self._timeout_callback, False, self._timeout)
        else:
            # A task that has caught the exception of its hard limit ends in its own way. A revoked task was reported.
            if self._end is None or self._is_over_limit:
                report(self._callback, result)

    def _report(self, report: Callable[..., None], exc: BaseException) -> None:
        """Report an exception that Celery's trace function has not handled. SystemExit in a task is one."""
        if self._error_callback is None:
            raise exc
        try:
            if isinstance(exc, Exception):
                raise exc
            raise WorkerLostError(repr(exc)) from exc
        except Exception:
            info = ExceptionInfo()
        report(self._error_callback, info)

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
            _hiding.spawn_hiding(self._timeout_callback, True, self._soft_timeout)  # logs this

    def interrupt(self) -> None:
        """Raise SoftTimeLimitExceeded where the task waits."""
        if not self._has_begun:
            return
        kind = _AsyncSoftTimeLimitExceeded if self.is_async else SoftTimeLimitExceeded
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
        if self._has_begun:  # else it does not begin, or it has ended and is being reported
            self._interrupt_again()

    def _interrupt_again(self) -> None:
        assert self._end is not None
        self._coro._take_back(self._end)
        self._coro._throw_later(self._end)
        self._timers.append(self._coro._loop.call_later(_PATIENCE_S, self._interrupt_again))


class TaskPool(BasePool):  # type: ignore[misc]
    """Calls tasks in coros. The worker's ``concurrency`` is the number of tasks that run at the same time.

    Blocking tasks let other coros run while they wait in patched calls. ``async def`` tasks run on the same loop. A
    task that computes for a long time delays all others, and the worker itself.

    ``max-tasks-per-child`` replaces a coro after this many tasks, which frees its thread-locals.
    ``max-memory-per-child`` has no effect. docs/celery.md describes time limits and ``revoke``.
    """

    signal_safe = False
    # With True, the worker would look at its connection for events for 0.1 seconds after each message from RabbitMQ
    # (Celery 5.7), and so get ten tasks a second. False leaves out AMQP's heartbeats, but py-amqp sets TCP's keepalive.
    is_green = False
    task_join_will_block = False
    body_can_be_buffer = True

    def on_start(self) -> None:
        self._main = coro.current()
        self._jobs: collections.deque[_Job] = collections.deque()
        self._has_jobs, self._has_ended = coro.condition_variable(), coro.condition_variable()
        # The number of workers, and of those that are calling a task.
        self._count = self._busy = 0
        self._reporting = coro.lock()
        self._numbers = itertools.count(1)
        for task in list(self.app.tasks.values()) if self.app is not None else ():
            _await_in_coro(task)

    # ------------------------------------------------------------------ tasks

    def on_apply(
        self,
        target: Callable[..., Any],
        args: Any = None,
        kwargs: Any = None,
        callback: Any = None,
        error_callback: Any = None,
        accept_callback: Any = None,
        soft_timeout: float | None = None,
        timeout: float | None = None,
        timeout_callback: Any = None,
        **_: Any,
    ) -> _Job:
        soft_timeout = soft_timeout or self.options.get("soft_timeout")
        timeout = timeout or self.options.get("timeout")
        job = _Job(
            target, args, kwargs, callback, error_callback, accept_callback, soft_timeout, timeout, timeout_callback
        )
        self._jobs.append(job)
        if not self._has_jobs.wake_one():
            self._start_worker()
        return job

    def _start_worker(self) -> None:
        if self._count < self.limit:
            self._count += 1
            self.spawn_n(self._work, name=f"celery-{next(self._numbers)}")

    def spawn_n(self, fn: Callable[..., Any], *args: Any, name: str | None = None) -> threading.Thread:
        """Call a function in a coro of its own, outside of the pool's limit. Celery's worker uses this, too."""
        thread = _Thread(target=fn, args=args, name=name, daemon=True)
        thread.start()
        return thread

    def _work(self) -> None:
        left = self.options.get("maxtasksperchild") or math.inf
        try:
            while left > 0 and self._count <= self.limit:
                if self._jobs:
                    left -= 1
                    self._run(self._jobs.popleft())
                else:
                    self._has_jobs.wait()
        finally:
            self._count -= 1
            if self._jobs:
                self._start_worker()

    def _run(self, job: _Job) -> None:
        self._busy += 1
        try:
            job.run(self._report)
        except SystemExit as exc:
            # WorkerShutdown or WorkerTerminate: the task asks the worker to end.
            self._main.raise_exception(exc)
        except Exception as exc:
            _logger.critical("Error in the pool: %r", exc, exc_info=True)
        finally:
            self._busy -= 1
            if not self._busy:
                self._has_ended.wake_all()

    def _report(self, callback: Callable[..., Any], *args: Any) -> None:
        """Call one of Celery's callbacks. They use the connection to the broker, so only one coro at a time may."""
        with self._reporting:
            callback(*args)

    def terminate_job(self, pid: int, signal: int | None = None) -> None:
        """End the task that runs in the coro with this number. SIGUSR1 acts like the task's soft time limit."""
        job = _running.get(pid)
        if job is None:
            return
        if signal == signals.SIGUSR1:
            job.interrupt()
        else:
            job.end("revoked")

    # ------------------------------------------------------------------ size

    def grow(self, n: int = 1) -> None:
        self.limit += n
        for _ in range(min(n, len(self._jobs))):
            self._start_worker()

    def shrink(self, n: int = 1) -> None:
        """Let ``n`` workers end. Those that are calling a task end after it.

        Raises:
            ValueError: there are fewer than ``n``.
        """
        if n > self.limit:
            raise ValueError(f"Can't shrink pool by {n}: its size is {self.limit}")
        self.limit -= n
        self._has_jobs.wake_all()

    def _get_info(self) -> dict[str, Any]:
        info: dict[str, Any] = super()._get_info()
        info["coros"] = self._count
        info["max-tasks-per-child"] = self.options.get("maxtasksperchild") or "N/A"
        info["timeouts"] = (self.options.get("soft_timeout") or 0, self.options.get("timeout") or 0)
        return info

    # ------------------------------------------------------------------ the end

    def on_stop(self) -> None:
        """Wait for the tasks that have begun. The others are not acknowledged, so the broker delivers them again."""
        self._jobs.clear()
        while self._busy and _core._coro_can_wait():
            self._has_ended.wait()

    def on_terminate(self) -> None:
        """End the tasks that have begun, and give them a second to clean up."""
        self._jobs.clear()
        for job in list(_running.values()):
            job.end("the worker terminates")
        if self._busy and _core._coro_can_wait():
            with contextlib.suppress(coro.TimeoutError):
                self._has_ended.wait(_PATIENCE_S)


# ---------------------------------------------------------------- async def tasks


def _await_in_coro(task: Any) -> None:
    """If this is an ``async def`` task, let the worker wait for its result. Its callers get a coroutine, as before."""
    name = "_orig_run" if hasattr(task, "_orig_run") else "run"  # with autoretry_for, `run` calls `_orig_run`
    run = getattr(task, name)
    if not inspect.iscoroutinefunction(inspect.unwrap(run)):
        return

    @functools.wraps(run)
    def run_in_coro(*args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        job = None if task.request.called_directly else _running.get(coro.current().id)
        if job is None or not inspect.isawaitable(result):
            return result
        job.is_async = True
        try:
            return coro.await_(result)
        except _AsyncSoftTimeLimitExceeded as exc:
            raise SoftTimeLimitExceeded(*exc.args).with_traceback(exc.__traceback__) from None
        finally:
            job.is_async = False

    setattr(task, name, run_in_coro)


# ---------------------------------------------------------------- the worker


@worker_init.connect  # type: ignore[untyped-decorator]
def _prepare(sender: Any, **_: Any) -> None:
    """Let a worker that uses this pool run in a coro, with blocking calls. Otherwise it would use kombu's own loop."""
    if issubclass(concurrency.get_implementation(sender.pool_cls), TaskPool):
        sender.use_eventloop = False
        sender.start = functools.partial(_start, sender.start)


def _start(start: Callable[[], None]) -> None:
    if _current_or_none() is None:
        coro.run(_run_main, start, name="celery")
    else:
        start()


def _run_main(start: Callable[[], None]) -> None:
    _thread.begin_main()
    try:
        coro.call_blocking(start)
    finally:
        _thread.end_main()
