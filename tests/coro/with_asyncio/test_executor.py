"""``CoroPoolExecutor``, compared with ThreadPoolExecutor, and which functions it calls in real threads."""

from __future__ import annotations

import _thread
import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import gc
import socket
import sys
import threading
import time
import weakref
import zlib
from email.parser import Parser

import pytest
from support import coro_is_available, gil_is_enabled, run_script

import grapeshot

if not coro_is_available():
    pytest.skip("no coros on this interpreter", allow_module_level=True)

from grapeshot import coro
from grapeshot.coro._executor import _modules, needs_thread

KINDS = (concurrent.futures.ThreadPoolExecutor, coro.CoroPoolExecutor)
kinds = pytest.mark.parametrize("kind", KINDS, ids=["threads", "coros"])


def worker():
    """Return the coro that calls this function, or None in a real thread."""
    try:
        return coro.current()
    except coro.YieldFromMain:
        return None


def is_coro():
    return worker() is not None


def pause(result=None):
    if is_coro():
        coro.sleep_relative(0.01)
    else:
        time.sleep(0.01)
    return result


@kinds
def test_result_and_exception(kind):
    async def main():
        loop = asyncio.get_running_loop()
        executor = kind(3)
        assert await loop.run_in_executor(executor, pause, 5) == 5
        with pytest.raises(ZeroDivisionError):
            await loop.run_in_executor(executor, lambda: 1 / 0)
        with pytest.raises(SystemExit):
            await asyncio.wrap_future(executor.submit(exec, "raise SystemExit"))
        assert await asyncio.wrap_future(executor.submit(dict, a=1)) == {"a": 1}
        executor.shutdown(wait=False)
        with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
            executor.submit(pause)

    grapeshot.run(main())


@kinds
def test_default_executor(kind):
    """A submitted function sees no running loop. Functions that still run when main() ends are awaited."""
    began, ended = [], []

    def work():
        began.append(None)
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        pause()
        ended.append(is_coro())

    async def main():
        asyncio.get_running_loop().set_default_executor(kind())
        await asyncio.to_thread(work)
        task = asyncio.create_task(asyncio.to_thread(work))
        while len(began) < 2:
            await asyncio.sleep(0)
        task.cancel()

    grapeshot.run(main())
    assert ended == [kind is coro.CoroPoolExecutor] * 2


@kinds
def test_context_variables(kind):
    """Calls do not see each other's values. `var.get` is a C function, so it runs in a real thread. The thread begins
    with an empty context or, in free-threaded builds, with a copy of the context of the code that started it.
    """
    var = contextvars.ContextVar("var", default=0)
    inherited = 5 if getattr(sys.flags, "thread_inherit_context", False) else 0

    def change():
        before = var.get()
        var.set(7)
        return before

    async def main():
        loop = asyncio.get_running_loop()
        var.set(5)
        loop.set_default_executor(kind())
        assert await asyncio.gather(*(asyncio.to_thread(change) for _ in range(3))) == [5] * 3
        assert await loop.run_in_executor(None, var.get) == inherited
        assert var.get() == 5

    grapeshot.run(main())


@kinds
def test_limit(kind):
    """At most `max_workers` functions run at once. They begin in the order of their submission."""
    running, seen, order = [], [], []

    def work(number):
        running.append(number)
        order.append(number)
        seen.append(len(running))
        pause()
        running.remove(number)

    async def main():
        executor = kind(3)
        await asyncio.gather(*(asyncio.wrap_future(executor.submit(work, number)) for number in range(20)))
        executor.shutdown(wait=False)

    grapeshot.run(main())
    assert max(seen) == 3
    # Real threads may append to `order` in any order.
    in_order = kind is not concurrent.futures.ThreadPoolExecutor
    assert (order if in_order else sorted(order)) == list(range(20))


