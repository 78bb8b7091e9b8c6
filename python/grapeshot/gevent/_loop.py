"""``Loop``: gevent's loop interface on a grapeshot loop. Source: ILoop in gevent's ``_interfaces.py``.

gevent's hub is a greenlet. It calls ``Loop.run()``, which runs the grapeshot loop::

    the hub's greenlet                     another greenlet
    Loop.run()
      asyncio_loop.run_forever()
        a timer is due: Watcher._fire
          Loop._call: callback(*args) ---> waiter.switch(): the greenlet goes on
                      returns        <---- the greenlet waits: hub.switch()

So the grapeshot loop is always somewhere in a callback while a greenlet runs. asyncio's running loop is normally kept
per thread; here it is kept per greenlet. In the hub, where tasks and callbacks run, it is the grapeshot loop. In other
greenlets no loop is running, unless they call ``asyncio.run()``. A tracer exchanges the running loops at each switch
(``_watch_switches``). There is one exception: while the hub wakes greenlets whose descriptors are ready, and no
greenlet runs a loop of its own, the hub hides its loop and removes the tracer (``src/gevent/running_loops.rs``).
"""

from __future__ import annotations

import collections
import contextvars
import sys
import traceback

import gevent._interfaces  # type: ignore[import-untyped]
import gevent.exceptions  # type: ignore[import-untyped]
import greenlet  # type: ignore[import-untyped]
import zope.interface  # type: ignore[import-untyped]

import grapeshot
from grapeshot import _core
from grapeshot._loop import lifecycle

# Native code uses `_runner` in the hub. The module is imported here, because an import in the hub may have to wait for
# another thread that imports the same module, and the hub cannot wait.
from . import _runner as _runner  # noqa: PLC0414
from . import _watchers
from ._children import Children
from ._executor import HubExecutor
from ._watchers import EVENTS, READ, WRITE, Callback, Watcher

TYPE_CHECKING = False
if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any

# gevent.core copies these names from this module.
__all__ = ["EVENTS", "READ", "WRITE", "Loop", "get_header_version", "get_version", "loop", "supported_backends"]


def _watch_switches() -> None:
    """Exchange the running loops of greenlets at each switch of this thread."""
    previous: Any = greenlet.gettrace()
    if previous is _core._exchange_running_loops or getattr(previous, "exchanges_loops", False):
        return
    current = greenlet.getcurrent()
    _core._exchange_running_loops("switch", (current, current))  # the exchanges begin in this greenlet
    if previous is None:
        greenlet.settrace(_core._exchange_running_loops)
        return

    def trace(event: str, args: Any) -> None:
        _core._exchange_running_loops(event, args)
        previous(event, args)

    trace.exchanges_loops = True  # type: ignore[attr-defined]
    greenlet.settrace(trace)


