"""Measure a Celery worker: `python -m benchmarks.programs.worker POOL`. It starts a Redis server and the worker.

The tasks are in the queue before the worker may take them. Prints `{"cpu_us": ..., "wall_us": ..., "tasks": ...}`, or
`{"unsupported": why}`. The worker's CPU time and the wall time are per task.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks import daemons
from benchmarks._load import MeasurementError
from benchmarks._machine import ROOT, child_environment, cores, on_core
from benchmarks.programs.styles import POOLS

CONCURRENCY = 200
WITHIN_S = 120.0
COMMAND = ("-m", "celery", "-A", "benchmarks.programs.tasks", "worker", "-c", str(CONCURRENCY), "-l", "error")
QUIET = ("--without-mingle", "--without-gossip", "--without-heartbeat")


def wait_until(condition: Callable[[], object], what: str, pause_s: float = 0.005) -> None:
    end = time.monotonic() + WITHIN_S
    while not condition():
        if time.monotonic() > end:
            raise MeasurementError(f"{what} did not end within {WITHIN_S:g} s")
        time.sleep(pause_s)


def measure(pool: str, count: int) -> dict[str, Any]:
    """Let a worker of this pool do `count` tasks."""
    import psutil

    own, other = cores()
    with daemons.redis_server() as address:
        os.environ["BENCH_REDIS"] = f"redis://{address}"
        from benchmarks.programs.tasks import app, store, wait

        environment = child_environment() | {
            "BENCH_REDIS": f"redis://{address}",
            "CELERY_CUSTOM_WORKER_POOL": "grapeshot.coro.celery:TaskPool",
            "C_FORCE_ROOT": "1",
            "GRAPESHOT_LATENCY_WARNING": "0",  # the other pools have no such warning
        }
        command = [sys.executable, "-W", "ignore", *COMMAND, "-P", pool, *QUIET]
        with on_core(own):
            worker = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        try:
            with on_core(other):
                for _ in range(CONCURRENCY):  # these tasks start the pool and open its connections
                    wait.delay()
                wait_until(lambda: int(store.get("done") or 0) == CONCURRENCY, "the first tasks")
                app.control.cancel_consumer("celery", reply=True, timeout=WITHIN_S, limit=1)
                with app.producer_pool.acquire(block=True) as producer:
                    for _ in range(count):
                        wait.apply_async(producer=producer)
                process = psutil.Process(worker.pid)
                before, begin_s = process.cpu_times(), time.perf_counter()
                app.control.add_consumer("celery")
                wait_until(lambda: int(store.get("done")) == CONCURRENCY + count, "the tasks")
                wall_s, after = time.perf_counter() - begin_s, process.cpu_times()
        finally:
            worker.terminate()
            try:
                worker.wait(20)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
    cpu_s = after.user + after.system - before.user - before.system
    return {"cpu_us": cpu_s / count * 1e6, "wall_us": wall_s / count * 1e6, "tasks": count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pool", choices=POOLS.values())
    parser.add_argument("--tasks", type=int, default=2000, help="how many tasks (2000)")
    args = parser.parse_args()
    try:
        print(json.dumps(measure(args.pool, args.tasks)))
    except ImportError as error:
        print(json.dumps({"unsupported": str(error)}))


if __name__ == "__main__":
    main()
