"""Coros use each primitive at random and are interrupted at random; after each round, invariants must hold.

A driver coro starts workers, interrupts workers and uses the primitive, in random order and without letting the workers
run in between, so that grants and interruptions meet in every order. Then the driver lets all workers run until each of
them waits, and compares the primitive with the records of the test. COROS_SOAK=n makes the test n times as long. The
name of a failed test contains the seed.
"""

from __future__ import annotations

import asyncio
import os
import random

import pytest
from support import coro_is_available

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro

STEPS = 400 * int(os.environ.get("COROS_SOAK", "1"))
SEEDS = range(3)
WORKERS = 8


class Strange(Exception):
    """The exception for raise_exception and raise_all."""


class Sent(Exception):
    """The exception for send_exception and set_exception. In a channel its argument is the number that is sent."""


class Worker:
    """A coro that performs an action each time the driver starts it, and a record of what it waits for."""

    def __init__(self, bench, number):
        self.bench = bench
        self.number = number
        self.wants = None
        self.since = 0
        self.is_hit = False
        self.coro = coro.spawn(self.run, name=f"worker {number}")

    def run(self):
        while not self.bench.is_over:
            try:
                self.rest()
                self.bench.work(self)
            except (asyncio.CancelledError, coro.TimeoutError, Strange) as exc:
                self.bench.timeouts += isinstance(exc, coro.TimeoutError)
                while self.coro.cancelling():
                    self.coro.uncancel()
            finally:
                self.wants = None
                self.is_hit = False

    def rest(self):
        """Wait until the driver starts the worker again. Until then the worker holds what it has acquired."""
        coro.wait()

    def wait_in_queue(self, wait, *args, what=True, **limit):
        """Call `wait(*args, **limit)`, which waits for `what` in the queue that `Bench.queue_of` names. When the worker
        gets what it waited for, no earlier waiter of this queue may still wait. With a limit, False and [] mean that
        the worker got nothing.
        """
        self.wants = what
        self.since = self.bench.tick()
        result = wait(*args, **limit)
        if limit and (result is False or result == []):
            self.wants = None
            return result
        earlier = [other.number for other in self.bench.waiting() if other.since < self.since and self.is_behind(other)]
        assert not earlier, f"worker {self.number} was served before {earlier}"
        self.wants = None
        return result

    def is_behind(self, other):
        return self.bench.queue_of(self.wants) == self.bench.queue_of(other.wants)


class Bench:
    """The primitive under test, the actions of the workers, and the invariants. Each subclass tests one primitive."""

    def __init__(self, rng):
        self.rng = rng
        self.clock = 0
        self.is_over = False
        # The number of interruptions of workers that had been granted something but had not run yet.
        self.hits_in_flight = 0
        # The number of waits and of timeout blocks that reached their time limit.
        self.timeouts = 0
        self.set_up()
        self.workers = [Worker(self, number) for number in range(WORKERS)]

    def tick(self):
        self.clock += 1
        return self.clock

    def waiting(self):
        """Return the workers that are queued, in the order of their arrival."""
        workers = [worker for worker in self.workers if worker.wants is not None and worker.coro._status == "waiting"]
        return sorted(workers, key=lambda worker: worker.since)

    def granted(self):
        """Return the workers that got what they waited for and have not run since."""
        return [
            worker
            for worker in self.workers
            if worker.wants is not None and not worker.is_hit and worker.coro._status == "ready"
        ]

    def queue_of(self, what):
        """Return a name for the queue in which a worker waits for `what`."""
        return True

    def timeout(self):
        """Return a timeout block: usually without a limit, sometimes with one that expires at once."""
        return coro.timeout(self.rng.choice([None] * 9 + [0]))

    def limit(self):
        """Return arguments for a wait: usually no limit, sometimes one that ends at once, sometimes no wait at all."""
        return self.rng.choice([{}] * 8 + [{"timeout": 1e-9}] * 3 + [{"block": False}])

    def start(self):
        """Start a worker that waits in `rest`, if there is one."""
        idle = [worker for worker in self.workers if worker.coro._status == "waiting" and worker.wants is None]
        if idle:
            coro.schedule(self.rng.choice(idle).coro)

    def interrupt(self):
        """Interrupt a worker in a random way. Afterwards the worker waits in no queue."""
        granted = self.granted()
        worker = self.rng.choice(granted if granted and self.rng.random() < 0.7 else self.workers)
        if worker in granted:
            self.hits_in_flight += 1
        worker.is_hit = True
        self.before_interruption(worker)
        way = self.rng.randrange(4)
        if way == 0:
            worker.coro.interrupt(self.clock)
        elif way == 1:
            worker.coro.raise_exception(Strange)
        elif way == 2:
            worker.coro.shutdown()
        else:
            worker.coro.cancel("enough")
        assert worker not in self.waiting()
        self.after_interruption(worker)

    def settle(self):
        """Let the workers run until each of them waits."""
        for iteration in range(1000):
            coro.yield_slice()
            # Workers that were granted something in this iteration have not run since.
            if iteration < 10 and self.granted() and self.rng.random() < 0.4:
                self.interrupt()
            for worker in self.workers:
                if worker.coro.done():
                    worker.coro.result()
            if all(worker.coro._status == "waiting" for worker in self.workers):
                return
        raise AssertionError(f"these workers do not come to rest: {[worker.coro for worker in self.workers]}")

    def drive(self):
        loop = asyncio.get_running_loop()
        self.settle()
        for _ in range(STEPS):
            self.begin_step()
            for _ in range(self.rng.choice((1, 2, 3, 6))):
                choice = self.rng.random()
                if choice < 0.1 or (self.granted() and choice < 0.3):
                    self.interrupt()
                elif choice < 0.65:
                    self.start()
                elif choice < 0.75:
                    loop.call_soon(self.act)
                else:
                    self.act()
            self.settle()
            self.check()
        self.is_over = True
        for worker in self.workers:
            worker.coro.shutdown()
        for worker in self.workers:
            worker.coro.join()
        self.check_end()

    # Subclasses override these. act() runs in the driver, and as a callback of the loop.

    def set_up(self): ...

    def work(self, worker): ...

    def act(self): ...

    def begin_step(self): ...

    def before_interruption(self, worker): ...

    def after_interruption(self, worker): ...

    def check(self): ...

    def check_end(self): ...


