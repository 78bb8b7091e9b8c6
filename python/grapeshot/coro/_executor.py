"""``CoroPoolExecutor``: an executor whose workers are coros, with real threads for the functions that need them."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import contextvars
import functools
import sys
import types
import weakref

from grapeshot import _core
from grapeshot._loop.base import BaseLoop

from ._bridge import ThreadCall, await_
from ._errors import Shutdown
from ._errors import TimeoutError as CoroTimeoutError
from ._hiding import spawn_hiding
from ._sync import condition_variable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any, ParamSpec, TypeVar

    _P = ParamSpec("_P")
    _T = TypeVar("_T")

# A worker of an executor without a limit ends when it has had no work for this long. anyio's threads wait just as long.
_IDLE_S = 10.0
# `in_thread` sets this attribute of a function.
_MARK = "_grapeshot_in_thread"

# The names of the modules and packages whose functions need real threads.
_modules: list[str] = []


# ---------------------------------------------------------------- functions that need real threads


def in_thread(fn: Callable[_P, _T]) -> Callable[_P, _T]:
    """Mark a function that computes, or that waits in C code. :class:`CoroPoolExecutor` runs it in a real thread.

    Use it as a decorator. For the functions of a library, use :func:`modules_in_thread`. A direct call of the function
    is not affected.
    """
    setattr(fn.__func__ if isinstance(fn, classmethod | staticmethod) else fn, _MARK, True)
    return fn


def modules_in_thread(*names: str) -> None:
    """Run the functions of these modules and packages in real threads, as if each was marked with :func:`in_thread`."""
    _modules.extend(names)


def needs_thread(fn: Any, args: Iterable[Any] = ()) -> bool:
    """Whether a function must be called in a real thread.

    This is so in three cases: the function is marked; or one of its arguments is a marked function, which it will
    probably call (frameworks wrap functions in this way); or it is written in C, and grapeshot has not patched it.
    """
    args = list(args)
    while True:
        if _is_marked(fn):
            return True
        if isinstance(fn, functools.partial):
            args = [*fn.args, *fn.keywords.values(), *args]
            fn = fn.func
        elif isinstance(_owner(fn), contextvars.Context) and args:
            fn, args = args[0], args[1:]  # context.run(fn, ...)
        elif isinstance(fn, types.MethodType):
            # FastAPI makes a context manager from a dependency with `yield`, and calls the manager's `__enter__`. The
            # manager's attribute `func` is the generator function.
            args.append(getattr(fn.__self__, "func", None) if fn.__name__ == "__enter__" else None)
            fn = fn.__func__
        else:
            break
    return _is_in_c(fn) or any(_is_wrapped_mark(argument) for argument in args)


def _is_wrapped_mark(argument: Any) -> bool:
    if isinstance(argument, functools.partial):
        return needs_thread(argument)
    if isinstance(argument, types.GeneratorType):
        frame = argument.gi_frame
        return frame is not None and _is_module_marked(frame.f_globals.get("__name__"))
    return isinstance(argument, types.FunctionType | types.MethodType) and _is_marked(argument)


def _is_marked(fn: Any) -> bool:
    try:
        if getattr(fn, _MARK, False) is True or getattr(type(fn).__call__, _MARK, False) is True:
            return True
        return bool(_modules) and _is_module_marked(getattr(fn, "__module__", None) or type(fn).__module__)
    except Exception:  # an object that computes its attributes may raise any exception
        return False


def _is_module_marked(module: object) -> bool:
    return isinstance(module, str) and any(module == name or module.startswith(f"{name}.") for name in _modules)


def _is_in_c(fn: Any) -> bool:
    """Whether a function is neither Python code nor grapeshot's, so that no other coro can run while it waits."""
    if isinstance(fn, types.FunctionType):
        return False
    if isinstance(fn, type):
        makers = (name for name in ("__init__", "__new__") if isinstance(_lookup(fn, name), types.FunctionType))
        return next(makers, None) is None
    if isinstance(_lookup(type(fn), "__call__"), types.FunctionType):
        return False
    patching = sys.modules.get(f"{__package__}._patching._originals")
    if patching is not None and patching.is_replacement(fn):
        return False
    owner = _owner(fn)
    is_method = owner is not None and not isinstance(owner, types.ModuleType)
    modules = [base.__module__ for base in type(owner).__mro__] if is_method else [getattr(fn, "__module__", None)]
    return not any(isinstance(module, str) and module.partition(".")[0] == "grapeshot" for module in modules)


