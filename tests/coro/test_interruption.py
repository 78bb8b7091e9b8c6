"""Interrupting coros: interrupts, timeouts, groups and pools."""

from __future__ import annotations

import asyncio

import pytest
from support import coro_is_available

import grapeshot

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro


def test_except_exception_does_not_catch_a_shutdown():
    log = []

    def work():
        try:
            coro.wait()
        except Exception:
            log.append("caught")
        finally:
            log.append("finally")

    def main():
        thread = coro.spawn(work)
        coro.yield_slice()
        thread.shutdown()
        assert thread.join() is None
        assert thread.cancelled()

    coro.run(main)
    assert log == ["finally"]


def test_interrupt_carries_a_value_and_the_coro_goes_on():
    def work():
        with pytest.raises(coro.Interrupted) as caught:
            coro.sleep_relative(60)
        coro.yield_slice()
        return caught.value.value

    def main():
        thread = coro.spawn(work)
        coro.yield_slice()
        thread.interrupt("now")
        return thread.join()

    assert coro.run(main) == "now"


def test_a_coro_that_never_ran_can_be_shut_down():
    ran = []

    def main():
        thread = coro.spawn(ran.append, 1)
        thread.shutdown()
        assert thread.join() is None
        assert thread.cancelled()

    coro.run(main)
    assert ran == []


def test_with_timeout():
    def main():
        assert coro.with_timeout(10, lambda: 5) == 5
        with pytest.raises(coro.TimeoutError):
            coro.with_timeout(0.001, coro.sleep_relative, 60)
        with pytest.raises(TimeoutError):
            coro.with_timeout(0.001, coro.wait)
        coro.sleep_relative(0.002)
        return "alive"

    assert coro.run(main) == "alive"


def test_nested_timeouts_go_to_their_own_handler():
    def main():
        log = []
        with pytest.raises(coro.TimeoutError), coro.timeout(0.001):
            try:
                with coro.timeout(60):
                    coro.sleep_relative(60)
            except coro.TimeoutError:
                log.append("inner")
        with coro.timeout(60):
            with pytest.raises(coro.TimeoutError), coro.timeout(0.001):
                coro.sleep_relative(60)
            log.append("went on")
        return log

    assert coro.run(main) == ["went on"]


def test_join_with_a_timeout():
    def main():
        thread = coro.spawn(coro.wait)
        with pytest.raises(coro.TimeoutError):
            thread.join(0.001)
        coro.schedule(thread, 4)
        return thread.join(10)

    assert coro.run(main) == 4


def test_in_parallel():
    def main():
        assert coro.in_parallel([(max, (1, 2)), (min, (3, 4))]) == [2, 3]
        with pytest.raises(coro.InParallelError) as caught:
            coro.in_parallel([(int, ("1",)), (int, ("x",))])
        first, second = caught.value.result_list
        assert first == (True, 1)
        assert not second[0]
        assert isinstance(second[1], ValueError)

    coro.run(main)


def test_a_group_ends_together():
    log = []

    def fail():
        coro.yield_slice()
        raise KeyError("broken")

    def stay():
        try:
            coro.wait()
        finally:
            log.append("ended")

    def main():
        with coro.Group() as group:
            results = [group.spawn(int, number) for number in "123"]
        assert [thread.result() for thread in results] == [1, 2, 3]
        with pytest.raises(KeyError, match="broken"), coro.Group() as group:
            group.spawn(stay)
            group.spawn(stay)
            group.spawn(fail)
            coro.sleep_relative(60)
        with pytest.raises(LookupError), coro.Group() as group:
            group.spawn(stay)
            coro.yield_slice()
            raise LookupError

    coro.run(main)
    assert log == ["ended"] * 3


def test_a_pool_is_bounded():
    running = []
    most = []

    def work(number):
        running.append(number)
        most.append(len(running))
        coro.yield_slice()
        running.remove(number)
        return number * 2

    def main():
        with coro.Pool(3) as pool:
            assert pool.map(work, range(20)) == [number * 2 for number in range(20)]
            assert list(pool.imap(work, range(5))) == [0, 2, 4, 6, 8]

    coro.run(main)
    assert max(most) == 3


