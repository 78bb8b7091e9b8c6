"""What coros synchronize with, and what interruptions leave behind: nothing."""

from __future__ import annotations

import random
import time

import pytest
from support import coro_is_available

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro


def turns(count=3):
    for _ in range(count):
        coro.yield_slice()


@pytest.mark.parametrize("kind", ["lock", "mutex", "semaphore"])
def test_one_at_a_time_and_in_order(kind):
    log = []

    def main():
        guard = getattr(coro, kind)()

        def work(number):
            with guard:
                log.append(("in", number))
                turns()
                log.append(("out", number))

        for thread in [coro.spawn(work, number) for number in range(5)]:
            thread.join()

    coro.run(main)
    assert log == [(what, number) for number in range(5) for what in ("in", "out")]


def test_a_mutex_is_recursive_and_a_lock_knows_its_holder():
    def main():
        mutex = coro.mutex()
        with mutex, mutex:
            assert not coro.spawn(mutex.try_acquire).join()
        assert coro.spawn(mutex.try_acquire).join()
        lock = coro.lock()
        lock.acquire()
        with pytest.raises(coro.LockError):
            coro.spawn(lock.release).join()
        lock.release()
        with pytest.raises(coro.LockError):
            lock.release()

    coro.run(main)


def test_inverted_semaphore():
    def main():
        count = coro.inverted_semaphore()
        log = []

        def work():
            with count:
                turns()
                log.append("done")

        threads = [coro.spawn(work) for _ in range(3)]
        coro.yield_slice()
        count.block_till_zero()
        assert log == ["done"] * 3
        for thread in threads:
            thread.join()
        with pytest.raises(coro.LockError):
            count.release()

    coro.run(main)


def test_readers_share_and_writers_do_not():
    log = []

    def main():
        lock = coro.rw_lock()

        def read(number):
            lock.acquire_read()
            log.append(f"+r{number}")
            turns()
            log.append(f"-r{number}")
            lock.release_read()

        def write(number):
            lock.acquire_write()
            log.append(f"+w{number}")
            turns()
            log.append(f"-w{number}")
            lock.release_write()

        jobs = [(read, 1), (read, 2), (write, 1), (read, 3)]
        for thread in [coro.spawn(function, number) for function, number in jobs]:
            thread.join()

    coro.run(main)
    assert log == ["+r1", "+r2", "-r1", "-r2", "+w1", "-w1", "+r3", "-r3"]


def test_condition_variable():
    def main():
        condition = coro.condition_variable()
        threads = [coro.spawn(condition.wait) for _ in range(4)]
        coro.yield_slice()
        assert len(condition) == 4
        assert condition.wake_one("first")
        assert threads[0].join() == "first"
        assert condition.wake_n(1, "second") == 1
        assert threads[1].join() == "second"
        assert condition.raise_all(KeyError) == 2
        for thread in threads[2:]:
            with pytest.raises(KeyError):
                thread.join()
        assert not condition.wake_one()

    coro.run(main)


def test_event():
    def main():
        event = coro.event()
        threads = [coro.spawn(event.wait) for _ in range(3)]
        coro.yield_slice()
        assert not any(thread.done() for thread in threads)
        event.set()
        assert [thread.join() for thread in threads] == [True] * 3
        assert event.wait()
        event.clear()
        assert not event.is_set()

    coro.run(main)


def test_fifo_and_mailbox():
    def main():
        fifo = coro.fifo()
        threads = [coro.spawn(fifo.pop) for _ in range(3)]
        coro.yield_slice()
        for number in range(5):
            fifo.push(number)
        assert [thread.join() for thread in threads] == [0, 1, 2]
        assert (len(fifo), fifo.pop(), fifo.pop()) == (2, 3, 4)
        box = coro.mailbox()
        box.send("a")
        box.send("b")
        assert box.pop_all() == ["a", "b"]

    coro.run(main)


