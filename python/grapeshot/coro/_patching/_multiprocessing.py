"""The part ``multiprocessing`` of :func:`grapeshot.coro.patch`: connections and locks between processes.

Pools and queues of multiprocessing use threads and connections: the threads become coros, and the connections read and
write with the patched functions of ``os``. The locks are semaphores of the system. The system does not report when a
semaphore becomes free, so a coro that waits for one polls it, with growing pauses. In a child that a coro has forked,
threads are real.
"""

from __future__ import annotations

import concurrent.futures.process as _process
import multiprocessing.connection as _connection
import multiprocessing.util as _util
import os
import threading
from multiprocessing import synchronize as _module

from grapeshot import _core
from grapeshot.coro._countdown import Countdown

from . import _originals, _waits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_FIRST_PAUSE_S = 0.0002
_LONGEST_PAUSE_S = 0.01

_SemLock: Any = _module.SemLock
_Connection: Any = _connection.Connection
_ForkAwareLocal: Any = _util.ForkAwareLocal
_open_connection = _Connection.__init__


def _open(self: Any, handle: int, *args: Any, **kwargs: Any) -> None:
    _open_connection(self, handle, *args, **kwargs)
    # If the descriptor was detached from a patched socket, it is still nonblocking.
    os.set_blocking(self._handle, True)


def _take(acquire: Callable[..., bool], timeout: float | None) -> bool:
    """Acquire a semaphore with its function ``acquire(block)``. Other coros run while it waits."""
    if acquire(False):
        return True
    left_s = Countdown(None if timeout is None else max(timeout, 0.0))
    pause_s = _FIRST_PAUSE_S
    while not left_s.is_over():
        rest_s = left_s()
        _waits.sleep(pause_s if rest_s is None else min(pause_s, rest_s))
        if acquire(False):
            return True
        pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
    return False


def _make_methods(self: Any) -> None:
    semaphore = self._semlock

    def acquire(block: bool = True, timeout: float | None = None) -> bool:
        if not block or not _waits.can_wait():
            return semaphore.acquire(block, timeout)  # type: ignore[no-any-return]
        return _take(semaphore.acquire, timeout)

    self.acquire, self.release = acquire, semaphore.release


def _make_rlock_methods(self: Any) -> None:
    """Add a lock for the coros of this process: the semaphore cannot tell them apart, because its owner is a thread."""
    semaphore = self._semlock
    within = _core.thread_rlock()

    def acquire(block: bool = True, timeout: float | None = None) -> bool:
        limit_s = None if timeout is None else max(timeout, 0.0)
        left_s = Countdown(limit_s)
        if not (within.acquire(True, -1 if limit_s is None else limit_s) if block else within.acquire(False)):
            return False
        taken = False
        try:
            if not block or not _waits.can_wait():
                taken = semaphore.acquire(block, left_s())
            else:
                taken = _take(semaphore.acquire, left_s())
        finally:
            if not taken:
                within.release()
        return taken

    def release() -> None:
        semaphore.release()
        within.release()

    self.acquire, self.release = acquire, release
    # In the child of a fork, the coro that holds the lock does not exist.
    _util.register_after_fork(within, type(within)._at_fork_reinit)


def _enter(self: Any) -> bool:
    return self.acquire()  # type: ignore[no-any-return]


def _exit(self: Any, *_: Any) -> None:
    self.release()


def patch() -> None:
    """Replace the methods that block. Existing locks keep the originals."""
    for function, replacement in ((_Connection._send, os.write), (_Connection._recv, os.read)):
        # The methods have the functions of `os` as default values of an argument.
        function.__defaults__ = (replacement,)
    _Connection.__init__ = _open
    _SemLock._make_methods = _make_methods
    _SemLock.__enter__, _SemLock.__exit__ = _enter, _exit
    # Proxies of managers keep their connections in a ForkAwareLocal. This class derives from the original
    # threading.local, whose attributes all coros of a thread share. So it is replaced by a copy that derives from the
    # patched threading.local.
    names = {**vars(_util), _originals.get_original("threading", "local").__name__: threading.local}
    _originals.replace("multiprocessing.util", "ForkAwareLocal", _originals.clone_class(_ForkAwareLocal, names))
    # The threads of ProcessPoolExecutor stay real, but its locks must also work between coros, because coros hold them
    # while they use a connection.
    _process.threading = _originals.other_view("threading", Lock=_core.thread_lock)  # type: ignore[attr-defined]
    _module.RLock._make_methods = _make_rlock_methods  # type: ignore[attr-defined]
