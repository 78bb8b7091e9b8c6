"""Who has the CPU: what is told of each step of a loop, and the accounts that are kept of it.

The native loop reads the clocks around each step (``event_loop/slow.rs``) and calls the observers that are set here.
While there is none, steps are not timed. It belongs to the loop's thread.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import weakref

from . import _core

TYPE_CHECKING = False
if TYPE_CHECKING:
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
    """0: one that is alive. Otherwise how many have ended; their numbers are added up by kind and name."""

    def __str__(self) -> str:
        ended = f" ({self.ended} ended)" if self.ended else ""
        return f"{self.cpu_s * 1e3:10.3f} ms {self.steps:9} steps  {self.kind} {self.name}{ended}"


class _Open:
    """The account of one owner that is alive."""

    __slots__ = ("cpu_ns", "kind", "name", "reference", "steps")

    def __init__(self, kind: str, name: str) -> None:
        self.kind = kind
        self.name = name
        self.cpu_ns = 0
        self.steps = 0
        self.reference: weakref.ref[Any] | None = None


class Charges:
    """Who has had the CPU of a loop's thread."""

    def __init__(self) -> None:
        # By id(owner), as long as the owner is alive; those that cannot be referred to weakly by name.
        self._open: dict[int, _Open] = {}
        self._named: dict[tuple[str, str], _Open] = {}
        # cpu_ns, steps, owners by kind and name.
        self._ended: dict[tuple[str, str], list[int]] = {}

    def charge(self, what: Any, wall_ns: int, cpu_ns: int) -> None:
        """Add a step of ``what``: a callback, a coro or a transport."""
        owner = getattr(what, "__self__", what)
        account = self._open.get(id(owner))
        if account is None:
            account = self._begin(owner, what)
        account.cpu_ns += cpu_ns
        account.steps += 1

    def _begin(self, owner: Any, what: Any) -> _Open:
        kind, name = describe(what)
        if (kind, name) in self._named:
            return self._named[kind, name]
        account = _Open(kind, name)
        key = id(owner)
        try:
            account.reference = weakref.ref(owner, lambda _, key=key: self._end(key))  # type: ignore[misc]
        except TypeError:
            self._named[kind, name] = account
        else:
            self._open[key] = account
        return account

    def _end(self, key: int) -> None:
        account = self._open.pop(key)
        total = self._ended.setdefault((account.kind, account.name), [0, 0, 0])
        total[0] += account.cpu_ns
        total[1] += account.steps
        total[2] += 1

    def of(self, owner: Any) -> tuple[float, int]:
        """Return the CPU seconds and the steps of one that is alive."""
        account = self._open.get(id(owner))
        return (0.0, 0) if account is None else (account.cpu_ns / 1e9, account.steps)

    def all(self) -> list[Cpu]:
        """Return all accounts, the largest first."""
        alive = [*self._open.values(), *self._named.values()]
        found = [Cpu(each.kind, each.name, each.cpu_ns / 1e9, each.steps, 0) for each in alive]
        for (kind, name), (cpu_ns, steps, count) in list(self._ended.items()):
            found.append(Cpu(kind, name, cpu_ns / 1e9, steps, count))
        return sorted(found, key=lambda each: -each.cpu_s)


def describe(what: Any) -> tuple[str, str]:
    """Return kind and name of a step: of a callback, coro or transport."""
    owner = getattr(what, "__self__", what)
    if isinstance(owner, asyncio.BaseTransport):
        return "connection", type(innermost_protocol(owner)).__qualname__
    if type(owner).__name__ == "_Listener":
        return "server", "accepts"
    if isinstance(owner, _core.Coro):
        return "coro", owner.name
    get_coro = getattr(owner, "get_coro", None)
    if asyncio.isfuture(owner) and get_coro is not None:
        coroutine = get_coro()
        name = getattr(coroutine, "__qualname__", type(coroutine).__qualname__)
        return "task", f"{owner.get_name()} ({name})" if _has_own_name(owner) else name  # type: ignore[attr-defined]
    return "callback", callback_name(what)


def callback_name(function: Any) -> str:
    """Return the qualified name of what a callback calls."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def _has_own_name(task: Any) -> bool:
    return not task.get_name().startswith("Task-")


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


def innermost_protocol(transport: Any) -> Any:
    """Return the application's protocol, which TLS may lie below."""
    protocol = transport.get_protocol()
    above = getattr(protocol, "_app_protocol", None)
    return protocol if above is None else above
