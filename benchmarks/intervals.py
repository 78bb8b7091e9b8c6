"""The rule that decides a row, from runs that alternated: pairs of one run of grapeshot and one of a peer, both of the
same round. `ahead`: the confidence interval of the median of the pairs' ratios lies wholly below 1. `behind`: it lies
wholly above. Everything else is `equal`, also where the two medians themselves point the other way, as they can where a
loop is sometimes fast and sometimes slow. There is no margin beside the interval.

The interval is the percentile interval of the bootstrap (Efron and Tibshirani, An Introduction to the Bootstrap, 1993,
chapter 13): the middle 95 % of the medians of all samples that can be drawn from the ratios with replacement. The
distribution of such a median is known in closed form (Efron, Annals of Statistics 7, 1979, section 3), so nothing is
drawn: the same ratios always give the same interval, and it needs neither a seed nor a library. BCa is no choice for a
median: it takes its acceleration from the jackknife, which is inconsistent for medians (the book, section 11.6).

The limits are ratios that were measured: the 4th lowest and the 4th highest of 15. Whatever the distribution of the
noise, 96.5 % of all measurements have the true median between them (as for the sign test), so beside a peer that needs
exactly the same a row is called ahead in 1.8 % of them, and behind in as many. Nothing is corrected for the number of
rows: of 80 rows with one peer, in which neither is faster, about three are not called equal; several peers that are all
as fast make `behind` likelier, and `ahead` less likely. Of five runs even the range misses the median in 6 %.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
LEAST_PAIRS = 15
STANDINGS = ("ahead", "equal", "behind")
TOO_FEW = "too few runs"


# What two runs of one round measured: grapeshot's number and the peer's.
Pair = tuple[float, float]


@dataclass(frozen=True)
class Interval:
    """A median and the limits of its confidence interval."""

    low: float
    middle: float
    high: float


@functools.cache
def _first(runs: int) -> int:
    """Which of the ordered numbers is the lower limit, counted from 0; the upper one is as far from the other end.

    The median of a sample drawn with replacement is at most the k-th number if at least half of what was drawn is. Of
    an even number of runs this is the lower of the two middle ones, and so the upper one at the other end: a little
    wider than the interval of their mean.
    """
    half = (runs + 1) // 2
    for k in range(1, half):
        part = k / runs
        if sum(math.comb(runs, n) * part**n * (1 - part) ** (runs - n) for n in range(half, runs + 1)) >= (
            (1 - CONFIDENCE) / 2
        ):
            return k - 1
    return half - 1


def interval(taken: Sequence[float]) -> Interval:
    """The interval of the median of these numbers, of which there is at least one."""
    ordered = sorted(taken)
    first = _first(len(ordered))
    return Interval(ordered[first], statistics.median(ordered), ordered[-1 - first])


def ratios(pairs: Sequence[Pair]) -> list[float]:
    """Nothing is a multiple of a number below zero, as the start of a process can be, which is a difference. To be fair
    to the peer such a pair counts as if grapeshot needed infinitely more.
    """
    return [own / other if other > 0 else math.inf for own, other in pairs]


def standing(pairs: Sequence[Pair]) -> str:
    """`ahead`, `equal`, `behind`, or `too few runs`, by the rule of this module."""
    if len(pairs) < LEAST_PAIRS:
        return TOO_FEW
    found = interval(ratios(pairs))
    own, other = (statistics.median(numbers) for numbers in zip(*pairs, strict=True))
    if found.high < 1 and own < other:
        return "ahead"
    return "behind" if found.low > 1 and own > other else "equal"
