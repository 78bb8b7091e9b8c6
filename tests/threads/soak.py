"""A soak test of grapeshot.threads: loops in many threads, which come and go, and exchange items with each other.

    python tests/threads/soak.py --seconds 60 --seed 7
    GRAPESHOT_CORO_EVICT=always python tests/threads/soak.py --rounds 20 --mixed

In each round, producers and consumers (tasks of grapeshot's loop and of asyncio's, coros, and real threads) share one
queue or channel. Most of their loops end during the round: the producers and consumers in a loop are cancelled, or the
loop is closed while they still wait. Callers use `spawn_on` and `await_on` to run functions in the loops of other
threads. Meanwhile the program cancels waits, collects garbage in yet another thread, forks children (with a GIL, each
child uses its copy of the queue), and sometimes closes the queue early.

Each item has a checksum, a number and a finalizer. At the end of a round, every item that was put must have arrived
exactly once (at most once if an early close dropped items), every waiter must have ended, and every item must have been
finalized exactly once. If that is not so, the program prints at most three failures and exits with status 1. The soak
is most useful without the GIL.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import concurrent.futures
import contextlib
import faulthandler
import gc
import itertools
import json
import logging
import math
import os
import queue
import random
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
import zlib
from collections.abc import Callable, Coroutine
from typing import Any

import grapeshot
from grapeshot import _core, coro, threads

# If no round ends for this many seconds, the process counts as hanging.
PATIENCE_S = 180.0
# How long a child of a fork may take.
CHILD_CAP_S = 60
HAS_GIL = getattr(sys, "_is_gil_enabled", lambda: True)()
CLOSED = (threads.ShutDown, threads.ClosedError)
LATE = (TimeoutError, queue.Empty, queue.Full)
KINDS = ["task", "asyncio task", "coro", "thread"]


class Injected(Exception):
    """An exception that is raised in a coro that waits."""


class Broken(Exception):
    """An invariant does not hold."""


def check(holds: bool, text: str) -> None:
    if not holds:
        raise Broken(text)


class Soak:
    """The state that all rounds share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.kinds = [kind for kind in KINDS if options.has_coros or kind != "coro"]
        self.ends_at = time.monotonic() + options.seconds if options.seconds else None
        self.failures: list[str] = []
        self.counts: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()

    def is_over(self) -> bool:
        if self.failures or (self.options.rounds and self.counts["rounds"] >= self.options.rounds):
            return True
        return self.ends_at is not None and time.monotonic() >= self.ends_at

    def fail(self, text: str) -> None:
        self.failures.append(text)

    def one_function(self, generator: random.Random) -> Callable[[int, float], Any]:
        """Return a function for `spawn_on`: an async function or, if there are coros, perhaps a plain one."""
        return answer if not self.options.has_coros or generator.random() < 0.5 else answer_in_coro

    def count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self.counts[name] += number


# ---------------------------------------------------------------- items


class Item:
    """An object that a producer puts into the queue or channel. When freed, it adds its number to `world.finalized`.

    Every eighth item also puts its number into `world.graveyard`.
    """

    def __init__(self, world: World, number: int, generator: random.Random) -> None:
        self.world, self.number = world, number
        self.mark = generator.randbytes(generator.randrange(100))
        self.digest = zlib.crc32(self.mark, number)
        # Only the collector can free an item that refers to itself.
        self.itself = self if generator.random() < 0.1 else None

    def is_whole(self) -> bool:
        return zlib.crc32(self.mark, self.number) == self.digest

    def __del__(self) -> None:
        self.world.finalized.append(self.number)
        if self.number % 8 == 0:
            self.world.graveyard.put(self.number)


