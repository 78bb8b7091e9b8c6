"""Measure one call of an unmodified blocking library: `python -m benchmarks.blocking.clients LIBRARY --style STYLE`.

Each of THREADS patched threads has a client, and makes calls in a loop. The server is a separate process with constant
replies (`canned.py`). Prints `{"cpu_ns": per call, ...}`, or `{"unsupported": why}`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.blocking.styles import GEVENT, OURS, RUNLOOM

THREADS, CALLS = 10, 20

# Makes a client of the server on this port, and returns a function that does one call.
Connect = Callable[[int], Callable[[], object]]


def requests(port: int) -> Callable[[], object]:
    import requests

    session, url = requests.Session(), f"http://127.0.0.1:{port}/hello"
    session.trust_env = False  # otherwise most of a call is spent looking for proxies and passwords
    return lambda: session.get(url).text


def redis(port: int) -> Callable[[], object]:
    import redis

    client = redis.Redis(host="127.0.0.1", port=port, protocol=2, decode_responses=True)
    return lambda: client.get("key")


def pymysql(port: int) -> Callable[[], object]:
    import pymysql

    connection = pymysql.connect(host="127.0.0.1", port=port, user="u", password="p", ssl_disabled=True)

    def call() -> object:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 'hello'")
            return cursor.fetchone()[0]

    return call


LIBRARIES: dict[str, Connect] = {"requests": requests, "redis": redis, "pymysql": pymysql}

Run = Callable[[Callable[[], Any]], Any]


def patched_coros() -> Run:
    from grapeshot import coro

    coro.patch()
    coro.set_latency_warning(0)  # the other styles have no such warning
    return coro.run


def patched_gevent() -> Run:
    from gevent import monkey

    monkey.patch_all()
    return lambda program: program()


def patched_runloom() -> Run:
    import runloom

    runloom.monkey.patch()
    outcome: list[Any] = []

    def run(program: Callable[[], Any]) -> Any:
        runloom.run(1, lambda: outcome.append(program()))
        return outcome[0]

    return run


STYLES: dict[str, Callable[[], Run]] = {OURS: patched_coros, GEVENT: patched_gevent, RUNLOOM: patched_runloom}


def program(connect: Connect, port: int, cpu_s: float) -> dict[str, float]:
    import threading

    from benchmarks.coros.rounds import Stopwatch, Taken, measure

    calls = [connect(port) for _ in range(THREADS)]

    def work(call: Callable[[], object], failed: list[object]) -> None:
        try:
            failed += [got for _ in range(CALLS) if (got := call()) != "hello"]
        except Exception as exc:
            failed.append(exc)

    def take() -> Taken:
        failed: list[object] = []
        threads = [threading.Thread(target=work, args=(call, failed)) for call in calls]
        stopwatch = Stopwatch()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise AssertionError(f"expected 'hello', got {failed[0]!r}")
        return stopwatch.taken(THREADS * CALLS)

    return measure(take, cpu_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("--style", required=True, choices=STYLES)
    parser.add_argument("--seconds", type=float, default=0.7, help="CPU seconds to measure (0.7)")
    args = parser.parse_args()
    if importlib.util.find_spec(args.library) is None:
        print(json.dumps({"unsupported": f"no module {args.library}"}))
        return
    run = STYLES[args.style]()  # patch before the library is imported
    from benchmarks._load import Child
    from benchmarks._machine import cores, on_core

    own, other = cores()
    with Child([sys.executable, "-m", "benchmarks.blocking.canned", args.library], other) as server, on_core(own):
        port: int = server.ready["port"]
        print(json.dumps(run(lambda: program(LIBRARIES[args.library], port, args.seconds))))


if __name__ == "__main__":
    main()
