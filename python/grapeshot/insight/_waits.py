"""Builds the tree of a loop's tasks and coros: which of them waits for which, and their stacks.

Nothing is recorded while the program runs: everything is read from the objects that exist at this moment. The only code
of the program that runs is the ``repr`` of the objects that are waited for. The module ``coro._run_info`` reads what is
specific to coros. This module does not import ``coro._run_info``, but calls ``hooks.coros_of``, which
``coro._run_info`` sets when ``grapeshot.coro`` is imported.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
import threading
import traceback
from collections.abc import Iterator

from grapeshot import _core
from grapeshot._loop import hooks, origins

from ._subjects import subject_of
from ._tally import Tally, tally

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any, Protocol

    class CoroPart(Protocol):
        """Examines the coros of a loop."""

        coros: list[Any]

        def describe(self, co: Any) -> tuple[str | None, list[Any]]:
            """Describe what a coro waits for, and return the coros and tasks it depends on, such as a lock's holder.

            If the coro waits for the future in its attribute ``_awaited``, the description is None.
            """

        def frames(self, co: Any) -> Iterator[FrameType]:
            """Yield the frames of a coro, the outermost first."""


# Files that take part in building the tree. Their frames are omitted from stacks.
HIDDEN_FILES = {__file__}

_INDENT = "  "
_NAMES_AWAITERS = sys.version_info >= (3, 14)
_ASYNCIO = os.path.join(os.path.dirname(asyncio.__file__), "")
_TASK_GROUP_FILE = sys.modules["asyncio.taskgroups"].__file__


@dataclasses.dataclass
class Node:
    """A coro or a task."""

    kind: str
    """``"coro"`` or ``"task"``."""
    name: str
    state: str
    """What it does, in words, such as ``waits for ...``, ``runs`` or ``is ready``."""
    stack: list[str]
    """The lines of its stack, as in a traceback."""
    below: list[Node]
    """The coros and tasks that it waits for. Each coro or task has one node, even if several others wait for it."""
    waiter: Any = dataclasses.field(repr=False, compare=False)
    """The coro or task itself."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"


