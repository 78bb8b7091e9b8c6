"""Compares the loops: `python -m benchmarks.compare`. See README.md.

Every run is a fresh process; the loops alternate within one run (A B C, then C B A, ...), so that what changes on the
machine in the meantime meets all of them. Ratios are taken run by run, and their median counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import fnmatch
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks._load import MeasurementError, loadgen
from benchmarks._loops import LOOPS, RAW, available, versions
from benchmarks._machine import ROOT, cores, describe
from benchmarks.cases import CASES, Case, Sample, Settings

SCHEMA = 1
COMMITTED = ROOT / "benchmarks" / "results" / "comparison.json"
QUICK = Settings(seconds=0.3, warm_up_s=0.1, micro_s=0.1, idle_connections=2000, startup_pairs=2)


def say(*words: object, end: str = "\n") -> None:
    print(*words, end=end, file=sys.stderr, flush=True)


def participants(case: Case, loops: Sequence[str]) -> list[str]:
    return [loop for loop in loops if loop != RAW or case.with_raw]


def run_case(case: Case, loops: Sequence[str], runs: int, settings: Settings) -> dict[str, Any]:
    """All runs of one case. A loop that fails is left out of the rest of it, and the failure is kept."""
    samples: dict[str, list[Sample]] = {loop: [] for loop in loops}
    failures: dict[str, str] = {}
    for run in range(runs):
        for loop in loops if run % 2 == 0 else reversed(loops):
            if loop in failures:
                continue
            try:
                samples[loop].append(case.measure(loop, settings))
            except MeasurementError as error:
                failures[loop] = str(error)
                say(f"\n!!! {case.name} FAILED ON {loop}: {error}")
                continue
            say(".", end="")
    return {
        "name": case.name,
        "group": case.group,
        "title": case.title,
        "metric": case.metric,
        "unit": case.unit,
        "bounds": [dataclasses.asdict(bound) for bound in case.bounds],
        "samples": {loop: taken for loop, taken in samples.items() if taken and loop not in failures},
        "failures": failures,
    }


def choose_cases(patterns: Sequence[str] | None) -> list[Case]:
    """The cases whose names (or groups) match any of the patterns. Raises SystemExit for one that matches nothing."""
    if not patterns:
        return list(CASES)
    for pattern in patterns:
        if not any(fnmatch.fnmatch(name, pattern) for case in CASES for name in (case.name, case.group.lower())):
            raise SystemExit(f"no case is called {pattern!r}; --list shows them")
    return [
        case
        for case in CASES
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns for name in (case.name, case.group.lower()))
    ]


def compare(cases: Sequence[Case], loops: Sequence[str], runs: int, settings: Settings) -> dict[str, Any]:
    """Runs everything and returns what the JSON file holds."""
    usable, missing = available(loops)
    loadgen()
    server_core, load_core = cores()
    if server_core is None:
        say("!!! server and load share a core or cannot be pinned: the numbers will be restless")
    started, machine = time.monotonic(), describe()
    outcomes = []
    for number, case in enumerate(cases, 1):
        say(f"[{number}/{len(cases)}] {case.title} ", end="")
        outcomes.append(run_case(case, participants(case, usable), runs, settings))
        say(" " + tables.one_line(outcomes[-1]))
    return {
        "schema": SCHEMA,
        "taken": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "took_s": round(time.monotonic() - started),
        "machine": machine,
        "versions": versions(),
        "settings": dataclasses.asdict(settings) | {"runs": runs, "server_core": server_core, "load_core": load_core},
        "loops": usable,
        "missing": missing,
        "cases": outcomes,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short runs, to see whether everything works")
    parser.add_argument("--cases", nargs="+", metavar="PATTERN", help="names or groups, * and ? allowed")
    parser.add_argument("--loops", nargs="+", default=[*LOOPS, RAW], help="default: %(default)s")
    parser.add_argument("--runs", type=int, default=5, help="alternated runs per case (5)")
    parser.add_argument("--seconds", type=float, help="measured time of one load (1.0)")
    parser.add_argument("--spin", action="store_true", help="the load polls without sleeping")
    parser.add_argument("--json", type=Path, help=f"where to write; a full comparison goes to {COMMITTED.name} anyway")
    parser.add_argument("--table", action="store_true", help="print the table in Markdown")
    parser.add_argument("--list", action="store_true", help="list the cases")
    args = parser.parse_args(arguments)
    cases = choose_cases(args.cases)
    if args.list:
        for case in cases:
            print(f"{case.name:<20} {case.group:<8} {case.title}")
        return 0
    settings = QUICK if args.quick else Settings()
    if args.seconds is not None:
        settings = dataclasses.replace(settings, seconds=args.seconds)
    settings = dataclasses.replace(settings, spin=args.spin)

    result = compare(cases, args.loops, args.runs, settings)
    is_full = not (args.quick or args.cases) and args.loops == [*LOOPS, RAW] and not result["missing"]
    path: Path | None = args.json or (COMMITTED if is_full else None)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
        path.with_suffix(".md").write_text(tables.markdown(result) + "\n")
        say(f"written: {path} and its table, {path.with_suffix('.md').name}")
    if args.table or path is None:
        print(tables.markdown(result))
    return 1 if any(case["failures"] for case in result["cases"]) else 0


if __name__ == "__main__":
    sys.exit(main())
