"""Load a server with connections that come and go: `python -m benchmarks.churn --minutes 10` (Linux).

Each round takes a few seconds: connections are made, exchange messages and end (some by a reset, some without waiting
for the last reply), while other connections stay open and send all the time. After a round all connections are closed,
and the server must have as many descriptors as before. RSS is read after each round. In the last rounds it may
be at most `--allow-growth-kib` higher than in the first rounds after the warm-up. The load checks every byte. Exits
with 1 if RSS is higher than that, if the number of descriptors changed, or if a reply was wrong.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks._load import MeasurementError, Server, load_command, loadgen, parse_report
from benchmarks._loops import available, versions
from benchmarks._machine import cores, describe, on_core, open_descriptors, raise_descriptor_limit, resident_kib

WARM_UP_PART = 0.2
COMPARED_PART = 0.2
DESCRIPTORS_WITHIN_S = 10.0


@dataclass(frozen=True)
class Round:
    """The state of the server after a round."""

    at_s: float
    connections: int
    messages: int
    rss_kib: float
    descriptors: int


def run_round(address: str, seconds: float, at_a_time: int) -> tuple[int, int]:
    """Run one round of both loads. Return how many connections came and went, and how many messages the other
    connections exchanged.
    """
    churn: dict[str, object] = {"connections": at_a_time, "messages": 2, "size": 512, "reset_every": 7}
    churn |= {"leave_every": 11, "duration": seconds}
    steady: dict[str, object] = {"connections": 20, "size": 4096, "depth": 2, "verify_every": 1, "duration": seconds}
    loads = [("churn", churn), ("echo", steady)]
    with on_core(cores()[1]):
        processes = [
            subprocess.Popen(load_command(mode, address, options), stdout=subprocess.PIPE, text=True)
            for mode, options in loads
        ]
    outputs = [process.communicate()[0] for process in processes]
    came, stayed = (parse_report(output, mode) for output, (mode, _) in zip(outputs, loads, strict=True))
    return int(came["requests"]), int(stayed["requests"])


def settled_descriptors(pid: int, wanted: int) -> int:
    """Wait until the process has the wanted number of descriptors or the time is up, and return their number."""
    deadline = time.monotonic() + DESCRIPTORS_WITHIN_S
    while (count := open_descriptors(pid)) != wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    return count


def growth_kib(rounds: Sequence[Round]) -> float:
    """Return the median RSS of the last rounds minus the median of the first rounds after the warm-up."""
    after = rounds[int(len(rounds) * WARM_UP_PART) :]
    compared = max(1, int(len(after) * COMPARED_PART))
    first, last = after[:compared], after[-compared:]
    return statistics.median(r.rss_kib for r in last) - statistics.median(r.rss_kib for r in first)


def churn(loop: str, args: argparse.Namespace) -> tuple[list[Round], list[str]]:
    """Return the rounds, and descriptions of what was wrong."""
    rounds: list[Round] = []
    wrong: list[str] = []
    with Server("echo", loop) as server:
        base = open_descriptors(server.pid)
        start, total = time.monotonic(), 0
        print(f"{'time':>8} {'connections':>12} {'messages':>12} {'RSS':>12} {'descriptors':>12}", flush=True)
        while time.monotonic() - start < args.minutes * 60 and total < args.max_connections:
            came, messages = run_round(server.address, args.round_seconds, args.connections)
            total += came
            count = settled_descriptors(server.pid, base)
            rounds.append(Round(time.monotonic() - start, total, messages, resident_kib(server.pid), count))
            last = rounds[-1]
            print(f"{last.at_s:>6.0f} s {total:>12,} {messages:>12,} {last.rss_kib:>8,.0f} KiB {count:>12}", flush=True)
            if count != base:
                wrong.append(f"{count} descriptors are open after {total:,} connections, {base} before")
                break
    return rounds, wrong


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loop", default="grapeshot", help="grapeshot, uvloop, asyncio or module:factory")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (10)")
    parser.add_argument(
        "--max-connections", type=int, default=30_000_000, help="end after this many connections (30,000,000)"
    )
    parser.add_argument("--connections", type=int, default=200, help="how many at a time (200)")
    parser.add_argument("--round-seconds", type=float, default=5.0, help="length of a round (5)")
    parser.add_argument("--allow-growth-kib", type=float, default=1024.0, help="growth that is still allowed (1024)")
    parser.add_argument("--json", type=Path, help="where to write the rounds")
    args = parser.parse_args(arguments)
    if not sys.platform.startswith("linux"):
        print("RSS and descriptors are read from /proc, which only Linux has", file=sys.stderr)
        return 1
    raise_descriptor_limit()
    if not available([args.loop])[0]:
        return 1
    try:
        loadgen()
        rounds, wrong = churn(args.loop, args)
    except MeasurementError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    grown_kib = growth_kib(rounds) if rounds else 0.0
    if not rounds:
        wrong.append("not a single round was run")
    if grown_kib > args.allow_growth_kib:
        wrong.append(f"RSS grew by {grown_kib:,.0f} KiB")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        result = {"machine": describe(), "versions": versions(), "loop": args.loop, "growth_kib": grown_kib}
        args.json.write_text(
            json.dumps(result | {"wrong": wrong, "rounds": [asdict(r) for r in rounds]}, indent=1) + "\n"
        )
    for reason in wrong:
        print(f"FAILED: {reason}", file=sys.stderr)
    if not wrong:
        print(f"flat: RSS {grown_kib:+,.0f} KiB, no descriptor left open, {rounds[-1].connections:,} connections")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
