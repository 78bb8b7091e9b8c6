"""`grapeshot.threads.spawn_on` and `await_on`: calls into the loop of another thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import threading

import pytest
from support import coro_is_available

import grapeshot
from grapeshot import threads

FACTORIES = [grapeshot.new_event_loop, asyncio.SelectorEventLoop]
with_coros = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")


@pytest.fixture(params=FACTORIES, ids=["grapeshot", "asyncio"])
def there(request):
    """A loop that runs in another thread."""
    loop = request.param()

    def run():
        loop.run_forever()
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    loop.thread = thread
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@pytest.fixture(params=FACTORIES, ids=["grapeshot", "asyncio"])
def run_here(request):
    def run(main):
        with asyncio.Runner(loop_factory=request.param) as runner:
            return runner.run(main)

    return run


async def where(*args, **kwargs):
    await asyncio.sleep(0)
    return asyncio.get_running_loop(), threading.current_thread(), args, kwargs


async def fail():
    await asyncio.sleep(0)
    raise LookupError("nothing")


# ---------------------------------------------------------------- spawn_on


def test_spawn_on_from_a_thread_and_from_a_task(there, run_here):
    expected = (there, there.thread, (1,), {"key": 2})
    assert threads.spawn_on(there, where, 1, key=2).result() == expected
    with pytest.raises(LookupError, match="nothing"):
        threads.spawn_on(there, fail).result()

    async def main():
        return await asyncio.wrap_future(threads.spawn_on(there, where, 1, key=2))

    assert run_here(main()) == expected


@with_coros
def test_spawn_on_calls_plain_functions_in_coros(there):
    from grapeshot import coro

    def name():
        coro.sleep_relative(0.001)
        return coro.current().name, threading.current_thread()

    future = threads.spawn_on(there, name)
    if isinstance(there, grapeshot.Loop):
        assert future.result()[1] is there.thread
        call = coro.run(lambda: coro.await_(asyncio.wrap_future(threads.spawn_on(there, name))))
        assert call[1] is there.thread
    else:
        with pytest.raises(RuntimeError):
            future.result()


def test_spawn_on_and_cancel(there):
    began, ended = threading.Event(), threading.Event()

    async def wait():
        began.set()
        try:
            await asyncio.sleep(1000)
        finally:
            ended.set()

    future = threads.spawn_on(there, wait)
    began.wait()
    assert future.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()
    assert ended.wait(30)


def test_spawn_on_a_closed_loop():
    loop = grapeshot.new_event_loop()
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        threads.spawn_on(loop, where)


# ---------------------------------------------------------------- await_on


def test_await_on(there, run_here):
    variable = contextvars.ContextVar("variable")

    async def read():
        return variable.get()

    async def main():
        assert await threads.await_on(there, where(1, key=2)) == (there, there.thread, (1,), {"key": 2})
        with pytest.raises(LookupError, match="nothing"):
            await threads.await_on(there, fail())
        here = asyncio.get_running_loop()
        assert (await threads.await_on(here, where()))[0] is here
        variable.set("of the caller")
        assert await threads.await_on(there, read()) == "of the caller"
        with pytest.raises(TypeError):
            await threads.await_on(there, 5)

    run_here(main())


def test_await_on_passes_a_cancellation_on_and_waits_for_the_end(there, run_here):
    began, order = threading.Event(), []

    async def wait():
        began.set()
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
            order.append("ended there")
            raise

    async def refuse():
        began.set()
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            return "refused"

    async def main():
        task = asyncio.ensure_future(threads.await_on(there, wait()))
        await asyncio.to_thread(began.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        order.append("ended here")
        began.clear()
        task = asyncio.ensure_future(threads.await_on(there, refuse()))
        await asyncio.to_thread(began.wait)
        task.cancel()
        assert await task == "refused"
        # This task is cancelled at once, often before the other loop has begun the call.
        task = asyncio.ensure_future(threads.await_on(there, wait()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_here(main())
    assert order[:2] == ["ended there", "ended here"]


def test_a_cancellation_after_the_end_there_is_not_lost(there, run_here):
    ended = threading.Event()

    async def work():
        ended.set()
        return "result"

    async def main():
        task = asyncio.ensure_future(threads.await_on(there, work()))
        await asyncio.sleep(0)
        ended.wait()  # blocks this loop, which therefore does not notice that work() has ended
        threads.spawn_on(there, asyncio.sleep, 0).result()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    run_here(main())


async def begin_and_stop(loop):
    """Begin an endless call of ``await_on`` in ``loop``, and then stop that loop. Return the calling task."""
    began = threading.Event()

    async def wait():
        asyncio.current_task()._log_destroy_pending = False
        began.set()
        await asyncio.Future()

    task = asyncio.ensure_future(threads.await_on(loop, wait()))
    await asyncio.sleep(0)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    began.wait()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    return task


@pytest.mark.parametrize("is_closed", [False, True], ids=["stopped", "closed"])
@pytest.mark.parametrize("factory", FACTORIES)
def test_a_cancellation_when_the_other_loop_has_ended(factory, is_closed, run_here):
    loop = factory()

    async def main():
        task = await begin_and_stop(loop)
        if is_closed:
            loop.close()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        loop.close()

    run_here(main())


@pytest.mark.parametrize("factory", FACTORIES)
def test_the_other_loop_is_closed_during_a_call(factory, run_here, monkeypatch):
    monkeypatch.setattr(threads, "_LOOK_FOR_CLOSED_S", 0.02)
    loop = factory()

    async def main():
        task = await begin_and_stop(loop)
        late = asyncio.ensure_future(threads.await_on(loop, asyncio.sleep(60)))  # its task never begins
        await asyncio.sleep(0.05)
        assert not task.done()
        loop.close()
        for each in (task, late):
            with pytest.raises(RuntimeError, match="was closed before the awaitable had ended"):
                await each

    run_here(main())


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["undisturbed", "cancelled"])
@pytest.mark.parametrize("is_closed", [False, True], ids=["stopped", "closed"])
@pytest.mark.parametrize("factory", FACTORIES)
def test_the_other_loop_stops_as_the_call_ends(factory, is_closed, is_cancelled, run_here, monkeypatch):
    """The loop stops before it calls the callbacks of the task that has ended. The caller still gets the result."""
    monkeypatch.setattr(threads, "_LOOK_FOR_CLOSED_S", 0.02)
    loop, began = factory(), threading.Event()

    async def work():
        began.set()
        try:
            await asyncio.sleep(60 if is_cancelled else 0)
        except asyncio.CancelledError:
            pass
        loop.stop()
        return "result"

    async def main():
        task = asyncio.ensure_future(threads.await_on(loop, work()))
        await asyncio.sleep(0)
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        began.wait()
        if is_cancelled:
            task.cancel()
            await asyncio.sleep(0)
        thread.join()
        if is_closed:
            loop.close()
        assert await task == "result"
        loop.close()

    run_here(main())


def test_await_on_a_closed_loop():
    loop = grapeshot.new_event_loop()
    loop.close()

    async def main():
        with pytest.raises(RuntimeError, match="closed"):
            await threads.await_on(loop, where())

    grapeshot.run(main())
