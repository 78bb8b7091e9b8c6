"""asyncio's Runner, extended so that Ctrl-C also reaches a coro that does not yield.

In asyncio, the first Ctrl-C cancels the main task. That has no effect while a coro computes, because nothing else can
run. So if the coro has still not yielded a little later, this module sends the signal once more and raises
KeyboardInterrupt in the coro, as in any Python code. A coro that yields in time is not affected.

Only a runner in the main thread handles Ctrl-C. For each Ctrl-C that arrives while a coro runs, a helper thread waits
and, if the coro has still not yielded, sends the signal again. Closing the runner ends these threads and waits for
them: on CPython 3.11, a thread that is still starting while the interpreter exits uses freed memory.
"""

from __future__ import annotations

import asyncio
import signal

from grapeshot import _core
from grapeshot._loop import Loop, hooks
from grapeshot._loop.helper_thread import HelperThread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection
    from types import FrameType
    from typing import Any

# How long a coro may run after Ctrl-C before it is interrupted. The same as the default of coro.set_latency_warning().
_GRACE_S = 0.2
# How long close() waits for a helper thread. The thread normally ends at once, but the machine may be busy.
_END_S = 5


class _InterruptedRun:
    """The coro that was running when Ctrl-C was pressed, and the number of its run. A run ends when the coro yields."""

    def __init__(self, coro: Any, *, is_cancelled: bool) -> None:
        self.coro = coro
        self.run = _core._coro_run_number()
        # Whether this Ctrl-C has cancelled the coro itself.
        self.is_cancelled = is_cancelled

    def goes_on(self) -> bool:
        return _core._coro_current_or_none() is self.coro and _core._coro_run_number() == self.run


class _Reminder(HelperThread):
    """A helper thread that sends the signal once more if the coro has not yielded in time."""

    def __init__(self, runner: Runner, late: _InterruptedRun, signum: int) -> None:
        super().__init__()
        self._runner, self._late = runner, late
        self._signum, self._handler = signum, signal.getsignal(signum)

    def run(self) -> None:
        if self.wait_for_stop(_GRACE_S):
            return
        runner, late = self._runner, self._late
        if runner._late is late and late.coro._status == "running":
            runner._is_reminder = True
            # The signal is not sent if the loop's run is over, or if the program has set another handler.
            if not _core._coro_send_signal(self._signum, self._handler):
                runner._is_reminder = False


class Runner(asyncio.Runner):  # type: ignore[misc]  # final to type checkers only
    """Like :class:`asyncio.Runner`, but Ctrl-C also interrupts a coro that does not yield."""

    _late: _InterruptedRun | None = None
    # Whether the next signal is the one that the helper thread sends.
    _is_reminder = False
    # Helper threads that may not have ended yet.
    _reminders: Collection[_Reminder] = ()
    # An attribute of the base class.
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
            self._late = _InterruptedRun(coro, is_cancelled=coro._must_cancel and not was_cancelled)
            try:
                reminder = _Reminder(self, self._late, signum)
                reminder.start()
                self._reminders = [reminder, *(other for other in self._reminders if not other.has_ended())]
            except RuntimeError:
                pass  # no thread can be started; a second Ctrl-C raises at once, as in asyncio

    def close(self) -> None:
        """Like :meth:`asyncio.Runner.close`, but if coros delay it, issue a warning that names them."""
        loop = self._loop
        watch = hooks.watch_end(loop) if hooks.watch_end is not None and isinstance(loop, Loop) else None
        try:
            super().close()
        finally:
            if watch is not None:
                watch.cancel()
            reminders, self._reminders = self._reminders, ()
            for reminder in reminders:
                reminder.stop(_END_S)


def _is_in_finalizer(frame: FrameType | None) -> bool:
    """Whether a ``__del__`` is running, in which KeyboardInterrupt would be lost.

    In that case, only the cancellation by the first Ctrl-C takes effect.
    """
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def _interrupt(late: _InterruptedRun) -> None:
    """Raise KeyboardInterrupt in the coro, and withdraw the cancellation by the first Ctrl-C.

    If it were not withdrawn, the first wait in the coro's cleanup would raise CancelledError.
    """
    if late.is_cancelled:
        late.coro.uncancel()
        if late.coro._must_cancel:
            late.coro._throw_later(None)
    raise KeyboardInterrupt
