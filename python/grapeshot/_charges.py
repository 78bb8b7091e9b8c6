"""Who has the CPU: what is told of each step of a loop, and the accounts that are kept of it.

The native loop reads the clocks around each step (``event_loop/slow.rs``) and calls the observers that are set here.
While there is none, steps are not timed. It belongs to the loop's thread.
"""

from __future__ import annotations

import dataclasses
import weakref

from ._subjects import Subject, subject_of
from ._tally import grown, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from ._base import BaseLoop


@dataclasses.dataclass
class Cpu:
    """The CPU time of a task, coro, connection or callback, or of all of one name that have ended."""

    kind: str
    """``"task"``, ``"coro"``, ``"connection"``, ``"server"`` (accepting) or ``"callback"``."""
    name: str
    cpu_s: float
    """CPU time of the loop's thread in seconds, since accounting was switched on."""
    steps: int
    """How often it ran: steps of a task, runs of a coro, events of a connection."""
    ended: int
    """0: one that is alive. Otherwise how many have ended; what is alike among them is added up."""
    place: str | None = None
    """Where its function begins, as ``file:line``."""
    alike: str = dataclasses.field(default="", repr=False)
    """The name without its numbers: the same for all that are alike."""

    def __str__(self) -> str:
        ended = f" ({self.ended} ended)" if self.ended else ""
        return printable(f"{_used(self.cpu_s, self.steps)}  {self.kind} {self.name}{ended}{_at(self.place)}")


@dataclasses.dataclass
class CpuTally:
    """The CPU time of all that are alike: of the same kind, function and name, but for the numbers in it."""

    kind: str
    name: str
    place: str | None
    cpu_s: float
    steps: int
    alive: int
    ended: int
    growth_s: float | None = None
    """How much CPU time they have used since an earlier look; None if there was none."""
    alike: str = dataclasses.field(default="", repr=False)

    def __str__(self) -> str:
        both = [f"{self.alive} alive" if self.alive > 1 else "", f"{self.ended} ended" if self.ended else ""]
        counts = ", ".join(filter(None, both))
        counts = f" ({counts})" if counts else ""
        growth = "" if self.growth_s is None else f" {grown(round(self.growth_s * 1e3, 3)):>12}"
        return printable(f"{_used(self.cpu_s, self.steps)}{growth}  {self.kind} {self.name}{counts}{_at(self.place)}")


# Kind, what is alike, and place.
_Key = tuple[str, str, str | None]


def _used(cpu_s: float, steps: int) -> str:
    return f"{cpu_s * 1e3:10.3f} ms {steps:9} steps"


def _at(place: str | None) -> str:
    return "" if place is None else f", {place}"


def tally_cpu(accounts: Iterable[Cpu], before: Iterable[Cpu] | None = None) -> list[CpuTally]:
    """Add up what is alike, the largest first; ``before`` are the accounts of an earlier look."""
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
    """The account of one owner that is alive."""

    __slots__ = ("cpu_ns", "key", "label", "reference", "steps")

    def __init__(self, subject: Subject) -> None:
        self.key: _Key = (subject.kind, subject.alike, subject.place)
        self.label = subject.label
        self.cpu_ns = 0
        self.steps = 0
        self.reference: weakref.ref[Any] | None = None


class Charges:
    """Who has had the CPU of a loop's thread."""

    def __init__(self) -> None:
        # By id(owner), as long as the owner is alive; those that cannot be referred to weakly by name.
        self._open: dict[int, _Open] = {}
        self._named: dict[Subject, _Open] = {}
        # The label, cpu_ns, steps and number of owners that were alike.
        self._ended: dict[_Key, list[Any]] = {}

    def charge(self, what: Any, wall_ns: int, cpu_ns: int) -> None:
        """Add a step of ``what``: a callback, a coro or a transport."""
        owner = getattr(what, "__self__", what)
        account = self._open.get(id(owner))
        if account is None:
            account = self._begin(owner, what)
        account.cpu_ns += cpu_ns
        account.steps += 1

    def _begin(self, owner: Any, what: Any) -> _Open:
        subject = subject_of(what)
        if subject in self._named:
            return self._named[subject]
        account = _Open(subject)
        key = id(owner)
        try:
            account.reference = weakref.ref(owner, lambda _, key=key: self._end(key))  # type: ignore[misc]
        except TypeError:
            self._named[subject] = account
        else:
            self._open[key] = account
        return account

    def _end(self, key: int) -> None:
        # It may run at the end of the interpreter, when there are no functions any more.
        account = self._open.pop(key)
        total = self._ended.setdefault(account.key, [account.label, 0, 0, 0])
        if total[0] != account.label:
            total[0] = account.key[1]
        total[1] += account.cpu_ns
        total[2] += account.steps
        total[3] += 1

    def of(self, owner: Any) -> tuple[float, int]:
        """Return the CPU seconds and the steps of one that is alive."""
        account = self._open.get(id(owner))
        return (0.0, 0) if account is None else (account.cpu_ns / 1e9, account.steps)

    def all(self) -> list[Cpu]:
        """Return all accounts, the largest first."""
        found = []
        for each in [*self._open.values(), *self._named.values()]:
            kind, alike, place = each.key
            found.append(Cpu(kind, each.label, each.cpu_ns / 1e9, each.steps, 0, place, alike))
        for (kind, alike, place), (label, cpu_ns, steps, count) in list(self._ended.items()):
            found.append(Cpu(kind, label, cpu_ns / 1e9, steps, count, place, alike))
        return sorted(found, key=lambda each: -each.cpu_s)


def set_cpu_accounting(loop: BaseLoop, enabled: bool) -> None:
    """Count the CPU time of each task, coro, connection and callback from now on, or no more.

    It costs two readings of the thread's CPU clock and a call per step, together some 1.8 us. A task or coro is charged
    for what runs in its steps, eager tasks that it makes and garbage collections included.
    """
    if bool(enabled) == (loop._charges is not None):
        return
    loop._charges = Charges() if enabled else None
    observe_steps(loop, "cpu", loop._charges.charge if loop._charges is not None else None)


def observe_steps(loop: BaseLoop, name: str, observer: Any) -> None:
    """Call ``observer(what, wall_ns, cpu_ns)`` after each step, beside those of other names; None ends that."""
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

    def all_of_them(what: Any, wall_ns: int, cpu_ns: int) -> None:
        for each in observers:
            each(what, wall_ns, cpu_ns)

    loop._set_step_observer(all_of_them)
