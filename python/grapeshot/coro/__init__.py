"""Coros: functions in ordinary blocking style that run as cooperative threads, on the same loop as asyncio's tasks.

    >>> from grapeshot import coro
    >>> def pause(seconds):
    ...     coro.sleep_relative(seconds)
    ...     return "rested"
    >>> coro.run(pause, 0.01)
    'rested'

A coro lets others run whenever it waits. It needs neither ``async`` nor ``await``, and there is no second scheduler.
The names come from Shrapnel.

This module is not available on free-threaded builds of Python, nor on Python versions and processors that it does not
support. Importing it there raises ImportError with the reason; the rest of the package still works.
"""

from __future__ import annotations

from . import _other_patchers as _other_patchers
from . import _setup as _setup
from . import signal_handler, threads
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
    TimeoutError,
    WakeUp,
    YieldFromMain,
)
from ._event_loop import event_loop, set_exit
from ._file_events import FileEvent
from ._files import fd_sock, file_sock
from ._future import future
from ._groups import Group, Pool, in_parallel, spawn_later
from ._hiding import call_blocking, run_blocking
from ._latency import set_latency_warning
from ._patching import PatchWarning, get_original, install_thread_emulation, is_patched, patch
from ._processes import waitpid
from ._read_stream import read_stream
from ._run_info import print_run_info
from ._scheduling import (
    all_threads,
    current,
    get_live_coros,
    get_thread_by_id,
    new,
    now,
    schedule,
    set_exception_notifier,
    set_selfishness,
    set_stack_slots,
    sleep_absolute,
    sleep_relative,
    spawn,
    stack_info,
    wait,
    yield_slice,
)
from ._serve import Server, serve
from ._socket import (
    make_socket,
    sock,
    socketpair,
    tcp6_sock,
    tcp_sock,
    udp6_sock,
    udp_sock,
    unix_sock,
    wait_for_read,
    wait_for_write,
)
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
from ._watch_file import watch_file
from ._where import compact_traceback, where, where_all
from ._bridge import await_, run, run_sync

TYPE_CHECKING = False

__all__ = [
    "ClosedError",
    "Coro",
    "CoroCancelled",
    "DeadCoroutine",
    "Empty",
    "FileEvent",
    "Full",
    "Group",
    "InParallelError",
    "Interrupted",
    "LockError",
    "NotStartedError",
    "PatchWarning",
    "Pool",
    "ScheduleError",
    "Server",
    "Shutdown",
    "SimultaneousError",
    "ThreadLocal",
    "TimeoutError",
    "WakeUp",
    "YieldFromMain",
    "all_threads",
    "await_",
    "call_blocking",
    "channel",
    "compact_traceback",
    "condition_variable",
    "current",
    "event",
    "event_loop",
    "fd_sock",
    "fifo",
    "file_sock",
    "future",
    "get_live_coros",
    "get_original",
    "get_thread_by_id",
    "in_parallel",
    "install_thread_emulation",
    "inverted_semaphore",
    "is_patched",
    "patch",
    "lock",
    "mailbox",
    "make_socket",
    "mutex",
    "new",
    "now",
    "print_run_info",
    "read_stream",
    "run",
    "run_blocking",
    "run_sync",
    "rw_lock",
    "schedule",
    "semaphore",
    "serve",
    "set_exception_notifier",
    "set_exit",
    "set_latency_warning",
    "set_selfishness",
    "set_stack_slots",
    "signal_handler",
    "sleep_absolute",
    "sleep_relative",
    "sock",
    "socketpair",
    "spawn",
    "spawn_later",
    "stack_info",
    "tcp6_sock",
    "tcp_sock",
    "threads",
    "timeout",
    "udp6_sock",
    "udp_sock",
    "unix_sock",
    "wait",
    "wait_for_read",
    "wait_for_write",
    "waitpid",
    "watch_file",
    "where",
    "where_all",
    "with_timeout",
    "yield_slice",
]


# Submodules with Shrapnel's names. They are imported when a program first uses them.
_ON_DEMAND = ("backdoor", "profiler")

if TYPE_CHECKING:
    from . import backdoor as backdoor
    from . import profiler as profiler
else:

    def __getattr__(name):
        if name == "backdoor":
            import grapeshot.coro.backdoor as value
        elif name == "profiler":
            import grapeshot.coro.profiler as value
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return value


def __dir__() -> list[str]:
    return sorted((*__all__, *_ON_DEMAND))


def _name_as_public() -> None:
    """Set ``__module__`` of the public objects to this package, which tracebacks, ``help`` and pickles then show."""
    for name in __all__:
        value = globals()[name]
        if getattr(value, "__module__", "").startswith(f"{__name__}."):
            value.__module__ = __name__


_name_as_public()
