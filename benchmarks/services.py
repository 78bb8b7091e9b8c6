"""Cases from the life of a service: tail latency at a constant rate, light clients beside heavy ones, client
libraries, large numbers of connections and timers, and loops in two threads. This module also adds cases of HTTP,
websockets and TLS under closed-loop load. Some of these use other load tools.

`cases.py` has the other cases that compare loops.
"""

from __future__ import annotations

import contextlib
import functools
import py_compile
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks import daemons, tools
from benchmarks._load import MeasurementError, Server, UnsupportedError, load_beside, run_load
from benchmarks._loops import RAW
from benchmarks._machine import ROOT, has_gil
from benchmarks.measure import (
    KIB,
    Bound,
    Case,
    Measure,
    Sample,
    Settings,
    load_case,
    load_sample,
    own_sample,
    sample_of,
)

# The cases of this module have no bounds, only a verdict, which takes all peers into account.
NO_BOUNDS: tuple[Bound, ...] = ()

# ---------------------------------------------------------------- a constant rate


@functools.cache
def _capacity(kind: str, mode: str, loop: str, settings: Settings, options: tuple[tuple[str, object], ...]) -> float:
    """Return the requests per second under closed-loop load: the median of three short runs."""
    short = replace(settings, seconds=min(settings.seconds, 0.4), warm_up_s=min(settings.warm_up_s, 0.2))
    return statistics.median(load_sample(kind, mode, loop, short, dict(options))["rps"] for _ in range(3))


def _steady(
    name: str, title: str, percent: int, *, kind: str, mode: str, with_raw: bool = False, **options: object
) -> Case:
    """Build a case that measures latencies under a load of `percent` % of what the slowest loop can do."""

    def prepare(loops: Sequence[str], settings: Settings) -> tuple[dict[str, Any], Measure]:
        fixed = tuple(options.items())
        capacity = {}
        for loop in loops:
            # A loop that fails here fails again when it is measured, and is reported then.
            with contextlib.suppress(MeasurementError, UnsupportedError):
                if loop != RAW:
                    capacity[loop] = _capacity(kind, mode, loop, settings, fixed)
        if not capacity:
            raise MeasurementError("no loop can do this")
        slowest = min(capacity, key=lambda loop: capacity[loop])
        rate = round(capacity[slowest] * percent / 100)
        kept = {"rate_rps": rate, "slowest": slowest}
        return kept, functools.partial(measure, rate)

    def measure(rate: int, loop: str, settings: Settings) -> Sample:
        return load_sample(kind, mode, loop, settings, {**options, "rate": rate, "duration": settings.steady_s})

    title = f"{title}, at {percent} % of the slowest loop's capacity"
    return Case(
        f"{name}-{percent}%",
        "Constant rate",
        title,
        "p99_us",
        "us p99",
        NO_BOUNDS,
        no_measure,
        with_raw,
        prepare=prepare,
    )


def no_measure(loop: str, settings: Settings) -> Sample:
    """A placeholder for cases whose `prepare` returns the measurement."""
    raise NotImplementedError


def _steady_rows() -> list[Case]:
    rows = []
    for percent in (50, 80):
        rows += [
            _steady(
                "rate-echo",
                "Protocol echo 1 KiB, 50 connections",
                percent,
                kind="echo",
                mode="echo",
                with_raw=True,
                connections=50,
                size=KIB,
            ),
            _steady(
                "rate-uvicorn", "uvicorn hello, 50 connections", percent, kind="uvicorn", mode="http", connections=50
            ),
            _steady(
                "rate-aiohttp", "aiohttp hello, 50 connections", percent, kind="aiohttp", mode="http", connections=50
            ),
        ]
    return rows


# ---------------------------------------------------------------- sharing a loop with others

LIGHT: dict[str, object] = {"size": 64, "connections": 4, "rate": 500}
HEAVY: dict[str, object] = {"size": 100 * KIB, "connections": 8, "depth": 2}
BURNING: dict[str, object] = {"connections": 100, "rate": 250, "path": "/", "other_path": "/burn", "every": 50}


