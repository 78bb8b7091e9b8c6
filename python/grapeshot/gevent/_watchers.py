"""The watchers of gevent's loop interface, on a grapeshot loop. Source: IWatcher in gevent's ``_interfaces.py``.

A watcher is active between ``start`` and ``stop``. gevent's hub ends its loop when no active watcher with a reference
is left, so each watcher tells the loop when it becomes active and when it no longer is.
"""

from __future__ import annotations

import contextlib
import contextvars
import fcntl
import functools
import os
import select
import signal

import gevent._interfaces  # type: ignore[import-untyped]
import gevent.monkey  # type: ignore[import-untyped]
import zope.interface  # type: ignore[import-untyped]  # gevent needs it

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any

    from ._loop import Loop

READ, WRITE = 1, 2
# As the first argument of a callback, this stands for the events that happened (``gevent.core.GEVENT_COREEVENTS``).
EVENTS = object()


class Watcher:
    """The common part. A subclass begins to watch in ``_begin``, ends in ``_end``, and calls ``_fire``."""

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
        if self._callback is not None:
            text += f" callback={self._callback!r} args={self._args!r}" if self._is_active else ""
        return f"{text} ref={self._ref}>"

    def _format(self) -> str:
        return ""

    @property
    def active(self) -> bool:
        return self._is_active

    @property
    def pending(self) -> bool:
        """Whether the event has happened and the callback has not been called yet."""
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
        """Stop, for good."""
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
        """Fire a watcher that is no longer active. If the callback does not start it again, it is stopped."""
        self._deactivate()
        self._fire()
        if not self._is_active:
            self._callback = self._args = None

    def _forked(self) -> None:
        """In the child of a fork, where the loop has forgotten everything: begin again."""
        self._begin()


class io(Watcher):  # noqa: N801  # gevent's name
    """Fires while a descriptor is ready for reading (1) or writing (2)."""

    def __init__(self, loop: Loop, fd: int, events: int, ref: bool = True, priority: int | None = None) -> None:
        if not isinstance(fd, int):
            raise TypeError(f"fd must be an int, not {type(fd).__name__}")
        if fd < 0:
            raise ValueError(f"fd must be non-negative: {fd!r}")
        _check_events(events)
        fcntl.fcntl(fd, fcntl.F_GETFD)  # raises OSError (EBADF) if the descriptor is not open
        super().__init__(loop, ref, priority)
        self._fd, self._events = fd, events
        # Whether the descriptor was registered since this watcher was made. If not, the number may now belong to
        # another file, so an earlier registration does not count.
        self._is_known = False

    @property
    def fd(self) -> int:
        return self._fd

    @fd.setter
    def fd(self, fd: int) -> None:
        self._check_stopped("fd")
        self._fd, self._is_known = fd, False

    @property
    def events(self) -> int:
        return self._events

    @events.setter
    def events(self, events: int) -> None:
        self._check_stopped("events")
        _check_events(events)
        self._events, self._is_known = events, False

    def _format(self) -> str:
        return f" fd={self._fd} events={self._events}"

    # Each wait of a socket starts and stops a watcher, so these two are written for speed.

    def start(self, callback: Callable[..., Any], *args: Any, pass_events: bool = False) -> None:
        if pass_events:
            args = (EVENTS, *args)
        loop = self.loop
        # A descriptor that is registered already needs only an entry in the list.
        known = loop._descriptors.of(self._events).get(self._fd) if self._is_known else None
        if known is None or self._is_active or loop._is_destroyed or not callable(callback):
            super().start(callback, *args)
            return
        known.append(self)
        self._callback, self._args = callback, args
        self._is_active = True
        loop._watchers.add(self)
        if self._ref:
            loop._references += 1

    def stop(self) -> None:
        self._callback = self._args = None
        if self._is_active:
            loop = self.loop
            loop._descriptors.unwatch(self)
            self._is_active = False
            loop._watchers.discard(self)
            if self._ref:
                loop._references -= 1
                if loop._references <= 0:
                    loop._count(0)

    def close(self) -> None:
        """Stop, for good. The descriptor may be closed after this, so it is deregistered."""
        super().close()
        self.loop._descriptors.release(self._fd)

    def _begin(self) -> None:
        self.loop._descriptors.watch(self, is_known=self._is_known)
        self._is_known = True

    def _end(self) -> None:
        self.loop._descriptors.unwatch(self)


def _check_events(events: int) -> None:
    if events & ~(READ | WRITE):
        raise ValueError(f"illegal event mask: {events!r}")


