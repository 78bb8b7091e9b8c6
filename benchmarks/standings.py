"""What the samples of a comparison say: medians, ratios run by run, the best peer, and who is ahead of whom.

It knows the JSON of a comparison and nothing of how it was measured. The spread of some numbers is what remains of
their range without the highest and the lowest one, where there are five or more.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

OURS = "grapeshot"
RAW = "raw"
# What grapeshot is to need of the best peer, or, where a peer is that near to it, of the raw server.
GOAL, NEAR_RAW = 0.97, 1.06
STANDINGS = ("ahead", "equal", "behind")
Outcome = dict[str, Any]


def values(outcome: Outcome, loop: str, metric: str | None = None) -> list[float]:
    """One number per run, or none when the loop or the metric is not there. Without a metric: what counts."""
    metric = metric or outcome["metric"]
    return [sample[metric] for sample in outcome["samples"].get(loop, []) if sample.get(metric) is not None]


def median(outcome: Outcome, loop: str, metric: str | None = None) -> float | None:
    taken = values(outcome, loop, metric)
    return statistics.median(taken) if taken else None


def ratios(outcome: Outcome, loop: str, peer: str) -> list[float]:
    """Run by run, since the runs of one number lie next to each other in time."""
    pairs = zip(values(outcome, loop), values(outcome, peer), strict=False)
    return [own / other for own, other in pairs if other > 0]


def spread(taken: Sequence[float]) -> tuple[float, float]:
    """The lowest and the highest number, but for one at either end where there are five or more."""
    ordered = sorted(taken)
    kept = ordered[1:-1] if len(ordered) >= 5 else ordered
    return kept[0], kept[-1]


def peers(outcome: Outcome) -> list[str]:
    """Return the peers that grapeshot is compared with in this row; older files do not list them."""
    listed = outcome.get("peers", [loop for loop in outcome["samples"] if loop not in (OURS, RAW)])
    return [peer for peer in listed if values(outcome, peer)]


def best_peer(outcome: Outcome) -> str | None:
    """The peer with the lowest median that grapeshot can be compared with."""
    found = {peer: statistics.median(values(outcome, peer)) for peer in peers(outcome) if ratios(outcome, OURS, peer)}
    # A difference (the start of a process) may be below zero, and then has no ratio.
    return min((peer for peer in found if found[peer] > 0), key=lambda peer: found[peer], default=None)


def best_ratios(outcome: Outcome) -> list[float]:
    """The ratios to the best peer; none when there is none."""
    best = best_peer(outcome)
    return [] if best is None else ratios(outcome, OURS, best)


def standing(taken: Sequence[float]) -> str:
    """`ahead`, `equal` or `behind`, by the ratios of the runs: equal if 1 is within their spread."""
    if not taken:
        return "-"
    low, high = spread(taken)
    if high < 1:
        return "ahead"
    return "behind" if low > 1 else "equal"


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


def reaches_goal(outcome: Outcome) -> bool | None:
    """Is it clearly ahead: at most GOAL of the best peer, or near the raw limit and not behind? None: not compared."""
    taken, raw = best_ratios(outcome), ratios(outcome, OURS, RAW)
    if not taken:
        return None
    is_near = bool(raw) and statistics.median(raw) <= NEAR_RAW
    return statistics.median(taken) <= GOAL or (is_near and standing(taken) != "behind")


def count(outcomes: Sequence[Outcome]) -> Counter[str]:
    """How many rows are ahead of their best peer, equal to it and behind it."""
    return Counter(word for outcome in outcomes if (word := standing(best_ratios(outcome))) in STANDINGS)
