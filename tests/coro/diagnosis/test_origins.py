"""Debug mode tells where a coro was spawned, and in which coro a task or callback was created."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import sys
import time

import pytest
from support import coro_is_available, run_script

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro


def fail():
    raise ValueError("on purpose")


def in_debug_mode(function):
    def main():
        asyncio.get_running_loop().set_debug(True)
        return function()

    return coro.run(main)


def records(caplog, part):
    return [record.getMessage() for record in caplog.records if part in record.getMessage()]


def line_of(comment):
    with open(__file__, encoding="utf-8") as file:
        return next(number for number, line in enumerate(file, 1) if line.rstrip().endswith(f"# {comment}"))


def test_the_report_of_an_unretrieved_error_says_where_the_coro_was_spawned(caplog):
    def body():
        coro.spawn(fail, name="failing")  # here
        coro.yield_slice()
        coro.yield_slice()
        gc.collect()

    in_debug_mode(body)
    [text] = records(caplog, "Coro exception was never retrieved")
    assert "created at (most recent call last)" in text
    assert f'{__file__}", line {line_of("here")}, in body' in text
    assert "'failing'" in text


def test_without_debug_mode_the_report_does_not_say_where(caplog):
    def body():
        coro.spawn(fail)
        coro.yield_slice()
        coro.yield_slice()

    coro.run(body)
    [text] = records(caplog, "Coro exception was never retrieved")
    assert "created at" not in text


def test_the_repr_says_where_the_coro_was_spawned():
    def body():
        co = coro.spawn(coro.wait)  # of the repr
        text = repr(co)
        co.shutdown()
        return text

    assert f"created at {__file__}:{line_of('of the repr')}>" in in_debug_mode(body)
    assert "created at" not in coro.run(body)


def test_a_slow_coro_is_named(caplog):
    def slow():
        time.sleep(0.05)

    def body():
        asyncio.get_running_loop().slow_callback_duration = 0.02
        coro.spawn(slow, name="the slow one").join()

    with caplog.at_level(logging.WARNING, "asyncio"):
        in_debug_mode(body)
    assert len(records(caplog, "Executing <Coro 'the slow one'")) == 1


def test_the_warning_about_a_slow_callback_names_the_coro_that_scheduled_it(caplog):
    def outer():
        loop = asyncio.get_running_loop()
        loop.slow_callback_duration = 0.02
        loop.call_soon(time.sleep, 0.05)

        async def work():
            time.sleep(0.05)

        coro.await_(loop.create_task(work(), name="of the coro"))

    def body():
        coro.spawn(outer, name="outer").join()

    with caplog.at_level(logging.WARNING, "asyncio"):
        in_debug_mode(body)
    found = records(caplog, "in coro 'outer' took")
    assert any("sleep" in text for text in found)
    assert any("name='of the coro'" in text for text in found)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Task.get_context() is new in 3.12")
def test_the_report_of_an_error_of_a_task_names_the_coro_that_created_it(caplog):
    async def failing():
        raise ValueError("on purpose")

    def outer():
        asyncio.get_running_loop().create_task(failing())
        coro.yield_slice()
        coro.yield_slice()
        gc.collect()

    def body():
        coro.spawn(outer, name="outer").join()  # of the task

    in_debug_mode(body)
    [text] = records(caplog, "Task exception was never retrieved")
    assert f'in_coro: "outer, spawned at {__file__}:{line_of("of the task")} in ' in text.replace("'outer", '"outer')


def test_dev_mode_and_threads_that_are_coros():
    out = run_script(
        None,
        """
        import asyncio, logging, sys, threading
        from grapeshot import coro
        coro.patch("thread")
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        def target():
            pass
        def main():
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
            co = coro.spawn(int)
            co.join()
            print(repr(co))
        coro.run(main)
        """,
        flags=("-X", "dev"),
    )
    assert "created at <string>:" in out


def test_a_context_may_be_entered_already():
    context = contextvars.copy_context()

    def body():
        co = context.run(coro.spawn, int, context=context)
        assert co._source_traceback
        return co.join()

    assert in_debug_mode(body) == 0
