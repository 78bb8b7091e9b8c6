"""create_task, create_future, task factories, eager tasks."""

from __future__ import annotations

import asyncio
import contextvars
import sys

import pytest
from support import iterations, until

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


async def test_create_future(loop):
    future = loop.create_future()
    assert isinstance(future, asyncio.Future)
    assert future.get_loop() is loop
    loop.call_soon(future.set_result, 1)
    assert await future == 1


async def test_create_task_is_stock(loop):
    task = loop.create_task(asyncio.sleep(0, "done"))
    assert type(task) is asyncio.Task
    assert await task == "done"


async def test_task_name(loop):
    task = loop.create_task(asyncio.sleep(0), name="its name")
    assert task.get_name() == "its name"
    await task
    unnamed = loop.create_task(asyncio.sleep(0))
    assert unnamed.get_name().startswith("Task-")
    await unnamed


async def test_a_task_without_a_name_of_its_own(loop):
    task = loop.create_task(asyncio.sleep(0), name=None)
    assert task.get_name().startswith("Task-")
    await task
    coro = asyncio.sleep(0)
    with pytest.raises(TypeError):
        loop.create_task(coro, nome=None)
    coro.close()


@pytest.mark.parametrize("running", ["none", "another"])
def test_a_task_belongs_to_the_loop_that_made_it(loop, running):
    # If `running` is "another", asyncio believes that `other` is running in this thread.
    other = asyncio.SelectorEventLoop()
    tasks = []

    async def make():
        asyncio._set_running_loop(None if running == "none" else other)
        try:
            tasks.append(loop.create_task(asyncio.sleep(0, "done")))
        finally:
            asyncio._set_running_loop(loop)
        return await tasks[0]

    assert loop.run_until_complete(make()) == "done"
    assert tasks[0].get_loop() is loop
    other.close()


async def test_task_context(loop):
    context = contextvars.copy_context()
    context.run(variable.set, "given")

    async def read():
        return variable.get()

    assert await loop.create_task(read(), context=context) == "given"
    assert await loop.create_task(read()) == "unset"
    variable.set("copied")
    assert await loop.create_task(read()) == "copied"


async def test_a_task_starts_in_the_next_iteration(loop):
    seen = []

    async def work():
        seen.append("task")

    task = loop.create_task(work())
    seen.append("creator")
    await task
    assert seen == ["creator", "task"]


async def test_create_task_of_something_else(loop):
    with pytest.raises(TypeError, match="a coroutine was expected"):
        loop.create_task(5)


def any_task(loop, coro, **kwargs):
    """A task factory that works on all versions of Python."""
    return asyncio.Task(coro, loop=loop, **kwargs)


@pytest.mark.parametrize("factory", [None, any_task])
@pytest.mark.parametrize("extra", [{}, {"name": "its name", "context": None}], ids=["alone", "with others"])
async def test_create_task_refuses_keywords_that_are_not_its_own(loop, new_loop, factory, extra):
    """`loop` is one of the refused keywords: create_task cannot make a task of another loop."""
    loop.set_task_factory(factory)
    other = new_loop()
    for keyword in ("loop", "unknown"):
        coroutine = asyncio.sleep(0)
        with pytest.raises(TypeError):
            loop.create_task(coroutine, **extra, **{keyword: other})
        with pytest.raises(TypeError):
            loop.create_task(coro=coroutine, **extra, **{keyword: other})
        coroutine.close()


async def test_current_and_all_tasks(loop):
    task = loop.create_task(asyncio.sleep(0))
    assert asyncio.all_tasks() == {task, asyncio.current_task()}
    await task
    assert asyncio.current_task(loop) is asyncio.current_task()


async def test_cancel_of_a_task(loop):
    seen = []

    async def work():
        try:
            await loop.create_future()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    task = loop.create_task(work())
    await iterations(1)
    task.cancel("message")
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["cancelled"]


async def test_task_group(loop):
    async def fails():
        await asyncio.sleep(0)
        raise LookupError

    async def waits():
        await loop.create_future()

    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            group.create_task(fails())
            waiter = group.create_task(waits())
    assert caught.group_contains(LookupError)
    assert waiter.cancelled()


def test_task_factory(loop):
    seen = []

    def factory(its_loop, coroutine, **kwargs):
        seen.append((its_loop, kwargs))
        return asyncio.Task(coroutine, loop=its_loop, **{k: v for k, v in kwargs.items() if k != "eager_start"})

    assert loop.get_task_factory() is None
    loop.set_task_factory(factory)
    assert loop.get_task_factory() is factory
    context = contextvars.copy_context()

    async def main():
        assert await loop.create_task(asyncio.sleep(0, 1), name="n", context=context) == 1

    loop.run_until_complete(main())
    assert [its_loop for its_loop, _ in seen] == [loop, loop]
    assert seen[1][1].get("context") is context
    loop.set_task_factory(None)
    assert loop.get_task_factory() is None
    with pytest.raises(TypeError, match="task factory must be a callable or None"):
        loop.set_task_factory("no")
    seen.clear()


