"""Compare coros with similar libraries: `python -m benchmarks.coros [CASE ...]`. See benchmarks/README.md.

Every run is a fresh process, and the libraries take turns (A B C, then C B A, ...).
"""

from __future__ import annotations

import sys

from benchmarks.compare import RESULTS, Suite, main
from benchmarks.coros.cases import ALL, CASES, QUICK, CoroSettings
from benchmarks.coros.styles import available

HOW = (
    "CPU time per operation. greenlet has no scheduler, so it runs with a hub written in Python (a deque of ready "
    "greenlets, a heap of timers). gevent and runloom run without patching. `tasks` are asyncio's tasks on grapeshot's "
    "loop, and greenback runs in such a task."
)

SUITE = Suite(
    cases=CASES,
    loops=ALL,
    available=available,
    packages=("grapeshot", "greenlet", "gevent", "runloom", "greenback"),
    settings=CoroSettings(),
    quick=QUICK,
    committed=RESULTS / "coros.json",
    has_load=False,
    page={"heading": "# Coros", "how": HOW},
)

if __name__ == "__main__":
    sys.exit(main(suites=(SUITE,), description=__doc__))
