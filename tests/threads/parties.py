"""Tasks, coros and real threads that run the same async function.

In a task, the async function awaits the methods for tasks, such as `aget`. In a coro or a thread, it calls the blocking
methods, such as `get`, and is therefore never suspended. So `drive` can run it without a loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from support import coro_is_available

import grapeshot

KINDS = ["task", "asyncio task", "thread", *(["coro"] if coro_is_available() else [])]


class InTask:
    """What the async function calls in a task."""

    @staticmethod
    async def get(queue):
        return await queue.aget()

    @staticmethod
    async def put(queue, item):
        await queue.aput(item)

    @staticmethod
    async def join(queue):
        await queue.ajoin()

    @staticmethod
    async def receive(channel):
        return await channel.areceive()

    @staticmethod
    async def send(channel, item):
        await channel.asend(item)

    @staticmethod
    async def all_of(channel):
        return [item async for item in channel]

    @staticmethod
    async def get_within(queue, seconds):
        """Return an item, or None if there was none in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await queue.aget()


class InThread:
    """What the async function calls in a real thread."""

    @staticmethod
    async def get(queue):
        return queue.get()

    @staticmethod
    async def put(queue, item):
        queue.put(item)

    @staticmethod
    async def join(queue):
        queue.join()

    @staticmethod
    async def receive(channel):
        return channel.receive()

    @staticmethod
    async def send(channel, item):
        channel.send(item)

    @staticmethod
    async def all_of(channel):
        return list(channel)

    @staticmethod
    async def get_within(queue, seconds):
        import queue as module

        with contextlib.suppress(module.Empty):
            return queue.get(timeout=seconds)


class InCoro(InThread):
    """What the async function calls in a coro. `get_within` interrupts the wait of the coro."""

    @staticmethod
    async def get_within(queue, seconds):
        from grapeshot import coro

        with contextlib.suppress(TimeoutError):
            return coro.with_timeout(seconds, queue.get)


def drive(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that is never suspended."""
    try:
        coroutine.send(None)
    except StopIteration as exc:
        return exc.value
    raise AssertionError("the coroutine was suspended")


class Party:
    """A thread in which a task, a coro or the thread itself runs an async function."""

    def __init__(self, kind: str, main: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> None:
        self._kind, self._main, self._args = kind, main, args
        self._outcome: tuple[Any, BaseException | None] = (None, None)
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        try:
            self._outcome = (self._run(), None)
        except BaseException as exc:
            self._outcome = (None, exc)

    def _run(self) -> Any:
        if self._kind == "thread":
            return drive(self._main(InThread, *self._args))
        if self._kind == "coro":
            from grapeshot import coro

            return coro.run(lambda: drive(self._main(InCoro, *self._args)))
        factory = grapeshot.new_event_loop if self._kind == "task" else asyncio.SelectorEventLoop
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(self._main(InTask, *self._args))

    def result(self) -> Any:
        self._thread.join()
        value, error = self._outcome
        if error is not None:
            raise error
        return value