class Waits:
    """The coros and tasks of a loop (if it is None, the coros of this thread), and which of them wait for which."""

    def __init__(self, loop: Any) -> None:
        part = None if hooks.coros_of is None else hooks.coros_of(loop)
        self.coros: list[Any] = [] if part is None else part.coros
        # asyncio's tasks. They include the coros, which asyncio regards as tasks.
        every: set[Any] = set() if loop is None else asyncio.all_tasks(loop)
        self.tasks = sorted((task for task in every if not is_coro(task)), key=lambda task: str(task.get_name()))
        self.loop = loop
        running = None if loop is None else asyncio.current_task(loop)
        self._every: list[Any] = [*self.tasks, *self.coros]
        self._timers = _timers_by_future(loop)
        self._known = set(self._every)
        # For each coro and task: a description of what it waits for, and the other coros and tasks that it waits for.
        # The inner dict is used as an ordered set.
        self._words: dict[Any, str] = {}
        self._below: dict[Any, dict[Any, None]] = {}
        for co in self.coros:
            assert part is not None
            words, holders = part.describe(co)
            self._below[co] = dict.fromkeys(other for other in holders if other in self._known)
            if words == "waits":
                words = self._sleep_of(co) or words
            if words is None:
                self._await(co, co._awaited)
            else:
                self._words[co] = words
        for task in self.tasks:
            self._add_task(task, task is running)
        for waiter in self._every:
            # From Python 3.14 on, a future knows the tasks that await it, directly or through a task group.
            for other in getattr(waiter, "_asyncio_awaited_by", None) or ():
                if other in self._known:
                    self._below[other][waiter] = None
        self._nodes = {each: self._node(each, part) for each in self._every}
        for each, others in self._below.items():
            self._nodes[each].below.extend(self._nodes[other] for other in others)

    def _add_task(self, task: Any, is_running: bool) -> None:
        self._below[task] = {}
        awaited = getattr(task, "_fut_waiter", None)
        if awaited is None:
            self._words[task] = "runs" if is_running else "is ready"
        else:
            self._await(task, awaited)

    def _await(self, waiter: Any, awaited: Any) -> None:
        """Record that ``waiter`` waits for ``awaited``.

        ``awaited`` is a future, a task, a coro, or the future of asyncio.gather() or of a task group.
        """
        inside = [awaited, *(getattr(awaited, "_children", None) or ())]
        if not _NAMES_AWAITERS:
            inside += _group_members(waiter)
        self._below[waiter] = dict.fromkeys(other for other in inside if other in self._known and other is not waiter)
        named = [name_of(other) for other in self._below[waiter]]
        self._words[waiter] = f"waits for {', '.join(named)}" if named else self._words_of(waiter, awaited)

    def _words_of(self, waiter: Any, awaited: Any) -> str:
        """Describe what a coro or task waits for: the timer, lock or other object that will complete ``awaited``."""
        timer = self._timers.get(id(awaited))
        if timer is not None:
            return f"waits for a timer, due in {timer.when() - self.loop.time():.3f} s"
        callbacks = getattr(awaited, "_callbacks", None) or ()
        if any(getattr(callback[0], "__qualname__", "").startswith("_chain_future") for callback in callbacks):
            return "waits for a call in another thread"
        frames = [] if is_coro(waiter) else list(coroutine_frames(waiter.get_coro()))
        if frames and frames[-1].f_code.co_filename.startswith(_ASYNCIO):
            owner = frames[-1].f_locals.get("self")  # the lock, the queue, the stream
            if owner is not None:
                return f"waits for {owner!r}"
        return f"waits for {awaited!r}"

    def _sleep_of(self, co: Any) -> str | None:
        """Describe how long a coro will still sleep. Return None if it does not sleep."""
        timer = self._timers.get(id(co))
        if timer is None or timer._callback is not _core._coro_end_sleep:
            return None
        return f"sleeps for another {timer.when() - self.loop.time():.3f} s"

    def _node(self, waiter: Any, part: CoroPart | None) -> Node:
        frames = part.frames(waiter) if part is not None and is_coro(waiter) else coroutine_frames(waiter.get_coro())
        kind = "coro" if is_coro(waiter) else "task"
        return Node(kind, str(waiter.get_name()), self._words[waiter], stack_lines(frames), [], waiter)

    # ------------------------------------------------------------------ the tree

    def heading(self) -> str:
        """Return a line with the number of coros and tasks."""
        of_loop = "" if self.loop is None else f" of {self.loop!r}"
        return f"{count(len(self.coros), 'coro')} and {count(len(self.tasks), 'task')}{of_loop}"

    def nodes(self) -> list[Node]:
        """Return all coros and tasks."""
        return list(self._nodes.values())

    def roots(self) -> tuple[list[Node], list[list[Node]]]:
        """Return the roots (nodes that no other node waits for), and the circles that are not below a root."""
        waiters = {other: each for each, others in self._below.items() for other in others}
        roots = [each for each in self._every if each not in waiters]
        shown: set[Any] = set()
        for root in roots:
            self._reach(root, shown)
        circles: list[list[Node]] = []
        for each in self._every:
            if each not in shown:
                # A node that no root leads to is in a circle or below one. Going up from it leads into the circle.
                circle = _circle(each, waiters)
                self._reach(circle[0], shown)
                circles.append([self._nodes[member] for member in circle])
        return [self._nodes[root] for root in roots], circles

    def _reach(self, root: Any, shown: set[Any]) -> None:
        left = [root]
        while left:
            each = left.pop()
            if each not in shown:
                shown.add(each)
                left.extend(self._below[each])

    def lines(self) -> Iterator[str]:
        """Yield the lines of the tree."""
        roots, circles = self.roots()
        yield from tree_lines(roots, circles)


def tally_waits(loop: Any) -> list[Tally]:
    """Count the coros and tasks of a loop that have the same function and wait at the same place in the program.

    Only that place is read from their stacks, so this takes about 3 us for each of them.
    """
    running = None if loop is None else asyncio.current_task(loop)
    places: dict[tuple[int, int], str | None] = {}
    entries = []
    every: list[Any] = [co for co in _core._coro_live() if loop is None or co._loop is loop]
    every += [] if loop is None else [task for task in asyncio.all_tasks(loop) if not is_coro(task)]
    for each in every:
        subject = subject_of(each)
        place: str | None = "runs"
        if each is not running and not (is_coro(each) and each._status == "running"):
            innermost_first = _frames_of(each)
            place = next((found for frame in innermost_first if (found := _place_of(frame, places))), None)
        entries.append((f"{subject.kind} {subject.alike}", f"{subject.kind} {subject.label}", place))
    return tally(entries)


def _frames_of(waiter: Any) -> list[FrameType]:
    """Return the frames of a suspended coro or task, the innermost first."""
    if not is_coro(waiter):
        return list(coroutine_frames(waiter.get_coro()))[::-1]
    frames = []
    frame = waiter.get_frame()
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _place_of(frame: FrameType, places: dict[tuple[int, int], str | None]) -> str | None:
    """Return the place of a frame, or None if it is not in the program. ``places`` is a cache."""
    key = (id(frame.f_code), frame.f_lasti)
    if key not in places:
        places[key] = origins.place(frame)
    return places[key]


