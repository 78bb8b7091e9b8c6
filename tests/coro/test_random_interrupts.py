"""Ctrl-C at random moments ends a run of coros with KeyboardInterrupt each time, and the next run works.

test_ctrl_c and test_signals interrupt programs at chosen points.
"""

from __future__ import annotations

import pytest
from support import PROCESS_CAP_S, coro_is_available, interrupt_at_random

pytestmark = [
    pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter"),
    pytest.mark.watchdog(2 * PROCESS_CAP_S),
]

WORK = """
from functools import reduce
from grapeshot import coro

def pause():
    coro.sleep_relative(0)

async def answer():
    await asyncio.sleep(0)
    return 42

def after_wait(left, right):
    pause()
    return left + right

def numbers():
    for number in range(5):
        pause()
        yield number

def work(chance, lock):
    near, far = coro.socketpair()
    with near, far:
        while True:
            action = chance.randrange(10)
            if action == 0:
                coro.yield_slice()
            elif action == 1:
                coro.sleep_relative(chance.random() / 1000)
            elif action == 2:
                near.send(b"data")
                assert far.recv(4) == b"data"
            elif action == 3:
                with lock:
                    pause()
            elif action == 4:
                assert sum(coro.in_parallel([(after_wait, (number, 1)) for number in range(3)])) == 6
            elif action == 5:
                try:
                    coro.with_timeout(chance.random() / 1000, coro.sleep_relative, 1000)
                except coro.TimeoutError:
                    pass
            elif action == 6:
                assert coro.await_(answer()) == 42
            elif action == 7:
                assert reduce(after_wait, range(5)) == sum(numbers()) == 10
            elif action == 8:
                sum(range(chance.randrange(10_000)))
            else:
                coro.spawn(pause)

def main(number, began):
    chance, lock = random.Random(SEED + number), coro.mutex()
    for _ in range(chance.randrange(10)):  # sometimes 0, so the signal can also find the loop in the poller
        coro.spawn(work, chance, lock)
    coro.yield_slice()
    began()
    if chance.random() < 0.5:
        work(chance, lock)
    coro.sleep_relative(1000)
"""


@pytest.mark.parametrize("way", ["coro.run(main, number, began)", "grapeshot.run(coro.run_sync(main, number, began))"])
def test_coros(way):
    interrupt_at_random("grapeshot", f"{WORK}\nimport grapeshot\ndef run(number, began):\n    {way}\n")


def test_a_coro_that_computes():
    """The running coro never yields, so KeyboardInterrupt is raised in it."""
    interrupt_at_random(
        "grapeshot",
        """
        from grapeshot import coro

        coro.set_latency_warning(None)

        def main(number, began):
            for _ in range(number % 3):
                coro.spawn(coro.wait)
            coro.yield_slice()
            began()
            while True:
                sum(range(1000))

        def run(number, began):
            coro.run(main, number, began)
        """,
        rounds=10,  # only a few: a coro must have run for a fifth of a second to count as one that does not yield
    )