def test_threads():
    import threading

    def main():
        assert coro.threads.run(threading.get_ident) != threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            coro.threads.run(lambda: 1 / 0)

    coro.run(main)


def test_an_exception_that_is_never_seen_is_reported():
    reported = []

    def fail():
        raise ValueError("lost")

    async def main():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: reported.append(str(context["exception"])))
        coro.spawn(fail)
        for _ in range(3):
            await asyncio.sleep(0)

    grapeshot.run(main())
    assert reported == ["lost"]


def test_keyboard_interrupt_leaves_the_loop():
    def main():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        coro.run(main)
    assert coro.get_live_coros() == []


# ------------------------------------------------------------------ interruptions and the states of a coro

WAYS = ["shutdown", "raise_exception", "interrupt"]


def interrupt(co, way):
    """Interrupt the coro. Return the class of the exception that the coro sees."""
    if way == "shutdown":
        co.shutdown()
        return coro.Shutdown
    if way == "interrupt":
        co.interrupt("value")
        return coro.Interrupted
    co.raise_exception(LookupError("given"))
    return LookupError


@pytest.mark.parametrize("way", WAYS)
def test_interrupting_in_every_state(way):
    async def main():
        new = coro.new(int)
        with pytest.raises(coro.NotStartedError):
            interrupt(new, way)
        new.start()
        await new
        with pytest.raises(coro.DeadCoroutine):
            interrupt(new, way)

        ran: list = []
        ready = coro.spawn(ran.append, 1)
        expected = interrupt(ready, way)
        with pytest.raises(expected):
            await ready
        assert ran == []

        waiting = coro.spawn(coro.wait)
        await asyncio.sleep(0)
        interrupt(waiting, way)
        assert waiting._status == "ready"
        with pytest.raises(expected):
            await waiting

        def interrupt_itself():
            with pytest.raises(expected) as caught:
                interrupt(coro.current(), way)
            return caught.value

        exc = await coro.spawn(interrupt_itself)
        if way == "interrupt":
            assert exc.value == "value"

        def yield_once():
            with pytest.raises(expected):
                coro.yield_slice()
            return "went on"

        yielding = coro.spawn(yield_once)
        await asyncio.sleep(0)
        assert yielding._status == "ready"
        interrupt(yielding, way)
        assert await yielding == "went on"

    grapeshot.run(main())


def test_an_exception_class_is_called_and_anything_else_refused():
    def main():
        thread = coro.spawn(coro.wait)
        coro.yield_slice()
        with pytest.raises(TypeError):
            thread.raise_exception(5)
        thread.raise_exception(LookupError)
        with pytest.raises(LookupError):
            thread.join()

    coro.run(main)


def test_interrupted_is_a_cancellation_and_has_its_value():
    assert issubclass(coro.Interrupted, asyncio.CancelledError)
    assert issubclass(coro.Shutdown, coro.Interrupted)
    assert not issubclass(coro.Interrupted, Exception)
    assert coro.Interrupted(5).value == 5
    assert coro.Interrupted().value is None
    assert coro.Shutdown().args == ()
    assert issubclass(coro.TimeoutError, TimeoutError)


def catch_all(count, log):
    """Wait `count` times. Log the value that each wait returned, or the exception that interrupted it."""
    for _ in range(count):
        try:
            log.append(coro.wait())
        except BaseException as exc:
            log.append(exc)


def test_several_interruptions_come_one_after_the_other():
    def main():
        log: list = []
        thread = coro.spawn(catch_all, 4, log)
        coro.yield_slice()
        first, second = LookupError("first"), coro.Interrupted("second")
        thread.raise_exception(first)
        thread._throw(second)
        thread.shutdown()
        coro.yield_slice()
        assert log[:2] == [first, second]
        assert isinstance(log[2], coro.Shutdown)
        assert thread._status == "waiting"
        coro.schedule(thread, "value")
        coro.yield_slice()
        assert log[3:] == ["value"]
        assert thread.done()

    coro.run(main)


