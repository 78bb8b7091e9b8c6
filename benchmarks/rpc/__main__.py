"""Compare grapeshot.rpc with similar libraries: `python -m benchmarks.rpc [CASE ...]`. See README.md.

Every run is a fresh pair of processes, and the libraries take turns (A B C, then C B A, ...).
"""

from __future__ import annotations

import sys

from benchmarks.compare import RESULTS, Suite, main
from benchmarks.rpc.cases import ALL, CASES, QUICK, RpcSettings
from benchmarks.rpc.peers import COROS, ON_ASYNCIO, available

HOW = (
    "CPU time per call, of a fresh client and a fresh server together. All calls of a run use one connection on the "
    "loopback interface. `grapeshot` is grapeshot.rpc on grapeshot's loop. For comparison, `coros` is "
    "grapeshot.coro.rpc at both ends, and `on asyncio` is grapeshot.rpc on asyncio's loop. grpc.aio sends bytes "
    "without a schema. `rpyc` is one thread that keeps as many asynchronous calls under way as there are callers; "
    "`rpyc threads` has one thread for each caller."
)

SUITE = Suite(
    cases=CASES,
    loops=ALL,
    available=available,
    packages=("grapeshot", "msgspec", "grpcio", "rpyc"),
    settings=RpcSettings(),
    quick=QUICK,
    committed=RESULTS / "rpc.json",
    has_load=False,
    references=(COROS, ON_ASYNCIO),
    page={"heading": "# Calls between processes", "how": HOW},
)

if __name__ == "__main__":
    sys.exit(main(suites=(SUITE,), description=__doc__))
