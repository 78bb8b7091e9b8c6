"""CPU accounting: the observers of a loop's steps, and the CPU time that each task, coro and connection has used.

The native loop reads the clocks around each step (``src/event_loop/probe/step.rs``) and calls the observers that are
set here. While no observer is set, the CPU clock is not read. Only the loop's thread uses this module, but the tasks,
coros and other objects whose CPU time is counted may be freed in any thread.
"""

from __future__ import annotations

import collections
import dataclasses
import weakref

from ._subjects import Subject, subject_of
from ._tally import grown, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from grapeshot._loop.base import BaseLoop


@dataclasses.dataclass
class Cpu:
    """The CPU time of one task, coro, connection, server or callback, or of all that are alike and have ended."""

    kind: str
    """``"task"``, ``"coro"``, ``"connection"``, ``"server"`` (accepting) or ``"callback"``."""
    name: str
    cpu_s: float
    """CPU time of the loop's thread in seconds, since accounting was switched on."""
    steps: int
    """How often it ran: steps of a task, runs of a coro, events of a connection."""
    ended: int
    """The number of ended owners, all alike, whose times are added up. 0 for a single owner that is alive, and for
    owners that do not support weak references, because their end cannot be noticed."""
    place: str | None = None
    """Where its function begins, as ``file:line``."""
    alike: str = dataclasses.field(default="", repr=False)
    """The name with its numbers replaced, which is the same for all that are alike."""

    def __str__(self) -> str:
        ended = f" ({self.ended} ended)" if self.ended else ""
        return printable(f"{_used(self.cpu_s, self.steps)}  {self.kind} {self.name}{ended}{_at(self.place)}")


@dataclasses.dataclass
class CpuTally:
    """The CPU time of owners that are alike: the same kind and function, and names that differ only in numbers."""

    kind: str
    name: str
    place: str | None
    cpu_s: float
    steps: int
    alive: int
    ended: int
    growth_s: float | None = None
    """The CPU time they have used since an earlier result; None if there is no earlier result."""
    alike: str = dataclasses.field(default="", repr=False)

    def __str__(self) -> str:
        both = [f"{self.alive} alive" if self.alive > 1 else "", f"{self.ended} ended" if self.ended else ""]
        counts = ", ".join(filter(None, both))
        counts = f" ({counts})" if counts else ""
        growth = "" if self.growth_s is None else f" {grown(round(self.growth_s * 1e3, 3)):>12}"
        return printable(f"{_used(self.cpu_s, self.steps)}{growth}  {self.kind} {self.name}{counts}{_at(self.place)}")


# Kind, name with its numbers replaced, and place.
_Key = tuple[str, str, str | None]


def _used(cpu_s: float, steps: int) -> str:
    return f"{cpu_s * 1e3:10.3f} ms {steps:9} steps"


def _at(place: str | None) -> str:
    return "" if place is None else f", {place}"


def tally_cpu(accounts: Iterable[Cpu], before: Iterable[Cpu] | None = None) -> list[CpuTally]:
    """Return one row for each group of accounts that are alike; the row with the most CPU time is first.

    ``before`` are the accounts of an earlier result, from which the growth of each row is computed.
    """
    rows = _added_up(accounts)
    if before is not None:
        old = _added_up(before)
        for key, row in rows.items():
            row.growth_s = row.cpu_s - (old[key].cpu_s if key in old else 0.0)
    return sorted(rows.values(), key=lambda row: -row.cpu_s)


def _added_up(accounts: Iterable[Cpu]) -> dict[_Key, CpuTally]:
    rows: dict[_Key, CpuTally] = {}
    for each in accounts:
        key = (each.kind, each.alike, each.place)
        row = rows.get(key)
        if row is None:
            row = rows[key] = CpuTally(each.kind, each.name, each.place, 0.0, 0, 0, 0, alike=each.alike)
        if row.name != each.name:
            row.name = each.alike
        row.cpu_s += each.cpu_s
        row.steps += each.steps
        row.ended += each.ended
        row.alive += not each.ended
    return rows


class _Open:
    """The account of one owner that is alive: a task, coro, transport or listener, or the object of a callback."""

    __slots__ = ("cpu_ns", "key", "label", "reference", "steps")

    def __init__(self, subject: Subject) -> None:
        self.key: _Key = (subject.kind, subject.alike, subject.place)
        self.label = subject.label
        self.cpu_ns = 0
        self.steps = 0
        self.reference: weakref.ref[Any] | None = None


