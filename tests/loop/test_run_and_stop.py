"""run_forever, run_until_complete, stop, close: states and errors."""

from __future__ import annotations

import asyncio
import gc
import signal

import pytest


def test_state(new_loop):
    loop = new_loop()
    assert (loop.is_running(), loop.is_closed()) == (False, False)
    seen = []
    loop.call_soon(lambda: seen.append((loop.is_running(), loop.is_closed())))
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert seen == [(True, False)]
    assert (loop.is_running(), loop.is_closed()) == (False, False)
    loop.close()
    assert (loop.is_running(), loop.is_closed()) == (False, True)


def test_stop_lets_the_iteration_end(loop):
    seen = []
    loop.call_soon(loop.stop)
    loop.call_soon(seen.append, 1)
    loop.call_soon(seen.append, 2)
    loop.run_forever()
    assert seen == [1, 2]


def test_stop_before_run_forever_makes_one_iteration(loop):
    seen = []
    loop.stop()
    loop.call_soon(seen.append, 1)
    loop.run_forever()
    assert seen == [1]


def test_two_stops_end_only_one_run(loop):
    loop.stop()
    loop.stop()
    loop.run_forever()
    assert loop.run_until_complete(asyncio.sleep(0, "runs on")) == "runs on"


def test_stop_from_a_timer(loop):
    loop.call_later(0.001, loop.stop)
    loop.run_forever()


def test_run_until_complete_gives_the_result(loop):
    assert loop.run_until_complete(asyncio.sleep(0.001, "result")) == "result"
    future = loop.create_future()
    loop.call_soon(future.set_result, 5)
    assert loop.run_until_complete(future) == 5
    assert loop.run_until_complete(future) == 5


def test_run_until_complete_raises_the_exception(loop):
    async def fails():
        raise LookupError("this one")

    with pytest.raises(LookupError, match="this one"):
        loop.run_until_complete(fails())


def test_run_until_complete_takes_an_awaitable(loop):
    class Awaitable:
        def __await__(self):
            yield from asyncio.sleep(0).__await__()
            return "awaited"

    assert loop.run_until_complete(Awaitable()) == "awaited"


@pytest.mark.parametrize("thing", [None, 1, "text", print])
def test_run_until_complete_refuses_other_objects(loop, thing):
    with pytest.raises(TypeError, match="is required"):
        loop.run_until_complete(thing)


def test_run_until_complete_of_another_loops_future(loop, new_loop):
    other = new_loop()
    future = other.create_future()
    with pytest.raises(ValueError, match="loop"):
        loop.run_until_complete(future)


def test_stopped_before_the_future_is_done(loop):
    future = loop.create_future()
    loop.call_soon(loop.stop)
    with pytest.raises(RuntimeError, match="Event loop stopped before Future completed"):
        loop.run_until_complete(future)
    future.cancel()
    # the run has removed its callback from the future, so this future does not end the next run
    loop.run_until_complete(asyncio.sleep(0.001))


@pytest.mark.xfail_on(uvloop="its messages differ")
def test_a_coroutine_that_runs_the_loop(loop):
    seen = []

    async def inner():
        coroutine = asyncio.sleep(0)
        try:
            loop.run_until_complete(coroutine)
        except RuntimeError as error:
            seen.append(str(error))
        finally:
            coroutine.close()
        try:
            loop.run_forever()
        except RuntimeError as error:
            seen.append(str(error))

    loop.run_until_complete(inner())
    assert seen == ["This event loop is already running"] * 2


def test_running_another_loop_inside(loop, new_loop):
    other = new_loop()
    seen = []

    async def inner():
        try:
            other.run_forever()
        except RuntimeError as error:
            seen.append(str(error))

    loop.run_until_complete(inner())
    assert seen == ["Cannot run the event loop while another loop is running"]
    assert not other.is_running()
    other.run_until_complete(asyncio.sleep(0))


def test_close_of_a_running_loop(loop):
    async def inner():
        with pytest.raises(RuntimeError, match="Cannot close a running event loop"):
            loop.close()

    loop.run_until_complete(inner())
    assert not loop.is_closed()


def test_close_twice(new_loop):
    loop = new_loop()
    loop.close()
    loop.close()
    assert loop.is_closed()


def test_close_drops_scheduled_callbacks(new_loop):
    loop = new_loop()
    seen = []
    loop.call_soon(seen.append, 1)
    loop.call_later(0, seen.append, 2)
    loop.call_soon_threadsafe(seen.append, 3)
    loop.close()
    assert seen == []


def test_a_closed_loop_refuses(new_loop):
    loop = new_loop()
    loop.close()
    closed = pytest.raises(RuntimeError, match="Event loop is closed")
    future = loop.create_future()
    coroutine = asyncio.sleep(0)
    for call in (
        lambda: loop.run_forever(),
        lambda: loop.run_until_complete(future),
        lambda: loop.call_soon(print),
        lambda: loop.call_soon_threadsafe(print),
        lambda: loop.call_later(1, print),
        lambda: loop.call_at(1, print),
        lambda: loop.create_task(coroutine),
        lambda: loop.run_in_executor(None, print),
        lambda: loop.add_signal_handler(signal.SIGTERM, print),
        lambda: loop.add_reader(0, print),
        lambda: loop.add_writer(0, print),
    ):
        with closed:
            call()
    coroutine.close()


