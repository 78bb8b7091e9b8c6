"""A comparison in short: medians, intervals and ratios without the runs that they come from.

The tables, the charts and the committed comparisons are made from these numbers. The runs themselves are not committed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks import intervals
from benchmarks.intervals import Pair, interval

OURS = "grapeshot"
# Each row has an interval for the metric that it compares. This metric has one, too: the CPU time of a whole process,
# in the row `startup`.
WITH_INTERVAL = "whole_ms"
# Other metrics that are shown. Those in SHOWN are medians, those in ADDED are sums over all runs.
SHOWN = (
    *("rps", "p50_us", "p99_us", "p999_us", "queries"),
    *("speedup", "cpu_us", "cpu_us_of_one", "speedup_of_processes", "cpu_us_of_processes"),
)
ADDED = ("requests", "resent", "unanswered", "early", "sleeps")
# Enough digits for every table, and few enough that people can read the file.
DIGITS = 6


def rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def limits(taken: list[float]) -> list[float]:
    """The lower limit of the 95 % interval, the median, and the upper limit."""
    found = interval(taken)
    return [rounded(value) for value in (found.low, found.middle, found.high)]


def pairs(own: list[dict[str, Any]], other: list[dict[str, Any]], metric: str) -> list[Pair]:
    """Return the two loops' numbers of each round. The runs of one round follow each other closely in time."""
    taken = [(a.get(metric), b.get(metric)) for a, b in zip(own, other, strict=False)]
    return [(a, b) for a, b in taken if a is not None and b is not None]


def curve(samples: list[dict[str, Any]]) -> list[list[float]]:
    """For each quantile, the median of the latencies of all runs."""
    taken = [sample["curve_us"] for sample in samples if sample.get("curve_us")]
    return [[at[0][0], rounded(statistics.median(point[1] for point in at))] for at in zip(*taken, strict=True)]


def row(outcome: dict[str, Any], *, has_curves: bool = False) -> dict[str, Any]:
    """One row of a comparison in short. `has_curves` adds latency by quantile, which only the HTML page shows."""
    samples, metric = outcome["samples"], outcome["metric"]
    numbers: dict[str, dict[str, Any]] = {}
    for loop, runs in samples.items():
        names = (metric, WITH_INTERVAL, *SHOWN, *ADDED)
        taken = {name: [run[name] for run in runs if run.get(name) is not None] for name in names}
        numbers[loop] = {
            **{name: rounded(statistics.median(taken[name])) for name in SHOWN if taken[name]},
            **{name: sum(taken[name]) for name in ADDED if any(taken[name])},
            **{name: limits(taken[name]) for name in (metric, WITH_INTERVAL) if taken[name]},
        }
    ratios = {}
    for peer in samples:
        if peer != OURS and (taken_pairs := pairs(samples.get(OURS, []), samples[peer], metric)):
            found = limits(intervals.ratios(taken_pairs))
            ratios[peer] = {"interval": found, "standing": intervals.standing(taken_pairs)}
    short = {name: value for name, value in outcome.items() if name not in ("samples", "wall")}
    short |= {"runs": len(samples.get(OURS, [])), "numbers": numbers, "ratios": ratios}
    if has_curves and (curves := {loop: drawn for loop, runs in samples.items() if (drawn := curve(runs))}):
        short["curves"] = curves
    return short


def wall_name(name: str) -> str:
    """The name of a case's second row, which shows the wall time."""
    return f"{name}-wall"


def rows(outcome: dict[str, Any], *, has_curves: bool = False) -> list[dict[str, Any]]:
    """The rows of a case in short: one row, and a second one if the case also has a wall time."""
    found = [row(outcome, has_curves=has_curves)]
    if wall := outcome.get("wall"):
        second = row(outcome | wall | {"name": wall_name(outcome["name"])})
        taken = {loop: {second["metric"]: numbers[second["metric"]]} for loop, numbers in second["numbers"].items()}
        found.append(second | {"numbers": taken})
    return found


def digest(result: dict[str, Any], *, has_curves: bool = False) -> dict[str, Any]:
    """Shorten a comparison that still has all of its runs."""
    short = [part for outcome in result["cases"] for part in rows(outcome, has_curves=has_curves)]
    return result | {"cases": short}


def text(short: dict[str, Any]) -> str:
    """JSON with a line for each field and each loop of a row, so that people can read the diff of two files."""

    def lines(value: Any, depth: int) -> Iterator[str]:
        pad = " " * depth
        if isinstance(value, dict) and value and depth < 4:
            entries = [f"{pad} {json.dumps(name)}: {''.join(lines(entry, depth + 1))}" for name, entry in value.items()]
            yield "{\n" + ",\n".join(entries) + f"\n{pad}}}"
        elif isinstance(value, list) and value and isinstance(value[0], dict) and depth < 4:
            yield "[\n" + ",\n".join(f"{pad} {''.join(lines(entry, depth + 1))}" for entry in value) + f"\n{pad}]"
        else:
            yield json.dumps(value)

    return "".join(lines(short, 0)) + "\n"
