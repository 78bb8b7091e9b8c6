"""What the coros of soak.py do. Each scene checks what it can, and lets injected exceptions pass."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import contextvars
import ctypes
import functools
import gc
import itertools
import json
import random
import re
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from grapeshot import coro


class Broken(Exception):
    """Something does not hold."""


class Injected(Exception):
    """What `raise_exception` is called with."""


# What may come out of a coro of a family of which one was killed, or had no memory for its stack.
INJECTED = (asyncio.CancelledError, Injected, coro.InParallelError, MemoryError)

# A coro that was spawned by the soak, and all that it spawns, are a family: they share this.
FAMILY: contextvars.ContextVar[int] = contextvars.ContextVar("family", default=-1)
LEVEL: contextvars.ContextVar[int] = contextvars.ContextVar("level", default=0)


def check(holds: bool, text: str) -> None:
    if not holds:
        raise Broken(text)


class World:
    """One loop and what its coros share."""

    def __init__(self, soak: Any, generator: random.Random) -> None:
        self.soak = soak
        self.generator = generator
        self.scenes = soak.options.scenes
        self.actors: set[Any] = set()
        self.families = itertools.count(1)
        self.killed: set[int | None] = set()
        self.is_closing = False
        self.is_mixed = False
        self.evicts_always = False
        self.begun = self.ended = self.steps = self.faults = 0
        self.lock = coro.lock()
        self.mutex = coro.mutex()
        self.semaphore = coro.semaphore(3)
        self.rw_lock = coro.rw_lock()
        self.condition = coro.condition_variable()
        self.event = coro.event()
        self.fifo = coro.fifo()
        self.channel = coro.channel()
        self.inside: collections.Counter[str] = collections.Counter()

    def count(self, scene: Callable[..., object]) -> None:
        self.steps += 1
        self.soak.steps += 1
        self.soak.scenes[scene.__name__] = self.soak.scenes.get(scene.__name__, 0) + 1

    def wake_everybody(self) -> None:
        self.event.set()
        self.event.clear()
        self.condition.wake_all()

    def on_report(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The loop's exception handler."""
        exc = context.get("exception")
        if isinstance(exc, MemoryError) and self.faults:
            return
        if isinstance(exc, INJECTED):
            return  # of a killed coro whose end nobody waits for
        if self.is_closing and ("asyncgen" in context or "destroyed" in context["message"]):
            # asyncio closes asynchronous generators, and cancels tasks, before the coros that are left are ended.
            return
        text = "".join(traceback.format_exception(exc)) if exc else ""
        self.soak.fail(f"reported: {context}\n{text}")

    @contextlib.contextmanager
    def limited(self, most_s: float = 0.02) -> Iterator[None]:
        """The block ends in time, without a word."""
        try:
            with coro.timeout(self.generator.random() * most_s):
                yield
        except coro.TimeoutError:
            pass

    def pause(self) -> None:
        if self.generator.random() < 0.8:
            coro.yield_slice()
        else:
            coro.sleep_relative(self.generator.random() / 1000)


# ---------------------------------------------------------------- Python alone


def yields(world: World) -> None:
    for number in range(world.generator.randrange(20)):
        before = [number] * 10
        world.pause()
        check(before == [number] * 10, "a list has changed")


def sleeps(world: World) -> None:
    delay = world.generator.random() / 200
    began = time.monotonic()
    coro.sleep_relative(delay)
    check(time.monotonic() >= began + delay, "woken early")


