"""Read a digest of a comparison (`digest.py`): each row's verdict, best peer and bounds, and the count per verdict.

`intervals.py` has the rule that compares grapeshot with one peer. A row is ahead if grapeshot is ahead of every peer by
that rule, and behind if grapeshot is behind any peer. The rule is applied to every peer, because choosing one peer
first would use the same numbers to choose the peer and to judge it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.digest import OURS
from benchmarks.intervals import STANDINGS, TOO_FEW, Interval

RAW = "raw"
Outcome = dict[str, Any]


def number(outcome: Outcome, loop: str, metric: str | None = None) -> Interval | None:
    """A loop's number with its interval; None if it was not measured. The default metric is the compared one."""
    found = outcome["numbers"].get(loop, {}).get(metric or outcome["metric"])
    return Interval(*found) if found else None


def median(outcome: Outcome, loop: str, metric: str | None = None) -> float | None:
    """A loop's median for a metric. Metrics that are not compared have a median but no interval."""
    found = outcome["numbers"].get(loop, {}).get(metric or outcome["metric"])
    if isinstance(found, list):
        return float(found[1])
    return None if found is None else float(found)


def total(outcome: Outcome, loop: str, name: str) -> float:
    """A count, added up over all runs."""
    return float(outcome["numbers"].get(loop, {}).get(name, 0))


def ratio(outcome: Outcome, peer: str | None) -> Interval | None:
    """The median of grapeshot's ratios to the peer, run by run, with its interval."""
    found = outcome["ratios"].get(peer)
    return Interval(*found["interval"]) if found else None


def peers(outcome: Outcome) -> list[str]:
    """The peers that grapeshot is compared with in this row."""
    return [peer for peer in outcome["peers"] if peer in outcome["ratios"]]


def beside(outcome: Outcome) -> dict[str, str]:
    """For each peer: whether grapeshot is `ahead` of it, `equal` to it or `behind` it, or has `too few runs`."""
    return {peer: outcome["ratios"][peer]["standing"] for peer in peers(outcome)}


def standing(outcome: Outcome) -> str:
    """`ahead` of every peer, `behind` any of them, `equal`, `too few runs`, or `-` without a peer."""
    words = set(beside(outcome).values())
    if words == {"ahead"}:
        return "ahead"
    return next((word for word in ("behind", TOO_FEW, "equal") if word in words), "-")


def best_peer(outcome: Outcome) -> str | None:
    """The peer that the row's verdict depends on: among all peers with the same verdict as the row, it has the highest
    ratio.
    """
    found, word = beside(outcome), standing(outcome)
    deciding = {peer: outcome["ratios"][peer]["interval"][1] for peer in found if found[peer] == word}
    return max(deciding, key=lambda peer: deciding[peer], default=None)


def judge(outcome: Outcome, bound: dict[str, Any]) -> tuple[str, bool | None]:
    """Return the bound as text, and whether it holds (None if grapeshot or the peer is missing)."""
    at_most, peer = bound["at_most"], bound["peer"]
    text = f"{at_most:g} {outcome['unit']}" if peer is None else f"{at_most:.2f} of {peer}"
    found = number(outcome, OURS) if peer is None else ratio(outcome, peer)
    return text, found.middle <= at_most if found else None


def verdict(outcome: Outcome, bound: dict[str, Any]) -> str:
    _, holds = judge(outcome, bound)
    if holds is None:
        return "not measured"
    if holds:
        return "yes"
    found = ratio(outcome, bound["peer"]) if bound["peer"] else number(outcome, OURS)
    return f"no ({found.middle / bound['at_most'] - 1:+.0%})" if found else "not measured"


def count(outcomes: Sequence[Outcome]) -> Counter[str]:
    """How many rows are ahead, how many equal, how many behind, and how many have too few runs for a verdict."""
    return Counter(word for outcome in outcomes if (word := standing(outcome)) in (*STANDINGS, TOO_FEW))
