"""What ``python -m grapeshot top`` asks for: numbers, slow callbacks, the tree and descriptors, as a line of JSON.

A sampler makes the loop measure its callbacks and keeps the slowest ones. It ends when its client says so, with the
connection, and when the client has asked for nothing for a while: it may be stopped.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import resource
import sys
import threading
import time

from grapeshot import _accounting, _tree, _waits
from grapeshot._statistics import Statistics

from . import _output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from grapeshot._measuring import SlowCallback

_MOST_SLOW = 50
_PERCENTILES = (50, 90, 99)
# Seconds without a request after which a sampler ends by itself.
_PATIENCE_S = 30.0


class Sampler:
    """Looks at a loop for one client. It belongs to the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, slow_s: float = 0.01) -> None:
        self._loop: Any = loop
        self._slow: list[SlowCallback] = []
        self._timer: asyncio.TimerHandle | None = None
        self._slow_s = slow_s
        self._is_measuring = False
        self._client = _output.client.get()

    def sample(self, *parts: str) -> None:
        """Print the numbers and what else is asked for (``"tree"``, ``"descriptors"``), as one line of JSON."""
        print(json.dumps(self.look(*parts)))  # noqa: T201  # to the client

    def look(self, *parts: str) -> dict[str, Any]:
        """Return the same as a dictionary."""
        self._begin()
        started = time.monotonic()
        descriptors = _tree._open_fds()
        found: dict[str, Any] = {
            "at_s": started,
            "process": " ".join(sys.argv)[:200] or sys.executable,
            "pid": os.getpid(),
            "python": sys.version.split()[0],
            "cpu_s": time.process_time(),
            "rss": _accounting._rss(),
            "descriptor_count": len(descriptors) - 1,  # without that of the listing
            "descriptor_limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "threads": threading.active_count(),
            "statistics": self._statistics(),
            "slow": [dataclasses.asdict(slow) for slow in self._slow],
        }
        if "tree" in parts:
            waits = _waits.Waits(self._loop)
            found["tree"] = [waits.heading(), *waits.lines()]
        if "descriptors" in parts and self._has_statistics():
            found["descriptors"] = [dataclasses.asdict(each) for each in _accounting._descriptors(self._loop)]
            # Another thread may have closed one since they were counted, as the one that reads the stacks does.
            found["descriptor_count"] = len(found["descriptors"])
        found["took_s"] = time.monotonic() - started
        return found

    def end(self) -> None:
        """Stop measuring. The second call does nothing."""
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
        self._slow.append(slow)
        if len(self._slow) > _MOST_SLOW:
            self._slow.remove(min(self._slow, key=lambda each: each.duration_s))

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


def number_lines(loop: Any) -> str:
    """Return the numbers of a loop, a line for each."""
    found = Sampler(loop)._statistics()
    if found is None:
        return f"only grapeshot's loops have numbers, and this is {loop!r}"
    return "\n".join(f"{name:20} {_text(value)}" for name, value in found.items())


def rate_lines(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return what happened between two looks: what there was a second of each number, and the slow callbacks."""
    if after["statistics"] is None:
        return "only grapeshot's loops have numbers"
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
        lines.append(f"{slow['kind']} {slow['name']!r} took {slow['duration_s']:.3f} s")
        lines += [f"  {line}" for line in slow["stack"]]
    return "\n".join(lines)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(each)}" for key, each in value.items())
    return f"{value:.6f} s" if isinstance(value, float) else str(value)


_waits.LOOKING.add(__file__)