class Charges:
    """The CPU time used in a loop's thread, by owner."""

    def __init__(self) -> None:
        # The accounts of owners that are alive, by id(owner). An object whose methods are callbacks has an account for
        # each method, by (id(owner), name).
        self._open: dict[int | tuple[int, str | None], _Open] = {}
        # The accounts of owners that do not support weak references. The end of such an owner cannot be noticed, so all
        # owners with the same subject share one account.
        self._named: dict[Subject, _Open] = {}
        # For owners that have ended and were alike: label, cpu_ns, steps and number of owners.
        self._ended: dict[_Key, list[Any]] = {}
        # The accounts of owners that have ended and are not in `_ended` yet. Any thread may append to the queue.
        self._just_ended: collections.deque[_Open] = collections.deque()

    def charge(self, what: Any, wall_ns: int, cpu_ns: int) -> None:
        """Count a step of ``what``, which is a callback, a coro, a transport or a listener."""
        owner = getattr(what, "__self__", what)
        account = self._open.get(id(owner))
        if account is None:
            account = self._open.get((id(owner), getattr(what, "__name__", None)))
        if account is None:
            account = self._begin(owner, what)
        account.cpu_ns += cpu_ns
        account.steps += 1

    def _begin(self, owner: Any, what: Any) -> _Open:
        subject = subject_of(what)
        if subject in self._named:
            return self._named[subject]
        self._add_up_ended()
        account = _Open(subject)
        key: Any = id(owner) if subject.kind != "callback" else (id(owner), getattr(what, "__name__", None))
        try:
            account.reference = weakref.ref(owner, lambda _: self._end(key))
        except TypeError:
            self._named[subject] = account
        else:
            self._open[key] = account
        return account

    def _end(self, key: Any) -> None:
        # This may run while the interpreter exits, when module globals are gone: call no function of this module.
        self._just_ended.append(self._open.pop(key))

    def _add_up_ended(self) -> None:
        while self._just_ended:
            account = self._just_ended.popleft()
            total = self._ended.setdefault(account.key, [account.label, 0, 0, 0])
            if total[0] != account.label:
                total[0] = account.key[1]
            total[1] += account.cpu_ns
            total[2] += account.steps
            total[3] += 1

    def of(self, owner: Any) -> tuple[float, int]:
        """Return the CPU seconds and the number of steps of an owner that is alive."""
        account = self._open.get(id(owner))
        return (0.0, 0) if account is None else (account.cpu_ns / 1e9, account.steps)

    def all(self) -> list[Cpu]:
        """Return all accounts, the largest first."""
        self._add_up_ended()
        found = []
        for each in [*self._open.values(), *self._named.values()]:
            kind, alike, place = each.key
            found.append(Cpu(kind, each.label, each.cpu_ns / 1e9, each.steps, 0, place, alike))
        for (kind, alike, place), (label, cpu_ns, steps, count) in list(self._ended.items()):
            found.append(Cpu(kind, label, cpu_ns / 1e9, steps, count, place, alike))
        return sorted(found, key=lambda each: -each.cpu_s)


def set_cpu_accounting(loop: BaseLoop, enabled: bool) -> None:
    """Start (or stop) counting the CPU time of each task, coro, connection and callback.

    It costs about 1.8 us per step, for two readings of the thread's CPU clock and a call. A task or coro is charged for
    everything that runs in its steps, including garbage collections and the first steps of eager tasks that it makes.
    """
    if bool(enabled) == (loop._charges is not None):
        return
    loop._charges = Charges() if enabled else None
    observe_steps(loop, "cpu", loop._charges.charge if loop._charges is not None else None)


def observe_steps(loop: BaseLoop, name: str, observer: Any) -> None:
    """Call ``observer(what, wall_ns, cpu_ns)`` after each step.

    An earlier observer of the same ``name`` is replaced, or removed if ``observer`` is None.
    """
    if loop._step_observers is None:
        loop._step_observers = {}
    if observer is None:
        loop._step_observers.pop(name, None)
    else:
        loop._step_observers[name] = observer
    observers = list(loop._step_observers.values())
    if len(observers) < 2:
        loop._set_step_observer(observers[0] if observers else None)
        return

    def call_all(what: Any, wall_ns: int, cpu_ns: int) -> None:
        for each in observers:
            each(what, wall_ns, cpu_ns)

    loop._set_step_observer(call_all)
