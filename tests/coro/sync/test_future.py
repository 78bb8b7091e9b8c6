"""`coro.future` (a result that is set once), `coro.wait` for several objects at once, `spawn_later`, and `imap`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import time

import pytest
from support import coro_is_available, spawn_blocked

import grapeshot

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro


# ------------------------------------------------------------------ future


def test_all_that_wait_get_the_value():
    def main():
        future = coro.future()
        assert not future.ready()
        assert repr(future) == "<future not set>"
        getters = [spawn_blocked(future.get) for _ in range(3)]
        waiter = spawn_blocked(future.wait)
        assert repr(future) == "<future not set, 4 waiting>"
        future.set("value")
        assert (future.ready(), future.successful(), future.value, future.exception) == (True, True, "value", None)
        assert [getter.join() for getter in getters] == ["value"] * 3
        assert waiter.join() is True
        assert future.get() == "value"
        assert repr(future) == "<future value='value'>"
        empty = coro.future()
        empty.set()
        assert empty.get(block=False) is None

    coro.run(main)


def test_every_waiter_gets_the_exception_and_its_traceback_does_not_grow():
    def main():
        future = coro.future()
        getters = [spawn_blocked(future.get) for _ in range(3)]
        error = KeyError("key")
        future.set_exception(error)
        lengths = set()
        for getter in getters:
            with pytest.raises(KeyError) as caught:
                getter.join()
            assert caught.value is error
        for _ in range(3):
            with pytest.raises(KeyError) as caught:
                future.get()
            lengths.add(len(caught.traceback))
        assert len(lengths) == 1
        assert (future.ready(), future.successful(), future.value) == (True, False, None)
        assert future.exception is error

    coro.run(main)


def test_a_future_is_set_once():
    def main():
        future = coro.future()
        with pytest.raises(TypeError):
            future.set_exception("no exception")
        future.set(1)
        for again in (lambda: future.set(2), lambda: future.set_exception(KeyError)):
            with pytest.raises(asyncio.InvalidStateError):
                again()
        return future.get()

    assert coro.run(main) == 1


def test_tasks_and_coros_wait_for_the_same_future():
    async def main():
        future = coro.future()

        async def ask():
            return await future

        tasks = [asyncio.create_task(ask()) for _ in range(2)]
        getter = coro.spawn(future.get)
        driven = coro.spawn(lambda: coro.await_(future))
        cancelled = asyncio.create_task(ask())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        cancelled.cancel()
        asyncio.get_running_loop().call_soon(future.set, 5)
        assert await asyncio.gather(*tasks, getter, driven) == [5] * 4
        assert cancelled.cancelled()
        assert await future == 5
        failed = coro.future()
        asyncio.get_running_loop().call_soon(failed.set_exception, KeyError)
        with pytest.raises(KeyError):
            await failed

    grapeshot.run(main())


def test_an_exception_that_is_never_retrieved_is_reported():
    reported = []

    def main():
        loop = coro.current().get_loop()
        loop.set_exception_handler(lambda _loop, context: reported.append(str(context["exception"])))
        for is_asked in (True, False):
            future = coro.future()
            future.set_exception(ValueError(f"asked {is_asked}"))
            if is_asked:
                assert future.exception
            del future
        gc.collect()

    coro.run(main)
    assert reported == ["asked False"]


def test_a_future_belongs_to_one_thread():
    def main():
        future = coro.future()
        with pytest.raises(coro.ScheduleError):
            coro.threads.run(future.set, 1)
        assert not future.ready()
        asyncio.get_running_loop().call_soon_threadsafe(future.set, 2)
        return future.get()

    assert coro.run(main) == 2


def test_callbacks():
    log = []

    def main():
        future = coro.future()
        future.add_done_callback(log.append)
        future.add_done_callback(print)
        assert future.remove_done_callback(print) == 1
        future.set(1)
        assert log == []  # the loop calls the callbacks in its next iteration
        future.add_done_callback(log.append)
        coro.yield_slice()
        assert log == [future, future]

    coro.run(main)


# ------------------------------------------------------------------ wait


def test_wait_for_all_for_some_and_for_a_time():
    def main():
        events = [coro.event() for _ in range(3)]
        coros = [coro.spawn(event.wait) for event in events]
        assert coro.wait(coros, timeout=0) == []
        assert coro.wait(coros, timeout=0.001) == []
        assert coro.wait(coros, count=0) == []
        assert coro.wait([]) == []
        for number in (2, 0):
            events[number].set()
        assert coro.wait(coros, count=1) == [coros[2]]
        assert coro.wait(coros, timeout=0.05) in ([coros[0], coros[2]], [coros[2], coros[0]])
        assert coro.wait(coros, count=2, timeout=60) == [coros[0], coros[2]]
        events[1].set()
        assert set(coro.wait(coros)) == set(coros)
        assert coro.wait(iter(coros), count=10) == coros
        assert coro.wait([coros[0], coros[0]]) == [coros[0]]

    coro.run(main)


def test_wait_for_different_things():
    async def task():
        await asyncio.sleep(0)

    def main():
        loop = asyncio.get_running_loop()
        future, failing, sleeping = coro.future(), coro.spawn(int, "no number"), loop.create_task(task())
        sleeping.add_done_callback(lambda _: loop.call_soon(future.set))
        assert coro.wait([future, failing, sleeping])[-1] is future
        assert isinstance(failing.exception(), ValueError)

    coro.run(main)


def test_a_waiter_that_is_interrupted_leaves_nothing_behind():
    def main():
        others = [coro.spawn(coro.wait) for _ in range(3)]
        waiter = spawn_blocked(coro.wait, others)
        waiter.interrupt()
        assert waiter.join() is None
        assert waiter.cancelled()
        assert not any(other.done() or other.remove_done_callback(print) for other in others)
        assert [other._status for other in others] == ["waiting"] * 3
        for other in others:
            coro.schedule(other, "value")
        assert [other.join() for other in others] == ["value"] * 3

    coro.run(main)


def test_wait_refuses_wrong_arguments():
    def main():
        with pytest.raises(RuntimeError, match="itself"):
            coro.wait([coro.current()])
        with pytest.raises(coro.NotStartedError):
            coro.wait([coro.new(int)])
        for thing in (coro.event(), coro.fifo(), "text", concurrent.futures.Future()):
            with pytest.raises(TypeError, match=r"^wait\(\) takes coros, tasks and futures, got "):
                coro.wait([coro.spawn(int), thing])
        with pytest.raises(ValueError, match="count"):
            coro.wait([], count=-1)
        for wrong in ({"timeout": 1}, {"count": 1}, {"coros": [], "until": 1}):
            with pytest.raises(TypeError, match=r"^wait\(\)"):
                coro.wait(**wrong)

    coro.run(main)
    with pytest.raises(coro.YieldFromMain):
        coro.wait([])


def test_a_future_whose_creation_failed_is_freed_silently():
    class Unmade(coro.future):
        def __init__(self):
            raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        Unmade()
    gc.collect()


# ------------------------------------------------------------------ spawn_later


def test_spawn_later():
    def main():
        began = time.monotonic()
        co = coro.spawn_later(0.01, lambda *args, **kwargs: (args, kwargs), 1, name="late", two=2)
        assert (co.name, co.done()) == ("late", False)
        assert co.join() == ((1,), {"two": 2})
        assert time.monotonic() - began >= 0.01
        ran = []
        co = coro.spawn_later(60, ran.append, 1)
        coro.yield_slice()
        co.shutdown()
        assert co.join() is None
        assert ran == []
        with pytest.raises(TypeError, match="spawn_later"):
            coro.spawn_later(1, 2)

    coro.run(main)


# ------------------------------------------------------------------ imap, imap_unordered


@pytest.mark.parametrize("call", ["imap", "imap_unordered"])
def test_results_are_returned_before_all_inputs_are_taken(call):
    """The inputs never end. The pool takes at most one per requested result, one per coro, and one more."""
    taken, running = [], []

    def inputs():
        number = 0
        while True:
            taken.append(number)
            yield number
            number += 1

    def work(number):
        running.append(number)
        assert len(running) <= 3
        coro.yield_slice()
        running.remove(number)
        return number * 10

    def main():
        pool = coro.Pool(3)
        results = getattr(pool, call)(work, inputs())
        assert len(pool) == 3  # the first coros have started
        assert sorted(next(results) for _ in range(20)) == [number * 10 for number in range(20)]
        assert len(taken) <= 20 + 4
        pool.join()

    coro.run(main)


def test_the_order_of_results():
    def work(number):
        for _ in range(10 - number * 3):
            coro.yield_slice()
        return number

    def main():
        assert list(coro.Pool(3).imap(work, range(3))) == [0, 1, 2]
        assert list(coro.Pool(3).imap_unordered(work, range(3))) == [2, 1, 0]
        assert list(coro.Pool(1).imap_unordered(work, range(3))) == [0, 1, 2]
        assert list(coro.Pool(2).imap_unordered(work, [])) == []
        assert sorted(coro.Pool(2).imap_unordered(pow, [1, 2, 3], [2, 2])) == [1, 4]

    coro.run(main)


@pytest.mark.parametrize("call", ["imap", "imap_unordered"])
def test_an_error_comes_in_the_place_of_its_result(call):
    def main():
        results = getattr(coro.Pool(1), call)(int, ["1", "x", "3"])
        assert next(results) == 1
        with pytest.raises(ValueError, match="x"):
            next(results)
        assert list(results) == [3]

    coro.run(main)


def test_a_pool_that_others_use():
    def main():
        pool = coro.Pool(1)
        gate = coro.event()
        other = pool.spawn(gate.wait)
        assert pool.try_spawn(int) is None
        results = pool.imap_unordered(int, "123")
        coro.spawn(gate.set)
        assert list(results) == [1, 2, 3]
        assert other.done()
        assert pool.try_spawn(int).join() == 0

    coro.run(main)
