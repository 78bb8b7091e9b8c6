"""Coros: functions in ordinary blocking style that run as cooperative threads, on the same loop as asyncio's tasks.

    >>> from grapeshot import coro
    >>> def pause(seconds):
    ...     coro.sleep_relative(seconds)
    ...     return "rested"
    >>> coro.run(pause, 0.01)
    'rested'

A coro lets others run whenever it waits. Its code needs neither ``async`` nor ``await``, and the loop schedules coros
and tasks alike. Most names come from Shrapnel, IronPort's library of cooperative threads.

This module supports only some Python versions and processors. On all others, importing it raises ImportError with the
reason; the rest of the package still works.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from types import ModuleType as _ModuleType

from . import _other_patchers as _other_patchers
from . import _setup as _setup
from . import signal_handler, threads
from ._aio import aio_read, aio_write
from ._bridge import await_, run, run_sync
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
from ._event_loop import event_loop, set_exit
from ._executor import CoroPoolExecutor
from ._file_events import FileEvent
from ._files import fd_sock, file_sock
from ._future import future
from ._groups import Group, Pool, in_parallel, spawn_later
from ._hiding import call_blocking, run_blocking
from ._latency import set_latency_warning
from ._patching import PatchWarning, get_original, is_patched, patch
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
    mutex,
    rw_lock,
    semaphore,
)
from ._timeouts import timeout, with_timeout
from ._watch_file import watch_file
from ._where import compact_traceback, where, where_all

TYPE_CHECKING = False

# Aliases: Shrapnel's names for functions and classes that have other names here. docs/coro-migration.md lists all
# aliases, including the aliases of methods.
install_thread_emulation = patch
make_socket = sock

# Starting and ending
__all__ = ["event_loop", "new", "run", "set_exit", "spawn", "spawn_later"]
# A coro
__all__ += ["Coro", "all_threads", "current", "get_live_coros", "get_thread_by_id", "schedule"]
# Waiting
__all__ += ["now", "sleep_absolute", "sleep_relative", "timeout", "wait", "with_timeout", "yield_slice"]
__all__ += ["wait_for_read", "wait_for_write"]
# Many coros
__all__ += ["Group", "Pool", "in_parallel"]
# Locks, queues and results
__all__ += ["condition_variable", "event", "inverted_semaphore", "lock", "mutex", "rw_lock", "semaphore"]
__all__ += ["ThreadLocal", "channel", "fifo", "future"]
# Coros together with asyncio, and with real threads
__all__ += ["CoroPoolExecutor", "await_", "call_blocking", "run_blocking", "run_sync", "threads"]
# Sockets and services
__all__ += ["make_socket", "sock", "socketpair", "tcp6_sock", "tcp_sock", "udp6_sock", "udp_sock", "unix_sock"]
__all__ += ["Server", "read_stream", "serve"]
# Files, children and signals
__all__ += ["FileEvent", "aio_read", "aio_write", "fd_sock", "file_sock", "signal_handler", "waitpid", "watch_file"]
# Patching
__all__ += ["PatchWarning", "get_original", "install_thread_emulation", "is_patched", "patch"]
# Looking inside
__all__ += ["compact_traceback", "print_run_info", "stack_info", "where", "where_all"]
__all__ += ["set_exception_notifier", "set_latency_warning"]
# Settings of a thread
__all__ += ["set_selfishness", "set_stack_slots"]
# Errors
__all__ += ["ClosedError", "CoroCancelled", "DeadCoroutine", "Empty", "Full", "InParallelError", "Interrupted"]
__all__ += ["LockError", "NotStartedError", "ScheduleError", "Shutdown", "SimultaneousError", "TimeoutError"]
__all__ += ["WakeUp", "YieldFromMain"]

if TYPE_CHECKING:
    from . import backdoor as backdoor
    from . import profiler as profiler
else:

    class _OnDemand(_ModuleType):
        """Stands for a submodule whose name comes from Shrapnel, and imports that submodule when it is first used.

        If this package had a ``__getattr__`` instead, CPython would not specialize accesses such as ``coro.spawn``.
        They would take more than twice as long, and free-threaded loops would contend for the reference counts.
        """

        def __getattribute__(self, name):
            return getattr(_import_module(object.__getattribute__(self, "__name__")), name)

    backdoor, profiler = _OnDemand(f"{__name__}.backdoor"), _OnDemand(f"{__name__}.profiler")


def __dir__() -> list[str]:
    return sorted((*__all__, "backdoor", "profiler"))


def _name_as_public() -> None:
    """Set ``__module__`` of the public objects to this package's name, which tracebacks, ``help`` and pickles use."""
    for name in __all__:
        value = globals()[name]
        if getattr(value, "__module__", "").startswith(f"{__name__}."):
            value.__module__ = __name__


_name_as_public()
