"""Compare loops, coros and blocking-style servers: `python -m benchmarks [CASE ...]`. See README.md.

Every run is a fresh process, and the peers take turns (A B C, then C B A, ...). Each of the three suites writes a
JSON file and prints a table, and all of them together make one HTML page. A peer that is not installed is reported and
left out.
"""

from __future__ import annotations

import sys

from benchmarks.blocking.__main__ import SUITE as BLOCKING_SUITE
from benchmarks.compare import LOOP_SUITE, main
from benchmarks.coros.__main__ import SUITE as CORO_SUITE

if __name__ == "__main__":
    sys.exit(main(suites=(LOOP_SUITE, CORO_SUITE, BLOCKING_SUITE), description=__doc__))
