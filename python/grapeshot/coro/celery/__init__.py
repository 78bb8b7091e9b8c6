"""A pool for Celery's worker that runs tasks in coros: ``CELERY_CUSTOM_WORKER_POOL=grapeshot.coro.celery:TaskPool``.

::

    $ CELERY_CUSTOM_WORKER_POOL=grapeshot.coro.celery:TaskPool celery -A tasks worker -P custom -c 200

Importing this module calls ``coro.patch()``. Celery's worker itself runs in a coro, too: it waits for the broker like
any other blocking-style code. The coros that call the tasks are called pool coros here. They live on from one task to
the next, like threads of a thread pool, so that connections in thread-locals are used again.

::

    the worker's main coro --- apply_async() ---> jobs ---> pool coros: Celery's trace function, and in it the task
                                                              ^
    soft and hard time limits (timers), revoke ---------------'  an exception is raised where the task waits

docs/celery.md describes what Celery's settings do.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
import signal as signals
import sys

from grapeshot import _core, coro

# This comes before any import of Celery, because Celery's modules import functions from modules that patch() changes.
coro.patch()

try:
    from celery import concurrency  # type: ignore[import-untyped]
    from celery.concurrency.base import BasePool  # type: ignore[import-untyped]
    from celery.exceptions import ImproperlyConfigured  # type: ignore[import-untyped]
    from celery.signals import worker_init  # type: ignore[import-untyped]
    from celery.utils.log import get_logger  # type: ignore[import-untyped]

    from . import _tasks, _worker
    from ._job import PATIENCE_S, Job, running
    from ._redis import MessageWait
    from ._timer import Timer
except ImportError as error:
    raise ImportError("grapeshot.coro.celery needs Celery: pip install 'grapeshot[celery]'", name=error.name) from error

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from collections.abc import Callable
    from typing import Any

__all__ = ["TaskPool"]

_logger = get_logger("celery.pool")
# The patched class. (In grapeshot's own modules, `import threading` gives a module with the original class.)
_Thread: type[threading.Thread] = sys.modules["threading"].Thread


class TaskPool(BasePool):  # type: ignore[misc]
    """Calls tasks in coros. The worker's ``concurrency`` is the number of tasks that run at the same time.

    Blocking tasks let other coros run while they wait in patched calls. ``async def`` tasks run on the same loop. A
    task that computes for a long time delays all others, and the worker itself.
    """

    Timer = Timer

    signal_safe = False
    # With True, the worker would read from its event dispatcher's connection for 0.1 seconds after each message from
    # RabbitMQ (Celery 5.7), and so get at most ten tasks a second. With False there are no AMQP heartbeats, but py-amqp
    # sets TCP's keepalive.
    is_green = False
    task_join_will_block = False
    body_can_be_buffer = True

    # How the worker's main coro waits for messages. None until the worker has started.
    message_wait: MessageWait | None = None

    def on_start(self) -> None:
        if _core._coro_current_or_none() is None:
            raise ImproperlyConfigured(
                "import grapeshot.coro.celery before the worker is made, so that it runs in a coro"
            )
        self._jobs: collections.deque[Job] = collections.deque()
        self._has_jobs, self._has_ended = coro.condition_variable(), coro.condition_variable()
        self._is_held = False
        # How many pool coros there are, and how many of them have a job.
        self._count = self._busy = 0
        self._acknowledging = coro.lock()
        self._numbers = itertools.count(1)
        _tasks.prepare(self.app)

    # ------------------------------------------------------------------ tasks

    def on_apply(self, target: Callable[..., Any], args: Any = None, kwargs: Any = None, **options: Any) -> Job:
        if self.app is not None and args and args[0] in self.app.tasks:
            _tasks.prepare_task(self.app.tasks[args[0]])
        job = Job(self, target, args or (), kwargs or {}, options)
        self._jobs.append(job)
        if not self._has_jobs.wake_one():
            self._start_worker()
        return job

    def _start_worker(self) -> None:
        if self._count < self.limit and not self._is_held:
            self._count += 1
            try:
                _Thread(target=self._work, name=f"celery-{next(self._numbers)}", daemon=True).start()
            except BaseException:
                self._count -= 1
                raise

    def _work(self) -> None:
        left = self.options.get("maxtasksperchild") or math.inf
        try:
            while left > 0 and self._count <= self.limit:
                if self._jobs and not self._is_held:
                    left -= 1
                    self._run(self._jobs.popleft())
                else:
                    self._has_jobs.wait()
        finally:
            self._count -= 1
            if self._jobs:
                self._start_worker()

    def _run(self, job: Job) -> None:
        self._busy += 1
        try:
            job.run()
        except SystemExit as exc:
            _worker.end_soon(exc)
        except Exception as exc:
            _logger.critical("Error in the pool: %r", exc, exc_info=True)
        finally:
            self._busy -= 1
            if not self._busy:
                self._has_ended.wake_all()
            self._ask_for_more()

    def acknowledge(self, callback: Callable[..., Any], *args: Any) -> None:
        """Call a callback that acknowledges a task. Only one coro at a time does so.

        Otherwise the acknowledgements would need more connections to Redis than kombu allows, and fail.
        """
        with self._acknowledging:
            callback(*args)
        self._ask_for_more()

    def _ask_for_more(self) -> None:
        if self.message_wait is not None and not self._is_held:
            self.message_wait.end_if_more_fits()

    def terminate_job(self, pid: int, signal: int | None = None) -> None:
        """End the task that runs in the coro with this number. SIGUSR1 only raises SoftTimeLimitExceeded in it."""
        job = running.get(pid)
        if job is None or job.pool is not self:
            return
        if signal == signals.SIGUSR1:
            job.interrupt()
        else:
            job.end("revoked")

    def flush(self) -> None:
        """Forget the tasks that have not begun. The connection was lost, so the broker delivers them again."""
        self._jobs.clear()

    # ------------------------------------------------------------------ size

    def grow(self, n: int = 1) -> None:
        self.limit += n
        for _ in range(min(n, len(self._jobs))):
            self._start_worker()

    def shrink(self, n: int = 1) -> None:
        """Let ``n`` pool coros end. A pool coro that is calling a task ends after the task.

        Raises:
            ValueError: the size of the pool is less than ``n``.
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

    def hold(self) -> None:
        """Begin no more tasks.

        Tasks that have not begun are not acknowledged, so the broker delivers them again after the worker's end.
        """
        self._is_held = True

    def on_stop(self) -> None:
        """Wait for the tasks that have begun."""
        self.hold()
        while self._busy and _core._coro_can_wait():
            self._has_ended.wait()

    def on_terminate(self) -> None:
        """End the tasks that have begun, and give them a second to clean up."""
        self.hold()
        for job in list(running.values()):
            if job.pool is self:
                job.end("the worker terminates")
        if self._busy and _core._coro_can_wait():
            with contextlib.suppress(coro.TimeoutError):
                self._has_ended.wait(PATIENCE_S)


@worker_init.connect  # type: ignore[untyped-decorator]
def _prepare(sender: Any, **_: Any) -> None:
    if issubclass(concurrency.get_implementation(sender.pool_cls), TaskPool):
        _worker.prepare(sender)
