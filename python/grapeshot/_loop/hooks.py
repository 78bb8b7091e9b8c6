"""Functions of the rooms above that the loop calls. Each name is None until such a room sets it.

So the loop can serve coros and the back door without importing them.
"""

from __future__ import annotations

from collections.abc import Callable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Called with a loop that is about to close.
before_close: Callable[[Any], None] | None = None
# Called with a loop before a runner cancels its remaining tasks. Returns a handle, which the runner cancels afterwards.
watch_end: Callable[[Any], Any] | None = None
# Called with a loop that the caller wants to run, or with None for a new loop. Returns the loop that a coro borrows
# instead if it hides its own loop, else None.
borrow: Callable[[Any], Any] | None = None
# Called with each loop that begins to run.
on_run: Callable[[Any], None] | None = None
# Called with a loop, or with None for this thread. Returns its coros and what they wait for, for `insight.tree()`.
coros_of: Callable[[Any], Any] | None = None
