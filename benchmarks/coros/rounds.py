"""How rounds of operations are measured: CPU time per operation, the median round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Taken:
    """What one round took."""

    cpu_ns: int
    operations: int
    # Of sleeps: how many ended before their time.
    early: int = 0


class Stopwatch:
    """CPU time of this process since it was made."""

    def __init__(self) -> None:
        self._began_ns = time.process_time_ns()

    def taken(self, operations: int, early: int = 0) -> Taken:
        return Taken(time.process_time_ns() - self._began_ns, operations, early)


def summary(took: list[Taken]) -> dict[str, float]:
    """The median round."""
    cpu_ns = statistics.median(taken.cpu_ns / taken.operations for taken in took)
    sample: dict[str, float] = {"cpu_ns": cpu_ns, "rounds": len(took)}
    if early := sum(taken.early for taken in took):
        sample |= {"early": early, "sleeps": sum(taken.operations for taken in took)}
    return sample


def measure(take: Callable[[], Taken], cpu_s: float, rounds: int | None = None) -> dict[str, float]:
    """Rounds until `cpu_s` are spent, at least three, after a quarter of it as a warm-up; or exactly so many."""
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
