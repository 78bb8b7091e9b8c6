"""Run other projects' own test suites on a loop: `python tests/suites/run.py [--subject NAME] [suite ...]`.

A suite is the tests in the sdist of one release; `suites.toml` lists the suites with their requirements. Each suite
runs twice with this version of Python, first on the baseline and then on the subject. The baseline is asyncio's own
loop unless `suites.toml` names another one. The subject is the loop under test, which `--subject` names. Every test
that passes on the baseline must pass on the subject. The exceptions are in `suites.toml`, each with its reason. The run
fails when

- a test that passed on the baseline fails, is skipped or is missing on the subject, and is not listed,
- a listed test passes, or a listed pattern matches no test that passed on the baseline (so that the list stays true),
- in the run on the subject, a test builds a loop of asyncio's own, or no test builds a loop of the subject,
- a suite is patched (its `patch` in `suites.toml` names a part that `coro.patch()` patches), but on grapeshot's loop no
  test has run a blocking function in a coro.

A test that failed runs again, up to twice, before its result counts, because these suites have tests that depend on
timing. On the subject, tests that were skipped or are missing also run again, but tests that are listed or did not pass
on the baseline run only once. Tests that pass only when they run again are named at the end, for the baseline and for
the subject.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DATA = HERE / "suites.toml"
CONSTRAINTS = HERE / "constraints.txt"
PLACE = HERE.parents[1] / "target" / "suites"
SETTINGS = ("pytest.ini", "pyproject.toml")
CORPUS = "requests"  # with this name, corpus.py runs instead of a suite
RERUNS = 2
RANK = ("passed", "xfailed", "skipped", "failed")  # best first; a test gets the worst outcome of its phases


@dataclasses.dataclass
class Outcome:
    """How a test ended."""

    outcome: str
    detail: str = ""
    loops: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    runs: int = 1


@dataclasses.dataclass
class Report:
    """The result of a suite on the subject, with the baseline for comparison."""

    suite: str
    counts: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)
    flaky: dict[str, list[str]] = dataclasses.field(default_factory=dict)


# ---------------------------------------------------------------- what a suite needs


def version() -> str:
    """Return the version of this interpreter, such as 3.13, or 3.14t for a free-threaded one."""
    return "{}.{}{}".format(*sys.version_info[:2], getattr(sys, "abiflags", ""))


def prepare(name: str, suite: dict[str, Any]) -> tuple[Path, Path]:
    """Prepare the suite's interpreter with its requirements, and the directory that the suite runs in."""
    place = PLACE / version() / name
    place.mkdir(parents=True, exist_ok=True)
    python, work, stamp = place / "venv" / "bin" / "python", place / "work", place / "stamp"
    project = suite.get("project", name)
    needs = [suite.get(key) for key in ("version", "unpack", "requirements", "conftest")]
    wanted = json.dumps([needs, CONSTRAINTS.read_text(), sys.version])
    if stamp.exists() and stamp.read_text() == wanted:
        return python, work
    stamp.unlink(missing_ok=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(place / "venv")], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "-c", str(CONSTRAINTS), *suite["requirements"]], check=True)
    with tempfile.TemporaryDirectory(prefix="sdist-") as folder:
        pin = Path(folder) / "requirements.txt"
        pin.write_text(f"{project}=={suite['version']} --hash=sha256:{suite['sha256']}\n")
        download = ["download", "--quiet", "--no-deps", "--require-hashes", "--no-binary", project, "-d", folder]
        subprocess.run([*pip, *download, "-r", str(pin)], check=True)
        unpack(next(Path(folder).glob("*.tar.gz")), work, suite["unpack"])
    (work / "conftest.py").write_text(suite.get("conftest", ""))
    stamp.write_text(wanted)
    return python, work


def unpack(sdist: Path, work: Path, wanted: list[str]) -> None:
    """Replace `work` with the wanted files and directories of an sdist."""
    subprocess.run(["rm", "-rf", str(work)], check=True)
    work.mkdir()
    with tarfile.open(sdist) as archive:
        for member in archive.getmembers():
            member.name = member.name.partition("/")[2]
            if any(member.name == name or member.name.startswith(f"{name}/") for name in wanted):
                archive.extract(member, work, filter="data")


