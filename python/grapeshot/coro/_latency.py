"""Logs what has kept a loop from turning for too long, while it still does: a coro, a task, a callback, a protocol."""

from __future__ import annotations

import logging
import threading
import traceback

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType

# asyncio's logger, which also warns of slow callbacks.
_logger = logging.getLogger("asyncio")


def report(kind: str, name: str, seconds: float, places: list[tuple[CodeType, int]]) -> None:
    """Log where a run is, in a new thread. The watchdog calls this; ``places`` begins with the innermost function."""
    args = (kind, name, seconds, places)
    try:
        threading.Thread(target=_log, args=args, name="coro-latency", daemon=True).start()
    except RuntimeError:
        pass  # the process exits or may have no further thread: the record that is made when the run ends remains


def _log(kind: str, name: str, seconds: float, places: list[tuple[CodeType, int]]) -> None:
    what = f"{kind} %r has run for %.3f seconds{' without a yield' if kind in ('coro', 'task') else ''}"
    if not places:
        _logger.warning(f"{what}, in no Python function", name, seconds)
        return
    code, line = places[0]
    stack = traceback.StackSummary.from_list(
        [(code.co_filename, line, code.co_name, None) for code, line in reversed(places)]
    )
    _logger.warning(
        f"{what}, and is at %s:%s in %s\nStack (most recent call last):\n%s",
        name,
        seconds,
        code.co_filename,
        line,
        code.co_qualname,
        "".join(stack.format()).rstrip(),
    )
