"""Compares calls between processes with their peers: `python -m benchmarks.rpc [CASE ...]`. See README.md.

Every run is a fresh pair of processes; the peers alternate within one run (A B C, then C B A, ...).
"""

from __future__ import annotations

import sys

from benchmarks.compare import RESULTS, Suite, main
from benchmarks.rpc.cases import ALL, CASES, QUICK, RpcSettings
from benchmarks.rpc.peers import COROS, ON_ASYNCIO, available

HOW = (
    "CPU time of a fresh client and a fresh server together for each call. All calls of a run go through one "
    "connection on the loopback interface. grapeshot is grapeshot.rpc on grapeshot's loop; beside it stand coros "
    "(grapeshot.coro.rpc at both ends) and grapeshot.rpc on asyncio's loop. "
    "grpc.aio sends bytes without a schema. rpyc is one thread that keeps as many asynchronous calls under way as "
    "there are callers, rpyc threads has a thread for each caller."
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
