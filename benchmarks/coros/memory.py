"""Resident memory per waiting cooperative thread, for one library of such threads (Linux)."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from typing import NoReturn

from benchmarks._machine import resident_kib
from benchmarks.coros.styles import Style

# Spawned, run and ended before anything is measured.
WARM_UP_THREADS = 100
HOUR_S = 3600.0


def idle(style: Style) -> Callable[[], object]:
    """Each thread waits for a wake-up that never comes."""
    return style.wait


def asleep(style: Style) -> Callable[[], object]:
    """Each thread sleeps, so it has a timer."""
    sleep = style.sleep
    return lambda: sleep(HOUR_S)


KINDS = {"idle": idle, "asleep": asleep}


def measure(style: Style, kind: Callable[[Style], Callable[[], object]], count: int) -> NoReturn:
    """Suspend `count` threads three calls deep, print how many KiB each thread needs, and end the process.

    The process exits at once, because the suspended threads never return.
    """
    suspend = kind(style)

    def first() -> None:
        second()

    def second() -> None:
        third()

    def third() -> None:
        suspend()

    def program() -> None:
        for _ in range(WARM_UP_THREADS):
            style.spawn(style.give_way)
        style.give_way()
        style.give_way()
        gc.collect()
        before_kib = resident_kib(os.getpid())
        for _ in range(count // 100):
            for _ in range(100):
                style.spawn(first)
            style.give_way()
        after_kib = resident_kib(os.getpid())
        sample = {"kib": (after_kib - before_kib) / count, "rss_mib": after_kib / 1024, "threads": count}
        print(json.dumps(sample), flush=True)
        os._exit(0)

    style.run(program)
    raise AssertionError("the program has returned")
