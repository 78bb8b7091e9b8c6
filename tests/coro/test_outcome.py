"""A coro that waits for another does not silently end when the other is shut down, interrupted or cancelled."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
from support import coro_is_available, gil_is_enabled

import grapeshot

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro

WAYS = {
    "shut down": lambda co: co.shutdown(),
    "interrupted": lambda co: co.interrupt("value"),
    "cancelled": lambda co: co.cancel(),
}


def ended(way):
    """Return a coro that was interrupted in the given way while it waited. It ends when it runs next."""
    co = coro.spawn(coro.wait, name="victim")
    coro.yield_slice()
    WAYS[way](co)
    return co


@pytest.mark.parametrize("way", WAYS)
def test_join_returns_and_result_raises_an_error(way):
    def main():
        for is_over in (False, True):
            co = ended(way)
            if is_over:
                coro.yield_slice()
            assert co.join() is None
            assert co.join(10) is None
            assert co.cancelled()
            for ask in (co.result, co.exception, lambda co=co: coro.await_(co)):
                with pytest.raises(coro.CoroCancelled, match=f"coro 'victim' was {way}") as caught:
                    ask()
                assert not isinstance(caught.value, asyncio.CancelledError)
                assert isinstance(caught.value.__cause__, asyncio.CancelledError)
                # The cause is the coro's own exception, so its traceback ends where the coro waited.
                assert caught.value.__cause__ is co._exception

    coro.run(main)


@pytest.mark.parametrize("way", WAYS)
def test_except_exception_catches_the_error_of_result(way):
    log = []

    def joiner(co):
        co.join()
        try:
            co.result()
        except Exception as exc:
            log.append(type(exc))
        log.append("went on")

    coro.run(lambda: coro.spawn(joiner, ended(way)).join())
    assert log == [coro.CoroCancelled, "went on"]


def test_an_uncaught_error_of_result_is_reported():
    reported = []

    def ask(co):
        co.join()
        co.result()

    def main():
        loop = coro.current().get_loop()
        loop.set_exception_handler(lambda _loop, context: reported.append(context["exception"]))
        asking = coro.spawn(ask, ended("shut down"))
        while not asking.done():
            coro.yield_slice()
        assert not asking.cancelled()
        del asking
        gc.collect()

    coro.run(main)
    assert [type(exc) for exc in reported] == [coro.CoroCancelled]


@pytest.mark.parametrize("way", WAYS)
def test_in_asyncio_the_outcome_is_that_of_a_task(way):
    def kind_of(co):
        return type(co._exception)

    async def main():
        co = coro.spawn(coro.wait)
        await asyncio.sleep(0)
        WAYS[way](co)
        with pytest.raises(asyncio.CancelledError) as caught:
            await co
        assert type(caught.value) is kind_of(co)
        for ask in (co.result, co.exception):
            with pytest.raises(asyncio.CancelledError):
                ask()
        co = coro.spawn(coro.wait)
        await asyncio.sleep(0)
        WAYS[way](co)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(co, 10)
        [outcome] = await asyncio.gather(co, return_exceptions=True)
        assert isinstance(outcome, asyncio.CancelledError)

    grapeshot.run(main())


@pytest.mark.parametrize("way", WAYS)
def test_a_coroutine_in_a_coro_sees_the_same_as_in_a_task(way):
    async def wait_for(co):
        try:
            await co
        except asyncio.CancelledError as exc:
            return type(exc) is type(co._exception)

    assert coro.run(lambda: coro.await_(wait_for(ended(way))))


@pytest.mark.parametrize("call", ["map", "imap"])
def test_a_pool_does_not_end_its_caller(call):
    def work(number):
        if number == 1:
            coro.current().shutdown()
        return number

    def main():
        with pytest.raises(coro.CoroCancelled):
            list(getattr(coro.Pool(2), call)(work, range(3)))
        return "went on"

    assert coro.run(main) == "went on"


def test_the_error_of_in_parallel_lists_all_outcomes():
    def main():
        with pytest.raises(coro.InParallelError) as caught:
            coro.in_parallel([(lambda: coro.current().shutdown(), ()), (int, ())])
        [(is_first, first), second] = caught.value.result_list
        assert (is_first, type(first), second) == (False, coro.Shutdown, (True, 0))

    coro.run(main)


def test_a_join_that_takes_too_long_says_so():
    def main():
        co = coro.spawn(coro.wait, name="sleeper")
        with pytest.raises(coro.TimeoutError, match=r"coro 'sleeper' has not ended after 0\.001 seconds"):
            co.join(0.001)
        assert not co.done()

        def late():
            raise coro.TimeoutError("its own")

        failing = coro.spawn(late)
        with pytest.raises(coro.TimeoutError, match="its own"):
            failing.join(10)
        assert failing.done()

    coro.run(main)


def test_a_join_continues_when_the_joiner_is_scheduled():
    def main():
        co = coro.spawn(coro.wait)
        for timeout in (None, 10):
            joiner = coro.spawn(co.join, timeout)
            coro.yield_slice()
            coro.schedule(joiner, "not meant")
            coro.yield_slice()
            assert not joiner.done()
            joiner.shutdown()
        joiner = coro.spawn(co.join)
        coro.yield_slice()
        coro.schedule(co, "result")
        coro.schedule(joiner)
        assert joiner.join() == "result"

    coro.run(main)


def test_an_abandoned_join_leaves_nothing_behind():
    def main():
        co = coro.spawn(coro.wait)
        coro.yield_slice()
        for _ in range(3):
            with pytest.raises(coro.TimeoutError):
                co.join(0)
            with pytest.raises(ValueError, match="NaN"):
                co.join(float("nan"))
            joiner = coro.spawn(co.join)
            coro.yield_slice()
            joiner.interrupt()
            joiner.join()
        assert not [kept for kept in gc.get_referents(co) if isinstance(kept, list) and kept]
        coro.schedule(co)
        assert co.join() is None

    coro.run(main)


class Failure(Exception):
    """The exception that a coro raises."""


def fail():
    raise Failure


def fail_in_group():
    with coro.Group() as group:
        group.spawn(fail)
        del group
        coro.wait()


FAILING = {
    "join": lambda: coro.spawn(fail).join(),
    "await_": lambda: coro.await_(coro.spawn(fail)),
    "threads.run": lambda: coro.threads.run(fail),
    "in_parallel": lambda: coro.in_parallel([(fail, ())]),
    "Group": fail_in_group,
    "Pool.map": lambda: coro.Pool(1).map(lambda _: fail(), [1]),
    "Pool.imap": lambda: list(coro.Pool(1).imap(lambda _: fail(), [1])),
    "Pool.imap_unordered": lambda: list(coro.Pool(1).imap_unordered(lambda _: fail(), [1])),
}


@pytest.mark.parametrize("way", FAILING)
def test_a_handled_exception_is_freed_without_the_collector(way):
    if way == "threads.run" and not gil_is_enabled():
        pytest.skip("without a GIL, the thread that made the exception keeps part of the exception's reference count")

    def main():
        gc.collect()
        gc.disable()
        try:
            try:
                FAILING[way]()
            except (Failure, coro.InParallelError) as exc:
                gone = weakref.ref(exc)
            coro.sleep_relative(0)
            assert gone() is None
        finally:
            gc.enable()

    coro.run(main)


def test_stop_iteration_becomes_an_error():
    """If a coro could raise StopIteration, code that awaits the coro would see a normal result. See PEP 479."""

    def fail():
        return next(iter([]))

    async def in_asyncio():
        for call in (lambda: coro.spawn(fail), lambda: coro.run_sync(fail), lambda: coro.run_blocking(fail)):
            with pytest.raises(RuntimeError, match="coroutine raised StopIteration") as raised:
                await call()
            assert isinstance(raised.value.__cause__, StopIteration)
        with pytest.raises(RuntimeError, match="coroutine raised StopIteration"):
            await asyncio.wait_for(coro.spawn(fail), 10)

    def in_coro():
        failed = coro.spawn(fail)
        for call in (failed.join, failed.result):
            with pytest.raises(RuntimeError, match="coroutine raised StopIteration"):
                call()

    grapeshot.run(in_asyncio())
    coro.run(in_coro)
    with pytest.raises(RuntimeError, match="coroutine raised StopIteration"):
        coro.run(fail)
