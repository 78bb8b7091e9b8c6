"""Running coros: event_loop() and set_exit(), and calls that are refused."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest
from support import coro_is_available, in_thread, run_script

import grapeshot

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro

CAP_S = 30


# ------------------------------------------------------------------ event_loop


def test_spawn_then_event_loop():
    log = []

    def main(first, *, second):
        loop = asyncio.get_running_loop()
        assert coro.current()._loop is loop
        log.append((first, second))
        coro.sleep_relative(0.001)
        coro.spawn(last)

    def last():
        log.append("last")
        coro.set_exit(7)

    early = coro.spawn(main, 1, second=2)
    late = coro.new(log.append, "started")
    late.start()
    assert early._loop is late._loop
    assert set(coro.get_live_coros()) == {early, late}
    assert log == []
    assert coro.event_loop() == 7
    assert log == [(1, 2), "started", "last"]
    assert early._loop.is_closed()
    assert early.done()
    assert coro.get_live_coros() == []


def test_each_call_of_event_loop_runs_a_new_loop():
    loops = []
    for code in (0, "text", None):

        def main(code=code):
            loops.append(asyncio.get_running_loop())
            coro.set_exit(code) if code != 0 else coro.set_exit()

        coro.spawn(main)
        assert coro.event_loop() == code
    assert len(set(loops)) == 3


def test_set_exit_before_event_loop_ends_it_at_once():
    log = []

    def stay():
        try:
            coro.wait()
        finally:
            log.append("unwound")

    coro.spawn(stay)
    coro.set_exit(3)
    assert coro.event_loop() == 3
    # The coro may or may not have begun before the loop ended.
    assert log in (["unwound"], [])


def test_the_last_code_counts():
    def main():
        coro.set_exit(1)
        coro.set_exit(2)

    coro.spawn(main)
    assert coro.event_loop() == 2


@pytest.mark.parametrize("kind", ["callback", "task", "executor", "thread"])
def test_set_exit_from_any_kind_of_code(kind):
    async def task():
        coro.set_exit(kind)

    def main():
        loop = asyncio.get_running_loop()
        if kind == "callback":
            loop.call_soon(coro.set_exit, kind)
        elif kind == "task":
            coro.current().keep = loop.create_task(task())
        elif kind == "executor":
            coro.threads.run(coro.set_exit, kind)
        else:
            other = threading.Thread(target=coro.set_exit, args=(kind,))
            other.start()
            coro.threads.run(other.join)

    coro.spawn(main)
    assert coro.event_loop() == kind


def test_set_exit_without_a_loop_is_refused():
    with pytest.raises(RuntimeError, match=r"one running coro.event_loop\(\), but there are none"):
        coro.set_exit()
    with pytest.raises(RuntimeError, match=r"one running coro.event_loop\(\), but there are none"):
        in_thread(coro.set_exit)


def test_set_exit_from_a_thread_needs_to_know_which_loop():
    running = threading.Barrier(3)

    def main():
        coro.threads.run(running.wait)
        coro.wait()

    def run(results):
        coro.spawn(main)
        results.append(coro.event_loop())

    results: list = []
    loops = [threading.Thread(target=run, args=(results,)) for _ in range(2)]
    for thread in loops:
        thread.start()
    running.wait(CAP_S)
    with pytest.raises(RuntimeError, match=r"one running coro.event_loop\(\), but there are 2"):
        coro.set_exit()
    from grapeshot.coro import _event_loop

    for program in list(_event_loop._running):
        program.loop.call_soon_threadsafe(coro.set_exit, 5)
    for thread in loops:
        thread.join(CAP_S)
    assert results == [5, 5]


def test_suspended_coros_are_unwound_at_the_exit():
    log = []

    def stay(number):
        try:
            coro.wait()
        finally:
            coro.yield_slice() if number % 2 else None
            log.append(number)

    def main():
        for number in range(6):
            coro.spawn(stay, number)
        coro.yield_slice()
        coro.set_exit()

    coro.spawn(main)
    assert coro.event_loop() == 0
    assert sorted(log) == list(range(6))


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_SystemExit_and_KeyboardInterrupt_end_event_loop(kind):
    log = []

    def stay():
        try:
            coro.wait()
        finally:
            log.append("unwound")

    def main():
        coro.yield_slice()
        raise kind(4)

    stayed = coro.spawn(stay)
    coro.spawn(main)
    with pytest.raises(kind) as caught:
        coro.event_loop()
    assert caught.value.args == (4,)
    assert log == ["unwound"]
    assert stayed._loop.is_closed()


def test_ctrl_c_ends_event_loop():
    log = []

    def stay():
        try:
            coro.wait()
        finally:
            log.append("unwound")

    def main():
        coro.yield_slice()
        os.kill(os.getpid(), signal.SIGINT)
        coro.wait()

    coro.spawn(stay)
    coro.spawn(main)
    with pytest.raises(KeyboardInterrupt):
        coro.event_loop()
    assert log == ["unwound"]
    assert coro.get_live_coros() == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_loops_do_not_nest():
    other = grapeshot.new_event_loop()

    def inside():
        for run in (coro.event_loop, lambda: coro.run(int)):
            with pytest.raises(RuntimeError, match="running event loop"):
                run()
        with pytest.raises(RuntimeError, match="another loop is running"):
            other.run_forever()
        with pytest.raises(RuntimeError, match="running"):
            asyncio.get_running_loop().run_forever()
        with pytest.raises(RuntimeError, match="Cannot close a running event loop"):
            asyncio.get_running_loop().close()
        return 5

    async def main():
        with pytest.raises(RuntimeError, match="running event loop"):
            coro.event_loop()
        return await coro.spawn(inside)

    try:
        assert coro.run(inside) == 5
        assert grapeshot.run(main()) == 5
    finally:
        other.close()


def test_a_loop_that_is_made_to_run_inside_a_coro_does_not_touch_the_stacks():
    """The test hides the running loop, so the loop `other` does not refuse to run. But no coro of `other` runs."""
    reported = []

    def main():
        other = grapeshot.new_event_loop()
        other.set_exception_handler(lambda _loop, context: reported.append(str(context["exception"])))
        outer = asyncio.get_running_loop()
        asyncio._set_running_loop(other)
        inner = coro.spawn(int)
        asyncio._set_running_loop(None)
        try:
            other.call_soon(other.stop)
            other.run_forever()
            assert not inner.done()
        finally:
            asyncio._set_running_loop(outer)
        return other, inner

    other, inner = coro.run(main)
    assert reported == ["a coro cannot run another loop's coros"]
    other.close()
    assert inner.cancelled()


def test_a_program_as_a_script():
    out = run_script(
        None,
        """
        import sys
        from grapeshot import coro

        def worker(number, done):
            coro.sleep_relative(0.001 * number)
            done.push(number)

        def main():
            done = coro.fifo()
            for number in range(3):
                coro.spawn(worker, number, done)
            print([done.pop() for _ in range(3)])
            coro.set_exit(5)

        coro.spawn(main)
        code = coro.event_loop()
        print(code)
        """,
    )
    assert out.split("\n")[:2] == ["[0, 1, 2]", "5"]


# ------------------------------------------------------------------ misuse


def test_functions_that_only_coros_can_call():
    waiting = [
        coro.yield_slice,
        coro.wait,
        coro.current,
        lambda: coro.sleep_relative(0),
        lambda: coro.sleep_absolute(0),
        lambda: coro.with_timeout(1, int),
        lambda: coro.event().wait(),
        lambda: coro.fifo().pop(),
        lambda: coro.channel().receive(),
        lambda: coro.threads.run(int),
        lambda: coro.await_(asyncio.sleep(0)),
    ]

    def refused():
        for wait in waiting:
            with pytest.raises(coro.YieldFromMain):
                wait()

    async def main():
        refused()  # in a task
        done: list = []

        def callback():
            refused()
            done.append(1)

        asyncio.get_running_loop().call_soon(callback)
        await asyncio.sleep(0)
        assert done
        co = coro.spawn(coro.wait)
        await asyncio.sleep(0)
        with pytest.raises(coro.YieldFromMain):
            co.join()
        coro.schedule(co)
        await co

    refused()
    grapeshot.run(main())


def test_coros_of_another_thread():
    async def main():
        waiting, idle = coro.spawn(coro.wait), coro.new(int)
        await asyncio.sleep(0)
        acts = [
            lambda: coro.schedule(waiting),
            waiting.shutdown,
            waiting.cancel,
            lambda: waiting.interrupt(1),
            lambda: waiting.raise_exception(ValueError),
            idle.start,
            waiting.stack_info,
            lambda: waiting.add_done_callback(print),
        ]

        def try_all():
            for act in acts:
                with pytest.raises(coro.ScheduleError, match="thread"):
                    act()
            # Reading is allowed.
            return waiting.done(), waiting.name, coro.where(waiting)

        def try_in_a_coro():
            with pytest.raises(coro.ScheduleError, match="thread"):
                waiting.join()
            return try_all()

        def in_coros():
            return coro.run(try_in_a_coro)

        for function in (lambda: in_thread(try_all), lambda: in_thread(in_coros)):
            is_done, name, _ = await asyncio.get_running_loop().run_in_executor(None, function)
            assert not is_done
            assert name == waiting.name
        assert waiting._status == "waiting"
        assert not waiting.cancelling()
        coro.schedule(waiting, 5)
        assert await waiting == 5
        idle.start()
        assert await idle == 0

    grapeshot.run(main())


def test_a_loop_that_goes_to_another_thread_leaves_its_coros_behind():
    loop = grapeshot.new_event_loop()
    reported: list = []
    loop.set_exception_handler(lambda _loop, context: reported.append(str(context["exception"])))

    async def spawn():
        return coro.spawn(int), coro.spawn(coro.wait)

    ready, waiting = loop.run_until_complete(spawn())

    def elsewhere():
        loop.call_soon(loop.stop)
        loop.run_forever()
        loop.call_soon(loop.stop)
        loop.run_forever()

    asyncio._set_running_loop(loop)
    another = coro.spawn(int)
    asyncio._set_running_loop(None)
    in_thread(elsewhere)
    assert "a coro can run only in the thread that created it" in reported
    assert not another.done()
    loop.close()
    assert another.cancelled()
    assert waiting.cancelled()


def test_coros_of_a_closed_loop():
    async def make():
        return coro.new(int), coro.spawn(int)

    loop = grapeshot.new_event_loop()
    idle, done = loop.run_until_complete(make())
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        idle.start()
    with pytest.raises(coro.NotStartedError):
        idle.shutdown()
    assert done.done()
    with pytest.raises(coro.DeadCoroutine):
        done.shutdown()


def test_scheduling_invalid_objects():
    async def main():
        idle = coro.new(int)
        with pytest.raises(coro.NotStartedError):
            coro.schedule(idle)
        idle.start()
        with pytest.raises(coro.ScheduleError, match="already been started"):
            idle.start()
        with pytest.raises(coro.ScheduleError, match="already scheduled"):
            coro.schedule(idle)
        await idle
        for act in (coro.schedule, coro.Coro.shutdown, coro.Coro.interrupt):
            with pytest.raises(coro.DeadCoroutine):
                act(idle)
        with pytest.raises(coro.ScheduleError, match="already been started"):
            idle.start()

        def inside():
            with pytest.raises(coro.ScheduleError, match="running"):
                coro.schedule(coro.current())
            with pytest.raises(RuntimeError, match="itself"):
                coro.current().join()
            with pytest.raises(RuntimeError, match="itself"):
                coro.await_(coro.current())

        await coro.spawn(inside)
        with pytest.raises(TypeError):
            coro.spawn()
        with pytest.raises(TypeError):
            coro.new(5)
        with pytest.raises(TypeError, match="context"):
            coro.spawn(int, context=5)
        with pytest.raises(TypeError):
            coro.Coro()

    grapeshot.run(main())
