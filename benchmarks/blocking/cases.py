"""The cases of blocking-style servers and clients, with their bounds."""

from __future__ import annotations

from benchmarks import memory
from benchmarks._loops import RAW
from benchmarks.blocking.styles import GEVENT, OURS, PROTOCOL, RUNLOOM, TASKS
from benchmarks.measure import KIB, Bound, Case, Sample, Settings, load_sample, own_sample

ALL = (OURS, GEVENT, RUNLOOM, PROTOCOL, TASKS, RAW)
SETTINGS = Settings()
QUICK = Settings(idle_connections=2000)

# Servers without a style: the kind of server, and its loop.
OTHERS = {PROTOCOL: ("echo", OURS), TASKS: ("sock", OURS), RAW: ("echo", RAW)}
SOCKETS = {"blocking": "coro.sock", "patched": "patched sockets"}


def _echo(
    size: int, connections: int, *bounds: Bound, kind: str = "blocking", read_len: int, variant: str = ""
) -> Case:
    def measure(who: str, settings: Settings) -> Sample:
        server, loop = OTHERS.get(who, (kind, who))
        serving: dict[str, object] = {} if who in (PROTOCOL, RAW) else {"read_len": read_len}
        options: dict[str, object] = {"size": size, "connections": connections}
        return load_sample(server, "echo", loop, settings, options, serving)

    name = f"{kind}-{size // KIB}k-{connections}{variant}"
    title = f"{SOCKETS[kind]}: echo {size // KIB} KiB, {connections} connections, reads of {read_len // KIB} KiB"
    peers = (GEVENT, RUNLOOM) if kind == "patched" else ALL[1:]
    return Case(name, "Blocking-style servers", title, "cpu_us", "us CPU/request", bounds, measure, only=(OURS, *peers))


def _idle(name: str, title: str, *bounds: Bound, touch_size: int) -> Case:
    def measure(who: str, settings: Settings) -> Sample:
        server, loop = OTHERS.get(who, ("blocking", who))
        return memory.measure(loop, settings.idle_connections, touch_size, kind=server)

    peers = (GEVENT, RUNLOOM, PROTOCOL, TASKS)
    return Case(name, "Memory", title, "kib", "KiB/connection", bounds, measure, only=(OURS, *peers))


# One in 50 messages begins with `b`, for which the server burns CPU in a real thread. Only the latency of the other
# messages counts.
MIXED: dict[str, object] = {"size": 8, "connections": 50, "rate": 250, "other_byte": ord("b"), "every": 50}
BURN_MS = 100


def _mixed() -> Case:
    def measure(who: str, settings: Settings) -> Sample:
        # Run long enough for a meaningful 99th percentile.
        options = MIXED | {"verify_every": 1, "duration": settings.steady_s * 4}
        return load_sample("blocking", "echo", who, settings, options, {"burn_ms": BURN_MS})

    title = f"a light request at 250/s, beside 2 % that burn {BURN_MS} ms of CPU in a real thread"
    bounds = (Bound(20_000, None),)
    return Case("light", "Latency", title, "p99_us", "us p99", bounds, measure, only=(OURS, GEVENT, RUNLOOM))


def _web(kind: str, title: str, bound: Bound, connections: int = 50) -> Case:
    def measure(who: str, settings: Settings) -> Sample:
        return load_sample(kind, "http", who, settings, {"connections": connections, "expect_length": 13})

    title = f"{title}: hello, {connections} connections"
    return Case(f"{kind}-hello", "WSGI", title, "cpu_us", "us CPU/request", (bound,), measure, only=(OURS, GEVENT))


def _client(library: str, title: str) -> Case:
    def measure(who: str, settings: Settings) -> Sample:
        options = ("--style", who, "--seconds", str(settings.seconds))
        return own_sample("blocking.clients", library, who, *options, is_pinned=False)  # it pins itself and the server

    bounds, participants = (Bound(1.0, GEVENT),), (OURS, GEVENT, RUNLOOM)
    return Case(library, "Clients", title, "cpu_ns", "ns CPU/call", bounds, measure, only=participants)


_SMALL = (Bound(0.52, GEVENT), Bound(1.10, PROTOCOL))
_PATCHED = (Bound(0.60, GEVENT),)

CASES: tuple[Case, ...] = (
    _echo(1 * KIB, 10, *_SMALL, read_len=4 * KIB),
    _echo(1 * KIB, 100, *_SMALL, read_len=4 * KIB),
    _echo(1 * KIB, 1000, *_SMALL, read_len=4 * KIB),
    # 256 KiB is the size that asyncio's transports read; 64 KiB is less than one message.
    _echo(100 * KIB, 10, Bound(0.55, GEVENT), read_len=256 * KIB),
    _echo(100 * KIB, 10, Bound(0.55, GEVENT), read_len=64 * KIB, variant="-r64k"),
    _echo(1 * KIB, 10, *_PATCHED, kind="patched", read_len=4 * KIB),
    _echo(1 * KIB, 100, *_PATCHED, kind="patched", read_len=4 * KIB),
    _echo(1 * KIB, 1000, *_PATCHED, kind="patched", read_len=4 * KIB),
    _mixed(),
    _web("wsgi", "coro.wsgi, gevent.pywsgi (which leaves TCP_NODELAY unset)", Bound(0.5, GEVENT)),
    _web("gunicorn", "gunicorn's worker classes", Bound(0.75, GEVENT)),
    _client("requests", "requests, patched: GET with a kept connection"),
    _client("redis", "redis-py, patched: GET"),
    _client("pymysql", "PyMySQL, patched: SELECT of one row"),
    _idle("idle", "an idle connection", Bound(4.5, None), touch_size=0),
    _idle("idle-used", "an idle connection after one message of 1 KiB", touch_size=1024),
)
