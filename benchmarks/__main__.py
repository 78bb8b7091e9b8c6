"""Compares everything: the loops, coros and blocking-style servers: `python -m benchmarks [CASE ...]`. See README.md.

Every run is a fresh process; the peers alternate within one run (A B C, then C B A, ...). Writes a JSON and a table of
each of the three, and one HTML page. Peers that are not installed are named and left out.
"""

from __future__ import annotations

import sys

from benchmarks.blocking.__main__ import SUITE as BLOCKING_SUITE
from benchmarks.compare import LOOP_SUITE, main
from benchmarks.coros.__main__ import SUITE as CORO_SUITE

if __name__ == "__main__":
    sys.exit(main(suites=(LOOP_SUITE, CORO_SUITE, BLOCKING_SUITE), description=__doc__))