def test_no_limit():
    """A thousand calls wait for each other, so all of them must run at once."""
    gate, arrived = coro.event(), []

    def work():
        arrived.append(None)
        if len(arrived) == 1000:
            gate.set()
        gate.wait()
        return threading.get_ident(), coro.current()

    async def main():
        executor = coro.CoroPoolExecutor()
        seen = await asyncio.gather(*(asyncio.wrap_future(executor.submit(work)) for _ in range(1000)))
        assert len({ident for ident, _ in seen}) == 1
        assert len({worker for _, worker in seen}) == 1000
        executor.shutdown(wait=False)

    grapeshot.run(main())


@pytest.mark.parametrize("limit", [None, 1])
def test_threads_run_keeps_real_threads(limit):
    async def main():
        asyncio.get_running_loop().set_default_executor(coro.CoroPoolExecutor(limit))
        assert await asyncio.get_running_loop().run_in_executor(None, is_coro)
        return await coro.run_sync(coro.threads.run, lambda: (is_coro(), threading.get_ident()))

    assert grapeshot.run(main()) not in ((True, threading.get_ident()), (False, threading.get_ident()))


def test_workers_are_used_again():
    async def main():
        for limit in (None, 1, 5):
            executor = coro.CoroPoolExecutor(limit, "name")
            workers = [await asyncio.wrap_future(executor.submit(worker)) for _ in range(3)]
            assert len(set(workers)) == 1
            assert workers[0].get_name() == "name-0"
            executor.shutdown(wait=False)
            while not workers[0].done():
                await asyncio.sleep(0)

    grapeshot.run(main())


def test_one_worker_for_each_loop():
    """An executor outlives its loop, and then belongs to the next loop that uses it."""
    executor = coro.CoroPoolExecutor(1)
    for _ in range(3):

        async def main():
            assert await asyncio.wrap_future(executor.submit(lambda: pause(is_coro())))

        grapeshot.run(main())
    # Without a running loop, the executor uses real threads.
    assert executor.submit(lambda: is_coro()).result() is False


@kinds
def test_shutdown_waits(kind):
    """In a coro or another thread, `shutdown()` waits for running and for queued jobs."""
    ended = []

    def work():
        pause()
        ended.append(None)

    def shut_down(executor):
        executor.shutdown()
        return len(ended)

    async def main():
        for wait in (coro.run_sync, lambda f, e: asyncio.get_running_loop().run_in_executor(None, f, e)):
            ended.clear()
            executor = kind(1)
            for _ in range(3):
                executor.submit(work)
            await asyncio.sleep(0)
            assert await wait(shut_down, executor) == 3

    grapeshot.run(main())


def test_a_function_that_gets_no_coro_raises_and_does_not_keep_the_loop_from_ending():
    out = run_script(
        None,
        """
        import asyncio, grapeshot
        from grapeshot import coro

        async def main():
            loop = asyncio.get_running_loop()
            loop.set_default_executor(coro.CoroPoolExecutor())
            other = coro.spawn(coro.sleep_relative, 60)
            await asyncio.sleep(0)
            loop.set_limits(coros=1)
            try:
                await asyncio.to_thread(lambda: print("ran"))
            except Exception as exc:
                print(type(exc).__name__)
            other.cancel()

        grapeshot.run(main())
        print("ended")
        """,
    )
    assert out.split() == ["LimitError", "ended"]


@kinds
def test_shutdown_cancels(kind):
    async def main():
        executor = kind(1)
        may_end = threading.Event()

        def work():
            while not may_end.is_set():  # keeps a real thread busy until shutdown() has been called
                pause()

        futures = [executor.submit(work) for _ in range(3)]
        while not futures[0].running():
            await asyncio.sleep(0)
        executor.shutdown(wait=False, cancel_futures=True)
        may_end.set()
        await asyncio.wrap_future(futures[0])
        assert [future.cancelled() for future in futures] == [False, True, True]

    grapeshot.run(main())


