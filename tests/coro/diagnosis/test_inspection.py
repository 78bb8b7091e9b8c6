"""Tools that inspect coros: where they are, how they failed, when they yield, where their stacks are."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref

import pytest
from support import coro_is_available

import grapeshot

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import _core, coro


def inner():
    coro.wait()


def outer():
    inner()


def places(text):
    """Return the names of the functions in a text that `coro.where` or `coro.compact_traceback` has returned. All of
    them must be functions of this file.
    """
    parts = text.split("|")
    assert all(part.startswith(f"{__file__}:") for part in parts)
    return [part.split(" ")[1].rstrip(":") for part in parts]


# ------------------------------------------------------------------ where coros are


def test_where_follows_a_coro_through_its_life():
    async def main():
        co = coro.new(outer)
        assert coro.where(co) == "new"
        co.start()
        assert coro.where(co) == "ready"
        others = [coro.spawn(outer) for _ in range(3)]
        await asyncio.sleep(0)
        for each in [co, *others]:
            assert places(coro.where(each)) == ["outer", "inner"]
        line = inner.__code__.co_firstlineno + 1
        assert coro.where(co).endswith(f"{__file__}:{line} inner")
        assert await coro.spawn(lambda: coro.where(coro.current())) == "running"
        coro.schedule(co)
        await co
        assert coro.where(co) == "done"
        for other in others:
            coro.schedule(other)

    grapeshot.run(main())


def test_where_all_names_the_live_coros():
    def main():
        threads = [coro.spawn(outer, name=f"number {number}") for number in range(3)]
        coro.yield_slice()
        everything = coro.where_all()
        assert set(everything) == {coro.current().id, *(thread.id for thread in threads)}
        for number, thread in enumerate(threads):
            name, text = everything[thread.id]
            assert name == f"number {number}"
            assert places(text) == ["outer", "inner"]
        assert everything[coro.current().id][1] == "running"

    coro.run(main)


def test_where_keeps_nothing_alive():
    class Thing:
        pass

    def hold():
        thing = Thing()
        refs.append(weakref.ref(thing))
        coro.wait()

    refs: list = []

    async def main():
        co = coro.spawn(hold)
        other = coro.spawn(inner)
        await asyncio.sleep(0)
        text = coro.where(co)
        for each in (co, other):
            coro.schedule(each)
            await each
        assert refs[0]() is None
        return text

    assert places(grapeshot.run(main())) == ["hold"]


def test_a_traceback_in_one_line():
    def fail():
        raise ValueError("lost\nand found")

    def call():
        fail()

    assert coro.compact_traceback() == ""
    try:
        call()
    except ValueError as exc:
        text = coro.compact_traceback()
        assert coro.compact_traceback(exc) == text
    assert "\n" not in text
    assert text.endswith("fail: ValueError: lost and found")
    assert places(text.removesuffix("ValueError: lost and found")) == ["test_a_traceback_in_one_line", "call", "fail"]
    assert coro.compact_traceback(KeyError()) == "KeyError"

    class Unspeakable(Exception):
        def __str__(self):
            raise LookupError

    assert coro.compact_traceback(Unspeakable()) == "Unspeakable: <exception str() failed>"


# ------------------------------------------------------------------ the exception notifier


@pytest.fixture
def notified():
    """Set a notifier and yield the list of its calls."""
    calls: list = []

    def notify(co, exc):
        calls.append((co, exc, coro.current() is co, coro.compact_traceback()))

    before = coro.set_exception_notifier(notify)
    yield calls
    coro.set_exception_notifier(before)


@pytest.fixture
def reported(monkeypatch):
    """Return the list to which each call of a loop's default exception handler appends its context."""
    contexts: list = []
    monkeypatch.setattr(grapeshot.Loop, "default_exception_handler", lambda _loop, context: contexts.append(context))
    return contexts


def fail(text):
    raise ValueError(text)


def test_the_notifier_gets_exceptions_of_the_coro(notified, reported):
    def main():
        co = coro.spawn(fail, "lost")
        other = coro.spawn(fail, "seen")
        with pytest.raises(ValueError, match="seen"):
            other.join()
        return co, other

    co, other = coro.run(main)
    assert [(call[0], str(call[1]), call[2]) for call in notified] == [(co, "lost", True), (other, "seen", True)]
    assert notified[0][3].endswith("fail: ValueError: lost")
    assert isinstance(co.exception(), ValueError)
    del co, other
    notified.clear()
    gc.collect()
    assert reported == []  # the notifier got the exceptions, so they are not reported again


