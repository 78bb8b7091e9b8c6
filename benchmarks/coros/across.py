"""Measure what it costs when blocking-style code (in coros, or with greenback) and asyncio wait for each other, and
what asyncio's own tasks cost.

Everything here runs on grapeshot's loop, so that differences do not come from the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grapeshot
from benchmarks.coros.rounds import Stopwatch, Taken, measure

BATCH = 10_000
THREADS, TURNS = 1000, 20

# Takes the CPU time to spend, in seconds, and returns a sample.
Measure = Callable[[float], dict[str, float]]


def _in_tasks(take: Callable[[asyncio.AbstractEventLoop], Taken]) -> Measure:
    """Return a measurement that makes a loop, and calls ``take`` with this loop in each round."""

    def run(cpu_s: float) -> dict[str, float]:
        loop = grapeshot.new_event_loop()
        try:
            return measure(lambda: take(loop), cpu_s)
        finally:
            loop.close()

    return run


# ---------------------------------------------------------------- what asyncio's tasks cost


def _tasks_spawn(loop: asyncio.AbstractEventLoop) -> Taken:
    """Like programs.spawn."""
    ended = 0

    async def body() -> None:
        nonlocal ended
        ended += 1

    async def program() -> Taken:
        stopwatch = Stopwatch()
        for _ in range(BATCH // 100):
            for _ in range(100):
                asyncio.create_task(body())  # noqa: RUF006 - the task ends during sleep(0) below
            await asyncio.sleep(0)
        return stopwatch.taken(BATCH)

    taken = loop.run_until_complete(program())
    if ended != BATCH:
        raise AssertionError(f"{ended} of {BATCH} ended")
    return taken


def _tasks_yield(loop: asyncio.AbstractEventLoop) -> Taken:
    """Like programs.yield_shallow."""

    async def body() -> None:
        for _ in range(TURNS + 4):
            await asyncio.sleep(0)

    async def program() -> Taken:
        tasks = [asyncio.create_task(body()) for _ in range(THREADS)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        stopwatch = Stopwatch()
        for _ in range(TURNS):
            await asyncio.sleep(0)
        taken = stopwatch.taken(THREADS * TURNS)
        await asyncio.gather(*tasks)
        return taken

    return loop.run_until_complete(program())


# ---------------------------------------------------------------- between blocking-style code and asyncio


async def _nothing() -> None:
    pass


def _await_coro(loop: asyncio.AbstractEventLoop) -> Taken:
    """A task awaits a coro that has already ended."""
    from grapeshot import coro

    async def program() -> Taken:
        ended = coro.spawn(int)
        await ended
        stopwatch = Stopwatch()
        for _ in range(BATCH):
            await ended
        return stopwatch.taken(BATCH)

    return loop.run_until_complete(program())


def _await_task(loop: asyncio.AbstractEventLoop) -> Taken:
    """A task awaits a task that has already ended."""

    async def program() -> Taken:
        ended = asyncio.create_task(_nothing())
        await ended
        stopwatch = Stopwatch()
        for _ in range(BATCH):
            await ended
        return stopwatch.taken(BATCH)

    return loop.run_until_complete(program())


def _coro_future(cpu_s: float) -> dict[str, float]:
    """A coro waits for a future that is already done."""
    from grapeshot import coro

    def program() -> dict[str, float]:
        await_ = coro.await_
        future = asyncio.get_running_loop().create_future()
        future.set_result(None)

        def take() -> Taken:
            stopwatch = Stopwatch()
            for _ in range(BATCH):
                await_(future)
            return stopwatch.taken(BATCH)

        return measure(take, cpu_s)

    return coro.run(program)


def _greenback_future(loop: asyncio.AbstractEventLoop) -> Taken:
    """A task with greenback waits for a future that is already done."""
    import greenback

    def blocking(future: asyncio.Future[None]) -> Taken:
        await_ = greenback.await_
        stopwatch = Stopwatch()
        for _ in range(BATCH):
            await_(future)
        return stopwatch.taken(BATCH)

    async def program() -> Taken:
        await greenback.ensure_portal()
        future = loop.create_future()
        future.set_result(None)
        return blocking(future)

    return loop.run_until_complete(program())


def _coro_sleep(cpu_s: float) -> dict[str, float]:
    """A coro runs asyncio.sleep(0): a coroutine that yields once."""
    from grapeshot import coro

    def take() -> Taken:
        await_, sleep = coro.await_, asyncio.sleep
        stopwatch = Stopwatch()
        for _ in range(BATCH):
            await_(sleep(0))
        return stopwatch.taken(BATCH)

    return coro.run(measure, take, cpu_s)


def _greenback_sleep(loop: asyncio.AbstractEventLoop) -> Taken:
    """A task with greenback runs asyncio.sleep(0)."""
    import greenback

    def blocking() -> Taken:
        await_, sleep = greenback.await_, asyncio.sleep
        stopwatch = Stopwatch()
        for _ in range(BATCH):
            await_(sleep(0))
        return stopwatch.taken(BATCH)

    async def program() -> Taken:
        await greenback.ensure_portal()
        return blocking()

    return loop.run_until_complete(program())


KINDS: dict[str, dict[str, Measure]] = {
    "yield_shallow": {"tasks": _in_tasks(_tasks_yield)},
    "spawn": {"tasks": _in_tasks(_tasks_spawn)},
    "await_ended": {"grapeshot": _in_tasks(_await_coro), "tasks": _in_tasks(_await_task)},
    "await_future": {"grapeshot": _coro_future, "greenback": _in_tasks(_greenback_future)},
    "await_sleep": {"grapeshot": _coro_sleep, "greenback": _in_tasks(_greenback_sleep)},
}
