"""Well-known HTTP load tools. Where they are installed, they cross-check our own load generator."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks._load import MeasurementError, Server
from benchmarks._machine import cores, on_core
from benchmarks.measure import Sample

CONNECTIONS = 50
UNITS_US = {"us": 1.0, "ms": 1e3, "s": 1e6, "m": 60e6}


def in_us(text: str) -> float:
    """Convert a time as the tools write it, for example `1.25ms`."""
    found = re.fullmatch(r"([\d.]+)(us|ms|s|m)", text)
    if found is None:
        raise MeasurementError(f"{text!r} is not a time like 1.25ms")
    return float(found[1]) * UNITS_US[found[2]]


def _search(pattern: str, output: str, tool: str) -> re.Match[str]:
    found = re.search(pattern, output)
    if found is None:
        raise MeasurementError(f"{tool}'s output has nothing that matches {pattern!r}")
    return found


def parse_wrk(output: str) -> Sample:
    """Parse wrk's output. Raises MeasurementError for a failed request."""
    if wrong := re.search(r"Non-2xx or 3xx responses: \d+|Socket errors: .*", output):
        raise MeasurementError(f"wrk: {wrong[0]}")
    requests, seconds = _search(r"(\d+) requests in ([\d.]+)s", output, "wrk").groups()
    sample: Sample = {"requests": int(requests), "seconds": float(seconds)}
    for name, percent in (("p50_us", "50%"), ("p90_us", "90%"), ("p99_us", "99%")):
        sample[name] = in_us(_search(rf"\n\s+{percent}\s+(\S+)", output, "wrk")[1])
    return sample


def parse_h2load(output: str) -> Sample:
    """Parse h2load's output, of which the latencies are not used. Raises MeasurementError if requests failed."""
    seconds = in_us(_search(r"finished in (\S+),", output, "h2load")[1]) / 1e6
    succeeded, failed = _search(r"(\d+) succeeded, (\d+) failed", output, "h2load").groups()
    # h2load's number of failed requests includes those that were under way at the end, at most one per connection.
    if int(failed) > CONNECTIONS:
        raise MeasurementError(f"h2load: {failed} requests failed")
    return {"requests": int(succeeded), "seconds": seconds}


def parse_oha(output: str) -> Sample:
    """Parse oha's output. Raises MeasurementError for a failed request."""
    report = json.loads(output)
    statuses = report["statusCodeDistribution"]
    errors = {name: count for name, count in report["errorDistribution"].items() if "deadline" not in name}
    if errors or set(statuses) != {"200"}:
        raise MeasurementError(f"oha: statuses {statuses}, errors {errors}")
    sample: Sample = {"requests": statuses["200"], "seconds": report["summary"]["total"]}
    percentiles = report["latencyPercentiles"]
    return sample | {f"{name}_us": percentiles[name] * 1e6 for name in ("p50", "p90", "p99")}


@dataclass(frozen=True)
class Tool:
    # Returns the arguments before the URL, for a load of this many whole seconds.
    words: Callable[[int], list[str]]
    parse: Callable[[str], Sample]
    version: tuple[str, ...]


TOOLS = {
    "wrk": Tool(lambda s: ["-t1", f"-c{CONNECTIONS}", f"-d{s}s", "--latency"], parse_wrk, ("-v",)),
    "h2load": Tool(
        lambda s: ["--h1", "-t1", f"-c{CONNECTIONS}", f"-D{s}", "--warm-up-time=0"], parse_h2load, ("--version",)
    ),
    "oha": Tool(
        lambda s: ["-z", f"{s}s", "-c", str(CONNECTIONS), "--no-tui", "--output-format", "json"],
        parse_oha,
        ("--version",),
    ),
}


def version(name: str) -> str | None:
    """Return the tool's name and version, or None if it is not installed."""
    if shutil.which(name) is None:
        return None
    said = subprocess.run([name, *TOOLS[name].version], capture_output=True, text=True, check=False)
    found = re.search(r"\d+\.\d+[.\d]*", said.stdout + said.stderr)
    return f"{name} {found[0]}" if found else name


def cpu_s(pid: int) -> float:
    """Return the CPU time of another process in seconds. On Linux, the id of its CPU clock contains the pid."""
    return time.clock_gettime((~pid << 3) | 2)


def sample(name: str, kind: str, loop: str, seconds: float) -> Sample:
    """Load one fresh server with the tool. There is no warm-up, so the numbers include the first requests."""
    tool = TOOLS[name]
    whole_s = max(1, round(seconds))
    with Server(kind, loop) as server:
        command = [name, *tool.words(whole_s), f"http://{server.address}/"]
        with on_core(cores()[1]):
            load = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        before_s = cpu_s(server.pid)
        output = load.communicate()[0]
        spent_s = cpu_s(server.pid) - before_s
        if load.returncode:
            raise MeasurementError(f"{name} ended with {load.returncode}: {output.strip()[-200:]}")
    found = tool.parse(output)
    if not found["requests"]:
        raise MeasurementError(f"{name} saw no reply")
    return found | {"rps": found["requests"] / found["seconds"], "cpu_us": spent_s / found["requests"] * 1e6}