@zope.interface.implementer(gevent._interfaces.ILoop)
class Loop(_core._HubLoop):
    """A loop for gevent's hub: set ``GEVENT_LOOP=grapeshot.gevent.Loop`` or ``gevent.config.loop``.

    ``asyncio_loop`` is the grapeshot loop. asyncio's tasks, transports and servers run on it in the hub.
    """

    # How many callbacks run before the loop looks at the clock, as in gevent's other loops.
    CALLBACK_CHECK_COUNT = 50
    MAXPRI = 1
    MINPRI = 1
    # The poller's resolution is a millisecond at worst.
    approx_timer_resolution = 0.001
    starting_timer_may_update_loop_time = False
    backend = "grapeshot"
    backend_int = 0
    # The hub, while it runs the loop.
    error_handler: Any = None
    asyncio_loop: grapeshot.Loop

    def __init__(self, flags: object = None, default: bool | None = None) -> None:
        # The main thread's hub passes None for `default`, and its loop is the default one.
        self._default = default is None or bool(default)
        loop = grapeshot.new_event_loop()
        loop._default_executor = HubExecutor()
        self._set_loop(loop)
        _watch_switches()
        # Callbacks that other threads have added, and that are not counted in `_references` yet.
        self._from_threads: collections.deque[Callback] = collections.deque()
        # Active watchers, except for io watchers, which the loop finds by their descriptors.
        self._watchers: set[Watcher] = set()
        self._callbacks: collections.deque[Callback] = collections.deque()
        self._is_calling_set = False
        # Whether run() must return now.
        self._is_broken = False
        self._children = Children(self)
        # signal number -> its active watchers
        self._signals: dict[int, list[Watcher]] = {}

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__name__} at {id(self):#x} {self._format()}>"

    def _format(self) -> str:
        if self._is_destroyed:
            return "destroyed"
        return f"{self.backend}{' default' if self._default else ''} ref={self._references}"

    # ---------------------------------------------------------------- running

    def run(self, nowait: bool = False, once: bool = False) -> None:
        """Run until :meth:`break_` is called, or until no watcher, callback or :meth:`ref` keeps the loop running.

        Args:
            nowait: only look for what is ready now.
            once: return after the first events.
        """
        self._check_open()
        loop = self.asyncio_loop
        self._is_once, self._is_broken = bool(once) and not nowait, False
        is_single = nowait or once
        while (self._is_used() or is_single) and not self._is_broken:
            if nowait or (is_single and not self._is_used()):
                self._soon(self.break_)
            is_single = False
            try:
                loop.run_forever()
            except BaseException:
                # A signal's handler has raised between two callbacks. With None as the context, the hub raises the
                # exception in the main greenlet.
                self.handle_error(None, *sys.exc_info())

    def _is_used(self) -> bool:
        return self._references > 0 or bool(self._from_threads)

    def _soon(self, function: Callable[..., object]) -> asyncio.Handle:
        # Callbacks of the hub do not run in the context of the greenlet that has caused them.
        return self.asyncio_loop.call_soon(function, context=contextvars.Context())

    def _count(self, change: int) -> None:
        self._references += change
        if self._references <= 0 and not self._is_destroyed:
            self._stop_soon_if_unused()

    def _stop_soon_if_unused(self) -> None:
        self._soon(self._stop_if_unused)

    def _stop_if_unused(self) -> None:
        if not self._is_used():
            self.asyncio_loop.stop()

    def ref(self) -> None:
        """Keep :meth:`run` from returning until :meth:`unref` is called."""
        self._count(1)

    def unref(self) -> None:
        self._count(-1)

    def break_(self, how: object = None) -> None:
        """Make :meth:`run` return."""
        self._is_broken = True
        self.asyncio_loop.stop()

    def _call(self, context: object, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Call a function of gevent, which may switch to a greenlet. This returns when the hub runs again."""
        try:
            callback(*args)
        except BaseException:
            self.handle_error(context, *sys.exc_info())
        if self._is_once:
            self.break_()

    def _failed(self, watcher: _core._HubIo, exc: BaseException) -> None:
        """Called when the callback of an io watcher has raised an exception."""
        watcher.stop()  # the descriptor is still ready, so the callback would fail again at once
        self.handle_error(watcher, type(exc), exc, exc.__traceback__)

    def handle_error(
        self,
        context: object,
        kind: type[BaseException] | None,
        value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Pass an exception to the hub."""
        if kind is gevent.exceptions.HubDestroyed:
            self._callbacks.clear()
            self.break_()
            return
        handler = self.error_handler
        if handler is None:
            traceback.print_exception(kind, value, tb)
        else:
            getattr(handler, "handle_error", handler)(context, kind, value, tb)

    def verify(self) -> None:
        """Do nothing. (libev's loop checks its own state here.)"""

    def _check_open(self) -> None:
        if self._is_destroyed:
            raise ValueError("operation on destroyed loop")

    def destroy(self) -> bool | None:
        """Close the loop. Returns None if it was destroyed before."""
        if self._is_destroyed:
            return None
        for watcher in list(self._watchers):
            watcher.stop()
        for each in self._take_all_io(False):
            each.stop()
        self._is_destroyed = True
        self._callbacks.clear()
        if not self.asyncio_loop.is_running():
            self.asyncio_loop.close()
        return True

    def reinit(self) -> None:
        """In the child of a fork: make a poller for the child, restart the watchers, and fire those of type ``fork``.

        The child does not continue asyncio's tasks and transports, which are the parent's.
        """
        descriptors = self._take_all_io(True)
        lifecycle.forget_parent(self.asyncio_loop)
        self.asyncio_loop._default_executor = HubExecutor()
        self._children.forget()
        self._signals.clear()
        self._is_calling_set = False
        watchers = list(self._watchers)
        for each in descriptors:
            each._begin()
        for watcher in watchers:
            watcher._forked()
        if self._callbacks:
            self._set_calling()
        for watcher in watchers:
            if isinstance(watcher, _watchers.fork):
                self.run_callback(watcher._fire)

    # ---------------------------------------------------------------- what gevent asks about the loop

    @property
    def default(self) -> bool:
        """Whether this is the loop of the main thread's hub."""
        return self._default and not self._is_destroyed

    @property
    def ptr(self) -> Any:
        """True unless the loop was destroyed."""
        return not self._is_destroyed

    @property
    def activecnt(self) -> int:
        return self._references

    @property
    def pendingcnt(self) -> int:
        return 0

    @property
    def iteration(self) -> int:
        return -1

    @property
    def depth(self) -> int:
        return int(self.asyncio_loop.is_running())

    def fileno(self) -> int | None:
        return None

    def now(self) -> float:
        """The loop's clock in seconds. It is read at each call, so :meth:`update_now` does nothing."""
        return self.asyncio_loop.time()

    def update_now(self) -> None:
        pass

    update = update_now

    # ---------------------------------------------------------------- callbacks

    def run_callback(self, func: Callable[..., Any], *args: Any) -> Callback:
        """Call ``func(*args)`` in the hub soon. Only the loop's thread may call this."""
        self._check_open()
        if self._from_threads:
            self._take()
        callback = Callback(func, args)
        self._add(callback)
        return callback

    def _add(self, callback: Callback) -> None:
        self._callbacks.append(callback)
        self._references += 1
        if not self._is_calling_set:
            self._set_calling()

    def run_callback_threadsafe(self, func: Callable[..., Any], *args: Any) -> Callback:
        """Like :meth:`run_callback`, from any thread."""
        self._check_open()
        callback = Callback(func, args)
        self._from_threads.append(callback)
        self.asyncio_loop.call_soon_threadsafe(self._take, context=contextvars.Context())
        return callback

    def _take(self) -> None:
        while self._from_threads:
            self._add(self._from_threads.popleft())

    def _set_calling(self) -> None:
        self._is_calling_set = True
        self._soon(self._run_callbacks)

    def _run_callbacks(self) -> None:
        """Run callbacks, including those that are added in the meantime, for about the switch interval."""
        callbacks, count = self._callbacks, 0
        expiration = self.now() + gevent.getswitchinterval()
        try:
            while callbacks:
                callback = callbacks.popleft()
                self._references -= 1
                function, callback.callback = callback.callback, None
                args = callback.args
                if function is not None and args is not None:
                    self._call(callback, function, args)
                    callback.args = None
                count += 1
                if count % self.CALLBACK_CHECK_COUNT == 0 and self.now() >= expiration:
                    break
        finally:
            self._is_calling_set = False
            if callbacks:
                self._set_calling()
            else:
                self._count(0)

    # ---------------------------------------------------------------- watchers

    def io(self, fd: int, events: int, ref: bool = True, priority: int | None = None) -> _watchers.io:
        """Watch a descriptor for reading (1), writing (2) or both (3)."""
        return _watchers.io(self, fd, events, ref, priority)

    def closing_fd(self, fd: int) -> bool:
        """Wake the watchers of a descriptor that is about to be closed; return whether there are any."""
        watchers = self._take_io(fd)
        for watcher in watchers:
            self._wake_soon(watcher, watcher._events)
        return bool(watchers)

    def _wake_soon(self, watcher: _core._HubIo, events: int) -> None:
        """Fire a watcher soon, because its descriptor is closed or about to be closed.

        If ``events`` is -1, gevent's ``select`` reports POLLNVAL.
        """
        self.run_callback(self._wake, watcher, events)

    @staticmethod
    def _wake(watcher: _core._HubIo, events: int) -> None:
        if watcher._is_active:
            watcher._fire(events)
            if watcher._descriptor is None:
                watcher.stop()  # no event can fire a watcher that is not on a descriptor any more

    def timer(self, after: float, repeat: float = 0.0, ref: bool = True, priority: int | None = None) -> Watcher:
        return _watchers.timer(self, after, repeat, ref, priority)

    def signal(self, signum: int, ref: bool = True, priority: int | None = None) -> Watcher:
        return _watchers.signal_(self, signum, ref, priority)

    def idle(self, ref: bool = True, priority: int | None = None) -> Watcher:
        return _watchers.idle(self, ref, priority)

    def prepare(self, ref: bool = True, priority: int | None = None) -> Watcher:
        return _watchers.prepare(self, ref, priority)

    def check(self, ref: bool = True, priority: int | None = None) -> Watcher:
        return _watchers.check(self, ref, priority)

    def fork(self, ref: bool = True, priority: int | None = None) -> Watcher:
        return _watchers.fork(self, ref, priority)

    def async_(self, ref: bool = True, priority: int | None = None) -> Watcher:
        return _watchers.async_(self, ref, priority)

    locals()["async"] = async_

    def child(self, pid: int, trace: int = 0, ref: bool = True) -> Watcher:
        return _watchers.child(self, pid, trace, ref)

    def install_sigchld(self) -> None:
        """Do nothing: the loop does not use SIGCHLD."""

    reset_sigchld = install_sigchld

    def stat(self, path: str | bytes, interval: float = 0.0, ref: bool = True, priority: int | None = None) -> Watcher:
        return _watchers.stat(self, path, interval, ref, priority)

    def _signalled(self, signum: int) -> None:
        for watcher in list(self._signals.get(signum, ())):
            watcher._fire()


loop = Loop


def get_version() -> str:
    """Return the version of the loop."""
    return f"grapeshot-{grapeshot.__version__}"


get_header_version = get_version


def supported_backends() -> list[str]:
    return [Loop.backend]
