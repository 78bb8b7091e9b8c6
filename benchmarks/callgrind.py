"""Count instructions per echo and per call of the loop, with valgrind: `python -m benchmarks.callgrind`.

Each case is counted twice, with few operations and with many. The difference of the instructions, divided by the
difference of the operations, is the cost of one operation; the start and the end of the process cancel out. Only user
space is counted (not the kernel's part of an echo). The counts do not depend on how busy the machine is, but they do
depend on the versions of the interpreter, the compiler and the libraries. The garbage collector is enabled, and its
work on a loop's objects is counted.

`--bounds` counts the cases of benchmarks/instructions.toml on grapeshot, and fails if a case exceeds its bound.
CPython's cache of type attributes is indexed by the addresses of names and the version tags of types. If two lookups
of a case share a slot there, each costs some 200 instructions more. Even another length of the checkout's path can
cause that. A count above its bound is therefore repeated with other version tags.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import micro
from benchmarks._load import MeasurementError, Server, run_load
from benchmarks._loops import LOOPS, RAW, available, versions
from benchmarks._machine import ROOT, child_environment, describe

# For each thread, glibc caches freed blocks of up to 1,032 bytes. A larger block costs 200 to 300 instructions,
# depending on what the heap looks like. Echoes stay below this length: a bytes object needs 33 bytes beside its data.
ECHO_SIZE = 960
BOUNDS = Path(__file__).with_name("instructions.toml")
READY_WITHIN_S = 300.0
# A case fails if its count exceeds the bound this many times, each time with other version tags of types.
ATTEMPTS = 10


def valgrind(out: Path | None) -> list[str]:
    """Return the words to put before the command: an empty list for a run that is not counted."""
    return (
        [] if out is None else ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", f"--log-file={out}.log"]
    )


def instructions(out: Path | None) -> int:
    """Return the total of a callgrind file."""
    if out is None:
        return 0
    for line in out.read_text(errors="replace").splitlines():
        if line.startswith(("summary:", "totals:")):
            return int(line.split()[1])
    raise MeasurementError("callgrind wrote no total")


def echo_instructions(
    loop: str, count: int, out: Path | None, *, kind: str = "echo", connections: int = 1
) -> tuple[int, int]:
    """Run a server that answers `count` messages. Return its total instructions, and the count.

    By default there is one connection with one message in flight, so that each echo is one iteration of the loop.
    """
    with Server(kind, loop, under=valgrind(out), ready_within_s=READY_WITHIN_S) as server:
        run_load("echo", server.address, connections=connections, size=ECHO_SIZE, requests=count, stall=READY_WITHIN_S)
    return instructions(out), count


def call_instructions(kind: str, loop: str, rounds: int, out: Path | None) -> tuple[int, int]:
    """Run a process that does this many rounds of calls. Return its total instructions, and the number of calls."""
    command = [*valgrind(out), sys.executable, "-m", "benchmarks.micro", kind, "--loop", loop, "--rounds", str(rounds)]
    outcome = subprocess.run(command, cwd=ROOT, env=child_environment(), stdout=subprocess.PIPE, text=True, check=False)
    if outcome.returncode:
        raise MeasurementError(f"{kind} on {loop} under valgrind ended with {outcome.returncode}")
    return instructions(out), json.loads(outcome.stdout)["operations"]


@dataclass(frozen=True)
class Count:
    title: str
    run: Callable[[str, int, Path | None], tuple[int, int]]
    short: int
    long: int
    with_raw: bool = False
    # The loops that take part; empty means all.
    only: tuple[str, ...] = ()


def _blocking(connections: int) -> Count:
    run = functools.partial(echo_instructions, kind="blocking", connections=connections)
    title = f"coro.sock echo of {ECHO_SIZE} B, {connections}"
    return Count(title, run, 500, 2500, only=("grapeshot",))


def _streams(kind: str, title: str) -> Count:
    run = functools.partial(echo_instructions, kind=kind)
    return Count(f"{title}, echo of {ECHO_SIZE} B", run, 500, 2500)


def _calls(kind: str, title: str) -> Count:
    if kind not in micro.KINDS:
        raise ValueError(kind)
    return Count(title, lambda loop, rounds, out: call_instructions(kind, loop, rounds, out), 4, 16)


COUNTS = {
    "echo": Count(f"Protocol echo of {ECHO_SIZE} B", echo_instructions, 500, 2500, with_raw=True),
    "streams": _streams("streams", "asyncio's streams"),
    "native-streams": _streams("native-streams", "native streams"),
    "blocking-1": _blocking(1),
    "blocking-10": _blocking(10),
    "call-soon-bulk": _calls("call_soon_bulk", "call_soon, bulk"),
    "call-soon-args": _calls("call_soon_args", "call_soon, two arguments"),
    "call-soon-chain": _calls("call_soon_chain", "call_soon, chain"),
    "call-later-cancel": _calls("call_later_cancel", "call_later + cancel"),
}


def per_operation(count: Count, loop: str, folder: Path) -> float:
    count.run(loop, count.short, None)  # run once uncounted, so that the bytecode is written
    short, few = count.run(loop, count.short, folder / "short")
    long, many = count.run(loop, count.long, folder / "long")
    return (long - short) / (many - few)


def interpreter() -> str:
    """Return the version of CPython and of its compiler, because the counts depend on them."""
    return f"{platform.python_version()}, {platform.python_compiler()}"


@contextlib.contextmanager
def version_tags(number: int) -> Iterator[None]:
    """Give types other version tags in child processes: each child first makes `number` types. 0 changes nothing."""
    if not number:
        yield
        return
    before = os.environ.get("PYTHONPATH")
    with tempfile.TemporaryDirectory() as folder:
        code = f"for _ in range({number}):\n    type('Unused', (), {{'name': 1}}).name\n"
        Path(folder, "sitecustomize.py").write_text(code, encoding="utf-8")
        os.environ["PYTHONPATH"] = folder if before is None else f"{folder}{os.pathsep}{before}"
        try:
            yield
        finally:
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before


def fewest(count: Count, bound: float) -> float:
    """Return the instructions per operation. If they exceed the bound, try other version tags and return the
    fewest.
    """
    found = math.inf
    for number in range(ATTEMPTS):
        with version_tags(number), tempfile.TemporaryDirectory() as folder:
            found = min(found, per_operation(count, "grapeshot", Path(folder)))
        if found <= bound:
            break
    return found


def check_bounds(file: Path = BOUNDS) -> int:
    """Count the cases of `file` for this interpreter. Return 1 if a case is above its bound, else 0.

    Raises MeasurementError if a case cannot be counted.
    """
    known = tomllib.loads(file.read_text(encoding="utf-8"))
    bounds = known["interpreter"].get(interpreter())
    if bounds is None:
        print(f"NOT COMPARED: {file.name} has no counts of CPython {interpreter()}", file=sys.stderr)
        return 0
    status = 0
    for name, expected in bounds.items():
        bound, few = expected * (1 + known["tolerance"]), expected * (1 - known["tolerance"])
        found = fewest(COUNTS[name], bound)
        is_above = found > bound
        verdict = "ABOVE THE BOUND" if is_above else "as it was" if found >= few else "fewer: lower the bound"
        print(f"{name:<18} {found:>8,.0f} instructions; {file.name} has {expected:,}: {verdict}", flush=True)
        status |= is_above
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", nargs="+", default=[*LOOPS, RAW], help="default: %(default)s")
    parser.add_argument("--cases", nargs="+", choices=COUNTS, default=list(COUNTS), help="default: all")
    parser.add_argument("--json", type=Path, help="where to write")
    parser.add_argument("--bounds", action="store_true", help="compare with instructions.toml, and count nothing else")
    args = parser.parse_args(arguments)
    if shutil.which("valgrind") is None:
        print("valgrind is not installed", file=sys.stderr)
        return 1
    os.environ["PYTHONHASHSEED"] = "0"
    if args.bounds:
        return check_bounds()
    loops, missing = available(args.loops)
    counted: dict[str, dict[str, float]] = {}
    failures: dict[str, str] = {}
    for name in args.cases:
        count = COUNTS[name]
        counted[name] = {}
        for loop in loops:
            if (loop == RAW and not count.with_raw) or (count.only and loop not in count.only):
                continue
            with tempfile.TemporaryDirectory() as folder:
                try:
                    counted[name][loop] = round(per_operation(count, loop, Path(folder)), 1)
                except MeasurementError as error:
                    failures[f"{name} on {loop}"] = str(error)
                    print(f"!!! {name} FAILED ON {loop}: {error}", file=sys.stderr, flush=True)
                    continue
            print(
                f"{count.title:<28} {loop:<10} {counted[name][loop]:>12,.0f} instructions", file=sys.stderr, flush=True
            )
    result = {
        "machine": describe(),
        "versions": versions(),
        "missing": missing,
        "failures": failures,
        "instructions_per_operation": counted,
    }
    text = json.dumps(result, indent=1) + "\n"
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(text)
    else:
        print(text, end="")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
