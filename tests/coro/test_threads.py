"""Several threads, each with its own loop and coros: which state belongs to the thread, and which to the coro."""

from __future__ import annotations

import asyncio
import decimal
import shutil
import subprocess
import sys
import threading
import warnings
import weakref

import pytest
from support import coro_is_available, in_thread, run_script, together

import grapeshot

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import _core, coro

COUNT = 5


def in_threads(function, count):
    """Run function(number) for each number below `count`, each in its own thread, all at once. Return the results."""
    results = [None] * count

    def run(number):
        results[number] = function(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


# ---------------------------------------------------------------- several loops


def test_each_thread_has_its_own_results_and_counts(eviction):
    """Each thread has its own results and its own counts of switches and starts, although the interpreter switches
    between the threads very often.
    """

    def work(number):
        total = 0
        for item in sorted(range(20), key=lambda x: (coro.yield_slice(), -x)):
            total += item * number
        coro.sleep_relative(0.001)
        return total

    def thread(number):
        _core._coro_evict_always(eviction == "always")
        count = number + 2
        results = together(work, count)
        info = coro.stack_info()
        # The first coro starts once and waits for each of the others at most once: 1 to `count + 1` switches. Each of
        # the others waits 21 times and starts once.
        return results, info["started"], info["switches"] - 22 * count in range(1, count + 2), coro.get_live_coros()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        outcomes = in_threads(thread, 4)
    finally:
        sys.setswitchinterval(interval)
    for number, outcome in enumerate(outcomes):
        count = number + 2
        assert outcome == ([190 * x for x in range(count)], count + 1, True, [])


def test_coros_see_only_coros_of_their_thread():
    def main():
        return {co.id for co in coro.get_live_coros()}

    async def beside():
        waiting = [coro.spawn(coro.wait) for _ in range(COUNT)]
        await asyncio.sleep(0)
        ids = in_thread(coro.run, main)
        assert len(ids) == 1
        assert not ids & set(coro.all_threads())
        for co in waiting:
            coro.schedule(co)
            await co

    grapeshot.run(beside())


def test_a_coro_of_another_thread_is_refused():
    async def main():
        waiting = coro.spawn(coro.wait)
        idle = coro.new(int)
        await asyncio.sleep(0)

        def touch(function):
            with pytest.raises(coro.ScheduleError, match="thread"):
                in_thread(function)

        for function in (
            lambda: coro.schedule(waiting),
            waiting.shutdown,
            waiting.interrupt,
            lambda: waiting.raise_exception(KeyError),
            waiting.cancel,
            idle.start,
        ):
            touch(function)

        # Calls from a coro of the other thread are refused, too.
        def other():
            with pytest.raises(coro.ScheduleError):
                coro.schedule(waiting)
            with pytest.raises((coro.ScheduleError, RuntimeError)):
                waiting.join()
            return "refused"

        assert in_thread(coro.run, other) == "refused"
        # Any thread may read a coro's state. For everything else it must use call_soon_threadsafe.
        assert not in_thread(waiting.done)
        assert in_thread(lambda: repr(waiting)) == repr(waiting)
        loop = asyncio.get_running_loop()
        in_thread(loop.call_soon_threadsafe, coro.schedule, waiting, "value")
        assert await waiting == "value"

    grapeshot.run(main())


def test_awaiting_a_coro_of_another_loop_is_refused():
    async def main():
        waiting = coro.spawn(coro.wait)
        await asyncio.sleep(0)

        async def other():
            await waiting

        with pytest.raises(RuntimeError, match="different loop"):
            in_thread(grapeshot.run, other())
        coro.schedule(waiting)
        await waiting

    grapeshot.run(main())


def test_a_loop_that_goes_to_another_thread():
    """A coro runs only in the thread that made it. In another thread, the loop reports a RuntimeError and continues."""
    reported = []

    def work(log):
        log.append(threading.get_ident())
        coro.yield_slice()
        log.append(threading.get_ident())

    loop = grapeshot.new_event_loop()
    loop.set_exception_handler(lambda _loop, context: reported.append(type(context["exception"])))
    log: list = []
    made = []

    async def make():
        made.append(coro.spawn(work, log))

    loop.run_until_complete(make())
    in_thread(loop.run_until_complete, asyncio.sleep(0))
    assert reported == [RuntimeError]
    # A coro that is created in the other thread runs there.
    there: list = []

    async def elsewhere():
        await coro.spawn(work, there)
        return threading.get_ident()

    ident = in_thread(loop.run_until_complete, elsewhere())
    assert there == [ident, ident]
    loop.close()
    assert made[0].done()
    assert ident not in log


def test_one_loop_after_another_in_a_thread():
    def work(number):
        coro.yield_slice()
        return number, asyncio.get_running_loop()

    def thread(_):
        loops = []
        for _ in range(3):
            results = together(work, COUNT)
            assert [number for number, _ in results] == [*range(COUNT)]
            (loop,) = {loop for _, loop in results}
            assert loop.is_closed()
            loops.append(weakref.ref(loop))
        return coro.stack_info()["started"]

    assert in_threads(thread, 3) == [3 * (COUNT + 1)] * 3


def test_coros_use_threads_that_run_coros():
    """Coros hand work to real threads. Each of these threads runs a loop with a coro of its own."""

    def work(number):
        return coro.threads.run(coro.run, lambda: (coro.yield_slice(), threading.get_ident(), number))

    def main():
        here = threading.get_ident()
        results = [co.join() for co in [coro.spawn(work, number) for number in range(COUNT)]]
        assert here not in [ident for _, ident, _ in results]
        assert threading.get_ident() == here
        return [number for _, _, number in results]

    assert coro.run(main) == [*range(COUNT)]


# ---------------------------------------------------------------- data of threads and coros


def test_thread_locals_are_shared_by_coros():
    local = threading.local()

    def work(number):
        local.value = number
        coro.yield_slice()
        return local.value, threading.get_ident(), threading.current_thread()

    expected = (COUNT - 1, threading.get_ident(), threading.current_thread())
    assert together(work, COUNT) == [expected] * COUNT
    assert in_thread(lambda: hasattr(local, "value")) is False


def test_locals_of_coros():
    local = coro.ThreadLocal()

    def work(number):
        local.value = number
        coro.yield_slice()
        return local.value

    assert together(work, COUNT) == [*range(COUNT)]


def test_each_coro_has_its_own_decimal_context():
    def work(number):
        decimal.setcontext(decimal.Context(prec=number + 1))
        coro.yield_slice()
        first = decimal.Decimal(1) / 3
        with decimal.localcontext() as context:
            context.prec = 10 + number
            coro.yield_slice()
            second = decimal.Decimal(1) / 3
        coro.yield_slice()
        return len(str(first)), len(str(second)), decimal.getcontext().prec

    before = decimal.getcontext().prec
    assert together(work, COUNT) == [(number + 3, number + 12, number + 1) for number in range(COUNT)]
    assert decimal.getcontext().prec == before


def test_warnings_in_coros():
    """Warning filters belong to the process or, from 3.14 on with `-X context_aware_warnings=1`, to the context."""

    def work(number):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.warn(f"one of {number}", stacklevel=1)
        return [str(entry.message) for entry in caught]

    assert together(work, COUNT) == [[f"one of {number}"] for number in range(COUNT)]
    if sys.version_info < (3, 14):
        return
    out = run_script(
        None,
        """
        import warnings
        from grapeshot import coro

        def work(number):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                coro.yield_slice()
                warnings.warn(f"one of {number}")
                coro.yield_slice()
            return [str(entry.message) for entry in caught]

        print(coro.run(lambda: [co.join() for co in [coro.spawn(work, number) for number in range(3)]]))
        """,
        flags=("-X", "context_aware_warnings=1"),
    )
    assert out.strip() == "[['one of 0'], ['one of 1'], ['one of 2']]"


def test_a_real_lock_across_yields():
    """The lock keeps other threads out while its holder yields. Other coros of the holder's thread must not block on
    the lock, because the holder could not run then.
    """
    lock = threading.Lock()
    counts = {"value": 0}

    def work(_):
        for _ in range(20):
            while not lock.acquire(blocking=False):
                coro.yield_slice()
            before = counts["value"]
            coro.yield_slice()
            counts["value"] = before + 1
            lock.release()

    def thread(_):
        together(work, 3)

    in_threads(thread, 3)
    assert counts["value"] == 9 * 20


# ---------------------------------------------------------------- the end of the process, and refused calls


@pytest.mark.parametrize("state", ["busy", "waiting"])
def test_a_daemon_thread_with_coros_at_the_exit(state):
    out = run_script(
        None,
        f"""
        import threading
        from grapeshot import coro

        ready = threading.Event()

        def busy():
            while True:
                sorted(range(5), key=lambda x: coro.yield_slice() or x)
                ready.set()

        def waiting():
            ready.set()
            coro.wait()

        def main():
            for co in [coro.spawn({state}) for _ in range(5)]:
                co.join()

        threading.Thread(target=coro.run, args=(main,), daemon=True).start()
        ready.wait()
        print("leaving", flush=True)
        """,
        flags=("-W", "ignore", "-X", "faulthandler"),
    )
    assert out.strip() == "leaving"


def test_subinterpreters_are_refused():
    """The extension has one state per process, so another interpreter gets an ImportError."""
    out = run_script(
        None,
        """
        import os, sys
        try:
            import _interpreters as interpreters  # 3.13
        except ImportError:
            import _xxsubinterpreters as interpreters
        from grapeshot import coro

        code = '''if True:
            import os
            try:
                from grapeshot import coro
            except ImportError:
                os.write(1, b"refused ")
            else:
                os.write(1, b"imported ")
        '''

        def work():
            coro.yield_slice()
            ident = interpreters.create()
            interpreters.run_string(ident, code)
            coro.yield_slice()
            interpreters.destroy(ident)
            return coro.current().name

        def main():
            other = coro.spawn(lambda: [coro.yield_slice() for _ in range(5)])
            name = coro.spawn(work, name="beside").join()
            other.join()
            return name

        print(coro.run(main))
        """,
        flags=("-X", "faulthandler"),
    )
    assert out.split() == ["refused", "beside"]


CALLS = """
#include <pthread.h>
typedef void (*function)(void);
static void *work(void *argument) {
    for (int i = 0; i < 3; i++) ((function) argument)();
    return 0;
}
int call_in_thread(function f) {
    pthread_t thread;
    return pthread_create(&thread, 0, work, (void *) f) || pthread_join(thread, 0);
}
"""


def test_a_thread_that_c_code_made_has_coros_in_each_of_its_calls(tmp_path):
    """CPython makes a new thread state for each call from this C thread, and deletes it after the call."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    source, library = tmp_path / "calls.c", tmp_path / "calls.so"
    source.write_text(CALLS)
    subprocess.run([compiler, "-shared", "-fPIC", "-pthread", "-o", library, source], check=True, timeout=60)
    out = run_script(
        None,
        f"""
        import ctypes
        from grapeshot import coro

        calls = []

        def call():
            calls.append(coro.run(lambda: (coro.sleep_relative(0.001), coro.current().name)[0] is None))

        assert ctypes.CDLL({str(library)!r}).call_in_thread(ctypes.CFUNCTYPE(None)(call)) == 0
        print(calls)
        """,
    )
    assert out.strip() == "[True, True, True]"
