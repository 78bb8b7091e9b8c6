"""The part ``signal`` of :func:`grapeshot.coro.patch`.

As always, signal handlers run in the main thread between two instructions, no matter which coro or part of the loop is
running there. In a plain program, an exception that a handler raises interrupts whatever the program is waiting for.
Here the exception interrupts the coro that set the handler. If this coro is not running when the handler raises, the
exception is raised where this coro waits.

``sigwait`` and similar functions let other coros run. Python has no descriptor that reports blocked signals, so these
functions ask again and again whether a signal has come.
"""

from __future__ import annotations

import contextlib
import signal as _module

from grapeshot import _core
from grapeshot.coro._countdown import Countdown

from . import _originals, _waits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_signal, _getsignal = _module.signal, _module.getsignal
_pause, _sigtimedwait = _module.pause, _module.sigtimedwait
_current_or_none = _core._coro_current_or_none

# The first and the longest pause between two polls for blocked signals, in seconds.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02

# signal -> the program's handler, and the coro that has set it (None: set outside of coros)
_handlers: dict[int, tuple[Any, Any]] = {}
# The locks for which the coros in pause() wait.
_pausing: list[Any] = []


def _deliver(number: int, frame: Any) -> None:
    """The handler that Python calls. It calls the program's handler."""
    handler, owner = _handlers.get(number, (None, None))
    if handler is None:
        return
    for _ in range(len(_pausing)):
        with contextlib.suppress(IndexError):  # a coro of another thread was interrupted, and has removed its lock
            _pausing.pop(0).release()
    try:
        handler(number, frame)
    except BaseException as exc:
        if owner is None or owner.done() or owner is _current_or_none():
            raise
        # Raised here, the exception would end the loop, or interrupt a coro that has nothing to do with the signal.
        owner.raise_exception(exc)


def signal(signalnum: Any, handler: Any, /) -> Any:
    """Set the action for the given signal.

    An exception that the handler raises is passed to the coro that has called this function, and raised where that
    coro waits.
    """
    if not callable(handler) or handler in (_module.SIG_IGN, _module.SIG_DFL):
        before = _signal(signalnum, handler)
        known = _handlers.pop(int(signalnum), None)
    else:
        before = _signal(signalnum, _deliver)
        known = _handlers.get(int(signalnum))
        _handlers[int(signalnum)] = (handler, _current_or_none())
    return known[0] if before is _deliver and known is not None else before


def getsignal(signalnum: Any, /) -> Any:
    """Return the current action for the given signal."""
    handler = _getsignal(signalnum)
    return _handlers.get(int(signalnum), (handler,))[0] if handler is _deliver else handler


def pause() -> None:
    """Wait until a signal arrives whose handler was set after patching. Other coros run while the call waits."""
    if not _waits.can_wait():
        _pause()
        return
    lock = _core.thread_lock()
    lock.acquire()
    _pausing.append(lock)
    try:
        lock.acquire()
    finally:
        with contextlib.suppress(ValueError):
            _pausing.remove(lock)


def _poll_signals(sigset: Any, limit_s: float | None) -> Any:
    left_s = Countdown(limit_s)
    pause_s = _FIRST_PAUSE_S
    while True:
        is_last = left_s.is_over()
        found = _sigtimedwait(sigset, 0)
        if found is not None or is_last:
            return found
        rest_s = left_s()
        _waits.sleep(pause_s if rest_s is None else min(rest_s, pause_s))
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)


def sigtimedwait(sigset: Any, timeout: Any, /) -> Any:
    """Wait for one of the signals, for at most ``timeout`` seconds. Other coros run while the call waits."""
    if not _waits.can_wait() or not isinstance(timeout, (int, float)) or not timeout >= 0:
        return _sigtimedwait(sigset, timeout)
    return _poll_signals(sigset, timeout)


def _without_limit(name: str) -> Any:
    original = getattr(_module, name)

    def wait(sigset: Any, /) -> Any:
        if not _waits.can_wait():
            return original(sigset)
        found = _poll_signals(list(sigset), None)
        return _module.Signals(found.si_signo) if name == "sigwait" else found

    wait.__name__ = wait.__qualname__ = name
    wait.__doc__ = original.__doc__
    return wait


def patch() -> None:
    """Replace the names. Handlers that were set before stay as they are."""
    for name, new in (("signal", signal), ("getsignal", getsignal), ("pause", pause), ("sigtimedwait", sigtimedwait)):
        _originals.replace("signal", name, new)
    for name in ("sigwait", "sigwaitinfo"):
        _originals.replace("signal", name, _without_limit(name))
