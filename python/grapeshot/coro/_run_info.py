"""``print_run_info``: the coros and tasks of a loop as a tree, each under who waits for it, with their stacks.

Nothing is recorded while programs run. All of it is read from what is there: the frames of suspended coros tell what
they join, the fd table which descriptor they wait for, and the address of the queue in which a coro waits lies in the
lock, queue or event that it waits for.
"""

from __future__ import annotations

import bisect
import gc
import sys
import traceback

from grapeshot import _core

from . import bridge
from ._coroutine import Coro, wait_for_end
from ._future import future
from ._groups import wait_for
from ._sync import event, inverted_semaphore, rw_lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType
    from typing import Any, TextIO

_WITH_HOLDER = (_core.lock, _core.mutex)
_NATIVE = (
    *_WITH_HOLDER,
    _core.semaphore,
    _core.condition_variable,
    _core.fifo,
    _core.channel,
    _core.thread_lock,
    _core.thread_rlock,
    _core.thread_queue,
)
# What is built on a condition variable.
_BUILT = (event, future, inverted_semaphore, rw_lock)
_DIRECTIONS = {"read": "to read descriptor", "write": "to write to descriptor"}
_INDENT = "  "


def print_run_info(file: TextIO | None = None) -> None:
    """Print the coros and asyncio tasks of the loop that runs here, with their stacks, to ``sys.stderr`` or ``file``.

    Below each is what it waits for, where that is known: the coro that it joins, the holder of the lock, the task that
    it awaits. It also tells the descriptor of an I/O wait and the queue, lock or event of any other. Where some wait
    for each other in a circle, the text says so. It runs no other code of the program than the ``repr`` of what is
    waited for, and may be called anywhere, also in a signal handler.
    """
    loop = bridge.find_running_loop()
    coros = sorted((co for co in _core._coro_live() if loop is None or co._loop is loop), key=lambda co: co.id)
    # asyncio's tasks, and the coros, which are tasks to asyncio
    every: set[Any] = set() if loop is None else bridge.all_tasks(loop)
    tasks = sorted((task for task in every if not isinstance(task, Coro)), key=lambda task: str(task.get_name()))
    info = _RunInfo(coros, tasks, None if loop is None else bridge.current_task(loop))
    of_loop = "" if loop is None else f" of {loop!r}"
    lines = [f"{_count(len(coros), 'coro')} and {_count(len(tasks), 'task')}{of_loop}", *info.lines()]
    print("\n".join(lines), file=file or sys.stderr)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


class _RunInfo:
    """Who waits for whom at this moment."""

    def __init__(self, coros: list[Coro[Any]], tasks: list[Any], running: Any) -> None:
        self._nodes: list[Any] = [*tasks, *coros]
        self._known = set(self._nodes)
        waits = {co: _core._coro_wait_info(co) for co in coros}
        addresses = [wait[1] for wait in waits.values() if wait is not None and wait[0] == "queue"]
        owners = _owners(addresses) if addresses else {}
        # What each waits for, in words, and which of the others that is.
        self._words: dict[Any, str] = {}
        # (in order, without repetition)
        self._below: dict[Any, dict[Any, None]] = {}
        for co in coros:
            self._look_at_coro(co, waits[co], owners)
        for task in tasks:
            self._look_at_task(task, task is running)
        for node in self._nodes:
            # Python 3.14 and later notes who awaits a future, also through groups of tasks.
            for waiter in getattr(node, "_asyncio_awaited_by", None) or ():
                if waiter in self._known:
                    self._below[waiter][node] = None

    def _look_at_coro(self, co: Coro[Any], wait: tuple[str, int] | None, owners: dict[int, Any]) -> None:
        joined = [other for other in _joined(co) if not other.done()]
        self._below[co] = dict.fromkeys(other for other in joined if other in self._known)
        if co._status != "waiting":
            self._words[co] = {"running": "runs", "ready": "is ready"}.get(co._status, co._status)
        elif joined:
            self._words[co] = f"waits for {', '.join(map(_name, joined))}"
        elif co._awaited is not None:
            self._await(co, co._awaited)
        elif wait is None:
            self._words[co] = "waits"
        elif wait[0] != "queue":
            self._words[co] = f"waits {_DIRECTIONS[wait[0]]} {wait[1]}"
        else:
            self._wait_in_queue(co, owners.get(wait[1]))

    def _wait_in_queue(self, co: Coro[Any], owner: Any) -> None:
        words = "waits" if owner is None else f"waits for {owner!r}"
        holders = dict.fromkeys(other for other in _holders(owner) if other in self._known)
        if holders:
            words += f", held by {', '.join(map(_name, holders))}"
        self._words[co] = words
        self._below[co] = holders

    def _look_at_task(self, task: Any, is_running: bool) -> None:
        self._below[task] = {}
        awaited = getattr(task, "_fut_waiter", None)
        if awaited is None:
            self._words[task] = "runs" if is_running else "is ready"
        else:
            self._await(task, awaited)

    def _await(self, node: Any, awaited: Any) -> None:
        """A future, a task, a coro, or a future of asyncio.gather()."""
        inside = [awaited, *(getattr(awaited, "_children", None) or ())]
        self._below[node] = dict.fromkeys(other for other in inside if other in self._known)
        named = [_name(other) for other in self._below[node]]
        self._words[node] = f"waits for {', '.join(named) or repr(awaited)}"

    # ------------------------------------------------------------------ text

    def lines(self) -> Iterator[str]:
        """Yield the lines of the tree."""
        waiters = {other: node for node, others in self._below.items() for other in others}
        shown: set[Any] = set()
        for node in self._nodes:
            if node not in waiters:
                yield from self._lines_from(node, shown)
        for node in self._nodes:
            if node not in shown:
                # All that is left is in a circle or below one, and so is what waits for it.
                circle = _circle(node, waiters)
                yield f"These wait for each other: {' -> '.join(map(_name, circle))}"
                yield from self._lines_from(circle[0], shown)

    def _lines_from(self, root: Any, shown: set[Any]) -> Iterator[str]:
        """Yield a node and what is below it. A list of its own: trees may be deeper than Python's stack."""
        left = [(root, 0)]
        while left:
            node, depth = left.pop()
            indent = _INDENT * depth
            if node in shown:
                yield f"{indent}{_name(node)}: see above"
                continue
            shown.add(node)
            yield f"{indent}{_name(node)} {self._words[node]}"
            for line in _stack_lines(node):
                yield f"{indent}{_INDENT}{line}"
            left.extend((other, depth + 1) for other in reversed(self._below[node]))


