"""Forks in coros. Only the coro that forked continues in the child, just as only one thread continues after a fork.

The thread's other coros, and the tasks, callbacks, timers and connections of its loop, belong to the parent. None of
their code runs in the child, not even ``finally`` blocks, so objects that they refer to are never freed. The loop gets
a new poller, because it shares its old one with the parent.

How the child goes on when the coro has ended there:

    the coro was started by coro.run()         coro.run() returns or raises in the child
    it raised SystemExit, KeyboardInterrupt    the exception leaves the loop, whichever coro this is
    otherwise                                  the process ends with status 0, as when a thread forks and returns
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading

from grapeshot import _core
from grapeshot._loop import Loop, lifecycle

from . import _latency
from ._bridge import run_sync

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Objects that belong to the parent. The child never frees them: that could run their finalizers and `finally` blocks.
_forgotten: list[Any] = []
# While a coro of this thread forks, `_forking.tasks` has the tasks of the loop. They are listed before the fork because
# from Python 3.14 on asyncio's own list is empty in the child. (Even so, the child must unregister each task that it
# forgets. The tasks are still linked to each other, and the oldest one to the head of asyncio's list. If only the
# oldest task were removed, for example because it ends, the head would be linked to the others again.)
_forking = threading.local()


def before_fork() -> None:
    """Prepare for a fork: end the threads of the latency warning, and list the tasks of the loop."""
    _core._coro_stop_watchdog()
    _latency.wait_logged()
    co = _core._coro_current_or_none()
    if co is not None:
        _forking.tasks = asyncio.all_tasks(co._loop)


def after_fork_in_parent() -> None:
    """Drop the list of tasks. (The watchdog starts again when it is needed.)"""
    vars(_forking).pop("tasks", None)


def after_fork_in_child() -> None:
    """If a coro has forked, forget everything that belongs to the parent."""
    co = _core._coro_after_fork()
    if co is not None:
        _forget_parent(co._loop, _task_of_run(co))


def _forget_parent(loop: Loop, kept: object) -> None:
    lifecycle.forget_parent(loop)
    for task in vars(_forking).pop("tasks", ()):
        if isinstance(task, asyncio.Task) and task is not kept:
            asyncio._unregister_task(task)
            _forgotten.append(task)


def _task_of_run(co: Any) -> Any:
    """If the loop runs only until ``co`` ends, return the coro or task for whose end the loop waits, else None.

    That is ``co`` itself, or the task in which ``coro.run()`` awaits ``co``.
    """
    awaited = co._loop._awaited
    if awaited is co:
        return co
    if isinstance(awaited, asyncio.Task) and awaited._fut_waiter is co:  # type: ignore[attr-defined]
        code = getattr(awaited.get_coro(), "cr_code", None)
        return awaited if code is run_sync.__code__ else None
    return None


def end_child(co: Any, leaves_loop: bool) -> bool:
    """Called in the child when the coro that forked has ended: end the process, unless the loop now stops running.

    The loop stops if it runs only until this coro ends, as with ``coro.run()``, or if the coro ended with an exception
    that leaves the loop (``leaves_loop``). Return True in the first case: native code then schedules the coro's
    callbacks. In all other cases no code in the child waits for the coro.
    """
    is_awaited = _task_of_run(co) is not None
    if is_awaited or leaves_loop:
        # asyncio resets the running loop in a forked child.
        asyncio._set_running_loop(co._loop)
        return is_awaited
    if co._exception is not None:
        co._report_unseen()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # the stream is closed, broken or None
            pass
    os._exit(0)
