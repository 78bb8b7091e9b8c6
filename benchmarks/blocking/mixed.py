"""Light requests beside some that burn CPU in a real thread: how long the light ones take.

The load is open: requests leave at fixed times, whether others are still under way or not. Each connection has at most
one request under way. The burning ones take about half of a core together.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque

from benchmarks._load import Child, MeasurementError, server_command
from benchmarks._machine import cores, on_core

CONNECTIONS = 50
REQUESTS_PER_S = 250
# Every so many requests, one burns: 2 %.
BURN_EVERY = 50
BURN_MS = 100
MESSAGE_LEN = 64
LIGHT, BURNING = b"l" * MESSAGE_LEN, b"b" * MESSAGE_LEN
# Enough for the percentile, however short the other loads are.
REQUESTS_PER_MEASURED_S = 3000
STALL_S = 30.0


def measure(style: str, seconds: float) -> dict[str, float]:
    """Return the latency of the light requests, in ms.

    Raises MeasurementError when a reply is wrong or missing.
    """
    command = [*server_command("blocking", style, {"read_len": 4096}), "--burn-ms", str(BURN_MS)]
    with Child(command, cores()[0]) as server, on_core(cores()[1]):
        host, port = server.ready["address"].rsplit(":", 1)
        connections = [socket.create_connection((host, int(port))) for _ in range(CONNECTIONS)]
        try:
            for connection in connections:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            light_s, burning_s = _run(connections, int(seconds * REQUESTS_PER_MEASURED_S))
        finally:
            for connection in connections:
                connection.close()
    light_s.sort()
    return {
        "p50_ms": light_s[len(light_s) // 2] * 1e3,
        "p99_ms": light_s[len(light_s) * 99 // 100] * 1e3,
        "max_ms": light_s[-1] * 1e3,
        "burning_p50_ms": sorted(burning_s)[len(burning_s) // 2] * 1e3,
        "requests": len(light_s) + len(burning_s),
    }


def _run(connections: list[socket.socket], count: int) -> tuple[list[float], list[float]]:
    """Return the seconds that light requests took, and those that the burning ones took."""
    selector, idle = selectors.DefaultSelector(), deque(connections)
    under_way: dict[socket.socket, tuple[bytes, float]] = {}
    took_s: dict[bytes, list[float]] = {LIGHT: [], BURNING: []}
    for connection in connections:
        selector.register(connection, selectors.EVENT_READ)
    begin = last_reply = time.perf_counter()
    sent = 0
    with selector:
        while sent < count or under_way:
            now = time.perf_counter()
            due = begin + sent / REQUESTS_PER_S
            # Without an idle connection the request is late, which counts: its time runs from when it was due.
            if sent < count and now >= due and idle:
                sent += 1
                connection, message = idle.popleft(), BURNING if sent % BURN_EVERY == 0 else LIGHT
                under_way[connection] = (message, due)
                connection.sendall(message)
                continue
            until_due = max(0.0, due - now) if sent < count and idle else None
            for key, _ in selector.select(until_due if until_due is not None else STALL_S):
                connection = key.fileobj  # type: ignore[assignment]
                reply, last_reply = connection.recv(MESSAGE_LEN, socket.MSG_WAITALL), time.perf_counter()
                message, due = under_way.pop(connection, (b"", 0.0))
                if not message or reply != message:
                    raise MeasurementError(f"a reply of {len(reply)} bytes is wrong")
                took_s[message].append(last_reply - due)
                idle.append(connection)
            if time.perf_counter() - last_reply > STALL_S:
                raise MeasurementError(f"no reply for {STALL_S:g} s")
    return took_s[LIGHT], took_s[BURNING]
