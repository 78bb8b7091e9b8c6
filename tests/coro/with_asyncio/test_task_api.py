"""A coro as asyncio sees it: the interface of a task, asyncio.current_task() and asyncio.all_tasks()."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import io
import re
import sys
import threading
import time
import weakref

import pytest
from support import coro_is_available, run_script, sleep_zero

import grapeshot

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro


def outcome_of(call):
    try:
        return "returned", repr(call())
    except asyncio.CancelledError as error:
        return type(error), ""  # a task gives the message of its cancellation only to the first caller
    except BaseException as error:
        return type(error), str(error)


# ---- current_task ----------------------------------------------------------------------------------------------


def test_current_task_is_restored_at_each_switch():
    seen = []

    async def inside(co):
        for _ in range(3):
            assert asyncio.current_task() is co
            await asyncio.sleep(0)

    def work():
        co = coro.current()
        for _ in range(3):
            assert asyncio.current_task() is co
            coro.yield_slice()
            coro.await_(inside(co))
            coro.sleep_relative(0)
        seen.append(co)

    def callback():
        assert asyncio.current_task() is None
        seen.append("callback")

    async def main():
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        coros = [coro.spawn(work) for _ in range(3)]
        for _ in range(5):
            loop.call_soon(callback)
            await asyncio.sleep(0)
            assert asyncio.current_task() is task
        await asyncio.gather(*coros)
        assert asyncio.current_task() is task
        assert seen.count("callback") == 5
        assert set(coros) <= set(seen)

    grapeshot.run(main())


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with Python 3.12")
def test_eager_tasks_started_in_a_coro():
    log = []

    async def child(number):
        log.append((number, asyncio.current_task()))
        await asyncio.sleep(0)
        log.append((number, asyncio.current_task()))
        return number

    async def child_that_yields_the_coro():
        task = asyncio.current_task()
        coro.yield_slice()
        assert asyncio.current_task() is task
        return "yielded"

    async def parent():
        tasks = [asyncio.get_running_loop().create_task(child(number)) for number in range(2)]
        assert asyncio.current_task() is coro.current()
        return [await task for task in tasks], tasks

    def work():
        co = coro.current()
        results, tasks = coro.await_(parent())
        assert results == [0, 1]
        assert log == [(number, tasks[number]) for _ in range(2) for number in range(2)]
        assert asyncio.current_task() is co
        assert coro.await_(asyncio.get_running_loop().create_task(child_that_yields_the_coro())) == "yielded"
        assert asyncio.current_task() is co

    async def main():
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)
        await coro.spawn(work)

    grapeshot.run(main())


def test_two_loops_in_two_threads():
    def work(other):
        for _ in range(50):
            assert asyncio.current_task() is coro.current()
            coro.yield_slice()
        return threading.get_ident() != other

    async def main(other):
        return all(await asyncio.gather(*[coro.spawn(work, other) for _ in range(3)]))

    results = []
    thread = threading.Thread(target=lambda: results.append(grapeshot.run(main(threading.main_thread().ident))))
    thread.start()
    assert grapeshot.run(main(0))
    thread.join()
    assert results == [True]


# ---- all_tasks -------------------------------------------------------------------------------------------------


def test_all_tasks_has_the_live_coros():
    async def main():
        main_task = asyncio.current_task()
        assert asyncio.all_tasks() == {main_task}
        unstarted = coro.new(int)
        waiting, finishing = coro.spawn(coro.wait), coro.spawn(int)
        assert asyncio.all_tasks() == {main_task, waiting, finishing}
        await finishing
        assert asyncio.all_tasks() == {main_task, waiting}
        assert asyncio.all_tasks(asyncio.get_running_loop()) == {main_task, waiting}
        unstarted.start()
        assert unstarted in asyncio.all_tasks()
        waiting.shutdown()
        await asyncio.wait([waiting, unstarted])
        assert asyncio.all_tasks() == {main_task}
        return waiting

    ended = grapeshot.run(main())
    assert ended.cancelled()


def test_all_tasks_of_a_loop_in_another_thread():
    """The other thread starts and ends coros while this one asks for them."""
    loops, ending = [], threading.Event()

    def main():
        waiting = [coro.spawn(coro.wait) for _ in range(3)]
        for co in waiting:
            co.set_name("waiting")
        loops.append(coro.current().get_loop())
        while not ending.is_set():
            for _ in range(50):
                coro.spawn(coro.yield_slice)
            coro.yield_slice()
        for co in waiting:
            co.shutdown()

    thread = threading.Thread(target=coro.run, args=(main,))
    thread.start()
    try:
        while not loops:
            time.sleep(0.001)
        for _ in range(200):
            names = [task.get_name() for task in asyncio.all_tasks(loops[0])]
            assert names.count("waiting") == 3
    finally:
        ending.set()
        thread.join()
    assert not asyncio.all_tasks(loops[0])


def set_of_tasks():
    """Return the set in which asyncio keeps tasks. From 3.14 on, Python code cannot reach it."""
    return asyncio.tasks._scheduled_tasks if sys.version_info >= (3, 12) else asyncio.tasks._all_tasks


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="asyncio's set of tasks cannot be reached from Python code")
@pytest.mark.parametrize("spawn", [lambda: coro.spawn(coro.wait), lambda: asyncio.ensure_future(asyncio.sleep(60))])
def test_asyncios_set_of_tasks(spawn):
    """Some programs read asyncio's set of tasks directly. Coros are in the set, too."""

    async def main():
        tasks = set_of_tasks()
        before = tasks.copy()
        count = len(tasks)
        assert tasks == before
        task = spawn()
        assert task in tasks
        assert list(tasks).count(task) == 1
        assert (len(tasks), len(before)) == (count + 1, count)
        assert task not in before
        assert set(tasks - before) == set(tasks.difference(before)) == set(tasks ^ before) == {task}
        assert tasks > before
        assert not tasks.isdisjoint({task})
        task.cancel()
        await asyncio.wait([task])
        assert task not in asyncio.all_tasks()

    grapeshot.run(main())


