"""The objects with which threading waits for the end of a thread: handles (Python 3.13 and later) or sentinel locks.

Each thread has a lock, which is held from the thread's start to its end. A join acquires the lock and releases it
again. If the lock is held, a coro waits for it, and a real thread blocks.
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
# The attribute of Thread that holds its handle.
HANDLE_NAME = "_os_thread_handle" if sys.version_info >= (3, 14) else "_handle"

_Lock = _core.thread_lock
_ident = _core._coro_get_ident
_real_ident = _thread.get_ident
_start_real = _thread.start_new_thread


def let_others_run() -> None:
    """Called when code asks whether a thread has ended, and the thread is still running.

    Code for threads may ask again and again in a loop. After some calls, this lets other coros run.
    """
    if _core._coro_can_wait():
        _core._coro_act()


class Running:
    """The lock of a thread, which is held until the thread ends."""

    __slots__ = ("_lock", "is_over")

    def __init__(self) -> None:
        self._lock = _Lock()
        self._lock.acquire()
        self.is_over = False

    def finish(self) -> None:
        """Record that the thread has ended, and release the lock. Each waiter passes the lock on to the next one."""
        if not self.is_over:
            self.is_over = True
            self._lock.release()

    def wait(self, timeout: float = -1) -> bool:
        """Wait until the thread has ended; return False if it has not ended in time."""
        if not self.is_over and self._lock.acquire(True, timeout):
            self._lock.release()
        return self.is_over


def check_can_join(coro: Any, thread: int) -> None:
    """Raise RuntimeError if a wait for the end of ``coro`` would block ``thread``, the real thread that runs it."""
    if _core._coro_current_or_none() is None and thread == _real_ident() and not coro.done():
        raise RuntimeError(
            "a task or callback cannot join a thread that is a coro of its own loop: the wait would keep the coro from "
            "running. Join it in a coro (await coro.run_sync(thread.join)), or make it a coro.threads.Thread, which is "
            "a real thread"
        )


def run_in_real_thread(call: Callable[[], object]) -> None:
    """Run ``call``, for example a wait for a real lock, in a new real thread while the coro waits."""
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
    """Like :func:`run_in_real_thread`; return the result of ``call`` or raise its exception."""
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
    """The sentinel lock of a thread, up to Python 3.12. threading acquires it when the thread begins.

    A later ``acquire`` only waits for the end of the thread; it does not take the lock. When the interpreter exits, no
    loop runs any more, so threading must not wait for threads that are coros: ``start_new_thread`` in ``_thread.py``
    takes care of that.
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
    """Replaces ``Thread._wait_for_tstate_lock``, up to Python 3.12.

    The original treats the thread as ended when an exception interrupts the wait. This one does not.
    """
    lock = self._tstate_lock
    if lock is not None and lock.acquire(block, timeout):
        lock.release()
        self._stop()


class RealSentinel:
    """The sentinel of a real thread that was started before patching. It wraps the thread's real lock."""

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
    """Replaces ``_thread._ThreadHandle``, for real threads and for threads that are coros."""

    def __init__(self) -> None:
        self._real: Any = None
        self._coro: Any = None
        # None: the thread was not started, or it was started before patching and has only the real handle.
        self.running: Running | None = None
        self._is_set = False
        # For a coro: the process and the real thread in which it runs.
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
        """Return a handle for a real thread that is already running."""
        self = cls()
        self._real = real
        return self

    def begin(self) -> Running:
        """Record that the thread is about to start. Raises RuntimeError if it was started before."""
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
        """Record that the thread could not be started."""
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
                # In a forked child, only the coro that has forked goes on.
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
            # The thread's function has returned, so this takes no time.
            self._real.join()

    def _join_real(self, timeout: float) -> None:
        real = self._real
        if timeout != 0 and _core._coro_can_wait():
            run_in_real_thread(lambda: real.join(timeout))
        else:
            real.join(timeout)


def watch_running_threads() -> None:
    """Replace the handles or sentinels of real threads that are already running, so that coros can join them."""
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
