"""Measure what the loop's own calls cost, in this process: `python -m benchmarks.micro <kind> --loop <loop>`.

Each kind does rounds of a fixed number of operations. After a warm-up, rounds are run until enough CPU time has been
spent. Prints the medians and the number of these rounds, `{"cpu_ns": per operation, "wall_ns": ..., "rounds": ...}`, or
`{"unsupported": why}` if the loop has no such call. `--rounds N` runs exactly N rounds without a warm-up, for counting
instructions, and prints `{"rounds": N, "operations": ...}`.

CPU time is that of this process with all its threads, without its children.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import shutil
import socket
import statistics
import threading
import time
from collections.abc import Callable, Mapping

from benchmarks._loops import loop_factory, print_outcome

Loop = asyncio.AbstractEventLoop
# Runs one round of a kind, and returns how many operations it did.
Round = Callable[[Loop], int]

BATCH = 10_000


def _nothing() -> None:
    pass


def _nothing_with_two(first: object, second: object) -> None:
    pass


def call_soon_bulk(loop: Loop) -> int:
    """Schedule many callbacks at once, which run in the next iteration."""
    for _ in range(BATCH):
        loop.call_soon(_nothing)
    loop.call_soon(loop.stop)
    loop.run_forever()
    return BATCH


def call_soon_args(loop: Loop) -> int:
    """Like call_soon_bulk, with two arguments."""
    first, second = object(), object()
    for _ in range(BATCH):
        loop.call_soon(_nothing_with_two, first, second)
    loop.call_soon(loop.stop)
    loop.run_forever()
    return BATCH


def call_soon_chain(loop: Loop) -> int:
    """Each callback schedules the next one: one iteration per operation."""
    left = BATCH

    def step() -> None:
        nonlocal left
        left -= 1
        if left:
            loop.call_soon(step)
        else:
            loop.stop()

    loop.call_soon(step)
    loop.run_forever()
    return BATCH


def call_later_cancel(loop: Loop) -> int:
    """A timeout that never fires: schedule and cancel, a hundred times per iteration."""
    left = BATCH // 100

    def step() -> None:
        nonlocal left
        for _ in range(100):
            loop.call_later(60.0, _nothing).cancel()
        left -= 1
        if left:
            loop.call_soon(step)
        else:
            loop.stop()

    loop.call_soon(step)
    loop.run_forever()
    return BATCH


def call_later_zero(loop: Loop) -> int:
    """call_later(0), many at once."""
    for _ in range(BATCH):
        loop.call_later(0, _nothing)
    loop.call_later(0, loop.stop)
    loop.run_forever()
    return BATCH


def due_timers(loop: Loop) -> int:
    """Timers with different deadlines, set in scrambled order, that are all due when the loop runs."""
    count = 5_000
    left = count

    def fire() -> None:
        nonlocal left
        left -= 1
        if not left:
            loop.stop()

    now = loop.time()
    for i in range(count):
        loop.call_at(now + (i * 7919 % count) * 1e-6, fire)
    time.sleep(0.01)
    loop.run_forever()
    return count


def _pending_timers(loop: Loop, pending: int) -> int:
    rounds = max(1, BATCH // pending)
    delays = [60.0 if i % 2 else 60.0 + i * 7919 % pending * 1e-3 for i in range(pending)]

    def run() -> None:
        for _ in range(rounds):
            handles = [loop.call_later(delay, _nothing) for delay in delays]
            for handle in handles:
                handle.cancel()
        loop.stop()

    loop.call_soon(run)
    loop.run_forever()
    return rounds * pending


def pending_thousand(loop: Loop) -> int:
    """Set and cancel timers, a thousand at a time: half have the same delay, the others have scrambled delays."""
    return _pending_timers(loop, 1_000)


def pending_million(loop: Loop) -> int:
    """Like pending_thousand, with a million timers at a time."""
    return _pending_timers(loop, 1_000_000)


def sleep_zero(loop: Loop) -> int:
    """One task that yields repeatedly."""

    async def run() -> None:
        for _ in range(BATCH):
            await asyncio.sleep(0)

    loop.run_until_complete(run())
    return BATCH


def future_wake_up(loop: Loop) -> int:
    """A task waits for a future that a callback completes."""

    async def run() -> None:
        for _ in range(BATCH):
            future = loop.create_future()
            loop.call_soon(future.set_result, None)
            await future

    loop.run_until_complete(run())
    return BATCH


def create_task(loop: Loop) -> int:
    """Create and await tasks, in batches of a hundred."""

    async def nothing() -> None:
        pass

    async def run() -> None:
        for _ in range(BATCH // 100):
            for task in [loop.create_task(nothing()) for _ in range(100)]:
                await task

    loop.run_until_complete(run())
    return BATCH


def _threadsafe(loop: Loop, threads: int) -> int:
    count = 4 * BATCH
    left = count

    def arrive() -> None:
        nonlocal left
        left -= 1
        if not left:
            loop.stop()

    def send() -> None:
        for _ in range(count // threads):
            loop.call_soon_threadsafe(arrive)

    senders = [threading.Thread(target=send) for _ in range(threads)]
    for sender in senders:
        loop.call_soon(sender.start)
    loop.run_forever()
    for sender in senders:
        sender.join()
    return count


def threadsafe_1(loop: Loop) -> int:
    """call_soon_threadsafe from one other thread."""
    return _threadsafe(loop, 1)


def threadsafe_4(loop: Loop) -> int:
    """call_soon_threadsafe from four other threads."""
    return _threadsafe(loop, 4)


def sock_pair(loop: Loop) -> int:
    """A message of 64 B through a socketpair: sock_sendall on one end, then sock_recv on the other."""
    count = BATCH // 2
    message = bytes(64)

    async def run(left: socket.socket, right: socket.socket) -> None:
        for _ in range(count):
            await loop.sock_sendall(left, message)
            await loop.sock_recv(right, 4096)

    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        right.setblocking(False)
        loop.run_until_complete(run(left, right))
    return count


def _getaddrinfo(loop: Loop, kind: int) -> int:
    count = BATCH // 5

    async def run() -> None:
        for _ in range(count):
            await loop.getaddrinfo("127.0.0.1", 8080, type=kind)

    loop.run_until_complete(run())
    return count


def watch_writer(loop: Loop) -> int:
    """Wait until a socket is writable. The socket also has a reader, like the sockets of aiofastnet's transports."""
    left = BATCH // 10
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        number = sock.fileno()

        def writable() -> None:
            nonlocal left
            loop.remove_writer(number)
            left -= 1
            if left:
                loop.add_writer(number, writable)
            else:
                loop.stop()

        loop.add_reader(number, _nothing)
        loop.add_writer(number, writable)
        loop.run_forever()
        loop.remove_reader(number)
    return BATCH // 10


