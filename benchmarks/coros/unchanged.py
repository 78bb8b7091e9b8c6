"""What coros cost programs without coros, in instructions: `python -m benchmarks.coros.unchanged --before FOLDER`.

FOLDER is the `python` folder of an older package, with its extension built as for a release. Each kind of call is
counted with the older package, with the current one, and with the current one in a process in which a coro has run. As
in `benchmarks.callgrind`, each program runs twice, short and long, and the difference counts. Needs Linux and valgrind.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import grapeshot
from benchmarks import micro
from benchmarks._machine import ROOT, child_environment, describe
from benchmarks.callgrind import instructions, valgrind

KINDS = (
    "call_soon_bulk",
    "call_soon_chain",
    "call_later_cancel",
    "due_timers",
    "sleep_zero",
    "future_wake_up",
    "create_task",
)
SHORT, LONG = 4, 16
PLAIN = "from benchmarks import micro; micro.main()"
WITH_COROS = f"from grapeshot import coro; coro.run(coro.yield_slice); {PLAIN}"


def count(kind: str, package: Path, program: str, rounds: int, out: Path | None) -> tuple[int, int]:
    """Return a process's number of instructions (not counted without `out`) and of calls, for a number of rounds."""
    command = [*valgrind(out), sys.executable, "-c", program, kind, "--loop", "grapeshot", "--rounds", str(rounds)]
    environment = child_environment() | {"PYTHONPATH": f"{package}:{ROOT}", "PYTHONHASHSEED": "0"}
    # Not in the repository, because its own package would be imported instead.
    folder = tempfile.gettempdir()
    outcome = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return instructions(out), json.loads(outcome.stdout)["operations"]


def per_call(kind: str, package: Path, program: str) -> float:
    with tempfile.TemporaryDirectory() as name:
        count(kind, package, program, 1, None)  # the very first run writes the bytecode files
        short, few = count(kind, package, program, SHORT, Path(name) / "short")
        long, many = count(kind, package, program, LONG, Path(name) / "long")
    return round((long - short) / (many - few), 1)


def markdown(result: dict[str, Any]) -> str:
    """Return the counts as a table."""
    lines = [
        "### What coros cost programs that do not use them",
        "",
        f"Instructions per call of the loop, counted by callgrind. *Before* is revision {result['before']}, which had "
        f"no coros. *Now* is revision {result['machine']['revision']}, and *with coros* is the same revision in a "
        "process in which a coro has run.",
        "",
        "| | before | now | with coros |",
        "| --- | ---: | ---: | ---: |",
    ]
    for kind, counted in result["instructions_per_call"].items():
        cells = [f"{counted[name]:,.0f}" for name in ("before", "now", "with_coros")]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="the `python` folder of the older package")
    parser.add_argument("--revision", required=True, help="the name of its revision in the JSON")
    parser.add_argument("--kinds", nargs="+", choices=micro.KINDS, default=KINDS)
    parser.add_argument("--json", type=Path, help="where to write")
    args = parser.parse_args()
    now = Path(grapeshot.__file__).resolve().parents[1]
    counted = {}
    for kind in args.kinds:
        counted[kind] = {
            "before": per_call(kind, args.before.resolve(), PLAIN),
            "now": per_call(kind, now, PLAIN),
            "with_coros": per_call(kind, now, WITH_COROS),
        }
        print(f"{kind:<20}", counted[kind], file=sys.stderr, flush=True)
    result = {"machine": describe(), "before": args.revision, "instructions_per_call": counted}
    text = json.dumps(result, indent=1) + "\n"
    if args.json:
        args.json.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