def timers_of(loop: Any) -> list[Any]:
    """Return the timers of a loop. The list is empty if the loop runs in another thread or does not show its timers."""
    if is_elsewhere(loop):
        return []
    return [timer for timer in getattr(loop, "_scheduled", ()) if not timer.cancelled()]


def is_elsewhere(loop: Any) -> bool:
    """Whether a loop is running in another thread. If so, its attributes must not be read here."""
    return getattr(loop, "_thread_id", None) not in (None, threading.get_ident())


def _timers_by_future(loop: Any) -> dict[int, Any]:
    """Return the timers whose first argument is a future or a coro, by the id of that argument."""
    timers = timers_of(loop)
    return {id(args[0]): timer for timer in timers if (args := timer._args) and asyncio.isfuture(args[0])}


def tree_lines(roots: list[Node], circles: list[list[Node]]) -> Iterator[str]:
    """Yield the lines of a tree."""
    shown: set[int] = set()
    for root in roots:
        yield from _lines_from(root, shown)
    for circle in circles:
        yield f"These wait for each other: {' -> '.join(map(str, circle))}"
        yield from _lines_from(circle[0], shown)


def _lines_from(root: Node, shown: set[int]) -> Iterator[str]:
    """Yield the lines of a node and of the nodes below it. Not recursive, because a tree may be very deep."""
    left = [(root, 0)]
    while left:
        node, depth = left.pop()
        indent = _INDENT * depth
        if id(node) in shown:
            yield f"{indent}{node}: see above"
            continue
        shown.add(id(node))
        yield f"{indent}{node} {node.state}"
        for line in node.stack:
            yield f"{indent}{_INDENT}{line}"
        left.extend((other, depth + 1) for other in reversed(node.below))


def count(number: int, what: str) -> str:
    """Return a number and a noun."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def is_coro(waiter: Any) -> bool:
    """Whether ``waiter``, which asyncio regards as a task, is a coro."""
    return isinstance(waiter, _core.Coro)


def name_of(waiter: Any) -> str:
    """Return the kind and the name."""
    return f"{'coro' if is_coro(waiter) else 'task'} {waiter.get_name()!r}"


def _circle(waiter: Any, waiters: dict[Any, Any]) -> list[Any]:
    """Go up from ``waiter``, and return the circle that this leads to. Each member waits for the next one.

    The first member is repeated at the end.
    """
    way: dict[Any, None] = {}
    while waiter not in way:
        way[waiter] = None
        waiter = waiters[waiter]
    upward = list(way)
    return [waiter, *reversed(upward[upward.index(waiter) :])]


def _group_members(task: Any) -> list[Any]:
    """Return the members of the task group whose end a task is waiting for."""
    members: list[Any] = []
    get_coro = getattr(task, "get_coro", None)
    for frame in coroutine_frames(None if get_coro is None else get_coro()):
        if frame.f_code.co_filename == _TASK_GROUP_FILE and "exit" in frame.f_code.co_name:
            members.extend(getattr(frame.f_locals.get("self"), "_tasks", ()))
    return sorted(members, key=lambda member: str(member.get_name()))


# ---------------------------------------------------------------- stacks


def stack_lines(frames: Iterator[FrameType]) -> list[str]:
    """Return the lines of a stack, as in a traceback."""
    summary = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in frames)
    return [line for entry in summary.format() for line in entry.rstrip("\n").split("\n")]


def threads_are_readable() -> bool:
    """Return whether the frames of other threads can be read.

    If there is no GIL, these threads run meanwhile, and coros even move the memory of their frames.
    """
    return getattr(sys, "_is_gil_enabled", lambda: True)()


def thread_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of a thread, the outermost first, up to the first frame of the code that builds the tree."""
    found: list[FrameType] = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    for each in reversed(found):
        if each.f_code.co_filename in HIDDEN_FILES:
            return
        yield each


def coroutine_frames(steps: Any) -> Iterator[FrameType]:
    """Yield the frames of a suspended coroutine and of the awaitables that it awaits."""
    seen = 0
    while steps is not None and seen < 1000:
        frame = first_of(steps, "cr_frame", "gi_frame", "ag_frame")
        if frame is not None:
            if frame.f_code.co_filename in HIDDEN_FILES:
                return
            yield frame
        steps = first_of(steps, "cr_await", "gi_yieldfrom", "ag_await")
        seen += 1


def first_of(steps: Any, *names: str) -> Any:
    """Return the value of the first of these attributes that is present and not None. Otherwise return None."""
    return next((value for name in names if (value := getattr(steps, name, None)) is not None), None)
