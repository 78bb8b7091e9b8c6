"""Programs that test_scale.py runs in separate processes. Each program runs many coros at once, and then measures how
much memory stays in use. The results are printed as JSON.

python tests/coro/scale.py sleepers 100000
python tests/coro/scale.py suspended 40000
python tests/coro/scale.py own 40000
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import sysconfig
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

from grapeshot import coro

PAGE = 4096


def resident() -> int:
    """Return the resident memory of this process in bytes, after the C library has released its free memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def sleepers(count: int) -> dict[str, Any]:
    """All coros start, sleep at the same time in a function three calls deep, wake and end."""
    woken_early = 0
    asleep: list[int] = []

    def inner(number: int, due: float) -> int:
        nonlocal woken_early
        asleep.append(number)
        coro.sleep_absolute(due)
        woken_early += coro.now() < due
        return number

    def middle(number: int, due: float) -> int:
        return inner(number, due)

    def outer(number: int) -> int:
        return middle(number, due)

    # No coro may wake before all of them sleep, so all sleep for an hour. The interruptions below end the sleeps.
    due = coro.now() + 3600.0
    threads = [coro.spawn(outer, number) for number in range(count)]
    while len(asleep) < count:
        coro.yield_slice()
    at_once = len(coro.get_live_coros()) - 1
    peak = resident()
    for thread in threads:
        thread.interrupt()
    coro.yield_slice()
    coro.yield_slice()
    interrupted = sum(thread.done() for thread in threads)
    threads = []
    # Sleep again, and this time let the timers expire.
    asleep.clear()
    due = coro.now() + 0.5
    threads = [coro.spawn(outer, number) for number in range(count)]
    total = sum(thread.join() for thread in threads)
    return {
        "at_once": at_once,
        "interrupted": interrupted,
        "sum": total,
        "woken_early": woken_early,
        "peak": peak,
    }


def suspended(count: int) -> dict[str, Any]:
    """All coros are suspended at the same time, each 22 Python frames deep, in a function that C code calls. Each must
    still return the right sum.
    """

    def below_c(left: int, right: int) -> int:
        coro.wait()
        return left + right

    def deeper(level: int, number: int) -> int:
        if level == 0:
            return reduce(below_c, (number, 1))
        return deeper(level - 1, number) + 1

    threads = [coro.spawn(deeper, 20, number) for number in range(count)]
    coro.yield_slice()
    waiting = sum(thread._status == "waiting" for thread in threads)
    saved, peak, mapped = coro.stack_info()["bytes_saved"], resident(), mappings()
    depths = {len(thread.get_stack()) for thread in threads[:: max(1, count // 100)]}
    for thread in reversed(threads):
        coro.schedule(thread)
    right = sum(thread.join() == number + 21 for number, thread in enumerate(threads))
    return {
        "waiting": waiting,
        "right": right,
        "saved": saved,
        "peak": peak,
        "mappings": mapped,
        "depths": sorted(depths),
    }


def own(count: int) -> dict[str, Any]:
    """All coros wait at the same time in a key function, each on a stack of its own."""

    def key(number: int) -> int:
        coro.wait()
        return -number

    def work(number: int) -> list[int]:
        return sorted(range(number, number + 3), key=key)

    threads = [coro.spawn(work, number, stack="own") for number in range(count)]
    coro.yield_slice()
    waiting = sum(thread._status == "waiting" for thread in threads)
    peak, mapped = resident(), mappings()
    for _ in range(3):
        for thread in threads:
            coro.schedule(thread)
        coro.yield_slice()
    right = sum(thread.join() == [number + 2, number + 1, number] for number, thread in enumerate(threads))
    return {"waiting": waiting, "right": right, "peak": peak, "mappings": mapped}


def main(kind: str, count: int) -> None:
    programs: dict[str, Callable[[int], dict[str, Any]]] = {"sleepers": sleepers, "suspended": suspended, "own": own}
    program = programs[kind]
    before_mappings = mappings()
    coro.run(program, 100)
    before = resident()
    report = coro.run(program, count)
    report["before"] = before
    report["kept"] = resident() - before
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        # mimalloc keeps much of the memory of the first round. Only growth in a second round shows what was not freed.
        after_first = resident()
        coro.run(program, count)
        report["kept"] = resident() - after_first
    report["mappings_before"] = before_mappings
    report["mappings_after"] = mappings()
    report["live"] = len(coro.get_live_coros())
    report["bytes_saved"] = coro.stack_info()["bytes_saved"]
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
