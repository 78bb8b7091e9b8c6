"""The rule that decides whether grapeshot is ahead of a peer, equal to it or behind it in one row of a table.

The runs of the loops alternate. A pair consists of one run of grapeshot and one run of the peer, both from the same
round. The row is `ahead` if the whole confidence interval of the median of the pairs' ratios lies below 1, and `behind`
if it lies above 1. All other rows are `equal`, or have `too few runs`. A row is also equal if the medians of the two
loops disagree with the interval about which loop needs less, which can happen if a loop is sometimes fast and sometimes
slow. The rule has no margin beyond the interval: a ratio close to 1 counts, too, if its interval does not include 1.

The interval is the percentile interval of the bootstrap (Efron and Tibshirani, An Introduction to the Bootstrap, 1993,
chapter 13): the middle 95 % of the medians of all samples that can be drawn from the ratios with replacement. The
distribution of such a median is known in closed form (Efron, Annals of Statistics 7, 1979, section 3), so no samples
are actually drawn: the same ratios always give the same interval, without a seed and without a library. The variant BCa
cannot be used for a median, because it takes its acceleration from the jackknife, which is inconsistent for medians
(section 11.6 of the book).

The limits of the interval are measured ratios: with 15 runs, the 4th lowest and the 4th highest. For any distribution
of the noise, the true median lies between them in 96.5 % of all measurements (as with the sign test). So if a peer is
exactly as fast, a row is called ahead in 1.8 % of all measurements, and behind in another 1.8 %. There is no correction
for the number of rows: of 80 rows with one equally fast peer, about three are not called equal. If several peers are
equally fast, `behind` becomes more likely and `ahead` less likely. With five runs, even the range of all ratios misses
the true median in 6 % of all measurements.
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


# The numbers of two runs of one round: grapeshot's and the peer's.
Pair = tuple[float, float]


@dataclass(frozen=True)
class Interval:
    """A median and the limits of its confidence interval."""

    low: float
    middle: float
    high: float


@functools.cache
def _first(runs: int) -> int:
    """Return the index of the lower limit among the sorted numbers. The upper limit is equally far from the other end.

    The median of a sample drawn with replacement is at most the k-th number if at least half of the drawn numbers are
    at most the k-th number. The lower limit is the lowest number for which this is so in at least 2.5 % of all samples.
    For an even number of runs, a sample has two middle numbers. The lower limit is computed for the lower one, and the
    upper limit for the upper one, so the interval is a little wider than for their mean.
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
    """The interval of the median of these numbers. There must be at least one number."""
    ordered = sorted(taken)
    first = _first(len(ordered))
    return Interval(ordered[first], statistics.median(ordered), ordered[-1 - first])


def ratios(pairs: Sequence[Pair]) -> list[float]:
    """Return grapeshot's number divided by the peer's, for each pair.

    A number that is itself a difference (such as the time to start a process) can be zero or negative. If that is so
    for the peer's number, there is no meaningful ratio. To be fair to the peer, the ratio then counts as infinite.
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