@pytest.mark.xfail_on(uvloop="stop() of a closed loop raises")
def test_a_closed_loop_still_answers(new_loop):
    loop = new_loop()
    loop.close()
    loop.stop()
    assert loop.is_closed() is True
    assert loop.get_debug() in (True, False)
    assert loop.time() > 0
    assert "closed=True" in repr(loop)


def test_repr(loop):
    assert "running=False closed=False debug=False" in repr(loop)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("schedule", ["call_soon", "call_later", "call_soon_threadsafe"])
def test_interrupts_leave_run_forever(loop, error, schedule):
    def callback():
        raise error("out")

    if schedule == "call_later":
        loop.call_later(0.001, callback)
    else:
        getattr(loop, schedule)(callback)
    with pytest.raises(error, match="out"):
        loop.run_forever()
    assert not loop.is_running()
    assert loop.run_until_complete(asyncio.sleep(0.001, "goes on")) == "goes on"


@pytest.mark.xfail_on(uvloop="the rest of the iteration runs first")
def test_callbacks_behind_an_interrupt_run_later(loop):
    seen = []

    def callback():
        raise KeyboardInterrupt

    loop.call_soon(callback)
    loop.call_soon(seen.append, "behind")
    with pytest.raises(KeyboardInterrupt):
        loop.run_forever()
    assert seen == []
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert seen == ["behind"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupts_from_a_task(loop, error):
    async def main():
        await asyncio.sleep(0)
        raise error

    with pytest.raises(error):
        loop.run_until_complete(main())
    assert loop.run_until_complete(asyncio.sleep(0, "goes on")) == "goes on"
    gc.collect()


def test_interrupt_from_a_reader(loop):
    import socket

    def callback():
        loop.remove_reader(ours)
        raise KeyboardInterrupt

    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.send(b"x")
        loop.add_reader(ours, callback)
        with pytest.raises(KeyboardInterrupt):
            loop.run_forever()
        assert loop.run_until_complete(asyncio.sleep(0, "goes on")) == "goes on"


def test_running_loop_is_restored_after_an_error(loop):
    loop.call_soon(lambda: (_ for _ in ()).throw(SystemExit(3)))
    with pytest.raises(SystemExit):
        loop.run_forever()
    with pytest.raises(RuntimeError, match="no running event loop"):
        asyncio.get_running_loop()


def test_many_short_runs(loop):
    for number in range(500):
        assert loop.run_until_complete(asyncio.sleep(0, number)) == number


def test_two_loops_take_turns(new_loop):
    first, second = new_loop(), new_loop()
    seen = []
    for number in range(5):
        first.call_soon(seen.append, ("first", number))
        second.call_soon(seen.append, ("second", number))
        for loop in (first, second):
            loop.call_soon(loop.stop)
            loop.run_forever()
    assert seen == [(name, number) for number in range(5) for name in ("first", "second")]


def test_shutdown_asyncgens(loop):
    seen = []

    async def generator():
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(0)
            seen.append("finalized")

    async def main():
        kept.append(generator())
        assert await anext(kept[0]) == 1

    kept = []
    loop.run_until_complete(main())
    assert seen == []
    loop.run_until_complete(loop.shutdown_asyncgens())
    assert seen == ["finalized"]
    loop.run_until_complete(loop.shutdown_asyncgens())


def test_an_abandoned_asyncgen_is_finalized_by_the_loop(loop):
    seen = []

    async def generator():
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(0)
            seen.append("finalized")

    async def main():
        async for _ in generator():
            break
        gc.collect()
        for _ in range(10):
            await asyncio.sleep(0)

    loop.run_until_complete(main())
    assert seen == ["finalized"]


def test_an_error_in_an_asyncgen_is_reported(loop, reported):
    async def generator():
        try:
            yield 1
        finally:
            raise LookupError("in finally")

    async def main():
        kept.append(generator())
        await anext(kept[0])

    kept = []
    loop.run_until_complete(main())
    loop.run_until_complete(loop.shutdown_asyncgens())
    assert [str(error) for error in reported.exceptions] == ["in finally"]
    assert "asyncgen" in reported[0]
    assert "closing of asynchronous generator" in reported[0]["message"]


def test_asyncgen_after_shutdown_warns(loop, quiet):
    async def generator():
        yield 1

    async def main():
        await loop.shutdown_asyncgens()
        async for _ in generator():
            pass

    loop.run_until_complete(main())
    assert [str(each.message) for each in quiet if issubclass(each.category, ResourceWarning)]


def test_unclosed_loop_warns(loop_kind, quiet, _audit):
    from support import loop_factory

    if loop_kind == "uvloop":
        pytest.skip("uvloop warns in debug mode only")
    loop = loop_factory(loop_kind)()
    del loop
    gc.collect()
    assert any("unclosed event loop" in str(each.message) for each in quiet)
