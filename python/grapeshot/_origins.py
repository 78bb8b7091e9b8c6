"""Where things come from, in debug mode: who opened a descriptor, who spawned a coro, in which coro a task began.

A place in the program is found by walking up the stack that is there when the thing is made, past this package and
asyncio. Nothing of this runs outside of debug mode.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import sys
import threading
import weakref
from asyncio import base_events, format_helpers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

    from ._base import BaseLoop

# Name and spawn site of the coro that this code runs in, or that has begun it, directly or through tasks.
_coro: contextvars.ContextVar[tuple[str, str | None]] = contextvars.ContextVar("grapeshot coro")

_NOT_OF_THE_PROGRAM = (
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    os.path.dirname(os.path.abspath(asyncio.__file__)) + os.sep,
    os.path.abspath(threading.__file__),
    "<frozen",
)
_RUNS_LOOPS = os.path.join(os.path.dirname(__file__), "_lifecycle.py")


def site(frame: FrameType | None) -> str | None:
    """Return the innermost place of the program in this stack as ``file:line in function``, None if there is none."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "run_forever" and code.co_filename == _RUNS_LOOPS:
            return None  # what has called the loop has not made it
        found = place(frame)
        if found is not None:
            return found
        frame = frame.f_back
    return None


def place(frame: FrameType) -> str | None:
    """Return where a frame of the program is, as ``file:line in function``; None for one of this package or asyncio."""
    code = frame.f_code
    if code.co_filename.startswith(_NOT_OF_THE_PROGRAM):
        return None
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}"


def note_opened(loop: BaseLoop, thing: Any) -> None:
    """Remember where the program opens ``thing``, a transport or server of ``loop``."""
    found = site(sys._getframe(1))
    if found is None:
        task = asyncio.current_task(loop)
        made: Any = getattr(task, "_source_traceback", None)
        if made:
            found = f"{made[-1].filename}:{made[-1].lineno} in {made[-1].name}"
    if found is not None:
        note(loop, thing, found)


def note(loop: BaseLoop, thing: Any, text: str) -> None:
    """Remember that ``text`` tells where ``thing`` comes from."""
    if loop._origins is None:
        loop._origins = weakref.WeakKeyDictionary()
    loop._origins[thing] = text


def origin_of(loop: Any, thing: Any) -> str | None:
    """Return what was noted for ``thing``."""
    origins = getattr(loop, "_origins", None)
    return None if origins is None else origins.get(thing)


def note_coro(co: Any) -> None:
    """Remember where ``co`` is being started, and let its context tell of it. Native code calls a method for this."""
    frame = sys._getframe(2)
    co._source_traceback = format_helpers.extract_stack(frame)
    context = co.get_context()
    try:
        context.run(_coro.set, (co.name, site(frame)))
    except RuntimeError:
        pass  # it shares the context of its caller, which is entered now: that one's coro is named


def coro_of(thing: Any) -> tuple[str, str | None] | None:
    """Return name and spawn site of the coro that a task or handle was begun in; None if it is not known."""
    get_context = getattr(thing, "get_context", None)
    context = None if get_context is None else get_context()
    return context.get(_coro) if isinstance(context, contextvars.Context) else None


def describe_handle(handle: Any) -> str:
    """Return a handle as asyncio's record of a slow callback has it, with the coro that it was begun in."""
    text: str = base_events._format_handle(handle)  # type: ignore[attr-defined]
    co = coro_of(handle)
    return text if co is None else f"{text} in coro {co[0]!r}"


def complete(context: dict[str, Any]) -> None:
    """Add to what the exception handler gets, in debug mode, where a coro was spawned, or the coro of a task."""
    co = context.get("coro")
    if co is not None:
        spawned = getattr(co, "_source_traceback", None)
        if spawned:
            context.setdefault("source_traceback", spawned)
        return
    for key in ("task", "future", "handle"):
        found = coro_of(context.get(key))
        if found is not None:
            name, spawned_at = found
            context["in_coro"] = name if spawned_at is None else f"{name}, spawned at {spawned_at}"
            return
