"""Logs what has kept a loop from turning for too long, while it still does: a coro, a task, a callback, a protocol.

``GRAPESHOT_LATENCY_WARNING`` sets the limit at the start of the process: ``0.5``, ``0`` (off), ``0.5,stack,always``.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
import warnings

from grapeshot import _core

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType

_VARIABLE = "GRAPESHOT_LATENCY_WARNING"
# asyncio's logger, which also warns of slow callbacks.
_logger = logging.getLogger("asyncio")
_shows_stack = False


def set_latency_warning(seconds: float | None, /, *, always: bool | None = None, stack: bool | None = None) -> float:
    """Log a warning if something keeps a loop of this thread from going on for so many seconds (initially 0.2).

    That is a coro that does not yield, a step of a task, a callback, a protocol's method. The logger is ``asyncio``.
    0 or None disables the warnings. Returns the previous limit. A thread without coros is watched after its first call
    of this function.

    The first record tells where it is while it is still in the way. The second record comes when it ends or yields, and
    says how long it ran, and where it was when the limit was reached. Nothing is logged while nothing else waits: no
    other coro or task is ready, no timer is due, and no descriptor that somebody waits for is ready. With ``always``
    that is logged, too. With ``stack`` the first record has the stack. These two hold for all threads; None leaves them
    as they are.

    Raises:
        ValueError: ``seconds`` is negative or NaN.
    """
    before = _core._coro_set_latency_limit(seconds)
    _set_options(always, stack)
    return before


def _set_options(always: bool | None, stack: bool | None) -> None:
    global _shows_stack
    if always is not None:
        _core._coro_report_always(always)
    if stack is not None:
        _shows_stack = stack


def set_default(text: str) -> None:
    """Set limit and options for the process as the variable and the option of ``python -m grapeshot.coro`` have them.

    Raises:
        ValueError: the text is wrong.
    """
    number, *words = (part.strip() for part in text.split(","))
    unknown = [word for word in words if word not in ("always", "stack")]
    try:
        if unknown:
            raise ValueError
        _core._coro_set_default_latency_limit(float(number))
    except ValueError:
        raise ValueError(
            f"expected SECONDS[,stack][,always], such as 0.5 or 0.5,stack (0: off), got {text!r}"
        ) from None
    _set_options("always" in words, "stack" in words)


def heed_variable() -> None:
    """Set what the environment asks for."""
    text = os.environ.get(_VARIABLE)
    if not text or sys.flags.ignore_environment:
        return
    try:
        set_default(text)
    except ValueError as error:
        warnings.warn(f"{_VARIABLE}: {error}", RuntimeWarning, stacklevel=2)


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
        _logger.warning(f"{what}, not in a Python function{_core._coro_latency_hint}", name, seconds)
        return
    code, line = places[0]
    text = f"{what}, and is at %s:%s in %s{_core._coro_latency_hint}"
    args = (name, seconds, code.co_filename, line, code.co_qualname)
    if not _shows_stack:
        _logger.warning(text, *args)
        return
    stack = traceback.StackSummary.from_list(
        [(code.co_filename, line, code.co_name, None) for code, line in reversed(places)]
    )
    _logger.warning(f"{text}\nStack (most recent call last):\n%s", *args, "".join(stack.format()).rstrip())
