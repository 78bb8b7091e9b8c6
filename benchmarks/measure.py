"""The parts from which cases are built: what one run of one loop measures, and how.

A sample is the result of one run: a dict of numbers. If the load has a constant rate, the sample also has a latency
curve. `Case.metric` names the number that is compared; less is better.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks._load import MeasurementError, Server, UnsupportedError, run_load
from benchmarks._machine import ROOT, child_environment, cores, on_core

Sample = dict[str, Any]
# Called with the loop and the settings; returns the sample.
Measure = Callable[[str, Any], Sample]
PEER = "uvloop"
KIB = 1024
# A process that measures itself usually ends within seconds; the largest cases take longer on a slow machine.
OWN_SAMPLE_S = 300.0


@dataclass(frozen=True)
class Settings:
    """The length and the size of one run. Many short runs say more than a few long ones: one process of a program may
    be slower than another for its whole life, and only runs in new processes show how large this difference is.
    """

    seconds: float = 0.1
    warm_up_s: float = 0.05
    micro_s: float = 0.05
    idle_connections: int = 4000
    startup_pairs: int = 2
    # The duration of runs that need more time, such as a load at a constant rate: a tail latency needs more requests
    # than an average does.
    steady_s: float = 0.4
    # The number of connections and of pending timers in the cases about scale.
    many_connections: int = 8000
    many_timers: int = 1_000_000
    spin: bool = False


@dataclass(frozen=True)
class Bound:
    """The most that grapeshot may need: a ratio to a peer, or (without a peer) a number in the case's own unit."""

    at_most: float
    peer: str | None = PEER


@dataclass(frozen=True)
class Wall:
    """The wall time of a case's runs, which gets a row of its own beside the row of their CPU time."""

    group: str
    metric: str
    unit: str
    bounds: tuple[Bound, ...]


@dataclass(frozen=True)
class Case:
    name: str
    group: str
    title: str
    metric: str
    unit: str
    bounds: tuple[Bound, ...]
    measure: Measure
    # Whether the raw server takes part.
    with_raw: bool = False
    # The loops that take part; empty means all.
    only: tuple[str, ...] = ()
    # Loops that are shown for reference and are not peers in this case, in addition to the references of the suite.
    references: tuple[str, ...] = ()
    # Runs once, before the first run, for all loops that take part. Returns facts to keep (the rate of a load, the load
    # tool's version) and the function to use instead of `measure`.
    prepare: Callable[[Sequence[str], Any], tuple[dict[str, Any], Measure]] | None = None
    # Whether loops with the transports of aiofastnet take part.
    with_aiofastnet: bool = False
    # The name of the case with the same load at a smaller scale; the notes show the ratio of this case to that one.
    grown_from: str | None = None
    # A second row from the same runs.
    wall: Wall | None = None


def load_sample(
    kind: str,
    mode: str,
    loop: str,
    settings: Settings,
    options: dict[str, object],
    serving: dict[str, object] | None = None,
) -> Sample:
    """Put one fresh server under one load. CPU per request is the main number; throughput and latency are also kept.

    `options` are options of the load generator; they override those derived from the settings.
    """
    with Server(kind, loop, serving) as server:
        window: dict[str, object] = {"duration": settings.seconds, "warmup": settings.warm_up_s, "spin": settings.spin}
        return sample_of(run_load(mode, server.address, **window | {"cpu_of": server.pid} | options))


def sample_of(report: dict[str, Any]) -> Sample:
    """Return the sample for a report of the load generator.

    Raises MeasurementError if the load got no reply.
    """
    if not report["requests"]:
        raise MeasurementError("not a single reply came in the measured time")
    latency_us = report["latency_us"]
    sample: Sample = {f"{name}_us": latency_us[name] for name in ("p50", "p90", "p99", "p999", "max")}
    sample |= {name: report[name] for name in ("rps", "requests", "seconds")}
    sample |= {name: report[name] for name in ("resent", "unanswered") if report[name]}
    if report["rate"] is not None:
        sample["curve_us"] = report["curve_us"]
    if report["load_cpu_s"] is not None:
        sample["load_busy"] = report["load_cpu_s"] / report["seconds"]
    if report["server_cpu_s"] is not None:
        sample["server_busy"] = report["server_cpu_s"] / report["seconds"]
        sample["cpu_us"] = report["server_cpu_s"] / report["requests"] * 1e6
    return sample


def own_sample(
    module: str, kind: str, loop: str, *options: str, is_pinned: bool = True, within_s: float = OWN_SAMPLE_S
) -> Sample:
    """Run one fresh process that measures itself. `options` are options of the module `benchmarks.<module>`.

    Raises MeasurementError if the process fails or does not end in time. So if one loop hangs, the case still has the
    results of the others.
    """
    command = [sys.executable, "-m", f"benchmarks.{module}", kind, *options]
    with on_core(cores()[0] if is_pinned else None):
        process = subprocess.Popen(command, cwd=ROOT, env=child_environment(), stdout=subprocess.PIPE, text=True)
    try:
        output = process.communicate(timeout=within_s)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise MeasurementError(f"{kind} on {loop} did not end within {within_s:g} s") from None
    if process.returncode:
        raise MeasurementError(f"{kind} on {loop} ended with {process.returncode}")
    sample: Sample = json.loads(output)
    if "unsupported" in sample:
        raise UnsupportedError(sample["unsupported"])
    return sample


def load_case(
    name: str,
    title: str,
    bounds: tuple[Bound, ...] = (),
    *,
    kind: str,
    mode: str,
    group: str = "Network",
    with_raw: bool = False,
    grown_from: str | None = None,
    serving: dict[str, object] | None = None,
    **options: object,
) -> Case:
    """Build a case of a closed-loop load. `serving` are options of the server; all other options go to the load
    generator.
    """

    def measure(loop: str, settings: Settings) -> Sample:
        return load_sample(kind, mode, loop, settings, options, serving)

    return Case(name, group, title, "cpu_us", "us CPU/request", bounds, measure, with_raw, grown_from=grown_from)
