"""Coros in several threads that run at the same time, and what the garbage collector of a free-threaded build must know
about suspended stacks. The tests run on every build, but find more errors without a GIL.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import queue
import random
import sys
import threading
import time
import weakref

import pytest
from support import coro_is_available, in_thread, run_script, together, until_in_coro

import grapeshot

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import _core, coro

THREADS = 4


@contextlib.contextmanager
def collecting():
    """Let another thread collect garbage all the time."""
    ended = threading.Event()

    def collect():
        while not ended.wait(0.001):
            gc.collect()

    thread = threading.Thread(target=collect)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def in_threads(function, count=THREADS):
    """Call function(number) in `count` threads at once. Return the results, or raise the first exception."""
    results: list = [None] * count

    def run(number):
        try:
            results[number] = function(number)
        except BaseException as exc:
            results[number] = exc

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


# ------------------------------------------------------------------ references that only a suspended frame holds


def test_a_function_that_only_a_suspended_frame_refers_to():
    """The frame's references to its function and its code are deferred: they are not in the reference counts."""

    def main():
        def begin(number):
            scope: dict = {"coro": coro, "number": number}
            exec("def wait_in():\n    coro.wait()\n    return helper(number)\ndef helper(n): return n * 2", scope)
            function, scope["wait_in"] = scope["wait_in"], None
            return function

        waiting = [coro.spawn(begin(number)) for number in range(50)]
        coro.yield_slice()
        for _ in range(3):
            gc.collect()
        in_thread(gc.collect)
        garbage = [exec(f"def f{n}(): return {n}", {}) for n in range(1000)]  # so that freed memory is used again
        del garbage
        for co in waiting:
            coro.schedule(co)
        return [co.join() for co in waiting]

    assert coro.run(main) == [number * 2 for number in range(50)]


def test_a_coro_that_only_its_own_frames_refer_to():
    """The inner frames borrow their argument, so the coro has more references than its reference count says."""
    ended: list = []

    def main():
        def leaf(co):
            coro.wait()
            ended.append(co.name)

        def mid(co):
            leaf(co)

        def top(co):
            mid(co)

        def begin():
            me = coro.current()
            top(me)

        references = [weakref.ref(coro.spawn(begin, name=f"n{number}")) for number in range(20)]
        coro.yield_slice()
        for _ in range(3):
            gc.collect()
        assert all(reference() is not None for reference in references)
        for reference in references:
            coro.schedule(reference())
        coro.yield_slice()

    coro.run(main)
    assert ended == [f"n{number}" for number in range(20)]


def test_references_on_the_c_stack():
    """While C code runs a special method of an object, the only reference to the object may be on the C stack."""

    class Owner:
        def __getattr__(self, name):
            coro.wait()
            return name

        def __len__(self):
            coro.wait()
            return 5

        def __lt__(self, other):
            coro.wait()
            return False

    def main():
        def attribute():
            return Owner().x

        def length():
            return len(Owner())

        def order():
            return sorted([Owner(), Owner()])

        waiting = [coro.spawn(function) for function in (attribute, length, order) * 10]
        coro.yield_slice()
        with collecting():
            while any(not co.done() for co in waiting):
                for co in waiting:
                    if co._status == "waiting":
                        coro.schedule(co)
                coro.sleep_relative(0.001)
        return [co.join() for co in waiting]

    results = coro.run(main)
    assert results[0::3] == ["x"] * 10
    assert results[1::3] == [5] * 10


def test_the_frames_of_the_thread_while_a_coro_runs():
    """While a coro runs, the collector does not see the frames that run the loop.

    So the coro's `tp_traverse` reports the references in these frames.
    """

    def run_with(function):
        # Only the frame of `run_with` refers to the lambda.
        return coro.run(eval("lambda: function()", {"function": function}))

    def work():
        for _ in range(20):
            gc.collect()
            coro.yield_slice()
        return 7

    assert run_with(work) == 7


# ------------------------------------------------------------------ critical sections


