"""The same program in several threads, each with a loop of its own: ``run(main, threads=N)``.

    calling thread    loop --- a task: starts the threads, waits for all --- a task: main()
    thread 2 ... N    loop --- a task: main()

All of them end together: if one fails, or if the calling thread is interrupted, the others are cancelled. The calling
thread waits for them in its own loop, so signals reach it as usual.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import Awaitable, Callable

from grapeshot._loop import new_event_loop

from .runner import Runner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_logger = logging.getLogger("asyncio")

# The delays before a failed main function is called again, in seconds: the first, and the longest.
_FIRST_DELAY_S = 0.1
_LAST_DELAY_S = 5.0
# How often the calling thread checks whether the other threads have ended, after they have reported their outcomes.
_CHECK_S = 0.001


def check(main: Any, threads: Any) -> None:
    """Raise TypeError or ValueError if ``main`` cannot run in ``threads`` threads."""
    if not callable(main):
        raise TypeError("run(threads=...) needs the async function itself, because each thread calls it")
    if not isinstance(threads, int) or isinstance(threads, bool):
        raise TypeError(f"threads must be an integer, not {type(threads).__name__}")
    if threads < 1:
        raise ValueError(f"threads must be 1 or more, got {threads}")


def warn_of_gil(threads: int) -> None:
    """Log a warning if the threads cannot run at the same time."""
    if threads > 1 and getattr(sys, "_is_gil_enabled", lambda: True)():
        _logger.warning(
            "%d threads are not faster than one here, because of the GIL: use a free-threaded Python, or processes",
            threads,
        )


class Threads:
    """The threads of one ``run(threads=...)``."""

    def __init__(
        self, main: Callable[[], Awaitable[Any]], count: int, *, debug: bool | None = None, restart: bool = False
    ) -> None:
        self._main = main
        self._debug = debug
        self._restart = restart
        self._others = [_Other(self, number) for number in range(2, count + 1)]
        # If true, a thread that has not called main() yet will never call it. Set before the other threads are
        # cancelled.
        self.is_over = False

    async def run(self) -> list[Any]:
        """Run main() in this thread and in the others. Return the results; the first one is that of this thread."""
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(self.supervise(threading.current_thread().name))]
        try:
            for other in self._others:
                waits.append(other.start())  # noqa: PERF401  # what has started must end, even if this fails
            pending = set(waits)
            # With FIRST_EXCEPTION, wait() would not return when a main function was cancelled.
            while pending and not any(wait.done() and _has_failed(wait) for wait in waits):
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.is_over = True
            waits[0].cancel()
            for other in self._others:
                other.cancel()
            await _all_ended(waits, self._others)
        failed = [wait for wait in waits if not wait.cancelled() and _has_failed(wait)]
        return [wait.result() for wait in failed or waits]

    async def supervise(self, name: str) -> Any:
        """Call main(). With ``restart``, call it again after each failure."""
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                return await self._main()
            except Exception as exc:
                if not self._restart:
                    exc.add_note(f"raised in thread {name!r}")
                    raise
                text = "The main function in thread %r failed; it is called again in %.1f seconds"
                _logger.error(text, name, delay_s, exc_info=exc)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LAST_DELAY_S)

    def run_other(self, other: _Other) -> Any:
        """Run main() in the thread that calls this."""
        with Runner(debug=self._debug, loop_factory=new_event_loop) as runner:
            return runner.run(other.main())


class _Other:
    """One of the further threads."""

    def __init__(self, threads: Threads, number: int) -> None:
        self._threads = threads
        self._name = f"grapeshot-{number}"
        self._thread: threading.Thread | None = None
        # Protects the next two attributes.
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None

    def start(self) -> asyncio.Future[Any]:
        """Start the thread. Return a future, which belongs to the calling thread's loop and gets the outcome."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        thread = threading.Thread(target=self._run, args=(loop, future), name=self._name)
        thread.start()
        self._thread = thread
        return future

    def is_alive(self) -> bool:
        """Whether the thread exists. It ends soon after it has reported its outcome."""
        return self._thread is not None and self._thread.is_alive()

    def _run(self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any]) -> None:
        try:
            result = self._threads.run_other(self)
        except BaseException as exc:
            report: tuple[Any, ...] = (_set_exception, future, exc)
        else:
            report = (_set_result, future, result)
        # RuntimeError: the loop is closed, because an exception has left it before all threads had ended.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(*report)

    async def main(self) -> Any:
        with self._lock:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        try:
            if self._threads.is_over:
                raise asyncio.CancelledError
            return await self._threads.supervise(self._name)
        finally:
            with self._lock:
                self._task = None

    def cancel(self) -> None:
        """Cancel main() in that thread, from any thread."""
        with self._lock:
            if self._loop is not None and self._task is not None:
                self._loop.call_soon_threadsafe(self._task.cancel)


def _has_failed(wait: asyncio.Future[Any]) -> bool:
    return wait.cancelled() or wait.exception() is not None


def _set_result(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], exc: BaseException) -> None:
    if future.done():
        return
    if isinstance(exc, asyncio.CancelledError):
        future.cancel()
    elif isinstance(exc, (SystemExit, KeyboardInterrupt)):
        # If the future had this exception itself, the task that awaits the future would raise it. The exception would
        # then leave the loop before the other threads have ended.
        future.set_exception(_Exit(exc))
    else:
        future.set_exception(exc)


class _Exit(Exception):  # noqa: N818  # not an error of the program
    """Carries a SystemExit or KeyboardInterrupt of another thread."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__()
        self.cause = cause


async def _all_ended(waits: list[asyncio.Future[Any]], others: list[_Other]) -> None:
    """Wait until all futures are done and the other threads have ended. If this task is cancelled meanwhile, raise
    CancelledError afterwards.
    """
    cancelled = None
    while pending := [wait for wait in waits if not wait.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as exc:
            cancelled = exc
    for wait in waits:
        if not wait.cancelled():
            wait.exception()  # so that it does not count as never retrieved
    # This loop must go on, because destructors of the other threads' local variables may wait for it.
    while any(other.is_alive() for other in others):
        try:
            await asyncio.sleep(_CHECK_S)
        except asyncio.CancelledError as exc:
            cancelled = exc
    if cancelled is not None:
        raise cancelled


async def run(
    main: Callable[[], Awaitable[Any]], count: int, *, debug: bool | None = None, restart: bool = False
) -> list[Any]:
    """Run ``main()`` in ``count`` threads: this one and further ones."""
    warn_of_gil(count)
    try:
        return await Threads(main, count, debug=debug, restart=restart).run()
    except _Exit as exc:
        raise exc.cause from None