def test_a_repeated_interruption_is_raised_once():
    def main():
        log: list = []
        thread = coro.spawn(catch_all, 3, log)
        coro.yield_slice()
        for _ in range(3):
            thread.cancel("message")
        coro.yield_slice()
        assert [exc.args for exc in log] == [("message",)]
        assert thread.cancelling() == 3
        for _ in range(3):
            thread.shutdown()
            thread.cancel()
        coro.yield_slice()
        assert [type(exc) for exc in log[1:]] == [coro.Shutdown]
        # A later interruption ends the next wait.
        thread.interrupt(1)
        coro.yield_slice()
        assert log[2].value == 1
        assert thread.done()

    coro.run(main)


def test_a_timeout_does_not_undo_a_shutdown():
    log = []

    def work():
        with pytest.raises(coro.Shutdown):
            try:
                with coro.timeout(0.001):
                    coro.wait()
            except coro.TimeoutError:
                log.append("timeout")
                coro.wait()

    def main():
        thread = coro.spawn(work)
        coro.yield_slice()
        loop = asyncio.get_running_loop()
        # The timeout and then the shutdown become due before the coro runs.
        loop.call_at(loop.time() + 0.002, thread.shutdown)
        coro.sleep_relative(0)
        end = loop.time() + 0.003
        while loop.time() < end:
            pass
        thread.join()

    coro.run(main)
    assert log == ["timeout"]


def test_an_interruption_loses_nothing_that_the_coro_was_woken_with():
    def main():
        log: list = []
        items = coro.fifo()
        thread = coro.spawn(lambda: log.append(items.pop()))
        coro.yield_slice()
        items.push("item")
        thread.interrupt()  # the coro was granted the item, and is ready to run
        assert thread.join() is None
        assert thread.cancelled()
        assert log == []
        assert items.pop() == "item"

    coro.run(main)


def test_taking_an_interruption_back():
    def main():
        log: list = []
        thread = coro.spawn(catch_all, 3, log)
        coro.yield_slice()
        exceptions = [coro.Interrupted(number) for number in range(4)]
        for exc in exceptions:
            thread._throw(exc)
        assert thread._take_back(exceptions[1])
        assert not thread._take_back(exceptions[1])
        assert not thread._take_back(coro.Interrupted(0))
        coro.yield_slice()
        assert log == [exceptions[0], exceptions[2], exceptions[3]]
        assert not thread._take_back(exceptions[0])

    coro.run(main)


# ------------------------------------------------------------------ timeouts


def test_limits_that_are_over_before_they_begin():
    def main():
        for seconds in (0, -1, 0.0, -float("inf")):
            with coro.timeout(seconds):
                pass  # this does not wait
            coro.yield_slice()
            log = []
            with pytest.raises(coro.TimeoutError), coro.timeout(seconds):
                log.append("begun")
                coro.yield_slice()
                log.append("went on")
            assert log == ["begun"]
            with pytest.raises(coro.TimeoutError):
                coro.with_timeout(seconds, coro.wait)
        for endless in (None, float("inf")):
            with coro.timeout(endless):
                coro.yield_slice()
            assert coro.with_timeout(endless, int, "5") == 5
        with pytest.raises(ValueError, match="NaN"):
            coro.timeout(float("nan"))
        with pytest.raises(TypeError):
            coro.with_timeout("soon", int)

    coro.run(main)


def test_both_limits_due_at_once():
    """Both limits are over before the coro waits. If the inner limit has the earlier deadline, its handler runs, and
    the outer limit interrupts the next wait. Otherwise only the handler of the outer limit runs.
    """

    def nest(outer_s, inner_s, then):
        log = []
        try:
            with coro.timeout(outer_s):
                try:
                    with coro.timeout(inner_s):
                        block(outer_s, inner_s)
                except coro.TimeoutError:
                    log.append("inner")
                then(log)
        except coro.TimeoutError:
            log.append("outer")
        coro.yield_slice()
        return log

    def block(*limits):
        loop = asyncio.get_running_loop()
        end = loop.time() + max(limits) + 0.002
        while loop.time() < end:
            pass
        coro.wait()

    def wait_on(log):
        coro.yield_slice()
        log.append("went on")

    def main():
        assert nest(0.1, 0.01, wait_on) == ["inner", "outer"]
        assert nest(0.01, 0.02, wait_on) == ["outer"]
        assert nest(0, 0, wait_on) == ["outer"]
        # Without another wait the outer limit has no effect.
        assert nest(0.1, 0.01, lambda log: log.append("no wait")) == ["inner", "no wait"]

    coro.run(main)


