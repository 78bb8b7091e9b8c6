"""How asyncio.run() in a coro that hides the loop affects the program whose loop it borrows."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest
from support import coro_is_available

import grapeshot
from tests.coro.with_asyncio.blocking_code import in_coro

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro


def test_main_is_a_task_of_the_loop_that_runs_already():
    async def main():
        return asyncio.get_running_loop()

    async def outer():
        assert await coro.run_blocking(lambda: asyncio.run(main())) is asyncio.get_running_loop()
        assert await coro.run_sync(lambda: coro.call_blocking(asyncio.run, main())) is asyncio.get_running_loop()

    grapeshot.run(outer())


def test_host_loop_object_in_a_hiding_coro():
    async def main():
        await asyncio.sleep(0)
        return asyncio.current_task()

    def work(loop):
        return loop.run_until_complete(main())

    async def outer():
        task = await coro.run_blocking(work, asyncio.get_running_loop())
        assert task.done()

    grapeshot.run(outer())


def test_runs_go_on_side_by_side():
    meeting = []

    async def main(number):
        meeting.append(number)
        while len(meeting) < 10:
            await asyncio.sleep(0)
        left.append(asyncio.create_task(asyncio.sleep(60)))
        return number

    left = []

    async def outer():
        others = asyncio.create_task(asyncio.sleep(60))
        results = await asyncio.gather(*(coro.run_blocking(lambda n=n: asyncio.run(main(n))) for n in range(10)))
        assert results == list(range(10))
        assert all(task.cancelled() for task in left)
        assert len(left) == 10
        assert not others.done()
        others.cancel()

    grapeshot.run(outer())


def test_end_of_one_run_leaves_the_other_alone():
    async def short():
        await asyncio.sleep(0)

    async def long(begun, go_on):
        child = asyncio.create_task(go_on.wait())
        begun.set()
        await child
        return "whole"

    async def outer():
        begun, go_on = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(coro.run_blocking(lambda: asyncio.run(long(begun, go_on))))
        await begun.wait()
        await coro.run_blocking(lambda: asyncio.run(short()))
        go_on.set()
        assert await first == "whole"

    grapeshot.run(outer())


def test_coros_of_a_run_end_with_it():
    ended = []

    def work(name):
        try:
            coro.sleep_relative(60)
        finally:
            ended.append(name)

    async def main():
        coro.spawn(work, "spawned")
        background.append(asyncio.ensure_future(coro.run_blocking(work, "a thread's")))
        await asyncio.sleep(0.001)

    background = []

    def outer():
        mine = coro.spawn(work, "the caller's")
        asyncio.run(main())
        assert sorted(ended) == ["a thread's", "spawned"]  # the run cancelled its task and its coro
        mine.shutdown()
        coro.yield_slice()

    in_coro(outer)


def test_run_within_a_run_within_a_run():
    async def main(depth):
        if depth:
            left = asyncio.create_task(asyncio.sleep(60))
            await asyncio.sleep(0)
            inner = await coro.run_blocking(lambda: asyncio.run(main(depth - 1)))
            assert not left.done()
            return [depth, *inner]
        return [0]

    assert in_coro(lambda: asyncio.run(main(3))) == [3, 2, 1, 0]


def test_cancelled_coro_cancels_main():
    begun, steps = asyncio.Event(), []

    async def main():
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError as exc:
            await asyncio.sleep(0.001)
            steps.append(exc.args)
            raise

    def work():
        try:
            asyncio.run(main())
        finally:
            steps.append("coro")

    async def outer():
        task = asyncio.create_task(coro.run_blocking(work))
        await begun.wait()
        task.cancel("why")
        with pytest.raises(asyncio.CancelledError):
            await task

    grapeshot.run(outer())
    assert steps == [("why",), "coro"]


def test_main_that_refuses_to_be_cancelled():
    begun = asyncio.Event()

    async def main():
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "refused"

    async def outer():
        task = asyncio.create_task(coro.run_blocking(lambda: asyncio.run(main())))
        await begun.wait()
        task.cancel()
        assert await task == "refused"

    grapeshot.run(outer())


def test_interrupted_coro_cancels_main():
    begun, cancelled = [], []

    async def main():
        begun.append(1)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            cancelled.append(1)

    def spawn_begun():
        count = len(begun)
        running = coro.spawn(coro.call_blocking, asyncio.run, main())
        while len(begun) == count:
            coro.sleep_relative(0.001)
        return running

    def work():
        with pytest.raises(TimeoutError), coro.timeout(0.1):
            asyncio.run(main())
        running = spawn_begun()
        running.interrupt(5)
        assert running.join() is None
        running = spawn_begun()
        running.shutdown()
        assert running.join() is None

    in_coro(work)
    assert len(cancelled) == 3


def test_interrupted_run_forever():
    def work():
        loop = asyncio.new_event_loop()
        try:
            with pytest.raises(TimeoutError), coro.timeout(0.001):
                loop.run_forever()
        finally:
            loop.close()

    in_coro(work)


def test_ctrl_c_ends_main_and_the_program():
    program = """
import asyncio, os, signal, grapeshot
from grapeshot import coro
async def main():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)
    finally:
        print("main cancelled")
def work():
    try:
        asyncio.run(main())
    finally:
        print("coro ended")
try:
    grapeshot.run(coro.run_blocking(work))
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split("\n")[:3] == ["main cancelled", "coro ended", "interrupted"], done.stderr


def test_ctrl_c_where_only_the_run_handles_it():
    """asyncio.run() in the coro installs its SIGINT handler and raises KeyboardInterrupt, as it does without coros."""

    async def main():
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)

    def work():
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(main())
        return signal.getsignal(signal.SIGINT) is signal.default_int_handler

    loop = grapeshot.new_event_loop()
    try:
        assert loop.run_until_complete(coro.run_blocking(work))
    finally:
        loop.close()


