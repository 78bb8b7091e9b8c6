"""Limits that a loop keeps, so that a service refuses or waits before the process dies.

The loop counts and compares natively (``event_loop/limits.rs``). Everything here belongs to the loop's thread.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._base import BaseLoop


class LimitError(OSError, RuntimeError):
    """One more would be more than :meth:`Loop.set_limits` allows.

    ``errno`` is EMFILE for connections and descriptors, as if the system had refused the descriptor, and EAGAIN for
    coros, as for threads. So code that handles the errors of the system handles this one.
    """


def set_limits(
    loop: BaseLoop, *, connections: int | None = None, descriptors: int | None = None, coros: int | None = None
) -> None:
    """Keep at most so many open; a limit that is not given is removed.

    At a limit servers stop accepting, and go on when there is a place; until then clients wait in the system's queue,
    whose length is the server's ``backlog``. What the program asks for itself is refused with :class:`LimitError`.

    Args:
        connections: of TCP and Unix stream transports, accepted and made.
        descriptors: the loop opens no descriptor whose number is not below this one. The system gives the lowest number
            that is free, so this leaves the numbers up to ``RLIMIT_NOFILE`` to files, name lookups and logs.
        coros: ``coro.spawn()``, and threads that are coros, raise LimitError; ``coro.serve()`` waits.

    Raises:
        ValueError: a limit is less than 1.
    """
    loop._set_limits(connections, descriptors, coros)


def get_limits(loop: BaseLoop) -> dict[str, int | None]:
    """Return the limits by name: ``connections``, ``descriptors``, ``coros``; None where there is none."""
    return dict(zip(("connections", "descriptors", "coros"), loop._limits, strict=True))
