"""The cyclic collector and coros: objects on a suspended stack survive, and objects of an ended coro are freed."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import sys
import weakref

import pytest
from support import coro_is_available, run_script, together

import grapeshot

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro

COUNT = 10


class Thing:
    """The tests hold weak references to objects of this class. With `is_cyclic`, an object refers to itself."""

    def __init__(self, *kept, is_cyclic=False):
        self.kept = kept
        if is_cyclic:
            self.itself = self


@contextlib.contextmanager
def collecting_always():
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def dead(references):
    """Collect garbage. Return whether all the objects that the weak references refer to have been freed."""
    gc.collect()
    return [reference() for reference in references] == [None] * len(references)


def test_a_collection_at_every_allocation():
    def recurse(level, kept):
        cycle = Thing(level, is_cyclic=True)
        coro.yield_slice()
        if level:
            result = recurse(level - 1, [*kept, cycle])
        else:
            result = sum(thing.kept[0] for thing in kept)
        coro.yield_slice()
        assert cycle.itself is cycle
        return result

    def work(number):
        items = sorted([[x] for x in range(number)], key=lambda item: (coro.yield_slice(), -item[0]))
        try:
            raise ValueError(Thing(is_cyclic=True))
        except ValueError:
            coro.yield_slice()
            return recurse(number, []), items

    with collecting_always():
        results = together(work, COUNT)
    assert results == [(sum(range(1, n + 1)), [[x] for x in reversed(range(n))]) for n in range(COUNT)]


def test_collections_in_several_coros():
    collected = []

    def work(number):
        for step in range(5):
            local = Thing(number, step)
            garbage = weakref.ref(Thing(is_cyclic=True))
            coro.yield_slice()
            gc.collect(step % 3)
            coro.yield_slice()
            assert local.kept == (number, step)
            collected.append(garbage)
        return number

    assert together(work, COUNT) == list(range(COUNT))
    assert dead(collected)


def test_objects_only_on_a_suspended_stack_survive():
    watched = []

    def watch(*held):
        thing = Thing(*held, is_cyclic=True)
        watched.append(weakref.ref(thing))
        return thing

    def inner(things):
        thing = watch(*things)
        # One thing is in a local, one on the evaluation stack, one in a C function's frame, one in a cell, and one in
        # a generator.
        return [watch(thing), next(filter(lambda _: coro.wait() is None, map(watch, [0]))), [x for x in (thing,)]]  # noqa: C416

    def generate():
        thing = watch()
        yield inner([thing])
        yield thing

    def work():
        cell = watch()
        shared = lambda: cell  # noqa: E731
        generator = generate()
        return len(next(generator)), next(generator).itself is not None, shared().itself is not None

    async def main():
        threads = [coro.spawn(work) for _ in range(COUNT)]
        await asyncio.sleep(0)
        assert len(watched) == COUNT * 5
        for generation in (0, 1, 2):
            gc.collect(generation)
        assert all(reference() is not None for reference in watched)
        assert all(reference().itself is reference() for reference in watched)
        for thread in threads:
            coro.schedule(thread)
        assert [await thread for thread in threads] == [(3, True, True)] * COUNT

    grapeshot.run(main())
    assert dead(watched)


def test_cycles_through_coros_are_collected_after_their_end():
    watched = []

    def work(thing):
        thing.coro = coro.current()
        coro.yield_slice()
        return thing

    def fail(thing):
        thing.coro = coro.current()
        coro.yield_slice()
        raise ValueError(thing)

    def main():
        for function in (work, fail):
            for _ in range(COUNT):
                thing = Thing()
                thread = coro.spawn(function, thing, name=f"coro of {id(thing)}")
                watched.extend((weakref.ref(thing), weakref.ref(thread)))
                if function is fail:
                    with pytest.raises(ValueError):
                        thread.join()
                else:
                    thread.join()
        del thing, thread
        assert dead(watched)

    coro.run(main)
    assert len(watched) == COUNT * 4


def test_coros_that_never_began_are_collected():
    watched = []

    async def main():
        for _ in range(COUNT):
            thing = Thing()
            thing.coro = coro.new(print, thing, end=thing)
            thing.coro.add_done_callback(lambda _, kept=thing: kept)
            watched.extend((weakref.ref(thing), weakref.ref(thing.coro)))
        del thing
        assert dead(watched)

    grapeshot.run(main())


def test_contexts_of_ended_coros_are_freed():
    variable = contextvars.ContextVar("variable")
    watched = []

    def work(_):
        thing = Thing(coro.current(), contextvars.copy_context())
        watched.append(weakref.ref(thing))
        variable.set(thing)
        coro.yield_slice()

    together(work, COUNT)
    assert dead(watched)


def test_references_are_counted_right():
    """Hundreds of coros return, raise or are shut down. Reference counts of arguments and outcomes stay the same."""
    argument, result, error = Thing(), Thing(), ValueError()

    def work(kind, thing, keyword=None):
        coro.yield_slice()
        if kind == 0:
            return result
        if kind == 1:
            raise error
        coro.wait()
        return None

    def main():
        threads = [coro.spawn(work, number % 3, argument, keyword=argument) for number in range(300)]
        unstarted = [coro.new(work, 0, argument, keyword=argument) for _ in range(10)]
        for _ in range(3):
            coro.yield_slice()
        for number, thread in enumerate(threads):
            if number % 3 == 1:
                with pytest.raises(ValueError):
                    thread.join()
            elif number % 3 == 2:
                thread.shutdown()
                assert thread.join() is None
                assert thread.cancelled()
            else:
                assert thread.join() is result
        del threads, thread, unstarted

    def counts():
        error.__traceback__ = error.__context__ = None
        gc.collect()
        return [sys.getrefcount(thing) for thing in (argument, result, error, None)][:3]

    before = counts()
    for _ in range(3):
        coro.run(main)
        assert coro.get_live_coros() == []
        assert coro.stack_info()["bytes_saved"] == 0
        assert counts() == before


def test_the_loop_is_freed():
    watched = []

    def main():
        loop = asyncio.get_running_loop()
        watched.append(weakref.ref(loop))
        for thread in [coro.spawn(coro.sleep_relative, 0.001) for _ in range(COUNT)]:
            thread.join()
        coro.spawn(coro.wait)
        coro.yield_slice()

    coro.run(main)
    assert dead(watched)


def test_the_collector_sees_references_of_unstarted_and_ended_coros():
    def work(thing):
        coro.yield_slice()
        return thing

    def main():
        thing = Thing()
        thread = coro.spawn(work, thing)
        waiting = coro.new(work, thing)
        assert any(thing in group for group in gc.get_referents(waiting) if isinstance(group, tuple))
        assert thread.join() is thing
        assert thing in gc.get_referents(thread)
        assert gc.is_tracked(thread)

    coro.run(main)


def test_frozen_objects():
    """The script runs in its own process, because `gc.unfreeze` would affect the objects of pytest's process."""
    out = run_script(
        None,
        """
        import gc
        from grapeshot import coro

        def work(number):
            cycle = [number]
            cycle.append(cycle)
            for step in range(5):
                coro.yield_slice()
                gc.freeze() if step % 2 else gc.unfreeze()
                gc.collect()
            return cycle[1][1][0]

        def main():
            return [co.join() for co in [coro.spawn(work, number) for number in range(5)]]

        gc.set_threshold(1)
        print(coro.run(main))
        gc.unfreeze()
        gc.collect()
        print(coro.get_live_coros(), coro.stack_info()["bytes_saved"])
        """,
        flags=("-W", "error", "-X", "faulthandler"),
    )
    assert out.split("\n")[:2] == ["[0, 1, 2, 3, 4]", "[] 0"]


def test_debugging_of_the_collector():
    """Coros that end in the middle of their work leave no uncollectable objects."""
    out = run_script(
        None,
        """
        import gc
        from grapeshot import coro

        def numbers():
            try:
                while True:
                    coro.yield_slice()
                    yield coro.current()
            finally:
                pass

        def work(number):
            kept = [coro.current()]
            for co in numbers():
                kept.append(kept)
                if number % 2 and len(kept) == 5:
                    raise ValueError(kept)

        def main():
            threads = [coro.spawn(work, number) for number in range(10)]
            for _ in range(10):
                coro.yield_slice()
            return [type(co.exception()).__name__ for co in threads if co.done()]

        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        print(coro.run(main))
        gc.set_debug(0)
        gc.collect()
        gc.garbage.clear()
        gc.collect()
        gc.collect()
        print(gc.garbage, sum(type(thing).__name__ == "Coro" for thing in gc.get_objects()))
        """,
        flags=("-W", "error", "-X", "faulthandler"),
    )
    assert out.split("\n")[:2] == [str(["ValueError"] * 5), "[] 0"]
