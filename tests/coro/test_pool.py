"""`Pool` and `in_parallel`: which coros they wait for, even after an error, and which results they return."""

from __future__ import annotations

import pytest
from support import coro_is_available

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro


class Strange(Exception):
    """The exception that `inputs` raises."""


def inputs(count):
    """Yield `count` inputs, then raise an error."""
    yield from range(count)
    raise Strange


def test_a_pool_waits_for_coros_that_its_coros_start():
    ended = []

    def parent(pool):
        coro.yield_slice()
        pool.spawn(child)

    def child():
        coro.yield_slice()
        ended.append("child")

    def main():
        with coro.Pool(2) as pool:
            pool.spawn(parent, pool)
        assert ended == ["child"]
        assert len(pool) == 0

    coro.run(main)


def test_a_coro_cannot_wait_for_the_pool_that_it_is_in():
    def main():
        pool = coro.Pool(2)
        other = pool.spawn(coro.wait)
        inside = pool.spawn(pool.join)
        with pytest.raises(RuntimeError, match="itself"):
            inside.join()
        coro.schedule(other, "still there")
        assert other.join() == "still there"

    coro.run(main)


def start_in_parallel(work, numbers):
    coro.in_parallel((work, (number,)) for number in numbers)


def start_in_pool(work, numbers):
    coro.Pool(2).map(work, numbers)


@pytest.mark.parametrize("start", [start_in_parallel, start_in_pool])
@pytest.mark.parametrize("way", ["the input raises", "an interruption"])
def test_every_coro_that_was_started_ends_if_the_call_fails(start, way):
    """`Pool.map` waits for a free place, so it may be interrupted before it has started all coros."""
    begun, ended = [], []

    def work(number):
        begun.append(number)
        try:
            coro.wait()
        finally:
            ended.append(number)

    def main():
        if way == "the input raises":
            with pytest.raises(Strange):
                start(work, inputs(2))
        else:
            starter = coro.spawn(start, work, range(5))
            coro.yield_slice()
            coro.yield_slice()
            starter.interrupt()
            assert starter.join() is None
        assert sorted(begun) == sorted(ended)
        assert coro.get_live_coros() == [coro.current()]

    coro.run(main)


@pytest.mark.parametrize("call", ["imap", "imap_unordered"])
@pytest.mark.parametrize("size", [2, 5])
def test_an_error_of_an_input_follows_the_results_before_it(call, size):
    def main():
        results = getattr(coro.Pool(size), call)(int, inputs(4))
        assert [next(results) for _ in range(4)] == [0, 1, 2, 3]
        with pytest.raises(Strange):
            next(results)
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(results)

    coro.run(main)


@pytest.mark.parametrize("call", ["imap", "imap_unordered"])
def test_several_coros_share_an_iterator(call):
    had = []

    def work(number):
        for _ in range(number % 3):
            coro.yield_slice()
        return number

    def main():
        results = getattr(coro.Pool(3), call)(work, range(10))
        consumers = [coro.spawn(lambda: had.extend(results)) for _ in range(3)]
        assert len(coro.wait(consumers, timeout=10)) == 3
        assert not any(consumer.exception() for consumer in consumers)
        assert sorted(had) == list(range(10))

    coro.run(main)


@pytest.mark.parametrize("call", ["imap", "imap_unordered"])
def test_an_interruption_of_a_wait_for_the_next_result_loses_no_result(call):
    def main():
        gate = coro.event()
        results = getattr(coro.Pool(2), call)(lambda number: gate.wait() and number, range(4))
        waiters = [coro.spawn(next, results) for _ in range(2)]
        coro.yield_slice()
        for waiter in waiters:
            waiter.interrupt()
            assert waiter.join() is None
        gate.set()
        assert list(results) == [0, 1, 2, 3]

    coro.run(main)