def test_a_list_that_a_coro_sorts_can_be_used_by_another_thread():
    """`list.sort` holds the lock of its list. A coro that waits in the key function must not keep that lock."""

    def main():
        numbers = list(range(10))
        random.shuffle(numbers)

        def key(number):
            coro.sleep_relative(0.001)
            return number

        sorting = coro.spawn(lambda: numbers.sort(key=key))
        coro.yield_slice()
        # The list is empty while it is being sorted.
        assert in_thread(len, numbers) == in_thread(numbers.copy).__len__() == 0
        sorting.join()
        return numbers

    assert coro.run(main) == list(range(10))


def test_a_coro_that_waits_inside_a_step_of_a_task():
    """A step of asyncio's task holds the task's lock. A coro that waits inside the step gives the lock up."""

    def main():
        tasks = []

        async def step():
            tasks.append(asyncio.current_task())
            coro.sleep_relative(0.05)
            return tasks[0].get_name()

        def run_loop():
            loop = asyncio.SelectorEventLoop()
            try:
                return loop.run_until_complete(step())
            finally:
                loop.close()

        co = coro.spawn(coro.call_blocking, run_loop)
        until_in_coro(lambda: tasks)
        assert in_thread(lambda: (repr(tasks[0])[:5], tasks[0].done(), tasks[0].cancelling())) == ("<Task", False, 0)
        assert not co.done()
        return co.join() == tasks[0].get_name()

    assert coro.run(main)


def test_locks_of_dicts_and_sets_across_waits():
    class Key:
        def __init__(self, value):
            self.value = value

        def __hash__(self):
            return 1

        def __eq__(self, other):
            coro.sleep_relative(0)
            return self.value == other.value

    def work(number):
        shared[Key(number)] = number
        return shared.get(Key(number))

    shared: dict = {}
    assert together(work, 8) == list(range(8))
    assert len(shared) == 8


# ------------------------------------------------------------------ several loops


def test_loops_with_coros_in_several_threads():
    def work(number):
        total = 0
        for step in range(200):
            coro.sleep_relative(0) if step % 5 else coro.yield_slice()
            total += step
        return total + number

    with collecting():
        results = in_threads(lambda _: together(work, 20))
    assert results == [[19900 + number for number in range(20)]] * THREADS


def test_sleeps_in_several_threads_end():
    """The timers of all threads fire at the same times."""

    def main():
        def sleeper():
            for _ in range(100):
                coro.sleep_relative(0.001)
            return True

        return [co.join() for co in [coro.spawn(sleeper) for _ in range(10)]]

    assert in_threads(lambda _: coro.run(main)) == [[True] * 10] * THREADS


def test_sockets_in_several_threads():
    def main():
        near, far = coro.socketpair()
        data = random.randbytes(100_000)

        def send():
            for start in range(0, len(data), 1000):
                near.sendall(data[start : start + 1000])
            near.close()

        sender = coro.spawn(send)
        received = b""
        while part := far.recv(4096):
            received += part
        sender.join()
        far.close()
        return received == data

    with collecting():
        assert in_threads(lambda _: coro.run(main)) == [True] * THREADS


@pytest.mark.parametrize("kind", ["thread_lock", "thread_rlock"])
def test_a_lock_of_coros_and_threads(kind):
    """The lock never has two holders at once, and every waiter gets its turn."""
    lock, count, inside = getattr(_core, kind)(), [0], [0]

    def work(times=100):
        for _ in range(times):
            with lock:
                inside[0] += 1
                assert inside[0] == 1
                before = count[0]
                if _core._coro_can_wait() and before % 7 == 0:
                    coro.yield_slice()
                count[0] = before + 1
                inside[0] -= 1

    def thread(number):
        if number % 2:
            work(500)
        else:
            together(lambda _: work(), 5)

    in_threads(thread)
    assert count[0] == THREADS * 500
    assert not lock.locked() if hasattr(lock, "locked") else True


def test_a_lock_with_timeouts_in_coros_and_threads():
    """A waiter's timeout may expire just when the waiter is granted the lock. The lock must not stay locked forever."""
    lock, count = _core.thread_lock(), [0]

    def work(number):
        own = random.Random(number)
        for _ in range(100):
            if lock.acquire(timeout=own.choice((0.0001, 0.001, 0.01))):
                try:
                    before = count[0]
                    if own.random() < 0.1 and _core._coro_can_wait():
                        coro.sleep_relative(0.0001)
                    assert count[0] == before
                    count[0] = before + 1
                finally:
                    lock.release()

    def thread(number):
        if number % 2:
            work(number)
        else:
            together(lambda inner: work(10 * number + inner), 5)

    in_threads(thread)
    assert lock.acquire(timeout=5)
    assert count[0] > 0


