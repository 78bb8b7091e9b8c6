"""Compares the loops: `python -m benchmarks.compare [CASE ...]`. See README.md.

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks._load import MeasurementError, UnsupportedError, loadgen
from benchmarks._loops import LOOPS, PACKAGES, RAW, available, versions
from benchmarks._machine import ROOT, cores, describe
from benchmarks.cases import CASES, Case, Sample, Settings

SCHEMA = 1
RESULTS = ROOT / "benchmarks" / "results"
# What must be the same for rows that stand in one table.
SAME_MACHINE = ("processor", "cores", "system", "python", "free_threaded")
QUICK = Settings(seconds=0.3, warm_up_s=0.1, micro_s=0.1, idle_connections=2000, startup_pairs=2)


@dataclass(frozen=True)
class Suite:
    """Cases whose results are in one file, and the loops that take part in them."""

    cases: tuple[Case, ...]
    loops: tuple[str, ...]
    # The names that can take part here, and the reasons for the others.
    available: Callable[[Iterable[str]], tuple[list[str], dict[str, str]]]
    packages: tuple[str, ...]
    # Dataclasses with a field `seconds`: of the measured time of one run.
    settings: Any
    quick: Any
    committed: Path
    # Whether there is a load, on a core of its own.
    has_load: bool
    # What its page says of itself beyond what is common: the heading, and how it was measured.
    page: dict[str, str]


LOOP_SUITE = Suite(
    cases=CASES,
    loops=(*LOOPS, RAW),
    available=available,
    packages=PACKAGES,
    settings=Settings(),
    quick=QUICK,
    committed=RESULTS / "comparison.json",
    has_load=True,
    page={},
)


def say(*words: object, end: str = "\n") -> None:
    print(*words, end=end, file=sys.stderr, flush=True)


def now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


def participants(case: Case, loops: Sequence[str]) -> list[str]:
    if case.only:
        return [loop for loop in loops if loop in case.only]
    return [loop for loop in loops if loop != RAW or case.with_raw]


def run_case(case: Case, loops: Sequence[str], runs: int, settings: Any) -> dict[str, Any]:
    """Do all runs of one case. A loop that fails, or lacks the feature, is left out of the rest; the reason is kept."""
    samples: dict[str, list[Sample]] = {loop: [] for loop in loops}
    failures: dict[str, str] = {}
    unsupported: dict[str, str] = {}
    began = now()
    for run in range(runs):
        for loop in loops if run % 2 == 0 else reversed(loops):
            if loop in failures or loop in unsupported:
                continue
            try:
                samples[loop].append(case.measure(loop, settings))
            except UnsupportedError as error:
                unsupported[loop] = str(error)
                continue
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
        "taken": began,
        "samples": {loop: taken for loop, taken in samples.items() if taken and loop not in failures},
        "failures": failures,
        "unsupported": unsupported,
    } | ({"peers": [loop for loop in case.only if loop != tables.OURS]} if case.only else {})


def choose_cases(patterns: Sequence[str] | None, cases: Sequence[Case] = CASES) -> list[Case]:
    """The cases whose names (or groups) match any of the patterns. Raises SystemExit for one that matches nothing."""
    if not patterns:
        return list(cases)
    for pattern in patterns:
        if not any(fnmatch.fnmatch(name, pattern) for case in cases for name in (case.name, case.group.lower())):
            raise SystemExit(f"no case is called {pattern!r}; --list shows them")
    return [
        case
        for case in cases
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns for name in (case.name, case.group.lower()))
    ]


def compare(suite: Suite, cases: Sequence[Case], loops: Sequence[str], runs: int, settings: Any) -> dict[str, Any]:
    """Runs everything and returns what the JSON file holds."""
    usable, missing = suite.available(loops)
    if suite.has_load:
        loadgen()
    server_core, load_core = cores()
    if server_core is None and suite.has_load:
        say("!!! server and load share a core or cannot be pinned: the numbers will be restless")
    started, machine = time.monotonic(), describe()
    outcomes = []
    for number, case in enumerate(cases, 1):
        say(f"[{number}/{len(cases)}] {case.title} ", end="")
        outcome = run_case(case, participants(case, usable), runs, settings)
        outcomes.append(outcome | {"revision": machine["revision"]})
        say(" " + tables.one_line(outcomes[-1]))
    return {
        "schema": SCHEMA,
        "taken": now(),
        "took_s": round(time.monotonic() - started),
        "machine": machine,
        "versions": versions(suite.packages),
        "settings": dataclasses.asdict(settings) | {"runs": runs, "server_core": server_core, "load_core": load_core},
        "loops": usable,
        "missing": missing,
        "cases": outcomes,
    } | suite.page


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return why the rows of two comparisons cannot be in one table. grapeshot's own version may differ."""
    pairs = [(f"settings: {name}", before["settings"].get(name), value) for name, value in after["settings"].items()]
    pairs += [(name, before["machine"].get(name), after["machine"][name]) for name in SAME_MACHINE]
    shared = (before["versions"].keys() & after["versions"].keys()) - {tables.OURS}
    pairs += [(name, before["versions"][name], after["versions"][name]) for name in sorted(shared)]
    return [f"{name} is {new!r}, and was {old!r}" for name, old, new in pairs if old != new]


