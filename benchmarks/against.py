"""Report what got worse since an earlier comparison: `python -m benchmarks.compare --against OLD.json`.

If both comparisons measured the same version of a peer, ratios to that peer are compared, so that a slower machine
does not count as a loss; otherwise the numbers themselves are compared. A row is worse if its whole
interval now lies above its earlier interval, or if it no longer has a number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.intervals import LEAST_PAIRS, Interval
from benchmarks.standings import OURS, Outcome, number, peers, ratio


@dataclass(frozen=True)
class Change:
    name: str
    # The peer by which both numbers are divided, or None if they are compared directly.
    peer: str | None
    before: float
    after: float

    def text(self) -> str:
        of = f" of {self.peer}" if self.peer else ""
        return (
            f"{self.name}: {self.before:.3g}{of} before, {self.after:.3g}{of} now ({self.after / self.before - 1:+.0%})"
        )


def common_peer(before: Outcome, after: Outcome, same: set[str]) -> str | None:
    """Return the first peer that was measured in the same version in both comparisons."""
    return next((peer for peer in peers(after) if peer in same and ratio(before, peer)), None)


def compared_number(outcome: Outcome, peer: str | None) -> Interval | None:
    return number(outcome, OURS) if peer is None else ratio(outcome, peer)


def same_versions(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """Return the peers with the same version in both comparisons. For asyncio, the interpreter's version counts."""
    found = {name for name, version in after["versions"].items() if before["versions"].get(name) == version}
    return found | ({"asyncio"} if before["machine"]["python"] == after["machine"]["python"] else set())


def common(before: dict[str, Any], after: dict[str, Any]) -> Iterator[tuple[str, str | None, Interval, Interval]]:
    """Compare the rows that have enough runs in both comparisons. For each, yield the name, the peer by which both
    numbers are divided (or None), the number before, and the number now.
    """
    earlier = {outcome["name"]: outcome for outcome in before["cases"]}
    same = same_versions(before, after)
    for outcome in after["cases"]:
        old = earlier.get(outcome["name"])
        if old is None or old["metric"] != outcome["metric"]:
            continue
        peer = common_peer(old, outcome, same)
        was, now = compared_number(old, peer), compared_number(outcome, peer)
        if was and now and min(old["runs"], outcome["runs"]) >= LEAST_PAIRS:
            yield outcome["name"], peer, was, now


def lost(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The rows that had a number before and have none now, although they are in both comparisons."""
    earlier = {outcome["name"]: outcome for outcome in before["cases"]}
    return [
        outcome["name"]
        for outcome in after["cases"]
        if outcome["name"] in earlier and number(earlier[outcome["name"]], OURS) and not number(outcome, OURS)
    ]


def report(before: dict[str, Any], after: dict[str, Any]) -> tuple[list[str], bool]:
    """Return the lines to print, and whether something got worse."""
    compared = list(common(before, after))
    found = [
        Change(name, peer, was.middle, now.middle)
        for name, peer, was, now in compared
        if now.low > was.high or now.high < was.low
    ]
    worse = [change for change in found if change.after > change.before]
    better = [change for change in found if change.after < change.before]
    gone = lost(before, after)
    lines = [f"worse: {change.text()}" for change in worse]
    lines += [f"worse: {name} has no number now" for name in gone]
    lines += [f"better: {change.text()}" for change in better]
    lines.append(
        f"compared {len(compared)} rows (those with {LEAST_PAIRS} or more runs) with the runs of {before['taken']}: "
        f"{len(worse) + len(gone)} worse, {len(better)} better, the intervals of the others overlap"
    )
    return lines, bool(worse or gone)
