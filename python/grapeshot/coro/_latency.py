"""The latency warning: logs which coro, task, callback or protocol method blocks a loop.

``GRAPESHOT_LATENCY_WARNING`` sets the limit at the start of the process. Examples: ``0.5``, ``0`` (off),
``0.5,stack,always``.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
import warnings

from grapeshot import _core

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType

_VARIABLE = "GRAPESHOT_LATENCY_WARNING"
# asyncio's logger, which also gets asyncio's warnings about slow callbacks.
_logger = logging.getLogger("asyncio")
_shows_stack = False
# The threads that log records. Threads that have ended are removed.
_threads: list[threading.Thread] = []
# How long a fork waits for these threads, and the pause between two checks, in seconds.
_GRACE_S, _PAUSE_S = 1.0, 0.0005
# Keep the original, because a program may patch time.sleep later.
_sleep = time.sleep


def set_latency_warning(seconds: float | None, /, *, always: bool | None = None, stack: bool | None = None) -> float:
    """Log a warning when code blocks a loop of this thread for longer than ``seconds``; return the previous limit.

    The limit is 0.2 seconds at first; 0 or None disables the warnings. Code that can block the loop is a coro that
    does not yield, a step of a task, a callback, or a method of a protocol. In a thread without coros, warnings begin
    with the first call of this function.

    There are two records, in the logger ``asyncio``. The first comes while the code still blocks the loop, and says
    where the code is. The second comes when the code ends or yields, and says how long it ran and where it was when the
    limit was reached. Without the GIL there is only one record, when the code ends or yields.

    Args:
        always: also log code that delays nothing else. By default code is logged only if something else is waiting for
            its turn: another coro or task is ready, a timer is due, or a descriptor is ready that a coro, task,
            callback or transport waits for.
        stack: add the stack to the first record.

    ``always`` and ``stack`` apply to all threads. None leaves them as they are.

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
    """Set the limit and the options from a text of the form ``SECONDS[,stack][,always]``.

    The limit is for this thread and threads that start later. The environment variable and the option of
    ``python -m grapeshot.coro`` have this form.

    Raises:
        ValueError: the text does not have this form.
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


def apply_variable() -> None:
    """Apply the setting of the environment variable, if there is one."""
    text = os.environ.get(_VARIABLE)
    if not text or sys.flags.ignore_environment:
        return
    try:
        set_default(text)
    except ValueError as error:
        warnings.warn(f"{_VARIABLE}: {error}", RuntimeWarning, stacklevel=2)


def report(kind: str, name: str, seconds: float, places: list[tuple[CodeType, int]]) -> None:
    """Log which code blocks the loop, and where. The watchdog calls this; ``places`` has the innermost function first.

    A new thread does the logging, because the program's log handlers may block. Besides, ``threading`` does not know
    the watchdog's own thread, so logging in that thread would leave a dummy Thread object behind.
    """
    thread = threading.Thread(target=_log, args=(kind, name, seconds, places), name="coro-latency", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return  # no thread can start, e.g. because the process exits; the second record still comes
    _threads[:] = [*filter(_exists, _threads), thread]


def wait_logged() -> None:
    """Before a fork, wait until no thread is logging a record. No coro runs meanwhile.

    CPython warns about a fork if the process still has several threads according to the operating system. So this
    function, too, asks the operating system whether a thread has ended. The wait has a limit, because a log handler may
    wait for something that the calling thread holds.
    """
    give_up_s = _core._coro_monotonic() + _GRACE_S
    own_id = threading.get_native_id()
    for thread in _threads:
        while thread.native_id != own_id and _exists(thread) and _core._coro_monotonic() < give_up_s:
            _sleep(_PAUSE_S)


def _exists(thread: threading.Thread) -> bool:
    """Whether the system still has the thread; False on systems other than Linux.

    ``Thread.is_alive()`` becomes False a little before the system has removed the thread.
    """
    return os.path.exists(f"/proc/self/task/{thread.native_id}")


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
