"""Servers of the benchmarks and clients for them, and made-up results of comparisons."""

from __future__ import annotations

import socket
import sys

from benchmarks import digest
from benchmarks._load import Child
from benchmarks.measure import Bound

MESSAGE = bytes(range(256)) * 8
CAP_S = 30.0


def server(kind, *options):
    return Child([sys.executable, "-m", "benchmarks.servers", kind, "--loop", "asyncio", *options], None)


def connect(address, kind=socket.SOCK_STREAM):
    family, target = socket.AF_UNIX, address.removeprefix("unix:")
    if target == address:
        host, _, port = address.rpartition(":")
        family, target = socket.AF_INET, (host, int(port))
    sock = socket.socket(family, kind)
    sock.settimeout(CAP_S)
    sock.connect(target)
    return sock


def receive(sock, length):
    data = b""
    while len(data) < length and (piece := sock.recv(65536)):
        data += piece
    return data


def outcome(name, samples, bound=None, **others):
    """Return the row that `digest.row` makes of a case. `samples` has the runs of each loop. A run is a dict, or only
    its value of `cpu_ns`.
    """
    row = {"name": name, "group": "Calls", "title": f"title of {name}", "metric": "cpu_ns", "unit": "ns"}
    row |= {"bounds": [] if bound is None else [vars(Bound(bound))], "failures": {}, "unsupported": {}}
    row |= {"peers": [loop for loop in samples if loop not in ("grapeshot", "raw")], "revision": "r1"}
    runs = {
        loop: [value if isinstance(value, dict) else {"cpu_ns": value} for value in taken]
        for loop, taken in samples.items()
    }
    return digest.row(row | {"samples": runs} | others, has_curves=True)


def comparison(*outcomes, **others):
    machine = {"processor": "one", "cores": 2, "system": "Linux", "python": "3.14.0", "python_compiler": "GCC"}
    machine |= {"free_threaded": False, "revision": "r1"}
    settings = {"runs": 3, "seconds": 0.7, "warm_up_s": 0.4, "spin": False, "server_core": 1, "load_core": 0}
    made = {"schema": 1, "taken": "then", "took_s": 10, "machine": machine, "settings": settings, "missing": {}}
    made |= {"versions": {"grapeshot": "1", "uvloop": "2"}, "loops": ["grapeshot", "uvloop"], "cases": list(outcomes)}
    return made | others


GOOD = {"grapeshot": [40, 50, 60] * 5, "uvloop": [100] * 15}