def test_the_notifier_does_not_hear_of_interruptions_and_exits(notified):
    def main():
        threads = [coro.spawn(coro.wait) for _ in range(3)]
        coro.yield_slice()
        threads[0].shutdown()
        threads[1].interrupt(5)
        threads[2].cancel()
        for thread in threads:
            assert thread.join() is None
            assert thread.cancelled()

    coro.run(main)
    for kind in (SystemExit, KeyboardInterrupt):

        def leave(kind=kind):
            raise kind

        with pytest.raises(kind):
            coro.run(leave)
    assert notified == []


def test_the_notifier_gets_an_exception_that_was_raised_in_a_coro_before_its_first_run(notified):
    def main():
        co = coro.spawn(int)
        co.raise_exception(LookupError("early"))
        with pytest.raises(LookupError):
            co.join()

    coro.run(main)
    assert [str(call[1]) for call in notified] == ["early"]


def test_a_notifier_may_wait(reported):
    log = []

    def notify(co, exc):
        coro.sleep_relative(0.001)
        coro.yield_slice()
        log.append(sys.exc_info()[1] is exc)

    before = coro.set_exception_notifier(notify)
    try:

        def main():
            threads = [coro.spawn(fail, str(number)) for number in range(3)]
            for number, thread in enumerate(threads):
                with pytest.raises(ValueError, match=str(number)):
                    thread.join()

        coro.run(main)
    finally:
        assert coro.set_exception_notifier(before) is notify
    assert log == [True] * 3
    assert reported == []


def test_a_notifier_that_raises_is_reported(reported):
    def notify(co, exc):
        raise LookupError("broken notifier")

    before = coro.set_exception_notifier(notify)
    try:

        def main():
            co = coro.spawn(fail, "own")
            with pytest.raises(ValueError, match="own"):
                co.join()

        coro.run(main)
        with pytest.raises(SystemExit):
            coro.set_exception_notifier(lambda *_: sys.exit(3))
            coro.run(fail, "replaced")
    finally:
        coro.set_exception_notifier(before)
    assert [str(context["exception"]) for context in reported] == ["broken notifier"]
    with pytest.raises(TypeError):
        coro.set_exception_notifier(5)


def test_without_a_notifier_an_unretrieved_exception_is_reported_once(reported):
    assert coro.set_exception_notifier(None) is None

    def main():
        coro.spawn(fail, "lost")
        seen = coro.spawn(fail, "seen")
        coro.yield_slice()
        assert str(seen.exception()) == "seen"

    coro.run(main)
    gc.collect()
    assert [str(context["exception"]) for context in reported] == ["lost"]


# ------------------------------------------------------------------ selfishness: the operations (acts) before a yield


def acts_until_a_yield(act, most=100):
    """Return how many calls of `act` come before the first one that yields, or None if none of `most` calls yields."""
    other_ran = []
    coro.yield_slice()
    coro.spawn(other_ran.append, 1)
    for count in range(most):
        act()
        if other_ran:
            return count
    return None


def test_selfish_acts_are_counted():
    def main():
        act = _core._coro_act
        assert acts_until_a_yield(act) == 4
        assert coro.set_selfishness(2) == 4
        try:
            assert acts_until_a_yield(act) == 2
            me = coro.current()
            me.set_max_selfish_acts(7)
            assert acts_until_a_yield(act) == 7
            me.set_max_selfish_acts(0)
            assert acts_until_a_yield(act) == 0
            me.set_max_selfish_acts(None)
            assert acts_until_a_yield(act) == 2
            for wrong in (-1, 65535):
                with pytest.raises(ValueError, match="number of operations"):
                    coro.set_selfishness(wrong)
                with pytest.raises(ValueError, match="number of operations"):
                    me.set_max_selfish_acts(wrong)
            # A yield resets the count.
            act()
            act()
            coro.yield_slice()
            assert acts_until_a_yield(act) == 2
        finally:
            assert coro.set_selfishness(4) == 2

    coro.run(main)
    assert _core._coro_act() is None  # an act has no effect outside a coro


def test_an_act_delivers_an_interruption():
    def main():
        me = coro.current()
        me.set_max_selfish_acts(0)
        me.cancel()
        with pytest.raises(asyncio.CancelledError):
            _core._coro_act()
        assert me.uncancel() == 0

    coro.run(main)


