"""greenlet, SQLAlchemy's asyncio extension, and greenback run beside coros in one loop.

Code that switches stacks itself must stay within the coro, or the task, in which it started.
"""

from __future__ import annotations

import asyncio
import importlib.util

import pytest
from support import coro_is_available

import grapeshot

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro


def need(*names):
    """Skip the test if one of these packages of requirements/dev.txt is missing."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed (requirements/dev.txt): untested beside coros")


def keep_yielding(log, name, count=20):
    def deep(level):
        coro.yield_slice()
        return level if level == 0 else deep(level - 1)

    for _ in range(count):
        deep(3)
    log.append(name)
    return name


# ---- greenlet --------------------------------------------------------------------------------------------------


def echo(greenlet, values):
    """Send each value and then None to a greenlet. Return its answers: the double of each value, then the total."""

    def body(value):
        total = 0
        while value is not None:
            total += value
            value = greenlet.getcurrent().parent.switch(value * 2)
        return ("total", total)

    speaker = greenlet.greenlet(body)
    return [speaker.switch(value) for value in [*values, None]]


def test_greenlets_in_a_task_beside_coros():
    need("greenlet")
    import greenlet

    log = []

    async def task(number):
        def body():
            for count in range(10):
                assert greenlet.getcurrent().parent.switch(count) == -count
            return "end"

        inside = greenlet.greenlet(body)
        received = [inside.switch()]
        while not inside.dead:
            await asyncio.sleep(0)
            received.append(inside.switch(-received[-1]))
        assert received == [*range(10), "end"]
        return number

    async def main():
        coros = [coro.spawn(keep_yielding, log, number) for number in range(4)]
        assert await asyncio.gather(*[task(number) for number in range(5)]) == list(range(5))
        return await asyncio.gather(*coros)

    assert grapeshot.run(main()) == list(range(4))
    assert sorted(log) == list(range(4))


def test_greenlets_within_one_coro():
    """Greenlets start, switch and end in the same coro, which yields between the switches, outside of the greenlets."""
    need("greenlet")
    import greenlet

    def work(number):
        def body(value):
            total = 0
            while value is not None:
                total += value
                value = greenlet.getcurrent().parent.switch(total)
            return "end"

        speakers = [greenlet.greenlet(body) for _ in range(3)]
        for step in range(1, 6):
            for speaker in speakers:
                assert speaker.switch(number) == number * step
                coro.yield_slice()
        return [speaker.switch(None) for speaker in speakers]

    async def main():
        coros = [coro.spawn(work, number) for number in range(5)]
        coros += [coro.spawn(echo, greenlet, range(number)) for number in range(3)]
        others = [coro.spawn(keep_yielding, [], number) for number in range(3)]
        results = await asyncio.gather(*coros)
        await asyncio.gather(*others)
        return results

    results = grapeshot.run(main())
    assert results[:5] == [["end"] * 3] * 5
    assert results[5:] == [[("total", 0)], [0, ("total", 0)], [0, 2, ("total", 1)]]


@pytest.mark.parametrize("stack", ["shared", "own"])
def test_a_coro_cannot_wait_in_a_greenlet(stack):
    need("greenlet")
    import greenlet

    async def pause():
        await asyncio.sleep(0.001)

    def work():
        refused = 0
        waits = [coro.yield_slice, coro.wait, lambda: coro.sleep_relative(1), lambda: coro.await_(pause())]
        for wait in waits:
            with pytest.raises(RuntimeError, match="cannot wait inside a greenlet"):
                greenlet.greenlet(wait).switch()
            refused += 1
            coro.yield_slice()
        return refused

    async def main():
        coros = [coro.spawn(work, stack=stack) for _ in range(3)]
        return await asyncio.gather(*coros, coro.spawn(keep_yielding, [], "alive"))

    assert grapeshot.run(main()) == [4, 4, 4, "alive"]


def test_coros_wait_deep_in_python_without_being_taken_for_greenlets():
    """A coro whose frames do not fit into its first chunk of frame memory is still recognized as a coro."""

    def deep(level):
        if level:
            return deep(level - 1) + 1
        for _ in range(3):
            coro.yield_slice()
        return 0

    async def main():
        return await asyncio.gather(*[coro.spawn(deep, 400) for _ in range(3)])

    assert grapeshot.run(main()) == [400] * 3


# ---- SQLAlchemy ------------------------------------------------------------------------------------------------


def test_sqlalchemy_in_tasks_and_in_coros():
    need("greenlet", "sqlalchemy", "aiosqlite")
    from sqlalchemy import text
    from sqlalchemy.ext.asyncio import create_async_engine

    async def count_up(engine, name, rows):
        async with engine.begin() as connection:
            for row in range(rows):
                await connection.execute(text("insert into t values (:name, :row)"), {"name": name, "row": row})
        async with engine.connect() as connection:
            result = await connection.execute(text("select sum(row) from t where name = :name"), {"name": name})
            return result.scalar_one()

    async def interrupted(engine, executed):
        async with engine.connect() as connection:
            await connection.execute(text("select 1"))
            executed.set()
            await asyncio.sleep(60)

    def in_a_coro(engine, name):
        first = coro.await_(count_up(engine, name, 4))
        # Do not interrupt a statement: SQLAlchemy would close the connection, and with it the in-memory database.
        executed = asyncio.Event()
        waiting = coro.spawn(coro.await_, interrupted(engine, executed))
        coro.await_(executed.wait())
        waiting.interrupt()
        waiting.join()
        with pytest.raises(coro.CoroCancelled):
            waiting.result()
        coro.yield_slice()
        return first

    async def main():
        engine = create_async_engine("sqlite+aiosqlite://")
        try:
            async with engine.begin() as connection:
                await connection.execute(text("create table t (name text, row integer)"))
            log = []
            beside = [coro.spawn(keep_yielding, log, number) for number in range(3)]
            # SQLite in memory has one connection, so the task and the coros use it one after the other.
            results = [await count_up(engine, "task", 5), await coro.spawn(in_a_coro, engine, "coro")]
            results.append(await coro.run_sync(coro.await_, count_up(engine, "run_sync", 3)))
            await asyncio.gather(*beside)
            return results
        finally:
            await engine.dispose()

    assert grapeshot.run(main()) == [10, 6, 3]


def test_sqlalchemys_greenlet_spawn():
    need("greenlet", "sqlalchemy")
    from sqlalchemy.util import await_only, greenlet_spawn

    def blocking(number):
        return sum(await_only(asyncio.sleep(0, value)) for value in range(number))

    def in_a_coro(number):
        def fail():
            await_only(asyncio.sleep(0))
            raise KeyError(number)

        with pytest.raises(KeyError):
            coro.await_(greenlet_spawn(fail))
        with pytest.raises(coro.TimeoutError):
            coro.with_timeout(0.001, coro.await_, greenlet_spawn(await_only, asyncio.sleep(60)))
        return coro.await_(greenlet_spawn(blocking, number))

    async def main():
        coros = [coro.spawn(in_a_coro, number) for number in range(6)]
        tasks = [asyncio.create_task(greenlet_spawn(blocking, number)) for number in range(6)]
        return await asyncio.gather(*coros, *tasks)

    assert grapeshot.run(main()) == [sum(range(number)) for number in range(6)] * 2


# ---- greenback -------------------------------------------------------------------------------------------------


def test_greenback_in_tasks_beside_coros():
    need("greenback")
    import greenback

    def blocking(number):
        return sum(greenback.await_(asyncio.sleep(0, value)) for value in range(number))

    async def task(number):
        await greenback.ensure_portal()
        total = blocking(number)
        co = coro.spawn(keep_yielding, [], number)
        assert greenback.await_(co) == number
        return total

    async def main():
        beside = [coro.spawn(keep_yielding, [], number) for number in range(3)]
        totals = await asyncio.gather(*[task(number) for number in range(5)])
        await asyncio.gather(*beside)
        return totals

    assert grapeshot.run(main()) == [sum(range(number)) for number in range(5)]


def test_greenback_works_in_a_coro_only_by_with_portal_run():
    """A coro is not an asyncio.Task, so greenback's ensure_portal refuses it. with_portal_run accepts it."""
    need("greenback")
    import greenback

    async def blocking_inside():
        return greenback.await_(asyncio.sleep(0, "through a portal"))

    def work():
        with pytest.raises(AssertionError):
            coro.await_(greenback.ensure_portal())
        with pytest.raises(RuntimeError, match="portal"):
            greenback.await_(asyncio.sleep(0))
        return coro.await_(greenback.with_portal_run(blocking_inside))

    async def main():
        return await asyncio.gather(*[coro.spawn(work) for _ in range(3)])

    assert grapeshot.run(main()) == ["through a portal"] * 3
