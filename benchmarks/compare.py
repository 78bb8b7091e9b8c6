"""Compare the loops: `python -m benchmarks.compare [CASE ...]`. `python -m benchmarks` also compares coros and
blocking-style servers. See README.md.

Every run is a fresh process. The loops take turns (A B C, then C B A, ...), so that a change of the machine's state
affects all of them. Ratios are taken run by run. From these, `intervals.py` decides whether grapeshot is ahead of a
peer, equal or behind.
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

from benchmarks import against, digest, tables
from benchmarks._load import MeasurementError, UnsupportedError, loadgen
from benchmarks._loops import AIOFASTNET, LOOPS, PACKAGES, RAW, available, versions
from benchmarks._machine import ROOT, cores, describe
from benchmarks._screen import Screen, open_screen, say, show
from benchmarks.cases import CASES
from benchmarks.intervals import LEAST_PAIRS
from benchmarks.measure import Case, Sample, Settings
from benchmarks.standings import OURS

SCHEMA = 3
RESULTS = ROOT / "benchmarks" / "results"
# Where uncommitted files go: all runs, the HTML page, and comparisons of only some cases or loops.
UNCOMMITTED = ROOT / "target" / "bench"
# Rows can be in one table only if these facts about their machines are the same.
SAME_MACHINE = ("processor", "cores", "system", "python", "free_threaded")
# RUNS are enough to decide a row; QUICK_RUNS are enough to see that everything works.
RUNS, QUICK_RUNS = LEAST_PAIRS, 3
QUICK = Settings(idle_connections=2000, startup_pairs=1, many_timers=200_000)


@dataclass(frozen=True)
class Suite:
    """Cases whose results are in one file, and the loops that take part in them."""

    cases: tuple[Case, ...]
    loops: tuple[str, ...]
    # Returns the usable names, and the reason why each of the others is not usable.
    available: Callable[[Iterable[str]], tuple[list[str], dict[str, str]]]
    packages: tuple[str, ...]
    # Dataclasses: `settings`, and `quick` for --quick. Their field `seconds` is the measured time of one run, except in
    # cases that use another field.
    settings: Any
    quick: Any
    committed: Path
    # Whether a load generator runs, on a core of its own.
    has_load: bool
    # Texts of the page about this suite: the heading, and how the cases were measured.
    page: dict[str, str]
    # The members of `loops` that are shown for reference and do not count as peers.
    references: tuple[str, ...] = ()
    # Returns further facts, by name, to record beside the versions.
    facts: Callable[[], dict[str, str]] = dict


LOOP_SUITE = Suite(
    cases=CASES,
    loops=(*LOOPS, *AIOFASTNET, RAW),
    available=available,
    packages=PACKAGES,
    settings=Settings(),
    quick=QUICK,
    committed=RESULTS / "comparison.json",
    has_load=True,
    page={},
    references=(RAW, "aiofastnet+grapeshot"),
)


def now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


def participants(case: Case, loops: Sequence[str]) -> list[str]:
    if case.only:
        return [loop for loop in loops if loop in case.only]
    left_out = {*(() if case.with_raw else [RAW]), *(() if case.with_aiofastnet else AIOFASTNET)}
    return [loop for loop in loops if loop not in left_out]


def prepare(case: Case, loops: Sequence[str], settings: Any) -> tuple[dict[str, Any], Case, str | None]:
    """Run the case's preparation. Return the facts that it found, the case with the measurement to use, and the
    reason why the case is left out (or None).
    """
    if case.prepare is None:
        return {}, case, None
    try:
        kept, measure = case.prepare(loops, settings)
    except (UnsupportedError, MeasurementError) as error:
        return {}, case, str(error)
    return kept, dataclasses.replace(case, measure=measure), None


def run_case(case: Case, loops: Sequence[str], runs: int, settings: Any, screen: Screen) -> dict[str, Any]:
    """Do all runs of one case. A loop that fails or lacks the feature sits out the remaining runs; the reason is
    kept.
    """
    samples: dict[str, list[Sample]] = {loop: [] for loop in loops}
    failures: dict[str, str] = {}
    unsupported: dict[str, str] = {}
    began = now()
    kept, case, left_out = prepare(case, loops, settings)
    for run in range(0 if left_out else runs):
        for loop in loops if run % 2 == 0 else reversed(loops):
            screen.take(loop)
            if loop in failures or loop in unsupported:
                continue
            try:
                samples[loop].append(case.measure(loop, settings))
            except UnsupportedError as error:
                unsupported[loop] = str(error)
            except MeasurementError as error:
                failures[loop] = str(error)
                screen.tell(f"{case.name} FAILED ON {loop}: {error}")
    outcome = {
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
    }
    wall = dataclasses.asdict(case.wall) if case.wall else None
    more = {"kept": kept, "grown_from": case.grown_from, "left_out": left_out, "wall": wall}
    return outcome | {name: value for name, value in more.items() if value}


def choose_cases(patterns: Sequence[str], cases: Sequence[Case] = CASES, without: Sequence[str] = ()) -> list[Case]:
    """Return the cases whose name or group matches any of the patterns (all cases if there are no patterns), except
    cases that match one of `without`. Raises SystemExit for a pattern that matches nothing, or if no case is left.
    """

    def matches(case: Case, pattern: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for name in (case.name, case.group.lower()))

    for pattern in (*patterns, *without):
        if not any(matches(case, pattern) for case in cases):
            raise SystemExit(f"no case is called {pattern!r}; --list shows them")
    chosen = [
        case
        for case in cases
        if any(matches(case, pattern) for pattern in patterns or ["*"])
        and not any(matches(case, pattern) for pattern in without)
    ]
    if not chosen:
        raise SystemExit(f"--without {' '.join(without)} leaves no case")
    return chosen


def compare(suite: Suite, cases: Sequence[Case], loops: Sequence[str], runs: int, settings: Any) -> dict[str, Any]:
    """Run everything. Return all runs, with a description of the machine that they were taken on."""
    usable, missing = suite.available(loops)
    if OURS in missing:
        raise SystemExit(f"there is nothing to compare: {missing[OURS]}")
    if suite.has_load:
        say("building the load generator, if it has changed")
        loadgen()
    server_core, load_core = cores()
    if server_core is None and suite.has_load:
        say("!!! server and load share a core or cannot be pinned: the numbers will vary more than usual")
    started, machine = time.monotonic(), describe()
    title = suite.page.get("heading", "# The loop").strip("# ")
    who = [participants(case, usable) for case in cases]
    outcomes = []
    with open_screen(title, len(cases), runs * sum(map(len, who)), usable) as screen:
        for case, taking_part in zip(cases, who, strict=True):
            screen.begin(case.title)
            outcome = run_case(case, taking_part, runs, settings, screen)
            peers = [loop for loop in taking_part if loop not in (OURS, *suite.references, *case.references)]
            outcomes.append(outcome | {"peers": peers, "revision": machine["revision"]})
            for row in digest.rows(outcomes[-1]):
                screen.end(row)
    return {
        "schema": SCHEMA,
        "taken": now(),
        "took_s": round(time.monotonic() - started),
        "machine": machine,
        "versions": versions(suite.packages) | suite.facts(),
        "settings": dataclasses.asdict(settings) | {"runs": runs, "server_core": server_core, "load_core": load_core},
        "loops": usable,
        "missing": missing,
        "cases": outcomes,
    } | suite.page


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return why the rows of two comparisons cannot be in one table. Only grapeshot's own version may differ."""
    pairs = [(f"settings: {name}", before["settings"].get(name), value) for name, value in after["settings"].items()]
    pairs += [(name, before["machine"].get(name), after["machine"][name]) for name in SAME_MACHINE]
    shared = (before["versions"].keys() & after["versions"].keys()) - {OURS}
    pairs += [(name, before["versions"][name], after["versions"][name]) for name in sorted(shared)]
    return [f"{name} is {new!r}, and was {old!r}" for name, old, new in pairs if old != new]


