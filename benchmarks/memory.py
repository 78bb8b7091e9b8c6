"""Resident memory per idle connection of an echo server (Linux)."""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks._load import IdleConnections, MeasurementError, Server
from benchmarks._machine import open_descriptors, raise_descriptor_limit, resident_kib

WARM_UP_CONNECTIONS = 20
# These are opened first, to use up the memory that is already free in the heap. Otherwise the measured connections
# would use it, and look cheaper.
FILLING_CONNECTIONS = 2000
SPARE_DESCRIPTORS = 100


def _wait_for_descriptors(pid: int, at_least: int, at_most: int) -> None:
    deadline = time.monotonic() + 60
    while not at_least <= (count := open_descriptors(pid)) <= at_most:
        if time.monotonic() > deadline:
            raise MeasurementError(f"the server has {count} descriptors, not {at_least} to {at_most}")
        time.sleep(0.02)


def _settled(read: Callable[[int], float], pid: int) -> float:
    """Return what `read` reports for the process, as soon as two readings agree or 10 s have passed."""
    deadline = time.monotonic() + 10
    before = -1.0
    while (now := read(pid)) != before and time.monotonic() < deadline:
        before = now
        time.sleep(0.1)
    return now


def measure(loop: str, connections: int, touch_size: int = 0, kind: str = "echo") -> dict[str, float]:
    """Return KiB per connection, after a few have been served and closed.

    "kib" is the memory for each of `connections` connections that are opened while FILLING_CONNECTIONS others are open.
    "from_none_kib" is the memory for each connection when none was open before. It is smaller, because the first
    connections use memory that was free in the heap.

    Raises MeasurementError when the machine does not allow enough descriptors.
    """
    limit = raise_descriptor_limit()
    if limit < FILLING_CONNECTIONS + connections + SPARE_DESCRIPTORS:
        raise MeasurementError(f"{connections} connections need more descriptors than the limit of {limit} allows")
    with Server(kind, loop) as server:
        # Warm up first, because a loop opens descriptors of its own when it first waits.
        with IdleConnections(server.address, WARM_UP_CONNECTIONS, touch_size=1024):
            pass
        base = int(_settled(open_descriptors, server.pid))
        before_kib = _settled(resident_kib, server.pid)
        with IdleConnections(server.address, FILLING_CONNECTIONS, touch_size=touch_size):
            held = base + FILLING_CONNECTIONS
            _wait_for_descriptors(server.pid, held, held)
            filled_kib = _settled(resident_kib, server.pid)
            with IdleConnections(server.address, connections, touch_size=touch_size):
                _wait_for_descriptors(server.pid, held + connections, held + connections)
                full_kib = _settled(resident_kib, server.pid)
        return {
            "kib": (full_kib - filled_kib) / connections,
            "from_none_kib": (full_kib - before_kib) / (FILLING_CONNECTIONS + connections),
            "server_rss_mib": full_kib / 1024,
            "connections": connections,
        }
