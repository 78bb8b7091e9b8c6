"""A soak test of coros: several threads, each with its own loop, in which random coros perform random actions.

    python tests/coro/soak/run.py --seconds 60 --seed 7
    GRAPESHOT_CORO_EVICT=always python tests/coro/soak/run.py --steps 2000

Coros yield, sleep, recurse, raise, sort, lock, send, await, time out and make garbage. Meanwhile the program
interrupts coros, lets copies of suspended stacks fail for lack of memory, runs the collector, and reads the frames of
suspended coros and of other threads. It checks invariants all the time. If one is
violated, it prints the first violations (at most three) and exits with status 1. The actions are called scenes;
scenes.py and meetings.py hold them.
"""

from __future__ import annotations

import argparse
import contextvars
import faulthandler
import gc
import itertools
import json
import logging
import os
import random
import sys
import threading
import time
import traceback
import warnings
from typing import Any

from meetings import MEETINGS
from scenes import SCENES
from world import FAMILY, INJECTED, WORLD, Broken, Injected, World, check

from grapeshot import _core, coro

# The number of coros to keep running per loop.
POPULATION = 30
# After this many steps (a step is one scene) the loop is closed while coros are still suspended, and its thread ends.
STEPS_PER_ROUND = 400
# After this many seconds without progress the process counts as hanging.
PATIENCE_S = 120.0


