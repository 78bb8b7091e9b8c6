"""Unix signals as loop callbacks.

    kernel -> the interpreter's C handler -> one byte into the loop's pipe -> _signals_arrived -> call_soon

The C handler runs only if a Python handler is set, so this module sets one. The byte is the signal's number. The native
loop sets the pipe (``signal.set_wakeup_fd``) before it blocks in the main thread, and removes it when the run ends,
unless the loop has a signal handler. If it has one, the pipe stays set between runs, and the next run calls the
handlers of the signals that arrived in between. :func:`signal.set_wakeup_fd` works only in the main thread, and only
one loop at a time receives the bytes. SIGCHLD gets no special treatment.
"""

from __future__ import annotations

import contextvars
import errno
import functools
import os
import signal
import sys
import warnings
from asyncio.log import logger
from collections.abc import Callable

from .base import BaseLoop
from .checks import is_coroutine_like

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVarTuple

    _Ts = TypeVarTuple("_Ts")

if sys.version_info < (3, 12) and hasattr(os, "register_at_fork"):
    # A child's signals must not be written into its parent's pipe. From 3.12 on, asyncio itself takes care of that.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def add_signal_handler(loop: BaseLoop, sig: int, callback: Callable[[*_Ts], object], *args: *_Ts) -> None:
    """Call ``callback(*args)`` from the loop whenever signal ``sig`` arrives. Replaces an earlier handler.

    The callback runs in a copy of the current context. :meth:`remove_signal_handler`, or closing the loop, restores the
    signal's default action.

    Raises:
        TypeError: ``callback`` is a coroutine or coroutine function, or ``sig`` is not an int.
        ValueError: there is no such signal.
        RuntimeError: this is not the main thread, the signal cannot be caught, or the loop is closed.
    """
    if is_coroutine_like(callback):
        raise TypeError("coroutines cannot be used with add_signal_handler()")
    _check_signal(sig)
    loop._check_closed()
    try:
        # This call raises ValueError outside the main thread. A check with the threading module would not do: in a
        # program that gevent has patched, that module sees greenlets.
        signal.set_wakeup_fd(loop._signal_fd(), warn_on_full_buffer=False)
    except (ValueError, OSError) as exc:
        raise RuntimeError(str(exc)) from None
    if loop._signal_handlers is None:
        loop._signal_handlers, loop._signals_noted = {}, set()
    loop._signal_handlers[sig] = (callback, args, contextvars.copy_context())
    try:
        signal.signal(sig, functools.partial(_note, loop._signals_noted))
        signal.siginterrupt(sig, False)  # SA_RESTART: interrupted system calls of the program are restarted
    except OSError as exc:
        del loop._signal_handlers[sig]
        _release_if_unused(loop)
        raise _as_uncatchable(sig, exc) from None


def remove_signal_handler(loop: BaseLoop, sig: int) -> bool:
    """Remove the handler of ``sig`` and restore the default action; return whether there was a handler.

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
    """Restore the default action of every signal that ``loop`` handles, because the loop is being closed.

    While the interpreter shuts down, signal handlers cannot be set, so this function then only forgets the loop's
    handlers, with a ResourceWarning.
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
    """Schedule the handler of every signal in ``numbers``, which the native loop has read from its pipe.

    ``is_incomplete`` means that the pipe may have been full, so numbers may have been lost. But :func:`_note` has
    recorded every signal that arrived, so the handler of each lost signal is still scheduled, though only once.
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
    if handler is not None:  # None: it was removed after the signal arrived, or the loop never had one
        callback, args, context = handler
        loop.call_soon(callback, *args, context=context)


def _note(noted: set[int], signum: int, frame: object) -> None:
    """The Python signal handler. Without one, the interpreter would not write the number to the wake-up descriptor."""
    noted.add(signum)


def _check_signal(sig: object) -> None:
    if not isinstance(sig, int):
        raise TypeError(f"sig must be an int, not {sig!r}")
    if sig not in signal.valid_signals():
        raise ValueError(f"invalid signal number {sig}")


def _as_uncatchable(sig: int, exc: OSError) -> Exception:
    return RuntimeError(f"sig {sig} cannot be caught") if exc.errno == errno.EINVAL else exc


def _release_if_unused(loop: BaseLoop) -> None:
    """Release the wake-up descriptor if no handler is left. A running loop needs it until its run ends."""
    if loop._signal_handlers or loop.is_running():
        return
    own_fd = loop._signal_fd()
    try:
        current_fd = signal.set_wakeup_fd(-1)
        if current_fd not in (-1, own_fd):
            signal.set_wakeup_fd(current_fd)  # another loop has set its own, so restore that
    except (ValueError, OSError) as exc:
        logger.info("set_wakeup_fd(-1) failed: %s", exc)