def test_the_inner_handler_does_not_catch_the_timeout_of_an_outer_limit():
    def main():
        log = []
        with pytest.raises(coro.TimeoutError) as caught, coro.timeout(0.001) as outer:
            try:
                with coro.timeout(60):
                    try:
                        coro.wait()
                    except coro.Interrupted as exc:
                        assert exc.value is outer
                        raise
            except coro.TimeoutError:
                log.append("inner")
            finally:
                log.append("finally")
        assert log == ["finally"]
        assert isinstance(caught.value.__cause__, coro.Interrupted)

    coro.run(main)


def test_a_limit_in_a_finally_block():
    def main():
        log = []
        with pytest.raises(coro.TimeoutError), coro.timeout(0.001):
            try:
                coro.wait()
            finally:
                with pytest.raises(coro.TimeoutError), coro.timeout(0.001):
                    coro.wait()
                log.append("clean")
                coro.sleep_relative(0.002)
                log.append("slept")
        assert log == ["clean", "slept"]

    coro.run(main)


def test_a_limit_ends_with_its_block():
    def main():
        # The limit is due while the coro is in the block, and the block ends before the limit can interrupt the coro.
        loop = asyncio.get_running_loop()
        limit = coro.timeout(0.02)
        with limit:
            coro.yield_slice()
            end = loop.time() + 0.03
            while loop.time() < end:
                pass
        for _ in range(3):
            coro.yield_slice()
        with pytest.raises(LookupError), limit:  # the same limit can be used again
            raise LookupError
        coro.sleep_relative(0.03)
        with limit:
            with pytest.raises(RuntimeError, match="in use"), limit:
                pass
        coro.sleep_relative(0.03)

    coro.run(main)


def test_an_exception_of_the_block_is_kept_when_its_limit_is_over():
    def main():
        with pytest.raises(LookupError) as caught, coro.timeout(0):
            try:
                coro.wait()
            finally:
                raise LookupError("from the cleanup")
        assert isinstance(caught.value.__context__, coro.Interrupted)
        with coro.timeout(0):
            try:
                coro.wait()
            except coro.Interrupted:
                pass  # swallowed: the block ends normally
        coro.yield_slice()

    coro.run(main)


def test_limits_of_many_coros_at_once():
    def work(number):
        limit_s = 0.001 * (number % 5 + 1)
        if number % 2:
            with coro.timeout(60):
                coro.sleep_relative(limit_s)
            return "slept"
        try:
            with coro.timeout(limit_s):
                coro.wait()
        except coro.TimeoutError:
            return "timeout"

    def main():
        threads = [coro.spawn(work, number) for number in range(200)]
        return [thread.join() for thread in threads]

    assert coro.run(main) == ["timeout", "slept"] * 100


# ------------------------------------------------------------------ groups


def test_several_failures_in_a_group_interrupt_its_block_once():
    def fail(number):
        raise LookupError(number)

    def main():
        for _ in range(3):
            with pytest.raises(LookupError) as caught, coro.Group() as group:
                for number in range(5):
                    group.spawn(fail, number)
                coro.wait()
            assert caught.value.args == (0,)
            coro.yield_slice()
            coro.yield_slice()
        # If the block does not wait, the failure must not interrupt a wait after the block.
        with pytest.raises(LookupError), coro.Group() as group:
            group.spawn(fail, 1)
        coro.yield_slice()

    coro.run(main)


def test_a_group_in_a_block_with_a_limit():
    log = []

    def stay():
        try:
            coro.wait()
        finally:
            log.append("ended")

    def main():
        with pytest.raises(coro.TimeoutError), coro.timeout(0.05), coro.Group() as group:
            group.spawn(stay)
            group.spawn(stay)
            coro.wait()
        assert log == ["ended"] * 2
        with pytest.raises(coro.TimeoutError), coro.timeout(0.05), coro.Group() as group:
            group.spawn(stay)
        assert log == ["ended"] * 3

    coro.run(main)