@pytest.mark.parametrize("spawn", [lambda: coro.spawn(coro.wait), lambda: asyncio.ensure_future(asyncio.sleep(60))])
def test_unregistered_tasks_are_not_listed(spawn):
    async def main():
        task = spawn()
        before = asyncio.all_tasks()
        asyncio._unregister_task(task)
        assert asyncio.all_tasks() == before - {task}
        asyncio._register_task(task)
        assert asyncio.all_tasks() == before
        if sys.version_info < (3, 14):
            set_of_tasks().remove(task)
            with pytest.raises(KeyError):
                set_of_tasks().remove(task)
            assert asyncio.all_tasks() == before - {task}
        task.cancel()
        await asyncio.wait([task])

    grapeshot.run(main())


def test_all_tasks_after_the_end_of_a_thread():
    """Coros and tasks that have not ended when their thread ends are still listed."""
    code = """
        import asyncio, threading
        import grapeshot
        from grapeshot import coro

        loop = grapeshot.new_event_loop()

        def stay():
            while True:
                try:
                    coro.sleep_relative(1000)
                except BaseException:
                    pass

        async def main():
            coro.spawn(stay).set_name("a coro")
            loop.task = loop.create_task(asyncio.sleep(1000), name="a task")
            await asyncio.sleep(0.01)

        thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
        thread.start()
        thread.join()
        print(sorted(task.get_name() for task in asyncio.all_tasks(loop)))
    """
    assert run_script(None, code, flags=("-W", "ignore")) == "['a coro', 'a task']\n"


def test_ended_coros_leave_nothing_behind():
    def fail():
        raise ValueError

    async def main():
        before = len(asyncio.all_tasks())
        for fn in (int, fail, coro.yield_slice):
            co = coro.spawn(fn)
            await asyncio.wait([co])
            co.exception()
            reference = weakref.ref(co)
            del co
            await asyncio.sleep(0)
            assert reference() is None
        assert len(asyncio.all_tasks()) == before

    gc.disable()
    try:
        grapeshot.run(main())
    finally:
        gc.enable()


