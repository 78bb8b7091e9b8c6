"""The bridge to asyncio: awaitables in coros, blocking-style functions in asyncio, real threads.

A coroutine that a coro awaits runs on the coro's own stack, and sees the coro as the current task: ``asyncio.timeout``,
TaskGroup and cancellation work.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
from collections.abc import Awaitable, Callable, Coroutine
from types import CoroutineType

from grapeshot import _core, _run
from grapeshot._loop import new_event_loop

from ._coroutine import Coro, Wakeup, check_started
from ._errors import Interrupted, Shutdown, YieldFromMain
from ._event_loop import pending_loop, take_pending_loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from contextvars import Context
    from typing import Any, Literal, ParamSpec, TypeVar, overload

    _P = ParamSpec("_P")
    _T = TypeVar("_T")


class _WrappedInterrupt(Interrupted):
    """Wraps, as its ``value``, another exception that interrupts a coro, and is raised in coroutines instead of it.

    asyncio's code expects that only CancelledError interrupts it. After another exception TaskGroup would not end its
    tasks.
    """


# Returns the loop also in a coro that hides it, None where no loop runs.
find_running_loop = _core._coro_running_loop
# For the modules that do not import asyncio.
all_tasks = asyncio.all_tasks
current_task = asyncio.current_task


def own_loop() -> Any:
    """Return the loop that coros made here belong to: the one that runs, or the thread's next."""
    return find_running_loop() or pending_loop()


def await_(awaitable: Awaitable[_T]) -> _T:
    """Run an asyncio awaitable to its end while this coro waits; return its result or raise its exception.

    For the awaitable this is like ``await`` in a task. An interruption of any kind is like a cancellation: the future
    that the coro waits for is cancelled, the coroutine sees CancelledError, and once both have ended the interruption
    is raised in the coro. After several calls that did not have to wait, the next one begins with a yield
    (``set_selfishness``), where the coro can be interrupted, too. If the awaitable is a coro, it returns its result, or
    raises what :meth:`Coro.result` raises.

    Raises:
        YieldFromMain: not called in a coro. A coroutine is then closed, so that no warning says that it was never
            awaited.
        TypeError: ``awaitable`` cannot be awaited.
        RuntimeError: it is the coro itself, a pending future of another loop, or a coroutine that somebody else awaits.
        NotStartedError: it is a coro that was not started.
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
                awaitable.close()  # as a task that is cancelled before its first step
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
        # The exception keeps this frame, and the coro keeps the exception: break the reference cycle.
        del coro, awaitable


async def _await(awaitable: Awaitable[Any]) -> Any:
    """Make a coroutine of an awaitable. The interpreter checks the object, and raises the right error."""
    return await awaitable


def _drive(coro: Any, steps: Any) -> Any:
    """Run a coroutine on this coro's stack, as a task does in its steps."""
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
        coro = steps = awaited = raised = interruption = None  # as in await_


def _show_loop(coro: Any, steps: Any) -> None:
    """Show the loop, which the coro hides, to the coroutine that it awaits."""
    try:
        _core._coro_show_loop(coro)
    except BaseException:
        steps.close()
        raise


def _yield() -> BaseException | None:
    """Let everything run that is ready; return the exception that has interrupted the coro meanwhile."""
    try:
        _core._coro_yield_slice()
    except BaseException as interruption:
        return interruption
    return None


def _check_future(coro: Coro[Any], future: Any) -> None:
    """Check that a coroutine has yielded a future to wait for. Raises RuntimeError otherwise, as a task does."""
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
    """Wait until ``future`` is done. Return the exception that has interrupted the wait, or None.

    An interruption cancels the future, and is delayed until the future is done. If the future ends otherwise, it has
    refused to be cancelled: then there was no interruption, as for a task.
    """
    interruption: BaseException | None = None
    wakeup: Any = Wakeup(coro)
    future.add_done_callback(wakeup)
    coro._awaited = future
    try:
        while True:
            latest = _core._coro_wait_for_wake()
            if latest is not None:
                if not isinstance(interruption, Shutdown):
                    interruption = latest
                if not future.cancel(msg=_message(latest)):
                    return interruption
            elif future.done():
                return interruption if future.cancelled() else None
    finally:
        wakeup.is_over = True
        if not future.done():
            future.remove_done_callback(wakeup)
        coro._awaited = None
        coro = future = wakeup = interruption = latest = None  # as in await_


