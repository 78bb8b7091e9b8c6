"""Measure a style of cooperative threading, in this process: `python -m benchmarks.coros.programs KIND --style STYLE`.

A kind does rounds of a fixed number of operations. After a warm-up, it repeats rounds until it has spent enough CPU
time. (A kind that sleeps does one or two rounds, without a warm-up.) The result is the median of the rounds. The start
of the round's threads is measured only in `spawn` and in the kinds about two hubs.

Prints `{"cpu_ns": per operation, "rounds": ...}`. If sleeps have ended too early, their number is added as `early`, and
the number of all sleeps as `sleeps`. Kinds about two hubs add `wall_ns`. Kinds about memory print
`{"kib": per thread, ...}` instead.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

from benchmarks._loops import print_outcome
from benchmarks.coros import across, hubs, memory
from benchmarks.coros.rounds import Stopwatch, Taken, measure
from benchmarks.coros.styles import STYLES, Function, Style

# Runs one round in a thread of the style, and returns its cost.
Round = Callable[[Style], Taken]

THREADS = 1000
# How often each thread yields in a round.
TURNS = 20


# ---------------------------------------------------------------- giving way


def _giving_way(style: Style, body: Function) -> Taken:
    """Measure a thousand threads that only yield; one turn of all of them is THREADS operations.

    `body` yields TURNS times and a few times more. The first two turns (the threads begin in the first one) and the
    last ones, in which the threads end, are not measured.
    """
    give_way = style.give_way
    for _ in range(THREADS):
        style.spawn(body)
    give_way()
    give_way()
    stopwatch = Stopwatch()
    for _ in range(TURNS):
        give_way()
    taken = stopwatch.taken(THREADS * TURNS)
    for _ in range(10):
        give_way()
    return taken


def yield_alone(style: Style) -> Taken:
    """One thread yields while nothing else is ready."""
    give_way = style.give_way
    stopwatch = Stopwatch()
    for _ in range(THREADS * TURNS):
        give_way()
    return stopwatch.taken(THREADS * TURNS)


def yield_shallow(style: Style) -> Taken:
    """Yield in the thread's own function."""
    give_way = style.give_way

    def body() -> None:
        for _ in range(TURNS + 4):
            give_way()

    return _giving_way(style, body)


def yield_deep(style: Style) -> Taken:
    """Yield 20 Python functions deep."""
    give_way = style.give_way

    def down(left: int) -> None:
        if left:
            down(left - 1)
            return
        for _ in range(TURNS + 4):
            give_way()

    return _giving_way(style, functools.partial(down, 19))


def yield_reduce(style: Style) -> Taken:
    """Yield in a function that functools.reduce calls, so that the C frame of reduce is on the stack."""
    give_way = style.give_way

    def step(total: int, value: int) -> int:
        give_way()
        return total + value

    return _giving_way(style, functools.partial(functools.reduce, step, range(TURNS + 5)))


def yield_sorted(style: Style) -> Taken:
    """Yield in a key function: sorting keeps more than 2 KiB on the stack."""
    give_way = style.give_way

    def key(value: int) -> int:
        give_way()
        return value

    return _giving_way(style, functools.partial(sorted, range(TURNS + 4), key=key))


