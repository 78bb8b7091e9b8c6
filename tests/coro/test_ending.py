"""Coros that are still suspended when their loop is closed, their thread ends, or the process exits."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
import threading
import warnings
import weakref

import pytest
from support import coro_is_available, gil_is_enabled, in_thread, recorded_warnings, run_script, wait_until

import grapeshot

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import _core, coro
    from grapeshot.coro import _ending


@pytest.fixture
def loop():
    loop = grapeshot.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture
def no_grace(monkeypatch):
    """Coros that wait during their cleanup are interrupted after 10 ms, instead of after the usual grace period."""
    monkeypatch.setattr(_ending, "_GRACE_S", 0.01)


def start(loop, *functions):
    """Start a coro for each function and let it run to its first wait."""

    async def spawn():
        coros = [coro.spawn(function) for function in functions]
        await asyncio.sleep(0)
        return coros

    return loop.run_until_complete(spawn())


# ------------------------------------------------------------------ loop.close()


def test_close_unwinds_with_shutdown(loop):
    log = []

    def stay():
        try:
            coro.wait()
        except coro.Shutdown as exc:
            log.append((asyncio.get_running_loop() is loop, exc.value))
            raise

    coros = start(loop, *[stay] * 5)
    never_ran = asyncio.Future(loop=loop)
    loop.close()
    assert log == [(True, None)] * 5
    assert all(co.cancelled() for co in coros)
    assert all(isinstance(co._failure(), coro.Shutdown) for co in coros)
    assert coro.get_live_coros() == []
    never_ran.cancel()


def test_cleanup_may_wait_when_the_loop_is_closed(loop):
    log = []
    gate = coro.event()

    def stay():
        try:
            coro.wait()
        finally:
            coro.sleep_relative(0.005)
            gate.wait()
            coro.yield_slice()
            coro.await_(asyncio.sleep(0.001))
            log.append("clean")

    def open_gate():
        try:
            coro.wait()
        finally:
            coro.spawn(gate.set).join()

    start(loop, stay, open_gate)
    loop.close()
    assert log == ["clean"]


def test_a_coro_that_keeps_waiting_in_its_cleanup_is_interrupted_again(loop, no_grace):
    log = []

    def stay():
        try:
            coro.wait()
        finally:
            for number in range(3):
                try:
                    coro.wait()
                except coro.Shutdown:
                    log.append(number)

    start(loop, stay)
    loop.close()
    assert log == [0, 1, 2]


def test_a_coro_that_refuses_to_end_is_given_up_with_a_warning(no_grace):
    """The coro stays suspended while everything else continues. When its thread ends, it is interrupted again."""

    def program():
        loop = grapeshot.new_event_loop()
        is_stubborn = [True]
        log = []

        def refuse():
            while is_stubborn[0]:
                try:
                    coro.wait()
                except coro.Shutdown:
                    pass
            log.append("ended at last")

        (stubborn,) = start(loop, refuse)
        with pytest.warns(RuntimeWarning, match="did not end") as caught:
            loop.close()
        assert caught[0].filename == __file__
        assert loop.is_closed()
        assert coro.get_live_coros() == [stubborn]
        assert coro.where(stubborn).endswith("refuse")
        for act in (stubborn.shutdown, stubborn.interrupt, stubborn.cancel, lambda: coro.schedule(stubborn)):
            with pytest.raises(RuntimeError, match="closed"):
                act()
        # Other coros run in the meantime. The stack of `stubborn` is unchanged when it continues.
        assert coro.run(lambda: [coro.spawn(sorted, [3, 1, 2]).join() for _ in range(3)]) == [[1, 2, 3]] * 3
        gc.collect()
        is_stubborn[0] = False
        return log, stubborn

    log, stubborn = in_thread(program)
    assert log == ["ended at last"]
    assert stubborn.done()
    assert stubborn.result() is None


def test_close_raises_an_exit_from_the_cleanup_and_still_closes_the_loop(loop):
    log = []

    def stay(kind):
        try:
            coro.wait()
        finally:
            log.append(kind)
            if kind is not None:
                raise kind

    start(loop, *[lambda kind=kind: stay(kind) for kind in (SystemExit, None, KeyboardInterrupt)])
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        loop.close()
    assert sorted(map(str, log)) == sorted(map(str, [SystemExit, None, KeyboardInterrupt]))
    assert loop.is_closed()
    assert coro.get_live_coros() == []


def test_an_error_in_the_cleanup_is_reported_at_most_once(loop):
    reported: list = []
    loop.set_exception_handler(lambda _loop, context: reported.append(str(context["exception"])))

    def stay():
        try:
            coro.wait()
        finally:
            raise ValueError("in the cleanup")

    start(loop, stay)
    gc.collect()
    loop.close()
    gc.collect()
    # The exception is reported when the coro is freed, unless the loop is already closed by then.
    assert reported in (["in the cleanup"], [])


def test_coros_that_were_ready_and_not_begun_end_without_running(loop):
    log: list = []
    asyncio._set_running_loop(loop)
    ready = coro.spawn(log.append, 1)
    asyncio._set_running_loop(None)
    loop.close()
    assert ready.cancelled()
    assert log == []


def test_a_loop_closed_inside_another_loop():
    log = []
    inner = grapeshot.new_event_loop()

    def stay(number):
        try:
            coro.wait()
        finally:
            coro.yield_slice() if number else None
            log.append(number)

    coros = start(inner, lambda: stay(0), lambda: stay(1))

    async def main():
        task = asyncio.current_task()
        inner.close()
        assert asyncio.current_task() is task
        assert asyncio.get_running_loop() is not inner
        await asyncio.sleep(0)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grapeshot.run(main())
    assert sorted(log) == [0, 1]
    assert all(co.done() for co in coros)


def test_a_loop_closed_inside_a_coro_of_another_loop():
    """close() cannot run the loop's coros inside a coro of another loop, so they end only when the thread ends."""

    def program():
        log = []
        inner = grapeshot.new_event_loop()

        def stay():
            try:
                coro.wait()
            finally:
                log.append("unwound")

        start(inner, stay)

        def main():
            with pytest.warns(RuntimeWarning, match="did not end"):
                inner.close()
            assert inner.is_closed()
            assert log == []

        coro.run(main)
        return log

    assert in_thread(program) == ["unwound"]


