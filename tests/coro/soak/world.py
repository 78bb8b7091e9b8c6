"""The state that the coros of one loop of run.py share, and the building blocks of their scenes."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import contextvars
import itertools
import random
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from grapeshot import coro


class Broken(Exception):
    """An invariant does not hold."""


class Injected(Exception):
    """The exception that `raise_exception` injects."""


# The exceptions that a coro may raise after a member of its family (see FAMILY) was killed, or after a member could not
# get memory for its stack.
INJECTED = (asyncio.CancelledError, coro.CoroCancelled, Injected, coro.InParallelError, MemoryError)

# Each coro that `loop_main` spawns forms a family with all its descendants. This is the number of the current coro's
# family.
FAMILY: contextvars.ContextVar[int] = contextvars.ContextVar("family", default=-1)
# The world of the loop in which the code runs.
WORLD: contextvars.ContextVar[World] = contextvars.ContextVar("world")
LEVEL: contextvars.ContextVar[int] = contextvars.ContextVar("level", default=0)


def check(holds: bool, text: str) -> None:
    if not holds:
        raise Broken(text)


def result_of(co: coro.Coro) -> Any:
    co.join()
    return co.result()


class World:
    """A loop, and the objects that its coros share."""

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
            return  # from a killed coro that nobody waits for
        if self.is_closing and ("asyncgen" in context or "destroyed" in context["message"]):
            # asyncio closes asynchronous generators and cancels tasks before the remaining coros are ended. So these
            # coros may still use generators that are being closed, and may leave tasks that have not ended.
            return
        text = "".join(traceback.format_exception(exc)) if exc else ""
        self.soak.fail(f"reported: {context}\n{text}")

    @contextlib.contextmanager
    def limited(self, most_s: float = 0.02) -> Iterator[None]:
        """A timeout around a block. When it expires, it ends the block silently."""
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
