"""Functions that the ``coro`` package and the back door set. Each is None until it is set.

The loop, the runner and ``insight.tree()`` must not import ``coro`` or the back door, so they call these functions.
"""

from __future__ import annotations

from collections.abc import Callable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Called with a loop that is about to close.
before_close: Callable[[Any], None] | None = None
# Called with a loop before a runner cancels the loop's remaining tasks. Returns a handle, which the runner cancels
# afterwards.
watch_end: Callable[[Any], Any] | None = None
# Called with a loop that the caller wants to run, or with None if the caller wants a new loop. If the caller is a coro
# that hides its loop (coro/_hiding.py), returns a new loop that borrows the hidden one, and the caller uses this new
# loop. Otherwise returns None.
borrow: Callable[[Any], Any] | None = None
# Called with each loop that begins to run.
on_run: Callable[[Any], None] | None = None
# Called with a loop, or with None. Returns the coros of that loop, or of this thread, and what they wait for. Used by
# `insight.tree()`.
coros_of: Callable[[Any], Any] | None = None
