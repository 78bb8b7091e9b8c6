"""Measure what a loop costs at scale, in this process: `python -m benchmarks.scale KIND --loop LOOP`.

- `idle_timers`: a program that does nothing except run 1,000 timers, each of which fires once a second. Prints
  `{"cpu_ms_per_s": ..., "late_us": median, ...}`. A loop can save CPU time by waking up less often, but then its timers
  fire later.
- `pending_timers`: timers are set and cancelled in batches of 10,000 while `--count` others wait. Prints
  `{"cpu_ns": per timer, ...}`.

A loop that lacks a feature prints `{"unsupported": why}`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable

from benchmarks._loops import loop_factory, print_outcome

Loop = asyncio.AbstractEventLoop
IDLE_TIMERS, IDLE_PERIOD_S = 1000, 1.0
PAIRS = 10_000


def _nothing() -> None:
    pass


def idle_timers(factory: Callable[[], Loop], args: argparse.Namespace) -> dict[str, float]:
    """Measure a loop that is idle except for timers, which are spread evenly over the period."""
    loop = factory()
    fired = 0
    late_s = []

    # Read the system's clock: some loops update their own time only once per poll.
    def fire(due_s: float) -> None:
        nonlocal fired
        fired += 1
        now_s = time.monotonic()
        late_s.append(now_s - due_s)
        loop.call_later(IDLE_PERIOD_S, fire, now_s + IDLE_PERIOD_S)

    try:
        for number in range(IDLE_TIMERS):
            delay_s = IDLE_PERIOD_S * number / IDLE_TIMERS
            loop.call_later(delay_s, fire, time.monotonic() + delay_s)
        # Wait until every timer has fired once: after that, each is set for a whole period.
        loop.run_until_complete(asyncio.sleep(IDLE_PERIOD_S + args.warm_up))
        before, cpu_s, wall_s = fired, time.process_time(), time.perf_counter()
        loop.run_until_complete(asyncio.sleep(args.seconds))
        cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    finally:
        loop.close()
    late_us = statistics.median(late_s[before:]) * 1e6
    return {"cpu_ms_per_s": cpu_s * 1e3 / wall_s, "late_us": late_us, "fired": fired - before, "seconds": wall_s}


def pending_timers(factory: Callable[[], Loop], args: argparse.Namespace) -> dict[str, float]:
    """Set and cancel timers whose deadlines lie between the deadlines of pending timers."""
    loop = factory()
    deadlines = random.Random(1)
    try:
        for _ in range(args.count):
            loop.call_later(deadlines.uniform(60, 120), _nothing)
        rounds = []
        for _ in range(7):
            delays = [deadlines.uniform(60, 120) for _ in range(PAIRS)]
            began = time.process_time_ns()
            for timer in [loop.call_later(delay, _nothing) for delay in delays]:
                timer.cancel()
            rounds.append((time.process_time_ns() - began) / PAIRS)
            loop.call_soon(loop.stop)
            loop.run_forever()
    finally:
        loop.close()
    return {"cpu_ns": sorted(rounds)[len(rounds) // 2], "pending": args.count}


KINDS = {"idle_timers": idle_timers, "pending_timers": pending_timers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--loop", required=True, help="grapeshot, uvloop, asyncio or module:factory")
    parser.add_argument("--seconds", type=float, default=1.0, help="measured time (1)")
    parser.add_argument("--warm-up", type=float, default=0.2, help="seconds of warm-up after the first second (0.2)")
    parser.add_argument("--count", type=int, default=1000, help="timers that are pending (1000)")
    args = parser.parse_args()
    print_outcome(lambda: KINDS[args.kind](loop_factory(args.loop), args))


if __name__ == "__main__":
    main()
