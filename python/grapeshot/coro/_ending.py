"""Ends coros that are still suspended when their loop is closed, their thread ends, or the interpreter exits.

Each coro gets ``Shutdown`` where it waits, so that its ``finally`` blocks run. If the loop can still run, the blocks
may wait, for one second in all. After that, or if no loop can run, every further wait is interrupted, too. A coro that
still does not end is abandoned with a warning: it stays suspended, and the objects on its stack are never freed.

Before this module acts, a runner (``coro.run``, ``asyncio.run``) cancels the coros and tasks that are left, and waits
for them. Runners leave out coros that stand for daemon threads; only this module ends those. Plain Python does not wait
for daemon threads at all, so a daemon that goes on after that one second is abandoned after a few more waits, without a
warning.
"""

from __future__ import annotations

import atexit
import sys
import threading
import warnings
from collections.abc import Callable

from grapeshot import _core
from grapeshot._loop import Loop, origins

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ._coroutine import Coro

# How many seconds coros may wait in their cleanup.
_GRACE_S = 1.0
# At most this many rounds interrupt the waits of the coros that are left. A coro that has not ended then is abandoned.
_ROUNDS = 1000
# If the loop can run, a daemon is abandoned after this many rounds. The number is small because a daemon that catches
# the exception and goes on may log it each time. (If no loop can run, native code has another limit for daemons.)
_DAEMON_ROUNDS = 3
# After how many seconds a warning names the coros that hold up the end.
_HELD_UP_S = 1.5


def _coros_of(loop: Loop) -> list[Coro[Any]]:
    return [co for co in _core._coro_live() if co._loop is loop and not co._is_given_up]


def watch_end(loop: Loop) -> Any:
    """Start a timer that warns if a runner still waits for coros when the timer is due.

    Called before the runner cancels the coros.
    """
    return loop.call_later(_HELD_UP_S, _warn_of_late, loop)


def _warn_of_late(loop: Loop) -> None:
    late = sorted((co for co in _coros_of(loop) if not co._is_daemon), key=lambda co: co.id)
    if late:
        names = ", ".join(f"{co.name!r} ({origins.site(co.get_frame()) or co._status})" for co in late)
        warnings.warn(
            f"the program cannot end yet: these coros were cancelled but go on: {names}. A coro ends when it lets"
            " CancelledError pass. Threads of coro.patch() are not waited for if they are made with daemon=True",
            RuntimeWarning,
            stacklevel=1,
        )


def before_close(loop: Loop) -> None:
    """End the coros of a loop that is about to be closed, and let the latency watchdog ignore this thread."""
    try:
        unwind(loop)
    finally:
        _core._coro_unwatch()


def unwind(loop: Loop) -> None:
    """End the coros of a loop that is about to be closed.

    This ends only coros of the calling thread. Coros of another thread end when that thread ends.

    Raises:
        SystemExit, KeyboardInterrupt: a coro has raised it. It is raised here after all coros were shut down.
    """
    if not _coros_of(loop):
        return
    unwinding = _Unwinding(loop)
    if unwinding.can_run():
        unwinding.run_until_ended()
        unwinding.run_in_turns()
    else:
        unwinding.run_natively()
    unwinding.give_up_daemons()
    if left := _coros_of(loop):
        warnings.warn(f"coros did not end when their loop was closed: {left}", RuntimeWarning, stacklevel=4)
    if unwinding.leaving is not None:
        raise unwinding.leaving


class _Unwinding:
    """Shuts down the coros of one loop."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._left: set[Coro[Any]] = set()
        # the first SystemExit or KeyboardInterrupt of a coro, which close() has to raise
        self.leaving: BaseException | None = None

    def can_run(self) -> bool:
        """Whether the loop can run in this thread now. It cannot if another loop is running here."""
        try:
            self._loop._check_running()
        except RuntimeError:
            return False
        return True

    def _catch(self, function: Callable[[], object]) -> None:
        try:
            function()
        except (SystemExit, KeyboardInterrupt) as exc:
            self.leaving = self.leaving or exc

    def run_until_ended(self) -> None:
        """Shut each coro down once, and run the loop until all have ended or ``_GRACE_S`` is over."""
        loop = self._loop
        told: set[Coro[Any]] = set()
        deadline = loop.time() + _GRACE_S
        timer = loop.call_at(deadline, loop.stop)
        while loop.time() < deadline:
            left = _coros_of(loop)
            new = [co for co in left if co not in told]  # coros that are ending may have started others
            if not left:
                break
            told.update(new)
            self._left = set(left)
            for co in new:
                co.add_done_callback(self._on_end)
                if co._status != "running":
                    co.shutdown()
            self._catch(loop.run_forever)
        timer.cancel()

    def _on_end(self, co: Coro[Any]) -> None:
        self._left.discard(co)
        if not self._left:
            self._loop.stop()

    def run_in_turns(self) -> None:
        """Interrupt the next waits of the coros that are left, up to ``_ROUNDS`` times."""
        loop = self._loop
        for number in range(_ROUNDS):
            if number == _DAEMON_ROUNDS:
                self.give_up_daemons()
            left = _coros_of(loop)
            if not left:
                return
            for co in left:
                if co._status in ("waiting", "ready"):
                    co.shutdown()
            loop.call_soon(loop.stop)
            self._catch(loop.run_forever)

    def give_up_daemons(self) -> None:
        for co in _coros_of(self._loop):
            co._is_given_up = co._is_daemon

    def run_natively(self) -> None:
        """Let native code interrupt the waits of the coros that are left. The loop does not run."""
        self._catch(lambda: _core._coro_shut_down(self._loop, _ROUNDS))


class _ThreadEnd:
    """An object in the thread's local data, which is freed when the thread ends; its finalizer ends the coros."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def __del__(
        self,
        _is_finalizing: Callable[[], bool] = sys.is_finalizing,
        _get_ident: Callable[[], int] = threading.get_ident,
    ) -> None:
        # In two cases no coro may run any more: a forked child frees the thread-local data of threads that exist only
        # in the parent, and an exiting interpreter frees the thread-local data of all threads.
        if _is_finalizing() or _get_ident() != self._thread:
            return
        _end_thread()


def _warn_of_never_run() -> None:
    """Warn of coros whose function was never called, because no loop ran after their ``spawn``."""
    never_run = [co for co in _core._coro_live() if co._status == "ready" and co.get_frame() is None]
    if never_run:
        warnings.warn(
            f"coros never ran: {never_run}; coro.run() or coro.event_loop() runs coros that were spawned before it",
            RuntimeWarning,
            stacklevel=2,
        )


def _end_thread() -> None:
    _core._coro_end_thread()
    _warn_of_never_run()
    left = _core._coro_shut_down(None, _ROUNDS)
    if left:
        warnings.warn(f"{left} coros did not end with their thread", RuntimeWarning, stacklevel=1)
    _core._coro_unwatch()


_local = threading.local()


def watch_thread() -> None:
    """Make the coros of this thread end when the thread ends.

    Called once in each thread: before its first coro starts, or when it first sets a latency limit.
    """
    _local.end = _ThreadEnd()


@atexit.register
def _end_main_thread() -> None:
    _warn_of_never_run()
    for loop in {id(co._loop): co._loop for co in _core._coro_live()}.values():
        if not loop.is_closed() and not loop.is_running():
            unwind(loop)
    _core._coro_shut_down(None, _ROUNDS)
    _core._coro_stop_watchdog()
