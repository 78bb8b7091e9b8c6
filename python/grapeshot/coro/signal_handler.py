"""Signal handlers that run in coros: ``coro.signal_handler.register(signal.SIGHUP, reload)``.

Each signal that arrives starts a new coro, so a handler may wait. This is built on the loop's ``add_signal_handler``.
The names come from Shrapnel.
"""

from __future__ import annotations

from grapeshot import _core

from ._bridge import own_loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["register", "unregister"]


def register(signum: int, fn: Callable[[int], object]) -> None:
    """Call ``fn(signum)`` in a new coro whenever the signal arrives. This replaces an earlier handler of the signal.

    The coro runs in a copy of the context in which ``register`` was called. If a signal arrives while its handler is
    still running, a second call of the handler runs concurrently. The handler belongs to the loop of this thread (the
    running one, or else the one that will run next), and is removed when that loop is closed.

    Raises:
        TypeError: ``fn`` cannot be called or is an async function, or ``signum`` is not an int.
        ValueError: there is no such signal.
        RuntimeError: this is not the main thread, or the signal cannot be caught.
    """
    _core._coro_check_function(fn, "signal_handler.register")
    own_loop().add_signal_handler(signum, _start, signum, fn)


def unregister(signum: int) -> bool:
    """Remove the handler and restore the default action; return False if there was no handler.

    Coros that the handler has started go on.

    Raises:
        TypeError: ``signum`` is not an int.
        ValueError: there is no such signal.
    """
    return bool(own_loop().remove_signal_handler(signum))


def _start(signum: int, fn: Callable[[int], object]) -> None:
    name = getattr(signum, "name", signum)  # a plain int has no name
    _core._coro_spawn(fn, signum, name=f"handler of signal {name}")
