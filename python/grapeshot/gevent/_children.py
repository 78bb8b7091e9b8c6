"""``Children``: the processes that a loop's child watchers watch."""

from __future__ import annotations

import contextlib
import functools
import os

import gevent.monkey  # type: ignore[import-untyped]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ._loop import Loop
    from ._watchers import child

# gevent's monkey patching replaces os.waitpid with a function that uses this module.
_waitpid = gevent.monkey.get_original("os", "waitpid")


class Children:
    """Finds out which of the watched processes have ended."""

    # The pause, in seconds, between two looks for ended children while a watcher waits for any child.
    _LOOK_S = 0.02

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        # pid -> the active watchers of that child. The entry exists from the first watcher until the child has ended.
        self._watchers: dict[int, list[child]] = {}
        # The active watchers of any child.
        self._any: list[child] = []
        self._handle: Any = None

    def watch(self, watcher: child) -> None:
        pid = watcher._pid
        if pid <= 0:
            self._any.append(watcher)
            self._look_later()
        elif pid in self._watchers:
            self._watchers[pid].append(watcher)
        else:
            self._watchers[pid] = [watcher]
            loop = self._loop.asyncio_loop
            try:
                loop._watch_child(pid, functools.partial(self._returned, pid))
            except ProcessLookupError:
                loop.call_soon(self._returned, pid, None)

    def unwatch(self, watcher: child) -> None:
        for watchers in (self._watchers.get(watcher._pid, []), self._any):
            if watcher in watchers:
                watchers.remove(watcher)

    def _returned(self, pid: int, returncode: int | None) -> None:
        if pid not in self._watchers:
            return  # `_look` has fetched the status and told all watchers
        if returncode is None:
            returncode = 255  # other code has fetched the status; asyncio reports 255 in this case, too
        self._ended(pid, -returncode if returncode < 0 else returncode << 8)

    def _ended(self, pid: int, status: int) -> None:
        for watcher in self._watchers.pop(pid, []) + self._any:
            if watcher._is_active:
                watcher.rpid, watcher.rstatus = pid, status
                watcher._fire()

    def _look_later(self) -> None:
        if self._handle is None:
            self._handle = self._loop.asyncio_loop.call_later(self._LOOK_S, self._look)

    def _look(self) -> None:
        self._handle = None
        if not self._any:
            return
        with contextlib.suppress(ChildProcessError):
            pid, status = _waitpid(-1, os.WNOHANG)
            if pid:
                self._ended(pid, status)
        if self._any:
            self._look_later()

    def forget(self) -> None:
        """In the child of a fork: stop watching, because the watched processes are children of the parent."""
        self._watchers.clear()
        self._any.clear()
        self._handle = None