def _owner(fn: Any) -> Any:
    try:
        return fn.__self__
    except Exception:  # there is no such attribute, or an object that computes its attributes has raised
        return None


def _lookup(kind: type, name: str) -> Any:
    """Return an attribute of a class without binding it. For a staticmethod, return the function inside it."""
    found = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
    return found.__func__ if isinstance(found, staticmethod) else found


# ---------------------------------------------------------------- the executor


class _Job:
    """A function to call, and the future of its result."""

    def __init__(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._call = (fn, args, kwargs)

    def run(self) -> None:
        """Call the function. Its exception goes to the future. If the exception ends the worker, raise it, too."""
        future, (fn, args, kwargs) = self.future, self._call
        try:
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
        finally:
            del self, future, fn, args, kwargs  # the exception's traceback refers to this frame

    def cancel(self) -> None:
        """Cancel the job, which will not run. Tell ``concurrent.futures.wait()``, too."""
        self.future.cancel()
        self.future.set_running_or_notify_cancel()


class _Worker:
    """A coro that runs jobs, one after the other."""

    def __init__(self, job: _Job) -> None:
        # The job that the worker runs next. None while it runs a job, or waits for one.
        self.job: _Job | None = job
        self.wakeup = condition_variable()


# The coros that are workers of any executor.
WORKERS: weakref.WeakSet[Any] = weakref.WeakSet()


class _Pool:
    """The workers that an executor has on one loop.

    Workers refer to this object and not to the executor. So a program can drop the executor, and the workers then end.
    """

    def __init__(self, loop: BaseLoop, limit: int | None, prefix: str) -> None:
        self.loop = weakref.ref(loop)
        self._limit, self._prefix = limit, prefix
        self._count = 0
        self._idle: collections.deque[_Worker] = collections.deque()
        # Jobs that wait until one of the workers has time.
        self._jobs: collections.deque[_Job] = collections.deque()
        # The futures of the jobs that have not ended.
        self.futures: set[concurrent.futures.Future[Any]] = set()
        # The coros that are workers.
        self.coros: set[Any] = set()
        # Whether no more jobs will come, because the executor was shut down or dropped.
        self.is_ending = False

    def is_open(self) -> bool:
        loop = self.loop()
        return loop is not None and not loop.is_closed()

    def add(self, job: _Job) -> None:
        if self._wake_worker(job):
            return
        if self._limit is None or self._count < self._limit:
            self._start_worker(job)
        else:
            self._jobs.append(job)

    def _wake_worker(self, job: _Job) -> bool:
        while self._idle:
            worker = self._idle.pop()  # the last one that became idle; the others stay idle, and can end
            worker.job = job
            if worker.wakeup.wake_one():
                return True
            worker.job = None
        return False

    def _start_worker(self, job: _Job) -> None:
        worker = _Worker(job)
        # An empty context, as threads have by default in builds with the GIL.
        coro = spawn_hiding(self._work, worker, name=f"{self._prefix}-{self._count}", context=contextvars.Context())
        coro._make_daemon()
        self.coros.add(coro)
        WORKERS.add(coro)
        self._count += 1

    def _work(self, worker: _Worker) -> None:
        try:
            while True:
                job, worker.job = worker.job, None
                if job is not None:
                    job.run()
                del job
                if self._jobs:
                    worker.job = self._jobs.popleft()
                elif self.is_ending or not self._wait_for_job(worker):
                    return
        except Shutdown:
            # The loop ends, and with it all workers.
            for job in (*self._jobs, worker.job):
                if job is not None:
                    job.cancel()
            self._jobs.clear()
            worker.job = None
            raise
        finally:
            if worker.job is not None:  # an exception has ended the wait after the job was given to this worker
                self._jobs.appendleft(worker.job)
            self._count -= 1
            self.coros.discard(_core._coro_current_or_none())
            if self._jobs and self.is_open():  # an exception such as KeyboardInterrupt has ended this worker
                job = self._jobs.popleft()
                try:
                    self._start_worker(job)
                except Exception as exc:
                    if job.future.set_running_or_notify_cancel():
                        job.future.set_exception(exc)

    def _wait_for_job(self, worker: _Worker) -> bool:
        """Wait until the worker has a job; return False if it has none and must end."""
        self._idle.append(worker)
        try:
            worker.wakeup.wait(_IDLE_S if self._limit is None else None)
        except CoroTimeoutError:
            pass
        finally:
            if worker in self._idle:
                self._idle.remove(worker)
        return worker.job is not None

    def cancel_jobs(self) -> None:
        """Cancel the jobs that have not begun."""
        for job in self._jobs.copy():  # a worker of another thread may take jobs meanwhile
            job.future.cancel()

    def end(self, _: object = None) -> None:
        """Let the workers end once they have no jobs. Any thread may call this."""
        self.is_ending = True
        loop = self.loop()
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._end_idle)

    def _end_idle(self) -> None:
        for worker in list(self._idle):
            worker.wakeup.wake_one()


