"""The cases of calls between processes, with their bounds."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.measure import Bound, Case, Sample, own_sample
from benchmarks.rpc.peers import COROS, GRPC, ON_ASYNCIO, OURS, RPYC, RPYC_THREADS

ALL = (OURS, COROS, ON_ASYNCIO, GRPC, RPYC, RPYC_THREADS)


@dataclass(frozen=True)
class RpcSettings:
    """How long one run takes."""

    # The CPU time to measure, of both processes together.
    seconds: float = 0.2


QUICK = RpcSettings()


def _case(name: str, title: str, *bounds: Bound, callers: int, size: int) -> Case:
    def measure(peer: str, settings: RpcSettings) -> Sample:
        options = ("--callers", str(callers), "--bytes", str(size), "--seconds", str(settings.seconds))
        return own_sample("rpc.programs", "call", peer, "--peer", peer, *options, is_pinned=False)

    return Case(name, "Calls", title, "cpu_us", "us CPU/call", bounds, measure, only=ALL)


_HALF = (Bound(0.5, GRPC), Bound(0.5, RPYC))
CASES: tuple[Case, ...] = (
    _case("small-100", "small calls, 100 callers", *_HALF, callers=100, size=16),
    _case("small-1", "small calls, one caller", callers=1, size=16),
    _case("10k-100", "10 KiB there and back, 100 callers", *_HALF, callers=100, size=10 * 1024),
)