def test_a_coro_that_was_never_started_is_dropped_in_silence():
    class Thing:
        pass

    async def main():
        thing = Thing()
        idle = coro.new(print, thing)
        ref = weakref.ref(thing)
        del idle, thing
        gc.collect()
        assert ref() is None

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grapeshot.run(main())


# ------------------------------------------------------------------ the end of a thread


def leave_behind(log, count=3):
    """Make a loop with suspended coros, and do not close it."""

    def stay(number):
        try:
            coro.wait()
        finally:
            coro.yield_slice()
            log.append((number, threading.get_ident()))

    loop = grapeshot.new_event_loop()
    start(loop, *[lambda number=number: stay(number) for number in range(count)])
    return loop


def test_coros_end_with_their_thread():
    log: list = []

    def program():
        loop = leave_behind(log)
        assert len(coro.get_live_coros()) == 3
        return loop, threading.get_ident()

    loop, ident = in_thread(program)
    assert sorted(log) == [(number, ident) for number in range(3)]
    loop.close()


def test_an_own_stack_and_many_slots_end_with_their_thread():
    log: list = []

    def program():
        coro.set_stack_slots(4)

        def stay(number):
            try:
                coro.wait()
            finally:
                log.append(number)

        async def spawn():
            for number in range(10):
                coro.spawn(stay, number, stack="own" if number % 2 else "shared")
            await asyncio.sleep(0)

        loop = grapeshot.new_event_loop()
        loop.run_until_complete(spawn())
        return loop

    in_thread(program).close()
    assert sorted(log) == list(range(10))


def test_a_thread_that_ends_makes_no_more_coros():
    log: list = []

    def program():
        def stay():
            try:
                coro.wait()
            finally:
                try:
                    coro.spawn(print)
                except RuntimeError as exc:
                    log.append(str(exc))

        loop = grapeshot.new_event_loop()
        start(loop, stay)
        return loop

    in_thread(program).close()
    assert log == ["the thread is ending and cannot start any more coros"]