def test_a_queue_of_coros_and_threads():
    items = _core.thread_queue()
    each, got = 500, []

    def consume(_=0):
        found = []
        while (item := items.get()) is not None:
            found.append(item)
        got.append(found)

    def produce(number):
        for item in range(each):
            items.put((number, item))
            if item % 50 == 0 and _core._coro_can_wait():
                coro.yield_slice()

    def thread(number):
        match number:
            case 0:
                together(produce, 3)
            case 1:
                together(consume, 3)
            case 2:
                produce(3)
            case _:
                consume()

    threads = [threading.Thread(target=thread, args=(number,)) for number in range(4)]
    with collecting():
        for each_thread in threads:
            each_thread.start()
        threads[0].join(60)
        threads[2].join(60)
        for _ in range(4):
            items.put(None)
        for each_thread in threads:
            each_thread.join(60)
            assert not each_thread.is_alive()
    everything = [item for found in got for item in found]
    assert sorted(everything) == [(number, item) for number in range(4) for item in range(each)]
    for found in got:
        for number in range(4):
            ours = [item for source, item in found if source == number]
            assert ours == sorted(ours)


def test_interrupts_beside_grants():
    """If a coro is interrupted in its thread while another thread grants it the lock, the coro passes the lock on."""
    lock = _core.thread_lock()
    is_over = threading.Event()

    def hold():
        while not is_over.is_set():
            lock.acquire()
            lock.release()

    def main():
        def wait():
            while not is_over.is_set():
                try:
                    with lock:
                        coro.yield_slice()
                except coro.Interrupted:
                    pass

        waiting = [coro.spawn(wait) for _ in range(5)]
        for step in range(500):
            co = waiting[step % 5]
            if co._status == "waiting":
                co.interrupt(step)
            coro.yield_slice()
        is_over.set()
        for co in waiting:
            co.join()

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        coro.run(main)
    finally:
        is_over.set()
        thread.join(60)
    assert not thread.is_alive()
    assert lock.acquire(timeout=5)


def test_a_socket_that_another_thread_closes():
    def main():
        for _ in range(50):
            near, far = coro.socketpair()

            def wait(sock=near):
                try:
                    sock.recv(1)
                except (coro.ClosedError, OSError):
                    return True
                return False

            waiting = coro.spawn(wait)
            coro.yield_slice()
            closing = threading.Thread(target=near.close)
            closing.start()
            with coro.timeout(10):
                assert waiting.join()
            closing.join()
            far.close()
        return True

    with collecting():
        assert in_threads(lambda _: coro.run(main), 2) == [True, True]


def test_a_socket_that_is_closed_while_a_coro_begins_to_wait():
    """A thread closes the socket between the coro's attempt to read and its wait, or shortly before or after that."""
    sockets: queue.SimpleQueue = queue.SimpleQueue()

    def close():
        while (pair := sockets.get()) is not None:
            near, far = pair
            far.send(b"x")
            near.close()
            far.close()

    def read():
        near, far = coro.socketpair()
        sockets.put((near, far))
        try:
            near.recv(10)
        except OSError:
            pass
        coro.sleep_relative(0.001)  # must not be ended by an error of the previous wait
        return True

    def main():
        for _ in range(50):
            with coro.timeout(20):
                assert all(reader.join() for reader in [coro.spawn(read) for _ in range(10)])

    thread = threading.Thread(target=close)
    thread.start()
    try:
        coro.run(main)
    finally:
        sockets.put(None)
        thread.join()


