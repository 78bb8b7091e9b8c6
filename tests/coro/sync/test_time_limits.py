"""Time limits of waits: `timeout=` and `block=False` of each method that waits, and a fifo with a maximum size."""

from __future__ import annotations

import asyncio
import math
import queue

import pytest
from support import coro_is_available, spawn_blocked

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro


def busy(kind, *args):
    """Return a primitive for which a coro must wait. If it is a lock, another coro holds it."""
    one = getattr(coro, kind)(*args)
    if kind in ("lock", "mutex"):
        holder = spawn_blocked(lambda: (one.acquire(), coro.wait()))
        assert one.has_lock(holder)
    elif kind == "rw_lock":
        spawn_blocked(lambda: (one.acquire_write(), coro.wait()))
    elif kind in ("semaphore", "inverted_semaphore"):
        one.acquire()
    elif args:
        one.push("first")
    return one


# For each method that waits: the arguments of `busy`, the method's name, the method's arguments, and its result or
# exception at a timeout.
WAITS = {
    "semaphore": (("semaphore",), "acquire", (), False),
    "lock": (("lock",), "acquire", (), False),
    "mutex": (("mutex",), "acquire", (), False),
    "rw_lock read": (("rw_lock",), "acquire_read", (), False),
    "rw_lock write": (("rw_lock",), "acquire_write", (), False),
    "condition_variable": (("condition_variable",), "wait", (), "TimeoutError"),
    "event": (("event",), "wait", (), False),
    "inverted_semaphore": (("inverted_semaphore",), "block_till_zero", (), False),
    "fifo": (("fifo",), "pop", (), "Empty"),
    "fifo all": (("fifo",), "pop_all", (), []),
    "full fifo": (("fifo", 1), "push", ("second",), "Full"),
    "channel receive": (("channel",), "receive", (), "TimeoutError"),
    "channel send": (("channel",), "send", ("value",), "TimeoutError"),
    "future get": (("future",), "get", (), "TimeoutError"),
    "future wait": (("future",), "wait", (), False),
}


@pytest.mark.parametrize("what", WAITS)
@pytest.mark.parametrize("limit", [{"block": False}, {"timeout": 0}, {"timeout": -1}, {"timeout": 0.001}], ids=str)
def test_a_wait_ends_when_its_time_is_over(what, limit):
    made, method, args, late = WAITS[what]

    def main():
        one = busy(*made)
        before = repr(one)
        wait = getattr(one, method)
        for _ in range(3):
            if isinstance(late, str):
                with pytest.raises(getattr(coro, late)) as caught:
                    wait(*args, **limit)
                assert isinstance(caught.value, TimeoutError)
                assert ("0.001 seconds" in str(caught.value)) == (limit == {"timeout": 0.001})
            else:
                assert wait(*args, **limit) == late
        # The coro has left the primitive's queue of waiting coros, and the primitive's state is unchanged.
        assert repr(one) == before

    coro.run(main)


@pytest.mark.parametrize("what", WAITS)
def test_waiting_outside_of_coros_is_refused_and_polling_works(what):
    made, method, args, late = WAITS[what]
    if made[0] in ("lock", "mutex", "rw_lock"):
        pytest.skip("only a coro can hold a lock")

    async def main():
        wait = getattr(busy(*made), method)
        with pytest.raises(coro.YieldFromMain):
            wait(*args, timeout=10)
        if isinstance(late, str):
            with pytest.raises(getattr(coro, late)):
                wait(*args, block=False)
        else:
            assert wait(*args, block=False) == late

    import grapeshot

    grapeshot.run(main())


@pytest.mark.parametrize("what", WAITS)
def test_a_limit_must_be_a_time(what):
    made, method, args, _ = WAITS[what]

    def main():
        wait = getattr(busy(*made), method)
        with pytest.raises(ValueError, match="NaN"):
            wait(*args, timeout=math.nan)
        with pytest.raises(TypeError):
            wait(*args, timeout="1")
        with pytest.raises(
            TypeError, match=rf"{method.replace('receive', '(pop|receive)').replace('send', '(push|send)')}\("
        ):
            wait(*args, until=1)

    coro.run(main)


def test_a_value_that_arrives_in_time_is_returned():
    def main():
        fifo = coro.fifo(1)
        for limit in ({"timeout": 60}, {"timeout": math.inf}, {"timeout": None}, {"block": True, "timeout": 60}):
            popper = spawn_blocked(fifo.pop, **limit)
            fifo.push("item", **limit)
            assert popper.join() == "item"
        semaphore = coro.semaphore()
        assert semaphore.acquire(1, False)
        acquirer = spawn_blocked(semaphore.acquire, 1, True, 60)
        semaphore.release()
        assert acquirer.join() is True
        event = coro.event()
        waiter = spawn_blocked(event.wait, 60)  # the timeout is the first argument, as in threading.Event
        event.set()
        assert waiter.join() is True
        assert event.wait(block=False)
        condition = coro.condition_variable()
        waiter = spawn_blocked(condition.wait, 60)
        condition.wake_one("value")
        assert waiter.join() == "value"

    coro.run(main)


def test_a_grant_in_time_is_kept_though_the_coro_runs_late():
    def main():
        fifo = coro.fifo()
        popper = coro.spawn(fifo.pop, timeout=0.05)
        coro.yield_slice()
        fifo.push("item")  # the coro is woken, but its timer is due before it runs
        loop = asyncio.get_running_loop()
        end = loop.time() + 0.06
        while loop.time() < end:
            pass
        assert popper.join() == "item"

    coro.run(main)


