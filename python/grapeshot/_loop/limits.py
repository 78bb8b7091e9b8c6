"""Limits on connections, descriptors and coros, so that an overloaded service waits or refuses instead of dying.

Native code counts what is open, and checks the limits (``event_loop/limits.rs``). Only the loop's thread uses this
module.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .base import BaseLoop


class LimitError(OSError, RuntimeError):
    """Another connection, descriptor or coro would exceed a limit set with :meth:`Loop.set_limits`.

    ``errno`` is what the system would report, so that existing error handling works: EMFILE for connections and
    descriptors, and EAGAIN for coros, as for threads.
    """


def set_limits(
    loop: BaseLoop, *, connections: int | None = None, descriptors: int | None = None, coros: int | None = None
) -> None:
    """Limit how many connections, descriptors and coros the loop may have. A limit that is not given is removed.

    When the limit of connections or of descriptors is reached, servers stop accepting, and continue once the number
    has fallen. Until then, clients wait in the system's queue, whose length is the server's ``backlog``. If the program
    itself tries to open more, :class:`LimitError` is raised.

    Args:
        connections: the number of TCP and Unix stream transports, both accepted and connected.
        descriptors: the loop opens only descriptors whose number is below this limit. The system assigns the lowest
            free number, so this leaves the numbers from the limit up to ``RLIMIT_NOFILE`` for files, name lookups and
            logs.
        coros: the number of coros. At the limit, ``coro.spawn()`` raises LimitError, and so does the start of a thread
            that ``coro.patch()`` turns into a coro; ``coro.serve()`` waits.

    Raises:
        ValueError: a limit is less than 1.
    """
    loop._set_limits(connections, descriptors, coros)


def get_limits(loop: BaseLoop) -> dict[str, int | None]:
    """Return the limits by name: ``connections``, ``descriptors``, ``coros``. None means no limit."""
    return dict(zip(("connections", "descriptors", "coros"), loop._limits, strict=True))
