"""Measures the cost of the profiler itself, by timing a loop of calls with and without it."""

from __future__ import annotations

import time

from . import _events
from ._collector import Collector

_CALLS = 500
_ROUNDS = 5
_cost_ns: int | None = None


def _nothing() -> None:
    pass


def _took_ns() -> int:
    function = _nothing
    began_ns = time.thread_time_ns()
    for _ in range(_CALLS):
        function()
    return time.thread_time_ns() - began_ns


def measure() -> int:
    """Return how much CPU time an event costs in this process, in nanoseconds.

    It is measured once, from the fastest of several rounds with the profiler and the fastest of several without it.
    """
    global _cost_ns
    if _cost_ns is None:
        _cost_ns = max(0, (min(_profiled_ns() for _ in range(_ROUNDS)) - min(_took_ns() for _ in range(_ROUNDS)))) // (
            2 * _CALLS
        )
    return _cost_ns


def _profiled_ns() -> int:
    collector = Collector()
    _events.install(collector)
    try:
        return _took_ns()
    finally:
        collector.has_ended = True  # on 3.11, the callback in threads that were started meanwhile then removes itself
        _events.uninstall()
