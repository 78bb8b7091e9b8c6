"""The timer of the worker: each entry is called in a coro of its own, at its time.

Celery uses it for tasks with a countdown or an eta, and for retries, rate limits and heartbeats. Celery's own timer for
workers without kombu's event loop is a thread that sleeps for up to a second, even if a new entry is due earlier.

Only code on the worker's loop arms and disarms the loop's timers. If another thread enters or cancels an entry, the
loop is asked to arm or disarm the entry's timer.
"""

from __future__ import annotations

import time

from kombu.asynchronous import timer

from grapeshot.coro import _bridge, _hiding

from . import _worker

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class Timer(timer.Timer):
    """Calls the entries of a worker. If an entry is entered again before it is due, only the new time counts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
        # The loop that runs the worker. None until begin(), which also arms the entries that came before it.
        self._loop: Any = None
        self._is_stopped = False
        # The entries that have not been called, and when they are due.
        self._scheduled: dict[Any, Any] = {}
        # The loop's timers. Only code that runs on the loop uses them.
        self._handles: dict[Any, Any] = {}

    def begin(self) -> None:
        """Start the loop's timers. The worker's main coro calls this before it starts the worker."""
        self._loop = _bridge.own_loop()
        for scheduled in list(self._scheduled.values()):
            self._arm(scheduled)

    def stop(self) -> None:
        """Forget all entries, and take no more."""
        self._is_stopped = True
        self.clear()

    # ------------------------------------------------------------------ in any thread

    def _enter(self, eta: float, priority: int, entry: Any, push: Any = None) -> Any:
        if not self._is_stopped:
            scheduled = self._scheduled[entry] = timer.scheduled(eta, priority, entry)
            if self._loop is not None:
                self._call_on_loop(self._arm, scheduled)
        return entry

    def cancel(self, tref: Any) -> None:
        tref.cancel()
        if self._scheduled.pop(tref, None) is not None and self._loop is not None:
            self._call_on_loop(self._disarm, tref)

    def clear(self) -> None:
        for entry in list(self._scheduled):
            if self._scheduled.pop(entry, None) is not None and self._loop is not None:
                self._call_on_loop(self._disarm, entry)

    def __len__(self) -> int:
        return len(self._scheduled)

    def __bool__(self) -> bool:
        return True

    @property
    def queue(self) -> list[Any]:
        """The entries that have not been called, as tuples of the due time, the priority and the entry."""
        return sorted(self._scheduled.values())

    def _call_on_loop(self, function: Callable[[Any], None], argument: Any) -> None:
        if _bridge.find_running_loop() is self._loop:
            function(argument)
        else:
            self._loop.call_soon_threadsafe(function, argument)

    # ------------------------------------------------------------------ on the loop

    def _arm(self, scheduled: Any) -> None:
        if self._is_current(scheduled):
            self._disarm(scheduled.entry)
            # Less than 0 if the entry is overdue, so that overdue entries are called in the order of their due times.
            delay_s = scheduled.eta - time.monotonic()
            self._handles[scheduled.entry] = self._loop.call_later(delay_s, self._reach, scheduled)

    def _is_current(self, scheduled: Any) -> bool:
        """Whether the entry still has this due time: it was not called, cancelled or entered again."""
        return self._scheduled.get(scheduled.entry) is scheduled

    def _disarm(self, entry: Any) -> None:
        handle = self._handles.pop(entry, None)
        if handle is not None:
            handle.cancel()

    def _reach(self, scheduled: Any) -> None:
        if self._is_current(scheduled):
            del self._scheduled[scheduled.entry], self._handles[scheduled.entry]
            _hiding.spawn_hiding(self._call, scheduled.entry)

    # ------------------------------------------------------------------ in a coro of the entry

    def _call(self, entry: Any) -> None:
        if entry.canceled:
            return
        try:
            self.apply_entry(entry)  # type: ignore[no-untyped-call]
        except SystemExit as exc:
            _worker.end_soon(exc)