async def test_name_with_a_task_factory(loop):
    def factory(its_loop, coroutine, **kwargs):
        return asyncio.Task(coroutine, loop=its_loop, **{k: v for k, v in kwargs.items() if k != "eager_start"})

    loop.set_task_factory(factory)
    task = loop.create_task(asyncio.sleep(0), name="given")
    assert task.get_name() == "given"
    await task
    loop.set_task_factory(None)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks are new in 3.12")
@pytest.mark.skip_on(uvloop="its create_task does not fit the factories of 3.13 and later")
async def test_eager_task_factory(loop):
    seen = []

    async def work(suspend):
        seen.append(asyncio.current_task())
        if suspend:
            await asyncio.sleep(0)
        return "done"

    loop.set_task_factory(asyncio.eager_task_factory)
    finished = loop.create_task(work(False), name="eager")
    assert seen == [finished]
    assert finished.done()
    assert finished.get_name() == "eager"
    assert finished.result() == "done"
    suspended = loop.create_task(work(True), name="suspended")
    assert seen == [finished, suspended]
    assert not suspended.done()
    assert await suspended == "done"
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work(number % 2)) for number in range(10)]
    assert all(task.result() == "done" for task in tasks)
    loop.set_task_factory(None)
    seen.clear()


@pytest.mark.skipif(sys.version_info < (3, 14), reason="some earlier versions set the name later")
@pytest.mark.skip_on(uvloop="its create_task does not fit the factories of 3.13 and later")
async def test_an_eager_task_has_its_name_from_the_start(loop):
    seen = []

    async def work():
        seen.append(asyncio.current_task().get_name())

    loop.set_task_factory(asyncio.eager_task_factory)
    await loop.create_task(work(), name="eager")
    loop.set_task_factory(None)
    assert seen == ["eager"]


@pytest.mark.skipif(sys.version_info < (3, 14), reason="eager_start of create_task is new in 3.14")
async def test_eager_start_argument(loop):
    seen = []

    async def work():
        seen.append(1)

    task = loop.create_task(work(), eager_start=True)
    assert seen == [1]
    await task


async def test_gather_wait_shield_queue(loop):
    queue = asyncio.Queue(2)
    seen = []

    async def producer():
        for number in range(20):
            await queue.put(number)

    async def consumer():
        for _ in range(20):
            seen.append(await queue.get())

    await asyncio.gather(producer(), consumer())
    assert seen == list(range(20))
    done, pending = await asyncio.wait([loop.create_task(asyncio.sleep(0, n)) for n in range(3)])
    assert sorted(task.result() for task in done) == [0, 1, 2]
    assert not pending
    assert await asyncio.shield(asyncio.sleep(0, "shielded")) == "shielded"


async def test_locks_and_events(loop):
    lock, event, condition = asyncio.Lock(), asyncio.Event(), asyncio.Condition()
    seen = []

    async def worker(name):
        async with lock:
            await asyncio.sleep(0)
            seen.append(name)
        await event.wait()
        async with condition:
            seen.append(name)
            condition.notify_all()

    tasks = [loop.create_task(worker(name)) for name in "abc"]
    await until(lambda: len(seen) == 3)
    event.set()
    async with condition:
        await condition.wait_for(lambda: len(seen) == 6)
    await asyncio.gather(*tasks)
    assert seen[:3] == ["a", "b", "c"]


async def test_deep_chain_of_tasks(loop):
    async def nested(depth):
        return depth if depth == 0 else await loop.create_task(nested(depth - 1)) + 1

    assert await nested(200) == 200


@pytest.mark.skipif(sys.version_info < (3, 14), reason="the call graph is new in 3.14")
async def test_the_call_graph_of_tasks(loop):
    async def inner():
        return asyncio.capture_call_graph(depth=1)

    graph = await loop.create_task(inner())
    assert graph.awaited_by


async def test_done_callbacks_run_in_order_with_their_context(loop):
    seen = []
    future = loop.create_future()
    context = contextvars.copy_context()
    context.run(variable.set, "given")
    future.add_done_callback(lambda _: seen.append("first"))
    future.add_done_callback(lambda _: seen.append(variable.get()), context=context)
    future.set_result(None)
    assert seen == []
    await iterations(2)
    assert seen == ["first", "given"]
