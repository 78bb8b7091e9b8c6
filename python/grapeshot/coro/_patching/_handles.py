"""What stands for a thread and its end: handles (3.13 and later) and sentinel locks (before).

A thread's lock is held from its start to its end. Whoever joins it takes the lock and releases it: a coro waits
meanwhile, a real thread blocks.
"""

from __future__ import annotations

import _thread
import os
import sys
import threading

from grapeshot import _core

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

HAS_HANDLES = sys.version_info >= (3, 13)
# Where a Thread has its handle.
HANDLE_NAME = "_os_thread_handle" if sys.version_info >= (3, 14) else "_handle"

_Lock = _core.thread_lock
_ident = _core._coro_get_ident
_real_ident = _thread.get_ident
_start_real = _thread.start_new_thread


def let_others_run() -> None:
    """The thread that was asked for still runs. Code for threads asks again: after some calls other coros run."""
    if _core._coro_can_wait():
        _core._coro_act()


class Running:
    """A thread that runs: its lock is held until the thread ends."""

    __slots__ = ("_lock", "is_over")

    def __init__(self) -> None:
        self._lock = _Lock()
        self._lock.acquire()
        self.is_over = False

    def finish(self) -> None:
        """The thread has ended. Its lock goes from one that waits to the next."""
        if not self.is_over:
            self.is_over = True
            self._lock.release()

    def wait(self, timeout: float = -1) -> bool:
        """Wait for the end; return whether it came in time."""
        if not self.is_over and self._lock.acquire(True, timeout):
            self._lock.release()
        return self.is_over


def check_can_join(coro: Any, thread: int) -> None:
    """Raise RuntimeError where the wait for the end of a coro could not end: in ``thread``, which runs it."""
    if _core._coro_current_or_none() is None and thread == _real_ident() and not coro.done():
        raise RuntimeError(
            "a task or callback cannot join a thread that is a coro of its own loop: the wait would keep the coro from "
            "running. Join it in a coro (await coro.run_sync(thread.join)), or start a real one with coro.threads"
        )


def run_in_real_thread(call: Callable[[], object]) -> None:
    """Run ``call`` in a real thread of its own, and wait for it as a coro. For what is made of real locks."""
    finished = _Lock()
    finished.acquire()

    def run() -> None:
        try:
            call()
        finally:
            finished.release()

    _start_real(run, ())
    finished.acquire()


def call_in_real_thread(call: Callable[[], Any]) -> Any:
    """The same, and return or raise what ``call`` has."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            outcome.append(error)

    run_in_real_thread(run)
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


class Sentinel:
    """The lock that tells, up to 3.12, whether a thread runs. threading acquires it when the thread begins.

    After that whoever acquires it waits for the end of the thread, and holds nothing. A thread that is a coro is not
    among those that threading waits for at the exit: no loop runs there.
    """

    def __init__(self, running: Running | None = None, coro: Any = None) -> None:
        self._running = running
        self._coro = coro
        self._thread = _real_ident()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._running is None:
            self._running = Running()
            return True
        if not blocking or timeout == 0:
            if not self._running.is_over:
                let_others_run()
            return self._running.is_over
        if self._coro is not None:
            check_can_join(self._coro, self._thread)
        return self._running.wait(timeout)

    def release(self) -> None:
        pass

    def locked(self) -> bool:
        return self._running is not None and not self._running.is_over

    def _at_fork_reinit(self) -> None:
        self._running = None

    def finish(self) -> None:
        if self._running is not None:
            self._running.finish()


def wait_for_tstate_lock(self: Any, block: bool = True, timeout: float = -1) -> None:
    """``Thread._wait_for_tstate_lock``, up to 3.12. An interruption of a coro that waits does not end the thread."""
    lock = self._tstate_lock
    if lock is not None and lock.acquire(block, timeout):
        lock.release()
        self._stop()


class RealSentinel:
    """The same of a real thread that was started before patching: its lock is a real one."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.release = lock.release
        self.locked = lock.locked
        self._at_fork_reinit = lock._at_fork_reinit

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        lock = self._lock
        if blocking and timeout != 0 and lock.locked() and _core._coro_can_wait():

            def wait() -> None:
                if lock.acquire(True, timeout):
                    lock.release()

            run_in_real_thread(wait)
            blocking, timeout = False, -1
        taken: bool = lock.acquire(blocking, timeout)
        return taken