def test_a_coro_that_outlives_its_thread_stays_suspended(monkeypatch):
    unraisable: list = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)

    def program():
        def refuse():
            while True:
                try:
                    coro.wait()
                except coro.Shutdown:
                    pass

        loop = grapeshot.new_event_loop()
        (stubborn,) = start(loop, refuse)
        return loop, stubborn

    with recorded_warnings() as caught:
        loop, stubborn = in_thread(program)
    assert caught == ["1 coros did not end with their thread"]
    assert not stubborn.done()
    with pytest.raises(coro.ScheduleError):
        stubborn.shutdown()
    with pytest.raises(coro.ScheduleError):
        coro.schedule(stubborn)
    assert coro.where(stubborn).endswith("refuse" if gil_is_enabled() else "waiting")
    loop.close()
    del stubborn
    gc.collect()
    assert unraisable == []


def stack_length_kib():
    """Return the total length, in KiB, of the mappings that hold stacks of coros.

    These mappings have the flag `nh` (no huge pages). The stacks of threads have it, too, but their mappings are 8 MiB
    long; the mappings for coros are longer.
    """
    total = length = 0
    with open("/proc/self/smaps") as maps:
        for line in maps:
            words = line.split()
            if words[0] == "Size:":
                length = int(words[1])
            elif words[0] == "VmFlags:" and length > 8192 and "nh" in words and "rd" in words:
                total += length
    return total


def test_threads_that_end_give_their_stacks_back():
    coro.run(int)  # makes slots for the main thread, so that at least one mapping holds stacks of coros
    if not sys.platform.startswith("linux") or not stack_length_kib():
        pytest.skip("this kernel does not tell which mappings are stacks of coros")

    def program():
        coro.set_stack_slots(3)
        leave_behind([], count=6).close()
        return stack_length_kib()

    before = stack_length_kib()
    during = [in_thread(program) for _ in range(5)]
    assert min(during) >= before + 3 * 8192
    # Up to 3.12, join() does not wait for the very end of a thread.
    wait_until(lambda: stack_length_kib() <= before, "the mappings to go")


def test_a_loop_that_spawn_made_and_that_never_ran_ends_with_its_thread():
    log: list = []

    def program():
        coro.spawn(log.append, 1)
        return weakref.ref(coro.spawn(log.append, 2)._loop)

    with recorded_warnings() as messages:
        ref = in_thread(program)
        gc.collect()
    assert len(messages) == 2
    assert messages[0].startswith("coros never ran: ")
    assert messages[1].startswith("unclosed event loop")
    # The loop's finalizer has revived the loop for the warning. From 3.15 on, a weak reference to a revived object
    # stays valid until the object is collected again.
    gc.collect()
    assert ref() is None
    assert log == []


# ------------------------------------------------------------------ the exit of the interpreter


LEFT = """
    import asyncio, sys, threading, os
    import grapeshot
    from grapeshot import coro

    def stay(name, then=None):
        try:
            coro.wait()
        finally:
            coro.yield_slice()
            print("end of", name, flush=True)
            if then is not None:
                then()

    async def spawn(*args):
        co = coro.spawn(stay, *args)
        await asyncio.sleep(0)
        return co
"""


