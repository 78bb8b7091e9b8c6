"""Measures the CPU time per operation in rounds of operations. The result is the median of the rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Taken:
    """The measured cost of one round."""

    cpu_ns: int
    operations: int
    # How many sleeps ended too early.
    early: int = 0


class Stopwatch:
    """CPU time that this process has used since the stopwatch was created."""

    def __init__(self) -> None:
        self._began_ns = time.process_time_ns()

    def taken(self, operations: int, early: int = 0) -> Taken:
        return Taken(time.process_time_ns() - self._began_ns, operations, early)


def summary(took: list[Taken]) -> dict[str, float]:
    """Return the sample, with the median of the rounds."""
    cpu_ns = statistics.median(taken.cpu_ns / taken.operations for taken in took)
    sample: dict[str, float] = {"cpu_ns": cpu_ns, "rounds": len(took)}
    if early := sum(taken.early for taken in took):
        sample |= {"early": early, "sleeps": sum(taken.operations for taken in took)}
    return sample


def measure(take: Callable[[], Taken], cpu_s: float, rounds: int | None = None) -> dict[str, float]:
    """Run rounds until `cpu_s` are spent, after a warm-up that spends a quarter of that. The warm-up and the
    measurement take at least three rounds each. If `rounds` is given, run exactly that many rounds instead, without a
    warm-up.
    """
    took: list[Taken] = []

    def take_rounds(enough_s: float) -> None:
        took.clear()
        while len(took) < 3 or sum(taken.cpu_ns for taken in took) < enough_s * 1e9:
            took.append(take())

    if rounds is not None:
        return summary([take() for _ in range(rounds)])
    take_rounds(cpu_s / 4)
    take_rounds(cpu_s)
    return summary(took)
