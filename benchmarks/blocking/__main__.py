"""Compare coros with similar libraries, in blocking-style servers and clients: `python -m benchmarks.blocking [CASE
...]`.

Every run is a fresh process, and the libraries take turns (A B C, then C B A, ...).
"""

from __future__ import annotations

import sys

from benchmarks._loops import RAW
from benchmarks.blocking.cases import ALL, CASES, QUICK, SETTINGS
from benchmarks.blocking.styles import PROTOCOL, TASKS, available
from benchmarks.compare import RESULTS, Suite, main

HOW = (
    "Servers have one cooperative thread (of grapeshot, gevent or runloom) for each connection, which runs "
    "`while data := s.recv(n): s.sendall(data)`. Three other kinds of server are shown for comparison: grapeshot's "
    "Protocols (`protocol`), grapeshot's tasks with `sock_recv` and `sock_sendall` (`tasks`), and epoll without Python "
    "(`raw`). The WSGI servers serve one application that says hello. Clients are unmodified libraries that run "
    "patched, in ten threads of one process; their server sends constant replies and has a core of its own."
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
