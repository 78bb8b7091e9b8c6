"""Charges CPU and wall time to functions, and to the coro, task or thread that runs them.

```text
  event       start f   call wait   |  switch, loop, poll, switch  |   start g    return g   ...
  charged to      f of coro A       |   the thread (its loop)      |     g of coro B
              while A does not run, the function of A that waits is charged wall time only
```

A switch happens inside a function that waits, but the profiler gets events only at the call and the return of this
function. That is why the native switch records when a coro was left and entered.

An owner is a coro, a task, or a thread; a thread owns what it runs outside of coros and tasks. Each owner has a tree of
calls, and a current position in it. At each event, the time since the thread's last event is charged to the position of
the owner that was running. Each thread has its own state, which only that thread changes. This module does not depend
on where the events come from.
"""

from __future__ import annotations

import _thread
import asyncio
import functools
import os
import sys
import threading
import time
import weakref

from grapeshot import _core
from grapeshot.insight._subjects import subject_of

from ._recording import Owner, Recording

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType
    from typing import Any

_HERE = os.path.dirname(__file__) + os.sep
_NO_USAGE = (0, 0, 0, 0)
# At most this many owners have a row of their own. Further coros share a row, and so do further tasks.
MAX_OWNERS = 5000

_running_coro: Callable[[], Any] = _core._coro_current_or_none
_running_loop = asyncio._get_running_loop
_running_task = asyncio.current_task


def running() -> Any:
    """Return the coro or task that is running in this thread, or None."""
    coro = _running_coro()
    if coro is not None:
        return coro
    loop = _running_loop()
    return None if loop is None else _running_task(loop)


def _usage_function() -> Callable[[], tuple[int, ...]]:
    """Return a function that reads this thread's page faults and context switches (zeros if the system cannot tell)."""
    try:
        import resource

        who = resource.RUSAGE_THREAD
    except (ImportError, AttributeError):
        return lambda: _NO_USAGE

    def usage() -> tuple[int, ...]:
        now = resource.getrusage(who)
        return now.ru_minflt, now.ru_majflt, now.ru_nvcsw, now.ru_nivcsw

    return usage


def _real_local() -> Any:
    """Return a thread-local object, even after ``coro.patch()``, which makes ``threading.local`` local to coros."""
    coro = sys.modules.get("grapeshot.coro")
    return (coro.get_original("_thread", "_local") if coro else _thread._local)()


class _State:
    """The owner that a thread is running, and the time up to which it has been charged."""

    __slots__ = ("alive", "cpu_ns", "events", "owner", "subject", "thread", "usage", "wall_ns")

    def __init__(self, name: str, alive: Callable[[], bool], usage: tuple[int, ...]) -> None:
        self.owner = self.thread = Owner("thread", name)
        self.alive = alive
        self.subject: Any = None  # the coro or task that was running at the last event
        self.wall_ns = self.cpu_ns = self.events = 0
        self.usage = usage


