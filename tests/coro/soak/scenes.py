"""Scenes of run.py for single coros. Each scene checks its results and lets injected exceptions through."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import gc
import json
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from world import FAMILY, INJECTED, LEVEL, WORLD, Broken, World, check, result_of

from grapeshot import coro

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
    """Has no `__init__`: a thread that walks frames could keep the frame of `__init__`, and so the object, alive."""

    log: list[int]

    def __del__(self) -> None:
        with contextlib.suppress(*INJECTED):
            coro.yield_slice()
        self.log.append(1)


def finalizers(world: World) -> None:
    """`del` drops the only reference to an object, and the object's finalizer yields."""
    log: list[int] = []
    victim = Finalized()
    victim.log = log
    del victim
    check(log == [1], "the finalizer has not run to its end")


class Collected:
    """Has a finalizer that tries to yield.

    The collector calls the finalizer, so the yield succeeds only in a coro that was started with `stack="own"`.
    """

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
            # The collector may call this finalizer at any point. The exception was meant for the code there: the coro
            # was killed, or a timeout of that code has expired, for example. Because the exception cannot leave a
            # finalizer, cancel the coro instead. `actor` accepts that only from a coro of a killed family, so count the
            # family as killed.
            WORLD.get().killed.add(FAMILY.get())
            coro.current().cancel()
        else:
            self.log.append("yielded")


def collections_of_garbage(world: World) -> None:
    log: list[str] = []
    Collected(log)
    world.pause()
    if world.generator.random() < 0.3:
        gc.collect()
        # The log may still be empty: another thread, or a coro on a stack of its own, may be collecting the object.
        check(len(log) <= 1, f"a finalizer has run twice: {log}")


_compare_type = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int))
_qsort = ctypes.CDLL(None).qsort
_qsort.restype = None


def own_stacks(world: World) -> None:
    """C's qsort calls a function that yields, in a coro on a stack of its own."""
    values = [world.generator.randrange(100) for _ in range(8)]
    failures: list[BaseException] = []

    def compare(left: Any, right: Any) -> int:
        if not failures:
            try:
                world.pause()
            except BaseException as exc:  # an exception cannot pass through qsort
                failures.append(exc)
        return left[0] - right[0]

    def sort() -> list[int]:
        array = (ctypes.c_int * len(values))(*values)
        _qsort(array, len(values), ctypes.sizeof(ctypes.c_int), _compare_type(compare))
        if failures:
            raise failures[0]
        return list(array)

    check(result_of(coro.spawn(sort, stack="own")) == sorted(values), "qsort has not sorted")


# ---------------------------------------------------------------- garbage


class Node:
    pass


def garbage(world: World) -> None:
    """Make cycles of frames, exceptions, coros and generators."""
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
]
