"""The basic functions of coros: running, scheduling, outcomes, waiting."""

from __future__ import annotations

import asyncio
import contextvars
import sys

import pytest
from support import coro_is_available

import grapeshot

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro


def test_run_returns_the_result():
    assert coro.run(lambda a, b=0: a + b, 1, b=2) == 3


def test_run_raises_the_exception():
    def fail():
        raise KeyError("x")

    with pytest.raises(KeyError):
        coro.run(fail)


def test_coros_take_turns_in_order():
    log = []

    def work(name):
        for number in range(3):
            log.append((name, number))
            coro.yield_slice()

    def main():
        for co in [coro.spawn(work, name) for name in "abc"]:
            co.join()

    coro.run(main)
    assert log == [(name, number) for number in range(3) for name in "abc"]


def test_fair_with_callbacks_and_tasks():
    log = []

    async def main():
        loop = asyncio.get_running_loop()

        async def task():
            for number in range(3):
                log.append(("task", number))
                await asyncio.sleep(0)

        def co():
            for number in range(3):
                log.append(("coro", number))
                coro.yield_slice()

        def callback(number=0):
            log.append(("callback", number))
            if number < 2:
                loop.call_soon(callback, number + 1)

        ended = loop.create_task(task())
        thread = coro.spawn(co)
        loop.call_soon(callback)
        await ended
        await thread

    grapeshot.run(main())
    assert log == [(name, number) for number in range(3) for name in ("task", "coro", "callback")]


def test_await_gives_result_or_exception():
    def fail():
        coro.yield_slice()
        raise ValueError(1)

    async def main():
        assert await coro.spawn(lambda: 5) == 5
        done = coro.spawn(lambda: 6)
        await done
        assert await done == 6
        with pytest.raises(ValueError, match="1"):
            await coro.spawn(fail)
        first, second = await asyncio.gather(coro.spawn(lambda: 1), coro.spawn(lambda: 2))
        assert (first, second) == (1, 2)

    grapeshot.run(main())


def test_await_in_a_coro():
    async def add(a, b):
        await asyncio.sleep(0.001)
        return a + b

    async def fail():
        raise LookupError

    def main():
        assert coro.await_(add(1, 2)) == 3
        future = asyncio.get_running_loop().create_future()
        future.set_result(7)
        assert coro.await_(future) == 7
        with pytest.raises(LookupError):
            coro.await_(fail())
        with pytest.raises(TypeError):
            coro.await_(5)
        return coro.await_(asyncio.wait_for(add(3, 4), 10))

    assert coro.run(main) == 7


def test_the_coro_is_asyncios_current_task():
    async def inside(co):
        assert asyncio.current_task() is co
        async with asyncio.timeout(10):
            await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await asyncio.sleep(60)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(asyncio.sleep(0, number)) for number in range(3)]
        return [task.result() for task in tasks]

    def main():
        co = coro.current()
        assert asyncio.current_task() is co
        result = coro.await_(inside(co))
        assert asyncio.current_task() is co
        assert co.cancelling() == 0
        return result

    async def outside():
        task = asyncio.current_task()
        assert await coro.spawn(main) == [0, 1, 2]
        assert asyncio.current_task() is task

    grapeshot.run(outside())


