"""Runs Celery's worker in a coro, and its signal handlers in coros of their own."""

from __future__ import annotations

import functools
import os
import threading

from celery import platforms  # type: ignore[import-untyped]
from celery.exceptions import WorkerTerminate  # type: ignore[import-untyped]
from celery.worker import state  # type: ignore[import-untyped]

from grapeshot import _core, coro
from grapeshot.coro import _bridge, _hiding
from grapeshot.coro._patching import _thread

from ._redis import MessageWait

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# If a signal handler has waited this long for a task that computes, the next shutdown signal ends the process.
_PATIENCE_S = 1.0
_monotonic = _core._coro_monotonic


def prepare(controller: Any) -> None:
    """Let this worker run in a coro, with blocking calls. Otherwise it would use kombu's own event loop."""
    controller.use_eventloop = False
    controller.start = functools.partial(_start, controller, controller.start)


def _start(controller: Any, start: Callable[[], None]) -> None:
    if _core._coro_current_or_none() is None:
        coro.run(_run, controller, start, name="celery")
    else:
        _run_with_signals(controller, start)


def _run(controller: Any, start: Callable[[], None]) -> None:
    # These functions are the originals, so this compares real threads. Only a coro that runs in the program's main
    # thread may stand for the main thread.
    is_main = threading.get_ident() == threading.main_thread().ident
    if is_main:
        _thread.begin_main()
    try:
        coro.call_blocking(_run_with_signals, controller, start)
    finally:
        if is_main:
            _thread.end_main()


def _run_with_signals(controller: Any, start: Callable[[], None]) -> None:
    before = platforms.signals
    message_wait = controller.pool.message_wait = MessageWait(controller)
    platforms.signals = _Signals(controller, message_wait)
    try:
        begin = getattr(controller.timer, "begin", None)
        if begin is not None:  # else the setting worker_timer names another class
            begin()
        start()
        if controller.exitcode is None and state.should_stop:
            # A cold shutdown came before the worker had noticed the warm one. Celery's cold shutdown sets no exit code.
            controller.exitcode = state.should_stop
    finally:
        platforms.signals = before


def end_soon(exc: SystemExit) -> None:
    """Let the worker end, because code of a task or of a timer has raised WorkerShutdown or WorkerTerminate.

    The worker looks at `should_stop` and `should_terminate` before it waits for messages.
    """
    if isinstance(exc, WorkerTerminate):
        state.should_terminate = exc.code or 0
    else:
        state.should_stop = exc.code or 0


class _Signals(platforms.Signals):  # type: ignore[misc]
    """Sets signal handlers that may wait: each call has a coro of its own.

    Python calls a handler between any two instructions. If a task is running at that moment, the handler must not delay
    it; if no coro is running, the handler could not wait. But Celery's handler of a cold shutdown does wait: for the
    running tasks, if the soft shutdown is enabled, and then for the broker.
    """

    def __init__(self, controller: Any, message_wait: MessageWait) -> None:
        super().__init__()
        self._controller = controller
        self._message_wait = message_wait
        self._loop = _bridge.own_loop()
        self._main = coro.current()
        # The time of the first signal that has come since a handler last began. None if no signal has come since then.
        self._waiting_since: float | None = None

    def __setitem__(self, name: Any, handler: Any) -> None:
        if callable(handler):
            wrapper = functools.partial(self._deliver, handler)
            super().__setitem__(name, wrapper)
        else:
            super().__setitem__(name, handler)

    def _deliver(self, handler: Callable[..., Any], *args: Any) -> None:
        since = self._waiting_since
        is_shutdown = getattr(handler, "__name__", "").startswith("worker_")
        if is_shutdown and since is not None and _monotonic() - since > _PATIENCE_S:
            os._exit(platforms.EX_FAILURE)  # a task computes, and does not let the handler run
        if since is None:
            self._waiting_since = _monotonic()
        self._loop.call_soon_threadsafe(_hiding.spawn_hiding, self._call, handler, *args)

    def _call(self, handler: Callable[..., Any], *args: Any) -> None:
        self._waiting_since = None
        pool = self._controller.pool
        if getattr(handler, "__name__", "") == "worker_Cold" and pool is not None:
            pool.hold()
        try:
            handler(*args)
        except SystemExit as exc:  # Celery's handler of a hard shutdown raises WorkerTerminate for the worker
            self._main.raise_exception(exc)
        else:
            self._message_wait.end()  # so that the worker checks whether it should end
