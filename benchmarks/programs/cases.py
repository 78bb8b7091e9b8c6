"""The cases of programs for gevent, FastAPI and Celery, with their bounds."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks import daemons
from benchmarks._load import UnsupportedError
from benchmarks.measure import KIB, Bound, Case, Sample, Wall, load_sample, own_sample
from benchmarks.measure import Settings as LoadSettings
from benchmarks.programs.styles import GEVENT_LOOPS, LIBEV, LIBUV, MANY_THREADS, OURS, POOLS, THREADS

AT_ONCE = 1000


@dataclass(frozen=True)
class Settings(LoadSettings):
    """How much one run does."""

    # A load whose requests take 100 ms needs more time than others. The server first opens its connections to Redis.
    slow_s: float = 4.0  # with 40 threads, a request waits for 2.5 seconds
    slow_warm_up_s: float = 2.0
    tasks: int = 1000


QUICK = Settings(tasks=500)


def _gevent(kind: str, title: str, **options: object) -> Case:
    mode = "echo" if kind == "gevent-echo" else "http"

    def measure(style: str, settings: Settings) -> Sample:
        return load_sample(kind, mode, style, settings, {"connections": 50, **options})

    bounds = (Bound(1.0, LIBEV), Bound(1.0, LIBUV))
    return Case(kind, "gevent", title, "cpu_us", "us CPU/request", bounds, measure, only=tuple(GEVENT_LOOPS))


def _fastapi() -> Case:
    def measure(style: str, settings: Settings) -> Sample:
        if not daemons.is_there("redis"):
            raise UnsupportedError("redis-server is not installed")
        options: dict[str, object] = {"connections": AT_ONCE, "expect_length": 13}
        options |= {"duration": settings.slow_s, "warmup": settings.slow_warm_up_s}
        with daemons.redis_server() as address:
            sample = load_sample("fastapi", "http", style, settings, options, {"redis": address})
        return sample | {"wall_us": 1e6 / sample["rps"]}

    peers = (THREADS, MANY_THREADS)
    bounds = tuple(Bound(1.0, peer) for peer in peers)
    return Case(
        "fastapi-def",
        "FastAPI, CPU time",
        f"{AT_ONCE:,} requests at a time to a `def` endpoint that waits 100 ms in Redis",
        "cpu_us",
        "us CPU/request",
        bounds,
        measure,
        only=(OURS, *peers),
        wall=Wall("FastAPI, wall time", "wall_us", "us/request", bounds),
    )


def _celery() -> Case:
    def measure(style: str, settings: Settings) -> Sample:
        if not daemons.is_there("redis"):
            raise UnsupportedError("redis-server is not installed")
        return own_sample("programs.worker", POOLS[style], style, "--tasks", str(settings.tasks), is_pinned=False)

    bounds = tuple(Bound(1.0, peer) for peer in POOLS if peer != OURS)
    return Case(
        "celery-tasks",
        "Celery, CPU time",
        "tasks that wait 50 ms and count themselves in Redis, 200 at a time",
        "cpu_us",
        "us CPU/task",
        bounds,
        measure,
        only=tuple(POOLS),
        wall=Wall("Celery, wall time", "wall_us", "us/task", bounds),
    )


CASES: tuple[Case, ...] = (
    _gevent("gevent-echo", "StreamServer: echo 1 KiB, 50 connections", size=KIB),
    _gevent("gevent-pywsgi", "pywsgi: hello, 50 connections", expect_length=13),
    _fastapi(),
    _celery(),
)
