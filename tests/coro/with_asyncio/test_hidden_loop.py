"""In coros that hide the loop, asyncio's functions behave as in a thread, while grapeshot's still find the loop."""

from __future__ import annotations

import asyncio
import asyncio.events
import sys
import warnings

import pytest
from support import coro_is_available

import grapeshot
from tests.coro.with_asyncio.blocking_code import in_thread

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro


def in_coro(fn, *args):
    """Run a function in a coro that hides the loop."""
    return grapeshot.run(coro.run_blocking(fn, *args))


@pytest.fixture(params=[in_thread, in_coro])
def run(request):
    """A function that runs code in a coro that hides the loop or, as the control, in an ordinary thread."""
    return request.param


def view():
    """Return what asyncio's functions see here."""
    seen = {"_get_running_loop": asyncio._get_running_loop(), "in Python": asyncio.events._py__get_running_loop()}
    for function in (asyncio.get_running_loop, asyncio.current_task, asyncio.all_tasks, asyncio.get_event_loop):
        try:
            seen[function.__name__] = function()
        except RuntimeError as exc:
            seen[function.__name__] = str(exc).partition(" in thread")[0]
    return seen


HIDDEN = {
    "_get_running_loop": None,
    "in Python": None,
    "get_running_loop": "no running event loop",
    "current_task": "no running event loop",
    "all_tasks": "no running event loop",
    "get_event_loop": "There is no current event loop",
}


def assert_shown():
    assert asyncio.get_running_loop() is coro.current().get_loop()
    assert asyncio.current_task() is coro.current()
    assert coro.current() in asyncio.all_tasks()


# ---- what asyncio sees -----------------------------------------------------------------------------------------


def test_no_loop_is_seen(run):
    assert run(view) == HIDDEN


def test_no_loop_is_seen_after_each_kind_of_wait():
    def work():
        for wait in (
            coro.yield_slice,
            lambda: coro.sleep_relative(0),
            lambda: coro.await_(asyncio.sleep(0)),
            lambda: coro.threads.run(int),
            lambda: coro.spawn(coro.yield_slice).join(),
        ):
            wait()
            assert view() == HIDDEN
        return asyncio.current_task(coro.current().get_loop())

    assert in_coro(work) is None


def test_hiding_coros_and_other_coros_take_turns():
    def hide(steps):
        for _ in range(steps):
            assert view() == HIDDEN
            coro.yield_slice()

    def show(steps):
        for _ in range(steps):
            assert_shown()
            coro.yield_slice()

    async def task(steps):
        loop = asyncio.get_running_loop()
        for _ in range(steps):
            assert asyncio.get_running_loop() is loop
            assert asyncio.current_task() is own
            await asyncio.sleep(0)

    async def main():
        nonlocal own
        own = asyncio.create_task(task(15))
        await asyncio.gather(
            *(coro.run_blocking(hide, steps) for steps in range(5, 15)),
            *(coro.run_sync(show, steps) for steps in range(5, 15)),
            coro.run_blocking(hide, 5, stack="own"),
            own,
        )
        assert asyncio.current_task() is main_task

    async def outer():
        nonlocal main_task
        main_task = asyncio.current_task()
        await main()

    own = main_task = None
    grapeshot.run(outer())


def test_awaited_coroutines_see_the_loop():
    async def asynchronous():
        assert_shown()
        await asyncio.sleep(0)
        assert_shown()
        with pytest.raises(RuntimeError, match="running event loop"):
            asyncio.run(never())
        assert (await asyncio.gather(asyncio.sleep(0, 1), asyncio.sleep(0, 2))) == [1, 2]
        async with asyncio.timeout(10):
            inner()
        return asyncio.get_running_loop()

    async def fail():
        await asyncio.sleep(0)
        raise LookupError

    def inner():
        assert coro.await_(asyncio.sleep(0, 3)) == 3  # nested
        assert_shown()

    def work():
        assert coro.await_(asynchronous()) is coro.current().get_loop()
        assert view() == HIDDEN
        with pytest.raises(LookupError):
            coro.await_(fail())
        assert view() == HIDDEN
        with pytest.raises(TypeError):
            coro.await_(5)
        assert view() == HIDDEN
        with pytest.raises(TimeoutError), coro.timeout(0):
            coro.await_(asyncio.sleep(10))
        assert view() == HIDDEN

    async def never():
        raise AssertionError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # asyncio.run() does not close the coroutine that it refuses
        in_coro(work)


def test_explicit_spawn_shows_the_loop():
    def work():
        assert coro.spawn(assert_shown).join() is None
        made = coro.new(assert_shown)
        made.start()
        made.join()
        with coro.Group() as group:
            group.spawn(assert_shown)
        assert coro.await_(coro.run_sync(view))["current_task"] is not None
        assert coro.await_(coro.run_blocking(view)) == HIDDEN
        assert view() == HIDDEN

    in_coro(work)


