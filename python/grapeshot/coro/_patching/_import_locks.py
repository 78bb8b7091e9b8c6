"""Makes coros wait for each other's imports.

The locks of the import system stay real ones, whose owners are real threads. So they do not tell the coros of one
thread apart: if a coro waits in the middle of an import, another coro that imports the same module could acquire the
lock as well, and would see a half-initialized module. Therefore the second coro waits here until the first one has
finished. But if the first one in turn waits for the second one, the second one gets the module as it is. CPython does
the same when two threads wait for each other.

- A task or callback of the loop cannot wait for a coro, so it gets the module as it is.
- If another real thread is importing the module, the coro blocks its own thread, and the loop, until that thread is
  done. If that thread in turn waits for the loop, this is a deadlock. To avoid it, import the module before the loop
  runs, or only in the loop's thread.
"""

from __future__ import annotations

import _thread
import importlib._bootstrap as _bootstrap

from grapeshot import _core

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_get_ident = _thread.get_ident
_can_wait = _core._coro_can_wait
_coro_ident = _core._coro_get_ident

# the id of a coro -> the import lock for which it waits
_waiting: dict[int, Any] = {}


def _waits_in_turn(me: int, owner: int) -> bool:
    """Whether ``owner`` waits for ``me``, directly or through other coros."""
    seen = set()
    while owner not in seen:
        if owner == me:
            return True
        seen.add(owner)
        lock = _waiting.get(owner)
        if lock is None:
            return False
        owner = getattr(lock, "_grapeshot_owner", None) or 0
    return False


def _wait_for_owner(lock: Any) -> None:
    me = _coro_ident()
    while lock.count and lock.owner == _get_ident():
        owner = getattr(lock, "_grapeshot_owner", None)
        if owner is None or _waits_in_turn(me, owner):
            return
        wakeup = _core.thread_lock()
        wakeup.acquire()
        wakeups = lock.__dict__.setdefault("_grapeshot_wakeups", [])
        wakeups.append(wakeup)
        _waiting[me] = lock
        try:
            wakeup.acquire()
        finally:
            del _waiting[me]
            if wakeup in wakeups:
                wakeups.remove(wakeup)


def _depth(lock: Any) -> int:
    """How often the owner has acquired the lock. Python 3.11 counts with a number, later versions with a list."""
    return lock.count if isinstance(lock.count, int) else len(lock.count)


def patch() -> None:
    """Patch the import locks so that a coro waits for another one that imports the same module."""
    kind: Any = _bootstrap._ModuleLock  # type: ignore[attr-defined]
    if getattr(kind.acquire, "_is_grapeshot", False):
        return
    real_acquire, real_release = kind.acquire, kind.release

    def acquire(self: Any) -> Any:
        if _can_wait():
            _wait_for_owner(self)
        result = real_acquire(self)
        if _depth(self) == 1:
            self._grapeshot_owner = _coro_ident()
        return result

    def release(self: Any) -> None:
        # Wake the waiting coros before the real release, because after that the lock may belong to another thread. They
        # are coros of this thread, so they run only after the real release.
        if self.owner == _get_ident() and _depth(self) == 1:
            self._grapeshot_owner = None
            wakeups = self.__dict__.pop("_grapeshot_wakeups", ())
            for wakeup in wakeups:
                wakeup.release()
        real_release(self)

    acquire._is_grapeshot = True  # type: ignore[attr-defined]
    kind.acquire, kind.release = acquire, release
