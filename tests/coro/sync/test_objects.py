"""The primitives in threads, callbacks and tasks; their attributes, subclasses and garbage collection."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import threading
import weakref

import pytest
from support import coro_is_available, spawn_blocked

import grapeshot

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro

KINDS = [
    "semaphore",
    "lock",
    "mutex",
    "rw_lock",
    "condition_variable",
    "fifo",
    "channel",
    "event",
    "inverted_semaphore",
]
# For each kind of primitive: a call that must wait if the primitive comes from `make`.
WAITS = {
    "semaphore": lambda one: one.acquire(),
    "lock": lambda one: one.acquire(),
    "mutex": lambda one: one.acquire(),
    "rw_lock": lambda one: one.acquire_write(),
    "condition_variable": lambda one: one.wait(),
    "fifo": lambda one: one.pop(),
    "channel": lambda one: one.receive(),
    "event": lambda one: one.wait(),
    "inverted_semaphore": lambda one: one.block_till_zero(),
}
# For each kind: a call that wakes a waiting coro. Locks are left out, because only the holder can release a lock.
WAKES = {
    "semaphore": lambda one: one.release(),
    "condition_variable": lambda one: one.wake_one(),
    "fifo": lambda one: one.push(1),
    "channel": lambda one: one.send(1),
    "event": lambda one: one.set(),
    "inverted_semaphore": lambda one: one.release(),
}
# Methods that change a primitive, but neither wait nor wake a coro.
CHANGES = {
    "semaphore": lambda one: one.try_acquire(),
    "event": lambda one: one.clear(),
    "inverted_semaphore": lambda one: one.acquire(),
}


def make(kind):
    """Return a primitive for which a coro has to wait. If it is a lock, the running coro holds it."""
    one = getattr(coro, kind)()
    if kind in ("semaphore", "lock", "mutex", "inverted_semaphore"):
        one.acquire()
    elif kind == "rw_lock":
        one.acquire_write()
    return one


# ---- which operations are allowed where


@pytest.mark.parametrize("kind", WAKES)
def test_callbacks_and_tasks_wake_coros_and_cannot_wait(kind):
    def main():
        one = make(kind)
        loop = asyncio.get_running_loop()
        refused = []

        def from_callback():
            with pytest.raises(coro.YieldFromMain):
                WAITS[kind](make(kind))
            refused.append(True)
            WAKES[kind](one)

        first = spawn_blocked(WAITS[kind], one)
        loop.call_soon(from_callback)
        first.join(10)

        async def task():
            WAKES[kind](one)

        if kind == "event":
            one.clear()
        elif kind == "inverted_semaphore":
            one.acquire()
        second = spawn_blocked(WAITS[kind], one)
        coro.await_(asyncio.create_task(task()))
        second.join(10)
        assert refused

    coro.run(main)


@pytest.mark.parametrize("kind", ["lock", "mutex", "rw_lock"])
def test_primitives_with_a_holder_are_for_coros_only(kind):
    one = getattr(coro, kind)()
    with pytest.raises(coro.YieldFromMain):
        WAITS[kind](one)


@pytest.mark.parametrize("kind", WAKES)
def test_another_thread_is_refused_and_changes_nothing(kind):
    def main():
        one = make(kind)
        waiter = spawn_blocked(WAITS[kind], one)
        before = repr(one)
        outcomes = coro.threads.run(try_all, one)
        assert outcomes == ["ScheduleError"] * len(outcomes)
        assert repr(one) == before
        assert not waiter.done()
        asyncio.get_running_loop().call_soon_threadsafe(WAKES[kind], one)
        waiter.join(10)

    def try_all(one):
        outcomes = []

        def attempt(function):
            try:
                function(one)
            except Exception as exc:
                outcomes.append(type(exc).__name__)
            else:
                outcomes.append("nothing")

        attempt(WAKES[kind])
        if kind in CHANGES:
            attempt(CHANGES[kind])
        # Calls in a coro of another loop are refused, too.
        coro.run(attempt, WAITS[kind])
        return outcomes

    coro.run(main)


def raised_in_thread(function):
    """Return what function() raises in a new thread, or None."""
    raised = []

    def run():
        try:
            function()
        except BaseException as exc:
            raised.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


USES = WAKES | {
    "lock": lambda one: one.try_acquire(),
    "mutex": lambda one: one.try_acquire(),
    "rw_lock": lambda one: one.try_acquire_write(),
}


@pytest.mark.parametrize("kind", USES)
def test_primitives_made_while_a_loop_runs_belong_to_its_thread_at_once(kind):
    def main():
        one = getattr(coro, kind)()
        if kind == "inverted_semaphore":
            one.value = 1
        use = USES[kind]
        for elsewhere in (lambda: use(one), lambda: coro.run(use, one)):
            assert "belongs to the thread" in str(raised_in_thread(elsewhere))
        # The thread of the loop may still use the primitive.
        if kind == "channel":
            coro.spawn(one.receive)
            coro.yield_slice()
        use(one)

    coro.run(main)


def test_a_primitive_made_by_a_task_belongs_to_its_thread():
    async def main():
        fifo = coro.fifo()
        assert "belongs to the thread" in str(raised_in_thread(lambda: coro.run(fifo.push, 1)))
        fifo.push(2)
        assert await coro.run_sync(fifo.pop) == 2

    grapeshot.run(main())


def test_primitives_made_before_any_loop_belong_to_the_first_thread_with_a_loop():
    one = coro.fifo()
    one.push("early")  # before any loop uses the fifo, the thread that made it may push
    refused = raised_in_thread(lambda: one.push(0))
    assert "belongs to the thread of the loop" in str(refused)

    def elsewhere():
        coro.run(one.push, 1)
        assert coro.run(one.pop_all) == ["early", 1]

    assert raised_in_thread(elsewhere) is None
    for use in (lambda: one.push(2), lambda: coro.run(one.push, 2)):
        with pytest.raises(coro.ScheduleError, match=r"fifo belongs to the thread .*: call loop\.call_soon_threadsafe"):
            use()
    assert len(one) == 0


def test_a_primitive_may_be_filled_before_its_loop_runs():
    one = coro.fifo()
    one.push(1)
    assert isinstance(raised_in_thread(lambda: one.push(2)), coro.ScheduleError)
    assert coro.run(one.pop) == 1
    assert isinstance(raised_in_thread(lambda: coro.run(one.push, 2)), coro.ScheduleError)


def test_a_primitive_outlives_the_loop_that_it_was_used_in():
    one = coro.semaphore(0)
    coro.run(one.release)
    coro.run(one.acquire)
    # The end of the loop shuts down the waiting coro, which then leaves the semaphore's queue.
    coro.run(spawn_blocked, one.acquire)
    one.release()
    assert one.avail == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_waiting_coro_cannot_be_scheduled_but_can_be_interrupted(kind):
    def main():
        one = make(kind)
        waiter = spawn_blocked(WAITS[kind], one)
        with pytest.raises(coro.ScheduleError, match="interrupted"):
            coro.schedule(waiter, "value")
        waiter.interrupt("out")
        assert waiter.join(10) is None
        assert waiter.cancelled()

    coro.run(main)


# ---- reprs and attributes


def test_repr():
    def main():
        semaphore = coro.semaphore(2)
        assert repr(semaphore) == "<semaphore 2 available>"
        semaphore.acquire(2)
        waiters = [spawn_blocked(semaphore.acquire) for _ in range(3)]
        assert repr(semaphore) == "<semaphore 0 available, 3 waiting>"
        semaphore.release(3)
        for waiter in waiters:
            waiter.join()
        lock = coro.lock()
        assert repr(lock) == "<lock unlocked>"
        with lock:
            assert repr(lock) == "<lock locked>"
        mutex = coro.mutex()
        with mutex:
            waiter = spawn_blocked(mutex.acquire)
            assert repr(mutex) == "<mutex locked, 1 waiting>"
        waiter.join()
        fifo = coro.fifo()
        fifo.push(1)
        assert repr(fifo) == "<fifo 1 items>"
        channel = coro.channel()
        waiter = spawn_blocked(channel.receive)
        assert repr(channel) == "<channel balance -1>"
        channel.close()
        assert repr(channel) == "<channel balance 0, closed>"
        with pytest.raises(coro.ClosedError):
            waiter.join()
        assert repr(coro.condition_variable()) == "<condition_variable 0 waiting>"
        event = coro.event()
        waiter = spawn_blocked(event.wait)
        assert repr(event) == "<event not set, 1 waiting>"
        event.set()
        assert repr(event) == "<event set>"
        waiter.join()
        readers = coro.rw_lock()
        assert repr(readers) == "<rw_lock unlocked>"
        readers.acquire_read()
        assert repr(readers) == "<rw_lock 1 reading>"
        readers.release_read()
        assert repr(coro.inverted_semaphore(2)) == "<inverted_semaphore 2 under way>"

    coro.run(main)


@pytest.mark.parametrize("kind", KINDS)
def test_names(kind):
    one = getattr(coro, kind)
    assert one.__name__ == kind
    assert one.__module__.startswith("grapeshot.coro")
    assert one.__doc__


@pytest.mark.parametrize("kind", KINDS)
def test_no_copies(kind):
    one = getattr(coro, kind)()
    if kind in ("rw_lock", "event", "inverted_semaphore"):
        one = one._waiters  # the native primitive that this one is built on
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError):
            pickle.dumps(one, protocol)
    for function in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError):
            function(one)


@pytest.mark.parametrize("kind", ["lock", "mutex", "condition_variable", "fifo", "channel", "rw_lock", "event"])
def test_unknown_arguments_are_refused(kind):
    with pytest.raises(TypeError):
        getattr(coro, kind)(*([1, 2] if kind == "fifo" else [1]))
    with pytest.raises(TypeError):
        getattr(coro, kind)(value=1)


def test_the_value_of_a_semaphore():
    assert [coro.semaphore().avail, coro.semaphore(3).avail, coro.semaphore(value=0).avail] == [1, 3, 0]
    assert int(coro.semaphore(5)) == 5
    with pytest.raises(ValueError, match="0 or more"):
        coro.semaphore(-1)
    for args, kwargs in [((1, 2), {}), ((1,), {"value": 1}), ((), {"wrong": 1}), (("x",), {})]:
        with pytest.raises(TypeError):
            coro.semaphore(*args, **kwargs)
    one = coro.semaphore(2**63 - 1)
    with pytest.raises(OverflowError):
        one.release()
    with pytest.raises(OverflowError):
        coro.semaphore(2**63)
    assert one.avail == 2**63 - 1
    with pytest.raises(AttributeError):
        one.avail = 1


@pytest.mark.parametrize("kind", KINDS)
def test_subclasses_and_weak_references(kind):
    class Own(getattr(coro, kind)):
        def __init__(self, label):
            super().__init__()
            self.label = label

    def use(one):
        if kind in ("semaphore", "inverted_semaphore"):
            one.acquire()
        waiter = spawn_blocked(WAITS[kind], one)
        WAKES[kind](one)
        waiter.join(10)

    one = Own(label="mine")
    assert one.label == "mine"
    assert repr(one).startswith("<Own ")
    ended = []
    weakref.finalize(one, ended.append, kind)
    if kind in WAKES:
        coro.run(use, one)
    del one
    gc.collect()
    assert ended == [kind]


def test_a_subclass_that_does_not_call_init():
    class Own(coro.semaphore):
        def __init__(self, *args):
            pass

    assert Own(1, 2, 3).avail == 1


# ---- the collector


def test_cycles_through_held_values_are_collected():
    def cycle(kind):
        one = getattr(coro, kind)()
        one_again = weakref.ref(one)
        if kind == "channel":
            # A value whose receiver was interrupted stays in the channel.
            receiver = spawn_blocked(one.receive)
            one.send([one])
            receiver.interrupt()
            assert receiver.join() is None
            assert receiver.cancelled()
        elif kind == "fifo":
            one.push([one])
        else:
            holder = coro.spawn(lambda: (one.acquire(), [one])[1])
            holder.join()
        return one_again

    def main():
        return [cycle(kind) for kind in ("fifo", "channel", "lock", "mutex")]

    references = coro.run(main)
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


def test_waiting_coros_are_not_collected():
    """Only the stack of a waiting coro refers to the fifo, but code that finds the fifo can still wake the coro."""

    class Found(coro.fifo):
        pass

    def main():
        waiter = spawn_blocked(lambda: Found().pop())
        gc.collect()
        (found,) = [one for one in gc.get_objects() if type(one) is Found]
        found.push("alive")
        del found
        return waiter.join(10)

    assert coro.run(main) == "alive"
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is Found]


def test_primitives_are_freed_however_deeply_they_are_nested():
    inner = None
    for _ in range(100_000):
        outer = coro.fifo()
        outer.push(inner)
        inner = outer
    reference = weakref.ref(inner)
    del inner, outer
    assert reference() is None


def test_items_are_released():
    class Item:
        pass

    def main():
        fifo, channel = coro.fifo(), coro.channel()
        items = [Item() for _ in range(5)]
        references = [weakref.ref(item) for item in items]
        for item in items[:2]:
            fifo.push(item)
        fifo.pop()
        sender = spawn_blocked(channel.send, items[2])
        sender.interrupt()
        assert sender.join() is None
        assert sender.cancelled()
        receiver = spawn_blocked(channel.receive)
        channel.send(items[3])
        receiver.join()
        del sender, receiver, item, items
        return fifo, references

    fifo, references = coro.run(main)
    gc.collect()
    assert [reference() is None for reference in references] == [True, False, True, True, True]
    del fifo
    assert references[1]() is None


def test_the_destructor_of_a_value_may_use_the_primitive_that_held_the_value():
    """The native code must not borrow the primitive while it frees a value: the destructor may use the primitive."""
    log = []

    class Item:
        def __init__(self, fifo):
            self.fifo = fifo

        def __del__(self):
            self.fifo.push("from a destructor")
            log.append(len(self.fifo))

    def main():
        fifo = coro.fifo()
        fifo.push(Item(fifo))
        consumer = spawn_blocked(lambda: [fifo.pop() and None, fifo.pop()])
        assert consumer.join(10) == [None, "from a destructor"]
        return fifo

    fifo = coro.run(main)
    assert len(fifo) == 0
    assert log


def test_thread_local_of_coros_threads_and_subclasses():
    class Own(coro.ThreadLocal):
        def __init__(self, label):
            self.label = label

        def show(self):
            return dict(self.__dict__)

    local = Own("outside")
    assert local.show() == {"label": "outside"}

    def main():
        assert local.show() == {}
        local.number = 1
        del local.number
        with pytest.raises(AttributeError):
            del local.number
        local.label = "inside"
        assert vars(local) == {"label": "inside"}
        return coro.threads.run(local.show)

    assert coro.run(main) == {}
    assert local.label == "outside"
    ended = []

    class Value:
        pass

    def short():
        local.value = Value()
        weakref.finalize(local.value, ended.append, True)

    coro.run(lambda: coro.spawn(short).join())
    gc.collect()
    assert ended == [True]
