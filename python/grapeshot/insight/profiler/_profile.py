"""A finished profile: its rows, and its file format.

The file begins with the line ``grapeshot profile 1``. The rest is JSON, compressed with zlib. It is an object with
these keys:

- ``python``, ``duration_ns``, ``events``, ``cost_ns`` (of one event), and ``threads`` (which threads were profiled);
- ``functions``: name, file and line of each; the file is ``""`` for a function written in C;
- ``owners``: kind, name, page faults without and with I/O, voluntary and involuntary context switches of each;
- ``nodes``: owner, parent, function, calls, own CPU time and own wall time of each; times are in nanoseconds, and the
  parent is the index of an earlier node, or -1.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import platform
import zlib

from grapeshot.insight._subjects import without_numbers

from . import _table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ._recording import Node, Recording

_MAGIC = b"grapeshot profile 1\n"
SORTS = ("cpu", "own_cpu", "wall", "own_wall", "wait", "calls")

_FUNCTION_COLUMNS = ("calls", "cpu", "own_cpu", "wall", "own_wall", "wait")
_OWNER_COLUMNS = (
    "cpu",
    "wall",
    "wait",
    "calls",
    "minor_faults",
    "major_faults",
    "voluntary_switches",
    "involuntary_switches",
)
# The columns that are summed when rows are combined. The wait is computed from other columns.
_OWNER_SUMS = tuple(name for name in _OWNER_COLUMNS if name != "wait")


class FunctionRow:
    """The numbers of a function, summed over all owners or over some.

    Times are in nanoseconds; ``own_`` times exclude called functions.
    """

    __slots__ = ("calls", "cpu", "file", "line", "name", "own_cpu", "own_wall", "primitive_calls", "wall")

    def __init__(self, name: str, file: str, line: int) -> None:
        self.name = name
        self.file = file
        self.line = line
        self.calls = self.primitive_calls = 0  # primitive_calls excludes recursive calls
        self.cpu = self.own_cpu = self.wall = self.own_wall = 0

    @property
    def wait(self) -> int:
        """The time inside this function during which its coro, task or thread did not have the CPU."""
        return max(0, self.wall - self.cpu)

    def __str__(self) -> str:
        return f"{self.name} ({os.path.basename(self.file)}:{self.line})" if self.file else self.name


@dataclasses.dataclass
class OwnerRow:
    """A coro, a task, or a thread. A thread's row covers everything else: the loop, polling, callbacks, protocols."""

    kind: str
    name: str
    minor_faults: int
    major_faults: int
    voluntary_switches: int
    involuntary_switches: int
    calls: int = 0
    cpu: int = 0
    wall: int = 0
    count: int = 1
    """The number of owners in this row, which may combine owners that are alike."""

    @property
    def wait(self) -> int:
        """The time, since the owner was first seen, during which it did not have the CPU."""
        return max(0, self.wall - self.cpu)

    def add(self, other: OwnerRow) -> None:
        """Add the numbers of a similar row."""
        for name in (*_OWNER_SUMS, "count"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def __str__(self) -> str:
        several = "" if self.count == 1 else f" ({self.count} {self.kind}s)"
        return f"{self.kind} {self.name!r}{several}"


def _alike_added_up(owners: Sequence[OwnerRow]) -> list[OwnerRow]:
    """Combine coros whose names differ only in their numbers, and tasks likewise."""
    rows: dict[tuple[str, str], OwnerRow] = {}
    for owner in owners:
        alike = without_numbers(owner.name)
        row = rows.get((owner.kind, alike)) if owner.kind != "thread" else None
        if row is None:
            rows[owner.kind, alike if owner.kind != "thread" else owner.name] = dataclasses.replace(owner)
            continue
        row.add(owner)
        if row.name != owner.name:
            row.name = alike
    return list(rows.values())


def _top(rows: Sequence[Any], sort: str) -> list[Any]:
    """Return the rows, the largest values first. Owners have no ``own_`` times; their full times are used."""
    full = sort.removeprefix("own_")
    return sorted(rows, key=lambda row: getattr(row, sort if hasattr(row, sort) else full), reverse=True)


def _is_named(row: OwnerRow, name: str) -> bool:
    return name in (row.name, str(row)) or ("*" in name and row.kind != "thread" and without_numbers(row.name) == name)


class Profile:
    """The results of a run of the profiler. They are empty until the run has ended."""

    def __init__(self) -> None:
        self.python = platform.python_version()
        self.threads = ""
        self.duration_ns = self.events = self.cost_ns = 0
        self.functions: list[tuple[str, str, int]] = []
        #: A row for each coro, task and thread.
        self.owners: list[OwnerRow] = []
        self.nodes: list[tuple[int, int, int, int, int, int]] = []

    @property
    def overhead_ns(self) -> int:
        """About how long the profiler itself took: the number of its events, times the measured cost of one."""
        return self.events * self.cost_ns

    # ---- rows

    def function_rows(self, owner: OwnerRow | Sequence[OwnerRow] | None = None) -> list[FunctionRow]:
        """Return a row for each function, with the numbers of all owners, of one, or of several."""
        chosen = {id(each) for each in ([owner] if isinstance(owner, OwnerRow) else owner or ())}
        rows = [FunctionRow(*function) for function in self.functions]
        for (owner_index, parent, function, calls, cpu, wall), totals in zip(self.nodes, self.totals, strict=True):
            if owner is not None and id(self.owners[owner_index]) not in chosen:
                continue
            row = rows[function]
            row.calls += calls
            row.own_cpu += cpu
            row.own_wall += wall
            if function not in self.path(parent):
                row.primitive_calls += calls
                row.cpu += totals[1]
                row.wall += totals[2]
        return [row for row in rows if row.calls or row.wall or row.cpu]

    def _called_rows(self, owner: Sequence[OwnerRow] | None) -> list[FunctionRow]:
        """Return the rows of functions that were called during the profile.

        A function that was called before the profile began, and had not returned by then, has a row if its own CPU or
        wall time is at least 1 % of the profile's duration.
        """
        rows = self.function_rows(owner)
        return [row for row in rows if row.calls or 100 * max(row.own_cpu, row.own_wall) >= self.duration_ns]

    def path(self, index: int) -> list[int]:
        """Return the functions of a node and of its callers, the innermost first."""
        functions = []
        while index >= 0:
            functions.append(self.nodes[index][2])
            index = self.nodes[index][1]
        return functions

    @functools.cached_property
    def totals(self) -> list[list[int]]:
        """For each node, the calls, CPU time and wall time of it and of all nodes below it."""
        totals = [list(node[3:]) for node in self.nodes]
        for index in range(len(totals) - 1, -1, -1):
            parent = self.nodes[index][1]
            if parent >= 0:
                totals[parent] = [sum(pair) for pair in zip(totals[parent], totals[index], strict=True)]
        return totals

    def table(self, sort: str = "cpu", limit: int = 20, owner: str | None = None, *, each: bool = False) -> str:
        """Return a text with the profiler's own cost and two tables, of functions and of owners, sorted by ``sort``.

        Each table has at most ``limit`` rows. Coros and tasks whose names differ only in their numbers share a row;
        with ``each``, every one has a row of its own. ``owner`` is the name of a coro, task, thread or shared row; if
        it is given, the table of functions covers only that owner.
        """
        if sort not in SORTS:
            raise ValueError(f"sort must be one of {', '.join(SORTS)}, not {sort!r}")
        chosen = None if owner is None else [row for row in self.owners if _is_named(row, owner)]
        if chosen == []:
            raise ValueError(f"this profile has no coro, task or thread with the name {owner!r}")
        owners = self.owners if each else _alike_added_up(self.owners)
        return "\n".join(
            [
                self.heading(),
                "",
                *_table.lines("function", _FUNCTION_COLUMNS, _top(self._called_rows(chosen), sort), limit),
                "",
                *_table.lines("coro, task or thread", _OWNER_COLUMNS, _top(owners, sort), limit),
            ]
        )

    def heading(self) -> str:
        """Return two lines: what was profiled, and how much time the profiler itself took."""
        took, duration = self.overhead_ns / 1e9, self.duration_ns / 1e9
        return (
            f"{duration:.3f} s on Python {self.python}, {self.threads}\n"
            f"the profiler itself took about {took:.3f} s: {self.events} events of {self.cost_ns / 1000:.2f} us each; "
            "this is not charged to any function"
        )

    # ---- the file

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to a file, which ``python -m grapeshot profile`` reads."""
        text = json.dumps(self.as_json(), separators=(",", ":"))
        with open(path, "wb") as file:
            file.write(_MAGIC + zlib.compress(text.encode()))

    def as_json(self) -> dict[str, object]:
        """Return the contents of the file as an object."""
        owners = [dataclasses.astuple(owner)[:6] for owner in self.owners]
        names = ("python", "threads", "duration_ns", "events", "cost_ns", "functions")
        return {name: getattr(self, name) for name in names} | {"owners": owners, "nodes": self.nodes}

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Profile:
        """Read a file that :meth:`save` has written. Raises ValueError if it is not such a file."""
        with open(path, "rb") as file:
            data = file.read()
        if not data.startswith(_MAGIC):
            raise ValueError(f"{os.fspath(path)!r} is not a profile that this version of grapeshot can read")
        try:
            found = json.loads(zlib.decompress(data[len(_MAGIC) :]))
            profile = Profile()
            for name in ("python", "threads", "duration_ns", "events", "cost_ns"):
                setattr(profile, name, found[name])
            profile.functions = [(name, file, line) for name, file, line in found["functions"]]
            profile.owners = [OwnerRow(*owner) for owner in found["owners"]]
            for owner, parent, function, calls, cpu, wall in found["nodes"]:
                profile._add_node(owner, parent, function, (calls, cpu, wall))
        except (zlib.error, KeyError, TypeError, IndexError, ValueError) as exc:
            raise ValueError(f"{os.fspath(path)!r} is damaged: {exc!r}") from exc
        return profile

    # ---- from a recording

    def _fill(self, recording: Recording, threads: str) -> None:
        self.threads = threads
        self.duration_ns = recording.duration_ns
        self.events = recording.events
        self.cost_ns = recording.cost_ns
        places: dict[tuple[str, str, int], int] = {}
        for owner in recording.owners:
            self.owners.append(OwnerRow(owner.kind, owner.name, *owner.usage))
            self._add_tree(owner.root, len(self.owners) - 1, places)
        self.functions = list(places)

    def _add_tree(self, root: Node, owner: int, places: dict[tuple[str, str, int], int]) -> None:
        """Add the nodes of an owner. Time that is not charged to any of its functions gets a node, too."""
        pending = [(root, -1)]
        while pending:
            node, parent = pending.pop()
            key = node.key
            if key is None:
                place = ("(the loop)" if self.owners[owner].kind == "thread" else "(begin and end)", "", 0)
            elif isinstance(key, str):
                place = (key, "", 0)
            else:
                place = (key.co_qualname, key.co_filename, key.co_firstlineno)
            index = parent
            if node is not root or node.wall_ns > 0 or node.cpu_ns > 0:
                times = (node.calls, max(0, node.cpu_ns), max(0, node.wall_ns))
                self._add_node(owner, parent, places.setdefault(place, len(places)), times)
                index = len(self.nodes) - 1 if node is not root else -1
            # `list`, because a thread that is still in a callback of the profiler may add a node meanwhile.
            pending.extend((child, index) for child in list(node.children.values()))

    def _add_node(self, owner: int, parent: int, function: int, times: tuple[int, int, int]) -> None:
        row = self.owners[owner]
        calls, cpu, wall = times
        row.calls += calls
        row.cpu += cpu
        row.wall += wall
        self.nodes.append((owner, parent, function, calls, cpu, wall))