class timer(Watcher):  # noqa: N801
    """Fires after ``after`` seconds, and then every ``repeat`` seconds, unless that is 0."""

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
        """When it fires, on the loop's clock."""
        return 0.0 if self._handle is None else self._handle.when()

    def start(self, callback: Callable[..., Any], *args: Any, update: bool = True) -> None:
        super().start(callback, *args)

    def again(self, callback: Callable[..., Any], *args: Any, update: bool = True) -> None:
        """Begin again, with ``repeat`` as the delay. Without a ``repeat``, stop."""
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
    """Fires in each iteration of the loop, but not before the callbacks that were added before it."""

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
        """Like :meth:`send`, for waiters that call ``switch(value)``."""
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
    """Fires when a child process has ended. ``rpid`` and ``rstatus`` are then what ``waitpid`` has returned.

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
        self._deactivate()  # it is no child of this process


class stat(Watcher):  # noqa: N801
    """Fires when the status of a path has changed, which is looked at every ``interval`` seconds (5 if that is 0)."""

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


class Descriptors:
    """The io watchers of a loop. Any number of watchers may watch one descriptor.

    gevent's sockets start and stop a watcher for each wait. So a descriptor that nobody watches any more stays
    registered, and is deregistered only when an event shows that nobody wants it. (libev does the same.)
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        # By direction: descriptor -> its active watchers, an empty list if it is registered but not watched
        self._watchers: dict[int, dict[int, list[io]]] = {READ: {}, WRITE: {}}
        # Descriptor and direction of regular files, which are always ready, while they are watched
        self._always: set[tuple[int, int]] = set()

    def watch(self, watcher: io, *, is_known: bool) -> None:
        fd, events = watcher._fd, watcher._events
        for direction in (READ, WRITE):
            if events & direction:
                watchers = self._watchers[direction].get(fd)
                if watchers is None or (not watchers and not is_known):
                    if watchers is not None:
                        self._deregister(fd, direction)
                    self._register(fd, direction)
                    watchers = self._watchers[direction][fd] = []
                watchers.append(watcher)

    def of(self, events: int) -> dict[int, list[io]]:
        """Return the lists of one direction; an empty dict if the events are not exactly one."""
        return self._watchers.get(events, {})

    def unwatch(self, watcher: io) -> None:
        fd, events = watcher._fd, watcher._events
        for direction in (READ, WRITE) if events == READ | WRITE else (events,):
            watchers = self.of(direction).get(fd)
            if watchers is not None and watcher in watchers:
                watchers.remove(watcher)

    def _register(self, fd: int, direction: int) -> None:
        loop: Any = self._loop.asyncio_loop
        add = loop._add_reader if direction == READ else loop._add_writer
        try:
            contextvars.Context().run(add, fd, self._ready, fd, direction)
        except PermissionError:
            if (fd, direction) not in self._always:
                self._always.add((fd, direction))
                loop.call_soon(self._always_ready, fd, direction, context=contextvars.Context())
        except OSError:
            self._loop.run_callback(self._failed, fd, direction)  # the descriptor is closed

    def _always_ready(self, fd: int, direction: int) -> None:
        watchers = self._watchers[direction].get(fd)
        if watchers:
            self._loop.asyncio_loop.call_soon(self._always_ready, fd, direction, context=contextvars.Context())
            self._ready(fd, direction)
        else:
            self._always.discard((fd, direction))
            self._watchers[direction].pop(fd, None)

    def _failed(self, fd: int, direction: int) -> None:
        for watcher in self._watchers[direction].pop(fd, []):
            self._wake(watcher, -1)  # gevent.select makes POLLNVAL of it

    def _deregister(self, fd: int, direction: int) -> None:
        loop: Any = self._loop.asyncio_loop
        if loop.is_closed():
            return
        with contextlib.suppress(OSError):  # the descriptor may be closed already
            (loop._remove_reader if direction == READ else loop._remove_writer)(fd)

    def _ready(self, fd: int, direction: int) -> None:
        watchers = self._watchers[direction].get(fd)
        if not watchers:
            self._watchers[direction].pop(fd, None)
            self._deregister(fd, direction)
        elif len(watchers) == 1 and watchers[0]._events == direction:
            watchers[0]._fire(direction)
        else:
            for watcher in list(watchers):
                if watcher._is_active:
                    watcher._fire(direction if watcher._events == direction else self._events_now(fd, direction))

    @staticmethod
    def _events_now(fd: int, events: int) -> int:
        """Add the other direction to the events, if the descriptor is ready for it, too."""
        poll = _poll()
        poll.register(fd, select.POLLIN | select.POLLOUT)
        for _, ready in poll.poll(0):
            events |= READ if ready & select.POLLIN else 0
            events |= WRITE if ready & select.POLLOUT else 0
        return events

    def release(self, fd: int) -> None:
        """Deregister a descriptor that nobody watches."""
        for direction, found in self._watchers.items():
            if found.get(fd) == []:
                del found[fd]
                self._deregister(fd, direction)

    def closing(self, fd: int) -> bool:
        """The descriptor is about to be closed: wake its watchers, and return whether there are any."""
        woken: dict[io, int] = {}
        for direction, found in self._watchers.items():
            watchers = found.pop(fd, None)
            if watchers is not None:
                self._deregister(fd, direction)
                for watcher in watchers:
                    woken[watcher] = woken.get(watcher, 0) | direction
                    watcher._is_known = False
        for watcher, events in woken.items():
            self._loop.run_callback(self._wake, watcher, events)
        return bool(woken)

    @staticmethod
    def _wake(watcher: io, events: int) -> None:
        if watcher._is_active:
            watcher._fire(events)

    def forget(self) -> None:
        """In the child of a fork: the loop has forgotten all registrations."""
        self._always.clear()
        for found in self._watchers.values():
            found.clear()


class Children:
    """The child watchers of a loop."""

    # While a watcher waits for any child, how often the loop looks for one.
    _LOOK_S = 0.02

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        # pid -> the active watchers of that child, from the first watcher to the child's end
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
        if returncode is None:
            returncode = 255  # other code has fetched the status; asyncio reports this code then
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
        """In the child of a fork: the watched processes are children of the parent."""
        self._watchers.clear()
        self._any.clear()
        self._handle = None


# gevent's monkey patching replaces os.waitpid by a function that uses this module.
_waitpid = gevent.monkey.get_original("os", "waitpid")
_poll = gevent.monkey.get_original("select", "poll")
