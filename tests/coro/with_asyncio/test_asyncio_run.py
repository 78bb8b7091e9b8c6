"""asyncio.run() in a coro that hides the loop, compared with the same code in a thread."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading
import time

import pytest
from support import coro_is_available

import grapeshot
from tests.coro.with_asyncio.blocking_code import in_coro, in_thread

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


@pytest.fixture(params=[in_thread, in_coro])
def run(request):
    """A function that runs code in a coro that hides the loop or, as the control, in an ordinary thread."""
    return request.param


def test_run_gives_the_result_or_the_exception(run):
    async def main(value):
        await asyncio.sleep(0.001)
        if value is None:
            raise LookupError("x")
        return value, asyncio.current_task() in asyncio.all_tasks()

    def work():
        with pytest.raises(LookupError, match="x"):
            asyncio.run(main(None))
        with pytest.raises((TypeError, ValueError)):
            asyncio.run(5)
        return asyncio.run(main(5))

    assert run(work) == (5, True)


def test_run_inside_of_a_run_is_refused(run):
    async def nested():
        coroutine = asyncio.sleep(0)
        try:
            with pytest.raises(RuntimeError, match="cannot be called from a running event loop"):
                asyncio.run(coroutine)
        finally:
            coroutine.close()

    run(lambda: asyncio.run(nested()))


def test_contexts_of_a_run(run):
    async def main():
        seen = variable.get()
        variable.set("main")
        return seen, await asyncio.create_task(read())

    async def read():
        return variable.get()

    def work():
        variable.set("caller")
        return asyncio.run(main()), variable.get()

    assert run(work) == (("caller", "main"), "caller")


def test_leftover_tasks_are_cancelled_and_awaited(run):
    steps = []

    async def left(name):
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.001)
            steps.append(name)

    async def main():
        tasks = [asyncio.create_task(left(name)) for name in "ab"]
        asyncio.get_running_loop().call_soon(lambda: tasks.append(asyncio.ensure_future(left("c"))))
        await asyncio.sleep(0.01)
        return tasks

    def work():
        tasks = asyncio.run(main())
        assert sorted(steps) == ["a", "b", "c"]
        return [task.cancelled() for task in tasks]

    assert run(work) == [True] * 3


def test_errors_of_leftover_tasks_are_reported(run, caplog):
    async def left():
        try:
            await asyncio.sleep(60)
        finally:
            raise LookupError("in cleanup")

    async def main():
        asyncio.current_task().left = task = asyncio.create_task(left())
        await asyncio.sleep(0)
        return task

    def work():
        with pytest.raises(LookupError, match="in cleanup"):
            asyncio.run(main()).result()

    run(work)
    assert [record.message.splitlines()[0] for record in caplog.records] == [
        "unhandled exception during asyncio.run() shutdown"
    ]


def test_asynchronous_generators_are_closed(run):
    steps = []

    async def numbers():
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(0.001)
            steps.append("closed")

    async def main():
        generator = numbers()
        assert await anext(generator) == 1
        return generator

    def work():
        generator = asyncio.run(main())
        assert steps == ["closed"]
        assert generator.ag_frame is None

    run(work)


def test_jobs_of_the_executor_end_before_the_run(run):
    steps = []

    async def main():
        asyncio.get_running_loop().run_in_executor(None, lambda: [time.sleep(0.05), steps.append("job")])
        assert await asyncio.to_thread(threading.get_ident) != threading.get_ident()

    def work():
        asyncio.run(main())
        return steps

    assert run(work) == ["job"]


def test_exits_in_main_come_out_of_run(run):
    cleaned = []

    async def main(kind):
        try:
            await asyncio.sleep(0)
            raise kind(7)
        finally:
            cleaned.append(kind)

    async def cancelled():
        asyncio.current_task().cancel("message")
        await asyncio.sleep(1)

    def work():
        for kind in (SystemExit, KeyboardInterrupt):
            with pytest.raises(kind):
                asyncio.run(main(kind))
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(cancelled())

    run(work)
    assert cleaned == [SystemExit, KeyboardInterrupt]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_exits_in_tasks_and_callbacks_come_out_of_run(run, kind):
    async def child():
        await asyncio.sleep(0)
        raise kind(7)

    def callback():
        raise kind(7)

    def handler(loop, context):
        # Ignore other reports: if a task of an earlier run is collected now, asyncio may report that task's exception.
        if isinstance(context["exception"], ZeroDivisionError):
            callback()

    begin = {
        "task": lambda loop: loop.create_task(child()),
        "callback": lambda loop: loop.call_soon(callback),
        "timer": lambda loop: loop.call_later(0.001, callback),
        "exception handler": lambda loop: loop.set_exception_handler(handler) or loop.call_soon(lambda: 1 / 0),
        "many arguments": lambda loop: loop.call_soon(lambda *args: callback(), *range(9)),
    }
    steps = []

    async def main(way):
        left = begin[way](asyncio.get_running_loop())
        try:
            await asyncio.sleep(60)
        finally:
            asyncio.get_running_loop().set_exception_handler(None)
            steps.append((way, asyncio.current_task().cancelling(), left is None))

    async def at_the_end():
        async def left():
            try:
                await asyncio.sleep(60)
            finally:
                raise kind(8)

        task = asyncio.create_task(left())
        steps.append(task)  # this keeps the task alive
        await asyncio.sleep(0)

    def work():
        for way in begin:
            with pytest.raises(kind) as raised:
                asyncio.run(main(way))
            assert raised.value.args == (7,)
        with pytest.raises(kind) as raised:
            asyncio.run(at_the_end())
        assert raised.value.args == (8,)

    run(work)
    assert steps[:-1] == [(way, 1, False) for way in begin]


def test_an_exit_of_the_program_also_ends_an_active_run():
    ends = []

    async def waits():
        try:
            await asyncio.sleep(60)
        finally:
            ends.append("run")

    def callback():
        raise SystemExit(3)

    async def main():
        blocking = asyncio.create_task(coro.run_blocking(asyncio.run, waits()))
        await asyncio.sleep(0.001)
        asyncio.get_running_loop().call_soon(callback)
        await blocking

    with pytest.raises(SystemExit) as raised:
        grapeshot.run(main())
    assert raised.value.code == 3
    assert ends == ["run"]


def test_all_tasks_in_a_thread_that_a_run_has_started(run):
    async def inner():
        other = asyncio.create_task(asyncio.sleep(60))
        return asyncio.all_tasks() == {asyncio.current_task(), other}

    def in_a_loop_of_its_own():
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            return runner.run(inner())

    async def main():
        return await asyncio.to_thread(in_a_loop_of_its_own)

    assert run(lambda: asyncio.run(main()))


def test_asyncio_works_in_main(run):
    async def child(value):
        await asyncio.sleep(0)
        return value

    async def main():
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(child(value)) for value in range(3)]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await asyncio.sleep(60)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(60), 0.001)
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "print(5)", stdout=subprocess.PIPE)
        output, _ = await process.communicate()
        queue: asyncio.Queue[int] = asyncio.Queue()
        queue.put_nowait(4)
        return [task.result() for task in tasks], output, await queue.get()

    if run is in_thread and sys.version_info < (3, 12):
        pytest.skip("up to 3.11, asyncio's child watchers restrict subprocesses in threads")
    assert run(lambda: asyncio.run(main())) == ([0, 1, 2], b"5\n", 4)


def test_all_tasks_in_main_belong_to_the_run(run):
    async def main():
        tasks = asyncio.all_tasks()
        for task in tasks - {asyncio.current_task()}:
            task.cancel()
        return len(tasks), tasks == asyncio.all_tasks(asyncio.get_running_loop())

    assert run(lambda: asyncio.run(main())) == (1, True)