def _light_among_heavy() -> Case:
    def measure(loop: str, settings: Settings) -> Sample:
        window: dict[str, object] = {"duration": settings.steady_s, "warmup": settings.warm_up_s}
        # The heavy load begins before the light one and ends after it.
        heavy_s = settings.warm_up_s + settings.steady_s + 0.5
        with Server("echo", loop) as server, load_beside("echo", server.address, **HEAVY | {"duration": heavy_s}):
            return sample_of(run_load("echo", server.address, **LIGHT | window | {"cpu_of": server.pid}))

    title = "64 B echo at 500/s, while 8 connections echo 100 KiB"
    return Case("light-among-heavy", "Sharing", title, "p99_us", "us p99", NO_BOUNDS, measure, with_raw=True)


def _burning() -> Case:
    def measure(loop: str, settings: Settings) -> Sample:
        options = BURNING | {"duration": max(1.0, settings.steady_s), "expect_length": 13}
        return load_sample("aiohttp", "http", loop, settings, options)

    title = "aiohttp at 250/s, beside 2 % of requests that compute for 100 ms in the executor"
    return Case("burning-executor", "Sharing", title, "p99_us", "us p99", NO_BOUNDS, measure)


# ---------------------------------------------------------------- clients


def _client(kind: str, title: str) -> Case:
    """Build a case that measures the client's process. The server, on the other core, is the same for all loops."""

    def measure(loop: str, settings: Settings) -> Sample:
        options = ("--loop", loop, "--seconds", str(settings.seconds), "--warm-up", str(settings.warm_up_s))
        if kind == "aiohttp":
            with Server("uvicorn", "grapeshot", is_measured=False) as served:
                return own_sample("clients", kind, loop, *options, "--address", served.address)
        with daemons.SERVERS[kind]() as address:
            return own_sample("clients", kind, loop, *options, "--address", address)

    def prepare(loops: Sequence[str], settings: Settings) -> tuple[dict[str, Any], Measure]:
        if kind != "aiohttp" and not daemons.is_there(kind):
            raise UnsupportedError(f"the server of {kind} is not installed")
        return {}, measure

    unit = "us CPU/operation"
    return Case(f"client-{kind}", "Clients", title, "cpu_us", unit, NO_BOUNDS, no_measure, prepare=prepare)


# ---------------------------------------------------------------- many of something


def _pending_timers(count: int) -> Case:
    """Build a case for 1,000 pending timers, or for `settings.many_timers` if `count` is not 1,000."""

    def measure(loop: str, settings: Settings) -> Sample:
        many = count if count == 1000 else settings.many_timers
        return own_sample("scale", "pending_timers", loop, "--loop", loop, "--count", str(many))

    name, text = ("timers-1k", "1,000") if count == 1000 else ("timers-1m", "1,000,000")
    title = f"a timer set and cancelled while {text} are pending"
    grown_from = None if count == 1000 else "timers-1k"
    return Case(name, "Scale", title, "cpu_ns", "ns CPU/operation", NO_BOUNDS, measure, grown_from=grown_from)


def _many_connections() -> Case:
    def measure(loop: str, settings: Settings) -> Sample:
        options: dict[str, object] = {"size": KIB, "connections": settings.many_connections}
        # A longer warm-up, so that every connection is used at least once before the measurement.
        return load_sample("echo", "echo", loop, settings, options | {"warmup": settings.warm_up_s + 0.3})

    title = "Protocol echo 1 KiB, 8,000 connections"
    unit = "us CPU/request"
    return Case("echo-1k-8000", "Scale", title, "cpu_us", unit, NO_BOUNDS, measure, True, grown_from="echo-1k-100")


def _idle_timers() -> Case:
    def measure(loop: str, settings: Settings) -> Sample:
        return own_sample(
            "scale",
            "idle_timers",
            loop,
            "--loop",
            loop,
            "--seconds",
            str(settings.steady_s),
            "--warm-up",
            str(settings.warm_up_s),
        )

    title = "idle but for 1,000 timers, each once a second"
    return Case("idle-timers", "Scale", title, "cpu_ms_per_s", "ms CPU/s", NO_BOUNDS, measure)


