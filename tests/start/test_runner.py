"""asyncio.run and asyncio.Runner with loop_factory."""

from __future__ import annotations

import asyncio
import contextvars
import sys

import pytest
from support import loop_factory, run_script

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


@pytest.fixture
def factory(loop_kind, _audit):
    return loop_factory(loop_kind)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="loop_factory of asyncio.run is new in 3.12")
def test_run_with_loop_factory(factory):
    async def main():
        return type(asyncio.get_running_loop())

    loop = factory()
    loop.close()
    assert asyncio.run(main(), loop_factory=factory) is type(loop)


def test_runner(factory):
    async def bump():
        await asyncio.sleep(0)
        variable.set(variable.get() + "+")
        return variable.get()

    context = contextvars.copy_context()
    with asyncio.Runner(loop_factory=factory) as runner:
        loop = runner.get_loop()
        assert runner.run(bump(), context=context) == "unset+"
        assert runner.run(bump(), context=context) == "unset++"
        assert not loop.is_closed()
    assert loop.is_closed()
    assert variable.get() == "unset"


def test_runner_debug(factory):
    async def main():
        return asyncio.get_running_loop().get_debug()

    with asyncio.Runner(loop_factory=factory, debug=True) as runner:
        assert runner.run(main()) is True


def test_runner_cancels_remaining_tasks(factory):
    seen = []

    async def background(number):
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(0)
            seen.append(number)

    async def generator():
        try:
            yield 1
        finally:
            seen.append("generator")

    async def main():
        tasks.extend(asyncio.get_running_loop().create_task(background(n)) for n in range(3))
        kept.append(generator())
        await anext(kept[0])
        await asyncio.to_thread(seen.append, "thread")

    tasks, kept = [], []
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())
    assert sorted(map(str, seen)) == ["0", "1", "2", "generator", "thread"]
    assert all(task.cancelled() for task in tasks)


def test_runner_reports_errors_of_cancelled_tasks(factory, caplog):
    async def background():
        try:
            await asyncio.sleep(1000)
        finally:
            raise LookupError("while cancelled")

    async def main():
        tasks.append(asyncio.get_running_loop().create_task(background()))
        await asyncio.sleep(0)

    tasks = []
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())
    tasks.clear()
    assert any("unhandled exception during asyncio.run() shutdown" in record.message for record in caplog.records)
    caplog.clear()


def test_process_exit_with_an_open_loop(loop_kind):
    """A process may exit while a loop with a timer and a transport is still open: nothing crashes."""
    out = run_script(
        loop_kind,
        """
        import asyncio, socket
        loop = new_event_loop()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        transport, protocol = loop.run_until_complete(loop.connect_accepted_socket(asyncio.Protocol, ours))
        loop.call_later(1000, print)
        loop.call_soon(print)
        transport.write(b"x")
        print("leaving")
        """,
        flags=("-W", "ignore"),
    )
    assert out.strip() == "leaving"


def test_sys_exit_in_a_task(loop_kind):
    out = run_script(
        loop_kind,
        """
        import asyncio, sys
        async def main():
            await asyncio.sleep(0)
            sys.exit(0)
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            try:
                runner.run(main())
            finally:
                print("left")
        """,
    )
    assert out.strip() == "left"
