"""`make demo`: a real aiohttp application on grapeshot, asyncio and uvloop, under the same load."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence

from benchmarks._load import MeasurementError, loadgen
from benchmarks._loops import available, versions
from benchmarks._machine import cores, describe
from benchmarks.measure import Sample, Settings, load_sample

PATH = "/users/42"
CONNECTIONS = 50


def progress(text: str) -> None:
    """Show a line of progress if stderr is a terminal. The next line overwrites it."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def take(loops: Sequence[str], rounds: int, seconds: float) -> dict[str, list[Sample]]:
    """Take samples, each from a fresh server; the loops alternate."""
    settings = Settings(seconds=seconds, warm_up_s=0.3)
    options: dict[str, object] = {"connections": CONNECTIONS, "path": PATH}
    samples: dict[str, list[Sample]] = {loop: [] for loop in loops}
    for index in range(rounds):
        for loop in loops if index % 2 == 0 else reversed(loops):
            progress(f"round {index + 1} of {rounds}: aiohttp on {loop} ...")
            samples[loop].append(load_sample("aiohttp", "http", loop, settings, options))
    progress("")
    return samples


def median(samples: Sequence[Sample], metric: str) -> float | None:
    taken = [sample[metric] for sample in samples if metric in sample]
    return statistics.median(taken) if taken else None


def table(samples: dict[str, list[Sample]]) -> list[str]:
    """Return the lines of the table, one per loop; the ratio is computed run by run."""
    lines = [
        f"  {'':<11}{'requests/s':>12}{'server CPU':>15}{'latency p50':>15}{'p99':>12}{'CPU vs uvloop':>17}",
        f"  {'-' * 80}",
    ]
    uvloop_cpu_us = [sample["cpu_us"] for sample in samples.get("uvloop", []) if "cpu_us" in sample]
    for loop, taken in samples.items():
        cpu_us = [sample["cpu_us"] for sample in taken if "cpu_us" in sample]
        ratios = [own / peer for own, peer in zip(cpu_us, uvloop_cpu_us, strict=False)]
        cells = [
            f"{median(taken, 'rps') or 0:>12,.0f}",
            f"{statistics.median(cpu_us):>9.1f} us/rq" if cpu_us else f"{'n/a':>15}",
            f"{median(taken, 'p50_us') or 0:>12,.0f} us",
            f"{median(taken, 'p99_us') or 0:>9,.0f} us",
            f"{statistics.median(ratios):>17.2f}" if ratios else f"{'n/a':>17}",
        ]
        lines.append(f"  {loop:<11}{''.join(cells)}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loops", nargs="+", default=["grapeshot", "uvloop", "asyncio"], help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="runs per loop (5)")
    parser.add_argument("--seconds", type=float, default=1.0, help="measured time of one run (1.0)")
    args = parser.parse_args(arguments)
    loops, _ = available(args.loops)
    if not loops:
        print("none of the loops can be used", file=sys.stderr)
        return 1
    machine, packages = describe(), versions()
    server_core, load_core = cores()
    where = "" if server_core is None else f" (server on core {server_core}, load on core {load_core})"
    found = ", ".join(f"{name} {packages[name]}" for name in ("grapeshot", "aiohttp", "uvloop") if name in packages)
    print(f"\n  An aiohttp application answers GET {PATH} with JSON on {CONNECTIONS} keep-alive connections.")
    print(f"  CPython {machine['python']}, {found}")
    print(f"  {machine['processor']}, {machine['system']}{where}")
    print(
        f"  {args.rounds} runs of {args.seconds:g} s for each loop, alternating, a fresh server each; medians.\n",
        flush=True,
    )
    try:
        loadgen()
        samples = take(loops, args.rounds, args.seconds)
    except MeasurementError as error:
        progress("")
        print(f"the demo failed: {error}", file=sys.stderr)
        return 1
    print("\n".join(table(samples)))
    print("\n  us/rq: microseconds of CPU time that the server's process spent on one request.")
    print("  `make bench` compares much more; benchmarks/README.md says what.\n")
    return 0 if "grapeshot" in loops or "grapeshot" not in args.loops else 1


if __name__ == "__main__":
    sys.exit(main())
