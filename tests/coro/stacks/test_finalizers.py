"""Coros yield in finalizers and in callbacks of weak references that run when a reference count reaches zero."""

from __future__ import annotations

import gc
import weakref

import pytest
from support import coro_is_available, together

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro

COUNT = 10


def slow(value):
    """Yield, then return the value."""
    coro.yield_slice()
    return value


def test_del_and_weakref_callbacks_by_reference_counting():
    log: list = []

    class Ending:
        def __init__(self, number, depth):
            self.number = number
            self.inner = Ending(number, depth - 1) if depth else None

        def __del__(self):
            coro.yield_slice()
            log.append(self.number)
            coro.yield_slice()

    def work(number):
        ending = Ending(number, 3)
        called: list = []

        def callback(reference):
            coro.yield_slice()
            assert reference() is None
            called.append(number)

        reference = weakref.ref(ending, callback)
        finalizer = weakref.finalize(ending, lambda: called.append(slow(-number)))
        coro.yield_slice()
        del ending
        assert not finalizer.alive
        assert reference() is None
        return called

    assert together(work) == [[-number, number] for number in range(COUNT)]
    assert sorted(log) == sorted([*range(COUNT)] * 4)


@pytest.mark.parametrize("kind", ["list", "tuple", "dict", "object"])
def test_deeply_nested_deallocation_that_yields(kind):
    """CPython defers deallocations that are nested too deep; the outermost deallocation frees the deferred objects. The
    depth is counted separately for each coro.
    """
    log: list = []

    class Holder:
        inner: object = None

    class Ending(Holder):
        def __del__(self):
            coro.yield_slice()
            log.append(1)

    def wrap(inner, number):
        if number % 100 == 0:
            ending = Ending()
            ending.inner = inner
            return ending
        if kind == "object":
            holder = Holder()
            holder.inner = inner
            return holder
        return {"list": lambda: [inner], "tuple": lambda: (inner,), "dict": lambda: {"inner": inner}}[kind]()

    def work(_):
        nested: object = None
        for number in range(1, 2001):
            nested = wrap(nested, number)
        coro.yield_slice()
        del nested
        coro.yield_slice()

    together(work, 5)
    assert len(log) == 5 * 20


def test_a_finalizer_that_yields_while_an_exception_is_handled():
    class Ending:
        def __del__(self):
            with pytest.raises(KeyError):
                raise KeyError(slow("inside"))

    def fail(number):
        ending = Ending()  # noqa: F841
        raise ValueError(number)

    def work(number):
        try:
            fail(number)
        except ValueError as exc:
            exc.__traceback__ = None  # this releases the frame of fail(), and `ending` with it
            coro.yield_slice()
            return exc.args
        return None

    assert together(work) == [(number,) for number in range(COUNT)]


def test_collections_while_coros_are_suspended_in_c_functions():
    """The collector runs with the lowest threshold while coros are suspended inside C functions."""

    def work(number):
        cycle: list = []
        cycle.append(cycle)
        return sorted([[slow(x)] for x in range(number)], key=lambda item: slow([-item[0]]))

    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        assert together(work) == [[[x] for x in reversed(range(number))] for number in range(COUNT)]
    finally:
        gc.set_threshold(*thresholds)


@pytest.mark.parametrize("how", ["in_parallel", "group"])
def test_a_collection_lets_coros_end_while_they_are_shut_down(how, monkeypatch):
    """In a coro on a stack of its own, a finalizer that the collector calls may let other coros run, at almost any
    point. The test simulates this: it replaces `Shutdown` with a function that lets other coros run.
    """
    goes_on = coro.event()
    shutdown = coro.Shutdown

    def make_shutdown():
        goes_on.set()
        coro.yield_slice()
        coro.yield_slice()
        return shutdown()

    monkeypatch.setattr(coro._errors, "Shutdown", make_shutdown)

    def main():
        if how == "in_parallel":
            coro.in_parallel((fn, ()) for fn in [goes_on.wait, goes_on.wait, None])
        with coro.Group() as group:
            group.spawn(goes_on.wait)
            group.spawn(goes_on.wait)
            coro.yield_slice()
            raise KeyError("the first")

    with pytest.raises(TypeError if how == "in_parallel" else KeyError):
        coro.run(main)