def test_run_cancels_remaining_coros():
    log = []

    def stay():
        try:
            coro.wait()
        except asyncio.CancelledError as error:
            log.append(type(error))
            coro.yield_slice()
            log.append("cleaned up")
            raise

    async def main():
        coro.spawn(stay)
        await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=grapeshot.new_event_loop) as runner:
        runner.run(main())
    assert log == [asyncio.CancelledError, "cleaned up"]


# ---- the interface ---------------------------------------------------------------------------------------------


def ended_runners():
    """Yield three functions (one returns, one fails, one is cancelled), each with a new task and coro that call it."""

    def give():
        return 5

    def fail():
        raise ValueError("failed")

    def cancelled():
        raise asyncio.CancelledError("enough")

    async def as_task(fn):
        return fn()

    for fn in (give, fail, cancelled):
        yield fn, asyncio.create_task(as_task(fn)), coro.spawn(fn)


ASKED = ["done", "cancelled", "result", "exception", "cancelling", "uncancel", "cancel", "get_name", "get_loop"]


def test_methods_of_a_coro_return_the_same_as_those_of_a_task():
    async def main():
        names = set()
        for fn, task, co in ended_runners():
            task.set_name(fn)
            co.set_name(fn)
            names.add(co.get_name())
            for when in ("before", "after"):
                for method in ASKED:
                    if (when, method) == ("before", "cancel"):
                        continue
                    answers = outcome_of(getattr(task, method)), outcome_of(getattr(co, method))
                    assert answers[0] == answers[1], (fn, when, method)
                for method in (co.set_result, task.set_result, co.set_exception, task.set_exception):
                    with pytest.raises(RuntimeError, match="does not support"):
                        method(None)
                await sleep_zero(2)
        assert len(names) == 3

    grapeshot.run(main())


def test_a_coro_is_a_future_of_asyncio():
    async def main():
        co = coro.spawn(int, name="name")
        assert asyncio.isfuture(co)
        assert asyncio.ensure_future(co) is co
        assert not asyncio.iscoroutine(co)
        assert not isinstance(co, (asyncio.Task, asyncio.Future))
        assert co.get_coro() is None
        assert re.fullmatch(r"<Coro 'name' ready>", repr(co))
        assert await co == 0
        assert re.fullmatch(r"<Coro 'name' done>", repr(co))
        future = asyncio.get_running_loop().create_future()
        waiter = coro.spawn(coro.await_, future)
        await asyncio.sleep(0)
        assert repr(waiter) == f"<Coro {waiter.name!r} waiting wait_for={future!r}>"
        future.set_exception(ValueError(1))
        await asyncio.wait([waiter])
        assert repr(waiter) == f"<Coro {waiter.name!r} done exception=ValueError(1)>"
        assert isinstance(waiter.exception(), ValueError)

    grapeshot.run(main())


def test_cancel_uncancel_and_messages():
    async def wait_twice(log):
        for _ in range(2):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError as error:
                log.append(error.args)

    def wait_twice_in_a_coro(log):
        for _ in range(2):
            try:
                coro.sleep_relative(60)
            except asyncio.CancelledError as error:
                log.append(error.args)

    async def script(runner, log):
        answers = []
        await sleep_zero(2)
        for message in ("one", "two"):
            answers.append((runner.cancel(message), runner.cancelling()))
        await sleep_zero(3)
        answers += [runner.uncancel(), runner.cancelling(), runner.cancel(), runner.cancelling()]
        await sleep_zero(3)
        answers += [runner.done(), runner.cancel("late"), runner.cancelling(), runner.uncancel(), runner.cancelled()]
        return answers, log

    async def main():
        log = []
        control = await script(asyncio.create_task(wait_twice(log)), log)
        for start in (
            lambda log: coro.spawn(wait_twice_in_a_coro, log),
            lambda log: coro.spawn(lambda: coro.await_(wait_twice(log))),
        ):
            log = []
            assert await script(start(log), log) == control

    grapeshot.run(main())


def test_uncancel_before_a_cancellation_is_raised_has_the_same_effect_as_in_a_task():
    async def body(log):
        task = asyncio.current_task()
        task.cancel()
        task.uncancel()
        try:
            await asyncio.sleep(0)
            log.append("went on")
        except asyncio.CancelledError:
            log.append("cancelled")

    async def main():
        as_task, as_coro = [], []
        await asyncio.create_task(body(as_task))
        await coro.spawn(lambda: coro.await_(body(as_coro)))
        assert as_task == as_coro

    grapeshot.run(main())