class Semaphore(Bench):
    def set_up(self):
        self.semaphore = coro.semaphore(4)
        self.held = 0
        self.taken = 0

    def work(self, worker):
        count = self.rng.choice((1, 1, 2, 3))
        with self.timeout():
            if not worker.wait_in_queue(self.semaphore.acquire, count, what=count, **self.limit()):
                self.timeouts += 1
                return
            self.held += count
            try:
                worker.rest()
            finally:
                self.held -= count
                self.semaphore.release(count)

    def act(self):
        count = self.rng.choice((1, 2))
        if self.taken >= count and self.rng.random() < 0.5:
            self.taken -= count
            self.semaphore.release(count)
        elif self.semaphore.try_acquire(count):
            self.taken += count

    def check(self):
        assert self.semaphore.avail + self.held + self.taken == 4
        waiting = self.waiting()
        assert not waiting or waiting[0].wants > self.semaphore.avail, "a coro waits without need"

    def check_end(self):
        assert (self.semaphore.avail, self.held) == (4 - self.taken, 0)


class Lock(Bench):
    kind = "lock"

    def set_up(self):
        self.lock = getattr(coro, self.kind)()
        self.inside = None

    def work(self, worker):
        with self.timeout():
            if not worker.wait_in_queue(self.lock.acquire, **self.limit()):
                self.timeouts += 1
                return
            assert self.inside is None
            self.inside = worker
            try:
                self.hold(worker)
            finally:
                self.inside = None
                self.lock.release()

    def hold(self, worker):
        assert self.lock.has_lock()
        worker.rest()

    def check(self):
        assert self.lock.locked() == (self.inside is not None)
        assert self.inside or not self.waiting(), "a coro waits without need"

    def check_end(self):
        assert not self.lock.locked()


class Mutex(Lock):
    kind = "mutex"

    def hold(self, worker):
        with self.lock:
            assert self.lock.try_acquire()
            try:
                worker.rest()
            finally:
                self.lock.release()
        assert self.lock.has_lock()


class ReadersAndWriter(Bench):
    def set_up(self):
        self.lock = coro.rw_lock()
        self.readers = 0
        self.writers = 0

    def work(self, worker):
        with self.timeout():
            if self.rng.random() < 0.4:
                self.write(worker)
            else:
                self.read(worker)

    def read(self, worker):
        if not worker.wait_in_queue(self.lock.acquire_read, what="read", **self.limit()):
            self.timeouts += 1
            return
        self.readers += 1
        try:
            assert not self.writers
            worker.rest()
            assert self.lock.try_acquire_read()
            self.lock.release_read()
        finally:
            self.readers -= 1
            self.lock.release_read()

    def write(self, worker):
        if not worker.wait_in_queue(self.lock.acquire_write, what="write", **self.limit()):
            self.timeouts += 1
            return
        self.writers += 1
        try:
            assert (self.readers, self.writers) == (0, 1)
            worker.rest()
            assert self.lock.try_acquire_read()
            assert self.lock.try_acquire_write()
            self.lock.release_read()
            self.lock.release_write()
        finally:
            self.writers -= 1
            self.lock.release_write()

    def check(self):
        waiting = self.waiting()
        if waiting:
            assert self.writers or (self.readers and waiting[0].wants == "write"), "a coro waits without need"

    def check_end(self):
        assert self.lock.try_acquire_write()


