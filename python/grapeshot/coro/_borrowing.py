"""What belongs to a run of asyncio code in a coro that hides the loop: tasks, asynchronous generators, executor jobs.

Such a run borrows the loop that runs the coro (``_borrowed_loop``). Whatever its tasks and callbacks begin belongs to
the run as well, and ends with it. A context variable says to which run a piece of code belongs. All of this belongs to
the loop's thread.
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
    """The life of one borrowed loop, from its making to its close."""

    def __init__(self, host: Loop, stop: Callable[[], None], leave: Callable[[BaseException], bool]) -> None:
        # None once the run is over. Contexts keep the run for longer than that.
        self.host: Loop | None = host
        self._stop = weakref.WeakMethod(stop)
        self._leave = weakref.WeakMethod(leave)
        self.asyncgens: weakref.WeakSet[AsyncGenerator[Any, Any]] = weakref.WeakSet()
        # jobs of the default executor that have not ended
        self.jobs: set[concurrent.futures.Future[Any]] = set()
        self.sets_debug = False
        self._tasks: weakref.WeakSet[Any] = weakref.WeakSet()
        _ledger_of(host).add(self)

    def stop(self) -> None:
        """What the host's ``stop()`` does for the code of this run."""
        stop = self._stop()
        if stop is not None:
            stop()

    def leave(self, exc: BaseException) -> bool:
        """SystemExit or KeyboardInterrupt leaves code of this run. Return whether a coro waits for the run."""
        leave = self._leave()
        return leave is not None and leave(exc)

    def end(self) -> None:
        """What the code of this run begins from now on belongs to nobody."""
        host, self.host = self.host, None
        if host is not None:
            self.set_debug(host, False)
            _ledger_of(host).remove(self)

    def mark(self, context: contextvars.Context | None) -> contextvars.Context:
        """Return the context (or a copy of the current one), in which code belongs to this run from now on."""
        context = contextvars.copy_context() if context is None else context
        try:
            context.run(_run_of_context.set, self)
        except RuntimeError:
            pass  # some code runs in it: what the task begins belongs to the run because the task does
        return context

    def add(self, task: Any) -> None:
        """The task or coro belongs to this run."""
        if self.host is not None:
            self._tasks.add(task)
            _ledger_of(self.host).run_of_task[task] = self

    def has(self, task: Any) -> bool:
        """Whether a task or coro belongs to this run. What hides the loop stands for a thread, and belongs to none."""
        return task in self._tasks and not (isinstance(task, Coro) and task._hides_loop)

    def left(self) -> set[Any]:
        """Return the tasks and coros of this run that have not ended."""
        return {task for task in self._tasks if not task.done() and self.has(task)}

    def set_debug(self, host: Loop, enabled: bool) -> None:
        """Switch the debug mode of the loop on for as long as a run wants it."""
        if enabled != self.sets_debug:
            self.sets_debug = enabled
            _ledger_of(host).debug_changed()


class Ledger:
    """The runs that borrow one loop. The loop has it as ``_ledger`` while there are any."""

    def __init__(self, host: Loop) -> None:
        self._host = weakref.ref(host)
        self._runs: set[Run] = set()
        # for tasks whose context does not say it
        self.run_of_task: weakref.WeakKeyDictionary[Any, Run] = weakref.WeakKeyDictionary()
        # the loop's own debug mode while a run has switched it on
        self._debug_before: bool | None = None

    def add(self, run: Run) -> None:
        host = self._host()
        if host is None:
            return
        if not self._runs:
            host._ledger = self
            host._set_task_observer(self._task_made)
            # Code of a run that stops its loop means the run, and not the loop that others use.
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
        """Return the run that the code belongs to that runs now; None if it belongs to the loop's own program."""
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
        """The loop calls this with each asynchronous generator that begins."""
        run = self.current()
        if run is not None:
            run.asyncgens.add(asyncgen)

    def job_submitted(self, job: concurrent.futures.Future[Any]) -> None:
        """The loop calls this with each job of its default executor."""
        run = self.current()
        if run is not None:
            run.jobs.add(job)
            job.add_done_callback(run.jobs.discard)

    def exit_raised(self, context: contextvars.Context, exc: BaseException) -> bool:
        """The loop calls this with an exception that would end it. Return whether it leaves a run instead."""
        run = context.get(_run_of_context)
        return run is not None and run.host is not None and run.host is self._host() and run.leave(exc)


def _ledger_of(host: Loop) -> Ledger:
    ledger: Ledger | None = host._ledger
    return Ledger(host) if ledger is None else ledger


def _stop(host: weakref.ref[Loop]) -> None:
    """``host.stop()`` while runs borrow the loop."""
    loop = host()
    if loop is None:
        return
    run = _run_of_context.get()
    if run is not None and run.host is loop:
        run.stop()
    else:
        type(loop).stop(loop)


def tasks_of_run(loop: asyncio.AbstractEventLoop | None, found: set[Any]) -> set[Any]:
    """Return those of the tasks of ``loop`` that belong to the run whose code runs now; all, if none does."""
    run = _run_of_context.get()
    if run is None:
        return found
    if loop is None:
        loop = asyncio._get_running_loop()
    # A thread may have a copy of the context, and a loop of its own.
    if loop is None or loop is not run.host:
        return found
    return {task for task in found if run.has(task)}
