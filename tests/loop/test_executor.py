"""run_in_executor, set_default_executor, shutdown_default_executor."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import sys
import threading

import pytest
from support import iterations, until

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


async def test_default_executor(loop):
    ident = await loop.run_in_executor(None, threading.get_ident)
    assert ident != threading.get_ident()
    assert await loop.run_in_executor(None, pow, 2, 10) == 1024


async def test_the_future_is_the_loops(loop):
    future = loop.run_in_executor(None, int)
    assert asyncio.isfuture(future)
    assert future.get_loop() is loop
    assert await future == 0


async def test_errors_come_back(loop):
    with pytest.raises(ZeroDivisionError):
        await loop.run_in_executor(None, divmod, 1, 0)


async def test_own_executor(loop):
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="own") as executor:
        name = await loop.run_in_executor(executor, lambda: threading.current_thread().name)
    assert name.startswith("own")


async def test_set_default_executor(loop):
    loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="default"))
    name = await loop.run_in_executor(None, lambda: threading.current_thread().name)
    assert name.startswith("default")


@pytest.mark.skip_on(uvloop="it accepts any object, and then cannot be closed")
async def test_default_executor_of_a_wrong_type(loop):
    with pytest.raises(TypeError, match="ThreadPoolExecutor"):
        loop.set_default_executor(object())


async def test_many_at_once(loop):
    results = await asyncio.gather(*(loop.run_in_executor(None, pow, 2, n) for n in range(200)))
    assert results == [2**n for n in range(200)]


async def test_cancel_before_it_starts(loop):
    gate = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        blocker = loop.run_in_executor(executor, gate.wait)
        ran = []
        queued = loop.run_in_executor(executor, ran.append, 1)
        queued.cancel()
        await iterations(2)  # the executor's future is cancelled in the next iteration
        gate.set()
        await blocker
        with pytest.raises(asyncio.CancelledError):
            await queued
    assert ran == []


async def test_to_thread_keeps_the_context(loop):
    variable.set("carried")
    assert await asyncio.to_thread(variable.get) == "carried"


def test_shutdown_waits_for_the_work(loop):
    gate, seen = threading.Event(), []

    def work():
        gate.wait(10)
        seen.append("worked")

    async def main():
        future = loop.run_in_executor(None, work)
        loop.call_later(0.002, gate.set)
        await loop.shutdown_default_executor()
        assert seen == ["worked"]
        await future

    loop.run_until_complete(main())


def test_no_use_after_shutdown(loop):
    async def main():
        await loop.run_in_executor(None, int)
        await loop.shutdown_default_executor()
        with pytest.raises(RuntimeError, match="Executor shutdown has been called"):
            loop.run_in_executor(None, int)

    loop.run_until_complete(main())


def test_shutdown_without_use(loop):
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.run_until_complete(loop.shutdown_default_executor())


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the timeout is new in 3.12")
@pytest.mark.skip_on(uvloop="it waits for the threads without limit")
@pytest.mark.skip_on(asyncio="early versions of 3.12 wait without limit", when=sys.version_info < (3, 13))
def test_shutdown_timeout_warns(loop, quiet):
    gate = threading.Event()

    async def main():
        future = loop.run_in_executor(None, gate.wait)
        await loop.shutdown_default_executor(0.005)
        gate.set()
        await until(future.done)

    loop.run_until_complete(main())
    assert any("executor did not" in str(each.message) for each in quiet)
    assert all(issubclass(each.category, RuntimeWarning) for each in quiet)


def test_close_ends_the_threads(new_loop):
    loop = new_loop()
    loop.run_until_complete(loop.run_in_executor(None, int))
    loop.close()  # if a thread had not ended, the audit after the test would fail
    assert loop.is_closed()


def test_run_in_executor_before_the_loop_runs(loop):
    future = loop.run_in_executor(None, pow, 3, 3)
    assert loop.run_until_complete(future) == 27