class Fifo(Bench):
    def set_up(self):
        self.fifo = coro.fifo()
        self.pushed = 0
        self.popped = []

    def work(self, worker):
        with self.timeout():
            if self.rng.random() < 0.8:
                self.popped.append(worker.wait_in_queue(self.fifo.pop, **self.limit()))
            else:
                self.popped += worker.wait_in_queue(self.fifo.pop_all, **self.limit())

    def act(self):
        for _ in range(self.rng.choice((1, 1, 3))):
            self.fifo.push(self.pushed)
            self.pushed += 1

    def check(self):
        assert self.popped == list(range(len(self.popped))), "lost, duplicated or out of order"
        assert len(self.fifo) == self.pushed - len(self.popped)
        assert not (self.waiting() and len(self.fifo)), "a coro waits without need"

    def check_end(self):
        if len(self.fifo):
            self.popped += self.fifo.pop_all()
        assert self.popped == list(range(self.pushed))


class BoundedFifo(Bench):
    """A fifo whose push waits, too. If a push raises, nothing was pushed; if it returns, the value was pushed."""

    def set_up(self):
        self.fifo = coro.fifo(2)
        self.called = 0
        self.accepted = set()
        self.popped = []

    def queue_of(self, what):
        return what

    def work(self, worker):
        with self.timeout():
            choice = self.rng.random()
            if choice < 0.5:
                self.push(worker)
            elif choice < 0.9:
                self.popped.append(worker.wait_in_queue(self.fifo.pop, what="pop", **self.limit()))
            else:
                self.popped += worker.wait_in_queue(self.fifo.pop_all, what="pop", **self.limit())

    def push(self, worker):
        number = self.called = self.called + 1
        worker.wait_in_queue(self.fifo.push, number, what="push", **self.limit())
        self.accepted.add(number)

    def act(self):
        if self.rng.random() < 0.5:
            number = self.called = self.called + 1
            try:
                self.fifo.push(number, block=False)
            except coro.Full:
                assert self.fifo.maxsize == 2
            else:
                self.accepted.add(number)
        else:
            try:
                self.popped.append(self.fifo.pop(block=False))
            except coro.Empty:
                assert not len(self.fifo)

    def check(self):
        assert self.popped == sorted(set(self.popped)), "duplicated or out of order"
        assert len(self.fifo) <= 2
        assert len(self.fifo) == len(self.accepted) - len(self.popped)
        wants = {worker.wants for worker in self.waiting()}
        assert "pop" not in wants or not len(self.fifo), "a coro waits in pop() without need"
        assert "push" not in wants or len(self.fifo) == 2, "a coro waits in push() without need"

    def check_end(self):
        while len(self.fifo):
            self.popped += self.fifo.pop_all()
        assert self.popped == sorted(self.accepted)


class Channel(Bench):
    def set_up(self):
        self.channel = coro.channel()
        self.sent = 0
        self.accepted = set()
        self.withdrawn = set()
        self.received = []

    def queue_of(self, what):
        return what

    def work(self, worker):
        with self.timeout():
            if self.rng.random() < 0.5:
                self.send(worker)
            else:
                self.receive(worker)

    def send(self, worker):
        number = self.sent = self.sent + 1
        self.withdrawn.add(number)
        if self.rng.random() < 0.8:
            worker.wait_in_queue(self.channel.send, number, what="send", **self.limit())
        else:
            worker.wait_in_queue(self.channel.send_exception, Sent, number, what="send")
        self.withdrawn.remove(number)
        self.accepted.add(number)

    def receive(self, worker):
        try:
            number = worker.wait_in_queue(self.channel.receive, what="receive", **self.limit())
        except Sent as exc:
            number = exc.args[0]
        self.received.append(number)

    def count(self, what):
        return sum(worker.wants == what for worker in self.waiting())

    def before_interruption(self, worker):
        self.expected = self.channel.balance
        if worker in self.waiting():
            self.expected += 1 if worker.wants == "receive" else -1

    def after_interruption(self, worker):
        assert self.channel.balance == self.expected

    def check(self):
        assert self.received == sorted(set(self.received)), "duplicated or out of order"
        senders, receivers = self.count("send"), self.count("receive")
        # The number of values that stay in the channel because a receiver was interrupted after it had been woken. The
        # senders of these values have continued.
        left = self.channel.balance - senders + receivers
        surely = len(self.accepted.difference(self.received))
        # `withdrawn` has the numbers of all senders that wait or were interrupted. The value of an interrupted sender
        # may have been taken before.
        perhaps = len(self.withdrawn.difference(self.received)) - senders
        assert surely <= left <= surely + perhaps
        assert not (receivers and (senders or left)), "a coro waits without need"

    def check_end(self):
        while self.channel.balance:
            try:
                self.received.append(self.channel.receive())
            except Sent as exc:
                self.received.append(exc.args[0])
        assert self.received == sorted(set(self.received))
        assert self.accepted <= set(self.received) <= self.accepted | self.withdrawn