def getaddrinfo_literal(loop: Loop) -> int:
    """Look up a numeric address for every type of socket."""
    return _getaddrinfo(loop, 0)


def getaddrinfo_typed(loop: Loop) -> int:
    """Like getaddrinfo_literal, for one type of socket. uvloop answers such a call without using a thread."""
    return _getaddrinfo(loop, socket.SOCK_STREAM)


def spawn(loop: Loop) -> int:
    """Start a child that ends at once, and wait for it; the child's own CPU time is not counted."""
    count = 20
    program = shutil.which("true")
    if program is None:
        raise NotImplementedError("there is no program called true")

    async def run(program: str) -> None:
        for _ in range(count):
            process = await asyncio.create_subprocess_exec(program)
            await process.wait()

    loop.run_until_complete(run(program))
    return count


def run_in_executor(loop: Loop) -> int:
    """Run an empty function in the default executor; the CPU time of its thread is counted."""
    count = BATCH // 5

    async def run() -> None:
        for _ in range(count):
            await loop.run_in_executor(None, _nothing)

    loop.run_until_complete(run())
    return count


KINDS: dict[str, Round] = {
    kind.__name__: kind
    for kind in (
        call_soon_bulk,
        call_soon_args,
        call_soon_chain,
        call_later_cancel,
        call_later_zero,
        due_timers,
        pending_thousand,
        pending_million,
        sleep_zero,
        future_wake_up,
        create_task,
        threadsafe_1,
        threadsafe_4,
        sock_pair,
        watch_writer,
        getaddrinfo_literal,
        getaddrinfo_typed,
        spawn,
        run_in_executor,
    )
}


# A kind that mostly waits (for children) may take this many times its CPU budget in wall time.
PATIENCE = 2.5


class Stopwatch:
    """Time spent since it was created: CPU time, or wall time divided by PATIENCE if that is more."""

    def __init__(self) -> None:
        self._cpu_s, self._wall_s = time.process_time(), time.perf_counter()

    def spent_s(self) -> float:
        return max(time.process_time() - self._cpu_s, (time.perf_counter() - self._wall_s) / PATIENCE)


def measure(kind: Round, loop: Loop, cpu_s: float) -> dict[str, float]:
    """Warm up for a quarter of `cpu_s`. Then run rounds until `cpu_s` are spent, but at least one."""
    warm_up = Stopwatch()
    while warm_up.spent_s() < cpu_s / 4:
        kind(loop)
    cpu_ns: list[float] = []
    wall_ns: list[float] = []
    gc.collect()
    measured = Stopwatch()
    while not cpu_ns or measured.spent_s() < cpu_s:
        wall_start, cpu_start = time.perf_counter_ns(), time.process_time_ns()
        count = kind(loop)
        cpu_ns.append((time.process_time_ns() - cpu_start) / count)
        wall_ns.append((time.perf_counter_ns() - wall_start) / count)
    return {"cpu_ns": statistics.median(cpu_ns), "wall_ns": statistics.median(wall_ns), "rounds": len(cpu_ns)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--loop", required=True, help="grapeshot, uvloop, asyncio or module:factory")
    parser.add_argument("--seconds", type=float, default=0.05, help="CPU seconds to measure (0.05)")
    parser.add_argument("--rounds", type=int, help="run exactly this many rounds, without a warm-up")
    args = parser.parse_args()
    kind: Round = KINDS[args.kind]
    loop = loop_factory(args.loop)()

    def run() -> Mapping[str, object]:
        if args.rounds is None:
            return measure(kind, loop, args.seconds)
        return {"rounds": args.rounds, "operations": sum(kind(loop) for _ in range(args.rounds))}

    with contextlib.closing(loop):
        print_outcome(run)


if __name__ == "__main__":
    main()
