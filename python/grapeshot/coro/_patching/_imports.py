"""Import locks while coros run.

The locks of the import system stay real, and are owned by real threads. To them two coros of a thread are one owner: if
one waits for something in the middle of an import, another that imports the same module would take the lock once more,
and see a module that is half initialized. So a coro waits here until the first one has finished, unless that one waits
for it in turn: then, as in CPython where two threads wait for each other, it sees the module as it is.

- A task or callback of the loop (no coro) cannot wait for a coro. It sees the module as it is.
- A coro that needs a module which another real thread imports blocks its thread, and the loop, until that thread is
  done. If that thread waits for the loop, both wait for ever: import in the loop's thread, or before.
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
    """Whether ``owner`` waits for ``me``, directly or by others."""
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


def patch() -> None:
    """Let coros wait for the imports of other coros."""
    kind: Any = _bootstrap._ModuleLock  # type: ignore[attr-defined]
    if getattr(kind.acquire, "_is_grapeshot", False):
        return
    real_acquire, real_release = kind.acquire, kind.release

    def acquire(self: Any) -> Any:
        if _can_wait():
            _wait_for_owner(self)
        result = real_acquire(self)
        if getattr(self, "_grapeshot_owner", None) is None:
            self._grapeshot_owner = _coro_ident()
        return result

    def release(self: Any) -> None:
        real_release(self)
        if not self.count:
            self._grapeshot_owner = None
            wakeups = self.__dict__.pop("_grapeshot_wakeups", ())
            for wakeup in wakeups:
                wakeup.release()

    acquire._is_grapeshot = True  # type: ignore[attr-defined]
    kind.acquire, kind.release = acquire, release