def test_a_socket_that_two_threads_close():
    """The coro that waited gets a single ClosedError, even if a new socket gets the number of the closed descriptor."""

    def main():
        near, far = coro.socketpair()
        number = near.fileno()
        errors = []

        def read():
            for wait in (lambda: near.recv(1), lambda: coro.sleep_relative(0.05)):
                try:
                    wait()
                except coro.ClosedError as exc:
                    errors.append(exc)

        reader = coro.spawn(read)
        coro.yield_slice()
        in_thread(near.close)  # this blocks the loop, so the reader's wait ends only after the next line
        near.close()
        coro.yield_slice()
        others = [coro.socketpair() for _ in range(3)]
        assert number in [sock.fileno() for pair in others for sock in pair]
        waiting = [coro.spawn(sock.recv, 1) for pair in others for sock in pair]
        coro.yield_slice()
        reader.join()
        for pair in others:
            for sock in pair:
                sock.send(b"x")
        assert [co.join() for co in waiting] == [b"x"] * 6
        for sock in (far, *(sock for pair in others for sock in pair)):
            sock.close()
        return len(errors)

    assert coro.run(main) == 1


def test_the_last_reference_to_a_coro_in_another_thread():
    """Another thread drops the program's last references to new coros, ready coros and ended coros."""
    dropped: queue.SimpleQueue = queue.SimpleQueue()

    def drop():
        while dropped.get() is not None:
            pass

    def main():
        for number in range(300):
            co = coro.new(int)
            if number % 3:
                co.start()
            if number % 3 == 2:
                coro.yield_slice()
            dropped.put(co)
            del co
        coro.yield_slice()

    thread = threading.Thread(target=drop)
    thread.start()
    with collecting():
        coro.run(main)
    dropped.put(None)
    thread.join(60)
    assert not thread.is_alive()


def test_threads_that_end_with_coros():
    """Each thread runs a loop, closes it while two of its coros still wait, and ends."""

    def program(number):
        loop = grapeshot.new_event_loop()

        async def main():
            coro.spawn(coro.wait)
            coro.spawn(coro.sleep_relative, 100)
            await coro.run_sync(coro.yield_slice)

        loop.run_until_complete(main())
        loop.close()
        return True

    for _ in range(5):
        with collecting():
            assert in_threads(program) == [True] * THREADS


def test_names_and_states_from_other_threads():
    def main():
        waiting = [coro.spawn(coro.sleep_relative, 0.1 * random.random()) for _ in range(50)]

        def read():
            while any(not co.done() for co in waiting):
                for co in waiting:
                    assert co.name.startswith("coro ")
                    assert co._status in ("ready", "running", "waiting", "done")
                    assert "Coro" in repr(co)
            return [co.result() for co in waiting]

        reader = coro.threads.run(lambda: in_thread(read))
        return reader == [None] * 50

    assert coro.run(main)


def test_a_late_run_is_reported_when_it_ends(caplog):
    """A coro that has run for longer than the limit is reported when it yields, with or without a watchdog.

    (A watchdog may have reported it earlier, too.)
    """

    def main():
        before = coro.set_latency_warning(0.05, always=True)
        try:
            end = time.monotonic() + 0.3
            while time.monotonic() < end:
                pass
            coro.yield_slice()
        finally:
            coro.set_latency_warning(before)

    coro.run(main)
    assert "ran for 0." in caplog.text
    assert "without a yield" in caplog.text


@pytest.mark.skipif(sys.platform != "linux", reason="the test forks in a process with threads, and is meant for Linux")
def test_a_fork_beside_threads_with_coros():
    """The child collects garbage. It must not look at the stacks of threads that exist only in the parent."""
    out = run_script(
        None,
        """
        import gc, os, threading, time, warnings
        from grapeshot import coro

        warnings.simplefilter("ignore")
        ended = threading.Event()

        def busy():
            def main():
                def spin():
                    while not ended.is_set():
                        sum(range(100))
                        coro.yield_slice()
                for co in [coro.spawn(spin) for _ in range(5)]:
                    co.join()
            coro.run(main)

        threads = [threading.Thread(target=busy) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        for _ in range(10):
            pid = os.fork()
            if not pid:
                for _ in range(3):
                    others = [threading.Thread(target=gc.collect) for _ in range(3)]
                    for other in others:
                        other.start()
                    for other in others:
                        other.join()
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
        ended.set()
        for thread in threads:
            thread.join()
        print("done")
        """,
    )
    assert out.strip() == "done"
