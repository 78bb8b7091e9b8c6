"""Probes of timers, tasks, debug mode, processes and threads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from typing import Any

from benchmarks.probes import (
    CAP_S,
    HOST,
    Echo,
    exchange,
    port_of,
    probe,
    sync_probe,
    until,
)


@probe
async def timer_handles(loop: Any) -> None:
    handle = loop.call_later(0, int)
    assert isinstance(handle, asyncio.TimerHandle), f"{type(handle).__name__} is not a TimerHandle"
    order: list[int] = []
    loop.call_later(0.01, order.append, 2)
    loop.call_later(-1, order.append, 0)
    loop.call_later(-0.5, order.append, 1)
    await until(lambda: len(order) == 3)
    assert order == [0, 1, 2], f"they ran in the order {order}"


@probe
async def timers_are_not_early(loop: Any) -> None:
    for _ in range(200):
        when = loop.time() + 0.0013
        fired = loop.create_future()
        loop.call_at(when, lambda fired=fired: fired.set_result(loop.time()))
        assert await fired >= when, "fired early"


@probe
async def eager_tasks(loop: Any) -> None:
    loop.set_task_factory(asyncio.eager_task_factory)
    began: list[bool] = []

    async def work() -> None:
        began.append(True)

    task = asyncio.create_task(work())
    assert (began, task.done()) == ([True], True), "the task has not begun when create_task returns"


@sync_probe
def debug_mode(factory: Any) -> None:
    """A slow callback is logged with its duration, and call_soon from another thread is refused."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("asyncio").addHandler(handler)
    loop = factory()
    loop.set_debug(True)
    loop.slow_callback_duration = 0.01
    loop.call_soon(time.sleep, 0.02)
    refused: list[Exception] = []

    def from_a_thread() -> None:
        try:
            loop.call_soon(int)
        except RuntimeError as error:
            refused.append(error)

    async def main() -> None:
        await loop.run_in_executor(None, from_a_thread)

    loop.run_until_complete(main())
    assert any("took 0.0" in record for record in records), "no slow callback was logged"
    assert refused, "call_soon from another thread was not refused"


@sync_probe
def call_graph(factory: Any) -> None:
    """`asyncio.capture_call_graph` (3.14) reports which task awaits which."""

    async def inner() -> Any:
        return asyncio.capture_call_graph()

    async def outer() -> Any:
        return await asyncio.create_task(inner(), name="inner")

    graph = factory().run_until_complete(outer())
    assert graph.awaited_by, "the graph does not show which task awaits `inner`"


@sync_probe
def fork(factory: Any) -> None:
    """A child process can create a loop of its own, and the parent's loop still works afterwards."""
    loop = factory()
    loop.run_until_complete(asyncio.sleep(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        signal.alarm(int(CAP_S))
        factory().run_until_complete(asyncio.sleep(0.01))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with {status}"
    loop.run_until_complete(asyncio.sleep(0.01))


@sync_probe
def import_patches_nothing(factory: Any) -> None:
    """Importing the package leaves asyncio as it is."""
    code = """
import asyncio, asyncio.events, sys
before = {name: dict(vars(module)) for name, module in sys.modules.items() if name.startswith("asyncio")}
__import__(sys.argv[1])
for name, names in before.items():
    for key, value in names.items():
        assert vars(sys.modules[name]).get(key) is value or key.startswith("__"), (name, key)
"""
    package = factory.__module__.partition(".")[0]
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, package], check=True, timeout=4 * CAP_S)


@sync_probe
def closed_descriptors(factory: Any) -> None:
    """`transport.close()` closes the descriptor shortly afterwards, and not only at garbage collection."""
    loop = factory()

    async def main() -> None:
        server = await loop.create_server(Echo, HOST, 0)
        _, writer = await asyncio.open_connection(HOST, port_of(server))
        fd = writer.get_extra_info("socket").fileno()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        await asyncio.sleep(0.01)
        try:
            os.fstat(fd)
        except OSError:
            return
        raise AssertionError("the descriptor is still open")

    loop.run_until_complete(main())


@sync_probe
def gil_stays_off(factory: Any) -> None:
    """On a free-threaded build: the GIL stays off, and two loops run in two threads."""
    assert not sys._is_gil_enabled(), "importing the loop's package has turned the GIL on"
    answers: list[int] = []

    def run(number: int) -> None:
        loop = factory()

        async def main() -> None:
            server, transport, _ = await exchange(loop)
            for _ in range(100):
                await asyncio.sleep(0)
            transport.close()
            server.close()
            answers.append(number)

        loop.run_until_complete(main())
        loop.close()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [0, 1]