class Collector:
    """Receives events in any thread.

    ``wall`` and ``cpu`` are clocks in nanoseconds; ``cpu`` is the CPU time of the calling thread. ``stamps`` returns
    when a coro of the calling thread was last entered and left, on both clocks.
    """

    def __init__(
        self,
        *,
        wall: Callable[[], int] = time.monotonic_ns,
        cpu: Callable[[], int] = time.thread_time_ns,
        stamps: Callable[[], tuple[int, int, int, int]] = _core._coro_switch_stamps,
        usage: Callable[[], tuple[int, ...]] | None = None,
        cost_ns: int = 0,
    ) -> None:
        self._wall = wall
        self._cpu = cpu
        self._stamps = stamps
        self._usage = usage or _usage_function()
        self._cost_ns = cost_ns  # the time that one event takes, which is not charged to any function
        self._local = _real_local()
        self._states: list[_State] = []
        self._owners: dict[int, tuple[weakref.ref[Any], Owner]] = {}
        self._rest: dict[str, Owner] = {}
        self._names: dict[str, str] = {}
        self._recording = Recording()
        self._recording.cost_ns = cost_ns
        self._began_ns = wall()
        self.has_ended = False

    # ---- events: a function is entered or left; the same for functions written in C

    def enter(self, code: CodeType, *, is_call: bool) -> None:
        """Charge the time until now, and enter a called function, or a resumed generator or coroutine."""
        owner = self._charge(True).owner
        owner.yielded = None
        top = owner.top
        node = top.children.get(id(code))
        if node is None:
            node = top.add(id(code), code)
        if is_call:
            node.calls += 1
        owner.top = node

    def leave(self, code: CodeType, *, is_yield: bool) -> None:
        """Charge the time until now, and leave a function."""
        state = self._charge()
        owner = state.owner
        node = owner.top
        while node.key is not code:
            if node.parent is None:
                return  # the function was called before the profile began
            node = node.parent
        if not is_yield:
            owner.yielded = None
        elif owner.yielded is None:
            owner.yielded = node
        owner.top = node.parent or node
        if owner.top is owner.root and owner is not state.thread:
            self._end_step(state)

    def enter_c(self, name: str) -> None:
        """Charge the time until now, and enter a function written in C."""
        owner = self._charge().owner
        owner.yielded = None
        name = self._names.setdefault(name, name)
        top = owner.top
        node = top.children.get(name)
        if node is None:
            node = top.add(name, name)
        node.calls += 1
        owner.top = node

    def leave_c(self, name: str) -> None:
        """Charge the time until now, and leave a function written in C, if it is the one that was entered last."""
        owner = self._charge(may_have_waited=True).owner
        top = owner.top
        if top.key == name and top.parent is not None:
            owner.top = top.parent

    # ---- the clocks

    def _charge(self, is_entry: bool = False, may_have_waited: bool = False) -> _State:
        wall_ns, cpu_ns = self._wall(), self._cpu()
        try:
            state: _State = self._local.state
        except AttributeError:
            state = self._begin_thread()
            state.wall_ns, state.cpu_ns = wall_ns, cpu_ns
        subject = running()
        if subject is not state.subject:
            self._switch(state, subject, wall_ns, cpu_ns, is_entry)
        elif may_have_waited and state.owner.kind == "coro" and self._stamps()[0] > state.wall_ns:
            self._switch(state, subject, wall_ns, cpu_ns, is_entry)  # the coro was left and entered again
        else:
            state.owner.top.charge(wall_ns - state.wall_ns, cpu_ns - state.cpu_ns)
        state.events += 1
        state.wall_ns = wall_ns + self._cost_ns
        state.cpu_ns = cpu_ns + self._cost_ns
        return state

    def _switch(self, state: _State, subject: Any, wall_ns: int, cpu_ns: int, is_entry: bool) -> None:
        """Handle a switch to another owner, or from a coro back to itself. The time in between is charged to the loop.

        For a task, that is the time between the last event of the old owner and the first event of the new one. For a
        coro, the switch has recorded the exact times.
        """
        before = state.owner
        owner = state.thread if subject is None else self._owner(subject, is_entry)
        entered_ns, entered_cpu_ns, left_ns, left_cpu_ns = self._stamps()
        if before.kind == "coro" and left_ns > state.wall_ns:
            before.top.charge(left_ns - state.wall_ns, left_cpu_ns - state.cpu_ns)
            state.wall_ns, state.cpu_ns = left_ns, left_cpu_ns
        if owner.kind != "coro" or entered_ns < state.wall_ns:
            entered_ns, entered_cpu_ns = wall_ns, cpu_ns
        state.thread.top.charge(entered_ns - state.wall_ns, entered_cpu_ns - state.cpu_ns)
        if before is not state.thread:
            before.suspend(state.wall_ns)
        owner.resume(entered_ns)
        owner.top.charge(wall_ns - entered_ns, cpu_ns - entered_cpu_ns)
        self._charge_usage(state, before)
        state.owner, state.subject = owner, subject

    def _end_step(self, state: _State) -> None:
        """Charge time to the loop from now on, because the outermost function of a coro or task was left.

        ``_charge`` would not notice the switch if the same coro or task runs next.
        """
        owner = state.owner
        owner.suspend(state.wall_ns)
        self._charge_usage(state, owner)
        state.owner, state.subject = state.thread, None

    def _charge_usage(self, state: _State, owner: Owner) -> None:
        now = self._usage()
        for index, (new, old) in enumerate(zip(now, state.usage, strict=True)):
            owner.usage[index] += new - old
        state.usage = now

    # ---- owners

    def _begin_thread(self) -> _State:
        thread = _this_thread()
        name = f"thread {_thread.get_native_id()}" if thread is None else thread.name
        alive = bool if thread is None else thread.is_alive
        state = self._local.state = _State(name, alive, self._usage())
        self._states.append(state)
        self._recording.owners.append(state.thread)
        return state

    def begin_here(self, frame: FrameType | None) -> None:
        """Begin to profile this thread, whose running functions are the function of ``frame`` and its callers."""
        state = self._begin_thread()
        state.subject = subject = running()
        if subject is not None:
            state.owner = self._owner(subject, False, seeds=False)
            frame = self._seed(state.owner, frame, subject)
        self._seed(state.thread, frame, None)
        state.wall_ns, state.cpu_ns = self._wall(), self._cpu()

    def _seed(self, owner: Owner, frame: FrameType | None, subject: Any) -> FrameType | None:
        """Move the owner's position into the functions that it runs: the function of ``frame`` and its callers.

        For a task, return the frame that called its coroutine. That frame does not belong to the task.
        """
        coroutine = subject.get_coro() if owner.kind == "task" else None
        last = getattr(coroutine, "cr_frame", None)
        codes = []
        while frame is not None:
            codes.append(frame.f_code)
            here, frame = frame, frame.f_back
            if here is last:
                break
        for code in reversed(codes):
            owner.top = owner.top.children.get(id(code)) or owner.top.add(id(code), code)
        return frame

    def _owner(self, subject: Any, is_entry: bool, *, seeds: bool = True) -> Owner:
        """Return the Owner of a coro or task. A coro that is new here begins inside the functions that it is in."""
        known = self._owners.get(id(subject))
        if known is not None and known[0]() is subject:
            return known[1]
        kind = "coro" if isinstance(subject, _core.Coro) else "task"
        rest = None
        if len(self._recording.owners) >= MAX_OWNERS:
            rest = self._rest.get(kind)
            if rest is None:
                rest = self._rest[kind] = Owner(kind, f"(further {kind}s)")
                self._recording.owners.append(rest)
        owner = Owner(kind, _name_of(subject), rest)
        if rest is None:
            self._recording.owners.append(owner)
        key, owners = id(subject), self._owners
        owners[key] = (weakref.ref(subject, functools.partial(owners.pop, key)), owner)
        if kind == "coro" and seeds:
            frame: FrameType | None = sys._getframe()
            while frame is not None and frame.f_code.co_filename.startswith(_HERE):
                frame = frame.f_back
            self._seed(owner, frame.f_back if frame is not None and is_entry else frame, subject)
        return owner

    def end(self) -> Recording:
        """Charge the time until now. Owners that wait are charged their waiting time. No event may come after this."""
        self._charge()
        self.has_ended = True
        now_ns = self._wall()
        here = self._local.state
        self._charge_usage(here, here.owner)
        for state in self._states:
            if state is not here and state.alive():
                # No CPU time is charged, because only that thread could read its CPU clock.
                state.owner.top.wall_ns += now_ns - state.wall_ns
        for reference, owner in list(self._owners.values()):
            subject = reference()
            if subject is not None and not subject.done():
                owner.resume(now_ns)
        self._recording.events = sum(state.events for state in self._states)
        self._recording.duration_ns = now_ns - self._began_ns
        return self._recording


def _this_thread() -> threading.Thread | None:
    """Return the Thread object of this thread.

    In a thread that is just starting, ``current_thread()`` would make a second Thread object.
    """
    main = threading.main_thread()
    if main.native_id == _thread.get_native_id():
        return main
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    thread = frame.f_locals.get("self")  # the outermost function of a thread is a method of its object
    return thread if isinstance(thread, threading.Thread) else None


def _name_of(subject: Any) -> str:
    """Return the name that the program has given to a coro or task, or else the name of its function."""
    try:
        described = subject_of(subject)
        return described.name or described.label
    except Exception:  # code of the program has raised; that must not disturb what is being profiled
        return type(subject).__qualname__