# ---------------------------------------------------------------- running


def run_once(suite: dict[str, Any], python: Path, work: Path, subject: str, tests: list[str]) -> dict[str, Outcome]:
    """Run these tests, or all tests if the list is empty. Return how they ended."""
    with tempfile.TemporaryDirectory(prefix="s-") as folder:  # a short path, because Unix sockets are created below it
        lines, chosen, output = (Path(folder) / name for name in ("lines", "chosen", "output"))
        lines.touch()
        home = Path(folder) / "home"
        home.mkdir()
        command = [str(python), "-m", "pytest", "-o", "addopts=", "-p", "recorder", "--color=no", *suite["arguments"]]
        command += [*(f"--deselect={test}" for test in suite["deselected"]), *suite["tests"]]
        # Use the suite's own settings, or none. By default pytest would use the settings of the surrounding project.
        settings = next((str(work / name) for name in SETTINGS if (work / name).exists()), os.devnull)
        command += ["-c", settings, f"--rootdir={work}", f"--confcutdir={work}"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV_"))}
        environment |= {"SUITE_LOOP": subject, "SUITE_LINES": str(lines), "HOME": str(home), "TMPDIR": folder}
        environment |= {"PYTHONPATH": os.pathsep.join(map(str, (HERE / "site", HERE, package()))), "PYTHONUTF8": "1"}
        if is_patched(suite, subject):
            environment["SUITE_PATCH"] = suite["patch"]
        environment |= suite.get("environment", {})
        if tests:
            chosen.write_text(json.dumps(tests))
            environment["SUITE_ONLY"] = str(chosen)
        with output.open("wb") as sink:
            child = subprocess.Popen(
                command,
                cwd=work,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )
            try:
                code = child.wait(suite["limit_s"])
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end_group(child)
        outcomes = read_lines(lines.read_text())
        if code not in (0, 1):  # 0: all passed; 1: some failed; anything else is an error
            tail = "\n".join(output.read_text(errors="replace").splitlines()[-40:])
            what = f"timed out after {suite['limit_s']} s" if code is None else f"pytest ended with code {code}"
            print(f"{what}\n{tail}", flush=True)
        return outcomes


def is_patched(suite: dict[str, Any], subject: str) -> bool:
    return "patch" in suite and subject == "grapeshot"


def package() -> Path:
    """Return the directory that this interpreter imports grapeshot from."""
    spec = importlib.util.find_spec("grapeshot")
    if spec is None or spec.origin is None:
        raise SystemExit(f"grapeshot is not installed for {sys.executable}")
    return Path(spec.origin).parents[1]


def end_group(child: subprocess.Popen[bytes]) -> None:
    """End the processes that a suite left running."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()


def read_lines(text: str) -> dict[str, Outcome]:
    """Return the outcome of each test from the recorder's lines."""
    outcomes: dict[str, Outcome] = {}
    finished: set[str] = set()
    for line in map(json.loads, text.splitlines()):
        known = outcomes.setdefault(line["test"], Outcome("passed"))
        if RANK.index(line["outcome"]) > RANK.index(known.outcome):
            known.outcome, known.detail = line["outcome"], line["detail"]
        known.loops.update(line["loops"])
        if line["when"] == "teardown":
            finished.add(line["test"])
    for test in outcomes.keys() - finished:
        if outcomes[test].outcome != "failed":
            outcomes[test].outcome, outcomes[test].detail = "failed", "the process ended in this test"
    return outcomes


def run_suite(
    suite: dict[str, Any], python: Path, work: Path, subject: str, needed: list[str] | None
) -> dict[str, Outcome]:
    """Run a suite. Then run again the tests that failed or, with `needed`, the needed tests that did not pass."""
    outcomes = run_once(suite, python, work, subject, [])
    for _ in range(RERUNS):
        if needed is None:
            again = [test for test, end in outcomes.items() if end.outcome == "failed" and "::" in test]
        else:
            again = [test for test in needed if test not in outcomes or outcomes[test].outcome != "passed"]
        if not again:
            break
        again.sort(key=lambda test: test in outcomes)  # first the tests that did not run because of a crash
        for test, end in run_once(suite, python, work, subject, again).items():
            if test in outcomes:
                end.runs += outcomes[test].runs
                end.loops.update(outcomes[test].loops)
            outcomes[test] = end
    return outcomes


# ---------------------------------------------------------------- judging


def matches(pattern: str, test: str) -> bool:
    """Return whether the test's id matches the pattern, in which `*` stands for any text."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), test) is not None


def judge(
    name: str,
    subject: str,
    exceptions: dict[str, str],
    baseline: dict[str, Outcome],
    ended: dict[str, Outcome],
    needs_coros: bool = False,
) -> Report:
    """Compare the subject's outcomes with the baseline's; `exceptions` are patterns with their reasons."""
    report = Report(name)
    used: set[str] = set()
    for test, base in baseline.items():
        if base.outcome != "passed":
            continue
        end = ended.get(test, Outcome("missing"))
        listed = [pattern for pattern in exceptions if matches(pattern, test)]
        used.update(listed)
        if end.outcome == "passed" and listed:
            report.problems.append(f"PASSES {test}, but is listed: {exceptions[listed[0]]}")
        elif end.outcome != "passed" and not listed:
            report.problems.append(f"{end.outcome.upper()} {test}\n{end.detail.rstrip()}".rstrip())
    for pattern in exceptions:
        if pattern not in used:
            report.problems.append(f"STALE {pattern!r} matches no test that passes on the baseline")
    built = sum((end.loops for end in ended.values()), collections.Counter[str]())
    if not built[subject]:
        report.problems.append(f"not one test built a loop of {subject}: the run proves nothing about it")
    if needs_coros and not built["coros"]:
        report.problems.append("not one blocking function ran in a coro: the run proves nothing about the patch")
    for test, end in ended.items():
        if subject != "asyncio" and end.loops["asyncio"]:
            report.problems.append(f"ESCAPED {test}: it built a loop of asyncio's own")
    return report


def load(file: Path = DATA) -> dict[str, dict[str, Any]]:
    """Return the suites, each with its entries of [[deselect]] and [[fail]]."""
    data = tomllib.loads(file.read_text())
    suites: dict[str, dict[str, Any]] = data["suite"]
    for suite in suites.values():
        suite["deselected"], suite["exceptions"] = [], {}
    for entry in data.get("deselect", []):
        suites[entry["suite"]]["deselected"] += entry["tests"]
    for entry in data.get("fail", []):
        if not entry["reason"].strip():
            raise SystemExit(f"{file.name}: an entry has no reason: {entry['tests']}")
        suites[entry["suite"]]["exceptions"].update(dict.fromkeys(entry["tests"], entry["reason"]))
    return suites


# ---------------------------------------------------------------- the program


def main() -> int:
    suites = load()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "suites", nargs="*", metavar="suite", help=f"{', '.join([*suites, CORPUS])}; all if none is given"
    )
    parser.add_argument("--subject", default="grapeshot", choices=["grapeshot", "uvloop"])
    parser.add_argument("--keep-baseline", action="store_true", help="use the last run's results of the baseline")
    parser.add_argument("--json", type=Path, help="write the counts and problems to this file")
    parser.add_argument("--brief", action="store_true", help="only the first and the last line of each failure")
    arguments = parser.parse_args()
    # A shell makes background processes ignore SIGINT, nohup makes its program ignore SIGHUP, and the suites' processes
    # would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    reports = []
    wanted = arguments.suites or [*suites, CORPUS]
    corpus_code = (
        subprocess.run([sys.executable, str(HERE / "corpus.py")], check=False).returncode if CORPUS in wanted else 0
    )
    for name in wanted:
        if name == CORPUS:
            continue
        if "patch" in suites[name] and not has_coros():
            print(f"==> {name}: left out, because this interpreter has no coros", flush=True)
            continue
        reports.append(run_and_judge(name, suites[name], arguments.subject, arguments.keep_baseline))
        for problem in reports[-1].problems:
            lines = problem.splitlines()
            print("\n".join([lines[0], *(lines[1:][-1:] if arguments.brief else lines[1:])]), flush=True)
    print_table(reports)
    if arguments.json:
        arguments.json.write_text(json.dumps([dataclasses.asdict(report) for report in reports], indent=1))
    return 1 if corpus_code or any(report.problems for report in reports) else 0


@contextlib.contextmanager
def with_server(suite: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Start the suite's server, if it needs one. Yield the suite, with the server's address in its arguments."""
    if "server" not in suite:
        yield suite
        return
    sys.path += [str(HERE.parents[1]), str(HERE.parent)]  # this file runs as a program
    from tests.apps.certificates import Certificates
    from tests.apps.daemons import Postgres

    with tempfile.TemporaryDirectory() as folder, Postgres(Certificates(Path(folder))) as server:
        place = {"host": server.address.folder, "port": str(server.address.port)}
        psql = [str(Path(server.program).parent / "psql"), "-q", "-U", server.address.user, server.address.database]
        psql += [f"--{name}={value}" for name, value in place.items()]
        for statement in suite.get("sql", []):
            subprocess.run([*psql, "-c", statement], check=True)
        arguments = [argument.format(server=urllib.parse.urlencode(place)) for argument in suite["arguments"]]
        yield suite | {"arguments": arguments}


def has_coros() -> bool:
    try:
        importlib.import_module("grapeshot.coro")
    except ImportError:
        return False
    return True


def run_and_judge(name: str, suite: dict[str, Any], subject: str, keep_baseline: bool) -> Report:
    with with_server(suite) as served:
        return run_on_both(name, served, subject, keep_baseline)


def run_on_both(name: str, suite: dict[str, Any], subject: str, keep_baseline: bool) -> Report:
    python, work = prepare(name, suite)
    kept = work.parent / "baseline.json"
    before = suite.get("baseline", "asyncio")
    if keep_baseline and kept.exists():
        baseline = {test: Outcome(outcome, runs=runs) for test, (outcome, runs) in json.loads(kept.read_text()).items()}
    else:
        print(f"==> {name} {suite['version']} on {before}", flush=True)
        baseline = run_suite(suite, python, work, before, None)
        kept.write_text(json.dumps({test: (end.outcome, end.runs) for test, end in baseline.items()}, indent=0))
    print(f"==> {name} {suite['version']} on {subject}", flush=True)
    listed = suite["exceptions"]
    needed = [
        test
        for test, end in baseline.items()
        if end.outcome == "passed" and not any(matches(pattern, test) for pattern in listed)
    ]
    ended = run_suite(suite, python, work, subject, needed)
    report = judge(name, subject, listed, baseline, ended, is_patched(suite, subject))
    for loop, outcomes in ((before, baseline), (subject, ended)):
        report.counts[loop] = {how: sum(end.outcome == how for end in outcomes.values()) for how in RANK}
        report.flaky[loop] = [test for test, end in outcomes.items() if end.outcome == "passed" and end.runs > 1]
    return report


def print_table(reports: list[Report]) -> None:
    row = "{:<20} {:<10} {:>7} {:>7} {:>8}  {}"
    print(row.format("suite", "loop", "passed", "failed", "skipped", "passed when run again"))
    for report in reports:
        for loop, counts in report.counts.items():
            skipped = counts["skipped"] + counts["xfailed"]
            flaky = ", ".join(report.flaky[loop]) or "none"
            print(row.format(report.suite, loop, counts["passed"], counts["failed"], skipped, flaky))
        print(f"{'':<20} {len(report.problems)} problems")


if __name__ == "__main__":
    sys.exit(main())
