"""``BorrowedLoop``: the loop that asyncio code gets if it asks for a new loop in a coro that hides the running one.

Such a coro already runs on a loop, which asyncio's functions do not see there. A second loop would block the thread. So
the coro borrows the loop that runs it, which is called the host here:

    coro (hides the loop)                      the host
    asyncio.run(main())
      loop = asyncio.new_event_loop()  ------> a BorrowedLoop, host = the coro's loop
      loop.run_until_complete(main())  ------> main() is a task of the host; the coro waits
                                               get_running_loop() in main() returns the host
      cancels the tasks of this run that are left
      loop.close()                     ------> ends the run; the host runs on

The code that runs on one BorrowedLoop is called a run; ``close()`` ends it. The methods that run, stop and close a loop
affect only this run. So do the methods that set the exception handler, or shut down asynchronous generators and the
default executor. Debug mode affects the host, but only until the run ends. Every other method calls the host's method
of the same name. A BorrowedLoop belongs to the host's thread.
"""

from __future__ import annotations

import _thread
import asyncio
import inspect
import warnings

from grapeshot import _core
from grapeshot._loop import lifecycle

from ._borrowing import Run
from ._bridge import wait_for_future

TYPE_CHECKING = False
if TYPE_CHECKING:
    import contextvars
    from collections.abc import Callable
    from typing import Any

    from grapeshot._loop import Loop

    from ._coroutine import Coro


class _Turn:
    """One ``run_...`` call of a borrowed loop. It ends when its future is done, or when ``stop()`` is called.

    A coro waits for this object with ``wait_for_future``, so the object has all methods that this function calls.
    """

    def __init__(self, future: asyncio.Future[Any] | None) -> None:
        self._future = future
        self._is_stopped = False
        self._wakeup: Callable[..., object] | None = None
        # the SystemExit or KeyboardInterrupt that a task or callback has raised
        self.leaving: BaseException | None = None

    def __repr__(self) -> str:
        return f"<run of {self._future!r}>" if self._future is not None else "<run until stop()>"

    def stop(self) -> None:
        self._is_stopped = True
        if self._wakeup is not None:
            self._wakeup()

    def leave(self, exc: BaseException) -> None:
        if self.leaving is None:
            self.leaving = exc
        self.stop()

    def done(self) -> bool:
        return self._is_stopped or (self._future is not None and self._future.done())

    def cancel(self, msg: Any = None) -> bool:
        return self._future is not None and self._future.cancel(msg=msg)

    def cancelled(self) -> bool:
        """Whether the future was cancelled, or ``stop()`` came before the future was done."""
        if self._future is None:
            return False
        return self._future.cancelled() or (self._is_stopped and not self._future.done())

    def add_done_callback(self, wakeup: Callable[..., object]) -> None:
        self._wakeup = wakeup
        if self._future is not None:
            self._future.add_done_callback(wakeup)

    def remove_done_callback(self, wakeup: Callable[..., object]) -> None:
        self._wakeup = None
        if self._future is not None:
            self._future.remove_done_callback(wakeup)


