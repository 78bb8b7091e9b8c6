"""The deadline of the call whose handler runs: calls that the handler makes have it, too."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

# As the loop's time(). None: no deadline.
current_deadline: ContextVar[float | None] = ContextVar("grapeshot.rpc.deadline", default=None)


def earliest(deadline: float | None, timeout: float | None) -> float | None:
    """Return the deadline, or the end of ``timeout`` seconds from now on if that is earlier. None is none."""
    if timeout is None:
        return deadline
    end = asyncio.get_running_loop().time() + timeout
    return end if deadline is None else min(deadline, end)