def test_cancelling_a_coro_that_awaits():
    log = []

    async def forever():
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError as exc:
            log.append(exc.args)
            raise

    async def main():
        co = coro.spawn(lambda: coro.await_(forever()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert co.cancel("enough")
        with pytest.raises(asyncio.CancelledError):
            await co
        assert co.cancelled()
        assert co.cancelling() == 1

    grapeshot.run(main())
    assert log == [("enough",)]


def test_cancelling_the_task_of_run_sync():
    log = []

    def blocking():
        log.append("begun")
        try:
            coro.sleep_relative(60)
        finally:
            log.append("cleaned up")

    async def main():
        task = asyncio.ensure_future(coro.run_sync(blocking))
        while not log:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    grapeshot.run(main())
    assert log == ["begun", "cleaned up"]


def test_exceptions_stay_with_their_coro():
    def handle(number):
        try:
            raise ValueError(number)
        except ValueError:
            for _ in range(5):
                coro.yield_slice()
                assert sys.exc_info()[1].args == (number,)
            try:
                raise
            except ValueError as again:
                assert again.args == (number,)
        assert sys.exc_info() == (None, None, None)
        return number

    def main():
        threads = [coro.spawn(handle, number) for number in range(20)]
        return [thread.join() for thread in threads]

    assert coro.run(main) == list(range(20))


def test_contexts_are_copies():
    variable = contextvars.ContextVar("variable", default=0)

    def change(number):
        assert variable.get() == 99
        variable.set(number)
        coro.yield_slice()
        assert variable.get() == number

    def main():
        variable.set(99)
        threads = [coro.spawn(change, number) for number in range(5)]
        for thread in threads:
            thread.join()
        own = contextvars.copy_context()
        coro.spawn(variable.set, 5, context=own).join()
        return variable.get(), own[variable]

    assert coro.run(main) == (99, 5)


def test_yields_below_c_functions():
    def key(value):
        coro.yield_slice()
        return -value

    def main():
        threads = [coro.spawn(sorted, [number, 3, 7], key=key) for number in range(10)]
        return [thread.join() for thread in threads]

    assert coro.run(main) == [sorted([number, 3, 7], reverse=True) for number in range(10)]


def test_generators_across_yields():
    def numbers(count):
        for number in range(count):
            coro.yield_slice()
            yield number

    def main():
        threads = [coro.spawn(lambda n=n: sum(numbers(n))) for n in range(30)]
        return [thread.join() for thread in threads]

    assert coro.run(main) == [sum(range(n)) for n in range(30)]


def test_deep_recursion_ends_in_an_error():
    def deep(level):
        if level % 50 == 0:
            coro.yield_slice()
        return deep(level + 1)

    def main():
        threads = [coro.spawn(deep, 0) for _ in range(3)]
        for thread in threads:
            with pytest.raises(RecursionError):
                thread.join()
        return "alive"

    assert coro.run(main) == "alive"


def test_deep_recursion_in_c_ends_in_an_error():
    def main():
        nested: list = []
        for _ in range(100_000):
            nested = [nested]
        with pytest.raises(RecursionError):
            repr(nested)
        while nested:
            nested = nested[0]
        return "alive"

    assert coro.run(main) == "alive"


def test_frames_of_suspended_coros():
    def inner():
        coro.wait()

    def outer():
        inner()

    async def main():
        threads = [coro.spawn(outer) for _ in range(3)]
        await asyncio.sleep(0)
        for thread in threads:
            frame = thread.get_frame()
            assert frame.f_code.co_name == "inner"
            assert frame.f_back.f_code.co_name == "outer"
            assert frame.f_back.f_back is None
            assert [entry.f_code.co_name for entry in thread.get_stack()] == ["outer", "inner"]
            coro.schedule(thread)
            await thread

    grapeshot.run(main())


def test_sleeping():
    def main():
        loop = asyncio.get_running_loop()
        began = loop.time()
        coro.sleep_relative(0.01)
        woke = loop.time()
        assert woke - began >= 0.01
        coro.sleep_absolute(woke + 0.01)
        assert loop.time() >= woke + 0.01

    coro.run(main)


def test_misuse():
    with pytest.raises(coro.YieldFromMain):
        coro.yield_slice()
    with pytest.raises(coro.YieldFromMain):
        coro.current()

    async def main():
        with pytest.raises(coro.YieldFromMain):
            coro.sleep_relative(1)
        with pytest.raises(TypeError):
            coro.spawn(5)
        with pytest.raises(ValueError, match="stack"):
            coro.spawn(int, stack="other")
        idle = coro.new(int)
        with pytest.raises(coro.NotStartedError):
            coro.schedule(idle)
        idle.start()
        with pytest.raises(coro.ScheduleError):
            idle.start()
        with pytest.raises(coro.ScheduleError):
            coro.schedule(idle)
        await idle
        with pytest.raises(coro.DeadCoroutine):
            coro.schedule(idle)

        def join_itself():
            coro.current().join()

        with pytest.raises(RuntimeError, match="itself"):
            await coro.spawn(join_itself)

    grapeshot.run(main())


def test_another_event_loop_is_refused():
    async def main():
        with pytest.raises(RuntimeError, match="another event loop"):
            coro.spawn(int)

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(main())


def test_finally_blocks_run_when_the_loop_is_closed():
    log = []

    def stay(number):
        try:
            coro.wait()
        finally:
            log.append(number)

    def main():
        for number in range(5):
            coro.spawn(stay, number)
        coro.yield_slice()

    coro.run(main)
    assert sorted(log) == list(range(5))
    assert coro.get_live_coros() == []


def test_many_at_once():
    count = 10_000

    def sleep(number):
        coro.sleep_relative(0.01)
        return number

    def main():
        threads = [coro.spawn(sleep, number) for number in range(count)]
        return sum(thread.join() for thread in threads)

    assert coro.run(main) == sum(range(count))


def test_running_out_of_memory_leaves_others_intact():
    reported = []

    def work(number):
        for _ in range(10):
            coro.yield_slice()
        return number

    async def main():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: reported.append(type(context["exception"])))
        coro.set_stack_slots(1)
        threads = [coro.spawn(work, number) for number in range(5)]
        await asyncio.sleep(0)
        from grapeshot import _core

        _core._coro_fail_evictions(7 if not coro.stack_info()["evicts_always"] else 20)
        return [await thread for thread in threads]

    assert grapeshot.run(main()) == list(range(5))
    # The mode that always evicts also makes evictions that are not needed. No coro notices if one of those fails.
    assert set(reported) == {MemoryError}
    assert len(reported) == 7 or coro.stack_info()["evicts_always"]


def test_a_stack_of_its_own():
    import ctypes

    callback_type = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int))
    qsort = ctypes.CDLL(None).qsort
    qsort.restype = None

    def compare(left, right):
        coro.yield_slice()
        return left[0] - right[0]

    def sort(values):
        array = (ctypes.c_int * len(values))(*values)
        qsort(array, len(values), ctypes.sizeof(ctypes.c_int), callback_type(compare))
        return list(array)

    def main():
        threads = [coro.spawn(sort, [5, number, 9, 1], stack="own") for number in range(5)]
        return [thread.join() for thread in threads]

    assert coro.run(main) == [sorted([5, number, 9, 1]) for number in range(5)]