class Soak:
    """The state that all threads share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.ends_at = time.monotonic() + options.seconds if options.seconds else None
        self.failures: list[str] = []
        self.steps = 0
        self.kills = 0
        self.rounds = 0
        self.evictions = 0
        self.scenes: dict[str, int] = {}

    def is_over(self) -> bool:
        if self.failures or (self.options.steps and self.steps >= self.options.steps):
            return True
        return self.ends_at is not None and time.monotonic() >= self.ends_at

    def fail(self, text: str) -> None:
        self.failures.append(text)


def actor(world: World, own: int) -> None:
    """Run a few scenes one after the other. The coro ends normally or with an injected exception.

    ``own`` is the number of the coro's family: of this coro and of the coros that it starts. `loop_main` also puts the
    number into the coro's context. If this function did that, it would be too late: a finalizer may yield before the
    function's first line, and during that yield `kill_some` may kill the coro and read the number.
    """
    world.begun += 1
    generator = world.generator
    mark = generator.randbytes(generator.randrange(20, 200))
    digest = hash(mark)
    try:
        for _ in range(generator.randrange(1, 6)):
            scene = generator.choice(world.scenes)
            world.count(scene)
            try:
                scene(world)
            except INJECTED as exc:
                # A coro that could not start ends with MemoryError, which is passed on to the coros that wait for it.
                is_without_memory = world.faults and isinstance(exc, (MemoryError, coro.InParallelError))
                if own not in world.killed and not is_without_memory and not world.is_closing:
                    raise Broken(f"{scene.__name__}: raised {exc!r}, but no coro of its family was killed") from exc
                if generator.random() < 0.8:
                    raise
            check(FAMILY.get() == own, "the context is another coro's")
            check(sys.exc_info() == (None, None, None), "an exception was left behind")
            check(hash(mark) == digest, "the bytes have changed")
    finally:
        world.ended += 1
        if generator.random() < 0.2:
            coro.yield_slice()


def on_end(world: World, co: Any) -> None:
    world.actors.discard(co)
    exc = co._failure()
    if exc is not None and not isinstance(exc, INJECTED):
        world.soak.fail("".join(traceback.format_exception(exc)))


def kill_some(world: World) -> None:
    """Interrupt coros, also coros that others wait for, but never the calling coro."""
    generator = world.generator
    victims = [co for co in coro.get_live_coros() if co is not coro.current()]
    for co in generator.sample(victims, min(len(victims), generator.randrange(1, 4))):
        context = co.get_context()
        if co.done() or context is None:
            continue
        # From here on, `co` may raise an injected exception. The other coros of its family may raise one, too, because
        # they may wait for `co`.
        world.killed.add(context.get(FAMILY))
        world.soak.kills += 1
        how = generator.randrange(4)
        if how == 0:
            co.interrupt(generator.random())
        elif how == 1:
            co.shutdown()
        elif how == 2:
            co.cancel()
        else:
            co.raise_exception(Injected("injected"))


def look_around(world: World) -> None:
    """Walk the frames of all coros of this thread, and the current frames of all threads."""
    for co in coro.get_live_coros():
        frame = co.get_frame()
        names = []
        while frame is not None:
            names.append((frame.f_code.co_name, frame.f_lineno, len(frame.f_locals)))
            frame = frame.f_back
        check(not names or "actor" in names[-1][0] or len(names) < 2000, f"a strange stack: {names}")
    # Before CPython 3.11.12, a collection inside this call can deadlock with a thread that is ending (gh-106883).
    gc.disable()
    try:
        frames = list(sys._current_frames().values())
    finally:
        gc.enable()
    for frame in frames:
        walked: Any = frame
        while walked is not None:
            walked = walked.f_back
    repr(coro.get_live_coros())


def disturb(world: World) -> None:
    generator = world.generator
    what = generator.randrange(12)
    if what < 4:
        kill_some(world)
    elif what == 4:
        look_around(world)
    elif what == 5:
        coro.set_stack_slots(generator.choice([None, None, 1, 1, 2, 3, 8]))
    elif what == 6:
        gc.collect(generator.randrange(3))
    elif what == 7:
        gc.set_threshold(*generator.choice([(1, 1, 1), (5, 2, 2), (700, 10, 10)]))
    elif what == 8 and world.soak.options.faults:
        world.faults += 5
        _core._coro_fail_evictions(5)
    elif what == 9:
        world.wake_everybody()
    elif what == 10:
        traceback.format_stack()
    else:
        _core._coro_evict_always(generator.random() < 0.5 if world.is_mixed else world.evicts_always)


def loop_main(world: World) -> None:
    """The first coro of a loop. It keeps the other coros busy, then leaves them suspended."""
    FAMILY.set(0)
    WORLD.set(world)
    loop = coro.current()._loop
    loop.set_exception_handler(world.on_report)
    limit = world.soak.options.round or STEPS_PER_ROUND
    while world.steps < limit and not world.soak.is_over():
        while len(world.actors) < POPULATION:
            stack = "own" if world.generator.random() < 0.05 else "shared"
            context, family = contextvars.copy_context(), next(world.families)
            context.run(FAMILY.set, family)
            co = coro.spawn(actor, world, family, stack=stack, context=context)
            world.actors.add(co)
            co.add_done_callback(lambda co: on_end(world, co))
        for _ in range(world.generator.randrange(1, 5)):
            coro.yield_slice()
        if world.generator.random() < 0.2:
            coro.sleep_relative(world.generator.random() / 500)
        disturb(world)
    _core._coro_fail_evictions(0)
    world.is_closing = True


def one_round(soak: Soak, seed: str) -> None:
    """Run one loop in this thread. Some coros are still suspended when the loop is closed."""
    world = World(soak, random.Random(seed))
    world.is_mixed = soak.options.mixed
    world.evicts_always = coro.stack_info()["evicts_always"]
    coro.set_latency_warning(0)
    try:
        coro.run(loop_main, world)
        check(coro.get_live_coros() == [], "coros are left")
        check(coro.stack_info()["bytes_saved"] == 0, "saved stacks are left")
        check(world.begun == world.ended, f"{world.begun} coros have begun, {world.ended} have ended")
        for co in list(world.actors):
            check(co.done(), "a coro has not ended")
    except BaseException:
        soak.fail(f"round {seed}:\n{traceback.format_exc()}")
    soak.evictions += coro.stack_info()["evictions"]
    soak.rounds += 1


def worker(soak: Soak, number: int) -> None:
    """Run rounds. Each round has its own thread, which ends with the round."""
    for count in itertools.count():
        if soak.is_over():
            return
        thread = threading.Thread(target=one_round, args=(soak, f"{soak.options.seed}.{number}.{count}"))
        thread.start()
        thread.join()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.0, help="run for this long (10 if there is no --steps)")
    parser.add_argument("--steps", type=int, default=0, help="end after this many scenes in total")
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--round", type=int, default=0, help=f"scenes per loop and thread (default {STEPS_PER_ROUND})")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-faults", dest="faults", action="store_false", help="let no eviction fail")
    parser.add_argument("--mixed", action="store_true", help="change the mode of eviction all the time")
    parser.add_argument("--only", default="", help="run only these scenes (names separated by commas)")
    options = parser.parse_args(arguments)
    if not options.seconds and not options.steps:
        options.seconds = 10.0
    options.scenes = [
        scene for scene in SCENES + MEETINGS if not options.only or scene.__name__ in options.only.split(",")
    ]
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    warnings.simplefilter("ignore")  # killed coros leave unawaited coroutines
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # in development mode it warns of slow callbacks
    faulthandler.enable()
    sys.setswitchinterval(0.0005)
    soak = Soak(options)
    sys.unraisablehook = lambda unraisable: soak.fail(
        f"unraisable in {unraisable.object!r}: {unraisable.err_msg}\n"
        + "".join(traceback.format_exception(unraisable.exc_value))
    )
    threads = [threading.Thread(target=worker, args=(soak, number), daemon=True) for number in range(options.threads)]
    for thread in threads:
        thread.start()
    seen, since = -1, time.monotonic()
    while any(thread.is_alive() for thread in threads):
        threads[0].join(0.2)
        progress = soak.steps + soak.rounds
        if progress != seen:
            seen, since = progress, time.monotonic()
        elif time.monotonic() - since > PATIENCE_S:
            faulthandler.dump_traceback(all_threads=True)
            soak.fail(f"nothing has happened for {PATIENCE_S:.0f} s")
            break
    report = {name: getattr(soak, name) for name in ("steps", "rounds", "kills", "evictions", "scenes")}
    print(json.dumps(report))
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