def test_awaiting_a_done_future_is_an_act():
    async def nothing():
        pass

    def main():
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        done.set_result(5)
        assert acts_until_a_yield(lambda: coro.await_(done)) == 4
        assert acts_until_a_yield(lambda: coro.await_(nothing())) == 4
        # Every call that suspends the coro resets the count.
        for _ in range(3):
            coro.await_(nothing())
        coro.await_(asyncio.sleep(0))
        assert acts_until_a_yield(lambda: coro.await_(nothing())) == 4
        with pytest.raises(coro.TimeoutError), coro.timeout(0.001):
            while True:
                coro.await_(nothing())
        with pytest.raises(coro.TimeoutError), coro.timeout(0.001):
            while True:
                assert coro.await_(done) == 5

    coro.run(main)


# ------------------------------------------------------------------ stacks


def test_stack_info_of_a_coro(eviction):
    deep = 40

    def dig(level):
        return dig(level - 1) if level else coro.wait()

    async def main():
        coro.set_stack_slots(1)
        new = coro.new(outer)
        assert new.stack_info() == {
            "kind": "shared",
            "where": "none",
            "slot": None,
            "bytes_used": 0,
            "frame_bytes": 0,
        }
        first, second = coro.spawn(outer), coro.spawn(outer)
        own = coro.spawn(outer, stack="own")
        digger = coro.spawn(dig, deep)
        await asyncio.sleep(0)
        infos = [co.stack_info() for co in (first, second, own, digger)]
        assert [info["kind"] for info in infos] == ["shared", "shared", "own", "shared"]
        assert [info["slot"] for info in infos] == [0, 0, None, 0]
        last = "evicted" if eviction == "always" else "in place"
        assert [info["where"] for info in infos] == ["evicted", "evicted", "in place", last]
        assert all(0 < info["bytes_used"] < 100_000 for info in infos)
        assert infos[3]["frame_bytes"] > infos[0]["frame_bytes"] > 0
        running = await coro.spawn(lambda: coro.current().stack_info())
        assert running["where"] == "in place"
        assert 0 < running["bytes_used"] < 100_000
        assert running["frame_bytes"] > 0
        for co in (first, second, own, digger):
            coro.schedule(co)
            await co
        assert first.stack_info()["where"] == "none"

    grapeshot.run(main())


def test_stack_info_of_the_thread(eviction):
    def main():
        before = coro.stack_info()
        threads = [coro.spawn(outer) for _ in range(10)]
        coro.yield_slice()
        during = coro.stack_info()
        assert during["live"] == before["live"] + 10
        assert during["started"] == before["started"] + 10
        assert during["switches"] >= before["switches"] + 10
        assert during["evictions"] > before["evictions"]
        assert during["bytes_copied"] > before["bytes_copied"]
        assert during["bytes_saved"] > 0
        assert during["evicts_always"] == (eviction == "always")
        for thread in threads:
            coro.schedule(thread)
            thread.join()
        assert coro.stack_info()["live"] == before["live"]

    live = coro.stack_info()["live"]
    coro.run(main)
    after = coro.stack_info()
    assert after["live"] == live == 0
    assert after["bytes_saved"] == 0


@pytest.mark.parametrize("count", [1, 2, 8])
def test_coros_use_all_stack_slots_that_were_set(count):
    def work(number):
        total = 0
        for step in range(20):
            coro.yield_slice()
            total += number * step
        return total

    def main():
        threads = [coro.spawn(work, number) for number in range(4 * count)]
        coro.yield_slice()
        slots = [thread.stack_info()["slot"] for thread in threads]
        return slots, [thread.join() for thread in threads]

    coro.set_stack_slots(count)
    slots, results = coro.run(main)
    assert set(slots) == set(range(count))
    assert results == [number * 190 for number in range(4 * count)]
    for wrong in (0, 4097):
        with pytest.raises(ValueError, match="slots"):
            coro.set_stack_slots(wrong)


# ------------------------------------------------------------------ names and ids


def test_names_and_ids():
    def main():
        named = coro.spawn(coro.wait, name="worker")
        plain = coro.spawn(coro.wait)
        assert named.name == named.get_name() == "worker"
        assert plain.name == f"coro {plain.id}"
        plain.set_name(5)
        assert plain.name == "5"
        assert plain.id > named.id
        assert coro.get_thread_by_id(named.id) is named
        assert coro.all_threads() == {co.id: co for co in (coro.current(), named, plain)}
        named.shutdown()
        plain.shutdown()
        coro.yield_slice()
        with pytest.raises(KeyError):
            coro.get_thread_by_id(named.id)

    coro.run(main)
