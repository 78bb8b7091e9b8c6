"""`coro.print_run_info`: which coros wait for which others, and where each of them waits."""

from __future__ import annotations

import asyncio
import io
import re
import sys

import pytest
from support import coro_is_available, in_thread, spawn_blocked

import grapeshot

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import _core, coro


def text():
    file = io.StringIO()
    coro.print_run_info(file)
    return file.getvalue()


def tree():
    """Return the lines of the tree without the stacks: (depth, line)."""
    lines = text().splitlines()[1:]
    found = [
        (len(line) - len(line.lstrip()), line.strip())
        for line in lines
        if re.match(r" *(coro|task) '|These", line) or line.endswith("see above")
    ]
    return [(depth // 2, line) for depth, line in found]


def test_the_stacks_and_the_heading():
    def inner():
        coro.wait()

    def outer():
        inner()

    def main():
        co = spawn_blocked(outer, name="waiter")
        lines = text().splitlines()
        assert lines[0].startswith("2 coros and 1 task of <Loop running=True")
        at = lines.index("coro 'waiter' waits")
        line = outer.__code__.co_firstlineno
        assert lines[at + 1 : at + 5] == [
            f'    File "{__file__}", line {line + 1}, in outer',
            "      inner()",
            f'    File "{__file__}", line {line - 2}, in inner',
            "      coro.wait()",
        ]
        # The stack of the running coro ends at its call of `print_run_info`.
        at = next(number for number, each in enumerate(lines) if re.match(r" *coro 'main' runs$", each))
        functions = [each.rpartition(" in ")[2] for each in lines[at:] if each.lstrip().startswith("File ")]
        assert functions[:2] == ["main", "text"]
        assert "/_run_info.py" not in "".join(lines)
        coro.schedule(co)

    coro.run(main, name="main")


def test_joins():
    def main():
        worker = spawn_blocked(coro.wait, name="worker")
        first = spawn_blocked(worker.join, name="first")
        second = spawn_blocked(lambda: coro.wait([worker, first]), name="second")
        ready = coro.spawn(coro.yield_slice, name="ready")
        found = tree()
        assert (0, "coro 'ready' is ready") in found
        at = found.index((0, "coro 'second' waits for coro 'worker', coro 'first'"))
        assert found[at + 1 : at + 4] == [
            (1, "coro 'worker' waits"),
            (1, "coro 'first' waits for coro 'worker'"),
            (2, "coro 'worker': see above"),
        ]
        coro.schedule(worker)
        coro.wait([first, second, ready])

    coro.run(main, name="main")


@pytest.mark.parametrize("kind", ["lock", "mutex", "rw_lock"])
def test_holders_of_locks(kind):
    def main():
        lock = getattr(coro, kind)()
        acquire = lock.acquire_write if kind == "rw_lock" else lock.acquire
        release = lock.release_write if kind == "rw_lock" else lock.release

        def hold():
            acquire()
            coro.wait()
            release()

        def want():
            acquire()
            release()

        holder = spawn_blocked(hold, name="holder")
        wanting = [spawn_blocked(want, name=f"wanting {number}") for number in range(2)]
        found = tree()
        assert (0, f"coro 'wanting 0' waits for {lock!r}, held by coro 'holder'") in found
        at = found.index((0, f"coro 'wanting 0' waits for {lock!r}, held by coro 'holder'"))
        assert found[at + 1] == (1, "coro 'holder' waits")
        at = found.index((0, f"coro 'wanting 1' waits for {lock!r}, held by coro 'holder'"))
        assert found[at + 1] == (1, "coro 'holder': see above")
        coro.schedule(holder)
        coro.wait(wanting)

    coro.run(main)


def test_coros_that_wait_for_objects():
    def main():
        objects = {
            "semaphore": (semaphore := coro.semaphore(0), semaphore.acquire, semaphore.release),
            "fifo": (fifo := coro.fifo(), fifo.pop, lambda: fifo.push(1)),
            "channel": (channel := coro.channel(), channel.receive, lambda: channel.send(1)),
            "event": (event := coro.event(), event.wait, event.set),
            "future": (future := coro.future(), future.get, lambda: future.set(1)),
            "condition": (condition := coro.condition_variable(), condition.wait, condition.wake_one),
            "zero": (zero := coro.inverted_semaphore(1), zero.block_till_zero, zero.release),
            "thread lock": (
                thread_lock := _core.thread_lock(),
                thread_lock.acquire,
                thread_lock.release,
            ),
        }
        thread_lock.acquire()
        waiting = [spawn_blocked(wait, name=name) for name, (_, wait, _) in objects.items()]
        found = tree()
        for name, (what, _, end) in objects.items():
            assert (0, f"coro {name!r} waits for {what!r}") in found
            end()
        coro.wait(waiting)

    coro.run(main)


def test_descriptors():
    def main():
        near, far = coro.socketpair()
        with near, far:
            reader = spawn_blocked(near.recv, 1, name="reader")
            writer = spawn_blocked(near.sendall, bytes(10_000_000), name="writer")
            found = tree()
            assert (0, f"coro 'reader' waits to read descriptor {near.fileno()}") in found
            assert (0, f"coro 'writer' waits to write to descriptor {near.fileno()}") in found
            far.send(b"x")
            reader.join()
            writer.shutdown()
            writer.join()
            assert _core._coro_wait_info(coro.current()) is None

    coro.run(main)


def test_a_deadlock():
    def main():
        first_lock, second_lock = coro.lock(), coro.lock()

        def take(one, other):
            with one:
                coro.yield_slice()
                with other:
                    pass

        first = coro.spawn(take, first_lock, second_lock, name="first")
        second = coro.spawn(take, second_lock, first_lock, name="second")
        joining = coro.spawn(first.join, name="joining")
        for _ in range(3):
            coro.yield_slice()
        found = tree()
        at = found.index((0, "coro 'joining' waits for coro 'first'"))
        assert found[at + 1 : at + 4] == [
            (1, f"coro 'first' waits for {second_lock!r}, held by coro 'second'"),
            (2, f"coro 'second' waits for {first_lock!r}, held by coro 'first'"),
            (3, "coro 'first': see above"),
        ]
        joining.shutdown()
        coro.yield_slice()
        found = tree()
        at = found.index((0, "These wait for each other: coro 'first' -> coro 'second' -> coro 'first'"))
        assert [depth for depth, _ in found[at + 1 : at + 4]] == [0, 1, 2]
        first.shutdown()
        coro.wait([first, second, joining])

    coro.run(main)


def test_a_coro_that_a_cycle_waits_for():
    def main():
        below = spawn_blocked(coro.wait, name="below")
        coros = []
        first = coro.spawn(lambda: coro.wait([below, coros[1]]), name="first")
        coros += [first, coro.spawn(first.join, name="second")]
        coro.yield_slice()
        found = tree()
        at = found.index((0, "These wait for each other: coro 'first' -> coro 'second' -> coro 'first'"))
        assert found[at + 1 :] == [
            (0, "coro 'first' waits for coro 'below', coro 'second'"),
            (1, "coro 'below' waits"),
            (1, "coro 'second' waits for coro 'first'"),
            (2, "coro 'first': see above"),
        ]
        coro.schedule(below)
        coros[1].shutdown()
        coro.wait(coros)

    coro.run(main)


def test_tasks_and_coros_that_wait_for_each_other():
    async def inner_coroutine(future):
        await future

    async def outer_coroutine(future):
        await inner_coroutine(future)

    def blocking(task, future):
        coro.await_(outer_coroutine(future))
        coro.await_(task)

    async def gather(*awaitables):
        await asyncio.gather(*awaitables)

    async def main():
        loop = asyncio.get_running_loop()
        future, release = loop.create_future(), loop.create_future()
        task = asyncio.create_task(outer_coroutine(release), name="task")
        co = coro.spawn(blocking, task, future, name="coro")
        gathering = asyncio.create_task(gather(co, task), name="gathering")
        await asyncio.sleep(0.01)
        output = text()
        found = tree()
        assert any(line.startswith("task 'Task-") and line.endswith(" runs") for _, line in found)
        at = found.index((0, "task 'gathering' waits for coro 'coro', task 'task'"))
        assert [line.partition(" waits")[0] for _, line in found[at + 1 : at + 3]] == ["coro 'coro'", "task 'task'"]
        assert [depth for depth, _ in found[at + 1 : at + 3]] == [1, 1]
        # The stack of a coro continues through the coroutines that it awaits, and ends in the innermost one.
        lines = output.splitlines()
        begin = next(number for number, line in enumerate(lines) if line.startswith("  coro 'coro' waits"))
        functions = []
        for line in lines[begin + 1 :]:
            if re.match(r" *(task|coro) '", line):
                break
            if line.lstrip().startswith("File "):
                functions.append(line.rpartition(" in ")[2])
        assert functions == ["blocking", "await_", "_drive", "outer_coroutine", "inner_coroutine"]
        future.set_result(None)
        await asyncio.sleep(0.01)
        found = tree()
        at = found.index((1, "coro 'coro' waits for task 'task'"))
        assert found[at + 1][0] == 2
        release.set_result(None)
        await gathering

    grapeshot.run(main())


@pytest.mark.skipif(sys.version_info < (3, 14), reason="before 3.14, no task knows who awaits it")
def test_task_groups():
    async def main():
        event = asyncio.Event()

        async def parent():
            async with asyncio.TaskGroup() as group:
                group.create_task(event.wait(), name="child")

        task = asyncio.create_task(parent(), name="parent")
        await asyncio.sleep(0.01)
        found = tree()
        at = next(number for number, (_, line) in enumerate(found) if line.startswith("task 'parent'"))
        assert found[at][0] == 0
        assert found[at + 1][0] == 1
        assert found[at + 1][1].startswith("task 'child'")
        event.set()
        await task

    grapeshot.run(main())


def test_outside_of_a_loop(capsys):
    coro.print_run_info()
    assert capsys.readouterr().err == "0 coros and 0 tasks\n"
    assert in_thread(text) == "0 coros and 0 tasks\n"


def test_coros_of_another_thread_are_left_out():
    def main():
        co = spawn_blocked(coro.wait)

        def elsewhere():
            with pytest.raises(coro.ScheduleError):
                _core._coro_wait_info(co)
            with pytest.raises(TypeError):
                _core._coro_wait_info(5)
            return text()

        assert coro.threads.run(elsewhere) == "0 coros and 0 tasks\n"
        coro.schedule(co)

    coro.run(main)


def test_a_long_chain():
    """The chain of waiting coros is longer than Python's recursion limit."""

    def main():
        first = last = spawn_blocked(coro.wait, name="last")
        for _ in range(sys.getrecursionlimit() + 100):
            last = coro.spawn(last.join, name="chain")
        coro.yield_slice()
        found = tree()
        assert max(depth for depth, _ in found) > sys.getrecursionlimit()
        coro.schedule(first)
        last.join()

    coro.run(main)
