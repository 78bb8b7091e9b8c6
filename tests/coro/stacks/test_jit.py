"""Coros with CPython's JIT compiler (3.15, in builds that have it; PYTHON_JIT=1 turns it on)."""

from __future__ import annotations

import sys

import pytest
from support import coro_is_available, run_script


def jit_is_there():
    return sys.version_info >= (3, 15) and sys._jit.is_available()


pytestmark = [
    pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter"),
    pytest.mark.skipif(not jit_is_there(), reason="NOT TESTED: this interpreter has no JIT compiler (.ci/sid has one)"),
]


@pytest.fixture(autouse=True)
def _jit(monkeypatch):
    monkeypatch.setenv("PYTHON_JIT", "1")


@pytest.mark.parametrize("evict", ["lazy", "always"])
def test_code_that_becomes_invalid_stays_while_a_coro_is_inside(evict, monkeypatch):
    """A new monitoring tool makes all executors (pieces of compiled code) invalid. The interpreter then frees the
    executors that no thread is running. So grapeshot has to keep those to which suspended coros return.
    """
    monkeypatch.setenv("GRAPESHOT_CORO_EVICT", evict)
    run_script(
        None,
        """
        import gc, sys
        from _testinternalcapi import clear_executor_deletion_list
        from grapeshot import coro

        assert sys._jit.is_enabled()

        def make():
            "A new function has code of its own, so the compiler makes an executor for it."
            space = {"yield_slice": coro.yield_slice, "is_active": sys._jit.is_active}
            exec('''
        def loop(state):
            total = step = 0
            while state["goes_on"]:
                state["rounds_inside"] += is_active()
                yield_slice()
                step += 1
                total += step
            return step, total
            ''', space)
            return space["loop"]

        def invalidate(tool):
            sys.monitoring.use_tool_id(tool, "test")
            sys.monitoring.set_events(tool, sys.monitoring.events.RAISE)
            gc.collect()
            # Free the invalid executors that are not in use. The interpreter does so after a collection that it starts
            # itself, but not after `gc.collect()`.
            clear_executor_deletion_list()
            sys.monitoring.free_tool_id(tool)

        def main():
            states, coros = [], []
            for _ in range(20):
                # Before the compiler compiles a loop, it records what the loop executes. In a thread, it records only
                # one loop at a time. So the coros' loops are compiled one after the other.
                states.append({"goes_on": True, "rounds_inside": 0})
                coros.append(coro.spawn(make(), states[-1]))
                for _ in range(100_000):
                    coro.yield_slice()
                    if states[-1]["rounds_inside"] >= 100:
                        break
                else:
                    raise AssertionError("the loop was not compiled")
            for tool in range(3):
                invalidate(tool)
                for _ in range(10):
                    coro.yield_slice()
            for state in states:
                state["goes_on"] = False
            for step, total in [each.join() for each in coros]:
                assert step > 100 and total == step * (step + 1) // 2, (step, total)

        coro.run(main)
        """,
    )


def test_the_thread_runs_compiled_code_itself():
    """A compiled Python loop runs the event loop again and again. Meanwhile the compiled code of the Python loop
    becomes invalid.
    """
    run_script(
        None,
        """
import asyncio, gc, sys, grapeshot

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
    """In compiled loops, coros call C code that calls Python functions, which yield. Other coros are shut down while
    they are inside a compiled loop.
    """
    run_script(
        None,
        """
import sys
from functools import reduce
from grapeshot import coro

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