def merge(before: dict[str, Any], after: dict[str, Any], cases: Sequence[Case] = CASES) -> dict[str, Any]:
    """Return a comparison with the rows of both, in the order of `cases`. If both have a row, the newer one is
    taken. A row is dropped if its case is no longer in `cases`.

    Raises SystemExit if the rows cannot be in one table.
    """
    if wrong := differences(before, after):
        raise SystemExit("these rows cannot be merged:\n  " + "\n  ".join(wrong))
    outcomes = {outcome["name"]: outcome for outcome in (*before["cases"], *after["cases"])}
    order = [name for case in cases for name in (case.name, digest.wall_name(case.name))]
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


def parse(suites: Sequence[Suite], description: str | None, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help="names or groups, * and ? allowed; all when none is given"
    )
    parser.add_argument("--cases", nargs="+", dest="more_cases", default=[], metavar="CASE", help="more cases")
    parser.add_argument("--without", nargs="+", default=[], metavar="CASE", help="leave these out")
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_RUNS} runs, for a first look: too few for a verdict"
    )
    loops = list(dict.fromkeys(loop for suite in suites for loop in suite.loops))
    parser.add_argument("--loops", nargs="+", help=f"default: {' '.join(loops)}")
    parser.add_argument("--runs", type=int, help=f"alternated runs per case ({RUNS}; {QUICK_RUNS} with --quick)")
    parser.add_argument("--seconds", type=float, help="measured time of one run, unless the case sets its own")
    parser.add_argument("--spin", action="store_true", help="let the load generator poll without sleeping")
    files = ", ".join(suite.committed.name for suite in suites)
    where = UNCOMMITTED.relative_to(ROOT)
    parser.add_argument(
        "--json", type=Path, help=f"where to write (default: {files} for a full comparison or --merge, else {where})"
    )
    parser.add_argument("--merge", action="store_true", help="replace the measured rows in the JSON, keep the others")
    parser.add_argument(
        "--against",
        type=Path,
        metavar="OLD",
        help="an earlier JSON (or a folder of them): report the rows whose intervals have moved, and exit with 1 if any"
        " row got worse",
    )
    parser.add_argument("--table", action="store_true", help="print the table in Markdown")
    parser.add_argument("--list", action="store_true", help="list the cases")
    args = parser.parse_args(arguments)
    args.cases += args.more_cases
    if args.json and len(suites) > 1:
        parser.error("--json is for one suite: benchmarks.compare, benchmarks.coros or benchmarks.blocking")
    return args


