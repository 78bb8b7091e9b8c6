"""Collects samples for ``python -m grapeshot top``: statistics, slow callbacks, the tree and descriptors, as JSON.

A sampler makes the loop measure its callbacks, and keeps the slowest ones. It stops when its client says so, when the
connection ends, or when the client has not asked for a sample for a while (the client may be suspended).
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import linecache
import os
import resource
import sys
import time
from collections.abc import Callable, Collection

from grapeshot.insight import _accounting, _descriptors, _tree, _waits
from grapeshot.insight._statistics import Statistics
from grapeshot.insight._subjects import Subject

from . import _output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from grapeshot.insight._measuring import SlowCallback

# At most this many rows of slow callbacks, lines of the tree, and single descriptors are sent.
_MAX_SLOW = 50
_MAX_LINES = 5000
_MAX_DESCRIPTORS = 5000
_PERCENTILES = (50, 90, 99)
# A sampler stops by itself after this many seconds without a request.
_PATIENCE_S = 30.0


@dataclasses.dataclass
class Slow:
    """A group of slow callbacks that are alike."""

    kind: str
    name: str
    """The name and function of the callbacks. If the names differ in their numbers, ``*`` replaces each number."""
    place: str | None
    count: int = 0
    total_s: float = 0.0
    duration_s: float = 0.0
    """How long the slowest callback took. ``stack`` is its stack or, if that was not recorded, another callback's."""
    last_s: float = 0.0
    """When the latest one began, in seconds of ``time.monotonic()``."""
    stack: tuple[str, ...] = ()

    def add(self, slow: SlowCallback, subject: Subject) -> None:
        """Add another callback."""
        if self.name != subject.label:
            self.name = subject.alike
        self.count += 1
        self.total_s += slow.duration_s
        self.last_s = max(self.last_s, slow.started_s)
        if slow.duration_s >= self.duration_s or not self.stack:
            self.stack = slow.stack or self.stack
        self.duration_s = max(self.duration_s, slow.duration_s)


class Sampler:
    """Takes samples of a loop for one client. Only the loop's thread may use it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, slow_s: float = 0.01) -> None:
        self._loop: Any = loop
        self._slow: dict[tuple[str, str, str | None], Slow] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._slow_s = slow_s
        self._is_measuring = False
        self._client = _output.client.get()

    def sample(self, *parts: str) -> None:
        """Print a sample with the requested parts, as one line of JSON.

        The parts ``"waits"`` and ``"descriptors"`` have one row for all items that are alike. ``"tree"`` and ``"each
        descriptor"`` list the items themselves.
        """
        print(json.dumps(self.collect(*parts)))  # noqa: T201  # to the client

    def collect(self, *parts: str) -> dict[str, Any]:
        """Return the sample as a dictionary."""
        self._begin()
        started = time.monotonic()
        found: dict[str, Any] = {
            "at_s": started,
            "process": " ".join(sys.argv)[:200] or sys.executable,
            "pid": os.getpid(),
            "python": sys.version.split()[0],
            "cpu_s": time.process_time(),
            "rss": _accounting._rss(),
            "descriptor_count": len(_tree._open_fds()) - 1,  # listing them opens one
            "descriptor_limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "threads": len(sys._current_frames()),  # without patched threads, which are coros
            "statistics": self._statistics(),
            "slow": [dataclasses.asdict(slow) for slow in self._slow.values()],
        }
        if self._has_statistics():
            found["connections"] = self._loop._open_connections
        for part in parts:
            if part not in _DESCRIPTOR_PARTS:
                found[part] = _PARTS[part](self._loop)
        if not _DESCRIPTOR_PARTS.isdisjoint(parts):
            found |= _descriptor_parts(self._loop, parts)
        found["took_s"] = time.monotonic() - started
        return found

    def end(self) -> None:
        """Stop measuring. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_measuring:
            self._is_measuring = False
            self._loop.remove_slow_listener(self._note)
        if self._client is not None:
            self._client.at_end.discard(self.end)

    def _has_statistics(self) -> bool:
        return hasattr(self._loop, "add_slow_listener")

    def _begin(self) -> None:
        if not self._has_statistics():
            return
        if self._client is not None:
            self._client.at_end.add(self.end)
        if not self._is_measuring:
            self._is_measuring = True
            self._loop.add_slow_listener(self._note, self._slow_s, stacks=True)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(_PATIENCE_S, self.end)

    def _note(self, slow: SlowCallback) -> None:
        if self._client is not None and slow.name == self._client.name:
            return  # the client's own command, which took the sample
        subject = slow.subject or Subject(slow.kind, slow.name, "", None)
        key = (slow.kind, subject.alike, subject.place)
        row = self._slow.get(key)
        if row is None:
            row = self._slow[key] = Slow(slow.kind, subject.label, subject.place)
        row.add(slow, subject)
        if len(self._slow) > _MAX_SLOW:
            del self._slow[min(self._slow, key=lambda key: self._slow[key].duration_s)]

    def _statistics(self) -> dict[str, Any] | None:
        if not self._has_statistics():
            return None
        found = self._loop.statistics()
        numbers = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
        for name in found.HISTOGRAMS:
            histogram = numbers[name]
            if histogram is not None:
                percentiles = {f"p{percent}": histogram.percentile(percent) for percent in _PERCENTILES}
                numbers[name] = {"count": histogram.count, **percentiles, "max": histogram.max_s}
        return numbers


