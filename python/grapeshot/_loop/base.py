"""The Python state of a loop, which the method modules share.

A method module contains functions that take a :class:`BaseLoop`; :mod:`grapeshot._loop` makes them methods of
:class:`grapeshot.Loop`. Only the thread that runs the loop uses this state. To make creating a loop cheap, attributes
are None on the class until they are needed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine

from grapeshot import _core

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    ExceptionHandler = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object]
    SignalHandler = tuple[Callable[..., object], tuple[Any, ...], contextvars.Context]


# If a program sets one of these attributes on a loop, the native timers use it.
_CLOCK = frozenset(("time", "call_at"))


class ComputedAttribute:
    """A private attribute of asyncio's objects that other code reads; here its value is computed.

    A program may set the attribute on an object. Reading it then returns that value, but nothing else changes.
    """

    def __init__(self, value_of: Callable[[Any], object]) -> None:
        self._value_of = value_of

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else self._value_of(owner)


class BaseLoop(_core.Loop, asyncio.AbstractEventLoop):
    """The native loop with asyncio's abstract class and the Python state; see :class:`grapeshot.Loop`."""

    # executor
    _default_executor: concurrent.futures.Executor | None = None
    _executor_shutdown_called: bool = False
    # the executors that have coros of this loop among their workers (coro/_executor.py)
    _coro_executors: weakref.WeakSet[Any] | None = None
    # names: the lookups under way, and for how long answers are reused
    _resolver: Any = None
    _dns_cache_s: float = 0.0
    # files: the calls under way
    _grapeshot_aio: Any = None
    # while coros borrow the loop: the `Ledger` that knows to which run each task belongs (coro/_borrowing.py)
    _ledger: Any = None
    # measures how long callbacks take, and holds the listeners for slow callbacks
    _measuring: Any = None
    # by name: functions called after each step
    _step_observers: dict[str, Callable[[Any, int, int], object]] | None = None
    # CPU accounting: the CPU time of each task, coro and transport
    _charges: Any = None
    # in debug mode: where the program has opened transports and servers
    _origins: weakref.WeakKeyDictionary[Any, str] | None = None
    # the future that run_until_complete() waits for
    _awaited: Any = None
    # errors
    _exception_handler: ExceptionHandler | None = None
    # asynchronous generators
    _asyncgens: weakref.WeakSet[AsyncGenerator[Any, Any]] | None = None
    _asyncgens_shutdown_called: bool = False
    # debug mode: the tracking depth to restore, None while coroutine origins are not tracked
    _coroutine_origin_depth: int | None = None
    # private names of asyncio's loops that other code reads
    _closed = property(_core.Loop.is_closed)
    _debug = property(_core.Loop.get_debug)
    _task_factory = property(_core.Loop.get_task_factory)
    _clock_resolution: float = 1e-9
    # sendfile with the system call and no fallback, under the names that asyncio's own loops use
    _sendfile_native: Callable[..., Coroutine[Any, Any, int]]
    _sock_sendfile_native: Callable[..., Coroutine[Any, Any, int]]
    # signals: the handlers, by signal number
    _signal_handlers: dict[int, SignalHandler] | None = None
    # The numbers of signals that have arrived (their Python handler has run), but that the loop has not yet read from
    # the wake-up pipe. If the pipe was full, the number of such a signal is here, but not in the pipe.
    _signals_noted: set[int]

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name in _CLOCK:
            self._attributes_changed()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if name in _CLOCK:
            self._attributes_changed()