def test_the_loop_ends_first():
    """When the loop is closed, functions that still wait get Shutdown. Jobs that have not begun are cancelled."""
    out = run_script(
        None,
        """
        import asyncio, concurrent.futures, grapeshot
        from grapeshot import coro

        def work():
            try:
                coro.wait()
            except asyncio.CancelledError as exc:
                print(type(exc).__name__)
                raise

        async def main():
            global futures
            executor = coro.CoroPoolExecutor(1)
            futures = [executor.submit(work) for _ in range(2)]
            await asyncio.sleep(0.01)

        loop = grapeshot.new_event_loop()
        loop.run_until_complete(main())
        loop.close()
        print(type(futures[0].exception(1)).__name__, futures[1].cancelled())
        print(len(concurrent.futures.wait(futures, 1).not_done))
        """,
    )
    assert out.splitlines() == ["Shutdown", "Shutdown True", "0"]


# ---------------------------------------------------------------- functions that keep real threads


@coro.threads.in_thread
def marked():
    return is_coro()


class Methods:
    def __init__(self):
        self.number = 1

    @coro.threads.in_thread
    def marked(self):
        return is_coro()

    @coro.threads.in_thread
    @classmethod
    def marked_of_class(cls):
        return is_coro()

    def plain(self):
        return is_coro()

    def __call__(self):
        return is_coro()


def test_marked_functions():
    async def main():
        executor = coro.CoroPoolExecutor()
        seen = [
            await asyncio.wrap_future(executor.submit(fn))
            for fn in (
                marked,
                functools.partial(marked),
                functools.partial(contextvars.copy_context().run, marked),
                Methods().marked,
                Methods.marked_of_class,
                coro.threads.in_thread(functools.partial(is_coro)),
                is_coro,
                functools.partial(is_coro),
                functools.partial(contextvars.copy_context().run, is_coro),
                Methods().plain,
                Methods(),
            )
        ]
        assert seen == [False] * 6 + [True] * 5
        executor.shutdown(wait=False)

    grapeshot.run(main())
    assert marked() is False  # the mark does not change the function


def test_modules():
    try:
        coro.threads.modules_in_thread("email")
        assert needs_thread(Parser().parsestr)
        assert needs_thread(Parser)
    finally:
        _modules.clear()
    assert not needs_thread(Parser().parsestr)


def test_functions_in_c():
    """Functions in C need threads, unless they are grapeshot's."""
    near, far = socket.socketpair()
    ours, theirs = coro.socketpair()
    with near, far, ours, theirs:
        for fn in (zlib.compress, sum, open, near.recv, b"".join, dict, _thread.allocate_lock):
            assert needs_thread(fn), fn
        for fn in (ours.recv, coro.sleep_relative, coro.event().wait, near.sendfile, Methods, Methods().plain):
            assert not needs_thread(fn), fn


def call(function, *, function2=None):
    return (function or function2)()


def test_marked_functions_in_wrappers():
    """Frameworks pass the program's function as an argument to a function of their own."""

    async def main():
        executor = coro.CoroPoolExecutor()
        run = functools.partial(executor.submit)
        for wrapped in (
            run(call, marked),
            run(call, None, function2=marked),
            run(functools.partial(call, marked)),
            run(functools.partial(call, functools.partial(marked))),
            run(contextvars.copy_context().run, call, marked),
        ):
            assert await asyncio.wrap_future(wrapped) is False
        assert await asyncio.wrap_future(run(call, is_coro)) is True
        assert await asyncio.wrap_future(run(contextvars.copy_context().run, is_coro)) is True
        executor.shutdown(wait=False)

    grapeshot.run(main())


def test_odd_callables():
    class Odd:
        def __getattr__(self, name):
            raise KeyError(name)

        def __call__(self):
            return 5

    class Answers:
        """An object that, like a Mock, has an attribute of any name."""

        def __getattr__(self, name):
            return self

        def __call__(self):
            return is_coro()

    _modules.append("nothing")
    try:
        assert not needs_thread(Odd())
        assert not needs_thread(Answers())
    finally:
        _modules.clear()


