"""`grapeshot.threads.Queue` and `Channel`, between tasks of any loop, coros and real threads."""

from __future__ import annotations

import asyncio
import collections
import gc
import math
import queue
import random
import sys
import threading
import time
import unittest
import weakref

import pytest
from support import coro_is_available, in_thread, run_script

import grapeshot
from grapeshot import threads
from tests.threads.parties import KINDS, Party

MANY = 500

with_coros = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")


# ---------------------------------------------------------------- data


async def put_all(way, shared, items):
    for item in items:
        await way.put(shared, item)


async def get_some(way, shared, count):
    return [await way.get(shared) for _ in range(count)]


async def get_until_shut_down(way, shared):
    items = []
    while True:
        try:
            items.append(await way.get(shared))
        except threads.ShutDown:
            return items
        shared.task_done()


@pytest.mark.parametrize("size", [0, 1, 7])
@pytest.mark.parametrize("getter", KINDS)
@pytest.mark.parametrize("putter", KINDS)
def test_items_arrive_in_order(putter, getter, size):
    shared = threads.Queue(size)
    parties = [Party(getter, get_some, shared, MANY), Party(putter, put_all, shared, range(MANY))]
    assert [party.result() for party in parties] == [list(range(MANY)), None]
    assert (shared.qsize(), shared.empty(), shared.full()) == (0, True, False)


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("receiver", KINDS)
@pytest.mark.parametrize("sender", KINDS)
def test_a_channel_ends_when_it_is_closed(sender, receiver, size):
    channel = threads.Channel(size)

    async def send_all(way):
        with channel:
            for number in range(MANY):
                await way.send(channel, number)
        with pytest.raises(threads.ClosedError):
            await way.send(channel, None)

    async def receive_all(way):
        items = await way.all_of(channel)
        with pytest.raises(threads.ClosedError):
            await way.receive(channel)
        return items

    parties = [Party(receiver, receive_all), Party(sender, send_all)]
    assert [party.result() for party in parties] == [list(range(MANY)), None]


@pytest.mark.parametrize("size", [0, 1, 7])
def test_many_parties_of_each_kind(size):
    shared = threads.Queue(size)
    getters = [Party(kind, get_until_shut_down, shared) for kind in KINDS * 2]
    numbers = [range(number, number + 100) for number in range(0, 100 * 2 * len(KINDS), 100)]
    putters = [Party(kind, put_all, shared, part) for kind, part in zip(KINDS * 2, numbers, strict=True)]
    for each in putters:
        each.result()

    async def join(way):
        await way.join(shared)

    for kind in KINDS:
        Party(kind, join).result()
    shared.shutdown()
    got = [each.result() for each in getters]
    assert sorted(item for items in got for item in items) == list(range(100 * 2 * len(KINDS)))
    for items in got:
        # The items of each putter arrive in order.
        for part in numbers:
            own = [item for item in items if item in part]
            assert own == sorted(own)


@pytest.mark.parametrize("size", [0, 1, 3])
def test_interrupted_waits_lose_nothing(size):
    """Getters give up after random times, while items arrive at random times."""
    shared = threads.Queue(size)
    count = 150

    async def get_with_limits(way):
        rng, items = random.Random(1), []
        while True:
            try:
                item = await way.get_within(shared, rng.random() / 500)
            except threads.ShutDown:
                return items
            if item is not None:
                items.append(item)
                shared.task_done()

    async def put_slowly(way):
        rng = random.Random(2)
        for number in range(count):
            if rng.random() < 0.5:
                time.sleep(rng.random() / 500)
            await way.put(shared, number)

    getters = [Party(kind, get_with_limits) for kind in KINDS]
    putters = [Party(kind, put_slowly) for kind in KINDS]
    for each in putters:
        each.result()
    shared.join()
    shared.shutdown()
    got = collections.Counter(item for each in getters for item in each.result())
    assert got == collections.Counter({number: len(KINDS) for number in range(count)})


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "task" in kind])
def test_cancelled_puts_leave_no_place_taken(kind):
    shared = threads.Queue(1)

    async def main(_):
        await shared.aput("first")
        for _ in range(20):
            tasks = [asyncio.ensure_future(shared.aput(number)) for number in range(3)]
            await asyncio.sleep(0)
            tasks[1].cancel()
            # Taking this item frees a place, which is reserved for the first task. That task is then cancelled, too.
            assert await shared.aget() == "first"
            tasks[0].cancel()
            await asyncio.wait(tasks)
            assert [task.cancelled() for task in tasks] == [True, True, False]
            assert await shared.aget() == 2
            await shared.aput("first")
            assert shared.full()

    Party(kind, main).result()


