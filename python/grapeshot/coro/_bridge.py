"""The bridge between coros, asyncio and threads: awaitables in coros, blocking-style code in tasks, and real threads.

A coroutine that a coro awaits runs on the coro's own stack, and sees the coro as the current task. So
``asyncio.timeout``, TaskGroup and cancellation work in it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
from collections.abc import Awaitable, Callable, Coroutine
from types import CoroutineType

from grapeshot import _core
from grapeshot._loop import new_event_loop
from grapeshot._start import run as _run

from ._coroutine import Coro, check_started
from ._errors import Interrupted, Shutdown, YieldFromMain
from ._event_loop import pending_loop, take_pending_loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from contextvars import Context
    from typing import Any, Literal, ParamSpec, TypeVar, overload

    from ._signatures import RunSync

    _P = ParamSpec("_P")
    _T = TypeVar("_T")


class ThreadCall(functools.partial):  # type: ignore[type-arg]
    """A call that must be made in a real thread, even if the executor runs other functions in coros."""


class _WrappedInterrupt(Interrupted):
    """Raised in a coroutine that a coro awaits, when the coro is interrupted with something other than CancelledError.

    ``value`` is the exception that interrupted the coro. This class is a subclass of CancelledError, because asyncio's
    code expects no other interruption: after another exception, TaskGroup would not end its tasks.
    """


# Returns the running loop, even in a coro that hides it; None if no loop runs in this thread.
find_running_loop = _core._coro_running_loop
# For modules of this package that do not import asyncio themselves.
all_tasks = asyncio.all_tasks
current_task = asyncio.current_task


def own_loop() -> Any:
    """Return the loop to which new coros belong: the running one, or else the one that the thread will run next."""
    return find_running_loop() or pending_loop()


def await_(awaitable: Awaitable[_T]) -> _T:
    """Wait in a coro for an asyncio awaitable; return its result or raise its exception.

    To the awaitable this is like ``await`` in a task. Any interruption of the coro acts like a cancellation: the future
    that is waited for is cancelled, and the coroutine gets CancelledError. Once the future and the coroutine have
    ended, the interruption is raised in the coro, unless the awaitable has suppressed the cancellation. If the
    awaitable is itself a coro, this returns its result or raises the same exceptions as :meth:`Coro.result`.

    After several calls that did not have to wait, the next one first yields to others (see ``set_selfishness``). The
    coro can be interrupted there, too.

    Raises:
        YieldFromMain: not called in a coro. If ``awaitable`` is a coroutine, it is closed, so that Python does not warn
            that it was never awaited.
        TypeError: ``awaitable`` cannot be awaited.
        RuntimeError: ``awaitable`` is this coro itself, a pending future of another loop, or a coroutine that is
            already being awaited.
        NotStartedError: ``awaitable`` is a coro that was not started.
    """
    try:
        coro = _core._coro_current()
    except YieldFromMain:
        if isinstance(awaitable, Coroutine):
            awaitable.close()
        raise
    try:
        if type(awaitable) is CoroutineType:
            if awaitable.cr_await is not None:
                raise RuntimeError("coroutine is being awaited already")
            try:
                _core._coro_act()
            except BaseException:
                awaitable.close()  # like the coroutine of a task that is cancelled before its first step
                raise
            return _drive(coro, awaitable)  # type: ignore[no-any-return]
        _core._coro_act()
        if not asyncio.isfuture(awaitable):
            return _drive(coro, _await(awaitable))  # type: ignore[no-any-return]
        if not awaitable.done():
            _check_owner(coro, awaitable)
            interruption = wait_for_future(coro, awaitable)
            if interruption is not None:
                raise interruption
        return awaitable.result()  # type: ignore[no-any-return]
    finally:
        # The exception's traceback keeps this frame, and the coro keeps the exception: break the cycle.
        del coro, awaitable


async def _await(awaitable: Awaitable[Any]) -> Any:
    """Turn an awaitable into a coroutine. The interpreter checks the object, and raises the right TypeError."""
    return await awaitable


def _drive(coro: Any, steps: Any) -> Any:
    """Run a coroutine to its end on this coro's stack.

    When the coroutine yields a future, the coro waits for the future, as a task does.
    """
    raised: BaseException | None = None
    interruption: BaseException | None = None
    awaited: Any = None
    is_shown = False
    try:
        if coro._hides_loop:
            _show_loop(coro, steps)
            is_shown = True
        while True:
            try:
                awaited = steps.send(None) if raised is None else steps.throw(raised)
            except StopIteration as stop:
                return stop.value
            except BaseException as error:
                if type(error) is _WrappedInterrupt:
                    raise error.value from None
                raise
            raised = interruption = None
            try:
                if awaited is None:
                    interruption = _yield()
                else:
                    _check_future(coro, awaited)
                    interruption = wait_for_future(coro, awaited)
                    if interruption is None and isinstance(awaited, Coro):
                        awaited._task_outcome()
                    elif interruption is None:
                        awaited.result()
            except BaseException as error:
                raised = error
            if interruption is not None:
                is_cancelled = isinstance(interruption, asyncio.CancelledError)
                raised = interruption if is_cancelled else _WrappedInterrupt(interruption)
    finally:
        if is_shown:
            _core._coro_hide_loop()
        coro = steps = awaited = raised = interruption = None  # break the cycle, as in await_


def _show_loop(coro: Any, steps: Any) -> None:
    """Make the running loop visible to a coroutine, because the coro that awaits it hides the loop."""
    try:
        _core._coro_show_loop(coro)
    except BaseException:
        steps.close()
        raise


def _yield() -> BaseException | None:
    """Let others that are ready run; return the exception with which the coro was interrupted, or None."""
    try:
        _core._coro_yield_slice()
    except BaseException as interruption:
        return interruption
    return None


def _check_future(coro: Coro[Any], future: Any) -> None:
    """Check that a coroutine has yielded a future that can be waited for. Raises RuntimeError if not, like a task."""
    is_blocking = getattr(future, "_asyncio_future_blocking", None)
    if is_blocking is None:
        raise RuntimeError(f"Task got bad yield: {future!r}")
    _check_owner(coro, future)
    if not is_blocking:
        raise RuntimeError(f"yield was used instead of yield from in task {coro!r} with {future!r}")
    future._asyncio_future_blocking = False


def _check_owner(coro: Coro[Any], future: Any) -> None:
    if future.get_loop() is not coro._loop:
        raise RuntimeError(f"Task {coro!r} got Future {future!r} attached to a different loop")
    if future is coro:
        raise RuntimeError(f"Task cannot await on itself: {coro!r}")
    if isinstance(future, Coro):
        check_started(future)


def wait_for_future(coro: Any, future: Any) -> BaseException | None:
    """Wait until ``future`` is done. Return the exception with which the coro was interrupted, or None.

    An interruption cancels the future, and takes effect when the future is done, or at once if the future refuses to be
    cancelled. If the future accepts the cancellation but ends with a result or an exception, the interruption is
    dropped, as for a task.
    """
    interruption: BaseException | None = None
    wakeup: Any = _core.wakeup()
    future.add_done_callback(wakeup)
    coro._awaited = future
    try:
        while True:
            latest = wakeup.wait_quietly()
            if latest is not None:
                if not isinstance(interruption, Shutdown):
                    interruption = latest
                if not future.cancel(msg=_message(latest)):
                    return interruption
            elif future.done():
                return interruption if future.cancelled() else None
    finally:
        if not future.done():
            future.remove_done_callback(wakeup)
        coro._awaited = None
        coro = future = wakeup = interruption = latest = None  # break the cycle, as in await_


def _message(interruption: BaseException) -> Any:
    """Return the message with which to cancel a future.

    If ``cancel()`` has interrupted the coro, this is the message that ``cancel()`` was given; otherwise None.
    """
    if type(interruption) is asyncio.CancelledError and interruption.args:
        return interruption.args[0]
    return None


if TYPE_CHECKING:
    run_sync: RunSync
else:

    async def run_sync(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run blocking-style code in a coro while the calling task waits; return its result or raise its exception.

        The function may use everything in :mod:`grapeshot.coro` that waits, ``await_`` included. It runs in a copy of
        the task's context. Cancelling the task cancels the coro. ``name``, ``context`` and ``stack`` have the same
        meaning as for ``spawn``.
        """
        return await _core._coro_spawn(fn, *args, **kwargs)


