"""How a loop runs and closes; its executor, its asynchronous generators and its exception handler.

The iterations of the loop are native (``loop._run()``). This module does what asyncio's ``BaseEventLoop`` does
before and after them. Where Python versions differ, it behaves like the newest one on all of them: the executor's
shutdown has a timeout, and the exception handler runs in the context of the task or handle that failed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import os
import sys
import threading
import traceback
import warnings
import weakref
from asyncio import constants
from asyncio.log import logger
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator

from grapeshot import _core

from . import hooks, origins, signals
from .base import BaseLoop
from .checks import check_callback

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar, TypeVarTuple

    from .base import ExceptionHandler

    _T = TypeVar("_T")
    _Ts = TypeVarTuple("_Ts")

if hasattr(os, "register_at_fork"):
    # The native loop may hold back written data until the end of the current batch of steps. Without these hooks,
    # the parent and the child of a fork would both send that data.
    os.register_at_fork(before=_core._before_fork, after_in_child=_core._after_fork)

# --- running --------------------------------------------------------------------------------------


def run_forever(loop: BaseLoop) -> None:
    """Run until :meth:`stop` is called, or until a callback raises KeyboardInterrupt or SystemExit.

    Raises:
        RuntimeError: the loop is closed or already running, or another loop is running in this thread.
    """
    loop._check_closed()
    loop._check_running()
    track_coroutine_origins(loop, loop.get_debug())
    previous_hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(
        firstiter=functools.partial(_on_asyncgen_started, loop),
        finalizer=functools.partial(_on_asyncgen_dropped, loop),
    )
    asyncio._set_running_loop(loop)
    on_run = hooks.on_run
    try:
        if on_run is not None:
            on_run(loop)
        loop._run()
    finally:
        asyncio._set_running_loop(None)
        track_coroutine_origins(loop, False)
        sys.set_asyncgen_hooks(*previous_hooks)


def run_until_complete(loop: BaseLoop, future: Generator[Any, None, _T] | Awaitable[_T]) -> _T:
    """Run until ``future`` (a future of this loop, or a coroutine, which becomes a task) is done; return its result.

    Raises:
        RuntimeError: like :meth:`run_forever`, and if the loop was stopped before the future was done.
        TypeError: ``future`` is not awaitable.
        ValueError: ``future`` belongs to another loop.
        Exception: the future's own exception, which may be CancelledError.
    """
    loop._check_closed()
    if hooks.borrow is not None and loop.is_running() and (borrowed := hooks.borrow(loop)) is not None:
        try:
            return borrowed.run_until_complete(future)  # type: ignore[no-any-return]
        finally:
            borrowed.detach()
    loop._check_running()
    is_our_task = not asyncio.isfuture(future)
    awaited: asyncio.Future[_T] = asyncio.ensure_future(future, loop=loop)  # type: ignore[arg-type]
    if is_our_task:
        # If the task is still pending at the end, this function raises. A log entry would say nothing new.
        awaited._log_destroy_pending = False  # type: ignore[attr-defined]
    awaited.add_done_callback(_stop_when_done)
    loop._awaited = awaited
    try:
        loop.run_forever()
    except BaseException:
        if is_our_task and awaited.done() and not awaited.cancelled():
            awaited.exception()  # The caller never sees the task, so mark its exception as retrieved.
        raise
    finally:
        loop._awaited = None
        awaited.remove_done_callback(_stop_when_done)
    if not awaited.done():
        raise RuntimeError("Event loop stopped before Future completed.")
    return awaited.result()


def _stop_when_done(future: asyncio.Future[Any]) -> None:
    if not future.cancelled() and isinstance(future.exception(), (SystemExit, KeyboardInterrupt)):
        return  # This exception is about to end run_forever(). A stop() now would end the *next* run.
    asyncio.futures._get_loop(future).stop()  # type: ignore[attr-defined]


def close(loop: BaseLoop) -> None:
    """Close the loop: drop all scheduled callbacks, reset its signals to their default actions, close its descriptors.

    Idempotent. close() tells the executor to stop, but does not wait for it. Call :meth:`shutdown_asyncgens` and
    :meth:`shutdown_default_executor` first, as ``run()`` does.

    Raises:
        RuntimeError: the loop is running.
    """
    if loop.is_running():
        raise RuntimeError("Cannot close a running event loop")
    if loop.is_closed():
        return
    if loop.get_debug():
        logger.debug("Close %r", loop)
    before_close = hooks.before_close
    try:
        if before_close is not None:
            before_close(loop)
    finally:
        if loop._measuring is not None:
            loop._measuring.close()
        _close_now(loop)


def _close_now(loop: BaseLoop) -> None:
    try:
        signals.remove_all(loop)
    finally:
        loop._close()
        if loop._resolver is not None:
            loop._resolver.close()
            loop._resolver = None
        if loop._grapeshot_aio is not None:
            loop._grapeshot_aio.stop()
            loop._grapeshot_aio = None
        loop._executor_shutdown_called = True
        executor = loop._default_executor
        if executor is not None:
            loop._default_executor = None
            executor.shutdown(wait=False)


# Objects that forget_parent() has taken from loops. They are kept until the process ends, so that none of their
# cleanup code runs.
_forgotten: list[object] = []


def forget_parent(loop: BaseLoop) -> None:
    """In the child of a fork: forget all that the parent has scheduled or watches, and give the loop a new poller."""
    loop._forget_parent()
    if loop._asyncgens is not None:
        _forgotten.append(list(loop._asyncgens))
        loop._asyncgens = None
    _forgotten.append((loop._default_executor, loop._coro_executors))
    loop._default_executor = loop._coro_executors = None
    for answers in (loop._resolver, loop._grapeshot_aio):
        if answers is not None:
            answers.forget_parent()


# --- debug mode -----------------------------------------------------------------------------------


def set_debug(loop: BaseLoop, enabled: bool) -> None:
    """Switch debug mode on or off.

    In debug mode, slow callbacks are logged, calls in the wrong thread raise, and coroutines record where they were
    created.
    """
    _core.Loop.set_debug(loop, enabled)
    if loop.is_running():
        # The tracking depth is a setting of the thread, so the thread that runs the loop has to change it.
        loop.call_soon_threadsafe(track_coroutine_origins, loop, enabled)


def track_coroutine_origins(loop: BaseLoop, enabled: bool) -> None:
    """Make coroutines of this thread record where they are created, or restore the depth that was set before."""
    if bool(enabled) == (loop._coroutine_origin_depth is not None):
        return
    if enabled:
        loop._coroutine_origin_depth = sys.get_coroutine_origin_tracking_depth()
        sys.set_coroutine_origin_tracking_depth(constants.DEBUG_STACK_DEPTH)
    elif loop._coroutine_origin_depth is not None:
        sys.set_coroutine_origin_tracking_depth(loop._coroutine_origin_depth)
        loop._coroutine_origin_depth = None


# --- asynchronous generators ----------------------------------------------------------------------


def _on_asyncgen_started(loop: BaseLoop, asyncgen: AsyncGenerator[Any, Any]) -> None:
    if loop._asyncgens_shutdown_called:
        warnings.warn(
            f"asynchronous generator {asyncgen!r} was scheduled after loop.shutdown_asyncgens() call",
            ResourceWarning,
            stacklevel=2,
            source=loop,
        )
    if loop._asyncgens is None:
        loop._asyncgens = weakref.WeakSet()
    loop._asyncgens.add(asyncgen)
    if loop._ledger is not None:
        loop._ledger.asyncgen_started(asyncgen)


def _on_asyncgen_dropped(loop: BaseLoop, asyncgen: AsyncGenerator[Any, Any]) -> None:
    # This runs in the thread that dropped the last reference to the generator, which may not be the loop's thread.
    if loop._asyncgens is not None:
        loop._asyncgens.discard(asyncgen)
    if not loop.is_closed():
        loop.call_soon_threadsafe(loop.create_task, asyncgen.aclose())


async def shutdown_asyncgens(loop: BaseLoop) -> None:
    """Close every asynchronous generator that was iterated on this loop. Starting another one later causes a warning.

    If the cleanup of a generator raises, the exception handler is called, and the others are still closed.
    """
    loop._asyncgens_shutdown_called = True
    if not loop._asyncgens:
        return
    closing = list(loop._asyncgens)
    loop._asyncgens.clear()
    results = await asyncio.gather(*(asyncgen.aclose() for asyncgen in closing), return_exceptions=True)
    for result, asyncgen in zip(results, closing, strict=True):
        if isinstance(result, Exception):
            loop.call_exception_handler(
                {
                    "message": f"an error occurred during closing of asynchronous generator {asyncgen!r}",
                    "exception": result,
                    "asyncgen": asyncgen,
                }
            )


# --- executor -------------------------------------------------------------------------------------


def run_in_executor(
    loop: BaseLoop,
    executor: concurrent.futures.Executor | None,
    func: Callable[[*_Ts], _T],
    *args: *_Ts,
) -> asyncio.Future[_T]:
    """Call ``func(*args)`` in ``executor``; return a future of the result.

    None means the default executor, which is created on first use.

    Raises:
        RuntimeError: the loop is closed, or the default executor was shut down.
        TypeError: in debug mode, ``func`` is not a plain callable.
    """
    loop._check_closed()
    if loop.get_debug():
        check_callback(func, "run_in_executor")
    if executor is None:
        if loop._executor_shutdown_called:
            raise RuntimeError("Executor shutdown has been called")
        executor = loop._default_executor
        if executor is None:
            executor = concurrent.futures.ThreadPoolExecutor(thread_name_prefix="asyncio")
            loop._default_executor = executor
        job = executor.submit(func, *args)
        if loop._ledger is not None:
            loop._ledger.job_submitted(job)
        return asyncio.wrap_future(job, loop=loop)
    return asyncio.wrap_future(executor.submit(func, *args), loop=loop)


def set_default_executor(loop: BaseLoop, executor: concurrent.futures.Executor) -> None:
    """Use ``executor`` as the default. The previous one is not shut down.

    Raises:
        TypeError: ``executor`` is not a :class:`concurrent.futures.ThreadPoolExecutor`.
    """
    if not isinstance(executor, concurrent.futures.ThreadPoolExecutor):
        raise TypeError("executor must be ThreadPoolExecutor instance")
    loop._default_executor = executor


async def shutdown_default_executor(loop: BaseLoop, timeout: float | None = None) -> None:
    """Wait until the default executor has finished its work and its threads have ended. It accepts no more work.

    ``timeout`` is in seconds, None means no limit. When the time is over, the executor is told to stop, this method no
    longer waits for it, and a RuntimeWarning is issued. The argument works on every Python version (in asyncio: 3.12+).
    """
    loop._executor_shutdown_called = True
    executor, with_coros = loop._default_executor, list(loop._coro_executors or ())
    if executor is None and not with_coros:
        return
    finished: asyncio.Future[None] = loop.create_future()
    joiner = threading.Thread(target=_shut_down, args=(loop, executor, with_coros, finished))
    joiner.start()
    try:
        async with asyncio.timeout(timeout):
            await finished
    except TimeoutError:
        warnings.warn(
            # asyncio's words, with its grammatical error
            f"The executor did not finishing joining its threads within {timeout} seconds.",
            RuntimeWarning,
            stacklevel=2,
        )
        if executor is not None:
            executor.shutdown(wait=False)
    else:
        if sys.version_info < (3, 13):
            # On these versions join() waits for a lock, and tools that detect blocking calls report such a wait. So
            # sleep until the thread has ended.
            while joiner.is_alive():  # noqa: ASYNC110
                await asyncio.sleep(1e-6)
        joiner.join()


def _shut_down(
    loop: BaseLoop,
    executor: concurrent.futures.Executor | None,
    with_coros: list[Any],
    finished: asyncio.Future[None],
) -> None:
    """Runs in the joining thread: wait for the executors, then tell the loop, unless it has been closed."""
    error: Exception | None = None
    try:
        if executor is not None:
            executor.shutdown(wait=True)
        # The executors whose workers are coros may be used again on another loop, so they are not shut down. But their
        # coros end with this loop, so wait for the jobs.
        for other in with_coros:
            other._wait_for_jobs()
    except Exception as exc:
        error = exc
    try:
        loop.call_soon_threadsafe(_finish_shutdown, finished, error)
    except RuntimeError:
        if not loop.is_closed():
            raise


def _finish_shutdown(finished: asyncio.Future[None], error: Exception | None) -> None:
    if finished.done():
        return  # the timeout has expired, or the waiting task was cancelled
    if error is None:
        finished.set_result(None)
    else:
        finished.set_exception(error)


# --- errors ---------------------------------------------------------------------------------------


def get_exception_handler(loop: BaseLoop) -> ExceptionHandler | None:
    """Return the handler set by :meth:`set_exception_handler`, or None if the default one is in use."""
    return loop._exception_handler


def set_exception_handler(loop: BaseLoop, handler: ExceptionHandler | None) -> None:
    """Call ``handler(loop, context)`` for every error that is not handled elsewhere. None restores the default handler.

    Raises:
        TypeError: ``handler`` is neither callable nor None.
    """
    if handler is not None and not callable(handler):
        raise TypeError(f"A callable object or None is expected, got {handler!r}")
    loop._exception_handler = handler


def default_exception_handler(loop: BaseLoop, context: dict[str, Any]) -> None:
    """Log ``context`` as one ERROR record of the ``asyncio`` logger: the message, then the other keys, sorted.

    The record includes the exception's traceback. In debug mode it says where the failing object was created. For that
    purpose, the function may add the keys ``source_traceback``, ``in_coro`` and ``handle_traceback`` to ``context``.
    """
    exception = context.get("exception")
    exc_info: Any = False
    if exception is not None:
        exc_info = (type(exception), exception, exception.__traceback__)
    if loop.get_debug():
        origins.complete(context)
    if "source_traceback" not in context:
        created = getattr(getattr(loop, "_current_handle", None), "_source_traceback", None)
        if created:
            context["handle_traceback"] = created
    lines = [context.get("message") or "Unhandled exception in event loop"]
    for key in sorted(context):
        if key in ("message", "exception"):
            continue
        lines.append(f"{key}: {_describe(key, context[key])}")
    logger.error("\n".join(lines), exc_info=exc_info)


def _describe(key: str, value: Any) -> str:
    kind = {"source_traceback": "Object", "handle_traceback": "Handle"}.get(key)
    if kind is None:
        return repr(value)
    stack = "".join(traceback.format_list(value)).rstrip()
    return f"{kind} created at (most recent call last):\n{stack}"


def call_exception_handler(loop: BaseLoop, context: dict[str, Any]) -> None:
    """Call the current exception handler with an error that no caller receives.

    ``context`` has ``message`` and, where they apply, ``exception``, ``future``, ``task``, ``coro``, ``handle``,
    ``protocol``, ``transport``, ``socket``, ``asyncgen``, ``source_traceback``. A custom handler runs in the context of
    the task, future or handle. This method raises nothing but KeyboardInterrupt and SystemExit: if a custom handler
    fails, the default handler reports that, and if the default handler fails, that is logged.
    """
    handler = loop._exception_handler
    if handler is None:
        _default_or_log(loop, context, "Exception in default exception handler")
        return
    try:
        run_context = _context_of(context)
        if run_context is None:
            handler(loop, context)
        else:
            run_context.run(handler, loop, context)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as exc:
        _default_or_log(
            loop,
            {"message": "Unhandled error in exception handler", "exception": exc, "context": context},
            "Exception in default exception handler while handling an unexpected error in custom exception handler",
        )


def _default_or_log(loop: BaseLoop, context: dict[str, Any], log_message: str) -> None:
    try:
        loop.default_exception_handler(context)  # a method call, because a subclass may override it
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException:
        logger.error(log_message, exc_info=True)


def _context_of(context: dict[str, Any]) -> Any:
    """Return the contextvars context of the task, future or handle in ``context``, or None if there is none."""
    for key in ("task", "future", "handle"):
        thing = context.get(key)
        if thing is not None:
            run_context = thing.get_context() if hasattr(thing, "get_context") else None
            return run_context if hasattr(run_context, "run") else None
    return None