@with_coros
def test_waiters_are_served_in_the_order_in_which_they_came():
    from grapeshot import coro

    shared = threads.Queue()
    got = []

    def get_in_coro(name):
        got.append((name, shared.get()))

    async def get_in_task(name):
        got.append((name, await shared.aget()))

    async def main():
        waits = []
        for number in range(6):
            name = f"{number}"
            waits.append(asyncio.ensure_future(get_in_task(name)) if number % 2 else coro.spawn(get_in_coro, name))
            await asyncio.sleep(0.001)
        for number in range(6):
            shared.put(number)
        await asyncio.gather(*waits)

    grapeshot.run(main())
    assert sorted(got) == [(f"{number}", number) for number in range(6)]


# ---------------------------------------------------------------- shutdown, closed loops and forks


@pytest.mark.parametrize("kind", KINDS)
def test_shutdown_ends_all_waits(kind):
    empty, full = threads.Queue(), threads.Queue(1)
    full.put(0)
    began = threading.Semaphore(0)

    async def wait(way, act, *args):
        began.release()
        with pytest.raises(threads.ShutDown):
            await getattr(way, act)(*args)

    parties = [Party(kind, wait, "get", empty) for _ in range(3)]
    parties += [Party(kind, wait, "put", full, number) for number in range(3)]
    for _ in parties:
        began.acquire()
    time.sleep(0.02)
    empty.shutdown()
    full.shutdown()
    for party in parties:
        party.result()
    assert full.get() == 0  # what is in the queue stays there
    with pytest.raises(threads.ShutDown):
        full.get()
    assert (empty.is_shutdown, full.is_shutdown) == (True, True)


@pytest.mark.parametrize("kind", KINDS)
def test_immediate_shutdown_drops_items_and_ends_joins(kind):
    shared = threads.Queue()
    for number in range(3):
        shared.put(number)
    began = threading.Event()

    async def join(way):
        began.set()
        await way.join(shared)

    party = Party(kind, join)
    began.wait()
    time.sleep(0.01)
    shared.shutdown(immediate=True)
    party.result()
    assert shared.qsize() == 0
    with pytest.raises(threads.ShutDown):
        shared.get_nowait()


def test_a_task_whose_loop_is_closed_is_passed_over():
    """The item that the task would have got goes to the next waiter."""
    for factory in (grapeshot.new_event_loop, asyncio.SelectorEventLoop):
        shared = threads.Queue()
        loop = factory()
        task = loop.create_task(shared.aget())
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        assert in_thread(lambda shared=shared: (shared.put("item"), shared.get())[1]) == "item"
        task._log_destroy_pending = False
        del task


@with_coros
@pytest.mark.parametrize("factory", [grapeshot.new_event_loop, asyncio.SelectorEventLoop])
def test_a_task_whose_loop_is_closed_has_nothing_to_give_back(factory):
    """The item goes to the next waiter. When the task's coroutine is closed afterwards, that waiter keeps the item."""
    from grapeshot import coro

    shared = threads.Queue()
    loop, waiting = factory(), shared.aget()
    task = loop.create_task(waiting)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    task._log_destroy_pending = False

    def main():
        getter = coro.spawn(shared.get)
        coro.yield_slice()
        shared.put("item")  # the task is first, but its loop is closed, so the getter gets the item
        waiting.close()
        with pytest.raises(queue.Empty):
            shared.get_nowait()
        assert getter.join() == "item"

    coro.run(main)
    del task


@with_coros
def test_a_fork_while_an_item_is_promised():
    """The coro that the item is promised to cannot run in the child, so the child can take the item."""
    out = run_script(
        None,
        """
        import os
        from grapeshot import _core, coro, threads

        def main():
            for kind in (threads.Queue, _core.thread_queue):
                shared = kind()
                getter = coro.spawn(shared.get)
                coro.yield_slice()
                shared.put("item")
                if os.fork() == 0:
                    print(shared.qsize(), shared.get_nowait(), flush=True)
                    os._exit(0)
                os.wait()
                assert shared.qsize() == 0
                assert getter.join() == "item"

        coro.run(main)
        """,
    )
    assert out.splitlines() == ["1 item", "1 item"]


def test_a_task_that_is_destroyed_gives_its_item_back():
    shared = threads.Queue()
    waiting = shared.aget()

    async def main():
        waiting.send(None)  # begins the wait; would raise StopIteration if aget() did not wait
        shared.put("item")
        assert shared.qsize() == 0
        waiting.close()
        assert shared.qsize() == 1
        assert shared.get() == "item"

    grapeshot.run(main())


def test_a_queue_and_a_task_that_wait_for_each_other_are_freed():
    class Own(threads.Queue):
        pass

    loop = grapeshot.new_event_loop()
    shared = Own()
    task = loop.create_task(shared.aget())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    task._log_destroy_pending = False
    freed = weakref.ref(shared)
    del shared, task, loop
    gc.collect()
    gc.collect()
    assert freed() is None


# ---------------------------------------------------------------- the interface


