"""Measure one style of looking up names, in this process: `python -m benchmarks.lookups.programs KIND --style STYLE`.

The queries go to the system's DNS server, which must be that of `server.py`. After a warm-up of one round, rounds
of 1,000 lookups are run until enough CPU time is spent. Prints a sample with three medians over the rounds: the CPU
time per lookup (of the process with all its threads), the wall time per lookup, and the number of queries that reached
the server in a round.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable

from benchmarks.lookups import server
from benchmarks.lookups.styles import PORT, STYLES, Answer, Style

LOOKUPS, NAMES = 1000, 10
_numbers = itertools.count()
# Runs one round.
Round = Callable[[Style, int], list[Answer]]


def ten_names(style: Style, lookups: int) -> list[Answer]:
    """Ten names, each of which is looked up a hundred times, all at once."""
    names = [f"name-{number}.{server.DOMAIN}" for number in range(NAMES)]
    return style.all_at_once(names * (lookups // NAMES))


def different_names(style: Style, lookups: int) -> list[Answer]:
    """Names that were not looked up before, one after the other."""
    return style.one_by_one([f"new-{next(_numbers)}.{server.DOMAIN}" for _ in range(lookups)])


KINDS: dict[str, Round] = {kind.__name__: kind for kind in (ten_names, different_names)}


def measure(kind: str, style: Style, cpu_s: float, lookups: int = LOOKUPS) -> dict[str, float]:
    """Run rounds, at least one, until `cpu_s` of CPU time is spent. Return the medians."""
    run_round = KINDS[kind]
    expected = [(address, PORT) for address in sorted(server.ADDRESSES)]
    cpu_us: list[float] = []
    wall_us: list[float] = []
    queries: list[float] = []

    def check(answers: list[Answer]) -> None:
        if len(answers) != lookups:
            raise AssertionError(f"{len(answers)} answers")
        for answer in answers:
            if sorted(address[:2] for *_, address in answer) != expected:
                raise AssertionError(f"a wrong answer: {answer}")

    def program() -> None:
        check(run_round(style, lookups))
        spent_s = 0.0
        while not cpu_us or spent_s < cpu_s:
            gc.collect()
            asked = server.count_queries()
            wall_start, cpu_start = time.perf_counter(), time.process_time()
            answers = run_round(style, lookups)
            took_cpu_s, took_wall_s = time.process_time() - cpu_start, time.perf_counter() - wall_start
            queries.append(server.count_queries() - asked - 1)
            check(answers)
            spent_s += took_cpu_s
            cpu_us.append(took_cpu_s / lookups * 1e6)
            wall_us.append(took_wall_s / lookups * 1e6)

    style.run(program)
    return {
        "cpu_us": statistics.median(cpu_us),
        "wall_us": statistics.median(wall_us),
        "queries": statistics.median(queries),
        "rounds": len(cpu_us),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--style", required=True, choices=STYLES)
    parser.add_argument("--seconds", type=float, default=0.05, help="CPU seconds to measure (0.05)")
    parser.add_argument("--lookups", type=int, default=LOOKUPS, help=f"lookups in a round ({LOOKUPS})")
    args = parser.parse_args()
    print(json.dumps(measure(args.kind, STYLES[args.style](), args.seconds, args.lookups)))


if __name__ == "__main__":
    main()