class World:
    """One round: a queue or channel, and the loops and threads that use it."""

    def __init__(self, soak: Soak, generator: random.Random) -> None:
        self.soak, self.generator = soak, generator
        self.capacity = generator.choice([0, 1, 2, 7])
        self.is_queue = generator.random() < 0.5
        self.shared: Any = threads.Queue(self.capacity) if self.is_queue else threads.Channel(self.capacity or math.inf)
        self.put = self.shared.put if self.is_queue else self.shared.send
        self.get = self.shared.get if self.is_queue else self.shared.receive
        self.aput = self.shared.aput if self.is_queue else self.shared.asend
        self.aget = self.shared.aget if self.is_queue else self.shared.areceive
        self.graveyard: threads.Queue[int] = threads.Queue()
        self.numbers = itertools.count()
        self.made: list[int] = []
        self.sent: list[int] = []
        self.got: list[int] = []
        self.finalized: list[int] = []
        # Loops that may end at any time.
        self.transient: list[asyncio.AbstractEventLoop] = []
        # Loops that run until the end of the round.
        self.services: list[asyncio.AbstractEventLoop] = []
        # Loops that are not closed yet, although the threads that ran them have ended.
        self.forgotten: list[asyncio.AbstractEventLoop] = []
        # Workers that can be interrupted: (the worker's loop, a function that interrupts the worker there)
        self.victims: list[tuple[asyncio.AbstractEventLoop, Callable[[], object]]] = []
        self.drops_items = False
        self.is_over = False

    def make(self, generator: random.Random) -> Item:
        number = next(self.numbers)
        self.made.append(number)
        return Item(self, number, generator)

    def arrived(self, item: Item) -> None:
        check(item.is_whole(), f"item {item.number} is broken")
        self.got.append(item.number)
        if self.is_queue:
            self.shared.task_done()

    def close(self, *, drops_items: bool = False) -> None:
        if not self.is_queue:
            self.shared.close()
        elif drops_items:
            self.drops_items = True
            self.shared.shutdown(immediate=True)
        else:
            self.shared.shutdown()

    def report(self, what: str) -> None:
        """Report the exception that is being handled."""
        self.soak.fail(f"{what}:\n{traceback.format_exc()}")

    def thread(self, what: str, function: Callable[..., object], *args: Any) -> threading.Thread:
        def run() -> None:
            try:
                function(*args)
            except BaseException:
                self.report(what)

        thread = threading.Thread(target=run, name=what, daemon=True)
        thread.start()
        return thread


# ---------------------------------------------------------------- ways to wait


async def answer(number: int, delay_s: float) -> int:
    await asyncio.sleep(delay_s)
    return number + 1


def answer_in_coro(number: int, delay_s: float) -> int:
    coro.sleep_relative(delay_s) if delay_s else coro.yield_slice()
    return number + 1


class Way:
    """How a worker waits. If a wait has timed out or was interrupted, the methods return None."""

    def __init__(self, stay: Stay) -> None:
        self.stay, self.world = stay, stay.world

    async def put(self, item: Item, limit_s: float | None) -> bool | None: ...
    async def get(self, limit_s: float | None) -> Item | None: ...
    async def call(self, number: int, generator: random.Random) -> int | None: ...
    async def pause(self, seconds: float) -> None: ...


class InThread(Way):
    async def put(self, item: Item, limit_s: float | None) -> bool | None:
        try:
            self.world.put(item, timeout=0.05 if limit_s is None else limit_s)
        except LATE:
            return None
        return True

    async def get(self, limit_s: float | None) -> Item | None:
        with contextlib.suppress(*LATE):
            return self.world.get(timeout=0.05 if limit_s is None else limit_s)  # type: ignore[no-any-return]
        return None

    async def call(self, number: int, generator: random.Random) -> int | None:
        function = self.world.soak.one_function(generator)
        return threads.spawn_on(self.world.services[0], function, number, 0).result(PATIENCE_S)

    async def pause(self, seconds: float) -> None:
        time.sleep(seconds)