def recurses(world: World) -> None:
    def sum_to(level: int) -> int:
        if level % 40 == 7:
            world.pause()
        return level + sum_to(level - 1) if level else 0

    depth = world.generator.randrange(5, 300)
    check(sum_to(depth) == depth * (depth + 1) // 2, "a wrong sum")


def recurses_too_deep(world: World) -> None:
    def deeper(level: int) -> int:
        if level % 300 == 299:
            world.pause()
        return deeper(level + 1)

    if world.generator.random() < 0.7:
        return
    try:
        deeper(0)
    except RecursionError:
        return
    raise Broken("no RecursionError")


def recurses_in_c(world: World) -> None:
    nested: Any = []
    for _ in range(world.generator.randrange(100)):
        nested = [nested]
    world.pause()
    text = repr(nested)
    world.pause()
    check(json.loads(text) == nested, "not the same list")


def raises(world: World) -> None:
    number = world.generator.random()
    try:
        try:
            raise KeyError(number)
        except KeyError:
            world.pause()
            exc = sys.exc_info()[1]
            check(exc is not None and exc.args == (number,), "another exception is being handled")
            with contextlib.suppress(ZeroDivisionError):
                world.pause()
                _ = 1 / 0
            world.pause()
            raise
        finally:
            world.pause()
    except KeyError as again:
        check(again.args == (number,), "another exception was raised again")
        check(again.__traceback__ is not None, "no traceback")


def generates(world: World) -> None:
    log: list[str] = []

    def numbers(count: int) -> Iterator[int]:
        try:
            for number in range(count):
                world.pause()
                yield number
        finally:
            log.append("closed")

    count = world.generator.randrange(1, 15)
    check(sum(numbers(count)) == count * (count - 1) // 2, "a wrong sum")
    half = numbers(count)
    next(half)
    half.close()
    check(log == ["closed", "closed"], "a generator was not closed")


def contexts(world: World) -> None:
    level = world.generator.random()
    LEVEL.set(level)
    world.pause()
    check(LEVEL.get() == level, "another context")
    copy = contextvars.copy_context()
    copy.run(LEVEL.set, 5)
    copy.run(world.pause)
    check(LEVEL.get() == level, "another context after run()")


# ---------------------------------------------------------------- below C functions


def sorts(world: World) -> None:
    values = [world.generator.randrange(100) for _ in range(world.generator.randrange(12))]

    def key(value: int) -> int:
        world.pause()
        return -value

    check(sorted(values, key=key) == sorted(values, reverse=True), "not sorted")


def reduces(world: World) -> None:
    def add(left: int, right: int) -> int:
        world.pause()
        return left + right

    count = world.generator.randrange(2, 10)
    check(functools.reduce(add, range(count)) == sum(range(count)), "a wrong sum")
    check(sum(map(add, range(count), range(count))) == 2 * sum(range(count)), "a wrong sum of a map")


class Slow:
    """An object whose special methods yield."""

    def __init__(self, world: World, value: int) -> None:
        self.world = world
        self.value = value

    def __eq__(self, other: object) -> bool:
        self.world.pause()
        return isinstance(other, Slow) and self.value == other.value

    def __hash__(self) -> int:
        return self.value % 3

    def __repr__(self) -> str:
        self.world.pause()
        return str(self.value)

    def __getattr__(self, name: str) -> str:
        self.world.pause()
        return name


def special_methods(world: World) -> None:
    count = world.generator.randrange(6)
    table = {Slow(world, value): value for value in range(count)}
    for value in range(count):
        check(table[Slow(world, value)] == value, "not found")
    check(str([Slow(world, 1), Slow(world, 2)]) == "[1, 2]", "a wrong text")
    check(Slow(world, 1).anything == "anything", "a wrong attribute")
    text = re.sub("[a-c]", lambda found: world.pause() or found[0].upper(), "abcdcba")  # type: ignore[func-returns-value]
    check(text == "ABCdCBA", "a wrong substitution")
    data = json.dumps({"a": Slow(world, 1)}, default=lambda slow: world.pause() or slow.value)  # type: ignore[func-returns-value]
    check(data == '{"a": 1}', "wrong JSON")


class Finalized:
    def __init__(self, world: World, log: list[int]) -> None:
        self.world = world
        self.log = log

    def __del__(self) -> None:
        with contextlib.suppress(*INJECTED):
            coro.yield_slice()
        self.log.append(1)


def finalizers(world: World) -> None:
    """A finalizer that yields, called by reference counting: nothing keeps the object but one variable."""
    log: list[int] = []
    victim = Finalized(world, log)
    del victim
    check(log == [1], "the finalizer has not run to its end")


class Collected:
    """A finalizer that tries to yield, called by the collector: on a stack that moves it gets an error."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.itself = self

    def __del__(self) -> None:
        try:
            coro.yield_slice()
        except coro.YieldFromMain:  # the collector runs on the thread's own stack
            self.log.append("main")
        except RuntimeError:
            self.log.append("refused")
        except INJECTED:
            self.log.append("injected")
        else:
            self.log.append("yielded")


def collections_of_garbage(world: World) -> None:
    log: list[str] = []
    Collected(log)
    world.pause()
    if world.generator.random() < 0.3:
        gc.collect()
        # Another thread, or a coro on a stack of its own, may have been the one that found it.
        check(len(log) <= 1, f"a finalizer has run twice: {log}")


_compare_type = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int))
_qsort = ctypes.CDLL(None).qsort
_qsort.restype = None


def own_stacks(world: World) -> None:
    """C's qsort keeps pointers into its stack: on one that does not move."""
    values = [world.generator.randrange(100) for _ in range(8)]
    failures: list[BaseException] = []

    def compare(left: Any, right: Any) -> int:
        if not failures:
            try:
                world.pause()
            except BaseException as exc:  # cannot pass through qsort
                failures.append(exc)
        return left[0] - right[0]

    def sort() -> list[int]:
        array = (ctypes.c_int * len(values))(*values)
        _qsort(array, len(values), ctypes.sizeof(ctypes.c_int), _compare_type(compare))
        if failures:
            raise failures[0]
        return list(array)

    check(coro.spawn(sort, stack="own").join() == sorted(values), "qsort has not sorted")


# ---------------------------------------------------------------- garbage


class Node:
    pass


def garbage(world: World) -> None:
    """Cycles through frames, exceptions, coros and generators."""
    nodes: list[Any] = [Node() for _ in range(10)]
    for node in nodes:
        node.others = nodes
        node.frame = sys._getframe()
        node.coro = coro.current()

    def cyclic() -> Iterator[Any]:
        me = yield
        yield me

    generator = cyclic()
    next(generator)
    generator.send(generator)
    try:
        raise ValueError(nodes)
    except ValueError as exc:
        kept: Any = exc
        nodes[0].exc = kept
    world.pause()
    reference = weakref.ref(nodes[0])
    kept.__traceback__ = None
    del nodes, node, kept
    if world.generator.random() < 0.1:
        gc.collect()
    world.pause()
    check(reference() is None or isinstance(reference(), Node), "a weak reference to something else")


def dropped_coros(world: World) -> None:
    coro.new(print, "never")
    idle = coro.new(len, list("abc"))
    idle.me = idle
    del idle
    ended = coro.spawn(len, "abc")
    ended.me = ended
    world.pause()


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
    """A producer, a consumer, and what they hand over in order, through queues of their own."""
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
        if not producer.done():
            producer.shutdown()


def shares(world: World) -> None:
    """The queues that all coros share: whatever comes is whole."""
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
        results = [coro.spawn(child, number).join() for number in range(count)]
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
    """asyncio tasks that run blocking-style code that awaits."""

    def blocking(number: int) -> int:
        world.pause()
        return coro.await_(_aio(world, number))  # type: ignore[no-any-return]

    async def main() -> int:
        check(coro._core._coro_current_or_none() is None, "a coro runs in a task's step")
        return await coro.run_sync(blocking, 4)

    check(coro.await_(coro.current()._loop.create_task(main())) == 5, "a wrong result of run_sync")


def runs_in_threads(world: World) -> None:
    # The executor ends before the coros that are left when a loop is closed.
    if world.generator.random() < 0.2 and not world.is_closing:
        check(coro.threads.run(sum, range(10)) == 45, "a wrong sum of a thread")


SCENES: list[Callable[[World], None]] = [
    yields,
    sleeps,
    recurses,
    recurses_too_deep,
    recurses_in_c,
    raises,
    generates,
    contexts,
    sorts,
    reduces,
    special_methods,
    finalizers,
    collections_of_garbage,
    own_stacks,
    garbage,
    dropped_coros,
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
]