def _name(node: Any) -> str:
    return f"{'coro' if isinstance(node, Coro) else 'task'} {node.get_name()!r}"


def _circle(node: Any, waiters: dict[Any, Any]) -> list[Any]:
    """Return those who wait for each other above this node, each before what it waits for, and the first one again."""
    way: dict[Any, None] = {}
    while node not in way:
        way[node] = None
        node = waiters[node]
    upward = list(way)
    return [node, *reversed(upward[upward.index(node) :])]


def _holders(owner: Any) -> list[Any]:
    """Return the coros that hold a lock."""
    if isinstance(owner, _WITH_HOLDER):
        return [each for each in gc.get_referents(owner) if isinstance(each, Coro)]
    if isinstance(owner, rw_lock):
        return [owner._writer] if owner._writer is not None else list(owner._readers)
    return []


def _joined(co: Coro[Any]) -> list[Any]:
    """Return what a suspended coro joins, or waits for with ``wait()``."""
    frame = co.get_frame()
    while frame is not None:
        if frame.f_code is wait_for_end.__code__:
            return [frame.f_locals["coro"]]
        if frame.f_code is wait_for.__code__:
            return list(frame.f_locals.get("left", ()))
        frame = frame.f_back
    return []


def _owners(addresses: Iterable[int]) -> dict[int, Any]:
    """Return the objects in which these addresses lie."""
    ordered = sorted(set(addresses))
    found: dict[int, Any] = {}
    built: list[Any] = []
    for candidate in gc.get_objects():
        if isinstance(candidate, _NATIVE):
            at = bisect.bisect_left(ordered, id(candidate))
            end = id(candidate) + type(candidate).__basicsize__
            while at < len(ordered) and ordered[at] < end:
                found[ordered[at]] = candidate
                at += 1
        elif isinstance(candidate, _BUILT):
            built.append(candidate)
    inside = {id(each._waiters): each for each in built}
    return {address: inside.get(id(owner), owner) for address, owner in found.items()}


# ---------------------------------------------------------------- stacks


def _stack_lines(node: Any) -> list[str]:
    frames = list(_coro_frames(node) if isinstance(node, Coro) else _coroutine_frames(node.get_coro()))
    summary = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in frames)
    return [line for entry in summary.format() for line in entry.rstrip("\n").split("\n")]


def _coro_frames(co: Coro[Any]) -> Iterator[FrameType]:
    """Yield the frames of a coro, the outermost first, with those of a coroutine that it awaits."""
    for frame in co.get_stack():
        if frame.f_code.co_filename == __file__:
            return
        yield frame
        if frame.f_code is bridge._drive.__code__:
            steps = frame.f_locals.get("steps")
            if not _first(steps, "cr_running", "gi_running", "ag_running"):
                # Suspended, so that its frames are not on this stack. What follows on it waits for the coroutine.
                yield from _coroutine_frames(steps)
                return


def _coroutine_frames(steps: Any) -> Iterator[FrameType]:
    """Yield the frames of a suspended coroutine, and of what it awaits."""
    seen = 0
    while steps is not None and seen < 1000:
        frame = _first(steps, "cr_frame", "gi_frame", "ag_frame")
        if frame is not None:
            yield frame
        steps = _first(steps, "cr_await", "gi_yieldfrom", "ag_await")
        seen += 1


def _first(steps: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(steps, name, None)) is not None), None)