@kinds
def test_shutdown_in_another_thread(kind):
    """With `cancel_futures`, jobs that have not begun are cancelled. Further jobs are refused."""
    cap = 2000

    async def main():
        loop = asyncio.get_running_loop()
        executor = kind(2)
        futures = [executor.submit(pause) for _ in range(cap)]
        await loop.run_in_executor(None, functools.partial(executor.shutdown, cancel_futures=True))
        assert all(future.done() for future in futures)
        assert any(future.cancelled() for future in futures)
        with pytest.raises(RuntimeError, match="after shutdown"):
            executor.submit(pause)

    grapeshot.run(main())


@kinds
def test_with_block_waits_for_real_threads(kind):
    ended = []

    @coro.threads.in_thread
    def work():
        time.sleep(0.01)
        ended.append(None)

    def use():
        with kind() as executor:
            executor.submit(work)
            executor.submit(lambda: (pause(), ended.append(None)))
        return len(ended)

    async def main():
        assert await coro.run_sync(use) == 2

    grapeshot.run(main())


@kinds
def test_a_job_cannot_wait_for_its_executor(kind):
    async def main():
        executor = kind()
        with pytest.raises(RuntimeError, match="cannot join current thread"):
            await asyncio.wrap_future(executor.submit(lambda: executor.shutdown()))

    grapeshot.run(main())


@kinds
def test_dropped_executors_end(kind):
    """When an executor is dropped without a shutdown, its workers end. asgiref's async_to_sync relies on that."""

    async def main():
        coros = []
        for _ in range(5):
            executor = kind(1)
            coros.append(await asyncio.wrap_future(executor.submit(worker)))
            reference = weakref.ref(executor)
            del executor
            gc.collect()
            assert reference() is None
        while kind is coro.CoroPoolExecutor and not all(co.done() for co in coros):
            await asyncio.sleep(0)

    grapeshot.run(main())


@kinds
def test_no_reference_cycles(kind):
    if kind is concurrent.futures.ThreadPoolExecutor and not gil_is_enabled():
        pytest.skip("without a GIL, a thread keeps a part of the reference count of its objects")

    class Error(Exception):
        pass

    references = []

    def fail():
        error = Error()
        references.append(weakref.ref(error))
        try:
            raise error
        finally:
            del error

    async def main():
        executor = kind()
        for _ in range(3):
            with contextlib.suppress(Error):
                await asyncio.wrap_future(executor.submit(fail))
            await asyncio.sleep(0)
        executor.shutdown(wait=False)

    gc.collect()
    gc.disable()
    try:
        grapeshot.run(main())
        assert [reference() for reference in references] == [None] * 3
    finally:
        gc.enable()


@kinds
def test_jobs_after_keyboard_interrupt(kind):
    """Queued jobs still run after a job has raised KeyboardInterrupt."""
    ended = []

    def interrupt():
        raise KeyboardInterrupt

    async def main():
        executor.submit(interrupt)
        await asyncio.gather(*(asyncio.wrap_future(executor.submit(ended.append, n)) for n in range(3)))

    executor = kind(1)
    with contextlib.suppress(KeyboardInterrupt):
        grapeshot.run(main())
    assert ended == [0, 1, 2]


@kinds
def test_jobs_of_an_own_executor_are_awaited(kind):
    """For coros, `grapeshot.run()` waits for the jobs before it closes the loop. For threads, `shutdown()` does."""
    ended = []

    async def main():
        for _ in range(3):
            asyncio.get_running_loop().run_in_executor(executor, lambda: (pause(), ended.append(None)))
        await asyncio.sleep(0)

    executor = kind(1)
    grapeshot.run(main())
    executor.shutdown()
    assert len(ended) == 3


def test_shutdown_while_the_loop_does_not_run_does_not_wait_for_coros():
    out = run_script(
        None,
        """
        import asyncio, grapeshot
        from grapeshot import coro

        def work():
            coro.sleep_relative(60)

        async def main(executor):
            asyncio.get_running_loop().run_in_executor(executor, work)
            await asyncio.sleep(0.01)

        loop = grapeshot.new_event_loop()
        with coro.CoroPoolExecutor() as executor:
            loop.run_until_complete(main(executor))
        loop.close()
        print("ended")
        """,
    )
    assert out == "ended\n"