def _tally_waits(loop: Any) -> list[dict[str, Any]]:
    rows = [dataclasses.asdict(row) for row in _waits.tally_waits(loop)]
    for row in rows:
        file, _, rest = (row["place"] or "").rpartition(":")
        line = rest.partition(" ")[0]
        row["source"] = linecache.getline(file, int(line)).strip() if line.isdecimal() else ""
    return rows


def _tree_lines(loop: Any) -> list[str]:
    waits = _waits.Waits(loop)
    lines = list(itertools.islice(waits.lines(), _MAX_LINES + 1))
    if len(lines) > _MAX_LINES:
        lines[_MAX_LINES] = f"only the first {_MAX_LINES} lines are shown"
    return [waits.heading(), *lines]


def _memory_of(loop: Any) -> dict[str, Any]:
    return dataclasses.asdict(_accounting._memory(loop)) if hasattr(loop, "statistics") else {}


def _descriptor_parts(loop: Any, parts: Collection[str]) -> dict[str, Any]:
    """Return the parts that list descriptors, and the number of descriptors.

    The parts and the number come from one list, so that they agree although other threads open and close files all the
    time. For instance, the thread that records stacks reads source files.
    """
    has_owners = "each descriptor" in parts
    listed = _descriptors.descriptors(loop, has_owners) if hasattr(loop, "statistics") else []
    found: dict[str, Any] = {"descriptor_count": len(listed)} if listed else {}
    if "descriptors" in parts:
        found["descriptors"] = [dataclasses.asdict(row) for row in _descriptors.tally_descriptors(listed)]
    if has_owners:
        found["each descriptor"] = [dataclasses.asdict(each) for each in listed[:_MAX_DESCRIPTORS]]
    return found


_PARTS: dict[str, Callable[[Any], Any]] = {
    "memory": _memory_of,
    "waits": _tally_waits,
    "tree": _tree_lines,
}
_DESCRIPTOR_PARTS = frozenset(("descriptors", "each descriptor"))


def number_lines(loop: Any) -> str:
    """Return the statistics of a loop as text, with a line for each number."""
    found = Sampler(loop)._statistics()
    if found is None:
        return f"only grapeshot's loops have statistics, and this loop is {loop!r}"
    return "\n".join(f"{name:20} {_text(value)}" for name, value in found.items())


def rate_lines(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return as text what happened between two samples: the rate of each number, and the slow callbacks."""
    if after["statistics"] is None:
        return "only grapeshot's loops have statistics"
    seconds = after["at_s"] - before["at_s"]
    lines = [f"{'':20} {'total':>14} {'a second':>14}"]
    for name, value in after["statistics"].items():
        if isinstance(value, (int, float)):
            is_gauge = name in Statistics.GAUGES
            rate = "" if is_gauge else f" {(value - before['statistics'][name]) / seconds:14.2f}"
            lines.append(f"{name:20} {_text(value):>14}{rate}")
        elif value is not None:
            lines.append(f"{name:20} {_text(value)}")
    for slow in sorted(after["slow"], key=lambda each: -each["duration_s"]):
        times = "" if slow["count"] == 1 else f", the slowest of {slow['count']}"
        lines.append(f"{slow['kind']} {slow['name']!r} took {slow['duration_s']:.3f} s{times}")
        lines += [f"  {line}" for line in slow["stack"]]
    return "\n".join(lines)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(each)}" for key, each in value.items())
    return f"{value:.6f} s" if isinstance(value, float) else str(value)


_waits.HIDDEN_FILES.add(__file__)