def test_a_task_gets_an_error_where_it_would_block_its_loop():
    shared, channel = threads.Queue(1), threads.Channel(1)

    async def main():
        for call, name in ((shared.get, "Queue.aget"), (channel.receive, "Channel.areceive")):
            with pytest.raises(RuntimeError, match=f"use await {name}"):
                call()
        shared.put(1)
        with pytest.raises(RuntimeError, match=r"use await Queue.aput"):
            shared.put(2)
        with pytest.raises(RuntimeError, match=r"use await Queue.ajoin"):
            shared.join()
        assert shared.get() == 1  # does not wait

    for factory in (grapeshot.new_event_loop, asyncio.SelectorEventLoop):
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main())
        shared.task_done()


def test_limits_of_waits():
    shared, channel = threads.Queue(1), threads.Channel(1)
    for limit in ({"block": False}, {"timeout": 0}, {"timeout": 0.001}):
        with pytest.raises(queue.Empty):
            shared.get(**limit)
        with pytest.raises(TimeoutError):
            channel.receive(**limit)
    with pytest.raises(queue.Empty):
        shared.get_nowait()
    with pytest.raises(TimeoutError):
        channel.receive_nowait()
    shared.put_nowait(1)
    channel.send_nowait(1)
    for limit in ({"block": False}, {"timeout": 0}, {"timeout": 0.001}):
        with pytest.raises(queue.Full):
            shared.put(2, **limit)
        with pytest.raises(TimeoutError):
            channel.send(2, **limit)
    for call in (
        lambda: shared.get(timeout=-1),
        lambda: shared.put(1, timeout=-1),
        lambda: channel.receive(timeout=-1),
    ):
        with pytest.raises(ValueError, match="non-negative"):
            call()


def test_arguments():
    for unlimited in (-1, 0, math.inf):
        shared = threads.Queue(unlimited)
        assert shared.maxsize == unlimited
        for number in range(100):
            shared.put_nowait(number)
        assert not shared.full()
        assert shared.get(timeout=math.inf) == shared.get(timeout=1e12) - 1 == 0
    assert repr(threads.Queue(3)) == "<Queue maxsize=3 items=0>"
    assert repr(threads.Channel(math.inf)) == "<Channel capacity=inf items=0>"
    for bad in (0, -1):
        with pytest.raises(ValueError, match="must be 1 or more"):
            threads.Channel(bad)
    for bad in (1.5, "1", None):
        with pytest.raises(TypeError, match=r"must be an integer or math\.inf"):
            threads.Channel(bad)
    with pytest.raises(TypeError):
        threads.Channel()
    shared = threads.Queue[int](2)
    with pytest.raises(ValueError, match="too many times"):
        shared.task_done()
    with pytest.raises(TypeError):
        shared.put()
    if sys.version_info >= (3, 13):
        assert threads.ShutDown is queue.ShutDown


def test_cpythons_own_tests_of_queue_queue():
    from test import test_queue as theirs

    class Case(theirs.BaseQueueTestMixin, unittest.TestCase):
        type2test = threads.Queue
        queue = queue

    outcome = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(Case).run(outcome)
    assert not outcome.errors + outcome.failures, "\n".join(text for _, text in outcome.errors + outcome.failures)
    assert outcome.testsRun >= 6


@pytest.mark.parametrize("factory", ["grapeshot.new_event_loop", "asyncio.SelectorEventLoop"])
def test_waits_of_tasks_leave_nothing_behind(factory):
    """When a task has waited, nothing keeps the future or waiter of that wait alive, whichever thread woke the task."""
    out = run_script(
        None,
        f"""
        import asyncio, gc, threading, grapeshot
        from grapeshot import threads

        COUNT = 500
        shared = threads.Queue(1)

        def alive():
            gc.collect()
            return sum(type(each).__name__ in ("Future", "_Waiter") for each in gc.get_objects())

        async def main():
            before = alive()
            thread = threading.Thread(target=lambda: [shared.put(number) for number in range(COUNT)])
            thread.start()
            for _ in range(COUNT):
                await shared.aget()
            thread.join()
            print(alive() - before < 10)

        loop = {factory}()
        loop.run_until_complete(main())
        loop.close()
        """,
    )
    assert out == "True\n"


def test_a_waiter_of_the_parent_takes_no_place_from_the_child_of_a_fork():
    out = run_script(
        None,
        """
        import asyncio, os, grapeshot
        from grapeshot import threads

        shared = threads.Queue(1)
        shared.put_nowait("first")
        loop = grapeshot.new_event_loop()

        async def begin():
            task = asyncio.ensure_future(shared.aput("of the parent"))
            await asyncio.sleep(0)
            return task

        waiting = loop.run_until_complete(begin())

        async def child():
            task = asyncio.ensure_future(shared.aput("of the child"))
            await asyncio.sleep(0)
            assert shared.get_nowait() == "first"  # now the place is reserved for the child's task
            waiting.get_coro().close()
            assert shared.full()
            await task
            assert shared.qsize() == 1

        if not (pid := os.fork()):
            grapeshot.run(child())
            os._exit(0)
        print(os.waitpid(pid, 0)[1])
        waiting.cancel()
        loop.run_until_complete(asyncio.wait([waiting]))
        loop.close()
        """,
        flags=(),
    )
    assert out == "0\n"
