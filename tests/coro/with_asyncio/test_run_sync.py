"""The functions that connect asyncio, coros and threads: run_sync, run, threads.run."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from support import coro_is_available, sleep_zero

import grapeshot

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro

variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)


# ---- run_sync --------------------------------------------------------------------------------------------------


def test_run_sync_gives_the_result_or_the_exception():
    def work(a, b=0):
        coro.yield_slice()
        return coro.await_(asyncio.sleep(0, a + b))

    def fail():
        coro.yield_slice()
        raise LookupError("x")

    async def main():
        assert await coro.run_sync(work, 1, b=2) == 3
        with pytest.raises(LookupError, match="x"):
            await coro.run_sync(fail)
        with pytest.raises(TypeError):
            await coro.run_sync(5)
        return await asyncio.gather(*[coro.run_sync(work, number) for number in range(5)])

    assert grapeshot.run(main()) == list(range(5))


def test_run_sync_and_contexts():
    def change(value):
        before = variable.get()
        variable.set(value)
        coro.yield_slice()
        assert variable.get() == value
        return before

    async def main():
        variable.set(1)
        assert await asyncio.gather(coro.run_sync(change, 2), coro.run_sync(change, 3)) == [1, 1]
        assert variable.get() == 1
        own = contextvars.copy_context()
        own.run(variable.set, 7)
        assert await coro.run_sync(change, 8, context=own) == 7
        assert own[variable] == 8
        assert await coro.run_sync(lambda: coro.current().name, name="named") == "named"

    grapeshot.run(main())


def test_a_cancellation_passes_in_both_directions():
    log = []

    def work():
        try:
            coro.sleep_relative(60)
        except asyncio.CancelledError as error:
            log.append(error.args)
            coro.yield_slice()
            raise
        finally:
            log.append("finally")

    def suppress():
        try:
            coro.sleep_relative(60)
        except asyncio.CancelledError:
            return "went on"

    async def main():
        task = asyncio.create_task(coro.run_sync(work))
        await sleep_zero(3)
        task.cancel("from the task")
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert caught.value.args == ("from the task",)
        assert log == [("from the task",), "finally"]
        task = asyncio.create_task(coro.run_sync(suppress))
        await sleep_zero(3)
        task.cancel()
        assert await task == "went on"
        # a coro that has not begun
        task = asyncio.create_task(coro.run_sync(log.append, "never"))
        await sleep_zero(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert "never" not in log
        # In the other direction, a coro that ends itself by shutdown() cancels the task that waits for it.
        task = asyncio.create_task(coro.run_sync(lambda: coro.current().shutdown()))
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    grapeshot.run(main())


# ---- run -------------------------------------------------------------------------------------------------------


def test_run_inside_a_running_loop():
    async def main():
        with pytest.raises(RuntimeError, match="running event loop"):
            coro.run(int)

    grapeshot.run(main())

    def nested():
        with pytest.raises(RuntimeError, match="running event loop"):
            coro.run(int)
        return "alive"

    assert coro.run(nested) == "alive"


def test_run_ends_as_asyncio_run_does():
    log = []

    async def numbers():
        try:
            yield 1
            yield 2
        finally:
            log.append("generator closed")

    async def stay():
        try:
            await asyncio.sleep(60)
        finally:
            log.append("task cancelled")

    def stay_too():
        try:
            coro.sleep_relative(60)
        finally:
            log.append("coro cancelled")

    kept = []

    def main():
        loop = asyncio.get_running_loop()
        iterator = numbers()
        kept.append(iterator)
        assert coro.await_(anext(iterator)) == 1
        assert coro.threads.run(threading.get_ident) != threading.get_ident()
        kept.append(loop.create_task(stay()))
        coro.spawn(stay_too)
        coro.yield_slice()
        return loop

    loop = coro.run(main)
    assert loop.is_closed()
    assert sorted(log) == ["coro cancelled", "generator closed", "task cancelled"]


def test_a_runner_and_install():
    def work():
        return coro.await_(asyncio.sleep(0, type(asyncio.get_running_loop())))

    async def main():
        return await coro.spawn(work)

    with asyncio.Runner(loop_factory=grapeshot.new_event_loop) as runner:
        assert runner.run(main()) is runner.run(main())
    grapeshot.install()
    try:
        assert issubclass(asyncio.run(main()), grapeshot.Loop)
    finally:
        grapeshot.uninstall()


def test_another_kind_of_loop():
    async def main():
        with pytest.raises(RuntimeError, match="another event loop"):
            await coro.run_sync(int)
        with pytest.raises(RuntimeError, match="another event loop"):
            coro.spawn(int)
        with pytest.raises(coro.YieldFromMain):
            coro.await_(asyncio.sleep(0))

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(main())


KEYBOARD_INTERRUPT = """
import signal, sys, threading, time
from grapeshot import coro

