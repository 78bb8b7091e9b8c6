"""Run pyperformance's asyncio benchmarks on each loop: `python -m benchmarks.pyperf`.

The benchmarks are unchanged. Each of their processes first replaces `asyncio.new_event_loop` with the loop's factory.
Prints the mean of each benchmark in ms with its standard deviation. `--json FILE` writes the numbers to a file, too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._load import MeasurementError
from benchmarks._loops import LOOPS, available, versions
from benchmarks._machine import ROOT, cores, describe, on_core

# Each name maps to the benchmark's folder and the arguments of its script.
BENCHMARKS = {
    "async_tree_none": ("bm_async_tree", ["none"]),
    "async_tree_none_tg": ("bm_async_tree", ["none", "--task-groups"]),
    "async_tree_io": ("bm_async_tree", ["io"]),
    "async_tree_memoization": ("bm_async_tree", ["memoization"]),
    "async_tree_cpu_io_mixed": ("bm_async_tree", ["cpu_io_mixed"]),
    "asyncio_tcp": ("bm_asyncio_tcp", []),
    "asyncio_tcp_ssl": ("bm_asyncio_tcp", ["--ssl"]),
    "asyncio_websockets": ("bm_asyncio_websockets", []),
}
# The text of a `sitecustomize` module, which Python imports first in every process; pyperf starts several. The module
# must end the process itself on an error, because Python would only print the error and go on with asyncio's own
# loop.
CUSTOMIZE = """
import os, sys
try:
    import asyncio, asyncio.events
    from benchmarks._loops import loop_factory
    factory = loop_factory(os.environ["BENCHMARKED_LOOP"])
    asyncio.new_event_loop = asyncio.events.new_event_loop = factory
except BaseException as error:
    sys.stderr.write(f"{type(error).__name__}: {error}\\n")
    sys.stderr.flush()
    os._exit(3)
"""
INHERITED = "PYTHONPATH,BENCHMARKED_LOOP"


def folder() -> Path:
    """Return the folder of pyperformance's benchmarks.

    Raises SystemExit when pyperformance is not installed.
    """
    found = importlib.util.find_spec("pyperformance")
    if found is None or found.origin is None:
        raise SystemExit("pyperformance is not installed: pip install pyperformance")
    return Path(found.origin).parent / "data-files" / "benchmarks"


def run(name: str, loop: str, *options: str) -> dict[str, float]:
    """Return mean and standard deviation in ms, and the number of values.

    Raises MeasurementError when the benchmark fails.
    """
    where, words = BENCHMARKS[name]
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "sitecustomize.py").write_text(CUSTOMIZE, encoding="utf-8")
        out = Path(scratch, "out.json")
        paths = [scratch, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "BENCHMARKED_LOOP": loop}
        command = [sys.executable, str(folder() / where / "run_benchmark.py"), *words, *options]
        command += ["--quiet", "--inherit-environ", INHERITED, "-o", str(out)]
        with on_core(cores()[0]):
            done = subprocess.run(command, env=environment, cwd=scratch, capture_output=True, text=True, check=False)
        if done.returncode or not out.exists():
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise MeasurementError(lines[-1])
        suite: dict[str, Any] = json.loads(out.read_text())
    taken = [value * 1e3 for each in suite["benchmarks"][0]["runs"] for value in each.get("values", [])]
    return {"ms": statistics.mean(taken), "stdev": statistics.pstdev(taken), "values": len(taken)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmarks", nargs="*", metavar="BENCHMARK", help=f"default: all of {', '.join(BENCHMARKS)}")
    parser.add_argument("--loops", nargs="+", default=list(LOOPS), help="default: %(default)s")
    parser.add_argument("--fast", action="store_true", help="pyperf's --fast: fewer processes and values")
    parser.add_argument("--json", type=Path, help="where to write")
    args = parser.parse_args()
    for name in args.benchmarks:
        if name not in BENCHMARKS:
            parser.error(f"no benchmark is called {name!r}")
    folder()
    loops, missing = available(args.loops)
    found: dict[str, dict[str, dict[str, float]]] = {}
    failures: dict[str, str] = {}
    for name in args.benchmarks or BENCHMARKS:
        found[name] = {}
        for loop in loops:
            try:
                found[name][loop] = taken = run(name, loop, *(["--fast"] if args.fast else []))
            except MeasurementError as error:
                failures[f"{name} on {loop}"] = str(error)
                print(f"{name:<26} {loop:<10} FAILED: {error}", flush=True)
            else:
                print(f"{name:<26} {loop:<10} {taken['ms']:>9.1f} ms ±{taken['stdev']:.1f}", flush=True)
    if args.json:
        packages = versions(("grapeshot", "uvloop", "zuvloop", "rloop", "pyperformance", "pyperf"))
        result = {"machine": describe(), "versions": packages, "missing": missing, "failures": failures, "ms": found}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