def test_debug_mode_lasts_as_long_as_the_runs_that_want_it():
    async def main(event, others):
        loop = asyncio.get_running_loop()
        seen = [loop.get_debug()]
        others.append(event)
        await event.wait()
        return [*seen, loop.get_debug()]

    async def outer():
        loop = asyncio.get_running_loop()
        events: list[asyncio.Event] = []
        runs = []
        for debug in (True, False, True):
            event = asyncio.Event()
            runs.append(
                asyncio.create_task(
                    coro.run_blocking(lambda debug=debug, event=event: asyncio.run(main(event, events), debug=debug))
                )
            )
            while not events or events[-1] is not event:
                await asyncio.sleep(0)
        for event, run in zip(events, runs, strict=True):
            assert loop.get_debug()
            event.set()
            assert await run == [True, True]
        assert not loop.get_debug()

    grapeshot.run(outer(), debug=False)


def test_task_factory_of_the_loop_that_runs_already():
    made = []

    def factory(loop, coroutine, **kwargs):
        task = asyncio.Task(coroutine, loop=loop, **kwargs)
        made.append(task)
        return task

    async def main():
        left = asyncio.create_task(asyncio.sleep(60))
        await asyncio.sleep(0)
        return left

    async def outer():
        asyncio.get_running_loop().set_task_factory(factory)
        left = await coro.run_blocking(lambda: asyncio.run(main()))
        assert left in made
        assert left.cancelled()
        assert asyncio.get_running_loop().get_task_factory() is factory

    grapeshot.run(outer())


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with Python 3.12")
def test_eager_tasks():
    async def child():
        return asyncio.current_task() is not None

    async def main():
        assert asyncio.get_running_loop() is not None
        own = asyncio.current_task()
        assert await asyncio.create_task(child())
        await asyncio.sleep(0)
        assert asyncio.current_task() is own
        return "eager"

    async def outer():
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)
        return await coro.run_blocking(lambda: asyncio.run(main()))

    assert grapeshot.run(outer()) == "eager"


def test_stop_of_the_program_stops_the_program():
    async def main(begun):
        begun.set()
        await asyncio.sleep(60)

    loop = grapeshot.new_event_loop()

    async def outer():
        begun = asyncio.Event()
        running = asyncio.create_task(coro.run_blocking(lambda: asyncio.run(main(begun))))
        await begun.wait()
        loop.stop()  # this stops the whole loop, because this task does not belong to a run
        return running

    task = loop.create_task(outer())
    loop.run_forever()
    running = task.result()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(running)
    loop.close()


def test_loop_belongs_to_the_coros_of_its_host():
    def make():
        return asyncio.new_event_loop()

    async def outer():
        loop = await coro.run_blocking(make)
        coroutine = asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="another loop is running"):
            loop.run_until_complete(coroutine)
        with pytest.raises(RuntimeError, match="only a coro"):
            await asyncio.to_thread(loop.run_until_complete, coroutine)
        coroutine.close()
        assert await coro.run_blocking(lambda: loop.run_until_complete(asyncio.sleep(0, 5))) == 5
        left = loop.create_task(asyncio.sleep(60))
        loop.close()  # does not wait for `left`, because the caller is a task and not a coro
        with pytest.raises(asyncio.CancelledError):
            await left

    grapeshot.run(outer())


def test_close_cancels_the_remaining_tasks(caplog):
    async def fail_in_cleanup():
        try:
            await asyncio.sleep(60)
        finally:
            raise LookupError

    def work():
        loop = asyncio.new_event_loop()
        tasks = [loop.create_task(asyncio.sleep(60)), loop.create_task(fail_in_cleanup())]
        loop.run_until_complete(asyncio.sleep(0))
        assert asyncio.all_tasks(loop) == set(tasks)
        loop.close()
        assert asyncio.all_tasks(loop) == set()
        return [task.cancelled() for task in tasks]

    assert in_coro(work) == [True, False]
    assert [record.message.splitlines()[0] for record in caplog.records] == [
        "unhandled exception in a task that was cancelled because its loop was closed"
    ]


def test_event_loop_is_refused():
    def work():
        with pytest.raises(RuntimeError, match=r"coro\.event_loop\(\) cannot be called from a coro"):
            coro.event_loop()

    in_coro(work)


def test_set_event_loop_affects_only_the_coro_that_calls_it():
    def work(barrier):
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        barrier.append(loop)
        while len(barrier) < 2:
            coro.yield_slice()
        try:
            return asyncio.get_event_loop() is loop
        finally:
            loop.close()

    async def outer():
        barrier = []
        assert await asyncio.gather(*(coro.run_blocking(work, barrier) for _ in range(2))) == [True, True]

    grapeshot.run(outer())


def test_asyncio_is_not_wrapped_before_a_coro_hides_the_loop():
    program = """
import asyncio, grapeshot
before = asyncio.all_tasks, asyncio.Runner._lazy_init
from grapeshot import coro
coro.run(coro.yield_slice)
assert (asyncio.all_tasks, asyncio.Runner._lazy_init) == before
grapeshot.run(coro.run_blocking(asyncio.new_event_loop)).close()
assert asyncio.all_tasks is not before[0]
async def main():
    return len(asyncio.all_tasks())
for run in (asyncio.run, grapeshot.run):
    assert run(main()) == 1
loop = asyncio.new_event_loop()
assert "Borrowed" not in type(loop).__name__
asyncio.set_event_loop(loop)
assert asyncio.get_event_loop() is loop
loop.close()
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], timeout=60, check=True)
