"""Memory runs out while a stack is evicted or allocated: a coro that has not begun ends with MemoryError, a coro that
has begun is only delayed, and other coros are not affected.
"""

from __future__ import annotations

import asyncio
import functools
import random
import sys
import sysconfig

import pytest
from support import coro_is_available, run_script

import grapeshot

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter"),
]
if coro_is_available():
    from grapeshot import _core, coro


@pytest.fixture(autouse=True)
def _enough_memory_afterwards():
    yield
    if coro_is_available():
        _core._coro_fail_evictions(0)


def run_with_reports(main):
    """Return the coroutine's result, and the types of the exceptions that were reported during its run."""
    reported = []

    async def wrapped():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: reported.append(type(context.get("exception"))))
        return await main()

    return grapeshot.run(wrapped()), reported


@pytest.mark.parametrize("slots", [None, 1, 3])
def test_results_are_right_when_evictions_fail_at_random(slots):
    generator = random.Random(str(slots))

    def deeper(level, number):
        coro.yield_slice()
        if level == 0:
            return functools.reduce(lambda left, right: (coro.yield_slice(), left + right)[1], range(5), number)
        return deeper(level - 1, number) + 1

    async def main():
        coro.set_stack_slots(slots)
        threads = [coro.spawn(deeper, generator.randrange(30), number) for number in range(60)]
        await asyncio.sleep(0)
        began = {thread for thread in threads if thread._status != "done"}
        assert len(began) == 60
        while not all(thread.done() for thread in threads):
            if generator.random() < 0.3:
                _core._coro_fail_evictions(generator.randrange(1, 20))
            await asyncio.sleep(0)
        return [await thread for thread in threads]

    generator_of_depths = random.Random(str(slots))
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

        # Until `feed` runs in the next iteration, each eviction and each allocation of a stack fails.
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
        # The failure hits the new coro, because nothing else needs memory for a stack at this time.
        return await coro.run_sync(main)

    if coro.stack_info()["evicts_always"]:
        pytest.skip("the failure hits the eviction of the waiting coro's stack, where it is ignored")
    assert run_with_reports(beside) == ("alive", [])


def test_coros_are_unwound_without_memory():
    """An eviction that fails is tried again in the next iteration. The loop is closed once all coros have ended."""
    log = []

    def stay(number):
        try:
            coro.wait()
        finally:
            coro.yield_slice()  # so that stacks must be evicted, in whatever order the coros end
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


# ---------------------------------------------------------------------------------------------- stacks of their own


def test_own_stacks_beyond_the_address_space():
    """mmap fails: `spawn` raises MemoryError, and the other coros continue."""
    script = """
        import asyncio, resource
        import grapeshot
        from grapeshot import coro

        def work(number):
            for _ in range(3):
                coro.yield_slice()
            return number

        async def main():
            # The interpreter's pools and the shared stack exist before the limit is set.
            await coro.spawn(work, 0)
            with open("/proc/self/statm") as file:
                used = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + 256 * 2**20, resource.RLIM_INFINITY))
            own, numbers, refused = [], [], []
            for number in range(100):
                try:
                    own.append(coro.spawn(work, number, stack="own"))
                    numbers.append(number)
                except MemoryError as error:
                    refused.append(str(error))
            assert all("RLIMIT_AS" in text for text in refused), refused
            assert 10 <= len(own) <= 40, len(own)
            assert len(own) + len(refused) == 100
            assert len(coro.get_live_coros()) == len(own)
            assert len(asyncio.all_tasks()) == len(own) + 1
            shared = [coro.spawn(work, number) for number in range(100)]
            assert await asyncio.gather(*own) == numbers
            assert await asyncio.gather(*shared) == list(range(100))
            # The memory of the ended coros is free again. A coro that finds no memory for its stack can start later.
            later = coro.new(work, 0, stack="own")
            again = [coro.spawn(work, number, stack="own") for number in range(len(own))]
            try:
                later.start()
            except MemoryError:
                print("refused")
            assert await asyncio.gather(*again) == list(range(len(own)))
            later.start()
            assert await later == 0
            print("done", coro.get_live_coros())

        grapeshot.run(main())
    """
    assert run_script(None, script) == "refused\ndone []\n"


