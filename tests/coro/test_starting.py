"""Coros that are never started, coros that are spawned before a loop runs, and async functions as coros."""

from __future__ import annotations

import asyncio
import functools
import warnings

import pytest
from support import coro_is_available, in_thread, run_script

import grapeshot

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro


# ------------------------------------------------------------------ before a loop runs


def test_run_also_runs_coros_spawned_before():
    def program():
        log = []
        first = coro.spawn(log.append, "spawned")
        fifo = coro.fifo()
        worker = coro.spawn(lambda: log.append(fifo.pop()))

        def main():
            log.append("main")
            fifo.push("item")
            worker.join()
            return first.done()

        assert coro.run(main)
        # The next call of run() makes a new loop, because no coros have been spawned since the first call.
        later = coro.run(coro.current)
        assert first.get_loop().is_closed()
        assert later.get_loop() is not first.get_loop()
        return log

    assert in_thread(program) == ["spawned", "main", "item"]


def test_coros_that_outlive_the_first_one_are_cancelled():
    def program():
        log = []

        def work():
            try:
                coro.wait()
            finally:
                log.append("ended")

        coro.spawn(work)
        coro.run(log.append, "main")
        return log

    assert in_thread(program) == ["main", "ended"]


def test_a_new_coro_is_started_in_the_run():
    def program():
        co = coro.new(lambda: 5)

        def main():
            co.start()
            return co.join()

        return coro.run(main)

    assert in_thread(program) == 5


def test_run_ignores_an_exit_code_that_was_set_before():
    def program():
        coro.spawn(coro.yield_slice)
        coro.set_exit(3)

        def main():
            with pytest.raises(RuntimeError, match="event_loop"):
                coro.set_exit(4)
            return "ran"

        return coro.run(main)

    assert in_thread(program) == "ran"


NEVER_RUN = """
    import warnings
    warnings.simplefilter("always")
    from grapeshot import coro

    def forgotten():
        print("ran")

    def spawn():
        coro.spawn(forgotten, name="the one")
    """


@pytest.mark.parametrize(
    "program",
    [
        "spawn()",
        "import grapeshot, asyncio; spawn(); grapeshot.run(asyncio.sleep(0))",
        "import threading; t = threading.Thread(target=spawn); t.start(); t.join()",
    ],
    ids=["exit", "another-loop", "thread"],
)
def test_a_warning_for_a_coro_that_never_ran(program):
    code = (
        NEVER_RUN
        + """
    import sys
    def show(message, category, *_):
        print(category.__name__, message)
    warnings.showwarning = show
    """
        + program
    )
    lines = [line for line in run_script(None, code).splitlines() if "unclosed" not in line]
    assert len(lines) == 1
    assert lines[0].startswith("RuntimeWarning coros never ran: [<Coro 'the one' ready>]; coro.run()")


def test_no_warning_for_a_coro_that_has_run():
    code = NEVER_RUN + "coro.spawn(forgotten); coro.run(coro.yield_slice)"
    assert run_script(None, code) == "ran\n"


# ------------------------------------------------------------------ not started


def test_waiting_for_a_coro_that_was_not_started_is_refused():
    def main():
        co = coro.new(lambda: 5)
        for wait in (co.join, lambda: co.join(10), lambda: coro.await_(co)):
            with pytest.raises(coro.NotStartedError):
                wait()
        co.start()
        assert co.join() == 5

    coro.run(main)


def test_a_task_does_not_wait_for_a_coro_that_was_not_started():
    async def main():
        co = coro.new(lambda: 5)
        with pytest.raises(coro.NotStartedError):
            await co
        co.start()
        assert await co == 5

    grapeshot.run(main())


# ------------------------------------------------------------------ async functions


async def fetch(number=1):
    return number


class Client:
    async def get(self):
        return 1

    async def __call__(self):
        return 2


ASYNC = {
    "function": lambda: fetch,
    "method": lambda: Client().get,
    "partial": lambda: functools.partial(functools.partial(fetch), 1),
    "partial method": lambda: functools.partial(Client().get),
    "object": Client,
}


@pytest.mark.parametrize("kind", ASYNC)
def test_an_async_function_is_refused(kind):
    function = ASYNC[kind]()

    def main():
        starts = [
            coro.new,
            coro.spawn,
            lambda fn: coro.in_parallel([(fn, ())]),
            coro.Group().spawn,
            coro.Pool(2).spawn,
            lambda fn: coro.Pool(2).map(fn, [1]),
            lambda fn: coro.with_timeout(1, fn),
            lambda fn: coro.await_(coro.run_sync(fn)),
        ]
        for start in starts:
            with pytest.raises(TypeError, match=r"is async: .*coro\.await_\(\)"):
                start(function)
        # A pool that has refused an async function can still use its only place.
        pool = coro.Pool(1)
        with pytest.raises(TypeError):
            pool.spawn(function)
        return pool.spawn(lambda: 5).join()

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the test fails if a coroutine is created and never awaited
        assert coro.run(main) == 5
        with pytest.raises(TypeError, match=r"^run\(\) needs an ordinary function"):
            coro.run(function)


def test_callables_of_any_kind_are_run():
    class Callable:
        def __call__(self):
            return 3

        def method(self):
            return 4

    class Made:
        def __init__(self):
            self.value = 5

    def generator():
        yield 6

    def main():
        functions = [Callable(), Callable().method, functools.partial(int, "7"), lambda: 8, dict, [1, 2].copy]
        results = [coro.spawn(function).join() for function in functions]
        assert results == [3, 4, 7, 8, {}, [1, 2]]
        assert coro.spawn(Made).join().value == 5
        assert list(coro.spawn(generator).join()) == [6]
        return coro.await_(coro.spawn(fetch.__call__, 9).join())

    assert coro.run(main) == 9


def test_an_uncallable_object_makes_no_loop():
    def program():
        with pytest.raises(TypeError, match=r"spawn\(\) needs a function, not 5"):
            coro.spawn(5)
        with pytest.raises(TypeError, match="run"):
            coro.run(None)
        coroutine = asyncio.sleep(0)
        with pytest.raises(TypeError, match=r"run\(\) needs a function, not <coroutine .*: .* grapeshot\.run\(\)"):
            coro.run(coroutine)
        coroutine.close()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return coro.run(lambda: 1)

    assert in_thread(program) == 1
