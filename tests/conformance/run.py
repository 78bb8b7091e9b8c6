"""Run CPython's own asyncio tests against a loop: `python tests/conformance/run.py [--subject NAME] [module ...]`.

Each module of `test.test_asyncio` runs with this interpreter in a process of its own (`child.py`). If a test crashes or
hangs, it is reported, and the rest of its module continues in a new process, unless the module's time is over.
`exclusions.toml` lists the tests to which special rules apply, with reasons. The run fails when

- a test fails that is not listed there as failing,
- a test passes although it is listed as failing,
- a test that is listed under `own_loop` passes without building a loop of asyncio's own,
- a listed pattern matches no test and is not marked `maybe_absent`,
- a test that is not listed under `own_loop` builds a loop of asyncio's own,
- no test of a module builds a loop of the subject (the loop under test): then the module would prove nothing.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import fnmatch
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
EXCLUSIONS = HERE / "exclusions.toml"
MODULE_TIMEOUT_S = 240.0
TABLES = ("skip", "fail", "own_loop", "simulated")


@dataclasses.dataclass
class Report:
    """The result of one module."""

    module: str
    subject: str
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    loops: dict[str, int] = dataclasses.field(default_factory=dict)
    on_subject: int = 0
    elapsed_s: float = 0.0
    problems: list[str] = dataclasses.field(default_factory=list)

    def summary(self) -> str:
        counts = ", ".join(f"{number} {outcome}" for outcome, number in sorted(self.counts.items()))
        loops = ", ".join(f"{number} x {name}" for name, number in sorted(self.loops.items())) or "none"
        on_subject = f"{self.on_subject} tests on {self.subject} (loops: {loops})"
        return f"{self.module}: {counts}; {on_subject}; {self.elapsed_s:.1f} s"


def shipped_tests() -> Path | None:
    """Return the directory of this interpreter's `test.test_asyncio`, or None if the interpreter was installed without
    tests.
    """
    spec = importlib.util.find_spec("test")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(location) / "test_asyncio"
        if (folder / "test_events.py").exists():
            return folder
    return None


def is_for_this_python(entry: dict[str, Any]) -> bool:
    """Return whether the entry's `python` (such as ">=3.12", or ">=3.12,<3.14") and `platform` apply here."""
    if not sys.platform.startswith(entry.get("platform", "")):
        return False
    for condition in filter(None, entry.get("python", "").split(",")):
        matched = re.fullmatch(r"\s*(>=|<)\s*(\d+)\.(\d+)(?:\.(\d+))?\s*", condition)
        if matched is None:
            raise SystemExit(f"cannot read python = {condition!r}")
        bound = tuple(int(part) for part in matched.groups()[1:] if part is not None)
        if (sys.version_info[:3] >= bound) != (matched[1] == ">="):
            return False
    return True


def load_exclusions(subject: str, file: Path = EXCLUSIONS) -> tuple[list[str], dict[str, dict[str, str]]]:
    """Return the modules to run and, for each table, the patterns that apply here with their reasons."""
    data = tomllib.loads(file.read_text())
    patterns: dict[str, dict[str, str]] = {table: {} for table in (*TABLES, "maybe_absent")}
    for table in TABLES:
        for entry in data.get(table, []):
            if not entry["reason"].strip():
                raise SystemExit(f"{file.name}: an entry of [[{table}]] has no reason: {entry['tests']}")
            if entry.get("subject", "any") in ("any", subject) and is_for_this_python(entry):
                patterns[table].update(dict.fromkeys(entry["tests"], entry["reason"]))
                if entry.get("maybe_absent"):
                    patterns["maybe_absent"].update(dict.fromkeys(entry["tests"], entry["reason"]))
    return data["modules"], patterns


def modules_to_run() -> list[str]:
    """Return the modules that exclusions.toml lists and that this interpreter ships."""
    folder = shipped_tests()
    modules, _ = load_exclusions("grapeshot")
    return [module for module in modules if folder is not None and (folder / f"{module}.py").exists()]


def matching(identity: str, patterns: dict[str, str]) -> str | None:
    """Return the first pattern that matches the test's id."""
    return next((pattern for pattern in patterns if fnmatch.fnmatchcase(identity, pattern)), None)


