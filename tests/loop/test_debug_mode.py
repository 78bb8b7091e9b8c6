"""Debug mode: wrong threads, slow callbacks, invalid callbacks."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import sys
import threading
import time

import pytest
from support import in_thread, run_script


async def coroutine_function():
    raise AssertionError("never runs")


def test_get_and_set(loop):
    assert loop.get_debug() is False
    loop.set_debug(True)
    assert loop.get_debug() is True
    loop.set_debug(False)
    assert loop.get_debug() is False


def test_the_environment_sets_debug_mode(loop_kind):
    code = "loop = new_event_loop(); print(loop.get_debug()); loop.close()"
    assert run_script(loop_kind, code).strip() == "False"
    assert run_script(loop_kind, code, flags=("-X", "dev")).strip() == "True"


async def test_wrong_thread(loop):
    loop.set_debug(True)
    for call in (
        lambda: loop.call_soon(print),
        lambda: loop.call_later(1000, print),
        lambda: loop.call_at(1e9, print),
    ):
        with pytest.raises(RuntimeError, match="operation invoked on an event loop other than the current one"):
            in_thread(call)


async def test_threadsafe_from_a_thread_is_allowed(loop):
    loop.set_debug(True)
    future = loop.create_future()
    in_thread(lambda: loop.call_soon_threadsafe(future.set_result, 1))
    assert await future == 1


async def test_wrong_thread_without_debug_mode(loop):
    handle = in_thread(lambda: loop.call_soon(print))
    handle.cancel()


def test_call_soon_before_the_loop_runs(loop):
    loop.set_debug(True)
    seen = []
    loop.call_soon(seen.append, 1)
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert seen == [1]


def schedulers(loop):
    return {
        "call_soon": loop.call_soon,
        "call_soon_threadsafe": loop.call_soon_threadsafe,
        "call_later": lambda callback: loop.call_later(1000, callback),
        "call_at": lambda callback: loop.call_at(1e9, callback),
    }


@pytest.mark.parametrize("name", ["call_soon", "call_soon_threadsafe", "call_later", "call_at"])
@pytest.mark.xfail_on(uvloop="it checks only call_soon and call_soon_threadsafe")
def test_coroutines_are_refused(loop, name):
    loop.set_debug(True)
    expected = pytest.raises(
        TypeError, match=r"coroutines cannot be used with call_(soon|at|later|soon_threadsafe)\(\)"
    )
    coroutine = coroutine_function()
    for thing in (coroutine, coroutine_function):
        with expected:
            schedulers(loop)[name](thing)
    coroutine.close()


@pytest.mark.parametrize("name", ["call_soon", "call_soon_threadsafe", "call_later", "call_at"])
@pytest.mark.xfail_on(uvloop="it does not check the callback")
def test_objects_that_are_not_callable_are_refused(loop, name):
    loop.set_debug(True)
    with pytest.raises(TypeError, match=r"a callable object was expected by call_\w+\(\), got 'not callable'"):
        schedulers(loop)[name]("not callable")


@pytest.mark.xfail_on(uvloop="it refuses only coroutines")
def test_executor_refuses_coroutines(loop):
    loop.set_debug(True)
    for call in (lambda: loop.run_in_executor(None, coroutine_function), lambda: loop.run_in_executor(None, 5)):
        with pytest.raises(TypeError):
            call()


def test_slow_callbacks_are_logged(loop, caplog):
    caplog.set_level(logging.WARNING, "asyncio")
    loop.set_debug(True)
    loop.slow_callback_duration = 0.01
    loop.call_soon(time.sleep, 0.02)
    loop.call_soon(loop.stop)
    loop.run_forever()
    [record] = caplog.records
    assert "Executing <Handle" in record.message
    assert "sleep" in record.message
    assert "took 0.0" in record.message
    caplog.clear()


def test_slow_tasks_are_logged(loop, caplog):
    caplog.set_level(logging.WARNING, "asyncio")

    async def work():
        time.sleep(0.02)

    loop.set_debug(True)
    loop.slow_callback_duration = 0.01
    loop.run_until_complete(work())
    assert any("took 0.0" in record.message and "work" in record.message for record in caplog.records)
    caplog.clear()


class Named:
    """A class whose method and instances are used as callbacks."""

    def method(self, *args):
        time.sleep(0.002)

    def __call__(self, *args):
        time.sleep(0.002)

    def __repr__(self):
        return "<named>"


def slow(*args, **kwargs):
    time.sleep(0.002)


@pytest.mark.parametrize(
    ("callback", "args", "name"),
    [
        pytest.param(slow, (), "slow()", id="function"),
        pytest.param(slow, (1, "x"), "slow(1, 'x')", id="arguments"),
        pytest.param(Named().method, (1,), "Named.method(1)", id="method"),
        pytest.param(functools.partial(slow, 1, key=2), (3,), "slow(1, key=2)(3)", id="partial"),
        pytest.param(functools.partial(Named().method), (), "Named.method()()", id="partial of a method"),
        pytest.param(time.sleep, (0.002,), "sleep(0.002)", id="builtin"),
        pytest.param(threading.Event().wait, (0.002,), "Event.wait(0.002)", id="method that waits"),
        pytest.param(Named(), (1,), "<named>(1)", id="callable object"),
    ],
)
@pytest.mark.skip_on(uvloop="it names callbacks its own way")
async def test_slow_callbacks_are_named_as_asyncio_names_them(loop, caplog, callback, args, name):
    caplog.set_level(logging.WARNING, "asyncio")
    loop.set_debug(True)
    loop.slow_callback_duration = 0.001
    handle = loop.call_soon(callback, *args)
    text = repr(handle)
    assert text.startswith(f"<Handle {name}"), "one pair of brackets for the call, and one for each partial"
    await asyncio.sleep(0)
    assert f"Executing {text} took 0." in caplog.text
    caplog.clear()


@pytest.mark.skip_on(uvloop="it names callbacks its own way")
def test_the_callback_that_ends_a_run_is_a_plain_function(loop, caplog):
    """The callback appears as `name()` in the task's repr, and as `name(<Task ...>)` in the log of a slow callback,
    without the additional brackets of a partial.
    """
    caplog.set_level(logging.WARNING, "asyncio")
    loop.set_debug(True)
    loop.slow_callback_duration = 0

    async def main():
        return repr(asyncio.current_task())

    ends = ("_run_until_complete_cb", "_stop_when_done")  # the names in asyncio and in grapeshot
    text = loop.run_until_complete(main())
    assert re.search(rf"cb=\[({'|'.join(ends)})\(\) at ", text)
    records = [record.getMessage() for record in caplog.records if any(end in record.getMessage() for end in ends)]
    assert any(re.match(rf"Executing <Handle ({'|'.join(ends)})\(<Task [^()]*\) at ", text) for text in records), (
        records
    )
    caplog.clear()


@pytest.mark.only_on("grapeshot")  # on asyncio's loop, the error leaves run_forever()
def test_an_error_while_a_slow_callback_is_logged(loop, monkeypatch):
    class Slow:
        def __call__(self):
            time.sleep(0.02)

        def __repr__(self):
            raise ValueError("no name")

    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: seen.append((args.object, repr(args.exc_value))))
    loop.set_debug(True)
    loop.slow_callback_duration = 0.01
    loop.call_soon(Slow())
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert seen == [(loop, "ValueError('no name')")]
    seen.clear()


def test_slow_callback_duration_default(loop):
    assert loop.slow_callback_duration == 0.1
    loop.slow_callback_duration = 2
    assert loop.slow_callback_duration == 2


def test_slow_callbacks_are_not_logged_otherwise(loop, caplog):
    loop.slow_callback_duration = 0.001
    loop.call_soon(time.sleep, 0.005)
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert not caplog.records


def test_origin_tracking_of_coroutines(loop):
    depth = sys.get_coroutine_origin_tracking_depth()

    async def main():
        return sys.get_coroutine_origin_tracking_depth()

    loop.set_debug(True)
    assert loop.run_until_complete(main()) > 0
    assert sys.get_coroutine_origin_tracking_depth() == depth
    loop.set_debug(False)
    assert loop.run_until_complete(main()) == depth


def test_set_debug_while_running(loop):
    depth = sys.get_coroutine_origin_tracking_depth()

    async def main():
        loop.set_debug(True)
        await asyncio.sleep(0)
        during = sys.get_coroutine_origin_tracking_depth()
        loop.set_debug(False)
        await asyncio.sleep(0)
        return during, sys.get_coroutine_origin_tracking_depth()

    during, after = loop.run_until_complete(main())
    assert during > 0
    assert after == depth


def test_a_future_made_in_debug_mode_knows_where_it_was_made(loop, reported):
    loop.set_debug(True)

    async def main():
        future = loop.create_future()
        future.set_exception(LookupError())
        return future._source_traceback is not None

    assert loop.run_until_complete(main())
    import gc

    gc.collect()
    assert "source_traceback" in reported[0]