class InCoro(Way):
    def _interruptible(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except LATE:
            return None
        except (Injected, asyncio.CancelledError):
            if self.stay.is_leaving:
                raise
            self.stay.counts["interruptions"] += 1
            return None

    def _wait(self, function: Callable[..., Any], args: tuple[Any, ...], limit_s: float | None) -> Any:
        if limit_s is not None and self.stay.generator.random() < 0.5:
            return self._interruptible(coro.with_timeout, limit_s, function, *args)
        return self._interruptible(function, *args, **({} if limit_s is None else {"timeout": limit_s}))

    async def put(self, item: Item, limit_s: float | None) -> bool | None:
        def put(item: Item, **kwargs: Any) -> bool:
            self.world.put(item, **kwargs)
            return True

        return self._wait(put, (item,), limit_s)  # type: ignore[no-any-return]

    async def get(self, limit_s: float | None) -> Item | None:
        return self._wait(self.world.get, (), limit_s)  # type: ignore[no-any-return]

    async def call(self, number: int, generator: random.Random) -> int | None:
        service = generator.choice(self.world.services)
        delay_s = generator.choice([0, 0.001])

        def call() -> Any:
            if generator.random() < 0.5:
                return coro.await_(threads.await_on(service, answer(number, delay_s)))
            function = self.world.soak.one_function(generator)
            future = threads.spawn_on(self.world.services[0], function, number, delay_s)
            return coro.await_(asyncio.wrap_future(future))

        return self._interruptible(call)  # type: ignore[no-any-return]

    async def pause(self, seconds: float) -> None:
        self._interruptible(coro.sleep_relative, seconds)


class InTask(Way):
    task: asyncio.Task[Any] | None = None

    async def _interruptible(self, coroutine: Coroutine[Any, Any, Any], limit_s: float | None = None) -> Any:
        # If the collector finds the tasks of a closed loop, it may close this coroutine before the coroutine of its
        # task. Then this coroutine leaves the `async with`, which frees the Timeout. If only the Timeout still referred
        # to the task, the task is freed, too, while this coroutine runs. The task closes its own coroutine, which
        # closes this one again, and CPython 3.11 crashes. `self.task` keeps the task alive.
        self.task = asyncio.current_task()
        try:
            async with asyncio.timeout(limit_s):
                return await coroutine
        except LATE:
            return None
        except asyncio.CancelledError:
            if self.stay.is_leaving or self.task is None:
                raise
            self.task.uncancel()
            self.stay.counts["interruptions"] += 1
            return None

    async def put(self, item: Item, limit_s: float | None) -> bool | None:
        async def put() -> bool:
            await self.world.aput(item)
            return True

        return await self._interruptible(put(), limit_s)  # type: ignore[no-any-return]

    async def get(self, limit_s: float | None) -> Item | None:
        return await self._interruptible(self.world.aget(), limit_s)  # type: ignore[no-any-return]

    async def call(self, number: int, generator: random.Random) -> int | None:
        service = generator.choice(self.world.services)
        delay_s, limit_s = generator.choice([0, 0.001]), generator.choice([None, None, 0.001])

        async def spawn() -> Any:
            function = self.world.soak.one_function(generator)
            return await asyncio.wrap_future(threads.spawn_on(self.world.services[0], function, number, delay_s))

        if generator.random() < 0.5:
            return await self._interruptible(spawn(), limit_s)  # type: ignore[no-any-return]
        call = threads.await_on(service, answer(number, delay_s))
        return await self._interruptible(call, limit_s)  # type: ignore[no-any-return]

    async def pause(self, seconds: float) -> None:
        await self._interruptible(asyncio.sleep(seconds))


# ---------------------------------------------------------------- workers


def limit_of(generator: random.Random) -> float | None:
    return None if generator.random() < 0.6 else generator.random() / 200


async def produce(way: Way, generator: random.Random, count: int) -> None:
    for _ in range(count):
        item = way.world.make(generator)
        while not await way.put(item, limit_of(generator)):
            way.stay.counts["puts that were given up"] += 1
        way.world.sent.append(item.number)
        del item
        if generator.random() < 0.05:
            await way.pause(generator.random() / 500)


async def consume(way: Way, generator: random.Random, count: float) -> None:
    taken = 0
    while taken < count and not (way.stay.is_leaving and isinstance(way, InThread)):
        item = await way.get(limit_of(generator))
        if item is None:
            way.stay.counts["gets that were given up"] += 1
            continue
        way.world.arrived(item)
        taken += 1
        del item


async def call(way: Way, generator: random.Random, count: int) -> None:
    for number in range(count):
        if (result := await way.call(number, generator)) is not None:
            check(result == number + 1, f"a wrong answer: {result}")
            way.stay.counts["calls"] += 1
        if generator.random() < 0.2:
            ask_transient(way, generator, number)


def ask_transient(way: Way, generator: random.Random, number: int) -> None:
    """Start a call in a loop that may end at any time. Nobody waits for the call; a callback checks its result."""
    loops = list(way.world.transient)
    if not loops:
        return
    try:
        future = threads.spawn_on(generator.choice(loops), answer, number, 0)
    except RuntimeError as error:
        check("closed" in str(error), f"an unexpected error: {error!r}")
        return
    if generator.random() < 0.5:
        future.cancel()

    def compare(future: concurrent.futures.Future[int]) -> None:
        # Not `check`, because an exception that a callback raises is only logged.
        if not future.cancelled() and (future.exception() is not None or future.result() != number + 1):
            way.world.soak.fail(f"a wrong answer of a loop that may end: {future}")

    future.add_done_callback(compare)
    way.stay.counts["calls of loops that may end"] += 1


def drive(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Run a coroutine that is never suspended, because its waits block."""
    with contextlib.suppress(StopIteration):
        coroutine.send(None)
        raise Broken("the coroutine was suspended")


# ---------------------------------------------------------------- the stays of loops


class Stay:
    """The life of one loop and its workers, or of one real thread that does its jobs one after the other."""

    def __init__(self, world: World, seed: str, kind: str, *, is_permanent: bool) -> None:
        self.world, self.kind, self.is_permanent = world, kind, is_permanent
        self.generator = random.Random(seed)
        self.counts: collections.Counter[str] = collections.Counter()
        self.is_leaving = False
        self.loop: Any = None

    def jobs(self) -> list[tuple[Callable[..., Coroutine[Any, Any, None]], float]]:
        """The functions of the workers, and how often each does its work."""
        if self.is_permanent:
            return [(consume, math.inf)] * self.generator.randrange(1, 3)
        chosen: list[tuple[Callable[..., Coroutine[Any, Any, None]], float]] = []
        for _ in range(self.generator.randrange(1, 6)):
            function = self.generator.choice([produce, produce, consume, call])
            chosen.append((function, self.generator.randrange(1, 40 if function is not call else 8)))
        return chosen

    def run(self) -> None:
        if self.kind == "thread":
            self._run_in_thread()
        else:
            self._run_loop()
        for name, number in self.counts.items():
            self.world.soak.count(name, number)
        self.world.soak.count(f"stays: {self.kind}")

    async def _work(self, way: Way, function: Any, generator: random.Random, count: float) -> None:
        try:
            await function(way, generator, count)
        except CLOSED:
            pass
        except BaseException as error:
            # CancelledError, GeneratorExit and Injected may end a worker whose loop is closed. So may RuntimeError:
            # asyncio's functions raise it if the worker's thread is ending, because no loop runs there any more.
            is_end = isinstance(error, asyncio.CancelledError | GeneratorExit | Injected) or (
                isinstance(error, RuntimeError) and "event loop" in str(error)
            )
            if not (is_end and self.is_leaving):
                self.world.report(f"{function.__name__} in a {self.kind}")

    def _run_in_thread(self) -> None:
        for function, count in self.jobs():
            self.is_leaving = False
            # Nobody can interrupt a real thread. So a consumer stops by itself after this time, unless it is permanent.
            leaving = threading.Timer(0.2, lambda: setattr(self, "is_leaving", not self.is_permanent))
            leaving.daemon = True
            leaving.start()
            drive(self._work(InThread(self), function, random.Random(self.generator.random()), count))
            leaving.cancel()

    def _run_loop(self) -> None:
        if self.kind != "asyncio task" and self.world.soak.options.mixed:
            _core._coro_evict_always(self.generator.random() < 0.5)
        self.loop = asyncio.SelectorEventLoop() if self.kind == "asyncio task" else grapeshot.new_event_loop()
        self.loop.set_exception_handler(self._on_report)
        self.world.transient.append(self.loop)
        how = self.generator.choice(["cancel", "cancel", "close", *(["forget"] if self.kind == "coro" else [])])
        try:
            if self.kind == "coro":
                self.loop.run_until_complete(coro.run_sync(self._main_coro))
            else:
                self.loop.run_until_complete(self._main_task())
            if how == "cancel":
                self.loop.run_until_complete(self._cancel_all())
        finally:
            self.world.transient.remove(self.loop)
            if how == "forget":
                # The thread ends now, and with it the coros. Another thread closes the loop later.
                self.world.forgotten.append(self.loop)
            else:
                self.loop.close()

    async def _main_task(self) -> None:
        async def worker(function: Any, generator: random.Random, count: float) -> None:
            # The loop may be closed after the queue has reserved an item or a place for the task, but before the task
            # runs. The queue gets that item or place back only when the task is freed. So nothing here may keep the
            # task alive.
            task = weakref.ref(asyncio.current_task())  # type: ignore[type-var]

            def interrupt() -> None:
                if not self.is_leaving and (alive := task()) is not None:
                    alive.cancel()

            self._expose(interrupt)
            await self._work(InTask(self), function, generator, count)

        workers = [
            asyncio.ensure_future(worker(function, random.Random(self.generator.random()), count))
            for function, count in self.jobs()
        ]
        await asyncio.wait(workers, timeout=None if self.is_permanent else self.generator.random() / 5)
        self.is_leaving = True

    def _main_coro(self) -> None:
        def worker(function: Any, generator: random.Random, count: float) -> None:
            co = coro.current()

            def interrupt() -> None:
                with contextlib.suppress(coro.DeadCoroutine):
                    if self.is_leaving:
                        return
                    if generator.random() < 0.5:
                        co.interrupt()
                    else:
                        co.raise_exception(Injected("injected"))

            self._expose(interrupt)
            drive(self._work(InCoro(self), function, generator, count))

        for function, count in self.jobs():
            stack = "own" if self.generator.random() < 0.1 else "shared"
            coro.spawn(worker, function, random.Random(self.generator.random()), count, stack=stack)
        others = [co for co in coro.get_live_coros() if co is not coro.current()]
        ends_at = math.inf if self.is_permanent else time.monotonic() + self.generator.random() / 5
        while time.monotonic() < ends_at and not all(co.done() for co in others):
            coro.sleep_relative(0.005)
        self.is_leaving = True

    async def _cancel_all(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _expose(self, interrupt: Callable[[], object]) -> None:
        self.world.victims.append((self.loop, interrupt))

    def _on_report(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "destroyed" in context["message"] and self.is_leaving:
            return  # the loop was closed before the task ended
        self.world.soak.fail(f"reported: {context}\n{''.join(traceback.format_exception(context.get('exception')))}")


def move(world: World, seed: str) -> None:
    """Run several stays, one after the other, each in a thread of its own, which ends with the stay."""
    generator = random.Random(seed)
    for count in range(generator.randrange(1, 4)):
        stay = Stay(world, f"{seed}.{count}", generator.choice(world.soak.kinds), is_permanent=False)
        world.thread(f"stay of a {stay.kind}", stay.run).join()


# ---------------------------------------------------------------- disturbances


def disturb(world: World, seed: str) -> None:
    generator = random.Random(seed)
    closes_at = time.monotonic() + generator.random() / 2 if generator.random() < 0.3 else math.inf
    while not world.is_over:
        time.sleep(generator.random() / 100)
        what = generator.randrange(10)
        if what < 5:
            for loop, interrupt in generator.sample(world.victims, min(3, len(world.victims))):
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(interrupt)
        elif what < 8:
            gc.collect(generator.randrange(3))
        elif what == 8:
            world.shared.qsize()
            repr(world.shared)
        elif generator.random() < world.soak.options.forks:
            fork(world, generator)
        if time.monotonic() >= closes_at:
            closes_at = math.inf
            world.close(drops_items=generator.random() < 0.5)
            world.soak.count("early closes")


def fork(world: World, generator: random.Random) -> None:
    what = generator.randrange(3)
    pid = os.fork()
    if pid == 0:
        in_child(world, what)
    ends_at = time.monotonic() + 2 * CHILD_CAP_S
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > ends_at:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            status = -1
            break
        time.sleep(0.005)
    if status != 0:
        world.soak.fail(f"a child has ended with the wait status {status}")
    world.soak.count("forks")


def in_child(world: World, what: int) -> None:
    """Use the child's copy of the queue, then perhaps a new loop, and exit. No waiter of the queue exists in the child.

    Without a GIL, the child leaves the queue alone. If another thread uses an object during a fork, the object may stay
    locked in the child by a thread that does not exist there, and then the child hangs. This happens with CPython's own
    dict, deque and SimpleQueue, too (3.14.7).
    """
    signal.alarm(CHILD_CAP_S)
    try:
        if HAS_GIL:
            with contextlib.suppress(*LATE, *CLOSED):
                while True:
                    world.get(block=False)
            with contextlib.suppress(*LATE, *CLOSED):
                world.put(Item(world, 1, random.Random(1)), block=False)
                check(world.get(block=False).is_whole(), "the child has got a broken item")
        if what == 1:
            check(grapeshot.run(answer(1, 0)) == 2, "a wrong answer in the child")
        elif what == 2:
            check(coro.run(answer_in_coro, 1, 0) == 2, "a wrong answer in the child")
    except BaseException:
        traceback.print_exc()
        os._exit(3)
    os._exit(0)


# ---------------------------------------------------------------- rounds


def serve(world: World, loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        loop.run_until_complete(Stay._cancel_all(None))  # type: ignore[arg-type]
    finally:
        loop.close()


def join_queue(world: World, kind: str) -> None:
    if kind == "coro":
        coro.run(world.shared.join)
    elif kind == "thread":
        world.shared.join()
    else:
        factory = asyncio.SelectorEventLoop if kind == "asyncio task" else grapeshot.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(world.shared.ajoin())


def one_round(soak: Soak, seed: str) -> None:
    generator = random.Random(seed)
    world = World(soak, generator)
    world.services.append(grapeshot.new_event_loop())
    world.services.append(asyncio.SelectorEventLoop() if generator.random() < 0.3 else grapeshot.new_event_loop())
    services = [world.thread("service", serve, world, loop) for loop in world.services]
    permanent = []
    for number in range(2):
        stay = Stay(world, f"{seed}.p{number}", generator.choice(world.soak.kinds), is_permanent=True)
        permanent.append(world.thread(f"permanent {stay.kind}", stay.run))
    movers = [world.thread("mover", move, world, f"{seed}.m{number}") for number in range(generator.randrange(2, 6))]
    disturber = world.thread("disturber", disturb, world, f"{seed}.d")
    for thread in movers:
        thread.join()
    if world.is_queue and not world.shared.is_shutdown:
        kind = generator.choice(world.soak.kinds)
        world.thread(f"join of a {kind}", join_queue, world, kind).join()
        if not world.shared.is_shutdown:
            check(world.shared.unfinished_tasks == 0, "join() has returned too early")
    world.close()
    for thread in permanent:
        thread.join()
    world.is_over = True
    disturber.join()
    for loop in world.services:
        loop.call_soon_threadsafe(loop.stop)
    for thread in services:
        thread.join()
    for loop in world.forgotten:
        loop.close()
    check_round(world)
    soak.count("items", len(world.sent))
    soak.count("rounds")


def check_round(world: World) -> None:
    sent, got = collections.Counter(world.sent), collections.Counter(world.got)
    check(world.shared.qsize() == 0, f"{world.shared.qsize()} items are left")
    repeated = [number for number, count in got.items() if count > 1]
    check(not repeated, f"items have arrived twice: {repeated}")
    check(not got - sent, f"items have arrived that were not put: {got - sent}")
    if not world.drops_items:
        check(sent == got, f"items are lost: {sent - got}")
    # The items that are not yet finalized belong to tasks and coros of closed loops. Drop what keeps those alive.
    world.victims.clear()
    world.forgotten.clear()
    ends_at = time.monotonic() + PATIENCE_S / 3
    while len(world.finalized) < len(world.made) and time.monotonic() < ends_at:
        gc.collect()
        time.sleep(0.01)
    check(sorted(world.finalized) == sorted(world.made), "an item was not finalized exactly once")
    in_graveyard = sorted(world.graveyard.get(block=False) for _ in range(world.graveyard.qsize()))
    check(
        in_graveyard == [number for number in sorted(world.made) if number % 8 == 0], "the finalizers' queue is wrong"
    )


def worker(soak: Soak, number: int) -> None:
    for count in itertools.count():
        if soak.is_over():
            return
        seed = f"{soak.options.seed}.{number}.{count}"
        try:
            one_round(soak, seed)
        except BaseException:
            soak.fail(f"round {seed}:\n{traceback.format_exc()}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.0, help="run for this long (10 if there is no --rounds)")
    parser.add_argument("--rounds", type=int, default=0, help="end after this many rounds in total")
    parser.add_argument("--threads", type=int, default=2, help="rounds at the same time, each with about ten threads")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--forks", type=float, default=0.1, help="how likely each possible fork is")
    parser.add_argument("--mixed", action="store_true", help="use both ways to evict stacks, lazy and always")
    parser.add_argument("--no-coros", dest="has_coros", action="store_false", help="only tasks and real threads")
    options = parser.parse_args(arguments)
    if not options.seconds and not options.rounds:
        options.seconds = 10.0
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    warnings.simplefilter("ignore")  # about forks in a program with threads, and coroutines that nobody awaits
    for name in ("asyncio", "concurrent.futures"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    faulthandler.enable()
    sys.setswitchinterval(0.0005)
    soak = Soak(options)
    sys.unraisablehook = lambda unraisable: soak.fail(
        f"unraisable in {unraisable.object!r}: {unraisable.err_msg}\n"
        + "".join(traceback.format_exception(unraisable.exc_value))
    )
    workers = [threading.Thread(target=worker, args=(soak, number), daemon=True) for number in range(options.threads)]
    for thread in workers:
        thread.start()
    seen, since = -1, time.monotonic()
    while any(thread.is_alive() for thread in workers):
        time.sleep(0.2)
        if soak.counts["rounds"] != seen:
            seen, since = soak.counts["rounds"], time.monotonic()
        elif time.monotonic() - since > PATIENCE_S:
            faulthandler.dump_traceback(all_threads=True)
            soak.fail(f"no round has ended for {PATIENCE_S:.0f} s")
            break
        elif soak.failures and time.monotonic() - since > 10:
            break
    print(json.dumps(dict(sorted(soak.counts.items()))))
    for failure in soak.failures[:3]:
        print(failure, file=sys.stderr)
    if soak.failures:
        print(f"FAILED, seed {options.seed}: {len(soak.failures)} failures", file=sys.stderr)
        # Do not wait for the threads: one may hang.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
