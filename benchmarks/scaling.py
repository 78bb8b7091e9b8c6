"""One, two or more workers behind one port: `python -m benchmarks.scaling --write benchmarks/results/scaling.json`.

A request costs about a millisecond of Python. The service is one process with one loop; processes, each with a socket
of its own (SO_REUSEPORT); and, without the GIL, threads, each with a loop and a socket of its own. All of them run, and
are loaded in turn for half a second, many times, so that what else the machine does meets all alike. Clients of this
process keep each worker busy.

Each turn gives the CPU time per request, and the requests per second of the time in which a worker ran or had nothing
to do. The time in which it was ready and other programs had the cores does not count (Linux: schedstat in /proc). Rows
of other versions of Python stay in the file; `--table` prints it as Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import signal
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import psutil

import grapeshot
from benchmarks._machine import ROOT, describe
from benchmarks.daemons import free_port

CLIENTS = 32
WORK = 20_000
START_CAP_S = 30.0
WARM_UP = 3


# ---------------------------------------------------------------- the service, in a process of its own


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while line := await reader.readline():
        total = 0
        for number in range(WORK):
            total += number
        writer.write(line)
    writer.close()


async def listen(port: int) -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", port, reuse_port=True)
    await server.serve_forever()


def work(port: int) -> None:
    grapeshot.run(listen(port))


def serve(kind: str, count: int, port: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    start: Any = threading.Thread if kind == "threads" else multiprocessing.get_context("spawn").Process
    workers = [start(target=work, args=(port,), daemon=True) for _ in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


# ---------------------------------------------------------------- the load


async def client(port: int, until_s: float) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    done = 0
    while time.perf_counter() < until_s:
        writer.write(b"request\n")
        await reader.readline()
        done += 1
    writer.close()
    await writer.wait_closed()
    return done


async def load(port: int, seconds: float) -> tuple[int, float]:
    began = time.perf_counter()
    done = await asyncio.gather(*(client(port, began + seconds) for _ in range(CLIENTS)))
    return sum(done), time.perf_counter() - began


def listeners(service: psutil.Process, port: int) -> int:
    """How many listening sockets the processes of the service have on the port."""
    found = 0
    for process in [service, *service.children(recursive=True)]:
        connections = process.net_connections("tcp")
        found += sum(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in connections)
    return found


def thread_times(service: psutil.Process) -> dict[str, tuple[int, int]]:
    """For each thread of the service the nanoseconds in which it ran, and in which it was ready and others ran."""
    found = {}
    for process in [service, *service.children(recursive=True)]:
        for file in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
            ran, waited, _ = map(int, file.read_text().split())
            found[file.parent.name] = (ran, waited)
    return found


class Service:
    """The service with some workers, in a process of its own."""

    def __init__(self, kind: str, count: int) -> None:
        self._port = free_port()
        command = [sys.executable, "-m", "benchmarks.scaling", "--serve", kind, "--workers", str(count)]
        self._process = subprocess.Popen([*command, "--port", str(self._port)], cwd=ROOT)
        self._seen = psutil.Process(self._process.pid)
        give_up_s = time.monotonic() + START_CAP_S
        while listeners(self._seen, self._port) < count:
            if time.monotonic() > give_up_s:
                self.close()
                raise TimeoutError(f"{count} {kind} do not listen")
            time.sleep(0.05)

    def measure(self, seconds: float) -> tuple[float, float]:
        """One turn: requests per second that the workers were let run, and CPU microseconds per request."""
        before = thread_times(self._seen)
        done, wall_s = grapeshot.run(load(self._port, seconds))
        after = thread_times(self._seen)
        spent = [
            (ran - before[key][0], waited - before[key][1]) for key, (ran, waited) in after.items() if key in before
        ]
        total_ns = sum(ran for ran, _ in spent)
        rate = sum(done * ran / total_ns / (wall_s - waited / 1e9) for ran, waited in spent)
        return rate, total_ns / 1e3 / done

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


# ---------------------------------------------------------------- the report


def kinds(count: int) -> dict[str, tuple[str, int]]:
    found = {"1 process": ("processes", 1), f"{count} processes": ("processes", count)}
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        found[f"{count} threads"] = ("threads", count)
    return found


def run(count: int, rounds: int, seconds: float) -> dict[str, Any]:
    rows: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds(count)}
    with contextlib.ExitStack() as stack:
        services = {}
        for name, kind in kinds(count).items():
            services[name] = Service(*kind)
            stack.callback(services[name].close)
        for number in range(rounds + WARM_UP):
            for name, service in services.items():
                measured = service.measure(seconds)
                if number >= WARM_UP:
                    rows[name].append(measured)
    return {"machine": describe(), "rounds": rounds, "seconds": seconds, "rows": rows}


def spread(values: list[float], digits: int) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def table(results: dict[str, Any]) -> str:
    """Rates as ratios to the one process of the same round, and CPU time: medians, with the quartiles."""
    lines = ["| Python | workers | requests per second, 1 process = 1 | CPU per request, us |", "|---|---|---|---|"]
    for python, result in sorted(results.items()):
        alone = [rate for rate, _ in result["rows"]["1 process"]]
        for name, rounds in result["rows"].items():
            ratios = [rate / base for (rate, _), base in zip(rounds, alone, strict=True)]
            ratio = "1" if name == "1 process" else spread(ratios, 2)
            lines.append(f"| {python} | {name} | {ratio} | {spread([cpu_us for _, cpu_us in rounds], 0)} |")
    return "\n".join([*lines, "", *textwrap.wrap(note(results), 130)]) + "\n"


def note(results: dict[str, Any]) -> str:
    """What was measured where."""
    machines = [result["machine"] for result in results.values()]
    versions = " and ".join(f"{machine['python']}{'t' * machine['free_threaded']}" for machine in machines)
    loads = " and ".join(f"{machine['load_average'][0]:.0f}" for machine in machines)
    turns = " and ".join(dict.fromkeys(f"{each['rounds']} turns of {each['seconds']} s" for each in results.values()))
    return (
        f"CPython {versions} on {machines[0]['cores']} cores ({machines[0]['processor']}) that others used, too (load "
        f"average {loads}); medians of {turns} in alternation, with the quartiles."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="One, two or more workers behind one port.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--write", type=Path, help="a JSON file; the rows of this Python are replaced in it")
    parser.add_argument("--table", type=Path, help="print such a file as Markdown, and measure nothing")
    parser.add_argument("--serve", choices=["processes", "threads"], help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.workers, options.port)
        return
    if options.table:
        print(table(json.loads(options.table.read_text(encoding="utf-8"))), end="")
        return
    result = run(options.workers, options.rounds, options.seconds)
    suffix = "t" if result["machine"]["free_threaded"] else ""
    python = ".".join(result["machine"]["python"].split(".")[:2]) + suffix
    results = {python: result}
    if options.write:
        before = json.loads(options.write.read_text(encoding="utf-8")) if options.write.exists() else {}
        results = {**before, python: result}
        options.write.write_text(f"{json.dumps(results, indent=1)}\n", encoding="utf-8")
    print(table(results), end="")


if __name__ == "__main__":
    main()
