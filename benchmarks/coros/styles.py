"""Ways to write cooperative threads. They all have the same few methods, so that one program measures them all.

If a library has a function that does exactly what a method must do, the method is that function itself, so that no
wrapper is measured. The measured code runs inside `run(program)`, as an ordinary cooperative thread of its style.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from benchmarks import _loops

# asyncio's tasks on grapeshot's loop. They are not a style, but they are shown beside coros.
TASKS = "tasks"

Function = Callable[..., Any]


class Style(Protocol):
    """The functions that every style provides."""

    # Runs a program in a cooperative thread and returns its result. The threads that it starts run in the meantime.
    run: Function
    # spawn(function, *arguments): starts a thread, which begins to run when the caller yields.
    spawn: Function
    # Yields to everything that is ready.
    give_way: Function
    # Waits for a wake-up. In these benchmarks nobody wakes the thread.
    wait: Function
    # Waits for this many seconds.
    sleep: Function


class Coros:
    """grapeshot's coros, on its loop."""

    def __init__(self) -> None:
        from grapeshot import coro

        self.run = coro.run
        self.spawn = coro.spawn
        self.give_way = coro.yield_slice
        self.wait = coro.wait
        self.sleep = coro.sleep_relative
        self.semaphore = coro.semaphore
        self._fifo, self._channel = coro.fifo, coro.channel

    def fifo(self) -> tuple[Function, Function]:
        """Return the functions that put into a new unbounded queue and get from it."""
        queue = self._fifo()
        return queue.push, queue.pop

    def channel(self) -> tuple[Function, Function]:
        """Return the functions that send through a new channel and receive from it."""
        channel = self._channel()
        return channel.send, channel.receive


class Greenlets:
    """greenlet with a hub in Python, as one writes it by hand: a deque of ready greenlets and a heap of timers.

    Every switch goes through the hub, as in gevent. That gives every thread its turn.
    """

    def __init__(self) -> None:
        import greenlet

        kind, getcurrent = greenlet.greenlet, greenlet.getcurrent
        ready: collections.deque[Any] = collections.deque()
        timers: list[tuple[float, int, Any]] = []
        # greenlet kills a suspended greenlet when the last reference to it goes away, so keep a reference.
        waiting: list[Any] = []
        counter = itertools.count()
        monotonic = time.monotonic

        def loop() -> None:
            popleft = ready.popleft
            while ready or timers:
                if timers:
                    now = monotonic()
                    if not ready and timers[0][0] > now:
                        time.sleep(timers[0][0] - now)
                        now = monotonic()
                    while timers and timers[0][0] <= now:
                        ready.append(heapq.heappop(timers)[2])
                for _ in range(len(ready)):
                    popleft().switch()

        hub = kind(loop)

        def spawn(function: Function, *arguments: Any) -> Any:
            # greenlet passes the arguments of the first switch to the function. The hub switches without arguments.
            thread = kind(lambda: function(*arguments), hub) if arguments else kind(function, hub)
            ready.append(thread)
            return thread

        def give_way() -> None:
            ready.append(getcurrent())
            hub.switch()

        def wait() -> None:
            waiting.append(getcurrent())
            hub.switch()

        def sleep(seconds: float) -> None:
            heapq.heappush(timers, (monotonic() + seconds, next(counter), getcurrent()))
            hub.switch()

        def run(program: Function, *arguments: Any) -> Any:
            outcome: list[Any] = []
            spawn(lambda: outcome.append(program(*arguments)))
            hub.switch()
            return outcome[0]

        self.run = run
        self.spawn = spawn
        self.give_way = give_way
        self.wait = wait
        self.sleep = sleep


class Gevent:
    """gevent; nothing is patched."""

    def __init__(self) -> None:
        import gevent
        import gevent.hub
        import gevent.lock
        import gevent.queue

        def run(program: Function, *arguments: Any) -> Any:
            return gevent.spawn(program, *arguments).get()

        self.run = run
        self.spawn = gevent.spawn
        self.give_way = gevent.sleep
        self.wait = gevent.hub.get_hub().switch
        self.sleep = gevent.sleep
        self.semaphore = gevent.lock.Semaphore
        self._queues = gevent.queue

    def fifo(self) -> tuple[Function, Function]:
        """As in `Coros`, for the faster one of gevent's unbounded queues."""
        queue = self._queues.SimpleQueue()
        return queue.put, queue.get

    def channel(self) -> tuple[Function, Function]:
        """As in `Coros`."""
        channel = self._queues.Channel()
        return channel.put, channel.get


class Runloom:
    """runloom on one thread; nothing is patched."""

    def __init__(self) -> None:
        import runloom
        import runloom.sync

        def run(program: Function, *arguments: Any) -> Any:
            outcome: list[Any] = []
            runloom.run(1, lambda: outcome.append(program(*arguments)))
            return outcome[0]

        self.run = run
        self.spawn = runloom.fiber
        self.give_way = runloom.yield_now
        self.wait = runloom.sync.park_self
        self.sleep = runloom.sleep
        self.semaphore = runloom.sync.Semaphore
        self._channel = runloom.Chan

    def fifo(self) -> tuple[Function, Function]:
        """As in `Coros`, for a channel with more room than is ever used, because runloom has no unbounded queue."""
        queue = self._channel(1024)
        return queue.send, queue.recv

    def channel(self) -> tuple[Function, Function]:
        """As in `Coros`."""
        channel = self._channel()
        return channel.send, channel.recv


STYLES: dict[str, Callable[[], Style]] = {
    "grapeshot": Coros,
    "greenlet": Greenlets,
    "gevent": Gevent,
    "runloom": Runloom,
}


def why_missing(name: str) -> str | None:
    """Return why this style cannot take part here, or None. A new process tries to import its library."""
    module = {"grapeshot": "grapeshot.coro", TASKS: "grapeshot"}.get(name, name)
    return _loops.why_it_fails(f"import {module}")


def available(names: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Return the names that can take part, and the reasons for the others, which are also printed."""
    return _loops.available(names, why_missing)
