"""``CoroPoolExecutor``: an executor whose workers are coros; and the functions that keep real threads anyway."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextvars
import functools
import sys
import types

from grapeshot import _core
from grapeshot._loop.base import BaseLoop

from ._errors import Shutdown
from ._errors import TimeoutError as CoroTimeoutError
from ._hiding import spawn_hiding
from ._sync import condition_variable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, ParamSpec, TypeVar

    _P = ParamSpec("_P")
    _T = TypeVar("_T")

# A worker of an executor without a limit ends when it has had no work for this long. The same as anyio's threads.
_IDLE_S = 10.0
# `in_thread` sets this attribute of a function.
_MARK = "_grapeshot_in_thread"

# The prefixes of the modules whose functions keep real threads.
_modules: list[str] = []


# ---------------------------------------------------------------- functions that keep real threads


def in_thread(fn: Callable[_P, _T]) -> Callable[_P, _T]:
    """Mark a function that computes, or that waits in C code. :class:`CoroPoolExecutor` runs it in a real thread.

    Use it as a decorator. Where such functions are in a library, use :func:`modules_in_thread`. A call of the function
    in other places is not affected.
    """
    setattr(fn, _MARK, True)
    return fn


def modules_in_thread(*names: str) -> None:
    """Run the functions of these modules and packages in real threads, as if each was marked with :func:`in_thread`."""
    _modules.extend(names)


def needs_thread(fn: Any) -> bool:
    """Whether a function must be called in a real thread: a marked one, or one in C that grapeshot has not patched."""
    fn = _unwrap(fn)
    if getattr(fn, _MARK, False):
        return True
    module: str = getattr(fn, "__module__", None) or type(getattr(fn, "__self__", None)).__module__
    if any(module == name or module.startswith(f"{name}.") for name in _modules):
        return True
    if isinstance(fn, types.BuiltinFunctionType | types.MethodDescriptorType | types.WrapperDescriptorType):
        return not _can_wait(fn)
    return isinstance(fn, type) and not fn.__flags__ & _HEAP_TYPE


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE


def _unwrap(fn: Any) -> Any:
    """Return the function that a partial, a bound method or a context's ``run`` calls in the end."""
    while True:
        if isinstance(fn, functools.partial):
            # partial(context.run, fn, ...), as asyncio.to_thread makes it
            is_run = isinstance(getattr(fn.func, "__self__", None), contextvars.Context)
            fn = fn.args[0] if is_run and fn.args else fn.func
        elif isinstance(fn, types.MethodType):
            fn = fn.__func__
        else:
            return fn


def _can_wait(fn: Any) -> bool:
    """Whether a native function is one of grapeshot's, which let other coros run while they wait."""
    owner = getattr(fn, "__self__", None)
    patching = sys.modules.get(f"{__package__}._patching._originals")
    if patching is not None and patching.is_replacement(fn):
        return True
    is_method = owner is not None and not isinstance(owner, types.ModuleType)
    modules = [base.__module__ for base in type(owner).__mro__] if is_method else [fn.__module__ or ""]
    return any(module.partition(".")[0] == "grapeshot" for module in modules)


# ---------------------------------------------------------------- the executor


