"""The watchers of gevent's loop interface, on a grapeshot loop. Source: IWatcher in gevent's ``_interfaces.py``.

A watcher is active between ``start`` and ``stop``. An active watcher whose ``ref`` is true keeps ``Loop.run`` from
returning, so each watcher tells the loop when it becomes active and when it stops being active.
"""

from __future__ import annotations

import contextlib
import contextvars
import fcntl
import os
import signal

import gevent._interfaces  # type: ignore[import-untyped]
import zope.interface  # type: ignore[import-untyped]  # gevent needs it

from grapeshot import _core

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any

    from ._loop import Loop

READ, WRITE = 1, 2
# A placeholder (``gevent.core.GEVENT_CORE_EVENTS``). Where it is the first argument of a callback, the callback gets
# the events that happened instead.
EVENTS = _core._HUB_EVENTS


class Watcher:
    """The base class of watchers.

    A subclass starts watching in ``_begin``, and stops in ``_end``. It calls ``_fire`` when its event happens.
    """

    def __init__(self, loop: Loop, ref: bool = True, priority: int | None = None) -> None:
        self.loop = loop
        self._ref = bool(ref)
        self._priority = priority
        self._is_active = False
        self._callback: Callable[..., Any] | None = None
        self._args: tuple[Any, ...] | None = None

    def __repr__(self) -> str:
        state = "active" if self._is_active else "stopped"
        text = f"<{type(self).__name__} at {id(self):#x}{self._format()} {state}"
        if self._is_active and self._callback is not None:
            text += f" callback={self._callback!r} args={self._args!r}"
        return f"{text} ref={self._ref}>"

    def _format(self) -> str:
        return ""

    @property
    def active(self) -> bool:
        return self._is_active

    @property
    def pending(self) -> bool:
        """Always false here: a watcher calls its callback as soon as it notices the event."""
        return False

    @property
    def priority(self) -> int | None:
        """The priority that the program has set. It has no effect."""
        return self._priority

    @priority.setter
    def priority(self, priority: int | None) -> None:
        self._check_stopped("priority")
        self._priority = priority

    def _check_stopped(self, name: str) -> None:
        if self._is_active:
            raise AttributeError(
                f"{type(self).__name__} watcher attribute {name!r} is read-only while watcher is active"
            )

    @property
    def callback(self) -> Callable[..., Any] | None:
        return self._callback

    @callback.setter
    def callback(self, callback: Callable[..., Any] | None) -> None:
        if callback is not None and not callable(callback):
            raise TypeError(f"Expected callable, not {callback!r}")
        self._callback = callback

    @property
    def args(self) -> tuple[Any, ...] | None:
        return self._args

    @args.setter
    def args(self, args: tuple[Any, ...] | None) -> None:
        if args is not None and not isinstance(args, tuple):
            raise TypeError("args must be a tuple or None")
        self._args = args

    @property
    def ref(self) -> bool:
        """Whether the loop goes on while this watcher is active."""
        return self._ref

    @ref.setter
    def ref(self, value: bool) -> None:
        value = bool(value)
        if value != self._ref:
            self._ref = value
            if self._is_active:
                self.loop._count(1 if value else -1)

    def start(self, callback: Callable[..., Any], *args: Any) -> None:
        """Call ``callback(*args)`` in the hub whenever the event happens."""
        if not callable(callback):
            raise TypeError(f"callback must be callable, not {callback!r}")
        self._callback, self._args = callback, args
        if not self._is_active:
            self.loop._check_open()
            self._begin()
            self._activate()

    def _activate(self) -> None:
        self._is_active = True
        self.loop._watchers.add(self)
        if self._ref:
            self.loop._count(1)

    def _deactivate(self) -> None:
        if self._is_active:
            self._is_active = False
            self.loop._watchers.discard(self)
            if self._ref:
                self.loop._count(-1)

    def stop(self) -> None:
        self._callback = self._args = None
        if self._is_active:
            self._end()
            self._deactivate()

    def close(self) -> None:
        """Stop. The watcher is not used again."""
        self.stop()

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError

    def _fire(self, events: int = 0) -> None:
        callback, args = self._callback, self._args
        if callback is None or args is None:
            return
        if args and args[0] is EVENTS:
            args = (events, *args[1:])
        self.loop._call(self, callback, args)

    def _fire_once(self) -> None:
        """Deactivate the watcher, and fire it. If its callback does not start it again, forget the callback."""
        self._deactivate()
        self._fire()
        if not self._is_active:
            self._callback = self._args = None

    def _forked(self) -> None:
        """In the child of a fork, where the loop has forgotten this watcher: start watching again."""
        self._begin()


