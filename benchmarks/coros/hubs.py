"""Measure coros in two loops, each in a thread of its own, and for comparison runloom's fibers on two hubs.

Threads run side by side only without the GIL, so the measurements of this module need a free-threaded interpreter. A
round includes the start and the end of the system's threads, which take about 1 ms of the 50 ms or more that a round
takes. Below, "thread" means a cooperative thread: a coro or a fiber.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from benchmarks._machine import has_gil

HUBS = 2
# The number of threads on all hubs together, and how often each thread yields.
THREADS, TURNS = 1000, 400
# SPAWNED threads are spawned in a round. The spawning thread yields after every BATCH of them.
SPAWNED, BATCH = 100_000, 100

# Calls a function in a thread of each hub, and returns when all threads that the function started have ended.
OnHubs = Callable[[Callable[[], None]], None]
# A function that spawns a thread, and one that yields.
Functions = tuple[Callable[..., object], Callable[[], object]]


def _coros() -> tuple[OnHubs, Functions]:
    from grapeshot import coro

    return lambda main: coro.run(main, threads=HUBS), (coro.spawn, coro.yield_slice)


def _fibers() -> tuple[OnHubs, Functions]:
    import runloom

    def on_hubs(main: Callable[[], None]) -> None:
        def begin() -> None:
            for _ in range(HUBS):
                runloom.fiber(main)

        runloom.run(HUBS, begin)

    return on_hubs, (runloom.fiber, runloom.yield_now)


def _yield(on_hubs: OnHubs, spawn: Callable[..., object], give_way: Callable[[], object]) -> int:
    """Like programs.yield_shallow. Returns the number of operations."""
    ended = []

    def body() -> None:
        for _ in range(TURNS):
            give_way()
        ended.append(None)

    def main() -> None:
        for _ in range(THREADS // HUBS):
            spawn(body)
        for _ in range(TURNS + 10):  # until all of them have ended
            give_way()

    on_hubs(main)
    if len(ended) != THREADS:
        raise AssertionError(f"{len(ended)} of {THREADS} ended")
    return (THREADS + HUBS) * TURNS


def _spawn(on_hubs: OnHubs, spawn: Callable[..., object], give_way: Callable[[], object]) -> int:
    """Like programs.spawn."""

    def body() -> None:
        pass

    def main() -> None:
        for _ in range(SPAWNED // HUBS // BATCH):
            for _ in range(BATCH):
                spawn(body)
            give_way()

    on_hubs(main)
    return SPAWNED


def measure(kind: str, style: str, cpu_s: float) -> dict[str, float]:
    """Run a round that does not count, then rounds until `cpu_s` are spent, at least three. Return the medians.

    Raises NotImplementedError on an interpreter with the GIL.
    """
    if has_gil():
        raise NotImplementedError("the GIL is enabled")
    take, (on_hubs, functions) = KINDS[kind], STYLES[style]()
    take(on_hubs, *functions)
    cpu_ns: list[float] = []
    wall_ns: list[float] = []
    end_ns = time.process_time_ns() + int(cpu_s * 1e9)
    while len(cpu_ns) < 3 or time.process_time_ns() < end_ns:
        cpu_began_ns, wall_began_ns = time.process_time_ns(), time.perf_counter_ns()
        operations = take(on_hubs, *functions)
        cpu_ns.append((time.process_time_ns() - cpu_began_ns) / operations)
        wall_ns.append((time.perf_counter_ns() - wall_began_ns) / operations)
    return {"cpu_ns": statistics.median(cpu_ns), "wall_ns": statistics.median(wall_ns), "rounds": len(cpu_ns)}


STYLES: dict[str, Callable[[], tuple[OnHubs, Functions]]] = {"grapeshot": _coros, "runloom": _fibers}
KINDS = {"yield_hubs": _yield, "spawn_hubs": _spawn}
