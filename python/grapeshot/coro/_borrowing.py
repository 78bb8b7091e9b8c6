"""Keeps track of which tasks, asynchronous generators and executor jobs belong to which run of a borrowed loop.

A coro that hides the loop can run asyncio code on a loop that borrows the loop of the coro (``_borrowed_loop``). The
code that runs on one borrowed loop is called a run here. Tasks that this code starts belong to the run as well, and are
cancelled when the run ends. A context variable tells to which run a piece of code belongs. Only the loop's thread may
use this module.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import weakref

from ._coroutine import Coro

TYPE_CHECKING = False
if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import AsyncGenerator, Callable
    from typing import Any

    from grapeshot._loop import Loop

_run_of_context: contextvars.ContextVar[Run | None] = contextvars.ContextVar("grapeshot_run", default=None)


class Run:
    """The tasks, generators and jobs of one borrowed loop, from its creation until it is closed."""

    def __init__(self, host: Loop, stop: Callable[[], None], leave: Callable[[BaseException], bool]) -> None:
        # None once the run is over. This object may live longer, because contexts refer to it.
        self.host: Loop | None = host
        self._stop = weakref.WeakMethod(stop)
        self._leave = weakref.WeakMethod(leave)
        self.asyncgens: weakref.WeakSet[AsyncGenerator[Any, Any]] = weakref.WeakSet()
        # jobs of the default executor and of a patched `asyncio.to_thread` that have not ended
        self.jobs: set[concurrent.futures.Future[Any]] = set()
        self.sets_debug = False
        self._tasks: weakref.WeakSet[Any] = weakref.WeakSet()
        _ledger_of(host).add(self)

    def stop(self) -> None:
        """Stop the borrowed loop. If code of this run calls ``stop()`` of the host, this is called instead."""
        stop = self._stop()
        if stop is not None:
            stop()

    def leave(self, exc: BaseException) -> bool:
        """Raise ``exc``, a SystemExit or KeyboardInterrupt of the run's code, in the coro that waits for the run.

        Return False if no coro waits.
        """
        leave = self._leave()
        return leave is not None and leave(exc)

    def end(self) -> None:
        """End the run: tasks that its code starts from now on belong to no run."""
        host, self.host = self.host, None
        if host is not None:
            self.set_debug(host, False)
            _ledger_of(host).remove(self)

    def mark(self, context: contextvars.Context | None) -> contextvars.Context:
        """Mark the context (None: a copy of the current one) as this run's, so that code in it belongs to the run.

        Return the context.
        """
        context = contextvars.copy_context() if context is None else context
        try:
            context.run(_run_of_context.set, self)
        except RuntimeError:
            pass  # the context is already entered; `Ledger.current` finds the run by the task instead
        return context

    def add(self, task: Any) -> None:
        """Add a task or coro to this run."""
        if self.host is not None:
            self._tasks.add(task)
            _ledger_of(self.host).run_of_task[task] = self

    def has(self, task: Any) -> bool:
        """Whether a task or coro belongs to this run. A coro that hides the loop does not: it stands for a thread."""
        return task in self._tasks and not (isinstance(task, Coro) and task._hides_loop)

    def left(self) -> set[Any]:
        """Return the tasks and coros of this run that have not ended."""
        return {task for task in self._tasks if not task.done() and self.has(task)}

    def set_debug(self, host: Loop, enabled: bool) -> None:
        """Set whether this run wants debug mode. The loop is in debug mode as long as any run wants it."""
        if enabled != self.sets_debug:
            self.sets_debug = enabled
            _ledger_of(host).debug_changed()


class Ledger:
    """The runs that borrow one loop. The loop's ``_ledger`` is this object while any run borrows the loop."""

    def __init__(self, host: Loop) -> None:
        self._host = weakref.ref(host)
        self._runs: set[Run] = set()
        # finds the run of a task whose context is not marked
        self.run_of_task: weakref.WeakKeyDictionary[Any, Run] = weakref.WeakKeyDictionary()
        # the loop's debug mode before a run switched it on; None if no run has switched it on
        self._debug_before: bool | None = None

    def add(self, run: Run) -> None:
        host = self._host()
        if host is None:
            return
        if not self._runs:
            host._ledger = self
            host._set_task_observer(self._task_made)
            # When code of a run calls stop() of the running loop, only that run must stop: others use the loop, too.
            vars(host).setdefault("stop", functools.partial(_stop, self._host))
        self._runs.add(run)

    def remove(self, run: Run) -> None:
        self._runs.discard(run)
        host = self._host()
        if host is None or self._runs:
            return
        host._ledger = None
        host._set_task_observer(None)
        own_stop = vars(host).get("stop")
        if isinstance(own_stop, functools.partial) and own_stop.func is _stop:
            del host.stop

    def debug_changed(self) -> None:
        host = self._host()
        if host is None:
            return
        is_wanted = any(run.sets_debug for run in self._runs)
        if is_wanted and self._debug_before is None:
            self._debug_before = host.get_debug()
            host.set_debug(True)
        elif not is_wanted and self._debug_before is not None:
            host.set_debug(self._debug_before)
            self._debug_before = None

    def current(self) -> Run | None:
        """Return the run to which the running code belongs; None if the code does not belong to a run."""
        host = self._host()
        run = _run_of_context.get()
        if (run is None or run.host is not host) and host is not None:
            task = asyncio.current_task(host)
            run = self.run_of_task.get(task) if task is not None else None
        return run if run is not None and run.host is host else None

    def _task_made(self, task: Any) -> None:
        if isinstance(task, Coro):
            context = task.get_context()
            run = context.get(_run_of_context) if context is not None else None
            is_ours = run is not None and run.host is self._host() and not task._hides_loop
        else:
            run = self.current()
            is_ours = True
        if run is not None and is_ours:
            run.add(task)

    def asyncgen_started(self, asyncgen: AsyncGenerator[Any, Any]) -> None:
        """Add an asynchronous generator to the current run. The loop calls this when one is first iterated."""
        run = self.current()
        if run is not None:
            run.asyncgens.add(asyncgen)

    def job_submitted(self, job: concurrent.futures.Future[Any]) -> None:
        """Add a job of the loop's default executor, or of a patched ``asyncio.to_thread``, to the current run."""
        run = self.current()
        if run is not None:
            run.jobs.add(job)
            job.add_done_callback(run.jobs.discard)

    def exit_raised(self, context: contextvars.Context, exc: BaseException) -> bool:
        """Pass an exception to the run whose code raised it; otherwise the exception would end the loop.

        Return False if the exception does not come from a run, or no coro waits for that run. The loop calls this.
        """
        run = context.get(_run_of_context)
        return run is not None and run.host is not None and run.host is self._host() and run.leave(exc)


