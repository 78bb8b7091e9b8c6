"""Compares coros with their peers: `python -m benchmarks.coros [CASE ...]`. See README.md.

Every run is a fresh process; the peers alternate within one run (A B C, then C B A, ...).
"""

from __future__ import annotations

import sys

from benchmarks.compare import RESULTS, Suite, main
from benchmarks.coros.cases import ALL, CASES, QUICK, CoroSettings
from benchmarks.coros.styles import available

HOW = (
    "CPU time per operation. greenlet runs behind a hub written in Python (a deque of what is ready, a heap of "
    "timers), gevent and runloom unpatched; tasks are asyncio's, in grapeshot's loop, and greenback runs in one of "
    "them."
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
