"""Debug mode only: where transports and servers were opened, where coros were spawned, and which coro made a task.

The place in the program is found when the object is made, by walking up the stack, past the frames of this package and
of asyncio. The coro that made a task is found in the task's context.
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

    from .base import BaseLoop

# The name and the spawn site of the current coro. A task has those of the coro that started it, directly or through
# other tasks.
_coro: contextvars.ContextVar[tuple[str, str | None]] = contextvars.ContextVar("grapeshot coro")

_NOT_OF_THE_PROGRAM = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    os.path.dirname(os.path.abspath(asyncio.__file__)) + os.sep,
    os.path.abspath(threading.__file__),
    "<frozen",
)
_RUNS_LOOPS = os.path.join(os.path.dirname(__file__), "lifecycle.py")


def site(frame: FrameType | None) -> str | None:
    """Return the innermost place in this stack that is in the program, as ``file:line in function``, or None."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "run_forever" and code.co_filename == _RUNS_LOOPS:
            return None  # the outer frames called the loop; they did not make the object
        found = place(frame)
        if found is not None:
            return found
        frame = frame.f_back
    return None


def place(frame: FrameType) -> str | None:
    """Return a frame's place as ``file:line in function``.

    Return None for a frame of this package, of asyncio, of threading or of a frozen module.
    """
    code = frame.f_code
    if code.co_filename.startswith(_NOT_OF_THE_PROGRAM):
        return None
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}"


def note_opened(loop: BaseLoop, thing: Any) -> None:
    """Record where the program opens ``thing``, a transport or server of ``loop``."""
    found = site(sys._getframe(1))
    if found is None:
        task = asyncio.current_task(loop)
        made: Any = getattr(task, "_source_traceback", None)
        if made:
            found = f"{made[-1].filename}:{made[-1].lineno} in {made[-1].name}"
    if found is not None:
        note(loop, thing, found)


def note(loop: BaseLoop, thing: Any, text: str) -> None:
    """Record ``text`` as the origin of ``thing``."""
    if loop._origins is None:
        loop._origins = weakref.WeakKeyDictionary()
    loop._origins[thing] = text


def origin_of(loop: Any, thing: Any) -> str | None:
    """Return the recorded origin of ``thing``, or None."""
    origins = getattr(loop, "_origins", None)
    return None if origins is None else origins.get(thing)


def note_coro(co: Any) -> None:
    """Record, in ``co`` and in its context, where ``co`` is spawned. Only ``Coro._note_origin`` calls this."""
    frame = sys._getframe(2)
    co._source_traceback = format_helpers.extract_stack(frame)
    context = co.get_context()
    try:
        context.run(_coro.set, (co.name, site(frame)))
    except RuntimeError:
        pass  # the coro shares its caller's context, which is already entered; `_coro` still names the caller's coro


def coro_of(thing: Any) -> tuple[str, str | None] | None:
    """Return name and spawn site of the coro in which a task or handle was created, or None if that is not known."""
    get_context = getattr(thing, "get_context", None)
    context = None if get_context is None else get_context()
    return context.get(_coro) if isinstance(context, contextvars.Context) else None


def describe_handle(handle: Any) -> str:
    """Describe a handle as asyncio's log record of a slow callback does, and add the coro in which it was created."""
    text: str = base_events._format_handle(handle)  # type: ignore[attr-defined]
    co = coro_of(handle)
    return text if co is None else f"{text} in coro {co[0]!r}"


def complete(context: dict[str, Any]) -> None:
    """Add origins to the context of an exception handler: where the coro was spawned, or which coro made a task."""
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
