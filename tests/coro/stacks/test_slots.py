"""The first coros of a thread have a stack slot each; later ones share a slot. When a coro ends, forks or runs out of
memory, the others continue.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support import coro_is_available, run_script

import grapeshot

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import _core, coro

# The number of coros of a thread that can have a slot of their own at the same time.
SINGLES = 8


@pytest.fixture(autouse=True)
def _as_at_the_start() -> Iterator[None]:
    coro.set_stack_slots(None)
    yield
    coro.set_stack_slots(None)


def shares(thread: Any) -> bool:
    """Return whether this coro, which has begun and not ended, belongs to the slot that coros share."""
    slot = thread.stack_info()["slot"]
    assert slot in (None, 0)
    return slot == 0


def waiting(count: int) -> list[Any]:
    """Spawn coros that wait; each returns twice the value that wakes it."""
    threads = [coro.spawn(lambda: 2 * coro.wait()) for _ in range(count)]
    coro.yield_slice()
    return threads


def end(threads: list[Any]) -> None:
    """End the coros in the reverse order of their start."""
    for thread in reversed(threads):
        coro.schedule(thread, 21)
    assert [thread.join() for thread in threads] == [42] * len(threads)


def test_the_first_coros_have_a_slot_each_and_the_others_share_one(eviction):
    def main() -> None:
        before = coro.stack_info()["evictions"]
        few = waiting(SINGLES - 1)  # the running coro has a slot of its own, too
        assert not shares(coro.current())
        assert not any(map(shares, few))
        if eviction == "lazy":
            assert coro.stack_info()["evictions"] == before
            assert {thread.stack_info()["where"] for thread in few} == {"in place"}
        more = waiting(5)
        assert all(map(shares, more))
        if eviction == "lazy":
            assert coro.stack_info()["evictions"] == before + 4
            assert [thread.stack_info()["where"] for thread in more] == ["evicted"] * 4 + ["in place"]
            assert {thread.stack_info()["where"] for thread in few} == {"in place"}
        end([*more, *few])

    coro.run(main)
    assert coro.stack_info()["bytes_saved"] == 0


def test_the_slot_of_a_coro_that_has_ended_is_used_again():
    def main() -> None:
        few, more = waiting(SINGLES - 1), waiting(3)
        for round_ in range(100):
            ended = few.pop(round_ % len(few))
            end([ended])
            few += waiting(1)
            assert not shares(few[-1])
            ninth = waiting(1)
            assert shares(ninth[0])
            end(ninth)
        assert all(map(shares, more))
        end([*few, *more])

    coro.run(main)


def test_a_coro_that_is_interrupted_or_raises_gives_its_slot_back():
    def fail() -> None:
        coro.yield_slice()
        raise KeyError

    def main() -> None:
        for _ in range(3):
            threads = [coro.spawn(fail) for _ in range(3)] + waiting(SINGLES - 4)
            assert not any(map(shares, threads))
            for thread in threads[:3]:
                with pytest.raises(KeyError):
                    thread.join()
            for thread in threads[3:]:
                thread.shutdown()
                thread.join()

    coro.run(main)


def test_a_coro_that_finds_no_memory_gives_its_slot_back():
    async def without_memory() -> None:
        _core._coro_fail_evictions(1000)
        try:
            for thread in [coro.spawn(int) for _ in range(2 * SINGLES)]:
                with pytest.raises(MemoryError):
                    await thread
        finally:
            _core._coro_fail_evictions(0)

    def main() -> None:
        few = waiting(SINGLES - 1)
        assert not any(map(shares, few))
        end(few)

    grapeshot.run(without_memory())
    coro.run(main)


def test_the_number_of_slots_can_be_set():
    def main() -> None:
        before = waiting(3)
        coro.set_stack_slots(1)
        during = waiting(3)
        assert all(map(shares, during))
        assert not any(map(shares, before))
        end(before)
        coro.set_stack_slots(None)
        after = waiting(SINGLES)
        assert [shares(thread) for thread in after] == [False] * (SINGLES - 1) + [True]
        end([*after, *during])

    coro.run(main)


def test_each_thread_has_its_own_slots():
    barrier = threading.Barrier(3)
    outcomes: list[list[bool]] = []

    def main() -> None:
        threads = waiting(SINGLES)
        barrier.wait(30)
        outcomes.append([shares(thread) for thread in threads])
        barrier.wait(30)
        end(threads)

    workers = [threading.Thread(target=coro.run, args=(main,)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert outcomes == [[False] * (SINGLES - 1) + [True]] * 3


IN_A_SCRIPT = """
    import os, resource
    from grapeshot import coro

    def waiting(count):
        threads = [coro.spawn(lambda: 2 * coro.wait()) for _ in range(count)]
        coro.yield_slice()
        return threads

    def end(threads):
        for thread in threads:
            coro.schedule(thread, 21)
        assert [thread.join() for thread in threads] == [42] * len(threads)

    def sharing(threads):
        return sum(thread.stack_info()["slot"] == 0 for thread in threads)
"""


def script(body: str) -> str:
    return run_script(None, IN_A_SCRIPT + body)


def test_without_memory_for_more_slots_coros_share_one(monkeypatch):
    # With a single malloc arena for all threads, no address space is reserved for the watchdog thread alone.
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    body = """
    def main():
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        limits = resource.getrlimit(resource.RLIMIT_AS)
        # The address space is too small for another mapping with slots, but large enough for small objects.
        resource.setrlimit(resource.RLIMIT_AS, (used + 24 * 2**20, limits[1]))
        threads = waiting(20)
        without = sharing(threads)
        end(threads)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        threads = waiting(20)
        print(without > 20 - 7, sharing(threads) == 20 - 7)
        end(threads)

    coro.run(main)
    """
    assert script(body) == "True True\n"


def test_the_child_of_a_coro_that_forks():
    """In the child, the stacks of the parent's coros keep their slots. New coros get the other slots or share one."""
    body = """
    def main():
        threads = waiting(12)
        child = os.fork()
        if child == 0:
            return True
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        end(threads)
        return False

    def again():
        for _ in range(3):
            end(waiting(30))

    is_child = coro.run(main)
    coro.run(again)
    print("child" if is_child else "parent", flush=True)
    """
    assert script(body) == "child\nparent\n"


@pytest.mark.parametrize("setting", ["always", "lazy", None])
def test_the_environment_variable_that_evicts_every_stack(setting, monkeypatch):
    if setting is None:
        monkeypatch.delenv("GRAPESHOT_CORO_EVICT", raising=False)
    else:
        monkeypatch.setenv("GRAPESHOT_CORO_EVICT", setting)
    body = """
    def main():
        few = waiting(3)
        print({thread.stack_info()["where"] for thread in few}, coro.stack_info()["evicts_always"])
        end(few)

    coro.run(main)
    """
    assert script(body) == ("{'evicted'} True\n" if setting == "always" else "{'in place'} False\n")