def _two_loops(name: str, kind: str, style: str, title: str, unit: str, *options: str) -> Case:
    def measure(loop: str, settings: Settings) -> Sample:
        arguments = ("--style", style, "--seconds", str(settings.seconds), *options)
        return own_sample("threads", kind, loop, "--loop", loop, *arguments, is_pinned=False)

    def prepare(loops: Sequence[str], settings: Settings) -> tuple[dict[str, Any], Measure]:
        if has_gil():
            raise UnsupportedError("threads run side by side only in a free-threaded interpreter")
        # Compile threads.py before the measured process imports it: only then are its constants immortal (see the end
        # of threads.py).
        py_compile.compile(str(ROOT / "benchmarks" / "threads.py"), doraise=True)
        return {}, measure

    return Case(name, "Two threads", title, "wall_us", f"us wall/{unit}", NO_BOUNDS, no_measure, prepare=prepare)


def _two_loop_rows() -> list[Case]:
    shared = "two loops, one port (SO_REUSEPORT): echo 1 KiB, with its clients"
    apart = "two loops, a port each: echo 1 KiB, with its clients"
    return [
        _two_loops("two-loops", "echo", "protocols", f"{shared}, Protocols", "echo"),
        _two_loops("two-loops-streams", "echo", "streams", f"{shared}, streams", "echo"),
        _two_loops("two-loops-coros", "echo", "coros", f"{shared}, coro.sock", "echo"),
        _two_loops("two-loops-apart", "echo", "protocols", f"{apart}, Protocols", "echo", "--apart"),
        _two_loops("two-loops-apart-streams", "echo", "streams", f"{apart}, streams", "echo", "--apart"),
        _two_loops("two-loops-apart-coros", "echo", "coros", f"{apart}, coro.sock", "echo", "--apart"),
        _two_loops("between-loops", "items", "protocols", "items from one loop to another, tasks", "item"),
        _two_loops("between-loops-coros", "items", "coros", "items from one loop to another, coros", "item"),
        _two_loops(
            "answers-between-loops", "answers", "protocols", "an item and its answer between two loops, tasks", "item"
        ),
        _two_loops(
            "answers-between-loops-coros", "answers", "coros", "an item and its answer between two loops, coros", "item"
        ),
    ]


# ---------------------------------------------------------------- other load tools


def _with_tool(name: str) -> Case:
    def measure(loop: str, settings: Settings) -> Sample:
        return tools.sample(name, "uvicorn", loop, settings.steady_s)

    def prepare(loops: Sequence[str], settings: Settings) -> tuple[dict[str, Any], Measure]:
        tool = tools.version(name)
        if tool is None:
            raise UnsupportedError(f"{name} is not installed")
        return {"tool": tool}, measure

    title = f"uvicorn + httptools hello, {tools.CONNECTIONS} connections, loaded by {name}"
    return Case(f"uvicorn-{name}", "HTTP", title, "cpu_us", "us CPU/request", NO_BOUNDS, no_measure, prepare=prepare)


CASES: tuple[Case, ...] = (
    load_case(
        "aiohttp-10k",
        "aiohttp, bodies of 10 KiB, 50 connections",
        kind="aiohttp",
        mode="http",
        group="HTTP",
        serving={"body_len": 10 * KIB},
        connections=50,
        expect_length=10 * KIB,
    ),
    load_case(
        "uvicorn-10k",
        "uvicorn + httptools, bodies of 10 KiB, 50 connections",
        kind="uvicorn",
        mode="http",
        group="HTTP",
        serving={"body_len": 10 * KIB},
        connections=50,
        expect_length=10 * KIB,
    ),
    load_case(
        "websockets",
        "websockets echo 1 KiB, 50 connections",
        kind="websockets",
        mode="websocket",
        group="HTTP",
        connections=50,
        size=KIB,
    ),
    *(_with_tool(name) for name in tools.TOOLS),
    load_case(
        "tls-resume",
        "TLS 1.3: connect, resumed handshake, close, 50 at a time",
        kind="tls",
        mode="handshake",
        group="TLS",
        with_raw=True,
        connections=50,
        resume=True,
    ),
    *_steady_rows(),
    _light_among_heavy(),
    _burning(),
    _client("aiohttp", "aiohttp client, 50 GET at a time"),
    _client("redis", "redis-py, SET and GET, 10 at a time"),
    _client("asyncpg", "asyncpg, a prepared SELECT on each of 10 connections"),
    _many_connections(),
    _pending_timers(1000),
    _pending_timers(1_000_000),
    _idle_timers(),
    *_two_loop_rows(),
)