class BorrowedLoop(asyncio.AbstractEventLoop):
    """The loop that ``asyncio.new_event_loop()`` returns in a coro that hides the loop.

    ``run_until_complete`` and ``run_forever`` make the coro wait while the loop that runs the coro goes on. ``close``
    cancels the tasks of this run that are left, and waits for them; it does not close the loop that runs the coro.
    """

    def __init__(self, host: Loop) -> None:
        self._host = host
        self._turn: _Turn | None = None
        self._is_closed = False
        self._stops_at_once = False
        self._own_debug: bool | None = None
        self._exception_handler: Any = None
        self._asyncgens_shutdown_called = False
        self._run = Run(host, self.stop, self._leave)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} running={self.is_running()} closed={self._is_closed} of {self._host!r}>"

    def __getattr__(self, name: str) -> Any:
        if name in {"_host", "_run"}:  # __init__ failed before it set them
            raise AttributeError(name)
        return getattr(self._host, name)

    def __del__(self, _warn: Any = warnings.warn, _get_ident: Any = _thread.get_ident) -> None:
        if vars(self).get("_run") is None or self._is_closed:
            return
        _warn(f"unclosed event loop {self!r}", ResourceWarning, source=self)
        host, run = self._host, self._run
        if host._thread_id in (None, _get_ident()):
            self._abandon(host, run)
            return
        # The garbage collector may call this in any thread, so leave the work to the host.
        try:
            host.call_soon_threadsafe(self._abandon, host, run)
        except RuntimeError:
            pass  # the host was closed

    @staticmethod
    def _abandon(host: Loop, run: Run) -> None:
        """End a run whose loop was dropped but not closed."""
        if not host.is_closed():
            for task in run.left():
                task.cancel()
        run.end()

    # ------------------------------------------------------------------ running

    def run_forever(self) -> None:
        """Wait in the coro until :meth:`stop` is called. Raises the same exceptions as :meth:`run_until_complete`."""
        self._wait(None)

    def run_until_complete(self, future: Any) -> Any:
        """Wait in the coro until ``future`` is done; return its result.

        A coroutine becomes a task of the loop that runs the coro. If the coro is interrupted, the future is cancelled;
        the interruption is raised here once the cancelled future has ended. If the future ends with a result or an
        exception all the same, the interruption is dropped.

        Raises:
            RuntimeError: the loop is closed or already running; another loop is running; the call does not come from
                a coro of the host; or the loop was stopped before the future was done.
            TypeError, ValueError: as in asyncio's own loops.
            Exception: the exception of the future, CancelledError included.
        """
        self._check_can_run()
        is_our_task = not asyncio.isfuture(future)
        awaited = self._as_future(future)
        if is_our_task:
            awaited._log_destroy_pending = False
        try:
            self._wait(awaited)
        except BaseException:
            if is_our_task and awaited.done() and not awaited.cancelled():
                awaited.exception()  # mark it as retrieved, because the caller never sees the task
            raise
        if not awaited.done():
            raise RuntimeError("Event loop stopped before Future completed.")
        return awaited.result()

    def _check_can_run(self) -> Coro[Any]:
        self._check_closed()
        if self._turn is not None:
            raise RuntimeError("This event loop is already running")
        if asyncio._get_running_loop() is not None:
            raise RuntimeError("Cannot run the event loop while another loop is running")
        coro: Coro[Any] | None = _core._coro_current_or_none()
        if coro is None or coro._loop is not self._host or not _core._coro_is_hidden():
            raise RuntimeError(f"this loop borrows {self._host!r}: only a coro of that loop can run it")
        return coro

    def _as_future(self, future: Any) -> Any:
        if asyncio.isfuture(future):
            if future.get_loop() not in (self._host, self):
                raise ValueError("The future belongs to a different loop than the one specified as the loop argument")
            return future
        if not asyncio.iscoroutine(future):
            if not inspect.isawaitable(future):
                raise TypeError("An asyncio.Future, a coroutine or an awaitable is required")
            future = _await(future)
        return self.create_task(future)

    def _wait(self, future: asyncio.Future[Any] | None) -> None:
        coro = self._check_can_run()
        turn = self._turn = _Turn(future)
        if self._stops_at_once:
            self._stops_at_once = False
            self._host.call_soon(turn.stop)
        try:
            interruption = wait_for_future(coro, turn)
        finally:
            self._turn = None
        try:
            if turn.leaving is not None:
                raise turn.leaving
            if interruption is not None:
                raise interruption
        finally:
            del coro, turn, interruption  # the exception refers to this frame: break the cycle

    def _leave(self, exc: BaseException) -> bool:
        """Raise the exception in the coro that waits for this run. Return False if no coro waits."""
        if self._turn is None:
            return False
        self._turn.leave(exc)
        return True

    def stop(self) -> None:
        """Make the current call of :meth:`run_forever` or :meth:`run_until_complete` return.

        If no such call is in progress, the next one returns in the next iteration of the host.
        """
        if self._turn is not None:
            self._turn.stop()
        else:
            self._stops_at_once = True

    def is_running(self) -> bool:
        """Whether a coro is waiting in :meth:`run_forever` or :meth:`run_until_complete`."""
        return self._turn is not None

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """End this run: cancel its tasks that are left. In a coro that hides the host, also wait until they have ended.

        Raises:
            RuntimeError: the loop is running.
        """
        if self._turn is not None:
            raise RuntimeError("Cannot close a running event loop")
        if self._is_closed:
            return
        left = set() if self._host.is_closed() else self._run.left()
        try:
            for task in left:
                task.cancel()
            if left and _core._coro_is_hidden() and asyncio._get_running_loop() is None:
                self._wait(asyncio.gather(*left, return_exceptions=True))
                self._report(left)
        finally:
            self._is_closed = True
            self._run.end()

    def _report(self, ended: set[Any]) -> None:
        for task in ended:
            if task.done() and not task.cancelled() and task.exception() is not None:
                message = "unhandled exception in a task that was cancelled because its loop was closed"
                self.call_exception_handler({"message": message, "exception": task.exception(), "task": task})

    def is_closed(self) -> bool:
        """Whether :meth:`close` was called, or the host is closed."""
        return self._is_closed or self._host.is_closed()

    def _check_closed(self) -> None:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")

    def detach(self) -> None:
        """End this run without cancelling its tasks, which go on as tasks of the host."""
        self._is_closed = True
        self._run.end()

    @property
    def _asyncgens(self) -> Any:
        return self._run.asyncgens

    async def shutdown_asyncgens(self) -> None:
        """Close the asynchronous generators that were first iterated in this run."""
        if self._host._asyncgens is not None:
            self._host._asyncgens -= self._run.asyncgens
        await lifecycle.shutdown_asyncgens(self)  # type: ignore[arg-type]  # it needs only attributes that self has

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Wait until the jobs that this run submitted to the default executor have ended. The executor itself goes on.

        ``timeout`` is in seconds; None means no limit. If jobs are left after that time, a RuntimeWarning says so.
        """
        jobs = [asyncio.wrap_future(job, loop=self._host) for job in list(self._run.jobs)]
        if not jobs:
            return
        _, left = await asyncio.wait(jobs, timeout=timeout)
        if left:
            message = f"{len(left)} jobs of the executor did not end within {timeout} seconds"
            warnings.warn(message, RuntimeWarning, stacklevel=2)

    # ------------------------------------------------------------------ tasks, errors, debug mode

    def create_task(self, coro: Any, *, context: contextvars.Context | None = None, **kwargs: Any) -> Any:
        """Create a task on the loop that runs the coro. The task belongs to this run."""
        self._check_closed()
        context = self._run.mark(context)
        task = self._with_loop_shown(lambda: self._host.create_task(coro, context=context, **kwargs))
        self._run.add(task)
        return task

    def _with_loop_shown(self, function: Callable[[], Any]) -> Any:
        """Call ``function`` with the loop visible, because ``function`` may run the first step of a task at once."""
        if not _core._coro_is_hidden() or asyncio._get_running_loop() is not None:
            return function()
        _core._coro_show_loop(None)
        try:
            return function()
        finally:
            _core._coro_hide_loop()

    def get_exception_handler(self) -> Any:
        """Return this run's handler, or None if errors go to the host's handler."""
        return self._exception_handler

    def set_exception_handler(self, handler: Any) -> None:
        """Set the handler of :meth:`call_exception_handler` for this run. TypeError unless it is callable or None."""
        lifecycle.set_exception_handler(self, handler)  # type: ignore[arg-type]

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Pass an error to this run's handler, or to the host's if this run has none."""
        if self._exception_handler is None:
            self._host.call_exception_handler(context)
        else:
            lifecycle.call_exception_handler(self, context)  # type: ignore[arg-type]

    def get_debug(self) -> bool:
        """Return the mode that :meth:`set_debug` has set for this run. If it has set none, return the host's mode."""
        return self._host.get_debug() if self._own_debug is None else self._own_debug

    def set_debug(self, enabled: bool) -> None:
        """Switch debug mode on until this run ends, or off again.

        After ``set_debug(False)``, the host stays in debug mode as long as another run wants debug mode. It also stays
        in debug mode if it was in that mode before any run asked for it.
        """
        self._own_debug = bool(enabled)
        self._run.set_debug(self._host, self._own_debug)


async def _await(awaitable: Any) -> Any:
    return await awaitable


def _forward(name: str) -> Callable[..., Any]:
    """Make a method that calls the host's method. Callbacks and tasks that the call schedules belong to this run."""

    def method(self: BorrowedLoop, /, *args: Any, **kwargs: Any) -> Any:
        self._check_closed()
        return self._run.mark(None).run(getattr(self._host, name), *args, **kwargs)

    method.__name__ = name
    method.__qualname__ = f"BorrowedLoop.{name}"
    method.__doc__ = f"Call ``{name}`` of the host, the loop that this loop borrows."
    return method


# __getattr__ cannot forward these methods: Python finds those of AbstractEventLoop, which raise NotImplementedError.
for _name in dir(asyncio.AbstractEventLoop):
    if not _name.startswith("_") and _name not in vars(BorrowedLoop):
        setattr(BorrowedLoop, _name, _forward(_name))
