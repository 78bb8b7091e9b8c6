"""The deadline of the current handler, which also applies to the calls that the handler makes."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

# In terms of the loop's time(). None means no deadline.
current_deadline: ContextVar[float | None] = ContextVar("grapeshot.rpc.deadline", default=None)


def earliest(deadline: float | None, timeout: float | None) -> float | None:
    """Return the earlier of ``deadline`` and the time that is ``timeout`` seconds from now. None means no limit."""
    if timeout is None:
        return deadline
    end = asyncio.get_running_loop().time() + timeout
    return end if deadline is None else min(deadline, end)