class _Job:
    """A function to call, and the future of its result."""

    def __init__(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._call = (fn, args, kwargs)

    def run(self) -> None:
        """Call the function. Its exception goes to the future. If the exception ends the worker, raise it, too."""
        future, (fn, args, kwargs) = self.future, self._call
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = fn(*args, **kwargs)
        except BaseException as exc:
            future.set_exception(exc)
            # Ctrl-C, or the end of the loop
            if isinstance(exc, KeyboardInterrupt | Shutdown):
                raise
        else:
            future.set_result(result)

    def abandon(self) -> None:
        """End a job that has not begun, because the loop ends."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(concurrent.futures.CancelledError("the event loop has ended"))


class _Worker:
    """A coro that calls the functions of one job after the other."""

    def __init__(self, job: _Job) -> None:
        # The job that the worker does next. While it is idle: None until somebody has a job for it.
        self.job: _Job | None = job
        self.wakeup = condition_variable()


class CoroPoolExecutor(concurrent.futures.ThreadPoolExecutor):
    """An executor for blocking-style functions, whose workers are coros of the loop that submits to it.

    ::

        loop.set_default_executor(coro.CoroPoolExecutor())

    ``run_in_executor(None, fn)`` and ``asyncio.to_thread(fn)`` then call ``fn`` in a coro. So other code runs while the
    function waits in patched calls (see ``coro.patch``), and as many functions as you like wait at the same time. As in
    a thread, asyncio's functions see no running loop in them.

    Functions that compute, or wait in C code, would block the loop, so they need real threads. The executor has real
    threads for functions that ``coro.threads.in_thread`` or ``coro.threads.modules_in_thread`` names, and for functions
    in C (such as ``zlib.compress``), unless grapeshot has patched them. The watchdog reports others. All functions run
    in real threads if they are submitted where no grapeshot loop is running.

    Args:
        max_workers: how many functions run at the same time; None means no limit for coros, and as many real threads as
            a ThreadPoolExecutor has. Workers of an executor with a limit stay until the executor is shut down or the
            loop is closed; others end after 10 seconds without work. With 1, all functions are called in one coro, and
            none in a real thread.
        thread_name_prefix: the beginning of the workers' names.

    Raises:
        ValueError: ``max_workers`` is 0 or less.
    """

    def __init__(self, max_workers: int | None = None, thread_name_prefix: str = "") -> None:
        super().__init__(max_workers, thread_name_prefix or "CoroPoolExecutor")
        self._limit = max_workers
        self._prefix = thread_name_prefix or "CoroPoolExecutor"
        self._forget_workers(None)

    def _forget_workers(self, loop: Any) -> None:
        # The loop that runs the workers.
        self._coro_loop = loop
        self._count = 0
        self._idle_workers: collections.deque[_Worker] = collections.deque()
        # Jobs that wait until one of the workers has time.
        self._jobs: collections.deque[_Job] = collections.deque()
        # Jobs that have not ended.
        self._futures: set[concurrent.futures.Future[Any]] = set()

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> concurrent.futures.Future[_T]:
        """Call ``fn(*args, **kwargs)`` in a worker; return a future of the result.

        Raises:
            RuntimeError: the executor was shut down.
        """
        loop = _current_loop()
        if loop is None or (self._limit != 1 and needs_thread(fn)) or not self._belongs_to(loop):
            return super().submit(fn, *args, **kwargs)
        if self._shutdown:
            raise RuntimeError("cannot schedule new futures after shutdown")
        job = _Job(fn, args, kwargs)
        self._futures.add(job.future)
        job.future.add_done_callback(self._futures.discard)
        if not self._wake_worker(job):
            if self._limit is None or self._count < self._limit:
                self._start_worker(job)
            else:
                self._jobs.append(job)
        return job.future

    def _belongs_to(self, loop: Any) -> bool:
        if self._coro_loop is not loop:
            if self._coro_loop is not None and not self._coro_loop.is_closed():
                return False
            self._forget_workers(loop)
        return True

    def _wake_worker(self, job: _Job) -> bool:
        while self._idle_workers:
            worker = self._idle_workers.pop()  # the one that has been idle for the shortest time, so that others end
            worker.job = job
            if worker.wakeup.wake_one():
                return True
            worker.job = None
        return False

    def _start_worker(self, job: _Job) -> None:
        worker = _Worker(job)
        # Like a thread, a worker begins with an empty context.
        coro = spawn_hiding(self._work, worker, name=f"{self._prefix}-{self._count}", context=contextvars.Context())
        coro._make_daemon()
        self._count += 1

    def _work(self, worker: _Worker) -> None:
        loop = self._coro_loop
        try:
            while True:
                job, worker.job = worker.job, None
                if job is not None:
                    job.run()
                del job
                if self._jobs:
                    worker.job = self._jobs.popleft()
                elif self._shutdown or not self._wait_for_job(worker):
                    return
        except BaseException:
            # The loop ends, and with it all workers.
            if worker.job is not None:
                worker.job.abandon()
            while self._coro_loop is loop and self._jobs:
                self._jobs.popleft().abandon()
            raise
        finally:
            if self._coro_loop is loop:
                self._count -= 1

    def _wait_for_job(self, worker: _Worker) -> bool:
        """Wait until the worker has a job; return False if it has none and shall end."""
        self._idle_workers.append(worker)
        try:
            worker.wakeup.wait(_IDLE_S if self._limit is None else None)
        except CoroTimeoutError:
            pass
        finally:
            if worker in self._idle_workers:
                self._idle_workers.remove(worker)
        return worker.job is not None

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more work, and let the workers end after the work that they have.

        ``wait`` waits for the work: in real threads always, in coros if the caller does not block their loop, which is
        so in another thread and in a coro. ``cancel_futures`` cancels what has not begun.
        """
        if cancel_futures:
            for job in self._jobs:
                job.future.cancel()
        futures = list(self._futures)
        super().shutdown(wait=False, cancel_futures=cancel_futures)
        loop = self._coro_loop
        if loop is not None and _current_loop() is loop:
            self._end_idle()
        elif loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._end_idle)
        if not wait:
            return
        if _core._coro_can_wait():
            for future in futures:
                future.add_done_callback(_wake(condition := condition_variable()))
                if not future.done():
                    condition.wait()
        elif loop is None or _current_loop() is not loop:
            concurrent.futures.wait(futures)
            super().shutdown(wait=True)

    def _end_idle(self) -> None:
        for worker in list(self._idle_workers):
            worker.wakeup.wake_one()


def _wake(condition: Any) -> Callable[[object], None]:
    return lambda _: condition.wake_all()


def _current_loop() -> BaseLoop | None:
    """Return the grapeshot loop that runs the calling coro, task or callback.

    None in a process that a coro has forked, because the loop runs in the parent.
    """
    coro = _core._coro_current_or_none()
    if coro is not None:
        return coro._loop if _core._coro_begins_thread() else None
    loop = asyncio._get_running_loop()
    return loop if isinstance(loop, BaseLoop) else None


def executor_of(loop: BaseLoop, max_workers: int | None = None) -> CoroPoolExecutor:
    """Return the executor that patched functions use on this loop. There is one for each limit."""
    if loop._coro_executors is None:
        loop._coro_executors = {}
    executor: Any = loop._coro_executors.get(max_workers)
    if executor is None:
        executor = loop._coro_executors[max_workers] = CoroPoolExecutor(max_workers, "to_thread")
    return executor  # type: ignore[no-any-return]