class io(_core._HubIo, Watcher):  # noqa: N801  # gevent's name
    """Fires while a descriptor is ready for reading (1) or writing (2)."""

    def __init__(self, loop: Loop, fd: int, events: int, ref: bool = True, priority: int | None = None) -> None:
        if not isinstance(fd, int):
            raise TypeError(f"fd must be an int, not {type(fd).__name__}")
        if fd < 0:
            raise ValueError(f"fd must be non-negative: {fd!r}")
        _check_events(events)
        fcntl.fcntl(fd, fcntl.F_GETFD)  # raises OSError (EBADF) if the descriptor is not open
        self._set(loop, fd, events)
        self._ref, self._priority = bool(ref), priority

    @property
    def fd(self) -> int:
        return self._fd

    @fd.setter
    def fd(self, fd: int) -> None:
        self._check_stopped("fd")
        self._set(self.loop, fd, self._events)

    @property
    def events(self) -> int:
        return self._events

    @events.setter
    def events(self, events: int) -> None:
        self._check_stopped("events")
        _check_events(events)
        self._set(self.loop, self._fd, events)

    def _format(self) -> str:
        return f" fd={self._fd} events={self._events}"


def _check_events(events: int) -> None:
    if events & ~(READ | WRITE):
        raise ValueError(f"illegal event mask: {events!r}")


class timer(Watcher):  # noqa: N801
    """Fires after ``after`` seconds, and then every ``repeat`` seconds, unless ``repeat`` is 0."""

    def __init__(
        self, loop: Loop, after: float = 0.0, repeat: float = 0.0, ref: bool = True, priority: int | None = None
    ) -> None:
        if repeat < 0.0:
            raise ValueError(f"repeat must be positive or zero: {repeat!r}")
        super().__init__(loop, ref, priority)
        self._after, self._repeat = after, repeat
        self._handle: Any = None

    @property
    def at(self) -> float:
        """The time on the loop's clock at which the timer fires next; 0.0 if the timer is not running."""
        return 0.0 if self._handle is None else self._handle.when()

    def start(self, callback: Callable[..., Any], *args: Any, update: bool = True) -> None:
        super().start(callback, *args)

    def again(self, callback: Callable[..., Any], *args: Any, update: bool = True) -> None:
        """Restart the timer with ``repeat`` as the delay. Without a ``repeat``, stop it."""
        self.stop()
        if self._repeat:
            after, self._after = self._after, self._repeat
            try:
                self.start(callback, *args)
            finally:
                self._after = after

    def _begin(self) -> None:
        self._set(max(self._after, 0.0))

    def _set(self, delay: float) -> None:
        self._handle = self.loop.asyncio_loop.call_later(delay, self._due, context=contextvars.Context())

    def _forked(self) -> None:
        self._set(max(0.0, self._handle.when() - self.loop.now()) if self._handle is not None else 0.0)

    def _end(self) -> None:
        self._handle.cancel()
        self._handle = None

    def _due(self) -> None:
        self._handle = None
        if self._repeat:
            self._set(self._repeat)
            self._fire()
        else:
            self._fire_once()


class signal_(Watcher):  # noqa: N801
    """Fires when the process gets a signal. Signals arrive at the loop of the main thread."""

    def __init__(self, loop: Loop, signalnum: int, ref: bool = True, priority: int | None = None) -> None:
        if signalnum < 1 or signalnum >= signal.NSIG:
            raise ValueError(f"illegal signal number: {signalnum!r}")
        super().__init__(loop, ref, priority)
        self._signalnum = signalnum

    def _format(self) -> str:
        return f" signalnum={self._signalnum}"

    def _begin(self) -> None:
        watchers = self.loop._signals.setdefault(self._signalnum, [])
        if not watchers:
            self.loop.asyncio_loop.add_signal_handler(self._signalnum, self.loop._signalled, self._signalnum)
        watchers.append(self)

    def _end(self) -> None:
        watchers = self.loop._signals.get(self._signalnum, [])
        with contextlib.suppress(ValueError):
            watchers.remove(self)
        if not watchers:
            self.loop._signals.pop(self._signalnum, None)
            self.loop.asyncio_loop.remove_signal_handler(self._signalnum)


class _InEachIteration(Watcher):
    """Fires in each iteration of the loop. Callbacks that were added before the watcher was started run first."""

    _handle: Any = None

    def _begin(self) -> None:
        self._handle = self.loop._soon(self._wait_for_next)

    def _wait_for_next(self) -> None:
        self._handle = self.loop._soon(self._step)

    def _end(self) -> None:
        self._handle.cancel()

    def _step(self) -> None:
        self._handle = self.loop._soon(self._step)
        self._fire()