def _ledger_of(host: Loop) -> Ledger:
    ledger: Ledger | None = host._ledger
    return Ledger(host) if ledger is None else ledger


def _stop(host: weakref.ref[Loop]) -> None:
    """Stop the caller's run, or the loop if the caller has no run.

    While runs borrow the loop, ``host.stop()`` calls this.
    """
    loop = host()
    if loop is None:
        return
    run = _run_of_context.get()
    if run is not None and run.host is loop:
        run.stop()
    else:
        type(loop).stop(loop)


def leave_run(context: contextvars.Context) -> None:
    """Detach ``context``: code that runs in it, and coros that this code starts, belong to no run."""
    # Do not touch a context that has no run. It may be in use, and context.run() would then raise RuntimeError.
    if context.get(_run_of_context) is not None:
        context.run(_run_of_context.set, None)


def tasks_of_run(loop: asyncio.AbstractEventLoop | None, found: set[Any]) -> set[Any]:
    """Return the tasks in ``found`` that belong to the current run; outside of a run, all of them.

    ``found`` are tasks of ``loop`` (None: of the running loop).
    """
    run = _run_of_context.get()
    if run is None:
        return found
    if loop is None:
        loop = asyncio._get_running_loop()
    # The run's code may have passed a copy of its context to another thread, which has a loop of its own. The tasks of
    # that loop are not the run's, so return them all.
    if loop is None or loop is not run.host:
        return found
    return {task for task in found if run.has(task)}
