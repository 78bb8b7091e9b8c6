"""Compares blocking-style servers and clients with their peers: `python -m benchmarks.blocking [CASE ...]`.

Every run is a fresh process; the peers alternate within one run (A B C, then C B A, ...).
"""

from __future__ import annotations

import sys

from benchmarks._loops import RAW
from benchmarks.blocking.cases import ALL, CASES, QUICK, SETTINGS
from benchmarks.blocking.styles import PROTOCOL, TASKS, available
from benchmarks.compare import RESULTS, Suite, main

HOW = (
    "Servers have one cooperative thread for each connection: "
    "grapeshot's coros, gevent's and runloom's, which run `while data := s.recv(n): s.sendall(data)`. Beside them "
    "stand grapeshot's Protocols (protocol) and its tasks with `sock_recv` and `sock_sendall` (tasks), and epoll "
    "without Python (raw). The WSGI servers serve one application that says hello. Clients are unmodified "
    "libraries, patched, in ten threads of one process; their server has constant replies and a core of its own."
)

SUITE = Suite(
    cases=CASES,
    loops=ALL,
    available=available,
    packages=("grapeshot", "gevent", "greenlet", "runloom"),
    settings=SETTINGS,
    quick=QUICK,
    committed=RESULTS / "blocking.json",
    has_load=True,
    references=(PROTOCOL, TASKS, RAW),
    page={"heading": "# Blocking-style servers", "how": HOW},
)

if __name__ == "__main__":
    sys.exit(main(suites=(SUITE,), description=__doc__))