def write(
    suite: Suite, result: dict[str, Any], short: dict[str, Any], path: Path, runs_path: Path, *, is_merged: bool
) -> None:
    """Write the digest of the comparison to `path`, and all of its runs to `runs_path`."""
    if is_merged and path.exists():
        short = merge(json.loads(path.read_text()), short, suite.cases)
    if is_merged and runs_path.exists():
        result = merge(json.loads(runs_path.read_text()), result, suite.cases)
    for place, written in ((path, digest.text(short)), (runs_path, json.dumps(result) + "\n")):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(written)
    say(f"written: {path}; all runs: {runs_path}")


def run_suite(suite: Suite, cases: Sequence[Case], args: argparse.Namespace) -> tuple[Path, bool]:
    """Measure, write and show. Return the path of the runs, and whether a run failed or something got worse."""
    settings, runs = (suite.quick, QUICK_RUNS) if args.quick else (suite.settings, RUNS)
    if args.seconds is not None:
        settings = dataclasses.replace(settings, seconds=args.seconds)
    if suite.has_load:
        settings = dataclasses.replace(settings, spin=args.spin)
    loops = suite.loops if args.loops is None else [loop for loop in args.loops if loop in suite.loops or ":" in loop]
    result = compare(suite, cases, loops, args.runs or runs, settings)
    is_changed = args.quick or args.cases or args.without or args.loops or args.runs or args.seconds or args.spin
    is_full = not is_changed and not result["missing"]
    path: Path = args.json or (suite.committed if is_full or args.merge else UNCOMMITTED / suite.committed.name)
    old = args.against / suite.committed.name if args.against and args.against.is_dir() else args.against
    before = json.loads(old.read_text()) if old else None
    runs_path = (UNCOMMITTED if path.parent.resolve() == RESULTS else path.parent) / f"{path.stem}-runs.json"
    short = digest.digest(result)
    write(suite, result, short, path, runs_path, is_merged=args.merge)
    if args.table:
        print(tables.markdown(short))
    else:
        show(short)
    has_failed = any(outcome["failures"] for outcome in result["cases"])
    if before:
        lines, got_worse = against.report(before, short)
        print("\n".join(lines))
        has_failed |= got_worse
    return runs_path, has_failed


def write_page(paths: Sequence[Path]) -> None:
    """Write one HTML page about all suites that this run has measured, from the files of their runs."""
    from benchmarks import page

    where = paths[0].with_name("report.html")
    try:
        where.write_text(page.html(page.load(paths)), encoding="utf-8")
    except ImportError as error:
        say(f"!!! no HTML page: {error}")
    else:
        say(f"written: {where}")


def main(
    arguments: Sequence[str] | None = None,
    suites: Sequence[Suite] = (LOOP_SUITE,),
    description: str | None = __doc__,
) -> int:
    args = parse(suites, description, arguments)
    everything = [case for suite in suites for case in suite.cases]
    chosen = {id(case) for case in choose_cases(args.cases, everything, args.without)}
    work = [(suite, [case for case in suite.cases if id(case) in chosen]) for suite in suites]
    if args.list:
        for _, cases in work:
            for case in cases:
                print(f"{case.name:<20} {case.group:<22} {case.title}")
        return 0
    done = [run_suite(suite, cases, args) for suite, cases in work if cases]
    write_page([path for path, _ in done])
    return 1 if any(has_failed for _, has_failed in done) else 0


if __name__ == "__main__":
    sys.exit(main())
