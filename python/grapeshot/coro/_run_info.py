"""Finds out what each coro waits for, and prints it as a tree of coros and tasks: ``print_run_info``.

Programs pay nothing for this while they run, because nothing is recorded. Everything is read from the current state:

- the frames of a suspended coro tell which coros it joins
- the fd table tells on which descriptor a coro waits
- a coro that waits for a lock, queue or event is in a list inside that object, so the address of the list tells which
  object it is
"""

from __future__ import annotations

import bisect
import gc
import sys

from grapeshot import _core
from grapeshot._loop import hooks
from grapeshot.insight import _waits

from . import _bridge as bridge
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
# The primitives in Python, which are built on a condition variable.
_BUILT = (event, future, inverted_semaphore, rw_lock)
_DIRECTIONS = {"read": "to read descriptor", "write": "to write to descriptor"}


def print_run_info(file: TextIO | None = None) -> None:
    """Print the coros and asyncio tasks of the running loop, with their stacks, to ``sys.stderr`` or ``file``.

    Below each coro or task are the coros and tasks that it waits for: the coro that it joins, the holder of a lock, the
    task that it awaits. If a coro waits for a descriptor, queue, lock or event, its line names this object. If coros
    wait for each other in a circle, the output says so. This function may be called anywhere, even in a signal handler.
    The only code of the program that it runs is the ``repr`` of objects that coros wait for.
    """
    waits = _waits.Waits(bridge.find_running_loop())
    print("\n".join([waits.heading(), *waits.lines()]), file=file or sys.stderr)


class _Coros:
    """The coros of a loop (of this thread, if the loop is None), and what each is waiting for now."""

    def __init__(self, loop: Any) -> None:
        live = (co for co in _core._coro_live() if loop is None or co._loop is loop)
        self.coros: list[Coro[Any]] = sorted(live, key=lambda co: co.id)
        self._waits = {co: _core._coro_wait_info(co) for co in self.coros}
        addresses = [wait[1] for wait in self._waits.values() if wait is not None and wait[0] == "queue"]
        self._owners = _owners(addresses) if addresses else {}

    def describe(self, co: Coro[Any]) -> tuple[str | None, list[Any]]:
        """Return what a coro waits for, as a text and as a list of coros.

        The text is None if the coro awaits a future.
        """
        joined = [other for other in _joined(co) if not other.done()]
        wait = self._waits[co]
        if co._status != "waiting":
            return {"running": "runs", "ready": "is ready"}.get(co._status, co._status), joined
        if joined:
            return f"waits for {', '.join(map(_waits.name_of, joined))}", joined
        if co._awaited is not None:
            return None, []
        if wait is None:
            return "waits", []
        if wait[0] != "queue":
            return f"waits {_DIRECTIONS[wait[0]]} {wait[1]}", []
        return self._describe_queue(self._owners.get(wait[1]))

    def _describe_queue(self, owner: Any) -> tuple[str, list[Any]]:
        words = "waits" if owner is None else f"waits for {owner!r}"
        holders = list(dict.fromkeys(other for other in _holders(owner) if other in self._waits))
        if holders:
            words += f", held by {', '.join(map(_waits.name_of, holders))}"
        return words, holders

    def frames(self, co: Coro[Any]) -> Iterator[FrameType]:
        """Yield the frames of a coro, the outermost first, and then the frames of a coroutine that it awaits."""
        for frame in co.get_stack():
            if frame.f_code.co_filename in _waits.HIDDEN_FILES:
                return
            yield frame
            if frame.f_code is bridge._drive.__code__:
                steps = frame.f_locals.get("steps")
                if not _waits.first_of(steps, "cr_running", "gi_running", "ag_running"):
                    # The coroutine is suspended, so its frames are not on the coro's stack. The coro's remaining frames
                    # only wait for the coroutine.
                    yield from _waits.coroutine_frames(steps)
                    return


def _holders(owner: Any) -> list[Any]:
    """Return the coros that hold ``owner``, if it is a lock."""
    if isinstance(owner, _WITH_HOLDER):
        return [each for each in gc.get_referents(owner) if isinstance(each, Coro)]
    if isinstance(owner, rw_lock):
        return [owner._writer] if owner._writer is not None else list(owner._readers)
    return []


def _joined(co: Coro[Any]) -> list[Any]:
    """Return the coros and futures that a suspended coro waits for with ``join()`` or ``wait()``."""
    frame = co.get_frame()
    while frame is not None:
        if frame.f_code is wait_for_end.__code__:
            return [frame.f_locals["coro"]]
        if frame.f_code is wait_for.__code__:
            return list(frame.f_locals.get("left", ()))
        frame = frame.f_back
    return []


def _owners(addresses: Iterable[int]) -> dict[int, Any]:
    """Return, for each address, the primitive whose memory contains it."""
    ordered = sorted(set(addresses))
    found: dict[int, Any] = {}
    built: list[Any] = []
    for candidate in gc.get_objects():
        # isinstance() would also read the object's `__class__`, which raises ReferenceError for a dead weakref.proxy.
        if issubclass(type(candidate), _NATIVE):
            at = bisect.bisect_left(ordered, id(candidate))
            end = id(candidate) + type(candidate).__basicsize__
            while at < len(ordered) and ordered[at] < end:
                found[ordered[at]] = candidate
                at += 1
        elif issubclass(type(candidate), _BUILT):
            built.append(candidate)
    inside = {id(each._waiters): each for each in built}
    return {address: inside.get(id(owner), owner) for address, owner in found.items()}


hooks.coros_of = _Coros
_waits.HIDDEN_FILES.add(__file__)