def test_own_functions_find_the_loop():
    def work():
        loop = coro.current().get_loop()
        assert abs(coro.now() - loop.time()) < 10
        lock, event, fifo = coro.lock(), coro.event(), coro.fifo()
        with lock:
            waiter = coro.spawn(lambda: [event.wait(), fifo.push(1)])
            event.set()
            assert fifo.pop() == 1
            waiter.join()
        with pytest.raises(coro.TimeoutError):
            coro.with_timeout(0.001, coro.wait)
        with pytest.raises(coro.TimeoutError):
            coro.spawn(coro.sleep_relative, 60).join(0.001)
        assert coro.threads.run(view) == HIDDEN
        assert coro.in_parallel([(abs, (-1,)), (abs, (-2,))]) == [1, 2]
        assert list(coro.Pool(2).map(abs, [-1, -2])) == [1, 2]
        future = coro.future()
        called = []
        future.add_done_callback(called.append)
        future.set(5)
        assert not called  # the loop calls the callback later
        coro.yield_slice()
        coro.yield_slice()
        assert called == [future]
        assert coro.await_(future) == 5
        return "done"

    assert in_coro(work) == "done"


# ---- run_blocking and call_blocking ----------------------------------------------------------------------------


def test_run_blocking_gives_the_result_or_the_exception():
    def work(a, b=0):
        coro.yield_slice()
        return a + b, coro.current().name

    def fail():
        coro.yield_slice()
        raise LookupError("x")

    async def main():
        assert await coro.run_blocking(work, 1, b=2, name="named") == (3, "named")
        with pytest.raises(LookupError, match="x"):
            await coro.run_blocking(fail)
        with pytest.raises(TypeError, match="run_blocking"):
            await coro.run_blocking(5)
        with pytest.raises(TypeError, match="async"):
            await coro.run_blocking(main)

    grapeshot.run(main())


def test_cancelled_run_blocking():
    ended = []

    def work():
        try:
            coro.sleep_relative(60)
        finally:
            ended.append(view())

    async def main():
        task = asyncio.create_task(coro.run_blocking(work))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    grapeshot.run(main())
    assert ended == [HIDDEN]


def test_call_blocking_hides_the_loop_for_the_call():
    def blocking(a, b):
        assert view() == HIDDEN
        coro.yield_slice()
        assert view() == HIDDEN
        assert coro.call_blocking(view) == HIDDEN  # nested
        assert view() == HIDDEN
        return a + b

    def fail():
        coro.yield_slice()
        raise LookupError

    async def asynchronous():
        assert_shown()
        assert coro.call_blocking(blocking, 3, b=4) == 7
        assert_shown()

    def work():
        assert_shown()
        assert coro.call_blocking(blocking, 1, b=2) == 3
        assert_shown()
        with pytest.raises(LookupError):
            coro.call_blocking(fail)
        assert_shown()
        coro.await_(asynchronous())
        assert coro.call_blocking(lambda: [coro.await_(asynchronous()), view()][1]) == HIDDEN
        with pytest.raises(TypeError, match="call_blocking"):
            coro.call_blocking(asynchronous)
        assert_shown()

    coro.run(work)
    with pytest.raises(coro.YieldFromMain):
        coro.call_blocking(view)


def test_call_blocking_gives_the_current_task_back():
    """An eager task runs its first step on the coro's stack, and is current before and after call_blocking()."""
    if sys.version_info < (3, 12):
        pytest.skip("eager tasks came with Python 3.12")

    async def step():
        own = asyncio.current_task()
        assert own is not coro.current()
        assert coro.call_blocking(view) == HIDDEN
        assert asyncio.current_task() is own

    async def asynchronous():
        loop = asyncio.get_running_loop()
        task = asyncio.Task(step(), loop=loop, eager_start=True)
        assert task.done()
        task.result()
        assert_shown()

    coro.run(lambda: coro.await_(asynchronous()))


def test_loop_is_shown_after_the_end_of_a_coro_that_hid_it():
    def raise_in_the_middle():
        coro.yield_slice()
        raise SystemExit(3)

    async def main():
        loop = asyncio.get_running_loop()
        await coro.run_blocking(int)
        assert asyncio.get_running_loop() is loop
        await coro.run_blocking(raise_in_the_middle)

    with pytest.raises(SystemExit):
        grapeshot.run(main())
    assert asyncio._get_running_loop() is None


def test_hiding_coro_left_to_the_end_of_its_loop():
    seen = []

    def work():
        try:
            coro.wait()
        finally:
            seen.append(view())

    loop = grapeshot.new_event_loop()

    async def main():
        task = asyncio.ensure_future(coro.run_blocking(work))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return task

    task = loop.run_until_complete(main())
    task._log_destroy_pending = False
    loop.close()
    assert seen == [HIDDEN]
    assert asyncio._get_running_loop() is None


@pytest.mark.parametrize("new_loop", [asyncio.SelectorEventLoop, grapeshot.Loop])
def test_other_loop_inside_of_a_hiding_coro(new_loop):
    """A loop that is made by calling its class, not by asyncio.new_event_loop(), blocks the thread while it runs.
    Afterwards coros find their own loop.
    """

    def work():
        async def main():
            running = asyncio.get_running_loop()
            with pytest.raises(RuntimeError, match="another event loop"):
                coro.await_(asyncio.sleep(0))
            with pytest.raises(RuntimeError, match="another event loop"):
                coro.spawn(print)
            return running

        loop = new_loop()
        try:
            assert loop.run_until_complete(main()) is loop
        finally:
            loop.close()
        assert view() == HIDDEN
        coro.yield_slice()
        assert coro.await_(asyncio.sleep(0, 4)) == 4

    in_coro(work)