class CoroPoolExecutor(concurrent.futures.ThreadPoolExecutor):
    """An executor for blocking-style functions. Its workers are coros of the loop on which it is used.

    ::

        loop.set_default_executor(coro.CoroPoolExecutor())

    ``run_in_executor(None, fn)`` and ``asyncio.to_thread(fn)`` then call ``fn`` in a coro. So other code runs while the
    function waits in patched calls (see ``coro.patch``), and as many functions as you like wait at the same time. In
    these functions, as in a thread, asyncio sees no running loop.

    Functions that compute, or wait in C code, would block the loop, so they need real threads. The executor uses
    real threads for functions marked with ``coro.threads.in_thread``, for functions of modules passed to
    ``coro.threads.modules_in_thread``, and for functions in C that grapeshot has not patched (such as
    ``zlib.compress``). The latency warning names other functions that block the loop.

    All functions run in real threads if they are submitted where no grapeshot loop is running, or if the executor has
    already called functions in coros of another loop that is not closed yet.

    Workers end with their loop. ``asyncio.run`` and ``grapeshot.run`` wait for the jobs first. ``loop.close()`` does
    not: a running function gets Shutdown where it waits, and jobs that have not begun are cancelled.

    Args:
        max_workers: how many functions run in coros at the same time, and how many in real threads; None means no limit
            for coros, and as many real threads as a ThreadPoolExecutor has. If there is no limit, workers end after
            10 seconds without work; otherwise they stay until the executor is shut down or dropped, or the loop is
            closed. With 1, a loop calls all functions in one coro, even functions that would otherwise get a real
            thread (except calls of ``coro.threads.run``).
        thread_name_prefix: the beginning of the names of coros and threads.

    Raises:
        ValueError: ``max_workers`` is 0 or less.
    """

    def __init__(self, max_workers: int | None = None, thread_name_prefix: str = "") -> None:
        super().__init__(max_workers, thread_name_prefix or "CoroPoolExecutor")
        self._limit = max_workers
        self._prefix = thread_name_prefix or "CoroPoolExecutor"
        self._pool: _Pool | None = None
        self._ref_for_pool: object = None

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> concurrent.futures.Future[_T]:
        """Call ``fn(*args, **kwargs)`` in a worker; return a future of the result.

        Raises:
            RuntimeError: the executor was shut down.
        """
        loop = _current_loop()
        if (
            loop is None
            or isinstance(fn, ThreadCall)
            or (self._limit != 1 and needs_thread(fn, [*args, *kwargs.values()]))
        ):
            return super().submit(fn, *args, **kwargs)
        return self._submit_to_coro(loop, fn, *args, **kwargs)

    def _submit_to_coro(
        self, loop: BaseLoop, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> concurrent.futures.Future[_T]:
        """Like :meth:`submit`, for a caller that knows the running loop and has checked that ``fn`` needs no thread."""
        job = _Job(fn, args, kwargs)
        # If the pool is replaced, this variable keeps the old pool alive until the lock is free: freeing the old pool's
        # jobs may run finalizers that need the lock.
        before = self._pool
        with self._shutdown_lock:
            pool = self._pool_of(loop)
            if pool is not None:
                if self._shutdown:
                    raise RuntimeError("cannot schedule new futures after shutdown")
                pool.futures.add(job.future)
        del before
        if pool is None:
            return super().submit(fn, *args, **kwargs)
        job.future.add_done_callback(pool.futures.discard)
        try:
            pool.add(job)
        except BaseException:
            pool.futures.discard(job.future)  # nobody waits for it
            raise
        return job.future

    def _pool_of(self, loop: BaseLoop) -> _Pool | None:
        """Return the pool of this loop; make it if there is no pool. Return None if another open loop has the pool.

        The caller holds the lock.
        """
        pool = self._pool
        if pool is not None and pool.loop() is loop:
            return pool
        if pool is not None and pool.is_open():
            return None
        pool = self._pool = _Pool(loop, self._limit, self._prefix)
        self._ref_for_pool = weakref.ref(self, pool.end)
        if loop._coro_executors is None:
            loop._coro_executors = weakref.WeakSet()
        loop._coro_executors.add(self)
        return pool

    def _wait_for_jobs(self) -> None:
        """Wait until no job is left in a coro. Must not be called in the loop's thread."""
        while self._pool is not None and (futures := list(self._pool.futures)):
            concurrent.futures.wait(futures)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more work, and let the workers end after the work that they have.

        With ``wait``, wait for the work. But if a task or a callback of the loop calls this, do not wait for coros,
        because the wait would block the loop. If the loop is not running, do not wait for coros either, because they
        cannot end then. ``cancel_futures`` cancels the work that has not begun.

        Raises:
            RuntimeError: a function that runs in this executor waits for the executor's end.
        """
        super().shutdown(wait=False, cancel_futures=cancel_futures)  # sets _shutdown, with the lock
        pool = self._pool
        current = _core._coro_current_or_none()
        if pool is not None:
            pool.end()
            if cancel_futures:
                pool.cancel_jobs()
        if not wait:
            return
        if pool is not None and current is not None and current in pool.coros:
            raise RuntimeError("cannot join current thread")
        if _core._coro_can_wait():
            if pool is not None and pool.futures:
                waiting = [asyncio.wrap_future(future, loop=current._loop) for future in list(pool.futures)]
                await_(asyncio.wait(waiting))
            await_(_join(current._loop, super().shutdown))
            return
        loop = pool.loop() if pool is not None else None
        # While a loop does not run, its coros cannot end.
        if loop is not None and loop is not _current_loop() and loop.is_running():
            self._wait_for_jobs()
        super().shutdown(wait=True)


async def _join(loop: Any, shutdown: Callable[[], None]) -> None:
    """Call ``shutdown``, which waits for the end of an executor's real threads, in a thread made for this call."""
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        await loop.run_in_executor(executor, shutdown)


def _current_loop() -> BaseLoop | None:
    """Return the grapeshot loop that runs the calling coro, task or callback.

    Returns None in a process that a coro has forked, because the loop runs in the parent.
    """
    coro = _core._coro_current_or_none()
    if coro is not None:
        return coro._loop if _core._coro_begins_thread() else None
    loop = asyncio._get_running_loop()
    return loop if isinstance(loop, BaseLoop) else None


# loop -> {limit: the executor that patched functions use on this loop}
_executors: weakref.WeakKeyDictionary[BaseLoop, dict[int | None, CoroPoolExecutor]] = weakref.WeakKeyDictionary()


def executor_of(loop: BaseLoop, max_workers: int | None = None) -> CoroPoolExecutor:
    """Return the executor that patched functions use on this loop. There is one for each limit.

    Raises:
        RuntimeError: the loop's executors were shut down, which ``asyncio.run`` does at its end.
    """
    if loop._executor_shutdown_called:
        raise RuntimeError("Executor shutdown has been called")
    executors = _executors.setdefault(loop, {})
    executor = executors.get(max_workers)
    if executor is None:
        executor = executors[max_workers] = CoroPoolExecutor(max_workers, "to_thread")
    return executor
