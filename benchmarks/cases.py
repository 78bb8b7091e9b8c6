"""The cases that compare loops, each with its bounds. They are servers under closed-loop load, single calls, memory,
and the start of a process. `services.py` has more cases, which `CASES` includes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks import memory, micro, servers, services, startup
from benchmarks._loops import RAW
from benchmarks.measure import KIB, PEER, Bound, Case, Sample, Settings, load_case, own_sample


@dataclass(frozen=True)
class Echo:
    """A kind of echo server, and how to load it."""

    title: str
    group: str = "Network"
    mode: str = "echo"
    with_raw: bool = False
    is_tls: bool = False
    of: str = "connections"


ECHOES = {
    "echo": Echo("Protocol echo", with_raw=True),
    "buffered": Echo("BufferedProtocol echo"),
    "tls": Echo("TLS echo", group="TLS", with_raw=True, is_tls=True),
    "unix": Echo("unix echo", with_raw=True),
    "udp": Echo("UDP echo", mode="datagrams", with_raw=True, of="sockets"),
    "sock": Echo("sock_* echo"),
    "streams": Echo("streams echo"),
    # On other loops these are asyncio's streams.
    "native-streams": Echo("streams (native) echo"),
}


def _echo(
    size: int,
    connections: int,
    *,
    kind: str = "echo",
    depth: int | None = None,
    at_most: float | None,
    raw: float | None = None,
    variant: str = "",
    note: str = "",
    coalesce: bool = False,
    read_len: int | None = None,
) -> Case:
    """Build an echo case. To distinguish it from the usual case of the same size, `variant` is appended to its name,
    and `note` to its title.
    """
    echo = ECHOES[kind]
    size_text = f"{size // KIB} KiB" if size >= KIB else f"{size} B"
    name = f"{kind}-{size_text.partition(' ')[0]}{'k' if size >= KIB else ''}-{connections}"
    title = f"{echo.title} {size_text}, {connections} {echo.of}"
    if depth is not None:
        name, title = f"{name}-p{depth}", f"{title}, pipelined {depth} deep"
    limits = ((at_most, PEER), (raw, RAW))
    return load_case(
        name + variant,
        title + note,
        tuple(Bound(most, peer) for most, peer in limits if most is not None),
        kind=kind,
        mode=echo.mode,
        group=echo.group,
        with_raw=echo.with_raw,
        size=size,
        connections=connections,
        depth=depth,
        tls=echo.is_tls,
        coalesce=coalesce,
        serving=None if read_len is None else {"read_len": read_len},
    )


def _split(name: str, by: str, *, kind: str) -> Case:
    return load_case(
        name,
        f"a reply of {servers.SPLIT_REPLY_LEN} B in 4 writes{by}, 100 connections",
        (Bound(0.46),),
        kind=kind,
        mode="reply",
        size=servers.SPLIT_REQUEST_LEN,
        reply_size=servers.SPLIT_REPLY_LEN,
        connections=100,
    )


def _micro(name: str, title: str, at_most: float | None) -> Case:
    def measure(loop: str, settings: Settings) -> Sample:
        return own_sample("micro", name, loop, "--loop", loop, "--seconds", str(settings.micro_s))

    if name not in micro.KINDS:
        raise ValueError(name)
    bounds = () if at_most is None else (Bound(at_most),)
    return Case(name.replace("_", "-"), "Calls", title, "cpu_ns", "ns CPU/operation", bounds, measure)


def _memory(name: str, title: str, bounds: tuple[Bound, ...], touch_size: int) -> Case:
    def measure(loop: str, settings: Settings) -> Sample:
        return memory.measure(loop, settings.idle_connections, touch_size)

    return Case(name, "Memory", title, "kib", "KiB/connection", bounds, measure)


def _startup() -> Case:
    def measure(loop: str, settings: Settings) -> Sample:
        return startup.measure(loop, settings.startup_pairs)

    title = "import, new loop, one iteration, close (beyond `import asyncio`)"
    return Case("startup", "Start", title, "beyond_ms", "ms CPU", (Bound(0.5),), measure, references=("asyncio",))


# The loops with aiofastnet's transports take part in these cases, and in all cases of TLS.
WITH_AIOFASTNET = ["echo-1k-10", "echo-100k-10", "streams-1k-100", "streams-100k-10", "split-4", "aiohttp", "uvicorn"]

_CASES: tuple[Case, ...] = (
    _echo(128, 10, at_most=0.88),
    _echo(128, 100, at_most=0.88),
    _echo(1 * KIB, 10, at_most=0.88, raw=1.15),
    _echo(1 * KIB, 100, at_most=0.88, raw=1.15),
    _echo(1 * KIB, 1000, at_most=0.88, raw=1.15),
    _echo(10 * KIB, 10, at_most=0.88),
    _echo(10 * KIB, 100, at_most=0.88),
    _echo(10 * KIB, 1000, at_most=0.88),
    _echo(1 * KIB, 10, depth=16, at_most=0.88),
    _echo(1 * KIB, 100, depth=16, at_most=0.88),
    _echo(100 * KIB, 10, at_most=0.92),
    _echo(100 * KIB, 100, at_most=0.92),
    _echo(1 * KIB, 100, kind="buffered", at_most=0.80),
    _echo(100 * KIB, 10, kind="buffered", at_most=0.95),
    _echo(1 * KIB, 10, kind="unix", at_most=0.82),
    _echo(1 * KIB, 100, kind="unix", at_most=0.82),
    _echo(1 * KIB, 10, kind="udp", at_most=0.72),
    _echo(1 * KIB, 50, kind="udp", at_most=0.72),
    _echo(1 * KIB, 100, kind="sock", at_most=0.42, note=", reads of 64 KiB"),
    # 256 KiB is the size that asyncio's own transports read; 64 KiB is less than one message.
    _echo(100 * KIB, 10, kind="sock", at_most=0.32, read_len=256 * KIB, note=", reads of 256 KiB"),
    _echo(100 * KIB, 10, kind="sock", at_most=None, variant="-r64k", note=", reads of 64 KiB"),
    _echo(1 * KIB, 100, kind="streams", at_most=0.80),
    _echo(100 * KIB, 10, kind="streams", at_most=0.75),
    _echo(1 * KIB, 100, kind="native-streams", at_most=0.70),
    _echo(100 * KIB, 10, kind="native-streams", at_most=0.75),
    _split("split-4", "", kind="split"),
    _split("split-4-task", " by a task", kind="split-task"),
    load_case(
        "connect-close",
        "connect, one message of 64 B, close, 50 at a time",
        (Bound(0.85),),
        kind="echo",
        mode="churn",
        with_raw=True,
        size=64,
        connections=50,
    ),
    load_case(
        "aiohttp",
        "aiohttp hello, 50 connections",
        (Bound(0.85),),
        kind="aiohttp",
        mode="http",
        group="HTTP",
        connections=50,
        expect_length=13,
    ),
    load_case(
        "uvicorn",
        "uvicorn + httptools hello, 50 connections",
        (Bound(0.85),),
        kind="uvicorn",
        mode="http",
        group="HTTP",
        connections=50,
        expect_length=13,
    ),
    _echo(1 * KIB, 10, kind="tls", at_most=0.33),
    _echo(1 * KIB, 100, kind="tls", at_most=0.33),
    _echo(10 * KIB, 10, kind="tls", at_most=0.40),
    _echo(10 * KIB, 100, kind="tls", at_most=0.40),
    _echo(100 * KIB, 10, kind="tls", at_most=0.52),
    _echo(100 * KIB, 100, kind="tls", at_most=0.52),
    _echo(
        100 * KIB,
        10,
        kind="tls",
        at_most=None,
        variant="-whole",
        note=", each message in one send",
        coalesce=True,
    ),
    load_case(
        "tls-handshake",
        "TLS 1.3: connect, full handshake, close, 50 at a time",
        (Bound(1.0),),
        kind="tls",
        mode="handshake",
        group="TLS",
        with_raw=True,
        connections=50,
    ),
    _micro("call_soon_bulk", "call_soon, bulk", 0.45),
    _micro("call_soon_args", "call_soon, two arguments", 0.52),
    _micro("call_soon_chain", "call_soon, chain", 0.42),
    _micro("call_later_cancel", "call_later + cancel", 0.20),
    _micro("call_later_zero", "call_later(0)", 0.55),
    _micro("due_timers", "due timers", 0.35),
    _micro("pending_thousand", "set and cancel a thousand timers", None),
    _micro("pending_million", "set and cancel a million timers", None),
    _micro("sleep_zero", "sleep(0), one task", 0.60),
    _micro("future_wake_up", "future wake-up", 0.58),
    _micro("create_task", "create_task", 0.88),
    _micro("threadsafe_1", "call_soon_threadsafe from 1 thread", 0.50),
    _micro("threadsafe_4", "call_soon_threadsafe from 4 threads", 0.50),
    _micro("sock_pair", "sock_sendall + sock_recv over a socketpair", 0.14),
    _micro("watch_writer", "add_writer, its event, remove_writer", None),
    _micro("getaddrinfo_literal", "getaddrinfo of an address literal", 0.12),
    _micro("getaddrinfo_typed", "the same with type=SOCK_STREAM", None),
    _micro("run_in_executor", "run_in_executor", 0.90),
    _micro("spawn", "a subprocess started and waited for (the parent's CPU)", 0.40),
    _memory("idle", "an idle connection", (Bound(0.6, None),), 0),
    _memory("idle-used", "an idle connection after one message of 1 KiB", (), 1024),
    _startup(),
    *services.CASES,
)
CASES = tuple(replace(case, with_aiofastnet=case.group == "TLS" or case.name in WITH_AIOFASTNET) for case in _CASES)
