"""Scenes of run.py in which coros interact: locks and queues, groups and timeouts, asyncio, other threads."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Any

from world import World, check, result_of

from grapeshot import _core, coro

# ---------------------------------------------------------------- synchronization


def locks(world: World) -> None:
    which = world.generator.choice(["lock", "mutex", "semaphore"])
    primitive = getattr(world, which)
    with world.limited(), primitive:
        world.inside[which] += 1
        try:
            check(world.inside[which] <= (3 if which == "semaphore" else 1), f"{which}: too many inside")
            if which == "mutex":
                with primitive:
                    world.pause()
            world.pause()
        finally:
            world.inside[which] -= 1


def reads_and_writes(world: World) -> None:
    with world.limited():
        if world.generator.random() < 0.3:
            world.rw_lock.acquire_write()
            try:
                check(not world.inside["writers"] and not world.inside["readers"], "a writer is not alone")
                world.inside["writers"] += 1
                try:
                    world.pause()
                finally:
                    world.inside["writers"] -= 1
            finally:
                world.rw_lock.release_write()
        else:
            world.rw_lock.acquire_read()
            try:
                check(not world.inside["writers"], "a reader beside a writer")
                world.inside["readers"] += 1
                try:
                    world.pause()
                finally:
                    world.inside["readers"] -= 1
            finally:
                world.rw_lock.release_read()


def waits_for_news(world: World) -> None:
    with world.limited():
        if world.generator.random() < 0.5:
            world.event.wait()
        else:
            world.condition.wait()


def sends(world: World) -> None:
    """A producer hands items to this coro in order, through a queue and a channel that no other coro uses."""
    count = world.generator.randrange(1, 10)
    queue = coro.fifo()
    channel = coro.channel()

    def produce() -> None:
        for number in range(count):
            queue.push(number)
            channel.send(number)
            world.pause()

    producer = coro.spawn(produce)
    try:
        for number in range(count):
            check(queue.pop() == number, "fifo: not in order")
            check(channel.receive() == number, "channel: not in order")
        producer.join()
    finally:
        # In a coro on its own stack, even the call of `shutdown` may collect garbage whose finalizer waits. Then other
        # coros run, and the producer may end before it is shut down.
        with contextlib.suppress(coro.DeadCoroutine):
            producer.shutdown()


def shares(world: World) -> None:
    """Use the queues that all coros share. Every item must arrive whole."""
    value = world.generator.random()
    world.fifo.push((value, -value))
    with world.limited():
        left, right = world.fifo.pop()
        check(left == -right, "fifo: a broken item")
    with world.limited():
        if world.generator.random() < 0.5:
            world.channel.send((value, -value))
        else:
            left, right = world.channel.receive()
            check(left == -right, "channel: a broken item")


# ---------------------------------------------------------------- coros of coros


def children(world: World) -> None:
    count = world.generator.randrange(1, 5)

    def child(number: int) -> int:
        world.pause()
        return number * 2

    how = world.generator.randrange(4)
    if how == 0:
        results = coro.in_parallel([(child, (number,)) for number in range(count)])
    elif how == 1:
        with coro.Group() as group:
            coros = [group.spawn(child, number) for number in range(count)]
        results = [co.result() for co in coros]
    elif how == 2:
        with coro.Pool(2) as pool:
            results = pool.map(child, range(count))
    else:
        results = [result_of(coro.spawn(child, number)) for number in range(count)]
    check(results == [number * 2 for number in range(count)], "wrong results")


def timeouts(world: World) -> None:
    log: list[str] = []
    try:
        with coro.timeout(0.001 + world.generator.random() / 200):
            try:
                with coro.timeout(10):
                    coro.sleep_relative(10)
            except coro.TimeoutError:
                log.append("inner")
    except coro.TimeoutError:
        log.append("outer")
    check(log in (["outer"], []), f"the wrong timeout: {log}")


# ---------------------------------------------------------------- asyncio


async def _aio(world: World, number: int) -> int:
    await asyncio.sleep(0)
    if world.generator.random() < 0.3:
        await asyncio.sleep(world.generator.random() / 1000)
    return number + 1


def awaits(world: World) -> None:
    number = world.generator.randrange(100)
    how = world.generator.randrange(5)
    if how == 0:
        check(coro.await_(_aio(world, number)) == number + 1, "a wrong result")
    elif how == 1:
        loop = coro.current()._loop
        check(coro.await_(loop.create_task(_aio(world, number))) == number + 1, "a wrong result of a task")
    elif how == 2:
        both = coro.await_(asyncio.gather(_aio(world, number), _aio(world, 5)))
        check(both == [number + 1, 6], "a wrong result of gather")
    elif how == 3:

        async def limited() -> None:
            async with asyncio.timeout(0.001):
                await asyncio.sleep(10)

        with contextlib.suppress(TimeoutError):
            coro.await_(limited())
    else:

        async def numbers() -> Any:
            for value in range(4):
                await asyncio.sleep(0)
                yield value

        async def total() -> int:
            return sum([value async for value in numbers()])

        check(coro.await_(total()) == 6, "a wrong sum")
    check(asyncio.current_task() is coro.current(), "another current task")


def runs_in_tasks(world: World) -> None:
    """An asyncio task runs blocking-style code in a coro, and that code awaits a coroutine."""

    def blocking(number: int) -> int:
        world.pause()
        return coro.await_(_aio(world, number))  # type: ignore[no-any-return]

    async def main() -> int:
        check(_core._coro_current_or_none() is None, "a coro runs in a task's step")
        return await coro.run_sync(blocking, 4)

    check(coro.await_(coro.current()._loop.create_task(main())) == 5, "a wrong result of run_sync")


def runs_in_threads(world: World) -> None:
    # When a loop is closed, the executor ends before the remaining coros. In a coro on a stack of its own, a finalizer
    # that the collector calls may let other coros run while `submit` holds a process-wide lock. If one of them needs
    # this lock, it blocks the thread forever.
    is_safe = not world.is_closing and coro.current().stack_info()["kind"] == "shared"
    if world.generator.random() < 0.2 and is_safe:
        check(coro.threads.run(sum, range(10)) == 45, "a wrong sum of a thread")


def woken_by_threads(world: World) -> None:
    """Another thread schedules the coro through call_soon_threadsafe()."""
    if world.generator.random() < 0.8:
        return
    waiter = coro.current()
    is_over: list[int] = []

    def wake() -> None:
        if not is_over:
            with contextlib.suppress(coro.ScheduleError):  # `waiter` was killed and is about to run
                coro.schedule(waiter, "woken")

    thread = threading.Thread(target=waiter._loop.call_soon_threadsafe, args=(wake,))
    thread.start()
    try:
        check(coro.wait() == "woken", "woken by something else")
    finally:
        is_over.append(1)
        thread.join()


def traces(world: World) -> None:
    """Set a trace or profile function while coros take turns. It applies to all coros of the thread."""
    if world.generator.random() < 0.8:
        return
    events: collections.Counter[str] = collections.Counter()

    def note(frame: Any, event: str, arg: object) -> Any:
        events[event] += 1
        return note

    def traced() -> int:
        world.pause()
        number = 1
        world.pause()
        return number + 1

    turn_on, turn_off = world.generator.choice(
        [
            (lambda: sys.settrace(note), lambda: sys.settrace(None)),
            (lambda: sys.setprofile(note), lambda: sys.setprofile(None)),
        ]
    )
    turn_on()
    try:
        check(traced() == 2, "a wrong result while traced")
    finally:
        turn_off()
    check(events["call"] > 0, "nothing was traced")


MEETINGS: list[Callable[[World], None]] = [
    locks,
    reads_and_writes,
    waits_for_news,
    sends,
    shares,
    children,
    timeouts,
    awaits,
    runs_in_tasks,
    runs_in_threads,
    woken_by_threads,
    traces,
]
