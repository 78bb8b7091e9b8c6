"""Handle and TimerHandle: interface, repr, comparison, contexts, lifetime."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import sys
import weakref
from unittest import mock

import pytest
from support import iterations, run_iterations, run_script


def named():
    """A function whose name appears in reprs."""


@pytest.mark.xfail_on(uvloop="its handles are not asyncio's")
def test_isinstance(loop):
    soon, later = loop.call_soon(named), loop.call_later(1000, named)
    assert isinstance(soon, asyncio.Handle)
    assert not isinstance(soon, asyncio.TimerHandle)
    assert isinstance(later, asyncio.Handle)
    assert isinstance(later, asyncio.TimerHandle)
    assert isinstance(loop.call_soon_threadsafe(named), asyncio.Handle)
    later.cancel()


def test_cancel_and_cancelled(loop):
    for handle in (loop.call_soon(named), loop.call_later(1000, named), loop.call_at(loop.time() + 1000, named)):
        assert handle.cancelled() is False
        assert handle.cancel() is None
        assert handle.cancelled() is True
        handle.cancel()
        assert handle.cancelled() is True


@pytest.mark.skipif(sys.version_info < (3, 12), reason="get_context() is new in 3.12")
@pytest.mark.xfail_on(uvloop="no get_context")
def test_get_context(loop):
    context = contextvars.copy_context()
    soon, later = loop.call_soon(named, context=context), loop.call_later(1000, named, context=context)
    assert soon.get_context() is context
    assert later.get_context() is context
    assert isinstance(loop.call_soon(named).get_context(), contextvars.Context)
    later.cancel()


def test_cancel_drops_callback_and_arguments(loop):
    class Thing:
        def __call__(self):
            raise AssertionError("ran")

    for schedule in (loop.call_soon, lambda *args: loop.call_later(1000, *args)):
        callback, argument = Thing(), Thing()
        references = weakref.ref(callback), weakref.ref(argument)
        handle = schedule(callback, argument)
        handle.cancel()
        del callback, argument
        gc.collect()
        assert [reference() for reference in references] == [None, None]
        assert handle.cancelled()


def test_a_handle_that_ran_drops_nothing_it_needs_for_repr(loop):
    handle = loop.call_soon(named)
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert "Handle" in repr(handle)
    assert handle.cancelled() is False


def test_repr(loop):
    handle = loop.call_soon(named)
    assert repr(handle).startswith("<Handle ")
    assert "named" in repr(handle)
    handle.cancel()
    assert "cancelled" in repr(handle)
    assert "named" not in repr(handle)


def test_repr_of_a_timer(loop):
    handle = loop.call_later(1000, named)
    assert repr(handle).startswith("<TimerHandle ")
    assert "named" in repr(handle)
    handle.cancel()
    assert "cancelled" in repr(handle)


@pytest.mark.xfail_on(uvloop="its repr is shorter")
def test_repr_is_that_of_asyncio(loop):
    loop.call_soon(named).cancel()
    handle = loop.call_soon(named)
    theirs = asyncio.Handle(named, (), loop)
    assert repr(handle) == repr(theirs)
    with_arguments = loop.call_soon(named, 1, "two")
    assert repr(with_arguments) == repr(asyncio.Handle(named, (1, "two"), loop))
    timer = loop.call_at(12345678.5, named, 1)
    reference = asyncio.TimerHandle(12345678.5, named, (1,), loop)
    reference._scheduled = True
    assert repr(timer) == repr(reference)
    with_arguments.cancel()
    handle.cancel()
    timer.cancel()
    reference._scheduled = False  # so that cancel() does not tell the loop, which does not have this timer
    asyncio.Handle.cancel(reference)
    assert repr(timer) == repr(reference)


def test_repr_in_debug_mode_names_the_creation(loop):
    loop.set_debug(True)
    handle = loop.call_soon(named)
    assert handle._source_traceback
    assert "created at" in repr(handle)
    assert __file__ in repr(handle)
    handle.cancel()
    timer = loop.call_later(1000, named)
    assert "created at" in repr(timer)
    timer.cancel()


@pytest.mark.xfail_on(uvloop="its TimerHandles cannot be compared")
def test_timer_handles_compare_by_deadline(loop):
    early, late = loop.call_at(1e9, named), loop.call_at(2e9, named)
    assert early < late
    assert early <= late
    assert late > early
    assert late >= early
    assert early != late
    assert not early == late
    assert early == early
    assert hash(early) == hash(early.when())
    assert (early == object()) is False
    with pytest.raises(TypeError):
        early < object()  # noqa: B015
    assert sorted([late, early]) == [early, late]
    early.cancel()
    late.cancel()


def test_equality_of_handles_is_identity(loop):
    first, second = loop.call_soon(named), loop.call_soon(named)
    assert first == first
    assert first != second
    assert len({first, second}) == 2


@pytest.mark.xfail_on(uvloop="no _run and no private attributes")
def test_private_names_that_others_use(loop):
    seen = []
    handle = loop.call_soon(seen.append, 1)
    assert handle._callback == seen.append
    assert handle._args == (1,)
    assert handle._cancelled is False
    assert handle._loop is loop
    handle._run()
    assert seen == [1]
    handle.cancel()
    assert handle._callback is None
    assert handle._args is None
    timer = loop.call_later(1000, named)
    assert timer._when == timer.when()
    assert timer._scheduled is True
    timer.cancel()


@pytest.mark.xfail_on(uvloop="no _run")
@pytest.mark.parametrize("count", [1, 4, 5])
def test_run_before_its_turn(loop, count):
    """The loop runs the handle in its turn, even if other code has called `_run()` before."""
    seen = []
    handle = loop.call_soon(lambda *args: seen.append(args), *range(count))
    handle._run()
    handle._run()
    assert len(seen) == 2
    loop.run_until_complete(iterations(1))
    assert seen == [tuple(range(count))] * 3


RUN = """
import gc

