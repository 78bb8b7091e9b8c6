"""asyncio awaitables in coros.

Where possible, a test runs the same coroutine function in a coro and as a task, and compares the results.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import gc
import types
import warnings
import weakref

import pytest
from support import coro_is_available, sleep_zero

import grapeshot

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro


def outcome_of(run):
    """Return what ``run()`` returns or raises, in a form that can be compared."""
    try:
        return "returned", run()
    except BaseException as error:
        return type(error), error.args


def in_both_ways(body, drive=None):
    """Run ``body(log)`` as a task, then in a coro with await_. ``drive(runner)`` acts on the task or coro from outside.

    Check that the outcome and the log are the same both ways, and return them.
    """

    async def main(is_coro):
        log = []
        if is_coro:
            runner = coro.spawn(lambda: coro.await_(body(log)))
        else:
            runner = asyncio.create_task(body(log))
        if drive is not None:
            await drive(runner)
        await asyncio.wait([runner])
        return outcome_of(runner.result), log

    as_task = grapeshot.run(main(False))
    as_coro = grapeshot.run(main(True))
    assert as_coro == as_task
    return as_coro


class Awaitable:
    def __init__(self, iterator):
        self._iterator = iterator

    def __await__(self):
        return self._iterator


@types.coroutine
def generator_based(future):
    return (yield from future)


# ---- what can be awaited ---------------------------------------------------------------------------------------


def test_every_kind_of_awaitable():
    async def add(a, b):
        await asyncio.sleep(0)
        return a + b

    async def numbers():
        for number in range(3):
            await asyncio.sleep(0)
            yield number

    async def total():
        return sum([number async for number in numbers()])

    def main():
        loop = asyncio.get_running_loop()
        assert coro.await_(add(1, 2)) == 3
        assert coro.await_(loop.create_task(add(3, 4))) == 7
        assert coro.await_(asyncio.sleep(0, "slept")) == "slept"
        assert coro.await_(asyncio.sleep(0.001, "slept")) == "slept"
        assert coro.await_(Awaitable(iter(()))) is None
        assert coro.await_(Awaitable(add(5, 6).__await__())) == 11
        future = loop.create_future()
        loop.call_soon(future.set_result, 5)
        assert coro.await_(future) == 5
        assert coro.await_(future) == 5
        pending = loop.create_future()
        loop.call_soon(pending.set_result, 6)
        assert coro.await_(generator_based(pending)) == 6
        assert coro.await_(coro.spawn(lambda: 8)) == 8
        iterator = numbers()
        assert coro.await_(iterator.asend(None)) == 0
        assert coro.await_(anext(iterator)) == 1
        coro.await_(iterator.aclose())
        assert coro.await_(total()) == 3
        assert coro.await_(asyncio.gather(add(1, 1), add(2, 2))) == [2, 4]
        done, pending = coro.await_(asyncio.wait([loop.create_task(add(1, 1))]))
        assert not pending
        assert [task.result() for task in done] == [2]
        assert coro.await_(asyncio.wait_for(add(2, 3), 10)) == 5
        assert coro.await_(asyncio.shield(add(2, 4))) == 6
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            assert coro.await_(asyncio.wrap_future(pool.submit(pow, 2, 5))) == 32
            assert coro.await_(loop.run_in_executor(pool, pow, 2, 6)) == 64
        return "all"

    assert coro.run(main) == "all"


def test_exceptions_come_out_as_they_are():
    async def fail(error):
        await asyncio.sleep(0)
        raise error

    def main():
        loop = asyncio.get_running_loop()
        for error in (ValueError(1), asyncio.CancelledError("x"), GeneratorExit(), coro.Interrupted(3), LookupError()):
            with pytest.raises(type(error)) as caught:
                coro.await_(fail(error))
            assert caught.value is error
        future = loop.create_future()
        future.set_exception(KeyError("k"))
        with pytest.raises(KeyError):
            coro.await_(future)
        cancelled = loop.create_future()
        cancelled.cancel("enough")
        with pytest.raises(asyncio.CancelledError) as caught:
            coro.await_(cancelled)
        assert caught.value.args == ("enough",)

    coro.run(main)


def test_stop_iteration_in_a_coroutine():
    async def body(log):
        try:
            raise StopIteration(5)
        finally:
            log.append("left")

    (kind, _), log = in_both_ways(body)
    assert kind is RuntimeError
    assert log == ["left"]


def test_objects_that_are_not_awaitable():
    class Wrong:
        def __await__(self):
            return 5

    async def body(log):
        for value in (5, None, object, iter(()), (x for x in ()), Wrong()):
            try:
                await value
            except TypeError as error:
                log.append(str(error))

    async def main():
        log = []

        def work():
            for value in (5, None, object, iter(()), (x for x in ()), Wrong()):
                try:
                    coro.await_(value)
                except TypeError as error:
                    log.append(str(error))

        await coro.spawn(work)
        control = []
        await body(control)
        assert log == control
        assert len(log) == 6

    grapeshot.run(main())


def test_outside_of_a_coro():
    async def nothing():
        pass

    async def main():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            never_run = nothing()
            with pytest.raises(coro.YieldFromMain):
                coro.await_(never_run)
            with pytest.raises(RuntimeError, match="cannot reuse"):
                await never_run
            with pytest.raises(coro.YieldFromMain):
                coro.await_(asyncio.get_running_loop().create_future())
            with pytest.raises(coro.YieldFromMain):
                coro.await_(5)
            del never_run

    grapeshot.run(main())


def test_a_coro_cannot_await_itself():
    def main():
        with pytest.raises(RuntimeError, match="await on itself"):
            coro.await_(coro.current())

        async def indirectly():
            await coro.current()

        with pytest.raises(RuntimeError, match="await on itself"):
            coro.await_(indirectly())
        return "alive"

    assert coro.run(main) == "alive"


def test_futures_of_another_loop():
    other = asyncio.new_event_loop()
    done = other.create_future()
    done.set_result(3)

    async def body(log):
        assert await done == 3
        try:
            await other.create_future()
        except RuntimeError as error:
            log.append(str(error).partition(" got ")[2])

    def directly():
        assert coro.await_(done) == 3
        with pytest.raises(RuntimeError, match="attached to a different loop"):
            coro.await_(other.create_future())

    try:
        _, log = in_both_ways(body)
        assert "attached to a different loop" in log[0]
        coro.run(directly)
    finally:
        other.close()


def test_yields_that_a_task_would_refuse():
    @types.coroutine
    def step(value):
        return (yield value)

    async def body(log):
        future = asyncio.get_running_loop().create_future()
        for value in (5, future, "text"):
            try:
                await step(value)
            except RuntimeError as error:
                log.append(str(error)[:24])
        future.set_exception(ValueError("failed"))
        future._asyncio_future_blocking = True
        try:
            # The future's exception is raised at the yield, although no code here calls the future's result().
            await step(future)
        except ValueError:
            log.append("raised at the yield")

    _, log = in_both_ways(body)
    assert log == [
        "Task got bad yield: 5",
        "yield was used instead o",
        "Task got bad yield: 'tex",
        "raised at the yield",
    ]


def test_a_coroutine_that_is_awaited_already():
    async def slow():
        await asyncio.sleep(0.001)

    async def main():
        shared = slow()
        task = asyncio.create_task(shared)
        await asyncio.sleep(0)

        def work():
            with pytest.raises(RuntimeError, match="being awaited already"):
                coro.await_(shared)

        await coro.spawn(work)
        await task

    grapeshot.run(main())


def test_contextvars_are_the_coros():
    variable = contextvars.ContextVar("variable", default=0)

    async def change(value):
        assert variable.get() == 1
        variable.set(value)
        await asyncio.sleep(0)
        assert variable.get() == value

    def main():
        variable.set(1)
        coro.await_(change(2))
        return variable.get()

    assert coro.run(main) == 2
    assert variable.get() == 0


def test_coroutines_below_coros_below_coroutines():
    async def outer(depth):
        await asyncio.sleep(0)
        return inner(depth)

    def inner(depth):
        coro.yield_slice()
        return depth if not depth else coro.await_(outer(depth - 1)) + 1

    def main():
        works = [coro.spawn(inner, depth) for depth in range(8)]
        return [work.join() for work in works]

    assert coro.run(main) == list(range(8))


# ---- cancelling and interrupting -------------------------------------------------------------------------------


def cancelling(*messages, between=0):
    async def drive(runner):
        await sleep_zero(3)
        for message in messages:
            runner.cancel(message)
            await sleep_zero(between)

    return drive


@pytest.mark.parametrize(
    "wait",
    [
        lambda: asyncio.sleep(60),
        lambda: asyncio.get_running_loop().create_future(),
        lambda: asyncio.gather(asyncio.sleep(60), asyncio.sleep(60)),
        lambda: asyncio.wait_for(asyncio.sleep(60), 60),
        lambda: asyncio.shield(asyncio.sleep(0.01)),
        lambda: asyncio.create_task(asyncio.sleep(60)),
        lambda: asyncio.wait([asyncio.create_task(asyncio.sleep(0.01))]),
        lambda: Awaitable(asyncio.sleep(60).__await__()),
    ],
    ids=["sleep", "future", "gather", "wait_for", "shield", "task", "wait", "awaitable"],
)
def test_cancelled_as_a_task_is(wait):
    async def body(log):
        try:
            await wait()
        except asyncio.CancelledError as error:
            log.append(error.args)
            raise
        finally:
            log.append("finally")

    outcome, _ = in_both_ways(body, cancelling("because"))
    assert outcome[0] is asyncio.CancelledError


def test_cancelled_while_it_waits_for_a_future_directly():
    async def main():
        future = asyncio.get_running_loop().create_future()
        waiter = coro.spawn(coro.await_, future)
        await asyncio.sleep(0)
        assert waiter.cancel("because")
        with pytest.raises(asyncio.CancelledError) as caught:
            await waiter
        assert caught.value.args == ("because",)
        assert future.cancelled()

    grapeshot.run(main())


def test_a_coroutine_that_suppresses_cancellation():
    async def body(log):
        for _ in range(2):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError as error:
                log.append(error.args)
        return "went on"

    outcome, log = in_both_ways(body, cancelling("one", "two", between=3))
    assert outcome == ("returned", "went on")
    assert log == [("one",), ("two",)]


def test_cancelled_twice_in_one_iteration():
    async def body(log):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError as error:
            log.append(error.args)
        await asyncio.sleep(0.001)
        return asyncio.current_task().cancelling()

    outcome, _ = in_both_ways(body, cancelling("one", "two"))
    assert outcome == ("returned", 2)


def test_cancelled_in_a_finally_block():
    async def body(log):
        try:
            await asyncio.sleep(60)
        finally:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError as error:
                log.append(("cleaning up", error.args))
                await asyncio.sleep(0)
                raise

    outcome, log = in_both_ways(body, cancelling("one", "two", between=3))
    assert outcome == (asyncio.CancelledError, ("two",))
    assert log == [("cleaning up", ("two",))]


def test_cancelled_before_it_waits():
    async def body(log):
        asyncio.current_task().cancel("itself")
        future = asyncio.get_running_loop().create_future()
        try:
            await future
        except asyncio.CancelledError as error:
            log.append((error.args, future.cancelled()))
        asyncio.current_task().cancel("again")
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError as error:
            log.append(error.args)
        return asyncio.current_task().cancelling()

    outcome, log = in_both_ways(body)
    assert outcome == ("returned", 2)
    assert log == [(("itself",), True), ("again",)]


def test_cancelled_when_the_result_is_there_already():
    async def body(log):
        future = asyncio.get_running_loop().create_future()
        task = asyncio.current_task()

        def finish():
            future.set_result("lost")
            task.cancel("too late")

        asyncio.get_running_loop().call_soon(finish)
        try:
            log.append(await future)
        except asyncio.CancelledError as error:
            log.append(error.args)

    _, log = in_both_ways(body)
    assert log == [("too late",)]


def test_cancelled_before_it_began():
    async def body(log):
        log.append("never")

    async def drive(runner):
        runner.cancel("early")

    outcome, log = in_both_ways(body, drive)
    assert outcome == (asyncio.CancelledError, ("early",))
    assert log == []


def interruption_cases():
    yield "shutdown", lambda co: co.shutdown(), lambda error: type(error) is coro.Shutdown
    yield "interrupt", lambda co: co.interrupt(7), lambda error: type(error) is coro.Interrupted and error.value == 7
    yield "raise", lambda co: co.raise_exception(KeyError("k")), lambda error: type(error) is KeyError


@pytest.mark.parametrize("case", ["shutdown", "interrupt", "raise"])
@pytest.mark.parametrize("kind", ["coroutine", "future", "task", "yielding"])
def test_an_interruption_reaches_the_awaited_coroutine(case, kind):
    interrupt, is_right = next((act, check) for name, act, check in interruption_cases() if name == case)
    log = []

    async def inside():
        try:
            if kind == "yielding":
                await sleep_zero(100)
            await asyncio.sleep(60)
        except Exception:
            log.append("seen as an error")
            raise
        except asyncio.CancelledError:
            log.append("cancelled")
            raise
        finally:
            await asyncio.sleep(0)
            log.append("finally")

    async def main():
        future = asyncio.get_running_loop().create_future()

        def wait():
            if kind == "future":
                return future
            return asyncio.get_running_loop().create_task(inside()) if kind == "task" else inside()

        waiter = coro.spawn(lambda: coro.await_(wait()))
        await sleep_zero(4)
        interrupt(waiter)
        try:
            await waiter
        except BaseException as error:
            assert is_right(error), error
        else:
            raise AssertionError("not interrupted")
        if kind == "future":
            assert future.cancelled()
        else:
            assert log == ["cancelled", "finally"]

    grapeshot.run(main())


def test_an_interruption_of_a_task_group_ends_its_tasks():
    log = []

    async def child():
        try:
            await asyncio.sleep(60)
        finally:
            log.append("ended")

    async def parent():
        async with asyncio.TaskGroup() as group:
            group.create_task(child())
            group.create_task(child())

    def work():
        with pytest.raises(coro.TimeoutError):
            coro.with_timeout(0.05, coro.await_, parent())
        assert log == ["ended"] * 2
        with pytest.raises(KeyError):
            coro.await_(parent())
        assert log == ["ended"] * 4

    async def main():
        co = coro.spawn(work)
        while len(log) < 2:
            await asyncio.sleep(0.001)
        await sleep_zero(3)
        co.raise_exception(KeyError)
        await co

    grapeshot.run(main())


def test_a_future_that_will_not_be_cancelled():
    log = []

    async def stubborn():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            log.append("refused")
        await asyncio.sleep(0.001)
        return "finished"

    async def main():
        task = asyncio.create_task(stubborn())
        waiter = coro.spawn(coro.await_, task)
        await sleep_zero(2)
        waiter.interrupt()
        assert await waiter == "finished"
        # Interruptions of the coro go to the task, which refuses the first one and is cancelled by the second.
        task = asyncio.create_task(stubborn())
        waiter = coro.spawn(coro.await_, task)
        await sleep_zero(2)
        waiter.shutdown()
        await sleep_zero(1)
        waiter.interrupt("less than a shutdown")
        with pytest.raises(asyncio.CancelledError):
            await waiter

    grapeshot.run(main())
    assert log == ["refused", "refused"]


def test_timeouts_of_coros_and_of_asyncio():
    async def slow():
        await asyncio.sleep(60)

    async def with_its_own_timeout():
        try:
            async with asyncio.timeout(0.001):
                await slow()
        except TimeoutError:
            return "inner"

    def main():
        with pytest.raises(coro.TimeoutError), coro.timeout(0.001):
            coro.await_(slow())
        with coro.timeout(60):
            assert coro.await_(with_its_own_timeout()) == "inner"
        with pytest.raises(TimeoutError):
            coro.await_(asyncio.wait_for(slow(), 0.001))
        with pytest.raises(coro.TimeoutError), coro.timeout(0.001):
            coro.await_(asyncio.wait_for(slow(), 60))
        assert coro.current().cancelling() == 0
        coro.yield_slice()
        return "alive"

    assert coro.run(main) == "alive"


def test_asyncios_timeout_entered_from_outside_of_coroutines():
    def main():
        limit = asyncio.timeout(0.001)
        coro.await_(limit.__aenter__())
        try:
            coro.sleep_relative(60)
        except asyncio.CancelledError as error:
            with pytest.raises(TimeoutError):
                coro.await_(limit.__aexit__(type(error), error, error.__traceback__))
        return coro.current().cancelling()

    assert coro.run(main) == 0


def test_scheduled_by_other_code_while_it_awaits():
    """schedule() does not end an await: the coro continues to wait for its future."""

    async def main():
        future = asyncio.get_running_loop().create_future()
        waiter = coro.spawn(coro.await_, future)
        for _ in range(3):
            await sleep_zero(2)
            coro.schedule(waiter, "nothing")
        await sleep_zero(2)
        future.set_result("the result")
        assert await waiter == "the result"

    grapeshot.run(main())


def test_a_late_callback_of_an_abandoned_future_wakes_no_coro():
    async def main():
        loop = asyncio.get_running_loop()

        def work():
            future = loop.create_future()
            waiter = coro.current()

            def finish_and_interrupt():
                future.set_result(1)
                waiter.interrupt()

            loop.call_soon(finish_and_interrupt)
            with pytest.raises(coro.Interrupted):
                coro.await_(future)
            return coro.wait()

        waiter = coro.spawn(work)
        await sleep_zero(10)
        assert not waiter.done()
        coro.schedule(waiter, "the right one")
        assert await waiter == "the right one"

    grapeshot.run(main())


def test_nothing_keeps_a_coro_that_failed_in_await():
    """There are no reference cycles: the coro and its exception are freed without the collector."""

    class Error(Exception):
        pass

    async def fail(depth):
        await asyncio.sleep(0)
        if depth == 0:
            raise Error
        await fail(depth - 1)

    def spawn_one(awaitable):
        co = coro.spawn(coro.await_, awaitable)
        return co, weakref.ref(co)

    async def main():
        loop = asyncio.get_running_loop()
        failed = loop.create_future()
        loop.call_soon(failed.set_exception, Error())
        for awaitable in (fail(2), failed, Awaitable(fail(1).__await__())):
            co, reference = spawn_one(awaitable)
            await asyncio.wait([co])
            assert type(co.exception()) is Error
            del co
            await asyncio.sleep(0)
            assert reference() is None
        co, reference = spawn_one(asyncio.sleep(60))
        await asyncio.sleep(0)
        co.raise_exception(Error)
        await asyncio.wait([co])
        assert type(co.exception()) is Error
        del co
        await asyncio.sleep(0)
        assert reference() is None

    gc.disable()
    try:
        grapeshot.run(main())
    finally:
        gc.enable()


class Busy(asyncio.Future):
    """A future whose methods wait, as if a signal handler or finalizer ran during the method and waited."""

    def add_done_callback(self, callback, *, context=None):
        super().add_done_callback(callback, context=context)
        if callback is not None and not super().done():
            coro.sleep_relative(0.005)

    def done(self):
        is_done = super().done()
        if not is_done:
            coro.sleep_relative(0.005)
        return is_done


def test_a_wake_up_before_the_wait_is_not_lost():
    async def sleep(future):
        await asyncio.sleep(0.001)
        future.set_result("result")

    def main():
        loop = coro.current()._loop
        for wait in (coro.await_, lambda future: coro.wait([future])[0].result()):
            future = Busy(loop=loop)
            task = loop.create_task(sleep(future))
            assert coro.with_timeout(20, wait, future) == "result"
            coro.await_(task)

    coro.run(main)
