"""Out of memory while a stack is evicted or made: the coro that needed the memory gets the error, and others do not
notice.
"""

from __future__ import annotations

import asyncio
import functools
import random

import pytest
from support import coro_is_available, run_script

import grapeshot

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import _core, coro


@pytest.fixture(autouse=True)
def _enough_memory_afterwards():
    yield
    if coro_is_available():
        _core._coro_fail_evictions(0)


def run_with_reports(main):
    """Returns the result of the coroutine and the types of the exceptions that were reported meanwhile."""
    reported = []

    async def wrapped():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: reported.append(type(context.get("exception"))))
        return await main()

    return grapeshot.run(wrapped()), reported


@pytest.mark.parametrize("slots", [1, 3])
def test_results_are_right_when_evictions_fail_at_random(slots):
    generator = random.Random(slots)

    def deeper(level, number):
        coro.yield_slice()
        if level == 0:
            return functools.reduce(lambda left, right: (coro.yield_slice(), left + right)[1], range(5), number)
        return deeper(level - 1, number) + 1

    async def main():
        coro.set_stack_slots(slots)
        try:
            threads = [coro.spawn(deeper, generator.randrange(30), number) for number in range(60)]
            await asyncio.sleep(0)
            began = {thread for thread in threads if thread._status != "done"}
            assert len(began) == 60
            while not all(thread.done() for thread in threads):
                if generator.random() < 0.3:
                    _core._coro_fail_evictions(generator.randrange(1, 20))
                await asyncio.sleep(0)
            return [await thread for thread in threads]
        finally:
            coro.set_stack_slots(1)

    generator_of_depths = random.Random(slots)
    depths = [generator_of_depths.randrange(30) for _ in range(60)]
    results, reported = run_with_reports(main)
    assert results == [number + depth + 10 for number, depth in enumerate(depths)]
    assert set(reported) <= {MemoryError}
    assert reported or coro.stack_info()["evicts_always"]


def test_a_new_coro_without_memory_ends_with_the_error():
    def work(number):
        for _ in range(5):
            coro.yield_slice()
        return number

    async def main():
        before = [coro.spawn(work, number) for number in range(4)]
        await asyncio.sleep(0)
        without = [coro.spawn(work, number) for number in range(3)]
        own = coro.spawn(work, 7, stack="own")
        later = []

        def starve():
            _core._coro_fail_evictions(1000)

        def feed():
            _core._coro_fail_evictions(0)
            later.append(coro.spawn(work, 8))

        # Of the next iteration only the first entry gets memory.
        asyncio.get_running_loop().call_soon(feed)
        starve()
        failures = []
        for thread in [*without, own]:
            with pytest.raises(MemoryError) as caught:
                await thread
            failures.append(caught.value)
            assert thread.done()
            assert not thread.cancelled()
        assert len({id(failure) for failure in failures}) == 4
        return [await thread for thread in before + later]

    results, reported = run_with_reports(main)
    assert results == [0, 1, 2, 3, 8]
    # Each coro that had begun was delayed once, unless its stack was in place.
    assert set(reported) <= {MemoryError}
    assert len(reported) <= 4
    assert coro.get_live_coros() == []


def test_the_joiner_of_a_coro_without_memory_gets_the_error():
    def main():
        thread = coro.spawn(int)
        _core._coro_fail_evictions(1)
        with pytest.raises(MemoryError):
            thread.join()
        assert coro.spawn(int).join() == 0
        _core._coro_fail_evictions(0)
        return "alive"

    async def beside():
        # The first failure hits the new coro: no other stack has to be evicted.
        return await coro.run_sync(main)

    if coro.stack_info()["evicts_always"]:
        pytest.skip("the stack of the coro that waits is evicted first, and that failure is passed over")
    assert run_with_reports(beside) == ("alive", [])


def test_coros_are_unwound_without_memory():
    """Each failure is retried in the next iteration. The loop is closed once all coros have ended."""
    log = []

    def stay(number):
        try:
            coro.wait()
        finally:
            coro.yield_slice()  # so that stacks have to be evicted, in whatever order the coros end
            log.append(number)

    async def main():
        for number in range(20):
            coro.spawn(stay, number)
        await asyncio.sleep(0)
        _core._coro_fail_evictions(50)

    _, reported = run_with_reports(main)
    assert sorted(log) == list(range(20))
    assert set(reported) <= {MemoryError}
    assert reported or coro.stack_info()["evicts_always"]
    assert coro.get_live_coros() == []


def test_own_stacks_beyond_the_address_space():
    """mmap fails for some coros: they end with the system's error, and the others continue."""
    script = """
        import asyncio, errno, resource
        import grapeshot
        from grapeshot import coro

        def work(number):
            for _ in range(3):
                coro.yield_slice()
            return number

        async def main():
            # The pools of the interpreter and the shared stack are there before the limit is set.
            await coro.spawn(work, 0)
            with open("/proc/self/statm") as file:
                used = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + 256 * 2**20, resource.RLIM_INFINITY))
            own = [coro.spawn(work, number, stack="own") for number in range(100)]
            shared = [coro.spawn(work, number) for number in range(100)]
            outcomes = await asyncio.gather(*own, *shared, return_exceptions=True)
            failed = [outcome for outcome in outcomes[:100] if isinstance(outcome, OSError)]
            assert all(error.errno == errno.ENOMEM for error in failed), failed
            assert outcomes[100:] == list(range(100)), outcomes
            right = [number for number, outcome in enumerate(outcomes[:100]) if outcome == number]
            assert len(right) + len(failed) == 100
            assert 10 <= len(right) <= 40, right
            # What they had is free again.
            again = [coro.spawn(work, number, stack="own") for number in range(10)]
            assert [await thread for thread in again] == list(range(10))
            print("done", coro.get_live_coros())

        grapeshot.run(main())
    """
    assert run_script(None, script) == "done []\n"
