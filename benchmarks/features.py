"""Find out which features each loop has: `python -m benchmarks.features` (`--help`).

Every probe (benchmarks/probes) runs on each of the loops, each time in a new process, until it fails or has succeeded
`--rounds` times. The peers have to be installed (`pip install uvloop zuvloop rloop`); if one is missing, nothing is
tested. `--free-threaded` names a free-threaded interpreter, with the same packages, for the probe that needs one.
feature_table.py makes docs/features.md from the JSON (`make tables`).
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import probes
from benchmarks._loops import available, loop_factory, versions
from benchmarks._machine import ROOT, describe

LOOPS = ("asyncio", "uvloop", "zuvloop", "rloop", "grapeshot")
FREE_THREADED = "gil_stays_off"  # the probe that needs a free-threaded interpreter
TIMEOUT_S = 30.0


def why_not(name: str, loop: str, certificate_folder: Path, python: str = sys.executable) -> str | None:
    """Return None if the probe succeeds on that loop, else what went wrong."""
    command = [python, "-W", "ignore", "-m", "benchmarks.features", "--certificate", str(certificate_folder)]
    try:
        done = subprocess.run(
            [*command, "--probe", name, loop], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "hangs"
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"the process is ended by signal {-done.returncode}"
    lines = [line for line in done.stderr.splitlines() if line and not line[0].isspace()]
    return lines[-1] if lines else f"exit status {done.returncode}"


def ask(names: list[str], folder: Path, rounds: int, python: str = sys.executable) -> dict[str, dict[str, str | None]]:
    """Return `{probe: {loop: None or the reason}}`."""
    found: dict[str, dict[str, str | None]] = {}
    for name in names:
        found[name] = {}
        for loop in LOOPS:
            reasons = (why_not(name, loop, folder, python) for _ in range(rounds))
            found[name][loop] = next((reason for reason in reasons if reason is not None), None)
            print(f"{name}: {loop}: {found[name][loop] or 'yes'}", flush=True)
    return found


def required_pythons() -> dict[str, str]:
    """Return the Python versions that each package says it needs."""
    return {loop: importlib.metadata.metadata(loop)["Requires-Python"] for loop in LOOPS if loop != "asyncio"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the outcomes to this file")
    parser.add_argument("--free-threaded", help="an interpreter without the GIL that has the same loops")
    parser.add_argument("--rounds", type=int, default=3, help="how many times each probe has to succeed")
    parser.add_argument("--certificate", type=Path, help="a folder with cert.pem and key.pem (default: a new one)")
    parser.add_argument("--probe", nargs=2, metavar=("PROBE", "LOOP"), help="one probe, in this process; no table")
    args = parser.parse_args()
    if args.probe:
        probes.certificate_folder = args.certificate
        name, loop = args.probe
        probes.every_probe()[name](loop_factory(loop))
        return

    from benchmarks._load import certificate

    _, missing = available(LOOPS)
    if missing:
        sys.exit("nothing is written, because the table needs all of the loops")
    folder = args.certificate or Path(certificate())
    names = [name for name in probes.every_probe() if name != FREE_THREADED]
    outcomes = ask(names, folder, args.rounds)
    if args.free_threaded:
        outcomes |= ask([FREE_THREADED], folder, args.rounds, args.free_threaded)
    packages = versions()
    result: dict[str, Any] = {
        "taken": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": describe(),
        "versions": {loop: packages[loop] for loop in LOOPS if loop in packages},
        "requires_python": required_pythons(),
        "outcomes": outcomes,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