class idle(_InEachIteration):  # noqa: N801
    """Fires in each iteration. While it is active, the loop does not block."""


class prepare(_InEachIteration):  # noqa: N801
    """Fires in each iteration, before the loop polls. While it is active, the loop does not block."""


class check(_InEachIteration):  # noqa: N801
    """Fires in each iteration, after the loop has polled. While it is active, the loop does not block."""


class fork(Watcher):  # noqa: N801
    """Fires in the child of a fork (see ``Loop.reinit``)."""

    def _begin(self) -> None:
        pass

    def _end(self) -> None:
        pass


class async_(Watcher):  # noqa: N801
    """Fires when ``send`` was called, in any thread or in a signal handler."""

    def __init__(self, loop: Loop, ref: bool = True, priority: int | None = None) -> None:
        super().__init__(loop, ref, priority)
        self._is_pending = False

    @property
    def pending(self) -> bool:
        return self._is_pending

    def send(self) -> None:
        if self._is_pending:
            return
        self._is_pending = True
        try:
            self.loop.asyncio_loop.call_soon_threadsafe(self._sent, context=contextvars.Context())
        except RuntimeError:  # the loop is closed
            self._is_pending = False

    def send_ignoring_arg(self, _ignored: object) -> None:
        """Like :meth:`send`, but with an ignored argument, so that this can be used like a greenlet's ``switch``."""
        self.send()

    def _sent(self) -> None:
        self._is_pending = False
        if self._is_active:
            self._fire()

    def _begin(self) -> None:
        pass

    def _end(self) -> None:
        pass

    def _forked(self) -> None:
        self._is_pending = False


class child(Watcher):  # noqa: N801
    """Fires when a child process has ended. ``rpid`` is then its id, and ``rstatus`` its status as from ``waitpid``.

    With a ``pid`` of 0 it fires for any child.
    """

    def __init__(self, loop: Loop, pid: int, trace: int = 0, ref: bool = True) -> None:
        if not loop.default:
            raise TypeError("child watchers are only available on the default loop")
        super().__init__(loop, ref)
        self._pid = pid
        self.rpid: int | None = None
        self.rstatus = 0

    @property
    def pid(self) -> int:
        return self._pid

    def _format(self) -> str:
        return f" pid={self._pid!r} rstatus={self.rstatus!r}"

    def _begin(self) -> None:
        self.loop._children.watch(self)

    def _end(self) -> None:
        self.loop._children.unwatch(self)

    def _forked(self) -> None:
        self._deactivate()  # the watched process is a child of the parent


class stat(Watcher):  # noqa: N801
    """Fires when the status of a path has changed.

    The status is read every ``interval`` seconds, but not more often than every 0.1 seconds. An ``interval`` of 0 means
    5 seconds.
    """

    _DEFAULT_INTERVAL_S = 5.0

    def __init__(
        self, loop: Loop, path: str | bytes, interval: float = 0.0, ref: bool = True, priority: int | None = None
    ) -> None:
        super().__init__(loop, ref, priority)
        self._path = path
        self._paths = os.fsencode(path)  # the name in gevent's other loops
        self._interval = interval
        self.attr = self.prev = self._stat()
        self._handle: Any = None

    @property
    def path(self) -> str | bytes:
        return self._path

    @property
    def interval(self) -> float:
        return self._interval

    def _stat(self) -> os.stat_result | None:
        try:
            return os.stat(self._path)
        except OSError:
            return None

    def _begin(self) -> None:
        if self._interval <= 0:
            self._interval = self._DEFAULT_INTERVAL_S
        self._set()

    def _set(self) -> None:
        interval = max(self._interval, 0.1)
        self._handle = self.loop.asyncio_loop.call_later(interval, self._look, context=contextvars.Context())

    def _end(self) -> None:
        self._handle.cancel()

    def _look(self) -> None:
        self._set()
        status = self._stat()
        if status != self.attr:
            self.prev, self.attr = self.attr, status
            self._fire()


@zope.interface.implementer(gevent._interfaces.ICallback)
class Callback:
    """A function that is called once, soon. It counts as a reference to the loop until it is called."""

    __slots__ = ("args", "callback")

    def __init__(self, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.callback: Callable[..., Any] | None = callback
        # None once it was called or stopped.
        self.args: tuple[Any, ...] | None = args

    def stop(self) -> None:
        self.callback = self.args = None

    close = stop

    def __bool__(self) -> bool:
        return self.args is not None

    @property
    def pending(self) -> bool:
        return self.callback is not None

    def __repr__(self) -> str:
        text = f"<callback at {id(self):#x}"
        text += " pending" if self.pending else " stopped" if self.callback is None else ""
        return f"{text} callback={self.callback!r} args={self.args!r}>"