if TYPE_CHECKING:

    @overload
    def run(fn: Callable[..., _T], /, *args: Any, threads: int, restart: bool = False, **kwargs: Any) -> list[_T]: ...

    @overload
    def run(
        fn: Callable[..., _T],
        /,
        *args: Any,
        name: object,
        context: Context | None = None,
        stack: Literal["shared", "own"] = "shared",
        **kwargs: Any,
    ) -> _T: ...

    @overload
    def run(
        fn: Callable[..., _T],
        /,
        *args: Any,
        context: Context | None,
        stack: Literal["shared", "own"] = "shared",
        **kwargs: Any,
    ) -> _T: ...

    @overload
    def run(fn: Callable[..., _T], /, *args: Any, stack: Literal["shared", "own"], **kwargs: Any) -> _T: ...

    @overload
    def run(fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T: ...


def run(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Make a loop, run ``fn`` in its first coro, close the loop; return the function's result or raise its exception.

    It works like :func:`asyncio.run`. When ``fn`` has returned, coros and tasks that are left are cancelled, and
    ``run`` waits for them. Ctrl-C cancels the first coro. If the coro that is running when Ctrl-C comes does not yield
    for 0.2 seconds, KeyboardInterrupt is raised in it. Coros that this thread spawned earlier, while no loop was
    running, run on this loop, too.

    With ``threads=N``, ``fn`` runs in this thread and in ``N - 1`` new ones. Each thread has a loop of its own and runs
    ``fn`` in the loop's first coro. The results come back as a list. See :func:`grapeshot.run`, also for ``restart``.

    Raises:
        RuntimeError: a loop is already running in this thread, or no more threads can be started.
        TypeError: ``fn`` cannot be called, or is an async function.
        ValueError: ``threads`` is less than 1.
    """
    _run.check_none_runs("coro.run()")
    _core._coro_check_function(fn, "run")
    if "threads" in kwargs:
        threads, restart = kwargs.pop("threads"), kwargs.pop("restart", False)
        return _run.run(lambda: run_sync(fn, *args, **kwargs), threads=threads, restart=restart)
    # In a coro that hides the loop, use new_event_loop(): it returns a loop that borrows the hidden one.
    loop = None if _core._coro_is_hidden() else take_pending_loop()
    return _run.run_on(loop or new_event_loop(), run_sync(fn, *args, **kwargs))


if TYPE_CHECKING:

    @overload
    def run_in_thread(
        fn: Callable[..., _T], /, *args: Any, executor: concurrent.futures.Executor | None, **kwargs: Any
    ) -> _T: ...

    @overload
    def run_in_thread(fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T: ...


def run_in_thread(  # type: ignore[misc]  # intended: an `fn` with an argument `executor` is not accepted
    fn: Callable[..., Any], /, *args: Any, executor: concurrent.futures.Executor | None = None, **kwargs: Any
) -> Any:
    """Run ``fn(*args, **kwargs)`` in a real thread while this coro waits; return its result or raise its exception.

    The thread comes from ``executor``, by default from the loop's default executor, which asyncio uses as well. That
    executor has ``min(32, CPUs + 4)`` threads, unless the program has set another one; further calls wait for a free
    thread. If the executor is a ThreadPoolExecutor (but not an InterpreterPoolExecutor), the function runs in a copy of
    the coro's context.

    An interruption of the coro does not stop the thread: a call that is running goes on, and its result is dropped. A
    call that has not begun is cancelled. Source: asyncio.to_thread.

    Raises:
        YieldFromMain: not called in a coro.
        TypeError: ``fn`` cannot be called, or is an async function.
        RuntimeError: the executor was shut down.
    """
    _core._coro_check_function(fn, "threads.run")
    coro = _core._coro_current()
    if executor is None or _runs_threads(executor):
        call: functools.partial[Any] = ThreadCall(contextvars.copy_context().run, fn, *args, **kwargs)
    else:
        call = functools.partial(fn, *args, **kwargs)
    return await_(coro._loop.run_in_executor(executor, call))


def _runs_threads(executor: concurrent.futures.Executor) -> bool:
    """Whether the executor is known to use threads of this interpreter, to which a context can be passed."""
    if not isinstance(executor, concurrent.futures.ThreadPoolExecutor):
        return False
    # InterpreterPoolExecutor (Python 3.14 and later) is a subclass, but each of its threads runs another interpreter.
    interpreters: type | None = getattr(concurrent.futures, "InterpreterPoolExecutor", None)
    return interpreters is None or not isinstance(executor, interpreters)