AT_THE_LIMIT = """
    import ctypes, mmap, os, sys, time
    GUARDS = {guards!r}
    os.environ["GRAPESHOT_CORO_GUARDS"] = GUARDS
    from grapeshot import coro

    PAGE = mmap.PAGESIZE
    with open("/proc/sys/vm/max_map_count") as file:
        LIMIT = int(file.read())

    def mappings():
        with open("/proc/self/maps") as file:
            return sum(1 for _ in file)

    class Filler:
        # Use up mappings: every second page of a range gets a different protection.

        def __init__(self, count):
            self.c = ctypes.CDLL(None, use_errno=True)
            self.pages = mmap.mmap(-1, (count + 2) * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.start = ctypes.addressof(ctypes.c_char.from_buffer(self.pages))
            for index in range(0, count, 2):
                self.protect(index, 1, mmap.PROT_READ)

        def protect(self, index, count, access):
            start = ctypes.c_void_p(self.start + index * PAGE)
            assert self.c.mprotect(start, ctypes.c_size_t(count * PAGE), access) == 0, ctypes.get_errno()

        def give_back(self):
            self.protect(0, len(self.pages) // PAGE, mmap.PROT_READ | mmap.PROT_WRITE)

    def work(fifo):
        return sorted([1, fifo.pop()], key=lambda item: (coro.yield_slice(), item)[1])

    def spawn_up_to(count, threads, fifo):
        # Return the text of the error, or None if all were spawned.
        try:
            while len(threads) < count:
                threads.append(coro.spawn(work, fifo, stack="own"))
        except MemoryError as error:
            return str(error)
        return None

    def end(threads, fifo):
        for thread in threads:
            fifo.push(2)
        assert all(thread.join() == [1, 2] for thread in threads)

    def main():
        fifo, threads = coro.fifo(), []
        assert spawn_up_to(10, threads, fifo) is None
        coro.yield_slice()
        # grapeshot makes no stacks if fewer than LIMIT // 32 mappings would be left. The filler leaves that number of
        # mappings, and 4,000 more if each guard is a mapping. A guard that is a mark in the page tables takes no
        # mapping of its own.
        room = 0 if GUARDS == "marks" else 4000
        filler = Filler(LIMIT - mappings() - LIMIT // 32 - room)
        text = spawn_up_to(10_000, threads, fifo)
        assert "vm.max_map_count" in text, text
        refused = len(threads)
        assert coro.stack_info()["live"] == refused + 1
        # Coros on shared stacks can still be spawned, and other code can still make mappings.
        others = [coro.spawn(work, fifo) for _ in range(100)]
        more = [mmap.mmap(-1, 2**20) for _ in range(100)]
        coro.yield_slice()
        assert spawn_up_to(10_000, threads, fifo) is not None
        assert len(threads) == refused
        assert mappings() < LIMIT - 500
        del more
        end(threads + others, fifo)
        # The stacks are reused.
        threads = []
        assert spawn_up_to(min(refused, 1000), threads, fifo) is None
        end(threads, fifo)
        # After a while, grapeshot counts the mappings again.
        filler.give_back()
        threads = []
        deadline = time.monotonic() + 20
        while spawn_up_to(refused + 100, threads, fifo) is not None and time.monotonic() < deadline:
            coro.sleep_relative(0.01)
        assert len(threads) == refused + 100
        end(threads, fifo)
        return refused

    print(coro.run(main))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the mappings of a process")
@pytest.mark.parametrize("guards", ["marks", "mappings"])
def test_at_the_kernels_limit_of_mappings_spawn_raises_and_everything_goes_on(guards):
    refused = int(run_script(None, AT_THE_LIMIT.format(guards=guards)))
    if guards == "mappings":
        assert 1000 < refused < 2100


@pytest.mark.skipif(sys.platform != "linux", reason="the test reads the memory use from /proc")
@pytest.mark.skipif(bool(sysconfig.get_config_var("Py_GIL_DISABLED")), reason="PYTHONMALLOC=malloc needs the GIL")
@pytest.mark.parametrize("count", [50, 1500])
def test_reused_stacks_give_deep_memory_back(count, monkeypatch):
    """Each coro uses more stack memory than its stack may keep after the coro has ended. The test checks that the
    stacks give the rest back.

    PYTHONMALLOC makes all objects come from malloc. The interpreter's own allocator takes memory in arenas of 1 MiB,
    and a single object keeps a whole arena. So arenas would be left after each round, and the test would measure them
    instead of the stacks.
    """
    script = f"""
        import ctypes, functools, gc, mmap
        from grapeshot import coro

        def resident():
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * mmap.PAGESIZE

        def deep(level, _=None):
            if level == 0:
                coro.yield_slice()
                return coro.current().stack_info()["bytes_used"]
            return functools.reduce(deep, [level - 1, None])

        def round_of(depth):
            threads = [coro.spawn(deep, depth, stack="own") for _ in range({count})]
            coro.yield_slice()
            peak = resident()
            return min(thread.join() for thread in threads), peak

        def main():
            round_of(1)
            shallow = resident()
            used, peak = round_of(100)
            kept = resident()
            for _ in range(max(3, 1500 // {count})):
                round_of(100)
            print(used, peak - shallow, kept - shallow, resident() - kept)

        coro.run(main)
    """
    monkeypatch.setenv("PYTHONMALLOC", "malloc")
    used, peak, kept, grown = map(int, run_script(None, script).split())
    assert used > 30_000
    assert peak > count * (used - 24_000)
    # At most 1,024 free stacks keep memory: 16 KiB each.
    assert kept < min(count, 1024) * 16 * 1024 + 2**20
    assert grown < 2**20
