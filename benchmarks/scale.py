"""Measure what a loop costs at scale, in this process: `python -m benchmarks.scale KIND --loop LOOP`.

- `idle_timers`: a program that does nothing except run 1,000 timers, each of which fires once a second. Prints
  `{"cpu_ms_per_s": ..., "late_us": median}`: a loop that wakes up less often fires its timers later.
- `pending_timers`: a timer is set and cancelled while `--count` others wait. Prints `{"cpu_ns": per pair, ...}`.
- `two_loops`: a loop in each of two threads, on one port (SO_REUSEPORT); each serves echoes and also runs clients.
  Prints `{"wall_us": per echo of both, "speedup": over one thread}`. It needs an interpreter without the GIL.

A loop that lacks a feature prints `{"unsupported": why}`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import cast

from benchmarks._loops import loop_factory
from benchmarks.daemons import free_port

Loop = asyncio.AbstractEventLoop
IDLE_TIMERS, IDLE_PERIOD_S = 1000, 1.0
PAIRS = 10_000
SIZE, CLIENTS = 1024, 20


def _nothing() -> None:
    pass


def idle_timers(factory: Callable[[], Loop], args: argparse.Namespace) -> dict[str, float]:
    """Measure a loop that is idle except for timers, which are spread evenly over the period."""
    loop = factory()
    fired = 0
    late_s = []

    # Read the system's clock: some loops update their own time only once per poll.
    def fire(due_s: float) -> None:
        nonlocal fired
        fired += 1
        now_s = time.monotonic()
        late_s.append(now_s - due_s)
        loop.call_later(IDLE_PERIOD_S, fire, now_s + IDLE_PERIOD_S)

    try:
        for number in range(IDLE_TIMERS):
            delay_s = IDLE_PERIOD_S * number / IDLE_TIMERS
            loop.call_later(delay_s, fire, time.monotonic() + delay_s)
        # Wait until every timer has fired once: after that, each is set for a whole period.
        loop.run_until_complete(asyncio.sleep(IDLE_PERIOD_S + args.warm_up))
        before, cpu_s, wall_s = fired, time.process_time(), time.perf_counter()
        loop.run_until_complete(asyncio.sleep(args.seconds))
        cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    finally:
        loop.close()
    late_us = statistics.median(late_s[before:]) * 1e6
    return {"cpu_ms_per_s": cpu_s * 1e3 / wall_s, "late_us": late_us, "fired": fired - before, "seconds": wall_s}


def pending_timers(factory: Callable[[], Loop], args: argparse.Namespace) -> dict[str, float]:
    """Set and cancel timers whose deadlines lie between the deadlines of pending timers."""
    loop = factory()
    deadlines = random.Random(1)
    try:
        for _ in range(args.count):
            loop.call_later(deadlines.uniform(60, 120), _nothing)
        rounds = []
        for _ in range(7):
            delays = [deadlines.uniform(60, 120) for _ in range(PAIRS)]
            began = time.process_time_ns()
            for timer in [loop.call_later(delay, _nothing) for delay in delays]:
                timer.cancel()
            rounds.append((time.process_time_ns() - began) / PAIRS)
            loop.call_soon(loop.stop)
            loop.run_forever()
    finally:
        loop.close()
    return {"cpu_ns": sorted(rounds)[len(rounds) // 2], "pending": args.count}


# ---------------------------------------------------------------- loops in threads


class Echo(asyncio.Protocol):
    """Send each piece back."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


class Client(asyncio.Protocol):
    """Send the next message as soon as the previous one has come back."""

    message = bytes(SIZE)

    def __init__(self) -> None:
        self.done = self.received = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.write(self.message)

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        if self.received == SIZE:
            self.received = 0
            self.done += 1
            self.transport.write(self.message)


async def _serve(port: int, together: threading.Barrier, args: argparse.Namespace) -> tuple[float, float]:
    """Return echoes per second of this loop's clients (another loop may answer them), and this thread's CPU usage."""
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(("127.0.0.1", port))
    sock.listen(1024)
    sock.setblocking(False)
    server = await loop.create_server(Echo, sock=sock)
    together.wait()
    clients = [(await loop.create_connection(Client, "127.0.0.1", port))[1] for _ in range(CLIENTS)]
    await asyncio.sleep(args.warm_up)
    before, began, cpu_s = sum(client.done for client in clients), time.perf_counter(), time.thread_time()
    await asyncio.sleep(args.seconds)
    wall_s, cpu_s = time.perf_counter() - began, time.thread_time() - cpu_s
    rate = (sum(client.done for client in clients) - before) / wall_s
    # Go on only when the other threads have measured: this loop may serve their clients.
    await loop.run_in_executor(None, together.wait)
    for client in clients:
        client.transport.abort()
    server.close()
    return rate, cpu_s / wall_s


def _rate(factory: Callable[[], Loop], threads: int, args: argparse.Namespace) -> tuple[float, float]:
    """Return the echoes per second of this many loops together, and the CPU time per echo in us."""
    port, together = free_port(), threading.Barrier(threads)
    rates: list[tuple[float, float]] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=factory) as runner:
                rates.append(runner.run(_serve(port, together, args)))
        except BaseException as error:
            errors.append(error)
            together.abort()

    running = [threading.Thread(target=run) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if errors:
        raise errors[0]
    rate, busy = (sum(part) for part in zip(*rates, strict=True))
    return rate, busy / rate * 1e6


def two_loops(factory: Callable[[], Loop], args: argparse.Namespace) -> dict[str, float]:
    if getattr(sys, "_is_gil_enabled", lambda: True)():
        raise NotImplementedError("the GIL is enabled")
    one, cpu_us_of_one = _rate(factory, 1, args)
    two, cpu_us = _rate(factory, 2, args)
    sample = {"wall_us": 1e6 / two, "rps": two, "speedup": two / one, "cpu_us": cpu_us}
    return sample | {"rps_of_one": one, "cpu_us_of_one": cpu_us_of_one}


KINDS = {"idle_timers": idle_timers, "pending_timers": pending_timers, "two_loops": two_loops}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--loop", required=True, help="grapeshot, uvloop, asyncio or module:factory")
    parser.add_argument("--seconds", type=float, default=1.0, help="measured time (1)")
    parser.add_argument("--warm-up", type=float, default=0.2, help="seconds before the measured time (0.2)")
    parser.add_argument("--count", type=int, default=1000, help="timers that are pending (1000)")
    args = parser.parse_args()
    try:
        outcome: dict[str, object] = {**KINDS[args.kind](loop_factory(args.loop), args)}
    except NotImplementedError as error:
        outcome = {"unsupported": f"{type(error).__name__}: {error}"}
    print(json.dumps(outcome))


if __name__ == "__main__":
    main()
