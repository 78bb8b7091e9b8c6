"""The cases of programs for gevent, eventlet, FastAPI, Django and Celery, with their bounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks import daemons
from benchmarks._load import Server, UnsupportedError, run_load
from benchmarks._machine import peak_kib
from benchmarks.measure import KIB, Bound, Case, Sample, Wall, load_sample, own_sample
from benchmarks.measure import Settings as LoadSettings
from benchmarks.programs.styles import (
    ASYNCIO_HUB,
    EPOLL_HUB,
    GEVENT_LOOPS,
    LIBEV,
    LIBUV,
    MANY_THREADS,
    OURS,
    POOLS,
    REQUEST_THREADS,
    THREADS,
    UVLOOP_HUB,
)

# How many requests are under way. For Django it is less than the 100 connections that PostgreSQL accepts.
AT_ONCE = {"fastapi": 1000, "django": 80}


@dataclass(frozen=True)
class Settings(LoadSettings):
    """How much one run does."""

    # A load whose requests take 100 ms needs more time than others, and a longer warm-up, in which its server opens
    # connections to a database.
    slow_s: float = 4.0  # with 40 threads, 1,000 requests of 100 ms take 2.5 seconds
    slow_warm_up_s: float = 2.0
    tasks: int = 1000


QUICK = Settings(tasks=500)


def _gevent(kind: str, title: str, **options: object) -> Case:
    mode = "echo" if kind == "gevent-echo" else "http"

    def measure(style: str, settings: Settings) -> Sample:
        return load_sample(kind, mode, style, settings, {"connections": 50, **options})

    bounds = (Bound(1.0, LIBEV), Bound(1.0, LIBUV))
    return Case(kind, "gevent", title, "cpu_us", "us CPU/request", bounds, measure, only=tuple(GEVENT_LOOPS))


def _eventlet() -> Case:
    def measure(style: str, settings: Settings) -> Sample:
        return load_sample("eventlet-echo", "echo", style, settings, {"connections": 50, "size": KIB})

    peers = (EPOLL_HUB, ASYNCIO_HUB, UVLOOP_HUB)
    bounds = (Bound(1.0, ASYNCIO_HUB),)
    title = "serve: echo 1 KiB, 50 connections"
    return Case("eventlet-echo", "eventlet", title, "cpu_us", "us CPU/request", bounds, measure, only=(OURS, *peers))


@contextmanager
def _database(kind: str) -> Iterator[dict[str, object]]:
    """Start the database of the application. Yield the option that tells the application where the database is."""
    if kind == "fastapi":
        if not daemons.is_there("redis"):
            raise UnsupportedError("redis-server is not installed")
        with daemons.redis_server() as address:
            yield {"redis": address}
    else:
        if not daemons.is_there("asyncpg"):
            raise UnsupportedError("PostgreSQL is not installed")
        with daemons.postgres_server() as folder:
            yield {"postgres": folder}


def _load_of(kind: str, settings: Settings) -> dict[str, object]:
    options: dict[str, object] = {"connections": AT_ONCE[kind], "expect_length": 13}
    return options | {"duration": settings.slow_s, "warmup": settings.slow_warm_up_s}


def _blocking(kind: str, title: str, peer: str, references: tuple[str, ...] = ()) -> tuple[Case, Case]:
    """Return two cases for requests to a blocking function: one for CPU and wall time, and one for memory."""

    def measure(style: str, settings: Settings) -> Sample:
        with _database(kind) as serving:
            sample = load_sample(kind, "http", style, settings, _load_of(kind, settings), serving)
        return sample | {"wall_us": 1e6 / sample["rps"]}

    def measure_memory(style: str, settings: Settings) -> Sample:
        with _database(kind) as serving, Server(kind, style, serving) as server:
            before = peak_kib(server.pid)
            run_load("http", server.address, **_load_of(kind, settings))
            return {"memory_kib": (peak_kib(server.pid) - before) / AT_ONCE[kind]}

    name = {"fastapi": "FastAPI", "django": "Django"}[kind]
    bounds = (Bound(1.0, peer),)
    only = (OURS, peer, *references)
    wall = Wall(f"{name}, wall time", "wall_us", "us/request", bounds)
    memory, memory_title = f"{name}, memory", f"{title}: the growth of the peak memory, per request under way"
    return (
        Case(
            f"{kind}-def",
            f"{name}, CPU time",
            title,
            "cpu_us",
            "us CPU/request",
            bounds,
            measure,
            only=only,
            references=references,
            wall=wall,
        ),
        Case(
            f"{kind}-memory",
            memory,
            memory_title,
            "memory_kib",
            "KiB",
            bounds,
            measure_memory,
            only=only,
            references=references,
        ),
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
    _eventlet(),
    *_blocking(
        "fastapi",
        f"{AT_ONCE['fastapi']:,} requests at a time to a `def` endpoint that waits 100 ms in Redis",
        MANY_THREADS,
        references=(THREADS,),
    ),
    *_blocking(
        "django",
        f"{AT_ONCE['django']} requests at a time to an async view whose ORM waits 100 ms in PostgreSQL",
        REQUEST_THREADS,
    ),
    _celery(),
)