class ThreadHandle:
    """``_thread._ThreadHandle`` of a real thread or of one that is a coro."""

    def __init__(self) -> None:
        self._real: Any = None
        self._coro: Any = None
        # None: it was not started, or the real handle is all there is.
        self.running: Running | None = None
        self._is_set = False
        # Of a coro: its process and thread.
        self._pid = 0
        self._thread = 0

    @property
    def ident(self) -> int:
        if self._coro is not None:
            return self._coro.id  # type: ignore[no-any-return]
        return 0 if self._real is None else self._real.ident

    def __repr__(self) -> str:
        return f"<{type(self).__name__} object: ident={self.ident}>"

    @classmethod
    def around(cls, real: Any) -> ThreadHandle:
        """Return the handle of a real thread that runs already."""
        self = cls()
        self._real = real
        return self

    def begin(self) -> Running:
        """The thread is about to start. Raises RuntimeError if it was started before."""
        if self._real is not None or self.running is not None:
            raise RuntimeError("thread already started")
        self.running = Running()
        return self.running

    def begin_coro(self, coro: Any) -> None:
        self._coro = coro
        self._pid = os.getpid()
        self._thread = _real_ident()

    def begin_real(self, real: Any) -> None:
        self._real = real

    def fail(self) -> None:
        """The thread could not be started."""
        self.running = self._real = None

    def is_done(self) -> bool:
        if not self._is_over():
            let_others_run()
        return self._is_over()

    def _is_over(self) -> bool:
        if self._is_set:
            return True
        if self._coro is not None:
            if self._pid != os.getpid():
                # Of the coros of a forked process only the one that has forked is there.
                return _core._coro_current_or_none() is not self._coro
            return self.running is not None and self.running.is_over
        return self._real is not None and self._real.is_done()

    def _set_done(self) -> None:
        self._check_started()
        self._is_set = True
        if self._real is not None:
            self._real._set_done()
        if self.running is not None:
            self.running.finish()

    def _check_started(self) -> None:
        if self._real is None and self._coro is None:
            raise RuntimeError("thread not started")

    def join(self, timeout: float | None = None) -> None:
        self._check_started()
        if self._is_over():
            return
        if self.ident == _ident():
            raise RuntimeError("Cannot join current thread")
        timeout = -1 if timeout is None or timeout < 0 else timeout
        if self._real is None:
            if timeout != 0:
                check_can_join(self._coro, self._thread)
            if self.running is not None:
                self.running.wait(timeout)
        elif self.running is None or sys.is_finalizing():
            self._join_real(timeout)
        elif self.running.wait(timeout):
            # Its function has returned; the rest takes no time.
            self._real.join()

    def _join_real(self, timeout: float) -> None:
        real = self._real
        if timeout != 0 and _core._coro_can_wait():
            run_in_real_thread(lambda: real.join(timeout))
        else:
            real.join(timeout)


def watch_running_threads() -> None:
    """Let coros join the real threads that were started before patching."""
    for thread in threading.enumerate():
        watched: Any = thread
        if HAS_HANDLES:
            handle = getattr(watched, HANDLE_NAME)
            if not isinstance(handle, ThreadHandle):
                setattr(watched, HANDLE_NAME, ThreadHandle.around(handle))
        elif watched is not threading.main_thread():
            lock = watched._tstate_lock
            if lock is not None and type(lock) is _thread.LockType:
                watched._tstate_lock = RealSentinel(lock)
