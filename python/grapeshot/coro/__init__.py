"""Coros: ordinary blocking-style functions as cooperative threads, in the same loop as asyncio's tasks.

    >>> from grapeshot import coro
    >>> def pause(seconds):
    ...     coro.sleep_relative(seconds)
    ...     return "rested"
    >>> coro.run(pause, 0.01)
    'rested'

A coro yields when it waits; there is no async, no await and no second scheduler. The names are Shrapnel's. Not
available on free-threaded builds of Python, nor on versions and processors whose inner workings are not known here:
importing the module then raises ImportError with the reason, and the rest of the package works.
"""

from __future__ import annotations

import gc
import os
import time

from grapeshot import _core
from grapeshot._loop import Loop

from . import _ending, _errors, threads
from ._coroutine import Coro
from ._errors import (
    ClosedError,
    CoroCancelled,
    DeadCoroutine,
    Empty,
    Full,
    InParallelError,
    Interrupted,
    LockError,
    NotStartedError,
    ScheduleError,
    Shutdown,
    SimultaneousError,
    TimeoutError,  # noqa: A004
    WakeUp,
    YieldFromMain,
)
from ._event_loop import event_loop, pending_loop, set_exit
from ._future import future
from ._groups import Group, Pool, in_parallel, spawn_later, wait_for
from ._sync import (
    ThreadLocal,
    channel,
    condition_variable,
    event,
    fifo,
    inverted_semaphore,
    lock,
    mailbox,
    mutex,
    rw_lock,
    semaphore,
)
from ._timeouts import timeout, with_timeout
from ._where import compact_traceback, where, where_all
from .bridge import await_, run, run_sync

TYPE_CHECKING = False  # typing is not imported at run time: from Python 3.14 on asyncio does without it
if TYPE_CHECKING:
    from typing import Any

_reason = _core._coro_setup(_errors, Coro)
if _reason is not None:
    raise ImportError(_reason)
_core._coro_set_hooks(pending_loop, _ending.watch_thread, wait_for)
# In front of all others: what they call may try to wait.
gc.callbacks.insert(0, _core._coro_note_collection)
os.register_at_fork(after_in_child=_core._coro_after_fork)
Loop._before_close = staticmethod(_ending.unwind)

new = _core._coro_new
spawn = _core._coro_spawn
current = _core._coro_current
yield_slice = _core._coro_yield_slice
wait = _core._coro_wait
sleep_relative = _core._coro_sleep_relative
sleep_absolute = _core._coro_sleep_absolute
set_exception_notifier = _core._coro_set_exception_notifier
set_latency_warning = _core._coro_set_latency_warning
set_selfishness = _core._coro_set_selfishness
set_stack_slots = _core._coro_set_stack_slots
stack_info = _core._coro_statistics
now = time.monotonic


def schedule(co: Coro, value: Any = None) -> None:
    """Let a coro that waits go on; its wait returns ``value``.

    Raises:
        ScheduleError: it is scheduled already, or belongs to another thread.
        DeadCoroutine, NotStartedError: it has ended, or was not started.
    """
    co._wake(value)


def get_live_coros() -> list[Coro]:
    """Return the coros of this thread that were started and have not ended."""
    return _core._coro_live()


def all_threads() -> dict[int, Coro]:
    """Return the same by their ids."""
    return {co.id: co for co in _core._coro_live()}


def get_thread_by_id(ident: int) -> Coro:
    """Return the live coro of this thread with that id. KeyError if there is none."""
    return all_threads()[ident]


__all__ = [
    "ClosedError",
    "Coro",
    "CoroCancelled",
    "DeadCoroutine",
    "Empty",
    "Full",
    "Group",
    "InParallelError",
    "Interrupted",
    "LockError",
    "NotStartedError",
    "Pool",
    "ScheduleError",
    "Shutdown",
    "SimultaneousError",
    "ThreadLocal",
    "TimeoutError",
    "WakeUp",
    "YieldFromMain",
    "all_threads",
    "await_",
    "channel",
    "compact_traceback",
    "condition_variable",
    "current",
    "event",
    "event_loop",
    "fifo",
    "future",
    "get_live_coros",
    "get_thread_by_id",
    "in_parallel",
    "inverted_semaphore",
    "lock",
    "mailbox",
    "mutex",
    "new",
    "now",
    "run",
    "run_sync",
    "rw_lock",
    "schedule",
    "semaphore",
    "set_exception_notifier",
    "set_exit",
    "set_latency_warning",
    "set_selfishness",
    "set_stack_slots",
    "sleep_absolute",
    "sleep_relative",
    "spawn",
    "spawn_later",
    "stack_info",
    "threads",
    "timeout",
    "wait",
    "where",
    "where_all",
    "with_timeout",
    "yield_slice",
]
