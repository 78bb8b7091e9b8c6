"""Compact texts of one line: where a coro is suspended, where all coros are, and the traceback of an exception."""

from __future__ import annotations

import sys

from grapeshot import _core

from ._errors import ScheduleError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, FrameType, TracebackType
    from typing import Any

    from ._coroutine import Coro


def where(co: Coro[Any]) -> str:
    """Return where a coro is suspended, as ``file:line function|file:line function``, the outermost frame first.

    For a coro that is not suspended, return its state: ``new``, ``ready`` (not begun), ``running`` or ``done``. The
    coro may belong to another thread. In a free-threaded Python, the result for a coro of another thread is only its
    state, because no GIL keeps that coro suspended meanwhile. No references to the frames are kept.
    """
    try:
        frame: FrameType | None = co.get_frame()
    except ScheduleError:
        frame = None
    if frame is None:
        return co._status
    places: list[str] = []
    while frame is not None:
        places.append(_place(frame.f_code, frame.f_lineno))
        frame = frame.f_back
    places.reverse()
    return "|".join(places)


def where_all() -> dict[int, tuple[str, str]]:
    """Return ``{id: (name, where)}`` for the coros of this thread that were started and have not ended."""
    return {co.id: (co.name, where(co)) for co in _core._coro_live()}


def compact_traceback(exc: BaseException | None = None) -> str:
    """Return an exception and its traceback in one line: ``file:line function|file:line function: ValueError: text``.

    The frame that caught the exception comes first, the frame that raised it last. By default ``exc`` is the exception
    that is being handled; if there is none, the text is empty.
    """
    if exc is None:
        exc = sys.exc_info()[1]
        if exc is None:
            return ""
    places: list[str] = []
    traceback: TracebackType | None = exc.__traceback__
    while traceback is not None:
        places.append(_place(traceback.tb_frame.f_code, traceback.tb_lineno))
        traceback = traceback.tb_next
    try:
        text = " ".join(str(exc).split())
    except Exception:
        text = "<exception str() failed>"  # CPython's own words, in the module traceback
    kind = type(exc).__name__
    return ": ".join(part for part in ("|".join(places), kind, text) if part)


def _place(code: CodeType, line: int | None) -> str:
    return f"{code.co_filename}:{line} {code.co_name}"
