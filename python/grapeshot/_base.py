"""The Python state of a loop, which the method modules share.

The method modules are functions that take an instance of this class, and :mod:`grapeshot._loop` makes them methods of
:class:`grapeshot.Loop`. Everything here belongs to the thread that runs the loop. Attributes that have no value yet are
None on the class, so that making a loop is cheap: the executor and the weak set are made when they are needed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine

from . import _core

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    ExceptionHandler = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object]
    SignalHandler = tuple[Callable[..., object], tuple[Any, ...], contextvars.Context]


# If a program sets one of these on a loop, the timers follow it.
_CLOCK = frozenset(("time", "call_at"))


class Shown:
    """A private name of asyncio's that other code reads, with a value of ours.

    A value that is set on an object replaces ours there, as on asyncio's objects, and changes nothing else.
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
    # what coros, once they are imported, must do before close(): a plain function, read from the class unbound
    _before_close: staticmethod[[Any], None] | Callable[[Any], None] | None = None
    # what they must do before a runner cancels what is left: as above; it returns the handle of what it has scheduled
    _watch_end: staticmethod[[Any], Any] | Callable[[Any], Any] | None = None
    # what coros that hide the loop must have: a plain function that makes a borrowed loop in such a coro (in one of the
    # loop that it is given), or returns None elsewhere
    _borrow: staticmethod[[Any], Any] | Callable[[Any], Any] | None = None
    # what a back door that is asked for must do when a loop begins to run: a plain function, as above
    _on_run: staticmethod[[Any], None] | Callable[[Any], None] | None = None
    # whose tasks the loop runs, while such coros borrow it
    _ledger: Any = None
    # who wants to know how long callbacks take
    _measuring: Any = None
    # what is told of each step, by name; who has had the CPU; where the program has opened things, in debug mode
    _step_observers: dict[str, Callable[[Any, int, int], object]] | None = None
    _charges: Any = None
    _origins: weakref.WeakKeyDictionary[Any, str] | None = None
    # what run_until_complete() waits for
    _awaited: Any = None
    # errors
    _exception_handler: ExceptionHandler | None = None
    # asynchronous generators
    _asyncgens: weakref.WeakSet[AsyncGenerator[Any, Any]] | None = None
    _asyncgens_shutdown_called: bool = False
    # debug mode: the depth to put back, None while coroutine origins are not tracked
    _coroutine_origin_depth: int | None = None
    # asyncio's names for the results of `is_closed()` and `get_debug()`, which other code reads
    _closed = property(_core.Loop.is_closed)
    _debug = property(_core.Loop.get_debug)
    _task_factory = property(_core.Loop.get_task_factory)
    _clock_resolution: float = 1e-9
    # sendfile by the system call alone, under the names of asyncio's own loops
    _sendfile_native: Callable[..., Coroutine[Any, Any, int]]
    _sock_sendfile_native: Callable[..., Coroutine[Any, Any, int]]
    # signals: handlers by number, and the numbers whose Python handler has run but that have not come out of the pipe
    # yet. Numbers that a full pipe has lost are among them
    _signal_handlers: dict[int, SignalHandler] | None = None
    _signals_noted: set[int]

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name in _CLOCK:
            self._attributes_changed()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if name in _CLOCK:
            self._attributes_changed()
