"""Locks for the package's own state, which threads share. ``coro.patch()`` does not replace them."""

from __future__ import annotations

import _thread
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Importing the package imports this module, so `coro.patch()` has not replaced `_thread.RLock` yet.
_RLock = _thread.RLock


def real_rlock() -> Any:
    """Return a new ``_thread.RLock``, which is free in the child of a fork. A coro that holds it must not wait."""
    lock: Any = _RLock()
    os.register_at_fork(after_in_child=lock._at_fork_reinit)
    return lock