def spawn(style: Style) -> Taken:
    """Spawn threads that do nothing, a hundred at a time, and let them run and end."""
    ended = 0

    def body() -> None:
        nonlocal ended
        ended += 1

    start, give_way, count = style.spawn, style.give_way, 10_000
    stopwatch = Stopwatch()
    for _ in range(count // 100):
        for _ in range(100):
            start(body)
        give_way()
    taken = stopwatch.taken(count)
    if ended != count:
        raise AssertionError(f"{ended} of {count} ended")
    return taken


# ---------------------------------------------------------------- handing over

ROUND_TRIPS = 5000


def _ping_pong(style: Any, send: Function, receive: Function, reply: Function, get_reply: Function) -> Taken:
    """Two threads hand a value to each other in turn: there and back is one operation."""

    def partner() -> None:
        for _ in range(ROUND_TRIPS + 1):
            receive()
            reply(1)

    style.spawn(partner)
    send(1)
    get_reply()
    stopwatch = Stopwatch()
    for _ in range(ROUND_TRIPS):
        send(1)
        get_reply()
    return stopwatch.taken(ROUND_TRIPS)


def semaphore(style: Any) -> Taken:
    """Like `_ping_pong`, but with semaphores, which hand over no value."""
    ping, pong = style.semaphore(0), style.semaphore(0)
    acquire_ping, release_pong = ping.acquire, pong.release
    release_ping, acquire_pong = ping.release, pong.acquire

    def partner() -> None:
        for _ in range(ROUND_TRIPS + 1):
            acquire_ping()
            release_pong()

    style.spawn(partner)
    release_ping()
    acquire_pong()
    stopwatch = Stopwatch()
    for _ in range(ROUND_TRIPS):
        release_ping()
        acquire_pong()
    return stopwatch.taken(ROUND_TRIPS)


def fifo(style: Any) -> Taken:
    """Unbounded queues."""
    return _ping_pong(style, *style.fifo(), *style.fifo())


def channel(style: Any) -> Taken:
    """Channels: a sender waits until its value is received."""
    return _ping_pong(style, *style.channel(), *style.channel())


# ---------------------------------------------------------------- time

# The number of threads that are due together, and the time between two moments when they are due.
MANY, APART_S = 10_000, 0.5


def _sleeping(style: Style, count: int, wakes: int, body: Function) -> Taken:
    """Run `body` in `count` threads; each sleeps `wakes` times. The start of each thread's first sleep is not measured.

    `body(woken)` calls `woken(is_early)` after each sleep.
    """
    left, early = count * wakes, 0

    def woken(is_early: bool) -> None:
        nonlocal left, early
        left -= 1
        if is_early:
            early += 1

    for _ in range(count):
        style.spawn(body, woken)
    style.give_way()
    stopwatch = Stopwatch()
    while left:
        style.sleep(0.05)
    return stopwatch.taken(count * wakes, early)


def due_together(style: Style) -> Taken:
    """10,000 threads repeatedly sleep until the same moment."""
    count, wakes, apart_s = MANY, 3, APART_S
    sleep, monotonic = style.sleep, time.monotonic
    first_s = monotonic() + apart_s

    def body(woken: Function) -> None:
        deadline_s = first_s
        for _ in range(wakes):
            sleep(deadline_s - monotonic())
            woken(monotonic() < deadline_s)
            deadline_s += apart_s

    return _sleeping(style, count, wakes, body)


def sleepers(style: Style) -> Taken:
    """1,000 threads repeatedly sleep for 10 to 20 ms, each for a time of its own."""
    count, wakes = THREADS, 20
    sleep, monotonic = style.sleep, time.monotonic
    numbers = itertools.count()

    def body(woken: Function) -> None:
        delay_s = 0.010 + (next(numbers) * 7919 % count) * 1e-5
        for _ in range(wakes):
            began_s = monotonic()
            sleep(delay_s)
            woken(monotonic() - began_s < delay_s)

    return _sleeping(style, count, wakes, body)


# ---------------------------------------------------------------- main

KINDS: dict[str, Round] = {
    kind.__name__: kind
    for kind in (
        yield_alone,
        yield_shallow,
        yield_deep,
        yield_reduce,
        yield_sorted,
        spawn,
        semaphore,
        fifo,
        channel,
        due_together,
        sleepers,
    )
}
# The number of rounds for kinds whose rounds are long and mostly idle.
SLEEPING = {"due_together": 1, "sleepers": 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=[*KINDS, *across.KINDS, *hubs.KINDS, *memory.KINDS])
    parser.add_argument("--style", required=True, help="a style that has this kind and is installed")
    parser.add_argument("--seconds", type=float, default=0.4, help="CPU seconds to measure (0.4)")
    parser.add_argument(
        "--threads", type=int, default=100_000, help="suspended threads if KIND is about memory (100,000)"
    )
    args = parser.parse_args()
    if args.kind in hubs.KINDS:
        print_outcome(lambda: hubs.measure(args.kind, args.style, args.seconds))
        return
    sample: dict[str, float]
    if args.style in across.KINDS.get(args.kind, {}):
        sample = across.KINDS[args.kind][args.style](args.seconds)
    elif args.kind in memory.KINDS:
        memory.measure(STYLES[args.style](), memory.KINDS[args.kind], args.threads)
    else:
        style, kind = STYLES[args.style](), KINDS[args.kind]
        sample = style.run(measure, lambda: kind(style), args.seconds, SLEEPING.get(args.kind))
    print(json.dumps(sample))


if __name__ == "__main__":
    main()
