"""Answers of native code to name lookups and file operations: what they keep alive, and errors in their delivery."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import importlib.util
import os
import sys
import weakref

import pytest
from support import iterations, run_script

from grapeshot._loop import aio


async def ask(loop, what, number=0):
    if what == "names":
        return await loop.getaddrinfo("localhost", 80 + number)
    with open(__file__, "rb") as file:
        return await aio.queue_of(loop).start("read", file.fileno(), 10, number)


WHAT = pytest.mark.parametrize("what", ["names", "files"])
ONLY_COLLECTED = "the loop does not close the queue, which closes itself only when it is collected"


@pytest.mark.leaks_on(asyncio=ONLY_COLLECTED, uvloop=ONLY_COLLECTED)
@pytest.mark.skip_on(
    when=getattr(sys.flags, "thread_inherit_context", False), asyncio="new threads of the executor inherit the context"
)
@WHAT
async def test_values_of_context_variables_are_not_kept(loop, what):
    """The loop's callback that delivers answers must not keep the context of the task that asked first."""

    class Value:
        pass

    variable = contextvars.ContextVar("variable")

    async def first():
        value = Value()
        variable.set(value)
        await ask(loop, what)
        return weakref.ref(value)

    value = await loop.create_task(first())
    await iterations(3)
    gc.collect()
    assert value() is None


@WHAT
@pytest.mark.only_on("grapeshot")
def test_a_closed_loop_keeps_no_descriptors(new_loop, what):
    """A future that waits for an answer may stay alive, but keeps no descriptors open."""
    before = os.listdir("/dev/fd")
    loop = new_loop()
    task = loop.create_task(ask(loop, what))
    loop.run_until_complete(asyncio.sleep(0))
    loop.run_until_complete(asyncio.sleep(0))
    queue = aio.queue_of(loop) if what == "files" else loop._resolver
    assert queue._native is not None
    task._log_destroy_pending = False
    loop.close()
    # A native thread that is about to deliver an answer keeps the descriptors open until it has done so.
    for _ in range(10_000):
        if len(os.listdir("/dev/fd")) == len(before):
            break
    assert len(os.listdir("/dev/fd")) == len(before)
    task.get_coro().close()
    with pytest.raises(RuntimeError, match="Event loop is closed"):
        queue._open()


def interrupted_once():
    """Raise KeyboardInterrupt once, as Ctrl-C may do, at the moment when a future is about to get its answer."""

    def profile(frame, event, function):
        in_loop = os.path.basename(os.path.dirname(frame.f_code.co_filename)) == "_loop"
        if event == "c_call" and in_loop and function.__name__ == "set_result":
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(profile)


def check_interrupted(loop, what):
    tasks = []

    async def main():
        interrupted_once()
        tasks.extend(loop.create_task(ask(loop, what, number)) for number in range(4))
        await asyncio.wait(tasks)

    before = sys.getprofile()
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(main())
    finally:
        sys.setprofile(before)
    done, pending = loop.run_until_complete(asyncio.wait(tasks, timeout=10))
    assert len(done) == 4
    assert not pending
    assert all(task.result() for task in done)
    # The KeyboardInterrupt has not ended the task of main(). The task ends here at the latest.
    loop.run_until_complete(iterations(3))


@pytest.mark.only_on("grapeshot")
def test_an_interrupted_delivery_of_names(loop):
    check_interrupted(loop, "names")


@pytest.mark.leaks_on(asyncio=ONLY_COLLECTED, uvloop=ONLY_COLLECTED)
def test_an_interrupted_delivery_of_files(loop):
    check_interrupted(loop, "files")


@pytest.mark.skipif(importlib.util.find_spec("_testcapi") is None, reason="no _testcapi")
@WHAT
def test_no_memory_for_an_answer(what):
    """No matter which allocation of the delivery fails, each future gets its answer or a MemoryError."""
    code = f"""
    import _testcapi, asyncio, select
    import grapeshot
    from grapeshot._loop import aio, dns

    # Without memory, CPython's futures may lose their callbacks, so nothing awaits the futures here.
    async def check(answers, ask, start, stop):
        asked = [ask(number) for number in range(4)]
        select.select([answers._native], [], [])
        is_raised = False
        try:
            _testcapi.set_nomemory(start, stop)
            try:
                answers._deliver()
            finally:
                _testcapi.remove_mem_hooks()
        except MemoryError:
            is_raised = True
        async with asyncio.timeout(20):
            while answers._waiting or answers._arrived or not all(future.done() for future in asked):
                await asyncio.sleep(0)
        for future in asked:
            error = future.exception()
            assert isinstance(error, (MemoryError, OSError)) or future.result(), error
        return is_raised

    async def main():
        loop = asyncio.get_running_loop()
        names = dns.Resolver(loop)
        files = aio.queue_of(loop)

        def ask_for_name(number):
            return names.ask(dns.question_of_addresses(("localhost", "a b")[number % 2], 80 + number, 0, 0, 0, 0))

        def ask_for_file(number):
            return files.start("read", 10**6 if number == 3 else file.fileno(), 10, number)

        answers, ask = (names, ask_for_name) if {what!r} == "names" else (files, ask_for_file)
        await ask(0)
        raised = [await check(answers, ask, start, stop) for start in range(50) for stop in (start + 1, 0)]
        assert any(raised)
        assert not await check(answers, ask, 1_000_000, 0)  # no allocation fails
        names.close()

    with open({__file__!r}, "rb") as file:
        grapeshot.run(main())
    """
    run_script(None, code)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@WHAT
def test_idle_threads_end_before_a_fork(what):
    """CPython 3.12 and later warn about a fork if the process has several threads, including native ones."""
    code = f"""
    import asyncio, os
    os.environ["GRAPESHOT_FILE_THREADS"] = "1"
    import grapeshot
    from grapeshot._loop import aio

    def threads():
        return len(os.listdir("/proc/self/task"))

    async def main():
        loop = asyncio.get_running_loop()
        with open({__file__!r}, "rb") as file:
            for _ in range(10):
                if {what!r} == "names":
                    await asyncio.gather(*(loop.getaddrinfo("localhost", port) for port in range(5)))
                else:
                    queue = aio.queue_of(loop)
                    await asyncio.gather(*(queue.start("read", file.fileno(), 10, n) for n in range(5)))
                pid = os.fork()
                if not pid:
                    os._exit(threads() - 1)
                assert threads() == 1
                assert os.waitpid(pid, 0)[1] == 0

    grapeshot.run(main())
    """
    run_script(None, code)
