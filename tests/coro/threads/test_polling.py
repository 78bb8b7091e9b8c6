"""Polling the locks and the queue that `coro.patch()` installs: after many such calls in a row, other coros run."""

from __future__ import annotations

import queue
import threading

import pytest
from support import coro_is_available, spawn_blocked

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import _core, coro

MANY = 1000


def polls_of_locks():
    """Yield one function for each way to poll. None of them succeeds: another coro holds each lock, and the queue is
    empty.
    """
    for kind in ("thread_lock", "thread_rlock"):
        for arguments in ({"blocking": False}, {"timeout": 0}):
            lock = getattr(_core, kind)()
            spawn_blocked(lambda lock=lock: (lock.acquire(), coro.wait()))
            yield lambda lock=lock, arguments=arguments: lock.acquire(**arguments)
    simple = _core.thread_queue()
    for function in (simple.get_nowait, lambda: simple.get(False), lambda: simple.get(timeout=0)):

        def poll(function=function):
            try:
                function()
            except queue.Empty:
                return False

        yield poll


def test_others_run():
    def main():
        for poll in polls_of_locks():
            ran = []
            coro.spawn(ran.append, "others")
            for _ in range(MANY):
                assert not poll()
                if ran:
                    break
            assert ran

    coro.run(main)


def test_the_selfishness_of_the_coro_sets_how_often_others_run():
    def main():
        lock = _core.thread_lock()
        spawn_blocked(lambda: (lock.acquire(), coro.wait()))
        coro.current().set_max_selfish_acts(100)
        coro.yield_slice()
        ran = []
        coro.spawn(ran.append, "others")
        number = 0
        while not ran:
            lock.acquire(False)
            number += 1
        return number

    assert coro.run(main) == 101


def test_a_lock_released_by_another_coro_is_taken():
    def main():
        lock = _core.thread_lock()
        spawn_blocked(lambda: (lock.acquire(), coro.yield_slice(), lock.release()))
        taken = [lock.acquire(False) for _ in range(10)]
        assert taken.count(True) == 1
        lock.release()

    coro.run(main)


def test_a_poller_is_shut_down():
    lock = _core.thread_lock()
    lock.acquire()

    def poll():
        while not lock.acquire(False):
            pass

    def main():
        poller = spawn_blocked(poll)
        poller.shutdown()
        poller.join()

    coro.run(main)


def test_the_holder_of_a_lock_does_not_yield():
    """``Condition.notify`` tries to acquire the lock, to check that its caller holds it. If this attempt yielded, it
    could raise an interruption, and no waiter would wake.
    """

    def main():
        lock = _core.thread_lock()
        condition = threading.Condition(lock)
        ran = []
        with condition:
            coro.spawn(ran.append, "others")
            for _ in range(MANY):
                condition.notify()
            assert not ran
        coro.yield_slice()
        assert ran

    coro.run(main)


def test_polls_outside_of_coros_return_false():
    lock = _core.thread_lock()
    lock.acquire()
    assert not any(lock.acquire(False) for _ in range(MANY))
