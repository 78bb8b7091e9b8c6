"""What the samples of a comparison say: medians, ratios run by run, the best peer, and who is ahead of whom.

It knows the JSON of a comparison and nothing of how it was measured. `intervals.py` has the rule for one peer. Of a row
every peer is judged by that rule, so that no peer is chosen by the numbers that it is then judged by: the row is ahead
if grapeshot is ahead of every peer, and behind if it is behind any of them.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks import intervals
from benchmarks.intervals import STANDINGS, TOO_FEW, Pair

OURS = "grapeshot"
RAW = "raw"
Outcome = dict[str, Any]


def values(outcome: Outcome, loop: str, metric: str | None = None) -> list[float]:
    """One number per run, or none when the loop or the metric is not there. Without a metric: what counts."""
    metric = metric or outcome["metric"]
    return [sample[metric] for sample in outcome["samples"].get(loop, []) if sample.get(metric) is not None]


def median(outcome: Outcome, loop: str, metric: str | None = None) -> float | None:
    taken = values(outcome, loop, metric)
    return statistics.median(taken) if taken else None


def pairs(outcome: Outcome, loop: str, peer: str) -> list[Pair]:
    """Run by run, since the runs of one number lie next to each other in time."""
    metric, samples = outcome["metric"], outcome["samples"]
    taken = [
        (own.get(metric), other.get(metric))
        for own, other in zip(samples.get(loop, []), samples.get(peer, []), strict=False)
    ]
    return [(own, other) for own, other in taken if own is not None and other is not None]


def ratios(outcome: Outcome, loop: str, peer: str) -> list[float]:
    return intervals.ratios(pairs(outcome, loop, peer))


def peers(outcome: Outcome) -> list[str]:
    """Return the peers that grapeshot is compared with in this row; older files do not list them."""
    listed = outcome.get("peers", [loop for loop in outcome["samples"] if loop not in (OURS, RAW)])
    return [peer for peer in listed if pairs(outcome, OURS, peer)]


def beside(outcome: Outcome) -> dict[str, str]:
    """How grapeshot stands beside each peer."""
    return {peer: intervals.standing(pairs(outcome, OURS, peer)) for peer in peers(outcome)}


def standing(outcome: Outcome) -> str:
    """`ahead` of every peer, `behind` any of them, `equal`, `too few runs`, or `-` without a peer."""
    words = set(beside(outcome).values())
    if words == {"ahead"}:
        return "ahead"
    return next((word for word in ("behind", TOO_FEW, "equal") if word in words), "-")


def best_peer(outcome: Outcome) -> str | None:
    """The peer that decides the row: of those beside which grapeshot stands as in the row, the one to which its median
    ratio is highest.
    """
    found, word = beside(outcome), standing(outcome)
    deciding = {peer: statistics.median(ratios(outcome, OURS, peer)) for peer in found if found[peer] == word}
    return max(deciding, key=lambda peer: deciding[peer], default=None)


def best_ratios(outcome: Outcome) -> list[float]:
    """The ratios to the best peer; none when there is none."""
    best = best_peer(outcome)
    return [] if best is None else ratios(outcome, OURS, best)


def judge(outcome: Outcome, bound: dict[str, Any]) -> tuple[str, bool | None]:
    """Return the bound as text, and whether it holds; None: grapeshot or the peer is missing."""
    at_most, peer = bound["at_most"], bound["peer"]
    if peer is None:
        taken, text = values(outcome, OURS), f"{at_most:g} {outcome['unit']}"
    else:
        taken, text = ratios(outcome, OURS, peer), f"{at_most:.2f} of {peer}"
    return text, statistics.median(taken) <= at_most if taken else None


def verdict(outcome: Outcome, bound: dict[str, Any]) -> str:
    _, holds = judge(outcome, bound)
    if holds is None:
        return "not measured"
    if holds:
        return "yes"
    peer = bound["peer"]
    taken = ratios(outcome, OURS, peer) if peer else values(outcome, OURS)
    return f"no ({statistics.median(taken) / bound['at_most'] - 1:+.0%})"


def count(outcomes: Sequence[Outcome]) -> Counter[str]:
    """How many rows are ahead, equal, behind, and without enough runs to be called any of these."""
    return Counter(word for outcome in outcomes if (word := standing(outcome)) in (*STANDINGS, TOO_FEW))