def run_children(module: str, subject: str, job: dict[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
    """Run a module in as many processes as its crashes and hangs require. Return all test ids, and the outcomes of the
    tests that ran.
    """
    known: list[str] = []
    ended: list[dict[str, Any]] = []
    deadline_s = time.monotonic() + MODULE_TIMEOUT_S
    while True:
        with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
            job_file, lines, hang, output = (Path(folder) / name for name in ("job", "lines", "hang", "output"))
            work = Path(folder) / "work"
            work.mkdir()
            job_file.write_text(json.dumps(job | {"finished": [end["test"] for end in ended]}))
            command = [sys.executable, str(HERE / "child.py"), "--subject", subject, "--module", module]
            command += ["--job", str(job_file), "--lines", str(lines), "--hang", str(hang)]
            environment = os.environ | {"TMPDIR": str(work), "PYTHONDONTWRITEBYTECODE": "1"}
            with output.open("wb") as sink:
                child = subprocess.Popen(
                    command, cwd=work, env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink
                )
                try:
                    code: int | None = child.wait(max(1.0, deadline_s - time.monotonic()))
                except subprocess.TimeoutExpired:
                    code = None
                    child.kill()
                    child.wait()
            events = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
            known = next((event["tests"] for event in events if event["event"] == "loaded"), known)
            new = [event for event in events if event["event"] == "end"]
            ended += new
            if events and events[-1]["event"] == "done":
                return known, ended
            tail = "\n".join(output.read_text(errors="replace").splitlines()[-25:])
            if not events or events[-1]["event"] != "start":
                where = "between two tests" if events else "before the first test"
                what = "timed out" if code is None else f"ended with code {code}"
                ended.append(lost(f"{module} ({where})", "crash", f"the process {what}\n{tail}"))
                return known, ended
            culprit = events[-1]["test"]
            stack = hang.read_text() if hang.exists() else ""
            if code is None:
                ended.append(lost(culprit, "hang", f"the module's {MODULE_TIMEOUT_S:.0f} s were over in this test"))
                return known, ended
            outcome = "hang" if stack.startswith("Timeout") else "crash"
            ended.append(lost(culprit, outcome, stack or f"the process ended with code {code}\n{tail}"))


def lost(test: str, outcome: str, detail: str) -> dict[str, Any]:
    return {"test": test, "outcome": outcome, "detail": detail, "elapsed_s": 0.0, "ours": {}, "foreign": {}}


def run_module(module: str, subject: str, file: Path = EXCLUSIONS) -> Report:
    """Run one module and judge its outcomes."""
    _, patterns = load_exclusions(subject, file)
    job = {"skip": list(patterns["skip"]), "simulated": list(patterns["simulated"])}
    report = Report(module, subject)
    started_at_s = time.monotonic()
    known, ended = run_children(module, subject, job)
    report.elapsed_s = time.monotonic() - started_at_s
    loops: collections.Counter[str] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    for end in ended:
        loops.update(end["ours"])
        report.on_subject += bool(end["ours"])
        counts[judge(end, patterns, report.problems)] += 1
    left_out = sum(matching(identity, patterns["skip"]) is not None for identity in known)
    if left_out:
        counts["left out"] = left_out
    report.problems += stale_patterns(module, known, patterns)
    report.counts, report.loops = dict(counts), dict(loops)
    if report.on_subject == 0:
        report.problems.append(f"{module}: not one test built a loop of {subject}: the module proves nothing about it")
    return report


def judge(end: dict[str, Any], patterns: dict[str, dict[str, str]], problems: list[str]) -> str:
    """Return the outcome to count for one test. If the test makes the run fail, add the reason to `problems`."""
    identity, outcome = end["test"], end["outcome"]
    expected = matching(identity, patterns["fail"])
    is_bad = outcome in ("fail", "crash", "hang")
    if is_bad and expected is None:
        problems.append(f"{outcome.upper()} {identity}\n{end['detail'].rstrip()}")
    elif is_bad:
        outcome = "expected failure"
    elif expected is not None and outcome == "pass":
        problems.append(f"PASSES {identity}, but is listed as failing: {patterns['fail'][expected]}")
        outcome = "unexpected pass"
    own = matching(identity, patterns["own_loop"])
    if end["foreign"] and own is None:
        problems.append(f"ESCAPED {identity}: it built {end['foreign']} instead of the loop under test")
    if own is not None and end["outcome"] == "pass" and not end["foreign"]:
        problems.append(f"STALE {identity} is listed under own_loop but built no loop of asyncio's own")
    return outcome


def stale_patterns(module: str, known: list[str], patterns: dict[str, dict[str, str]]) -> list[str]:
    """Return a line for each pattern about this module that matches none of its tests and is not `maybe_absent`."""
    return [
        f"STALE [[{table}]] pattern {pattern!r} matches no test of this interpreter"
        for table in TABLES
        for pattern in patterns[table]
        if pattern.split(".")[0] == module
        and pattern not in patterns["maybe_absent"]
        and not fnmatch.filter(known, pattern)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "modules", nargs="*", help="for example test_events; default: all modules that exclusions.toml lists"
    )
    parser.add_argument("--subject", default="grapeshot", help="grapeshot, asyncio, uvloop or module:callable")
    parser.add_argument("--exclusions", type=Path, default=EXCLUSIONS)
    parser.add_argument("--json", type=Path, help="write the reports to this file")
    parser.add_argument("--brief", action="store_true", help="print only the first and the last line of each failure")
    arguments = parser.parse_args()
    if shipped_tests() is None:
        sys.exit(f"CONFORMANCE NOT RUN: {sys.executable} was installed without its own tests (test.test_asyncio)")
    reports = []
    for module in arguments.modules or modules_to_run():
        report = run_module(module, arguments.subject, arguments.exclusions)
        reports.append(report)
        print(report.summary(), flush=True)
        for problem in report.problems:
            lines = problem.splitlines()
            print("\n".join([lines[0], *(lines[1:][-1:] if arguments.brief else lines[1:])]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([dataclasses.asdict(report) for report in reports], indent=1))
    problems = sum(len(report.problems) for report in reports)
    on_subject = sum(report.on_subject for report in reports)
    elapsed_s = sum(report.elapsed_s for report in reports)
    print(f"{on_subject} tests on {arguments.subject}, {problems} problems, {elapsed_s:.0f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
