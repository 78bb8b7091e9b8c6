"""The native locks that `coro.patch()` installs, between coros and real threads. The tests do not patch anything."""

from __future__ import annotations

import _thread
import asyncio
import gc
import random
import signal
import sys
import threading
import time
import weakref

import pytest
from support import coro_is_available, run_script, spawn_blocked

import grapeshot

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import _core, coro

KINDS = ["thread_lock", "thread_rlock"]


def make(kind):
    return getattr(_core, kind)()


def real(name):
    """Return a lock of the original type that `name` replaces. Tests compare the native lock with it."""
    return {"thread_lock": _thread.allocate_lock, "thread_rlock": _thread.RLock}[name]()


def in_real_thread(function):
    """Run a function in a real thread, outside any coro. Return its result or exception."""
    outcome = []

    def run():
        try:
            outcome.append(function())
        except Exception as exc:
            outcome.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return outcome[0]


def waiting_count(lock):
    """Return the number of waiters of the lock, according to its repr."""
    text = repr(lock)
    return int(text.partition("waiting=")[2].split()[0]) if "waiting=" in text else 0


# ---------------------------------------------------------------- the interface


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "arguments",
    [
        {"blocking": False, "timeout": 1},
        {"timeout": -2},
        {"timeout": float("nan")},
        {"timeout": 1e20},
        {"timeout": 2**70},
        {"timeout": _thread.TIMEOUT_MAX + 1},
        {"timeout": "1"},
        {"timeout": None},
        {"unknown": 1},
        {"timeout": -1.0},
        {"timeout": 0},
        {"blocking": 0},
    ],
    ids=str,
)
def test_acquire_treats_arguments_as_the_original_does(kind, arguments):
    def outcome(lock):
        try:
            return lock.acquire(**arguments)
        except Exception as exc:
            return type(exc)

    assert outcome(make(kind)) == outcome(real(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_interface(kind):
    lock, control = make(kind), real(kind)
    names = {name for name in dir(control) if not name.startswith("__") or name in ("__enter__", "__exit__")}
    assert names - {"acquire_lock", "release_lock", "locked_lock", "locked"} <= set(dir(lock))
    assert hasattr(lock, "locked") == (kind == "thread_lock" or sys.version_info >= (3, 14))
    assert repr(lock).startswith("<unlocked")
    assert " object " in repr(lock)
    with lock as entered:
        assert entered is True
        assert repr(lock).startswith("<locked")
    with pytest.raises(RuntimeError):
        lock.release()
    lock.acquire()
    lock._at_fork_reinit()
    assert lock.acquire(False)
    reference = weakref.ref(lock)
    del lock
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_of_the_type(kind):
    """Up to Python 3.14, ``RLock`` ignores its arguments."""

    def outcome(make_one):
        try:
            make_one(1)
        except Exception as exc:
            return type(exc)

    assert outcome(getattr(_core, kind)) is outcome(type(real(kind)))


def test_rlock_counts():
    lock = make("thread_rlock")
    assert lock._recursion_count() == 0
    assert not lock._is_owned()
    with pytest.raises(RuntimeError):
        lock._release_save()
    for count in range(1, 4):
        assert lock.acquire()
        assert lock._recursion_count() == count
    state = lock._release_save()
    assert in_real_thread(lambda: (lock.acquire(False), lock.release())) == (True, None)
    lock._acquire_restore(state)
    assert lock._recursion_count() == 3
    assert lock._is_owned()
    for _ in range(3):
        lock.release()
    with pytest.raises(RuntimeError):
        lock.release()


def test_rlock_keeps_coros_apart():
    lock = make("thread_rlock")

    def main():
        lock.acquire()
        other = spawn_blocked(lock.acquire)
        assert not other.done()
        assert waiting_count(lock) == 1
        assert coro.spawn(lock._is_owned).join() is False
        assert lock.acquire()
        lock.release()
        lock.release()
        return other.join()

    assert coro.run(main) is True
    assert lock._recursion_count() == 0


# ---------------------------------------------------------------- coros and threads


@pytest.mark.parametrize("kind", KINDS)
def test_coro_waits_for_a_real_thread_while_others_run(kind):
    lock = make(kind)
    ticks = []
    held, release = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            release.wait()

    def tick():
        while len(ticks) < 20:
            ticks.append(1)
            coro.sleep_relative(0.001)
        release.set()

    def main():
        ticker = coro.spawn(tick)
        with lock:
            assert len(ticks) == 20
        ticker.join()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    coro.run(main)
    thread.join()


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_that_waits_for_a_coro_of_its_own_loop_gets_an_error(kind):
    """If the task blocked the thread, the coro could never run again and release the lock."""
    lock = make(kind)

    def hold(release):
        with lock:
            coro.await_(release)

    async def main():
        release = asyncio.Future()
        holder = coro.spawn(hold, release, name="holder")
        await asyncio.sleep(0)
        for acquire in (lock.acquire, lock.__enter__):
            with pytest.raises(RuntimeError, match="deadlock: the lock is held by coro 'holder' of this thread"):
                acquire()
        # These calls return even if the lock is never released, so they raise no error.
        assert lock.acquire(False) is False
        assert lock.acquire(timeout=0.01) is False
        release.set_result(None)
        assert await coro.run_sync(lock.acquire)
        assert waiting_count(lock) == 0
        await holder

    grapeshot.run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_real_thread_waits_for_a_coro(kind):
    lock = make(kind)
    order = []

    def take():
        with lock:
            order.append("thread")

    def main():
        with lock:
            thread = threading.Thread(target=take)
            thread.start()
            while not waiting_count(lock):
                coro.sleep_relative(0.001)
            order.append("coro")
        return thread

    coro.run(main).join()
    assert order == ["coro", "thread"]


def test_first_come_first_served():
    """Coros and real threads get the lock in the order in which they asked for it."""
    lock = make("thread_lock")
    order = []

    def take(number):
        with lock:
            order.append(number)

    def main():
        lock.acquire()
        threads = []
        for number in range(10):
            if number % 2:
                coro.spawn(take, number)
            else:
                threads.append(threading.Thread(target=take, args=(number,)))
                threads[-1].start()
            while waiting_count(lock) <= number:
                coro.sleep_relative(0.0005)
        lock.release()
        while len(order) < 10:
            coro.sleep_relative(0.001)
        for thread in threads:
            thread.join()

    coro.run(main)
    assert order == list(range(10))


def test_coros_of_two_loops():
    """Each of two threads runs one coro. Both coros take the same lock many times, and yield while they hold it."""
    lock = make("thread_lock")
    counts = {0: 0, 1: 0}
    inside = []

    def work(number):
        for _ in range(200):
            with lock:
                inside.append(number)
                coro.yield_slice()
                assert inside.pop() == number
                assert not inside
            counts[number] += 1

    threads = [threading.Thread(target=coro.run, args=(work, number)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == {0: 200, 1: 200}


def test_anybody_may_release():
    lock = make("thread_lock")

    def main():
        lock.acquire()
        waiter = spawn_blocked(lock.acquire)
        threading.Thread(target=lock.release).start()
        assert waiter.join() is True
        return lock.locked()

    assert coro.run(main) is True
    lock.release()


# ---------------------------------------------------------------- limits and interruptions


def test_timeouts():
    lock = make("thread_lock")

    def main():
        lock.acquire()
        assert lock.acquire(timeout=0.01) is False
        assert lock.acquire(timeout=0) is False
        assert waiting_count(lock) == 0
        return in_real_thread(lambda: lock.acquire(timeout=0.01))

    assert coro.run(main) is False
    assert waiting_count(lock) == 0
    lock.release()
    assert lock.acquire(False)


@pytest.mark.parametrize("is_granted", [False, True])
def test_interrupted_waiter_leaves_nothing_behind(is_granted):
    lock = make("thread_lock")

    def main():
        lock.acquire()
        first = spawn_blocked(lock.acquire)
        second = spawn_blocked(lock.acquire)
        if is_granted:
            lock.release()  # the first waiter gets the lock, and has not run yet
        first.shutdown()
        first.join()
        assert waiting_count(lock) == (0 if is_granted else 1)
        if not is_granted:
            lock.release()
        return second.join()

    assert coro.run(main) is True
    assert lock.locked()
    assert waiting_count(lock) == 0


@pytest.mark.parametrize("kind", ["thread_lock", "thread_rlock"])
def test_acquire_restore_is_not_interrupted(kind):
    """Condition.wait() must return with the lock held, so the interruption is raised only at the next wait."""
    lock, levels = make(kind), 2 if kind == "thread_rlock" else 1
    seen = []

    def restore():
        for _ in range(levels):
            lock.acquire()
        state = lock._release_save()
        with lock_of_main:
            pass
        lock._acquire_restore(state)
        seen.append(lock.acquire(blocking=False) if kind == "thread_lock" else lock._recursion_count())
        try:
            coro.yield_slice()
        except coro.Interrupted as exc:
            seen.append(exc.args[0])
        for _ in range(levels):
            lock.release()

    lock_of_main = make("thread_lock")

    def main():
        lock_of_main.acquire()
        waiter = spawn_blocked(restore)
        lock.acquire()
        lock_of_main.release()
        coro.yield_slice()
        assert waiting_count(lock) == 1
        waiter.interrupt("now")
        coro.yield_slice()
        assert waiting_count(lock) == 1
        lock.release()
        waiter.join()

    coro.run(main)
    assert seen == [2 if kind == "thread_rlock" else False, "now"]


def test_signal_interrupts_the_main_thread():
    """A handler runs while the main thread waits, and its exception ends the wait."""
    output = run_script(
        None,
        """
        import signal, threading, time
        from grapeshot import _core, coro
        lock = _core.thread_lock()
        lock.acquire()
        handled = []
        def handle(*_):
            handled.append(1)
            if len(handled) == 2:
                raise KeyError("out")
        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        try:
            lock.acquire()
        except KeyError as exc:
            print(exc, len(handled), "waiting" in repr(lock))
        signal.setitimer(signal.ITIMER_REAL, 0)
        lock.release()
        print(lock.acquire(False))
        """,
    )
    assert output == "'out' 2 False\nTrue\n"


ALARM = """
import asyncio, _thread, signal, threading
from grapeshot import _core, coro

class Alarm(Exception):
    pass

def handle(*_):
    raise Alarm

signal.signal(signal.SIGALRM, handle)
"""


@pytest.mark.parametrize("make_lock", ["_core.thread_rlock", "_thread.RLock"])
def test_a_signal_during_acquire_restore(make_lock):
    """The exception of the signal handler is raised, and the lock is held as many times as before."""
    output = run_script(
        None,
        ALARM
        + f"""
lock = {make_lock}()
lock.acquire()
lock.acquire()
state = lock._release_save()
is_held, may_release = threading.Event(), threading.Event()

def hold():
    with lock:
        is_held.set()
        may_release.wait()

holder = threading.Thread(target=hold)
holder.start()
is_held.wait()
threading.Timer(1, may_release.set).start()
signal.setitimer(signal.ITIMER_REAL, 0.3)
try:
    lock._acquire_restore(state)
except Alarm:
    print("alarm")
lock.release()
print(lock._is_owned())
lock.release()
print(lock._is_owned())
""",
    )
    assert output == "alarm\nTrue\nFalse\n"


def test_a_signal_ends_a_deadlock_in_acquire_restore():
    """The real thread that holds the lock passes it to a coro. The coro cannot run, because a callback of the coro's
    thread is waiting for the same lock. When the signal handler raises its exception, `_acquire_restore` checks again
    who holds the lock, and finds the deadlock. It then raises the handler's exception, not the deadlock's error.
    """
    output = run_script(
        None,
        ALARM
        + """
lock = _core.thread_rlock()
may_release = threading.Event()

def hold():
    with lock:
        may_release.wait()

def begin():
    global state
    lock.acquire()
    state = lock._release_save()
    holder.start()
    while 'count=1' not in repr(lock):
        pass

def restore():
    threading.Timer(0.3, may_release.set).start()
    signal.setitimer(signal.ITIMER_REAL, 1)
    try:
        lock._acquire_restore(state)
    except Alarm:
        print("alarm")

def wait():
    with lock:
        print("held")

def main():
    coro.set_latency_warning(0)
    loop = asyncio.get_running_loop()
    loop.call_soon(begin)
    coro.yield_slice()
    waiter = coro.spawn(wait)
    coro.yield_slice()
    loop.call_soon(restore)
    waiter.join()

holder = threading.Thread(target=hold)
coro.run(main)
""",
    )
    assert output == "alarm\nheld\n"


# ---------------------------------------------------------------- storms


def test_storm_over_one_lock():
    """Real threads and the coros of two loops take one lock, with timeouts and interruptions. Only one of them holds
    it at a time, and no wake-up is lost.
    """
    lock = make("thread_lock")
    inside = [0]
    entered = [0]
    given_up = [0]

    def once(pause, rng):
        limit = rng.choice([-1, -1, 0, 0.0005])
        if not lock.acquire(timeout=limit):
            given_up[0] += 1
            return
        try:
            inside[0] += 1
            assert inside[0] == 1
            entered[0] += 1
            pause()
            assert inside[0] == 1
            inside[0] -= 1
        finally:
            lock.release()

    def real_thread(seed):
        rng = random.Random(seed)
        for _ in range(100):
            once(lambda: time.sleep(0.00005), rng)

    def pause():
        # A victim does not yield here, because an interruption would skip the line `inside[0] -= 1`.
        coro.yield_slice() if coro.current().name != "victim" else None

    def work(seed):
        rng = random.Random(seed)
        for _ in range(60):
            once(pause, rng)

    def victim(end):
        rng = random.Random(1)
        while not end:
            try:
                once(pause, rng)
                coro.yield_slice()
            except coro.Interrupted:
                pass

    def loop(seed):
        def main():
            end = []
            victims = [coro.spawn(victim, end, name="victim") for _ in range(3)]
            workers = [coro.spawn(work, seed * 100 + number) for number in range(5)]
            coro.yield_slice()  # let the victims begin, because an earlier interruption would end them
            while not all(worker.done() for worker in workers):
                for each in victims:
                    each.interrupt()
                coro.sleep_relative(0.001)
            for worker in workers:
                worker.join()
            end.append(True)
            for each in victims:
                each.join()

        coro.run(main)

    errors = []

    def guarded(function, seed):
        try:
            function(seed)
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=guarded, args=(real_thread, seed)) for seed in range(3)]
    threads += [threading.Thread(target=guarded, args=(loop, seed)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert inside == [0]
    assert entered[0] > 0
    assert given_up[0] > 0
    assert not lock.locked()
    assert waiting_count(lock) == 0


# ---------------------------------------------------------------- fork


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="this system has neither SIGALRM nor fork")
def test_waiters_of_the_parent_do_not_exist_in_the_child():
    """Even without `_at_fork_reinit`, a release in the child must not give the lock to a thread of the parent."""
    output = run_script(
        None,
        """
        import os, threading, time, warnings
        warnings.simplefilter("ignore")
        from grapeshot import _core, coro
        lock = _core.thread_lock()
        lock.acquire()
        thread = threading.Thread(target=lock.acquire)
        thread.start()
        while "waiting=1" not in repr(lock):
            time.sleep(0.001)
        pid = os.fork()
        if not pid:
            lock.release()
            os._exit(10 + lock.acquire(False))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        lock.release()
        thread.join()
        print(lock.locked())
        """,
    )
    assert output == "11\nTrue\n"
