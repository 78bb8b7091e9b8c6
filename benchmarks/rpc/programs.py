"""Put one peer under one load, in two processes: `python -m benchmarks.rpc.programs call --peer NAME`.

Prints a sample: the CPU time per call, of client and server together, as the median of the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks._machine import ROOT
from benchmarks.rpc.peers import PEERS, Round

ROUNDS = 5


def _cpu_ns_of(pid: int) -> int:
    """Return the CPU time of all threads of a process, from the clock that clock_getcpuclockid(3) names on Linux."""
    return time.clock_gettime_ns(~pid << 3 | 2)


@contextlib.contextmanager
def _server(peer: str) -> Iterator[tuple[int, int]]:
    """Start a fresh server; yield its process id and port."""
    command = [sys.executable, "-m", "benchmarks.rpc.programs", "serve", "--peer", peer]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.pid, int(process.stdout.readline())
        finally:
            process.kill()


def serve(peer: str) -> None:
    PEERS[peer]().serve(lambda port: print(port, flush=True))


def call(peer: str, callers: int, size: int, cpu_s: float) -> dict[str, float]:
    """Measure rounds that take about `cpu_s` in all, after a warm-up of a quarter of that."""
    taken: list[tuple[float, float]] = []

    with _server(peer) as (pid, port):

        def measure(take: Round) -> None:
            def timed(count: int) -> tuple[float, float]:
                client_ns, server_ns = time.process_time_ns(), _cpu_ns_of(pid)
                take(count)
                calls = count * callers * 1000
                return (time.process_time_ns() - client_ns) / calls, (_cpu_ns_of(pid) - server_ns) / calls

            count, spent_s = 1, 0.0
            while spent_s < cpu_s / 4:
                each_us = sum(timed(count))
                spent_s += each_us * count * callers / 1e6
                count = max(1, int(cpu_s / ROUNDS / (each_us * callers / 1e6)))
            taken.extend(timed(count) for _ in range(ROUNDS))

        PEERS[peer]().drive(port, callers, bytes(size), measure)
    client_us, server_us = (statistics.median(column) for column in zip(*taken, strict=True))
    return {
        "cpu_us": statistics.median(map(sum, taken)),
        "client_us": client_us,
        "server_us": server_us,
        "rounds": len(taken),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["serve", "call"])
    parser.add_argument("--peer", required=True, choices=PEERS)
    parser.add_argument("--callers", type=int, default=100)
    parser.add_argument("--bytes", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=1.0)
    args = parser.parse_args()
    if args.what == "serve":
        serve(args.peer)
    else:
        print(json.dumps(call(args.peer, args.callers, args.bytes, args.seconds)))


if __name__ == "__main__":
    main()
