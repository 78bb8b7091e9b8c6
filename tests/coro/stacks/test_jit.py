"""Coros with CPython's JIT compiler (3.14 and later, in builds that have it; PYTHON_JIT=1 turns it on)."""

from __future__ import annotations

import sys

import pytest
from support import coro_is_available, run_script


def jit_is_there():
    return hasattr(sys, "_jit") and sys._jit.is_available()


pytestmark = [
    pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter"),
    pytest.mark.skipif(not jit_is_there(), reason="NOT TESTED: this interpreter has no JIT compiler (.ci/sid has one)"),
]


@pytest.fixture(autouse=True)
def _jit(monkeypatch):
    monkeypatch.setenv("PYTHON_JIT", "1")


# Each of these functions has code of its own, so the compiler makes an executor for each.
LOOPS = """
import gc, sys
from grapeshot import coro

assert sys._jit.is_enabled()
ROUNDS, LOOPS = 10_000, 20
insides = 0

def make(number):
    space = {"coro": coro, "is_active": sys._jit.is_active}
    exec(f'''
def loop(rounds, state):
    total = insides = 0
    for step in range(rounds):
        insides += is_active()
        coro.yield_slice()
        total += step
    state.append((insides, total))
''', space)
    return space["loop"]

def check(states, rounds):
    assert len(states) == LOOPS, len(states)
    assert {total for _, total in states} == {sum(range(rounds))}, states
    assert min(insides for insides, _ in states) > rounds // 4, states
"""


@pytest.mark.parametrize("evict", ["lazy", "always"])
def test_code_that_becomes_invalid_stays_while_a_coro_is_inside(evict, monkeypatch):
    """A new monitoring tool makes all executors invalid. The collector frees those that nobody is running."""
    monkeypatch.setenv("GRAPESHOT_CORO_EVICT", evict)
    run_script(
        None,
        LOOPS
        + """
states = []

def invalidate():
    for tool in range(3):
        for _ in range(ROUNDS - ROUNDS // 4 if tool == 0 else 50):
            coro.yield_slice()
        sys.monitoring.use_tool_id(tool, "test")
        sys.monitoring.set_events(tool, sys.monitoring.events.RAISE)
        gc.collect()
        # What was freed is used for something else.
        made = [make(number) for number in range(200)]
        gc.collect()
        sys.monitoring.free_tool_id(tool)

def main():
    coros = [coro.spawn(make(number), ROUNDS, states) for number in range(LOOPS)]
    coros.append(coro.spawn(invalidate))
    for each in coros:
        each.join()

coro.run(main)
check(states, ROUNDS)
""",
    )


def test_the_thread_runs_compiled_code_itself():
    """A loop that the compiler has compiled runs the event loop again and again, while it becomes invalid."""
    run_script(
        None,
        LOOPS
        + """
import asyncio, grapeshot

async def wait():
    await asyncio.sleep(0)

def outer(rounds):
    insides = 0
    with asyncio.Runner(loop_factory=grapeshot.new_event_loop) as runner:
        run = runner.get_loop().run_until_complete
        for step in range(rounds):
            insides += is_active()
            run(wait())
            if step % 1000 == 0:
                sys.monitoring.use_tool_id(3, "test")
                sys.monitoring.set_events(3, sys.monitoring.events.RAISE)
                gc.collect()
                sys.monitoring.free_tool_id(3)
    return insides

is_active = sys._jit.is_active
assert outer(12_000) > 0
""",
    )


def test_exceptions_and_nested_calls_in_compiled_code():
    """Coros are switched inside calls that C code makes from compiled loops, and interrupted there."""
    run_script(
        None,
        LOOPS
        + """
from functools import reduce

def add(total, step):
    coro.yield_slice()
    return total + step

def key(step):
    coro.yield_slice()
    return -step

def loop(results):
    total = stopped = 0
    for step in range(6000):
        total = reduce(add, (total, step))
        total += sorted((0, step), key=key)[0] - step
        try:
            if step % 50 == 0:
                raise ValueError(step)
        except ValueError as exc:
            stopped += 1
    results.append((total, stopped))

def endless():
    while True:
        coro.yield_slice()

def main():
    results = []
    coros = [coro.spawn(loop, results) for _ in range(5)]
    others = [coro.spawn(endless) for _ in range(5)]
    for each in coros:
        each.join()
    for other in others:
        other.shutdown()
    assert results == [(sum(range(6000)), 120)] * 5, results

coro.run(main)
""",
    )
