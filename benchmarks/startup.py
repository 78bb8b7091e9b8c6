"""Measure the CPU time of a process that imports a loop, makes it, runs one iteration and closes it.

Two kinds of process alternate: one only imports asyncio, the other also uses the loop. "beyond" is the difference
between the two, pair by pair. "whole" includes the interpreter's own start, which no loop can change.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

from benchmarks._load import MeasurementError
from benchmarks._machine import ROOT, child_environment, cores, on_core

BASE = "import asyncio"
# Run one iteration: stop() makes run_forever() return at the end of the current iteration.
TURN = "loop.call_soon(loop.stop); loop.run_forever(); loop.close()"


def script(loop: str) -> str:
    if loop == "asyncio":
        return f"{BASE}; loop = asyncio.SelectorEventLoop(); {TURN}"
    module, _, attribute = loop.partition(":")
    return f"{BASE}; import {module}; loop = {module}.{attribute or 'new_event_loop'}(); {TURN}"


def cpu_ms(code: str) -> float:
    """Return the user and system time, in ms, of a Python process that runs this code."""
    with on_core(cores()[0]):
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code], cwd=ROOT, env=child_environment(), stdin=subprocess.DEVNULL
        )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise MeasurementError(f"`{code}` ended with {process.returncode}")
    return (usage.ru_utime + usage.ru_stime) * 1e3


def measure(loop: str, pairs: int) -> dict[str, float]:
    """Return medians of this many pairs, after one extra pair that fills the caches."""
    whole: list[float] = []
    beyond: list[float] = []
    for _ in range(pairs + 1):
        base_ms, with_loop_ms = cpu_ms(BASE), cpu_ms(script(loop))
        whole.append(with_loop_ms)
        beyond.append(with_loop_ms - base_ms)
    return {"whole_ms": statistics.median(whole[1:]), "beyond_ms": statistics.median(beyond[1:])}
