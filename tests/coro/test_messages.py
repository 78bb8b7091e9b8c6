"""Error messages and reprs contain what a user needs to fix the problem."""

from __future__ import annotations

import asyncio
import traceback

import pytest
from support import CAP_S, coro_is_available

import grapeshot

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro


def fail(text):
    raise ValueError(text)


# Calls that need a coro, made where no coro runs.
WAITS = {
    "yield_slice": lambda: coro.yield_slice(),
    "wait": lambda: coro.wait(),
    "sleep_relative": lambda: coro.sleep_relative(0.01),
    "pop": lambda: coro.fifo().pop(),
    "acquire": lambda: coro.semaphore(0).acquire(),
    "lock": lambda: coro.lock().acquire(),
    "current": lambda: coro.current(),
    "join": lambda: coro.spawn(coro.wait).join(),
}


@pytest.mark.parametrize("what", WAITS)
def test_the_error_says_how_to_wait(what):
    async def main():
        with pytest.raises(coro.YieldFromMain, match=r"`await coro\.run_sync\(f\)`"):
            WAITS[what]()

    grapeshot.run(main())


def test_the_error_in_a_callback_of_a_coro_says_how_to_wait():
    def main():
        loop = asyncio.get_running_loop()
        contexts = coro.fifo()
        loop.set_exception_handler(lambda _loop, context: contexts.push(context))
        coro.spawn(int).add_done_callback(lambda _co: coro.sleep_relative(0))
        return str(contexts.pop(timeout=CAP_S)["exception"])

    assert "`coro.spawn(f)` in a callback" in coro.run(main)


def test_timeouts_say_how_long():
    def main():
        with pytest.raises(coro.TimeoutError, match=r"^not done after 0\.002 seconds$"):
            coro.with_timeout(0.002, coro.wait)
        with pytest.raises(coro.TimeoutError, match="not done after 0 seconds"), coro.timeout(0):
            coro.wait()

    coro.run(main)


def test_the_error_of_in_parallel_shows_tracebacks():
    def main():
        with pytest.raises(coro.InParallelError) as one:
            coro.in_parallel([(int, ()), (fail, ("first",))])
        assert str(one.value) == "1 of 2 functions have raised: ValueError('first')"
        assert one.value.__cause__ is one.value.result_list[1][1]
        with pytest.raises(coro.InParallelError) as several:
            coro.in_parallel(
                [(fail, ("first",)), (int, ()), (fail, ("second",)), (coro.current().shutdown, ("wrong",))]
            )
        assert str(several.value).startswith("3 of 4 functions have raised: ValueError('first'), ValueError('second')")
        shown = "".join(traceback.format_exception(several.value))
        for text in ("ValueError: first", "ValueError: second", "raise ValueError(text)"):
            assert text in shown
        assert shown.count("in fail") == 2

    coro.run(main)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: coro.fifo().pop(1, 2, 3), r"pop\(\) takes at most 2 positional arguments, but 3 were given"),
        (lambda: coro.fifo().pop(until=1), r"pop\(\) got an unexpected keyword argument 'until'"),
        (lambda: coro.lock().release(timeout=1), r"release\(\) got an unexpected keyword argument 'timeout'"),
        (lambda: coro.lock().release(1), r"release\(\) takes no arguments, but 1 was given"),
        (lambda: coro.yield_slice(1), r"yield_slice\(\) takes no arguments, but 1 was given"),
        (lambda: coro.sleep_relative(), r"sleep_relative\(\) takes exactly one argument, but 0 were given"),
        (lambda: coro.spawn(), r"spawn\(\) takes at least 1 positional argument, but 0 were given"),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(TypeError, match=f"^{message}$"):
        call()


def test_reprs_of_pools_and_groups():
    def main():
        pool = coro.Pool(3)
        assert repr(pool) == "<Pool 0 of 3 places taken>"
        pool.spawn(coro.yield_slice)
        assert repr(pool) == "<Pool 1 of 3 places taken>"
        pool.join()
        shown = []
        with pytest.raises(ValueError, match="first"), coro.Group() as group:
            shown.append(repr(group))
            group.spawn(coro.yield_slice)
            shown.append(repr(group))
            try:
                group.spawn(fail, "first")
                coro.wait()
            finally:
                shown.append(repr(group))
        assert shown[:2] == ["<Group 0 coros>", "<Group 1 coros>"]
        assert shown[2].endswith("ending after an error>")

    coro.run(main)
