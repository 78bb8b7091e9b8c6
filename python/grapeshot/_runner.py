"""asyncio's Runner, whose Ctrl-C also reaches a coro that does not yield.

asyncio's first Ctrl-C cancels the main task. That has no effect while a coro computes, because nothing else runs then.
So if the same run of that coro still goes on a little later, the signal is sent once more, and KeyboardInterrupt is
raised in the coro, as in any Python code. What yields in time is not affected.

The main thread uses a runner; a thread of this module, for one Ctrl-C, only sends the signal. It has ended when the
runner is closed: to CPython 3.11 a thread that begins while the interpreter exits uses a state that was freed.
"""

from __future__ import annotations

import asyncio
import os
import signal
from _thread import allocate_lock, start_new_thread

from . import _core

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection
    from types import FrameType
    from typing import Any

# How long a coro may go on after Ctrl-C before it is interrupted: the initial limit of coro.set_latency_warning().
_GRACE_S = 0.2
# How long close() waits for a thread. It ends at once, unless the processors are busy elsewhere.
_END_S = 5


class _Late:
    """The run of a coro that was there when Ctrl-C came."""

    def __init__(self, coro: Any, *, is_cancelled: bool) -> None:
        self.coro = coro
        self.run = _core._coro_run_number()
        # This Ctrl-C has cancelled the coro itself.
        self.is_cancelled = is_cancelled

    def goes_on(self) -> bool:
        return _core._coro_current_or_none() is self.coro and _core._coro_run_number() == self.run


class _Reminder:
    """A thread that sends the signal once more if the coro has not yielded in time."""

    def __init__(self, runner: Runner, late: _Late, signum: int) -> None:
        self._runner, self._late = runner, late
        self._signum, self._handler = signum, signal.getsignal(signum)
        # Taken until the thread is told to stop, and until it has ended.
        self._stop, self._end = allocate_lock(), allocate_lock()
        self._stop.acquire()
        self._end.acquire()
        self._pid = os.getpid()
        start_new_thread(self._run, ())

    def has_ended(self) -> bool:
        return not self._end.locked()

    def stop(self) -> None:
        """Tell the thread to end, and wait for that."""
        self._stop.release()
        if self._pid == os.getpid():  # a forked child has no such thread
            self._end.acquire(timeout=_END_S)

    def _run(self) -> None:
        try:
            if not self._stop.acquire(timeout=_GRACE_S):
                self._remind()
        finally:
            self._end.release()

    def _remind(self) -> None:
        runner, late = self._runner, self._late
        if runner._late is late and late.coro._status == "running":
            runner._is_reminder = True
            # Not if the run of the loop is over, or if the program has its own handler now.
            if not _core._coro_send_signal(self._signum, self._handler):
                runner._is_reminder = False


class Runner(asyncio.Runner):  # type: ignore[misc]  # final to type checkers only
    """As :class:`asyncio.Runner`; see the module."""

    _late: _Late | None = None
    # The next signal is the one that the thread sends.
    _is_reminder = False
    # Threads that may not have ended yet.
    _reminders: Collection[_Reminder] = ()
    # The base's.
    _loop: Any

    def _on_sigint(self, signum: int, frame: FrameType | None, main_task: asyncio.Task[Any]) -> None:
        late = self._late
        if self._is_reminder and late is not None:
            self._is_reminder, self._late = False, None
            if late.goes_on() and not _is_in_finalizer(frame):
                _interrupt(late)
            return
        self._late = None
        coro = _core._coro_current_or_none()
        was_cancelled = coro is None or coro._must_cancel
        super()._on_sigint(signum, frame, main_task)  # type: ignore[misc]
        if coro is not None:
            self._late = _Late(coro, is_cancelled=coro._must_cancel and not was_cancelled)
            try:
                reminder = _Reminder(self, self._late, signum)
                self._reminders = [reminder, *(other for other in self._reminders if not other.has_ended())]
            except RuntimeError:
                pass  # no further thread can be had: the second Ctrl-C is raised at once, as asyncio's

    def close(self) -> None:
        """As :meth:`asyncio.Runner.close`, with a warning that names coros that hold up the end."""
        loop = self._loop
        watch_end = None if loop is None else getattr(loop, "_watch_end", None)
        watch = None if watch_end is None else watch_end(loop)
        try:
            super().close()
        finally:
            if watch is not None:
                watch.cancel()
            reminders, self._reminders = self._reminders, ()
            for reminder in reminders:
                reminder.stop()


def _is_in_finalizer(frame: FrameType | None) -> bool:
    """Whether ``__del__`` runs: what it raises is lost. Then the cancellation reaches the coro afterwards."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def _interrupt(late: _Late) -> None:
    """Raise KeyboardInterrupt in the coro, in place of the error of the first Ctrl-C: cleanup may wait."""
    if late.is_cancelled:
        late.coro.uncancel()
        if late.coro._must_cancel:
            late.coro._throw_later(None)
    raise KeyboardInterrupt
