"""Lets tasks and callbacks log with a handler that a coro is using. This module belongs to the part ``thread``.

A coro that logs to a pipe or socket may wait for the reader, and it has the handler's lock meanwhile. If a task or
callback of its loop waited for that lock, it would stop the thread, and with it the coro: a deadlock. So the task or
callback leaves its record to a new coro, which waits for the lock.
"""

from __future__ import annotations

import functools

from grapeshot import _core
from grapeshot.coro._hiding import spawn_hiding

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def patch(logging: Any) -> None:
    """Patch ``logging.Handler.handle``."""
    original = logging.Handler.handle

    @functools.wraps(original)
    def handle(self: Any, record: Any) -> Any:
        lock = self.lock
        if lock is None or _core._coro_can_wait():
            return original(self, record)
        if lock.acquire(False):
            # No coro of this thread can run and take the lock before the original acquires it.
            lock.release()
            return original(self, record)
        if not _core._coro_begins_thread():
            return original(self, record)
        spawn_hiding(_handle_in_coro, original, self, record, name="logging")
        return record

    logging.Handler.handle = handle


def _handle_in_coro(handle: Callable[[Any, Any], object], handler: Any, record: Any) -> None:
    # The record must not be lost if the loop ends while this coro waits for the lock.
    _core._coro_set_undisturbed(True)
    handle(handler, record)