def main():
    print("waiting", flush=True)
    try:
        coro.sleep_relative(60)
    finally:
        print("cleaned up", flush=True)

try:
    coro.run(main)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_ctrl_c_cancels_the_first_coro():
    with subprocess.Popen([sys.executable, "-c", KEYBOARD_INTERRUPT], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "waiting\n"
            child.send_signal(signal.SIGINT)
            assert child.stdout.read() == "cleaned up\ninterrupted\n"
            assert child.wait(60) == 0
        finally:
            child.kill()


# ---- threads.run -----------------------------------------------------------------------------------------------


def test_threads_run():
    def blocking(value):
        time.sleep(0.001)
        seen = variable.get()
        variable.set(value)
        return seen, threading.get_ident()

    def fail():
        raise OSError(5, "x")

    def work(number):
        variable.set(number)
        seen, ident = coro.threads.run(blocking, 99)
        assert (seen, variable.get()) == (number, number)
        with pytest.raises(OSError, match="x"):
            coro.threads.run(fail)
        return ident

    async def main():
        idents = await asyncio.gather(*[coro.spawn(work, number) for number in range(5)])
        assert threading.get_ident() not in idents
        with pytest.raises(coro.YieldFromMain):
            coro.threads.run(int)

    grapeshot.run(main())


def test_interrupted_while_a_thread_works():
    release = threading.Event()
    finished = threading.Event()

    def blocking():
        release.wait(60)
        finished.set()
        return "too late"

    def work():
        with pytest.raises(coro.TimeoutError):
            coro.with_timeout(0.1, coro.threads.run, blocking)
        release.set()
        while not finished.is_set():
            coro.sleep_relative(0.001)
        # The result of `blocking` arrives now, too late. It wakes no coro.
        coro.sleep_relative(0.01)
        return coro.threads.run(lambda: "next")

    assert coro.run(work) == "next"


def test_threads_run_after_the_executor_was_shut_down():
    def work():
        coro.await_(asyncio.get_running_loop().shutdown_default_executor())
        with pytest.raises(RuntimeError, match="shut"):
            coro.threads.run(int)
        return "alive"

    assert coro.run(work) == "alive"


def test_threads_run_in_an_executor_of_ones_own():
    def main():
        variable.set(5)
        with concurrent.futures.ThreadPoolExecutor(1, "own") as executor:
            names = [coro.threads.run(lambda: threading.current_thread().name, executor=executor) for _ in range(2)]
            assert names == ["own_0", "own_0"]
            assert coro.threads.run(variable.get, executor=executor) == 5
            assert coro.threads.run(dict, [("one", 1)], executor=executor, two=2) == {"one": 1, "two": 2}
        with pytest.raises(RuntimeError, match="shutdown"):
            coro.threads.run(int, executor=executor)

    coro.run(main)


def test_threads_run_in_another_process():
    def main():
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
            assert coro.threads.run(os.getpid, executor=executor) != os.getpid()

    coro.run(main)


@pytest.mark.skipif(sys.version_info < (3, 14), reason="pools of interpreters came with Python 3.14")
def test_threads_run_in_another_interpreter():
    def main():
        with concurrent.futures.InterpreterPoolExecutor(1) as executor:
            assert coro.threads.run(math.factorial, 5, executor=executor) == 120

    coro.run(main)


def test_how_many_threads_there_are_by_default():
    def main():
        coro.threads.run(int)
        cpus = getattr(os, "process_cpu_count", os.cpu_count)()
        assert coro.current().get_loop()._default_executor._max_workers == min(32, cpus + 4)
        with pytest.raises(TypeError, match=r"threads\.run\(\) needs an ordinary function"):
            coro.threads.run(asyncio.sleep)

    coro.run(main)