class Runs:
    def __del__(self):
        handle._run()

def run(*_):
    calls.append(handle)
    if len(calls) < 10:
        handle._run()

def handler(loop, context):
    calls.append(handle)
    if len(calls) < 10:
        handle._run()
        handle.cancel()
        handle._run()

def iterate():
    loop.call_soon(loop.stop)
    loop.run_forever()

logging.getLogger("asyncio").disabled = True
for is_debug in False, True:
    loop = new_event_loop()
    loop.set_debug(is_debug)
    loop.set_exception_handler(handler)
    for count in 0, 3, 4, 5, 9:
        for schedule in loop.call_soon, loop.call_soon_threadsafe, lambda *args: loop.call_later(0, *args):
            # `_run()` is called in the handle's callback, in finalizers of the arguments, and after the handle has run.
            calls = []
            handle = schedule(run, *(Runs() for _ in range(count)))
            iterate()
            while not calls:
                iterate()
            handle._run()
            handle.cancel()
            handle._run()
            # The exception handler calls `_run()` and cancels the handle.
            calls = []
            handle = schedule(lambda *_: 1 / 0, *range(count))
            while not calls:
                iterate()
            handle._run()
            # The handle is cancelled while it is in a list that only the collector can free.
            handle = schedule(print, *(Runs() for _ in range(count)))
            handles = [handle]
            handles.append(handles)
            handle.cancel()
            del handles
            gc.collect()
            handle._run()
    loop.close()
    handle._run()