def test_done_callbacks():
    variable = contextvars.ContextVar("variable", default="none")
    log = []

    async def main():
        loop = asyncio.get_running_loop()
        co = coro.spawn(int)

        def note(name, ended):
            log.append((name, ended is co, variable.get(), asyncio.current_task()))

        def callback(name):
            return lambda ended: note(name, ended)

        unwanted = callback("unwanted")
        variable.set("caller's")
        own = contextvars.copy_context()
        own.run(variable.set, "own")
        for index in range(2):
            co.add_done_callback(callback(index))
            co.add_done_callback(unwanted)
        co.add_done_callback(callback("own"), context=own)
        assert co.remove_done_callback(unwanted) == 2
        assert co.remove_done_callback(unwanted) == 0
        with pytest.raises(TypeError):
            co.add_done_callback()
        variable.set("later")
        await co
        await asyncio.sleep(0)
        assert log == [(0, True, "caller's", None), (1, True, "caller's", None), ("own", True, "own", None)]
        log.clear()
        co.add_done_callback(callback("after the end"))
        assert log == []
        await asyncio.sleep(0)
        assert log == [("after the end", True, "later", None)]
        errors = []
        loop.set_exception_handler(lambda _loop, context: errors.append(type(context["exception"])))
        broken = coro.spawn(int)
        broken.add_done_callback(lambda _: 1 / 0)
        broken.add_done_callback(lambda _: log.append("went on"))
        await broken
        await asyncio.sleep(0)
        assert errors == [ZeroDivisionError]
        assert log[-1] == "went on"

    grapeshot.run(main())


def test_stacks():
    def inner():
        coro.wait()
        raise ValueError("at the end")

    def outer():
        assert [frame.f_code.co_name for frame in coro.current().get_stack()] == ["outer"]
        inner()

    def names(co, **kwargs):
        return [frame.f_code.co_name for frame in co.get_stack(**kwargs)]

    def printed(co, **kwargs):
        file = io.StringIO()
        co.print_stack(file=file, **kwargs)
        return file.getvalue()

    async def main():
        co = coro.spawn(outer)
        assert names(co) == []
        assert printed(co).startswith("No stack for <Coro")
        await asyncio.sleep(0)
        assert names(co) == ["outer", "inner"]
        assert names(co, limit=1) == ["inner"]
        text = printed(co)
        assert text.startswith("Stack for <Coro")
        assert "in inner" in text
        assert "coro.wait()" in text
        coro.schedule(co)
        await asyncio.wait([co])
        assert names(co) == ["outer", "inner"]
        assert names(co, limit=1) == ["outer"]
        text = printed(co)
        assert text.startswith("Traceback for <Coro")
        assert text.endswith("ValueError: at the end\n")
        assert isinstance(co.exception(), ValueError)
        ended = coro.spawn(int)
        await ended
        assert names(ended) == []

    grapeshot.run(main())


def test_contexts():
    async def main():
        own = contextvars.copy_context()
        co = coro.spawn(coro.wait, context=own)
        assert co.get_context() is own
        copied = coro.spawn(lambda: coro.current().get_context())
        assert isinstance(await copied, contextvars.Context)
        coro.schedule(co)
        await co

    grapeshot.run(main())


# ---- asyncio's functions on coros ------------------------------------------------------------------------------


