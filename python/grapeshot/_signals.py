"""Unix signals as loop callbacks.

    kernel -> the interpreter's C handler -> one byte into the loop's pipe -> _signals_arrived -> call_soon

The C handler only runs if a Python handler is set, so this module sets one. The byte is the signal's number. The native
loop sets the pipe (``signal.set_wakeup_fd``) when it blocks in the main thread, and removes it when the run ends. While
the loop has a signal handler, the pipe stays set between runs, and the next run calls the handlers of signals that have
arrived. Only the main thread can do this (a rule of :func:`signal.set_wakeup_fd`), and only one loop at a time receives
the bytes. SIGCHLD is a signal like any other here.
"""

from __future__ import annotations

import contextvars
import errno
import functools
import os
import signal
import sys
import threading
import warnings
from asyncio.log import logger
from collections.abc import Callable

from ._base import BaseLoop
from ._checks import is_coroutine_like

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVarTuple

    _Ts = TypeVarTuple("_Ts")

if sys.version_info < (3, 12) and hasattr(os, "register_at_fork"):
    # From 3.12 on asyncio does this: a child's signals must not be written into its parent's pipe.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def add_signal_handler(loop: BaseLoop, sig: int, callback: Callable[[*_Ts], object], *args: *_Ts) -> None:
    """Call ``callback(*args)`` from the loop whenever signal ``sig`` arrives; replaces an earlier handler.

    The callback runs in the context of this call. :meth:`remove_signal_handler` or closing the loop puts the signal's
    default action back.

    Raises:
        TypeError: ``callback`` is a coroutine or coroutine function, or ``sig`` is not an int.
        ValueError: there is no such signal.
        RuntimeError: not in the main thread, or the signal cannot be caught, or the loop is closed.
    """
    if is_coroutine_like(callback):
        raise TypeError("coroutines cannot be used with add_signal_handler()")
    _check_signal(sig)
    loop._check_closed()
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("set_wakeup_fd only works in main thread of the main interpreter")
    try:
        signal.set_wakeup_fd(loop._signal_fd(), warn_on_full_buffer=False)
    except (ValueError, OSError) as exc:
        raise RuntimeError(str(exc)) from None
    if loop._signal_handlers is None:
        loop._signal_handlers, loop._signals_noted = {}, set()
    loop._signal_handlers[sig] = (callback, args, contextvars.copy_context())
    try:
        signal.signal(sig, functools.partial(_note, loop._signals_noted))
        signal.siginterrupt(sig, False)  # SA_RESTART: system calls elsewhere in the program go on
    except OSError as exc:
        del loop._signal_handlers[sig]
        _release_if_unused(loop)
        raise _as_uncatchable(sig, exc) from None


def remove_signal_handler(loop: BaseLoop, sig: int) -> bool:
    """Remove the handler of ``sig`` and restore the default action; return whether there was one.

    Raises:
        TypeError, ValueError: ``sig`` is not a signal number.
        RuntimeError: the signal cannot be caught.
    """
    _check_signal(sig)
    if loop._signal_handlers is None or loop._signal_handlers.pop(sig, None) is None:
        return False
    try:
        signal.signal(sig, signal.default_int_handler if sig == signal.SIGINT else signal.SIG_DFL)
    except OSError as exc:
        raise _as_uncatchable(sig, exc) from None
    finally:
        _release_if_unused(loop)
    return True


def remove_all(loop: BaseLoop) -> None:
    """Restore the default action of every signal handled by ``loop``, which is about to close.

    While the interpreter shuts down, this only drops the handlers, with a ResourceWarning: nothing could run them.
    """
    if not loop._signal_handlers:
        return
    if sys.is_finalizing():
        warnings.warn(
            f"Closing the loop {loop!r} on interpreter shutdown stage, skipping signal handlers removal",
            ResourceWarning,
            stacklevel=2,
            source=loop,
        )
        loop._signal_handlers.clear()
        _release_if_unused(loop)
        return
    for sig in list(loop._signal_handlers):
        remove_signal_handler(loop, sig)


def signals_arrived(loop: BaseLoop, numbers: bytes, is_incomplete: bool) -> None:
    """Schedule the handler of every signal whose number came out of the loop's pipe (called by the native loop).

    With ``is_incomplete`` the pipe may have been full. The Python handler has still noted a signal whose number was
    lost; its callback is scheduled once.
    """
    for sig in numbers:
        _schedule(loop, sig)
    loop._signals_noted.difference_update(numbers)
    if is_incomplete:
        lost = sorted(loop._signals_noted)
        loop._signals_noted.clear()
        for sig in lost:
            _schedule(loop, sig)


def _schedule(loop: BaseLoop, sig: int) -> None:
    handler = (loop._signal_handlers or {}).get(sig)
    if handler is not None:  # None: removed after the signal came, or a handler of signal.signal()
        callback, args, context = handler
        loop.call_soon(callback, *args, context=context)


def _note(noted: set[int], signum: int, frame: object) -> None:
    """The Python handler. Because it is set, the interpreter writes the number into the wake-up descriptor."""
    noted.add(signum)


def _check_signal(sig: object) -> None:
    if not isinstance(sig, int):
        raise TypeError(f"sig must be an int, not {sig!r}")
    if sig not in signal.valid_signals():
        raise ValueError(f"invalid signal number {sig}")


def _as_uncatchable(sig: int, exc: OSError) -> Exception:
    return RuntimeError(f"sig {sig} cannot be caught") if exc.errno == errno.EINVAL else exc


def _release_if_unused(loop: BaseLoop) -> None:
    """Release the wake-up descriptor once no handler is left. A loop that runs needs it until the run ends."""
    if loop._signal_handlers or loop.is_running():
        return
    own_fd = loop._signal_fd()
    try:
        current_fd = signal.set_wakeup_fd(-1)
        if current_fd not in (-1, own_fd):
            signal.set_wakeup_fd(current_fd)  # another loop has set its own since: that stays
    except (ValueError, OSError) as exc:
        logger.info("set_wakeup_fd(-1) failed: %s", exc)