def run_to_exit(code, *, flags=()):
    """Run a script until it exits. Return its status, output and errors."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", *flags, "-c", textwrap.dedent(LEFT) + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_coros_end_at_the_exit():
    status, out, err = run_to_exit(
        """
        loop = grapeshot.new_event_loop()
        loop.run_until_complete(spawn("first"))
        other = grapeshot.new_event_loop()
        other.run_until_complete(spawn("second"))
        closed = grapeshot.new_event_loop()
        closed.run_until_complete(spawn("third"))
        closed.close()
        print("exit", flush=True)
    """,
        flags=("-W", "ignore::ResourceWarning"),  # debug builds of Python show these
    )
    assert (status, err) == (0, "")
    lines = out.split()
    assert lines.index("third") < lines.index("exit") < min(lines.index("first"), lines.index("second"))


def test_coros_that_never_ran_and_coros_that_refuse_to_end_at_exit():
    status, out, err = run_to_exit("""
        coro.spawn(print, "never")
        def refuse():
            while True:
                try:
                    coro.wait()
                except BaseException:
                    pass
        async def start():
            coro.spawn(refuse)
            await asyncio.sleep(0)
        from grapeshot.coro import _ending
        _ending._GRACE_S = 0.01
        loop = grapeshot.new_event_loop()
        loop.run_until_complete(start())
        print("exit", flush=True)
    """)
    assert (status, out) == (0, "exit\n")
    assert "RuntimeWarning: coros did not end when their loop was closed" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "work", ["coro.yield_slice()", "pass", "coro.await_(asyncio.sleep(0))", "sorted([1, 2], key=key)"]
)
def test_daemon_threads_with_coros_at_the_exit(work):
    """A daemon thread runs coros until the interpreter, at its exit, stops the thread."""
    status, out, err = run_to_exit(f"""
        ready = threading.Event()
        def key(number):
            coro.yield_slice()
            return number
        def spin():
            coro.yield_slice()
            ready.set()
            while True:
                {work}
        def serve():
            async def main():
                await spawn("daemon")
                await coro.spawn(spin)
            grapeshot.run(main())
        threading.Thread(target=serve, daemon=True).start()
        ready.wait()
        print("exit", flush=True)
    """)
    assert (status, out) == (0, "exit\n"), err


def test_a_daemon_thread_with_busy_tasks_at_the_exit():
    status, out, err = run_to_exit("""
        ready = threading.Event()
        async def spin():
            while True:
                ready.set()
                await asyncio.sleep(0)
        threading.Thread(target=lambda: grapeshot.run(spin()), daemon=True).start()
        ready.wait()
        print("exit", flush=True)
    """)
    assert (status, out) == (0, "exit\n"), err


@pytest.mark.parametrize(
    ("leave", "status", "unwound"),
    [("sys.exit(3)", 3, True), ("os._exit(4)", 4, False), ("raise KeyboardInterrupt", -2, True)],
)
def test_ways_to_leave_from_a_coro(leave, status, unwound):
    got, out, _err = run_to_exit(f"""
        def main():
            coro.spawn(stay, "another")
            coro.yield_slice()
            {leave}
        coro.run(main)
    """)
    assert got == status
    assert ("end of another" in out) == unwound


def test_a_cleanup_that_calls_sys_exit_while_the_interpreter_exits():
    status, out, err = run_to_exit("""
        loop = grapeshot.new_event_loop()
        loop.run_until_complete(spawn("first", sys.exit))
        loop.run_until_complete(spawn("second"))
        print("exit", flush=True)
    """)
    assert out.split("\n")[0] == "exit"
    assert "end of first" in out
    assert "end of second" in out
    assert status == 0, err


def test_suspended_coros_and_a_forced_exit_of_the_loop():
    """SystemExit in a coro ends run_forever(), as it does in a callback. The loop can run again."""

    def leave():
        raise SystemExit(9)

    loop = grapeshot.new_event_loop()

    async def spawn(function):
        return coro.spawn(function)

    waiting = loop.run_until_complete(spawn(coro.wait))
    loop.call_soon(coro.spawn, leave)
    with pytest.raises(SystemExit) as caught:
        loop.run_forever()
    assert caught.value.code == 9

    async def go_on():
        coro.schedule(waiting, "went on")
        return await waiting

    assert loop.run_until_complete(go_on()) == "went on"
    loop.close()


def test_coros_of_a_dropped_loop_end_with_the_thread():
    out = run_script(
        None,
        LEFT
        + """
    def program():
        loop = grapeshot.new_event_loop()
        loop.run_until_complete(spawn("thread"))

    thread = threading.Thread(target=program)
    thread.start()
    thread.join()
    print("joined")
    """,
        flags=("-W", "error", "-W", "ignore::ResourceWarning"),
    )
    assert out.split("\n")[:2] == ["end of thread", "joined"]


def test_native_unwinding_does_nothing_inside_a_coro():
    def main():
        other = coro.spawn(coro.wait)
        coro.yield_slice()
        left = _core._coro_shut_down(None, 3)
        assert left >= 1
        assert not other.done()
        coro.schedule(other, 5)
        return other.join()

    assert coro.run(main) == 5
