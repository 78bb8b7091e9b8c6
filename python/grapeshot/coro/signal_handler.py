"""Signals that start coros: ``coro.signal_handler.register(signal.SIGHUP, reload)``.

Built on the loop's ``add_signal_handler``. Each signal that arrives starts a coro of its own, so a handler may wait.
The names are Shrapnel's.
"""

from __future__ import annotations

from grapeshot import _core

from .bridge import own_loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["register", "unregister"]


def register(signum: int, fn: Callable[[int], object]) -> None:
    """Call ``fn(signum)`` in a new coro whenever the signal arrives; replaces an earlier handler of the signal.

    The coro runs in a copy of the context of this call. If several signals arrive before one handler has ended, their
    coros run beside each other. The handler belongs to the loop that runs here, or will run, and goes with it.

    Raises:
        TypeError: ``fn`` cannot be called, or is an async function.
        ValueError: there is no such signal.
        RuntimeError: not in the main thread, or the signal cannot be caught.
    """
    _core._coro_check_function(fn, "signal_handler.register")
    own_loop().add_signal_handler(signum, _start, signum, fn)


def unregister(signum: int) -> bool:
    """Remove the handler and restore the default action; return whether there was one. Its coros go on.

    Raises: as :func:`register`.
    """
    return bool(own_loop().remove_signal_handler(signum))


def _start(signum: int, fn: Callable[[int], object]) -> None:
    name = getattr(signum, "name", signum)  # a plain number has none
    _core._coro_spawn(fn, signum, name=f"handler of signal {name}")