def test_timers_leave_nothing_behind():
    """The timer of a finished wait must not end a later wait."""

    def main():
        fifo = coro.fifo()
        event = coro.event()

        def work():
            for _ in range(100):
                fifo.pop(timeout=0.1)
            return event.wait(60)

        worker = coro.spawn(work)
        for number in range(100):
            fifo.push(number)
            coro.yield_slice()
        coro.sleep_relative(0.15)
        assert not worker.done()
        event.set()
        assert worker.join()

    coro.run(main)


def test_a_waiter_that_gives_up_lets_later_ones_pass():
    def main():
        semaphore = coro.semaphore(1)
        many = spawn_blocked(semaphore.acquire, 2, timeout=0.05)
        few = spawn_blocked(semaphore.acquire, 1)
        assert not few.done()
        assert many.join() is False
        assert few.join() is True

        lock = coro.rw_lock()
        lock.acquire_read()
        writer = spawn_blocked(lock.acquire_write, timeout=0.05)
        reader = spawn_blocked(lock.acquire_read)
        assert not reader.done()
        assert writer.join() is False
        assert reader.join() is True

    coro.run(main)


def test_a_lock_that_the_coro_already_holds():
    def main():
        lock = coro.lock()
        assert lock.acquire(block=False)
        assert not lock.acquire(block=False)
        with pytest.raises(coro.LockError):
            lock.acquire(timeout=1)
        mutex = coro.mutex()
        assert mutex.acquire(timeout=1)
        assert mutex.acquire(False)
        mutex.release()
        mutex.release()
        assert not mutex.locked()

    coro.run(main)


# ------------------------------------------------------------------ a fifo with a limit


def test_a_full_fifo_makes_pushers_wait_in_order():
    def main():
        fifo = coro.fifo(maxsize=2)
        assert fifo.maxsize == 2
        pushers = [coro.spawn(fifo.push, number) for number in range(6)]
        coro.yield_slice()
        assert (len(fifo), [pusher.done() for pusher in pushers]) == (2, [True] * 2 + [False] * 4)
        assert repr(fifo) == "<fifo 2 of 2 items, 4 waiting>"
        assert fifo.pop() == 0
        assert len(fifo) == 2  # the item of the first waiting pusher entered the queue before that coro ran
        assert [fifo.pop() for _ in range(5)] == [1, 2, 3, 4, 5]
        for pusher in pushers:
            pusher.join()
        assert repr(fifo) == "<fifo 0 of 2 items>"

    coro.run(main)


def test_a_producer_and_a_consumer():
    log = []

    def produce(fifo):
        for number in range(50):
            fifo.push(number)
            assert len(fifo) <= 3

    def main():
        fifo = coro.fifo(3)
        producer = coro.spawn(produce, fifo)
        for _ in range(50):
            log.append(fifo.pop())
        producer.join()

    coro.run(main)
    assert log == list(range(50))


def test_a_pusher_that_is_interrupted_has_not_pushed():
    def main():
        fifo = coro.fifo(1)
        fifo.push("first")
        pusher = spawn_blocked(fifo.push, "never")
        other = spawn_blocked(fifo.push, "second")
        pusher.interrupt()
        assert pusher.join() is None
        assert pusher.cancelled()
        assert [fifo.pop(), fifo.pop()] == ["first", "second"]
        other.join()
        assert len(fifo) == 0

    coro.run(main)


def test_a_pusher_that_is_interrupted_too_late_has_pushed_and_ends_at_its_next_wait():
    log = []

    def push(fifo):
        fifo.push("second")
        log.append("pushed")
        coro.yield_slice()
        log.append("went on")

    def main():
        fifo = coro.fifo(1)
        fifo.push("first")
        pusher = spawn_blocked(push, fifo)
        assert fifo.pop() == "first"  # the pusher's item is in the queue, and the pusher is ready to run
        pusher.interrupt()
        pusher.shutdown()
        assert pusher.join() is None
        assert log == ["pushed"]
        assert isinstance(pusher._exception, coro.Interrupted)
        assert not isinstance(pusher._exception, coro.Shutdown)
        assert fifo.pop() == "second"

    coro.run(main)


def test_pop_all_keeps_items_that_are_pushed_later():
    def main():
        fifo = coro.fifo(2)
        pushers = [coro.spawn(fifo.push, number) for number in range(5)]
        coro.yield_slice()
        assert fifo.pop_all() == [0, 1]
        assert fifo.pop_all() == [2, 3]
        assert fifo.pop_all() == [4]
        assert fifo.pop_all(block=False) == []
        for pusher in pushers:
            pusher.join()

    coro.run(main)


@pytest.mark.parametrize("maxsize", [0, None, -1])
def test_no_limit(maxsize):
    def main():
        fifo = coro.fifo(maxsize)
        for number in range(1000):
            fifo.push(number)
        return fifo.maxsize, len(fifo)

    assert coro.run(main) == (0, 1000)


def test_a_larger_limit_wakes_pushers():
    class Growing(coro.fifo):
        pass

    def main():
        fifo = Growing(1)
        pushers = [coro.spawn(fifo.push, number) for number in range(3)]
        coro.yield_slice()
        fifo.__init__(maxsize=3)
        assert len(fifo) == 3
        for pusher in pushers:
            pusher.join()
        with pytest.raises(TypeError, match="maxsize"):
            Growing(1, 2)

    coro.run(main)


def test_the_errors_are_queues_errors():
    fifo = coro.fifo(1)
    with pytest.raises(queue.Empty):
        fifo.pop(block=False)
    fifo.push(1)
    with pytest.raises(queue.Full, match="the fifo was full"):
        fifo.push(2, block=False)
