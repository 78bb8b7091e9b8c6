"""The locks that `coro.patch()` installs, in finalizers that the garbage collector calls on the stack of a coro.

A coro with a stack of its own can wait in such a finalizer. A coro on a shared stack blocks its thread if a real thread
holds the lock, and gets RuntimeError if another coro holds it.
"""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
from support import coro_is_available, spawn_blocked, wait_until

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import _core, coro

KINDS = ["thread_lock", "thread_rlock"]


def make(kind):
    return getattr(_core, kind)()


class Cycle:
    """An object that refers to itself, so that only the collector frees it. Its finalizer calls a function."""

    def __init__(self, function):
        self.myself = self
        self.function = function

    def __del__(self):
        self.function()


def collect_in_coro(function, **options):
    """Run a function as a finalizer that the collector calls on a coro's stack. Return its outcome."""
    outcome = []

    def finalize():
        try:
            outcome.append(function())
        except RuntimeError as exc:
            outcome.append(exc)

    def main():
        Cycle(finalize)
        gc.collect()

    coro.run(lambda: coro.spawn(main, **options).join())
    return outcome[0]


@pytest.mark.parametrize("kind", KINDS)
def test_finalizer_takes_a_free_lock(kind):
    lock = make(kind)

    def use():
        with lock:
            return "done"

    assert collect_in_coro(use) == "done"
    assert repr(lock).startswith("<unlocked")


def test_finalizer_waits_for_a_real_thread():
    lock = make("thread_lock")
    held = threading.Event()

    def hold():
        with lock:
            held.set()
            wait_until(lambda: "waiting=1" in repr(lock), "the finalizer to wait")

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    assert collect_in_coro(lock.acquire) is True
    thread.join()


def test_finalizer_does_not_wait_for_a_coro():
    lock = make("thread_lock")

    def hold():
        with lock:
            coro.sleep_relative(60)

    def use():
        return lock.acquire()

    outcome = []

    def finalize():
        try:
            use()
        except RuntimeError as exc:
            outcome.append(str(exc))

    def main():
        holder = spawn_blocked(hold)
        Cycle(finalize)
        gc.collect()
        assert lock.acquire(False) is False
        holder.shutdown()
        holder.join()

    coro.run(main)
    assert "garbage collector" in outcome[0]
    assert "no real thread holds the lock" in outcome[0]
    assert not lock.locked()


def test_finalizer_waits_on_an_own_stack():
    lock = make("thread_lock")

    def main():
        lock.acquire()
        coro.spawn(lambda: (coro.yield_slice(), lock.release()))
        result = []
        Cycle(lambda: result.append(lock.acquire()))
        gc.collect()
        return result

    assert coro.run(lambda: coro.spawn(main, stack="own").join()) == [True]


def test_finalizers_wait_in_a_coro_that_only_collects():
    """Automatic collection is off, as docs/coro-migration.md recommends. Other coros hold the lock most of the time."""
    lock = make("thread_lock")
    total = 2 * 4 * 50
    ended, was_held = [], []

    def finish(*_):
        was_held.append(lock.locked())
        with lock:
            ended.append(coro.current())

    def work(kept):
        for _ in range(50):
            with lock:
                Cycle(finish)
                cycle = [set()]
                cycle.append(cycle)
                kept.append(weakref.ref(cycle[0], finish))
                del cycle
                coro.yield_slice()

    def collect():
        while True:
            if gc.get_count()[0] > gc.get_threshold()[0]:
                gc.collect(0)
            coro.yield_slice()

    def main():
        collector = coro.spawn(collect, stack="own")
        kept = []
        with coro.Group() as group:
            for _ in range(4):
                group.spawn(work, kept)
        for _ in range(1000):
            if len(ended) == total:
                break
            coro.spawn(gc.collect, stack="own").join()
        return collector

    was_enabled, thresholds = gc.isenabled(), gc.get_threshold()
    gc.disable()
    gc.set_threshold(20, 2, 2)
    try:
        collector = coro.run(main)
    finally:
        gc.set_threshold(*thresholds)
        if was_enabled:
            gc.enable()
    assert len(ended) == total
    assert collector in ended
    assert any(was_held)
