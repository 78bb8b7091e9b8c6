"""asyncio.Runner and newly created loops in a coro that hides the loop, compared with the same code in a thread."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import warnings

import pytest
from support import coro_is_available

import grapeshot
from tests.coro.with_asyncio.blocking_code import in_coro, in_thread

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


@pytest.fixture(params=[in_thread, in_coro])
def run(request):
    """A function that runs code in a coro that hides the loop or, as the control, in an ordinary thread."""
    return request.param


# ---- Runner ----------------------------------------------------------------------------------------------------


def test_runner(run):
    context = contextvars.copy_context()
    context.run(variable.set, "given")

    async def get():
        return variable.get(), asyncio.get_running_loop().get_debug()

    async def change():
        variable.set("changed")

    def work():
        with asyncio.Runner(debug=True) as runner:
            results = [runner.run(get())]
            runner.run(change())
            results += [runner.run(get()), runner.run(get(), context=context)]
            assert runner.get_loop() is runner.get_loop()
            assert not runner.get_loop().is_running()
        with pytest.raises(RuntimeError, match="closed"):
            runner.get_loop()
        return results

    assert run(work) == [("unset", True), ("changed", True), ("given", True)]


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, asyncio.SelectorEventLoop, grapeshot.new_event_loop])
def test_runner_with_a_loop_factory(run, factory):
    made = []

    def make():
        loop = factory()
        made.append(loop)
        return loop

    async def main():
        await asyncio.sleep(0.001)
        return "done"

    def work():
        with asyncio.Runner(loop_factory=make) as runner:
            first = runner.run(main())
            return first, runner.run(main())

    assert run(work) == ("done", "done")
    assert len(made) == 1
    assert made[0].is_closed()


def test_grapeshot_run_and_coro_run(run):
    async def main():
        await asyncio.sleep(0.001)
        return "run"

    def first(value):
        coro.sleep_relative(0.001)
        assert asyncio.current_task() is coro.current()
        return value

    assert run(lambda: (grapeshot.run(main()), coro.run(first, 5))) == ("run", 5)


# ---- loops of one's own ----------------------------------------------------------------------------------------


def test_loop_of_ones_own(run):
    async def main(value):
        await asyncio.sleep(0.001)
        return value

    async def fail():
        raise LookupError

    def work():
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            assert asyncio.get_event_loop() is loop
            assert isinstance(loop, asyncio.AbstractEventLoop)
            assert (loop.is_running(), loop.is_closed()) == (False, False)
            assert loop.run_until_complete(main(1)) == 1
            with pytest.raises(LookupError):
                loop.run_until_complete(fail())
            task = loop.create_task(main(2), name="two")
            assert task.get_name() == "two"
            assert loop.run_until_complete(asyncio.gather(task, main(3))) == [2, 3]
            future = loop.create_future()
            loop.call_later(0.001, future.set_result, 4)
            assert loop.run_until_complete(future) == 4
            assert loop.run_until_complete(future) == 4  # the future is done already
            with pytest.raises(TypeError):
                loop.run_until_complete(5)
            assert loop.run_until_complete(loop.run_in_executor(None, int)) == 0
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            asyncio.set_event_loop(None)
            loop.close()
        loop.close()
        assert loop.is_closed()
        coroutine = main(1)
        with pytest.raises(RuntimeError, match="closed"):
            loop.run_until_complete(coroutine)
        coroutine.close()
        with pytest.raises(RuntimeError, match="closed"):
            loop.call_soon(int)
        with pytest.raises(RuntimeError, match="no current event loop"):
            asyncio.get_event_loop()
        with pytest.raises((TypeError, AssertionError)):
            asyncio.set_event_loop(5)

    run(work)


def test_run_forever_and_stop(run):
    steps = []

    async def main(loop):
        await asyncio.sleep(0.001)
        steps.append(loop.is_running())
        asyncio.get_running_loop().stop()

    async def forever():
        await asyncio.sleep(60)

    def work():
        loop = asyncio.new_event_loop()
        try:
            task = loop.create_task(main(loop))
            loop.run_forever()
            steps.append(task.done())
            loop.call_soon(loop.stop)
            loop.call_soon(steps.append, "same iteration")
            loop.run_forever()
            loop.stop()
            loop.run_forever()
            loop.call_later(0.001, loop.stop)
            waiting = loop.create_task(forever())
            with pytest.raises(RuntimeError, match="Event loop stopped before Future completed"):
                loop.run_until_complete(waiting)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                loop.run_until_complete(waiting)
        finally:
            loop.close()

    run(work)
    assert steps == [True, True, "same iteration"]


def test_running_loop_refuses_a_second_run_and_close(run):
    async def main(loop):
        coroutine = asyncio.sleep(0)
        with pytest.raises(RuntimeError, match=r"already running|while another loop is running"):
            loop.run_until_complete(coroutine)
        coroutine.close()
        with pytest.raises(RuntimeError, match="Cannot close a running event loop"):
            loop.close()

    def work():
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(main(loop))
        finally:
            loop.close()

    run(work)


def test_other_threads_reach_the_loop(run):
    async def add(a, b):
        await asyncio.sleep(0)
        return a + b

    async def main(loop):
        result = await asyncio.to_thread(lambda: asyncio.run_coroutine_threadsafe(add(1, 2), loop).result(10))
        done = asyncio.Event()
        threading.Thread(target=loop.call_soon_threadsafe, args=(done.set,)).start()
        await done.wait()
        return result

    def work():
        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(main(loop))
        finally:
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

    assert run(work) == 3


def test_exception_handler_of_a_loop(run):
    seen = []

    def work():
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda loop, context: seen.append(context["message"]))
        assert callable(loop.get_exception_handler())
        loop.call_exception_handler({"message": "text"})
        with pytest.raises(TypeError):
            loop.set_exception_handler(5)
        loop.close()

    run(work)
    assert seen == ["text"]


def test_unclosed_loop_warns(run):
    def work():
        asyncio.new_event_loop()
        gc.collect()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(work)
    assert [str(warning.message)[:20] for warning in caught if warning.category is ResourceWarning][:1] == [
        "unclosed event loop "
    ]
