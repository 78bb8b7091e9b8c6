"""Logs a coro that has run for too long without a yield and still runs."""

from __future__ import annotations

import logging
import threading
import traceback

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType

# asyncio's logger, which also warns of slow callbacks.
_logger = logging.getLogger("asyncio")


def report(name: str, seconds: float, places: list[tuple[CodeType, int]]) -> None:
    """Log where a coro is, in a new thread. The watchdog calls this; ``places`` begins with the innermost function."""
    try:
        threading.Thread(target=_log, args=(name, seconds, places), name="coro-latency", daemon=True).start()
    except RuntimeError:
        pass  # the process exits or may have no further thread: the record that is made when the coro yields remains


def _log(name: str, seconds: float, places: list[tuple[CodeType, int]]) -> None:
    if not places:
        _logger.warning("coro %r has run for %.3f seconds without a yield, in no Python function", name, seconds)
        return
    code, line = places[0]
    stack = traceback.StackSummary.from_list(
        [(code.co_filename, line, code.co_name, None) for code, line in reversed(places)]
    )
    _logger.warning(
        "coro %r has run for %.3f seconds without a yield, and is at %s:%s in %s\nStack (most recent call last):\n%s",
        name,
        seconds,
        code.co_filename,
        line,
        code.co_qualname,
        "".join(stack.format()).rstrip(),
    )
