"""The cases of coros, with their bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks._load import MeasurementError, UnsupportedError
from benchmarks._machine import has_gil
from benchmarks.coros.hubs import HUBS
from benchmarks.coros.styles import TASKS
from benchmarks.measure import Bound, Case, Measure, Sample, Wall, own_sample

OURS, GREENLET, GEVENT, GREENBACK, RUNLOOM = "grapeshot", "greenlet", "gevent", "greenback", "runloom"
ALL = (OURS, GREENLET, GEVENT, RUNLOOM, GREENBACK, TASKS)


@dataclass(frozen=True)
class CoroSettings:
    """How much one run measures."""

    # The CPU time to measure.
    seconds: float = 0.1
    # How many coros (or greenlets, or threads) are suspended when memory is measured.
    threads: int = 20_000


QUICK = CoroSettings(threads=5_000)


def _case(kind: str, title: str, *bounds: Bound, peers: tuple[str, ...], is_memory: bool = False) -> Case:
    def measure(style: str, settings: CoroSettings) -> Sample:
        options = ("--style", style, "--seconds", str(settings.seconds), "--threads", str(settings.threads))
        sample = own_sample("coros.programs", kind, style, *options)
        if style == OURS and sample.get("early"):
            raise MeasurementError(f"{sample['early']} of {sample['sleeps']} sleeps ended too early")
        return sample

    metric, unit = ("kib", "KiB each") if is_memory else ("cpu_ns", "ns CPU")
    return Case(kind.replace("_", "-"), "Coros", title, metric, unit, bounds, measure, only=(OURS, *peers))


def _on_hubs(kind: str, title: str) -> Case:
    def measure(style: str, settings: CoroSettings) -> Sample:
        options = ("--style", style, "--seconds", str(settings.seconds))
        return own_sample("coros.programs", kind, style, *options, is_pinned=False)

    def prepare(styles: Sequence[str], settings: CoroSettings) -> tuple[dict[str, Any], Measure]:
        if has_gil():
            raise UnsupportedError("threads run side by side only in a free-threaded interpreter")
        return {}, measure

    title = f"{title}, on {HUBS} loops or hubs"
    wall = Wall("Coros, wall time", "wall_ns", "ns", ())
    only = (OURS, RUNLOOM)
    return Case(
        kind.replace("_", "-"), "Coros", title, "cpu_ns", "ns CPU", (), measure, only=only, prepare=prepare, wall=wall
    )


GREEN = (GREENLET, GEVENT, RUNLOOM)

CASES: tuple[Case, ...] = (
    _case("yield_alone", "yield and resume, alone", Bound(1.0, RUNLOOM), peers=GREEN),
    _case(
        "yield_shallow",
        "yield and resume, 1,000 of them",
        Bound(0.30, GREENLET),
        Bound(0.15, GEVENT),
        peers=(*GREEN, TASKS),
    ),
    _case("yield_deep", "the same, 20 Python frames deep", Bound(0.25, GREENLET), Bound(1.0, RUNLOOM), peers=GREEN),
    _case("yield_reduce", "the same, inside functools.reduce", Bound(0.45, GREENLET), peers=GREEN),
    _case("yield_sorted", "the same, inside sorted(key=)", Bound(0.60, GREENLET), Bound(1.0, RUNLOOM), peers=GREEN),
    _case("spawn", "spawn and finish", Bound(0.10, GREENLET), Bound(1.0, TASKS), peers=(*GREEN, TASKS)),
    _case("semaphore", "semaphores, there and back", Bound(0.25, GEVENT), peers=(GEVENT,)),
    _case("fifo", "queues, there and back", Bound(0.25, GEVENT), Bound(1.0, RUNLOOM), peers=(GEVENT, RUNLOOM)),
    _case("channel", "channels, there and back", Bound(0.25, GEVENT), Bound(1.0, RUNLOOM), peers=(GEVENT, RUNLOOM)),
    _case("due_together", "one of 10,000 sleeps that end at the same moment", Bound(0.4, GEVENT), peers=GREEN),
    _case("sleepers", "one of 1,000 sleeps of 10 to 20 ms", Bound(0.4, GEVENT), peers=GREEN),
    _case("await_ended", "`await` of a coro or task that has ended", Bound(2000, None), peers=(TASKS,)),
    _case("await_future", "`await_` of a future that is done", Bound(2000, None), peers=(GREENBACK,)),
    _case("await_sleep", "`await_(asyncio.sleep(0))`", peers=(GREENBACK,)),
    _case("idle", "memory, suspended three calls deep", Bound(3.5, None), peers=GREEN, is_memory=True),
    _case("asleep", "memory, asleep three calls deep", peers=GREEN, is_memory=True),
    _on_hubs("yield_hubs", "yield and resume, 1,000 of them"),
    _on_hubs("spawn_hubs", "spawn and finish"),
)
