"""Errors in callbacks and the exception handler."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest
from support import iterations, run_iterations


def fails():
    raise LookupError("in a callback")


def test_the_context_of_a_failing_callback(loop, reported):
    handle = loop.call_soon(fails)
    seen = []
    loop.call_soon(seen.append, "next")
    run_iterations(loop)
    assert seen == ["next"]
    [context] = reported
    assert context["message"].startswith("Exception in callback ")
    assert "fails" in context["message"]
    assert isinstance(context["exception"], LookupError)
    assert context["handle"] is handle


def test_a_failing_timer(loop, reported):
    handle = loop.call_later(0.001, fails)
    loop.run_until_complete(asyncio.sleep(0.005))
    [context] = reported
    assert context["message"].startswith("Exception in callback ")
    assert context["handle"] is handle


def test_a_failing_reader_is_reported_and_stays(loop, reported):
    import socket

    calls = []

    def callback():
        calls.append(1)
        if len(calls) == 2:
            loop.remove_reader(ours)
            loop.stop()
        raise LookupError("in a reader")

    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.send(b"x")
        loop.add_reader(ours, callback)
        loop.run_forever()
    assert len(calls) == 2
    assert [str(error) for error in reported.exceptions] == ["in a reader"] * 2


@pytest.mark.parametrize("error", [Exception, ValueError, asyncio.CancelledError, GeneratorExit])
def test_errors_that_do_not_end_the_loop(loop, reported, error):
    def callback():
        raise error

    loop.call_soon(callback)
    run_iterations(loop)
    assert [type(each) for each in reported.exceptions] == [error]


def test_source_traceback_in_debug_mode(loop, reported):
    loop.set_debug(True)
    loop.call_soon(fails)
    run_iterations(loop)
    [context] = reported
    assert any(frame.filename == __file__ for frame in context["source_traceback"])


def test_the_handler_gets_loop_and_context(new_loop):
    loop = new_loop()
    seen = []
    loop.set_exception_handler(lambda *args: seen.append(args))
    context = {"message": "hello"}
    loop.call_exception_handler(context)
    [(its_loop, its_context)] = seen
    assert its_loop is loop
    assert its_context is context


def test_set_and_get(new_loop):
    loop = new_loop()
    assert loop.get_exception_handler() is None

    def handler(_loop, _context):
        raise AssertionError("not called")

    loop.set_exception_handler(handler)
    assert loop.get_exception_handler() is handler
    loop.set_exception_handler(None)
    assert loop.get_exception_handler() is None
    with pytest.raises(TypeError, match="callable object or None is expected"):
        loop.set_exception_handler("no")


def test_the_default_handler_logs(new_loop, caplog):
    loop = new_loop()
    loop.call_soon(fails)
    run_iterations(loop)
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]  # a busy machine adds warnings
    assert record.name == "asyncio"
    assert record.levelno == logging.ERROR
    assert record.message.startswith("Exception in callback ")
    assert "handle: <Handle" in record.message
    assert record.exc_info[0] is LookupError
    caplog.clear()


def test_the_default_handler_without_an_exception(new_loop, caplog):
    loop = new_loop()
    loop.default_exception_handler({"message": "odd", "extra": 5})
    [record] = caplog.records
    assert record.message == "odd\nextra: 5"
    loop.default_exception_handler({})
    assert caplog.records[1].message.startswith("Unhandled exception in event loop")


@pytest.mark.xfail_on(uvloop="the handle's traceback is not formatted")
def test_the_default_handler_prints_tracebacks(new_loop, caplog):
    import traceback

    loop = new_loop()
    stack = traceback.extract_stack()
    loop.default_exception_handler({"message": "m", "source_traceback": stack, "handle_traceback": stack})
    text = caplog.records[0].message
    assert "Object created at (most recent call last):" in text
    assert "Handle created at (most recent call last):" in text
    assert __file__ in text


def test_a_faulty_handler(new_loop, caplog):
    loop = new_loop()

    def handler(_loop, _context):
        raise ZeroDivisionError("faulty")

    loop.set_exception_handler(handler)
    loop.call_soon(fails)
    seen = []
    loop.call_soon(seen.append, "next")
    run_iterations(loop)
    assert seen == ["next"]
    [record] = caplog.records
    assert "Unhandled error in exception handler" in record.message
    assert record.exc_info[0] is ZeroDivisionError
    caplog.clear()


def test_a_faulty_default_handler(new_loop, caplog, loop_kind):
    base = type(new_loop())

    class Broken(base):
        def default_exception_handler(self, context):
            raise ZeroDivisionError("broken")

    loop = Broken()
    loop.call_soon(fails)
    run_iterations(loop)
    loop.close()
    [record] = caplog.records
    assert "Exception in default exception handler" in record.message
    caplog.clear()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupts_in_the_handler_get_through(new_loop, error):
    loop = new_loop()

    def handler(_loop, _context):
        raise error

    loop.set_exception_handler(handler)
    with pytest.raises(error):
        loop.call_exception_handler({"message": "m"})
    loop.set_exception_handler(None)


def test_an_exception_never_retrieved(loop, reported):
    async def main():
        future = loop.create_future()
        future.set_exception(LookupError("nobody asks"))
        del future
        gc.collect()
        await iterations(1)

    loop.run_until_complete(main())
    [context] = reported
    assert context["message"] == "Future exception was never retrieved"
    assert isinstance(context["exception"], LookupError)


def test_a_pending_task_that_is_destroyed(loop, reported):
    async def waits():
        await loop.create_future()

    async def main():
        loop.create_task(waits())
        await iterations(2)
        gc.collect()

    loop.run_until_complete(main())
    assert reported.messages == ["Task was destroyed but it is pending!"]


def test_the_handler_may_use_the_loop(new_loop):
    loop = new_loop()
    seen = []
    loop.set_exception_handler(lambda its_loop, context: its_loop.call_soon(seen.append, context["message"]))
    loop.call_soon(fails)
    run_iterations(loop)
    run_iterations(loop)
    assert len(seen) == 1


def test_the_handler_may_replace_itself(new_loop):
    loop = new_loop()
    seen = []

    def second(_loop, _context):
        seen.append("second")

    def first(its_loop, _context):
        its_loop.set_exception_handler(second)
        seen.append("first")

    loop.set_exception_handler(first)
    loop.call_soon(fails)
    loop.call_soon(fails)
    run_iterations(loop)
    assert seen == ["first", "second"]
