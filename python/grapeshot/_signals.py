"""Unix signals as loop callbacks.

    kernel -> the interpreter's C handler -> one byte into the socket pair -> a reader of the loop -> call_soon

The C handler only runs when a Python handler is set, so an empty one is; the byte is the signal's number. The socket
pair exists while at least one handler does: a loop without signal handlers owns no such descriptors. Only the main
thread can do this (a rule of :func:`signal.set_wakeup_fd`), and only one loop at a time receives the bytes. SIGCHLD is
a signal like any other here.
"""

from __future__ import annotations

import contextvars
import errno
import signal
import socket
import sys
import warnings
from asyncio.log import logger
from collections.abc import Callable

from ._base import BaseLoop
from ._checks import is_coroutine_like

TYPE_CHECKING = False  # typing is not imported at run time: from Python 3.14 on asyncio does without it
if TYPE_CHECKING:
    from typing import TypeVarTuple

    _Ts = TypeVarTuple("_Ts")


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
    if loop._signal_handlers is None:
        loop._signal_handlers = {}
    write_end = _open_sockets(loop)
    try:
        signal.set_wakeup_fd(write_end.fileno())
    except (ValueError, OSError) as exc:
        _release_sockets_if_unused(loop)
        raise RuntimeError(str(exc)) from None
    loop._signal_handlers[sig] = (callback, args, contextvars.copy_context())
    try:
        signal.signal(sig, _ignore)
        signal.siginterrupt(sig, False)  # SA_RESTART: system calls elsewhere in the program go on
    except OSError as exc:
        del loop._signal_handlers[sig]
        _release_sockets_if_unused(loop)
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
        _release_sockets_if_unused(loop)
    return True


def remove_all(loop: BaseLoop) -> None:
    """Restore the default action of every signal handled by ``loop``, which is about to close.

    While the interpreter shuts down the handlers are only forgotten, with a ResourceWarning: nothing could run them.
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
        _release_sockets_if_unused(loop)
        return
    for sig in list(loop._signal_handlers):
        remove_signal_handler(loop, sig)


def _ignore(signum: int, frame: object) -> None:
    """The Python-level handler: its presence makes the interpreter write the number into the wake-up descriptor."""


def _check_signal(sig: object) -> None:
    if not isinstance(sig, int):
        raise TypeError(f"sig must be an int, not {sig!r}")
    if sig not in signal.valid_signals():
        raise ValueError(f"invalid signal number {sig}")


def _as_uncatchable(sig: int, exc: OSError) -> Exception:
    return RuntimeError(f"sig {sig} cannot be caught") if exc.errno == errno.EINVAL else exc


def _open_sockets(loop: BaseLoop) -> socket.socket:
    """Return the write end of the loop's signal sockets, made and registered on first use."""
    if loop._signal_sockets is None:
        read_end, write_end = socket.socketpair()
        read_end.setblocking(False)
        write_end.setblocking(False)
        loop._signal_sockets = read_end, write_end
        loop._add_reader(read_end.fileno(), _read_numbers, loop)
    return loop._signal_sockets[1]


def _release_sockets_if_unused(loop: BaseLoop) -> None:
    """Give the wake-up descriptor and the sockets back once no handler is left."""
    if loop._signal_handlers or loop._signal_sockets is None:
        return
    read_end, write_end = loop._signal_sockets
    loop._signal_sockets = None
    try:
        current_fd = signal.set_wakeup_fd(-1)
        if current_fd not in (-1, write_end.fileno()):
            signal.set_wakeup_fd(current_fd)  # another loop has taken over since: it keeps receiving
    except (ValueError, OSError) as exc:
        logger.info("set_wakeup_fd(-1) failed: %s", exc)
    if not loop.is_closed():
        loop._remove_reader(read_end.fileno())
    read_end.close()
    write_end.close()


def _read_numbers(loop: BaseLoop) -> None:
    """The reader callback: schedule the handler of every signal whose number has arrived."""
    while loop._signal_sockets is not None:
        try:
            numbers = loop._signal_sockets[0].recv(4096)
        except InterruptedError:
            continue
        except BlockingIOError:
            return
        if not numbers:
            return
        for sig in numbers:
            handler = (loop._signal_handlers or {}).get(sig)
            if handler is not None:  # None: removed between the signal and this turn
                callback, args, context = handler
                loop.call_soon(callback, *args, context=context)
