"""The synchronization primitives of coros. An interrupted wait must leave no trace in the primitive."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
from support import coro_is_available, spawn_blocked

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro


def yield_slices(count=3):
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
                yield_slices()
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
                yield_slices()
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
            yield_slices()
            log.append(f"-r{number}")
            lock.release_read()

        def write(number):
            lock.acquire_write()
            log.append(f"+w{number}")
            yield_slices()
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


def test_fifo():
    def main():
        fifo = coro.fifo()
        threads = [coro.spawn(fifo.pop) for _ in range(3)]
        coro.yield_slice()
        for number in range(5):
            fifo.push(number)
        assert [thread.join() for thread in threads] == [0, 1, 2]
        assert (len(fifo), fifo.pop(), fifo.pop()) == (2, 3, 4)
        fifo.push("a")
        fifo.push("b")
        assert fifo.pop_all() == ["a", "b"]

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
            yield_slices()
            return local.value

        threads = [coro.spawn(work, number) for number in range(4)]
        assert [thread.join() for thread in threads] == [0, 1, 2, 3]
        assert not hasattr(local, "value")

    coro.run(main)


def test_several_permits_at_once_and_in_order():
    def main():
        semaphore = coro.semaphore(2)
        many = spawn_blocked(semaphore.acquire, 3)
        few = spawn_blocked(semaphore.acquire, 1)
        # Two permits are available, but the coro that waits for three came first.
        assert not semaphore.try_acquire()
        assert (semaphore.avail, many.done(), few.done()) == (2, False, False)
        semaphore.release()
        assert many.join()
        assert not few.done()
        semaphore.release(3)
        assert few.join()
        assert semaphore.avail == 2
        # If the first waiter is interrupted, the next one continues.
        many, few = spawn_blocked(semaphore.acquire, 5), spawn_blocked(semaphore.acquire, 2)
        many.interrupt()
        few.join(10)
        assert many.join() is None
        assert many.cancelled()
        assert semaphore.avail == 0
        for wrong in (0, -1):
            for method in (semaphore.acquire, semaphore.try_acquire, semaphore.release):
                with pytest.raises(ValueError, match="1 or more"):
                    method(wrong)
        semaphore.release(value=2)
        with semaphore as same:
            assert same is semaphore
            assert semaphore.avail == 1

    coro.run(main)


def test_a_holder_that_would_wait_for_itself():
    def main():
        lock = coro.lock()
        assert lock.acquire()
        with pytest.raises(coro.LockError, match="itself"):
            lock.acquire()
        assert not lock.try_acquire()
        assert lock.has_lock()
        assert lock.has_lock(coro.current())
        assert not coro.spawn(lock.has_lock).join()
        lock.release()
        assert not lock.has_lock()
        holder = coro.spawn(lock.acquire)
        holder.join()
        # The holder ended without releasing the lock. The lock stays locked, as it does when a thread ends.
        assert lock.has_lock(holder)
        with pytest.raises(coro.TimeoutError):
            coro.with_timeout(0.001, lock.acquire)

    coro.run(main)


def test_what_lock_and_unlock_of_a_mutex_return():
    def main():
        mutex = coro.mutex()
        assert mutex.lock() is False  # False: the call did not wait
        assert mutex.lock() is False
        waiter = spawn_blocked(lambda: (mutex.lock(), mutex.unlock()))
        assert mutex.unlock() is False  # False: this coro still holds the mutex
        assert mutex.unlock() is True  # True: another coro has got the mutex
        assert waiter.join() == (True, False)
        with pytest.raises(coro.LockError):
            mutex.unlock()

    coro.run(main)


def test_an_rw_lock_is_recursive():
    def main():
        lock = coro.rw_lock()
        lock.read_lock()
        writer = spawn_blocked(lambda: (lock.write_lock(), lock.write_unlock()))
        reader = spawn_blocked(lambda: (lock.read_lock(), lock.read_unlock()))
        # The writer waits, and so does the reader after it. A coro that already reads may read again.
        lock.read_lock()
        assert not coro.spawn(lock.try_acquire_read).join()
        with pytest.raises(coro.LockError, match="itself"):
            lock.acquire_write()
        assert not lock.try_acquire_write()
        lock.read_unlock()
        yield_slices()
        assert not (writer.done())
        assert not (reader.done())
        lock.read_unlock()
        writer.join(10)
        reader.join(10)
        lock.write_lock()
        lock.write_lock()
        lock.read_lock()
        lock.write_unlock()
        waiters = [spawn_blocked(lambda: (lock.read_lock(), yield_slices(2), lock.read_unlock())) for _ in range(2)]
        assert not any(waiter.done() for waiter in waiters)
        # After this second write_unlock() the coro holds the lock only for reading, so the waiters may read, too.
        lock.write_unlock()
        for waiter in waiters:
            waiter.join(10)
        with pytest.raises(coro.LockError):
            lock.write_unlock()
        with pytest.raises(coro.LockError):
            coro.spawn(lock.read_unlock).join()
        lock.read_unlock()
        assert lock.try_acquire_write()

    coro.run(main)


def test_readers_behind_a_writer_that_is_interrupted_go_on():
    def main():
        lock = coro.rw_lock()
        lock.acquire_read()
        writer = spawn_blocked(lock.acquire_write)
        readers = [spawn_blocked(lock.acquire_read) for _ in range(2)]
        writer.interrupt()
        for reader in readers:
            reader.join(10)
        lock.release_read()
        # If a waiter is interrupted after it was granted the lock, the next waiter gets the lock.
        other = coro.rw_lock()
        other.acquire_write()
        first, second = spawn_blocked(other.acquire_write), spawn_blocked(other.acquire_read)
        other.release_write()
        first.interrupt()
        second.join(10)

    coro.run(main)


def test_a_wake_up_of_an_interrupted_coro_goes_to_the_next():
    def main():
        condition = coro.condition_variable()
        first, second, third = [spawn_blocked(condition.wait) for _ in range(3)]
        assert condition.wake_one("value")
        first.interrupt()
        assert second.join(10) == "value"
        # wake_all wakes only the coros that wait when it is called.
        assert condition.wake_all("all") == 1
        later = coro.spawn(condition.wait)
        third.interrupt()
        yield_slices()
        assert not later.done()
        assert len(condition) == 1
        later.shutdown()
        assert len(condition) == 0

    coro.run(main)


def test_raise_all_with_a_class_and_with_an_instance():
    def main():
        condition = coro.condition_variable()
        threads = [spawn_blocked(condition.wait) for _ in range(2)]
        assert condition.raise_all(KeyError) == 2
        first, second = [thread.join for thread in threads]
        errors = []
        for join in (first, second):
            with pytest.raises(KeyError) as caught:
                join()
            errors.append(caught.value)
        assert errors[0] is not errors[1]
        error = KeyError("one")
        thread = spawn_blocked(condition.wait)
        assert condition.raise_all(error) == 1
        with pytest.raises(KeyError) as caught:
            thread.join()
        assert caught.value is error
        thread = spawn_blocked(condition.wait)
        for wrong in ("text", int):
            with pytest.raises(TypeError):
                condition.raise_all(wrong)
        condition.wake_all()
        thread.join()

    coro.run(main)


def test_a_fifo_is_emptied_at_once():
    def main():
        fifo = coro.fifo()
        reader = spawn_blocked(fifo.pop_all)
        for number in range(3):
            fifo.push(number)
        assert reader.join() == [0, 1, 2]
        assert len(fifo) == 0
        fifo.push("x")
        assert fifo.pop() == "x"

    coro.run(main)


def test_an_interrupted_waiter_is_not_granted_the_permit():
    """The interruption comes before the release, so the next waiter gets the permit at once."""

    def main():
        semaphore = coro.semaphore(0)
        first, second = [spawn_blocked(semaphore.acquire) for _ in range(2)]
        first.interrupt()
        semaphore.release()
        assert second.join(10)
        assert first.join() is None
        assert first.cancelled()
        assert semaphore.avail == 0

    coro.run(main)


def test_a_pending_cancellation_comes_before_the_wait():
    def main():
        fifo = coro.fifo()
        me = coro.current()

        def work():
            coro.current().cancel("now")
            with pytest.raises(asyncio.CancelledError):
                fifo.pop()
            coro.current().uncancel()
            fifo.push("item")
            return fifo.pop()

        assert coro.spawn(work).join() == "item"
        assert me is coro.current()

    coro.run(main)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", ["lock", "mutex", "semaphore", "rw_lock"])
def test_interruptions_leak_no_permit(kind, seed):
    """Interrupt coros while they wait for the guard, have just got it or hold it. In the end the guard is free."""
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
                    yield_slices(rng.randrange(3))
                except coro.Interrupted:
                    pass
                finally:
                    inside.clear()
                    release()

        threads = [coro.spawn(work) for _ in range(6)]
        yield_slices(1)  # let every coro begin: a coro that is interrupted earlier ends without running
        while not all(thread.done() for thread in threads):
            victim = rng.choice(threads)
            if not victim.done() and rng.random() < 0.5:
                victim.interrupt()
            yield_slices(1)
        for thread in threads:
            thread.join()
        acquire()
        release()

    coro.run(main)


@pytest.mark.parametrize("seed", range(10))
def test_interruptions_lose_no_item(seed):
    """Every pushed item is popped exactly once, however the consumers are interrupted."""
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
        yield_slices(1)
        for number in range(200):
            fifo.push(number)
            for consumer in rng.sample(consumers, 2):
                consumer.interrupt()
            yield_slices(rng.randrange(2))
        for _ in consumers:
            fifo.push(None)
        for consumer in consumers:
            consumer.join()

    coro.run(main)
    assert sorted(popped) == list(range(200))


@pytest.mark.parametrize("way", ["interrupt", "schedule"])
def test_the_timer_of_a_finished_sleep_wakes_no_coro(way):
    """The sleep is ended early, and its timer is due before the coro runs. The timer must not end the next wait."""
    woken = []

    def sleeper():
        try:
            coro.sleep_relative(0.05)
        except coro.Interrupted:
            pass
        woken.append(coro.wait())

    def main():
        thread = coro.spawn(sleeper)
        coro.yield_slice()
        thread.interrupt() if way == "interrupt" else coro.schedule(thread)
        due = time.monotonic() + 0.06
        while time.monotonic() < due:
            pass
        yield_slices(5)
        assert woken == []
        coro.schedule(thread, "asked for")
        thread.join()

    coro.run(main)
    assert woken == ["asked for"]