def test_awaited_by_asyncios_functions():
    def give(value, count=2):
        for _ in range(count):
            coro.yield_slice()
        return value

    def fail():
        coro.yield_slice()
        raise KeyError("k")

    async def main():
        assert await asyncio.gather(coro.spawn(give, 1), coro.spawn(give, 2)) == [1, 2]
        results = await asyncio.gather(coro.spawn(give, 1), coro.spawn(fail), return_exceptions=True)
        assert results[0] == 1
        assert isinstance(results[1], KeyError)
        with pytest.raises(KeyError):
            await asyncio.gather(coro.spawn(fail), coro.spawn(give, 1))
        done, pending = await asyncio.wait(
            [coro.spawn(give, 3), idle := coro.spawn(coro.wait)], return_when=asyncio.FIRST_COMPLETED
        )
        assert [co.result() for co in done] == [3]
        assert pending == {idle}
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(idle, 0.001)
        assert idle.cancelled()
        assert await asyncio.wait_for(coro.spawn(give, 4), 60) == 4
        idle = coro.spawn(coro.wait)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(idle), 0.001)
        assert not idle.done()
        coro.schedule(idle, "woken")
        assert await asyncio.shield(idle) == "woken"
        slow_first = [coro.spawn(give, number, 9 - number) for number in range(3)]
        assert [await each for each in asyncio.as_completed(slow_first)] == [2, 1, 0]
        cancelled = coro.spawn(coro.wait)
        asyncio.get_running_loop().call_soon(cancelled.cancel, "by hand")
        with pytest.raises(asyncio.CancelledError, match="by hand"):
            await cancelled
        gathered = await asyncio.gather(cancelled, return_exceptions=True)
        assert gathered[0].args == ("by hand",)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.gather(cancelled)
        return "done"

    assert grapeshot.run(main()) == "done"


def test_coros_beside_a_task_group():
    log = []

    def work(name):
        try:
            coro.sleep_relative(60)
        finally:
            log.append(name)

    async def fail():
        await sleep_zero(3)
        raise ValueError

    async def wait_for(co):
        await co

    async def main():
        coros = [coro.spawn(work, number) for number in range(2)]
        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                for co in coros:
                    group.create_task(wait_for(co))
                group.create_task(fail())
        assert sorted(log) == [0, 1]
        assert all(co.cancelled() for co in coros)

    grapeshot.run(main())


def test_the_traceback_does_not_grow():
    def fail():
        raise ValueError

    def depth(error):
        entry, count = error.__traceback__, 0
        while entry is not None:
            entry, count = entry.tb_next, count + 1
        return count

    async def main():
        co = coro.spawn(fail)
        depths = []
        for _ in range(3):
            try:
                await co
            except ValueError as error:
                depths.append(depth(error))
        assert depths == [2, 2, 2]

    grapeshot.run(main())


def test_await_without_asyncio():
    """The test steps by hand through the iterator that `await` gets from a coro."""

    async def main():
        co = coro.spawn(lambda: (1, 2))
        steps = co.__await__()
        assert next(steps) is co
        assert co._asyncio_future_blocking is True
        with pytest.raises(RuntimeError, match="wasn't used with future"):
            next(steps)
        co._asyncio_future_blocking = False
        await co
        steps = iter(co)
        with pytest.raises(StopIteration) as stop:
            steps.send(None)
        assert stop.value.value == (1, 2)
        with pytest.raises(StopIteration) as stop:
            next(co.__await__())
        assert stop.value.value == (1, 2)
        with pytest.raises(RuntimeError, match="reuse"):
            next(steps)
        returned = coro.spawn(lambda: StopIteration(3))
        assert isinstance(await returned, StopIteration)

    grapeshot.run(main())


def test_a_coro_of_another_loop():
    other = grapeshot.new_event_loop()

    async def make():
        return coro.new(int)

    foreign = other.run_until_complete(make())
    try:

        async def main():
            with pytest.raises(RuntimeError, match="attached to a different loop"):
                await foreign

            def work():
                with pytest.raises(RuntimeError, match="attached to a different loop"):
                    coro.await_(foreign)

            await coro.spawn(work)

        grapeshot.run(main())
    finally:
        other.close()


def test_callbacks_of_coros_and_tasks():
    """anyio searches the `_callbacks` of all tasks for the callback of run_until_complete()."""

    async def main():
        task, co = asyncio.create_task(asyncio.sleep(0)), coro.spawn(coro.yield_slice)
        assert task._callbacks == co._callbacks == None  # noqa: E711
        context = contextvars.copy_context()
        for each in (task, co):
            each.add_done_callback(print, context=context)
            assert each._callbacks == [(print, context)]
            assert each.remove_done_callback(print) == 1
            assert not each._callbacks
        await task
        await co

    grapeshot.run(main())