def test_channel():
    def main():
        channel = coro.channel()
        senders = [coro.spawn(channel.send, number) for number in range(3)]
        coro.yield_slice()
        assert channel.balance == 3
        assert [channel.receive() for _ in range(3)] == [0, 1, 2]
        for sender in senders:
            sender.join()
        receivers = [coro.spawn(channel.receive) for _ in range(2)]
        coro.yield_slice()
        assert channel.balance == -2
        channel.send("x")
        assert receivers[0].join() == "x"
        channel.send_exception(LookupError, "y")
        with pytest.raises(LookupError, match="y"):
            receivers[1].join()

        def produce():
            for number in range(4):
                channel.send(number)
            channel.close()

        coro.spawn(produce)
        assert list(channel) == [0, 1, 2, 3]
        with pytest.raises(coro.ClosedError):
            channel.send(1)

    coro.run(main)


def test_thread_local():
    def main():
        local = coro.ThreadLocal()

        def work(number):
            assert not hasattr(local, "value")
            local.value = number
            turns()
            return local.value

        threads = [coro.spawn(work, number) for number in range(4)]
        assert [thread.join() for thread in threads] == [0, 1, 2, 3]
        assert not hasattr(local, "value")

    coro.run(main)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", ["lock", "mutex", "semaphore", "rw_lock"])
def test_interruptions_leak_no_permit(kind, seed):
    """Coros that hold the guard, wait for it or were just granted it are interrupted at random, and it ends free."""
    rng = random.Random(seed)

    def main():
        guard = getattr(coro, kind)()
        acquire = guard.acquire_write if kind == "rw_lock" else guard.acquire
        release = guard.release_write if kind == "rw_lock" else guard.release
        inside = []

        def work():
            for _ in range(20):
                try:
                    acquire()
                except coro.Interrupted:
                    continue
                try:
                    assert not inside
                    inside.append(1)
                    turns(rng.randrange(3))
                except coro.Interrupted:
                    pass
                finally:
                    inside.clear()
                    release()

        threads = [coro.spawn(work) for _ in range(6)]
        turns(1)  # one that has not begun would end by an interruption
        while not all(thread.done() for thread in threads):
            victim = rng.choice(threads)
            if not victim.done() and rng.random() < 0.5:
                victim.interrupt()
            turns(1)
        for thread in threads:
            thread.join()
        acquire()
        release()

    coro.run(main)


@pytest.mark.parametrize("seed", range(10))
def test_interruptions_lose_no_item(seed):
    """Every item that was pushed is popped once, however the consumers are interrupted."""
    rng = random.Random(seed)
    popped = []

    def main():
        fifo = coro.fifo()

        def consume():
            while True:
                try:
                    item = fifo.pop()
                except coro.Interrupted:
                    continue
                if item is None:
                    return
                popped.append(item)

        consumers = [coro.spawn(consume) for _ in range(4)]
        turns(1)
        for number in range(200):
            fifo.push(number)
            for consumer in rng.sample(consumers, 2):
                consumer.interrupt()
            turns(rng.randrange(2))
        for _ in consumers:
            fifo.push(None)
        for consumer in consumers:
            consumer.join()

    coro.run(main)
    assert sorted(popped) == list(range(200))


@pytest.mark.parametrize("way", ["interrupt", "schedule"])
def test_the_timer_of_a_sleep_that_is_over_wakes_nobody(way):
    """The sleep ends early in the turn in which its timer becomes due: the timer must not end the next wait."""
    woken = []

    def sleeper():
        try:
            coro.sleep_relative(0.01)
        except coro.Interrupted:
            pass
        woken.append(coro.wait())

    def main():
        thread = coro.spawn(sleeper)
        coro.yield_slice()
        thread.interrupt() if way == "interrupt" else coro.schedule(thread)
        due = time.monotonic() + 0.02
        while time.monotonic() < due:
            pass
        turns(5)
        assert woken == []
        coro.schedule(thread, "asked for")
        thread.join()

    coro.run(main)
    assert woken == ["asked for"]