print("alive")
"""


@pytest.mark.skip_on(uvloop="no _run")
def test_run_at_any_time(loop_kind):
    assert run_script(loop_kind, "import logging" + RUN) == "alive\n"


@pytest.mark.xfail_on(uvloop="no _run")
def test_run_once_more(loop, loop_kind):
    """Without debug mode, grapeshot drops the callback of a handle after the call. Then `_run()` does nothing."""
    seen = []
    handle = loop.call_soon(seen.append, 1)
    loop.run_until_complete(iterations(1))
    handle._run()
    assert seen == ([1] if loop_kind == "grapeshot" else [1, 1])


def test_a_handle_outlives_its_loop(new_loop):
    loop = new_loop()
    soon, later = loop.call_soon(named), loop.call_later(1000, named)
    loop.close()
    for handle in (soon, later):
        assert "Handle" in repr(handle)
        handle.cancel()
        assert handle.cancelled()


def test_many_handles_kept_are_distinct(loop):
    """A freelist must not hand out a handle that is still referenced."""
    seen = []
    kept = [loop.call_soon(seen.append, number) for number in range(1000)]
    loop.call_soon(loop.stop)
    loop.run_forever()
    more = [loop.call_soon(seen.append, number) for number in range(1000, 2000)]
    assert len({id(handle) for handle in kept + more}) == 2000
    for handle in kept:
        handle.cancel()
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert seen == list(range(2000))
    assert not any(handle.cancelled() for handle in more)


# ---------------------------------------------------------------- attributes, which are slots of asyncio's handles

NO_SLOTS = "its handles have no attributes"
SLOTS = ("_callback", "_args", "_context", "_cancelled", "_loop", "_source_traceback", "_repr")
TIMER_SLOTS = (*SLOTS, "_when", "_scheduled")


def made(loop, name):
    """A pending handle that has this attribute."""
    return loop.call_later(1000, named) if name in ("_when", "_scheduled") else loop.call_soon(named)


@pytest.mark.parametrize("name", TIMER_SLOTS)
@pytest.mark.skip_on(uvloop=NO_SLOTS)
def test_an_attribute_is_deleted_and_set_again(loop, name):
    """mock.patch.object deletes and sets the attribute of an object that has no dict."""
    handle = made(loop, name)
    own = getattr(handle, name)
    delattr(handle, name)
    assert not hasattr(handle, name)
    with pytest.raises(AttributeError):
        delattr(handle, name)
    setattr(handle, name, own)
    assert getattr(handle, name) == own
    with mock.patch.object(handle, name, own):
        assert getattr(handle, name) == own
    assert getattr(handle, name) == own
    assert "named" in repr(handle)
    handle.cancel()


@pytest.mark.skip_on(uvloop=NO_SLOTS)
def test_other_attributes_are_refused(loop):
    handle = loop.call_soon(named)
    for name in ("note", "cancel", "__dict__"):
        with pytest.raises(AttributeError):
            setattr(handle, name, None)
        assert name == "cancel" or not hasattr(handle, name)
    handle.cancel()


@pytest.mark.skip_on(uvloop=NO_SLOTS)
def test_a_callback_that_was_replaced_is_called_with_the_new_arguments_and_context(loop):
    seen, context, variable = [], contextvars.copy_context(), contextvars.ContextVar("variable", default="outer")
    context.run(variable.set, "inner")
    handle = loop.call_soon(seen.append, "old")
    handle._callback = lambda *args: seen.append((variable.get(), args))
    handle._args = (1, 2, 3, 4, 5)
    handle._context = context
    assert handle._args == (1, 2, 3, 4, 5)
    assert handle._context is context
    others = [loop.call_soon(seen.append, number) for number in range(2)]
    others[0]._args = ("new",)
    run_iterations(loop, 2)
    assert seen == [("inner", (1, 2, 3, 4, 5)), "new", 1]


@pytest.mark.skip_on(uvloop=NO_SLOTS)
def test_a_wrong_callback_is_reported(loop, reported):
    handle = loop.call_soon(named)
    handle._callback = None
    run_iterations(loop, 2)
    assert [type(error) for error in reported.exceptions] == [TypeError]


@pytest.mark.skip_on(uvloop=NO_SLOTS)
def test_cancelled_by_its_attribute(loop):
    seen = []
    skipped, back = loop.call_soon(seen.append, 1), loop.call_soon(seen.append, 2)
    timer = loop.call_later(0, seen.append, 3)
    for handle in (skipped, back, timer):
        handle._cancelled = True
        assert handle.cancelled()
        assert handle._args in [(1,), (2,), (3,)]
    back._cancelled = False
    run_iterations(loop, 2)
    assert seen == [2]
    assert [handle.cancelled() for handle in (skipped, back, timer)] == [True, False, True]


@pytest.mark.parametrize("name", ["_callback", "_context"])
@pytest.mark.skip_on(asyncio="it fails while it reports the error", uvloop=NO_SLOTS)
def test_a_run_without_an_attribute_is_reported(loop, reported, name):
    handle = loop.call_soon(named)
    delattr(handle, name)
    run_iterations(loop, 2)
    assert [type(error) for error in reported.exceptions] == [TypeError]


@pytest.mark.skip_on(asyncio="it reports that None cannot be called", uvloop=NO_SLOTS)
def test_a_dropped_call_does_not_come_back(loop):
    handle = loop.call_soon(named)
    handle.cancel()
    handle._cancelled = False
    assert handle._cancelled is False
    handle._callback = named
    handle._cancelled = False
    run_iterations(loop, 2)


@pytest.mark.skip_on(uvloop=NO_SLOTS)
def test_the_repr_that_was_set(loop):
    handle = loop.call_soon(named)
    assert handle._repr is None
    handle._repr = "<mine>"
    assert repr(handle) == handle._repr == "<mine>"
    handle._repr = None
    assert "named" in repr(handle)
    loop.set_debug(True)
    handle = loop.call_soon(named)
    handle.cancel()
    assert "created at" in handle._repr
    assert repr(handle) == handle._repr
    handle._callback = named
    assert "created at" in handle._repr
    handle._source_traceback = None
    handle._repr = None
    assert "created at" not in repr(handle)
    loop.set_debug(False)


@pytest.mark.skip_on(uvloop=NO_SLOTS)
def test_a_deadline_that_was_moved(loop):
    seen = []
    timer = loop.call_later(1000, seen.append, 1)
    timer._when = loop.time()
    assert timer.when() == timer._when
    run_iterations(loop, 3)
    assert seen == [1]
    timer = loop.call_later(0, seen.append, 2)
    timer._when += 1000
    run_iterations(loop, 3)
    assert seen == [1]
    timer.cancel()


@pytest.mark.skip_on(uvloop=NO_SLOTS)
def test_cycles_through_attributes_are_collected(loop):
    for name in ("_callback", "_args", "_repr"):
        handle = loop.call_soon(named)
        setattr(handle, name, [handle])
        reference = weakref.ref(handle)
        handle._cancelled = True
        run_iterations(loop, 2)
        assert reference() is not None
        del handle
        gc.collect()
        assert reference() is None


@pytest.mark.skip_on(uvloop=NO_SLOTS)
def test_attributes_do_not_pass_to_the_next_handle(loop):
    """A freelist reuses the memory of freed handles."""
    for _ in range(100):
        handle = loop.call_soon(named)
        del handle._callback, handle._loop
        handle._repr = "<old>"
        handle._cancelled = True
        del handle
        run_iterations(loop, 1)
        fresh = loop.call_soon(named)
        assert (fresh._callback, fresh._loop, fresh._repr, fresh._cancelled) == (named, loop, None, False)
        fresh.cancel()