def merge(before: dict[str, Any], after: dict[str, Any], cases: Sequence[Case] = CASES) -> dict[str, Any]:
    """Return the older comparison with the newer one's rows in it, in the order in which the cases are listed.

    Raises SystemExit if they cannot be in one table.
    """
    if wrong := differences(before, after):
        raise SystemExit("these rows cannot be merged:\n  " + "\n  ".join(wrong))
    outcomes = {outcome["name"]: outcome for outcome in (*before["cases"], *after["cases"])}
    order = [case.name for case in cases]
    loops = [*before["loops"], *(loop for loop in after["loops"] if loop not in before["loops"])]
    return after | {
        "took_s": before["took_s"] + after["took_s"],
        "versions": before["versions"] | after["versions"],
        "loops": loops,
        "missing": {
            name: reason for name, reason in (before["missing"] | after["missing"]).items() if name not in loops
        },
        "cases": [outcomes[name] for name in order if name in outcomes],
    }


def parse(suite: Suite, description: str | None, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help="names or groups, * and ? allowed; all when none is given"
    )
    parser.add_argument("--cases", nargs="+", dest="more_cases", default=[], metavar="CASE", help="the same")
    parser.add_argument("--quick", action="store_true", help="3 short runs and a short table, for a first look")
    parser.add_argument("--loops", nargs="+", default=list(suite.loops), help="default: %(default)s")
    parser.add_argument("--runs", type=int, help="alternated runs per case (5; 3 with --quick)")
    default_s = f"({suite.settings.seconds:g}; {suite.quick.seconds:g} with --quick)"
    parser.add_argument("--seconds", type=float, help=f"measured time of one run {default_s}")
    if suite.has_load:
        parser.add_argument("--spin", action="store_true", help="the load polls without sleeping")
    file = suite.committed.name
    parser.add_argument("--json", type=Path, help=f"where to write; a full comparison goes to {file} anyway")
    parser.add_argument(
        "--merge", action="store_true", help=f"replace these rows in the JSON ({file}) and keep its others"
    )
    parser.add_argument("--table", action="store_true", help="print the table in Markdown")
    parser.add_argument("--list", action="store_true", help="list the cases")
    args = parser.parse_args(arguments)
    args.cases += args.more_cases
    return args


def write(suite: Suite, result: dict[str, Any], path: Path, *, is_merged: bool) -> None:
    if is_merged and path.exists():
        result = merge(json.loads(path.read_text()), result, suite.cases)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(tables.markdown(result) + "\n")
    say(f"written: {path} and its table, {path.with_suffix('.md').name}")


def main(arguments: Sequence[str] | None = None, suite: Suite = LOOP_SUITE, description: str | None = __doc__) -> int:
    args = parse(suite, description, arguments)
    cases = choose_cases(args.cases, suite.cases)
    if args.list:
        for case in cases:
            print(f"{case.name:<20} {case.group:<8} {case.title}")
        return 0
    settings, runs = (suite.quick, 3) if args.quick else (suite.settings, 5)
    if args.seconds is not None:
        settings = dataclasses.replace(settings, seconds=args.seconds)
    if suite.has_load:
        settings = dataclasses.replace(settings, spin=args.spin)

    result = compare(suite, cases, args.loops, args.runs or runs, settings)
    is_full = not (args.quick or args.cases) and tuple(args.loops) == suite.loops and not result["missing"]
    path: Path | None = args.json or (suite.committed if is_full or args.merge else None)
    if path is not None:
        write(suite, result, path, is_merged=args.merge)
    if args.table:
        print(tables.markdown(result))
    elif path is None:
        print(tables.brief(result))
    return 1 if any(case["failures"] for case in result["cases"]) else 0


if __name__ == "__main__":
    sys.exit(main())
