"""The child of a coro that has forked: only that coro goes on there, as only the forking thread of a program would.

The other coros of the thread, the tasks, callbacks, timers and connections of its loop are the parent's. Nothing of
them runs in the child, not even their ``finally`` blocks: what they refer to stays alive for good. The loop itself gets
a poller of its own, because the one it has is shared with the parent.

When the coro ends in the child, ``coro.run()`` returns or raises there if that is its coro. SystemExit and
KeyboardInterrupt leave the loop, whichever coro raises them. Otherwise the child ends with status 0, as it does when a
thread has forked and returns.
"""

from __future__ import annotations

import asyncio
import os
import sys

from grapeshot import _core
from grapeshot._loop import Loop

from .bridge import run_sync

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# What belongs to the parent and is never freed.
_forgotten: list[Any] = []
# The tasks of the loop, during a fork in a coro. From 3.14 on asyncio's list is reset in the child, but comes back when
# one of them ends.
_tasks: set[Any] = set()


def before_fork() -> None:
    """Prepare for a fork: the watchdog's thread ends."""
    global _tasks
    _core._coro_stop_watchdog()
    co = _core._coro_current_or_none()
    if co is not None:
        _tasks = asyncio.all_tasks(co._loop)


def after_fork_in_parent() -> None:
    """Undo what was prepared."""
    global _tasks
    _tasks = set()


def after_fork_in_child() -> None:
    """Forget what is the parent's, if a coro has forked."""
    co = _core._coro_after_fork()
    if co is not None:
        _forget_parent(co._loop, _task_of_run(co))


def _forget_parent(loop: Loop, kept: object) -> None:
    global _tasks
    loop._forget_parent()
    tasks, _tasks = _tasks, set()
    for task in tasks:
        if isinstance(task, asyncio.Task) and task is not kept:
            asyncio._unregister_task(task)
            _forgotten.append(task)
    if loop._asyncgens is not None:
        _forgotten.append(list(loop._asyncgens))
        loop._asyncgens = None
    _forgotten.append(loop._default_executor)
    loop._default_executor = None


def _task_of_run(co: Any) -> Any:
    """Return what the loop runs for, if that is the coro or the task in which ``coro.run()`` waits for it."""
    awaited = co._loop._awaited
    if awaited is co:
        return co
    if isinstance(awaited, asyncio.Task) and awaited._fut_waiter is co:  # type: ignore[attr-defined]
        code = getattr(awaited.get_coro(), "cr_code", None)
        return awaited if code is run_sync.__code__ else None
    return None


def end_child(co: Any, leaves_loop: bool) -> bool:
    """End the process, unless the coro's end is the end of the loop's run: it has forked, and has ended in the child.

    Return whether ``coro.run()`` waits for it. Nobody else does so here.
    """
    is_awaited = _task_of_run(co) is not None
    if is_awaited or leaves_loop:
        # asyncio has reset it at the fork.
        asyncio._set_running_loop(co._loop)
        return is_awaited
    if co._exception is not None:
        co._report_unseen()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # closed, broken or None, as at the end of any process
            pass
    os._exit(0)