class Condition(Bench):
    def set_up(self):
        self.condition = coro.condition_variable()
        self.began = self.given = self.returned = 0

    def work(self, worker):
        with self.timeout():
            value = worker.wait_in_queue(self.condition.wait, **self.limit())
            assert value == "go"
            self.returned += 1

    def act(self):
        if self.rng.random() < 0.9:
            self.given += self.condition.wake_one("go")
        else:
            self.condition.raise_all(Strange)

    def begin_step(self):
        self.began, self.given, self.returned = self.clock, 0, 0

    def check(self):
        assert len(self.condition) == len(self.waiting())
        assert self.returned <= self.given
        if self.returned < self.given:
            # If a woken coro is interrupted before it runs, it passes the wake-up on to the next coro that waited
            # before this step. So a wake-up is lost only if there is none.
            assert not [worker for worker in self.waiting() if worker.since <= self.began]


class Event(Bench):
    def set_up(self):
        self.event = coro.event()

    def work(self, worker):
        with self.timeout():
            if not worker.wait_in_queue(self.event.wait, **self.limit()):
                self.timeouts += 1

    def act(self):
        if self.rng.random() < 0.5:
            self.event.set()
        else:
            self.event.clear()

    def check(self):
        assert not (self.event.is_set() and self.waiting()), "a coro waits without need"


class Future(Bench):
    """One future after the other, each set once."""

    def set_up(self):
        self.future = coro.future()
        self.values = 0

    def work(self, worker):
        future = self.future
        with self.timeout():
            if self.rng.random() < 0.5:
                if not worker.wait_in_queue(future.wait, what=future, **self.limit()):
                    self.timeouts += 1
                    return
                assert future.ready()
            try:
                assert worker.wait_in_queue(future.get, what=future, **self.limit()) == future.value
            except Sent as exc:
                assert exc is future.exception

    def queue_of(self, what):
        return what

    def act(self):
        if self.rng.random() < 0.7:
            self.values += 1
            self.future.set(self.values)
        else:
            self.future.set_exception(Sent())
            assert self.future.exception
        self.future = coro.future()

    def check(self):
        assert not any(worker.wants.ready() for worker in self.waiting()), "a coro waits without need"


class InvertedSemaphore(Bench):
    def set_up(self):
        self.count = coro.inverted_semaphore()
        self.own = 0

    def work(self, worker):
        with self.timeout():
            if self.own and self.rng.random() < 0.8:
                if not worker.wait_in_queue(self.count.block_till_zero, **self.limit()):
                    self.timeouts += 1
            else:
                with self.count:
                    self.own += 1
                    try:
                        worker.rest()
                    finally:
                        self.own -= 1

    def check(self):
        assert int(self.count) == self.own
        assert self.own or not self.waiting(), "a coro waits without need"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "kind",
    [
        Semaphore,
        Lock,
        Mutex,
        ReadersAndWriter,
        Fifo,
        BoundedFifo,
        Channel,
        Condition,
        Event,
        Future,
        InvertedSemaphore,
    ],
    ids=lambda kind: kind.__name__,
)
def test_interruptions_at_random_moments(kind, seed):
    def main():
        bench = kind(random.Random(seed))
        try:
            bench.drive()
        finally:
            bench.is_over = True  # now a worker that is cancelled ends
        return bench.hits_in_flight, bench.timeouts

    hits, timeouts = coro.run(main)
    assert hits >= STEPS // 100
    assert timeouts >= STEPS // 100
    assert coro.get_live_coros() == []
