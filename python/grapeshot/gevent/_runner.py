"""``runner_of``: which greenlet runs an asyncio loop."""

from __future__ import annotations

import asyncio
import gc

import greenlet  # type: ignore[import-untyped]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def runner_of(loop: object, likely: Any) -> Any:
    """Return the greenlet in which ``loop`` runs.

    Usually that is ``likely``, the greenlet to which the hub has switched. But ``likely`` may have switched directly to
    another greenlet, which then started the loop. So if the frames of ``likely`` do not show the loop, the frames of
    the other suspended greenlets are searched.
    """
    if not _runs(likely, loop):
        for each in gc.get_objects():
            # isinstance() would also ask the object for its class, and a dead weakref.proxy raises ReferenceError.
            if issubclass(type(each), greenlet.greenlet) and _runs(each, loop):
                return each
    return likely


def _runs(suspended: Any, loop: object) -> bool:
    frame = suspended.gr_frame
    while frame is not None:
        name = frame.f_code.co_name
        if name in ("run_forever", "run_until_complete"):
            if any(value is loop for value in frame.f_locals.values()):
                return True
        elif frame.f_code is asyncio.Runner.run.__code__ and frame.f_locals["self"]._loop is loop:
            return True
        frame = frame.f_back
    return False