def _message(interruption: BaseException) -> Any:
    """Return the message for cancelling a future: the message of the cancel() that has interrupted the coro."""
    if type(interruption) is asyncio.CancelledError and interruption.args:
        return interruption.args[0]
    return None


if TYPE_CHECKING:

    @overload
    async def run_sync(
        fn: Callable[..., _T],
        /,
        *args: Any,
        name: object,
        context: Context | None = None,
        stack: Literal["shared", "own"] = "shared",
        **kwargs: Any,
    ) -> _T: ...

    @overload
    async def run_sync(
        fn: Callable[..., _T],
        /,
        *args: Any,
        context: Context | None,
        stack: Literal["shared", "own"] = "shared",
        **kwargs: Any,
    ) -> _T: ...

    @overload
    async def run_sync(fn: Callable[..., _T], /, *args: Any, stack: Literal["shared", "own"], **kwargs: Any) -> _T: ...

    @overload
    async def run_sync(fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T: ...


async def run_sync(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run blocking-style code in a coro while the calling task waits; return its result or raise its exception.

    The function may wait with everything in :mod:`grapeshot.coro`, also with ``await_``. It runs in a copy of the
    task's context. Cancelling the task cancels the coro. ``name``, ``context`` and ``stack`` are those of ``spawn``.
    """
    return await _core._coro_spawn(fn, *args, **kwargs)


if TYPE_CHECKING:

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
    """Make a loop, run ``fn`` as its first coro, close the loop; return the function's result or raise its exception.

    It works like :func:`asyncio.run`: Ctrl-C cancels the first coro; coros and tasks that are left in the end are
    cancelled, and ``run`` waits for them. A coro that runs when Ctrl-C comes, and does not yield for 0.2 seconds, gets
    KeyboardInterrupt. Coros that this thread has spawned before, while no loop ran, run from the start, too.

    Raises:
        RuntimeError: a loop is running in this thread.
        TypeError: ``fn`` cannot be called, or is an async function.
    """
    _run.check_none_runs("coro.run()")
    _core._coro_check_function(fn, "run")
    # In a coro that hides the loop a new loop is that loop again.
    loop = None if _core._coro_is_hidden() else take_pending_loop()
    return _run.run_on(loop or new_event_loop(), run_sync(fn, *args, **kwargs))


if TYPE_CHECKING:

    @overload
    def run_in_thread(
        fn: Callable[..., _T], /, *args: Any, executor: concurrent.futures.Executor | None, **kwargs: Any
    ) -> _T: ...

    @overload
    def run_in_thread(fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T: ...


def run_in_thread(  # type: ignore[misc]  # a function with an argument of that name is not accepted, indeed
    fn: Callable[..., Any], /, *args: Any, executor: concurrent.futures.Executor | None = None, **kwargs: Any
) -> Any:
    """Run ``fn(*args, **kwargs)`` in a real thread while this coro waits; return its result or raise its exception.

    The thread belongs to ``executor``, by default to the loop's default executor, which all of asyncio shares. It has
    ``min(32, CPUs + 4)`` threads; further calls wait for a free one. The function runs in a copy of the coro's context,
    unless the executor's functions do not run in threads of this interpreter.

    An interruption of the coro does not reach the thread: a call that runs goes on, and its result is dropped; a call
    that has not begun is cancelled. Source: asyncio.to_thread.

    Raises:
        YieldFromMain: not in a coro.
        TypeError: ``fn`` cannot be called, or is an async function.
        RuntimeError: the executor was shut down.
    """
    _core._coro_check_function(fn, "threads.run")
    coro = _core._coro_current()
    if executor is None or _runs_threads(executor):
        call = functools.partial(contextvars.copy_context().run, fn, *args, **kwargs)
    else:
        call = functools.partial(fn, *args, **kwargs)
    return await_(coro._loop.run_in_executor(executor, call))


def _runs_threads(executor: concurrent.futures.Executor) -> bool:
    """Whether the executor's threads belong to this interpreter, so that they can use a context."""
    if not isinstance(executor, concurrent.futures.ThreadPoolExecutor):
        return False
    # From 3.14 on there is an executor whose threads belong to other interpreters.
    interpreters: type | None = getattr(concurrent.futures, "InterpreterPoolExecutor", None)
    return interpreters is None or not isinstance(executor, interpreters)
