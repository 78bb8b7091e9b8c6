"""What a server calls: a function, how it is started, and what a call that does not end at once needs.

function           called in the connection's callback: it must not block
async function     a task (from 3.12 on it begins at once, and is no task for the loop if it does not wait)
async generator    a task that sends the items, as many as the client takes
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, NamedTuple, Protocol


class BadCallError(Exception):
    """The function cannot be called with these arguments. The argument is the TypeError that says so."""


class BadResultError(Exception):
    """What the function has made cannot be sent. The argument is the codec's error."""


class Running(Protocol):
    """What runs a call: a task, or whatever has these methods of one."""

    def done(self) -> bool: ...
    def cancel(self) -> bool: ...
    def cancelled(self) -> bool: ...
    def result(self) -> Any: ...
    def add_done_callback(self, fn: Callable[[Any], object], /) -> object: ...


class Outlet(Protocol):
    """Where a stream's items go."""

    def send_item(self, item: Any) -> bool:
        """Send an item. If it returns False, wait_ready() comes before the next one."""

    async def wait_ready(self) -> None: ...


# Begins a call of the function with these arguments. Only a stream has an outlet.
Start = Callable[[Any, Callable[..., Any], Any, Any], Running]


class Handler(NamedTuple):
    """A registered method. ``start`` is None for a function that is called in place."""

    function: Callable[..., Any]
    start: Start | None
    is_stream: bool


def make_handler(function: Callable[..., Any]) -> Handler:
    """Find out how a function is called. Raises TypeError for what is no function, and for a generator."""
    if not callable(function):
        raise TypeError(f"a method must be callable, not {function!r}")
    if inspect.isgeneratorfunction(function):
        raise TypeError("a generator would block the loop: make it an async generator, or use grapeshot.coro.rpc")
    if inspect.isasyncgenfunction(function):
        return Handler(function, _start_stream, True)
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return Handler(function, _start_task, False)
    return Handler(function, None, False)


def _start_task(_outlet: None, function: Callable[..., Any], args: Any, kwargs: Any) -> Running:
    return _new_task(function(*args, **kwargs))


def _start_stream(outlet: Outlet, function: Callable[..., Any], args: Any, kwargs: Any) -> Running:
    return _new_task(_send_items(outlet, function(*args, **kwargs)))


if sys.version_info >= (3, 12):

    def _new_task(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        loop = asyncio.get_running_loop()
        if loop.get_task_factory() is None:
            return asyncio.Task(coroutine, loop=loop, eager_start=True)
        return loop.create_task(coroutine)

else:

    def _new_task(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return asyncio.get_running_loop().create_task(coroutine)


async def _send_items(outlet: Outlet, generator: AsyncGenerator[Any, None]) -> None:
    async with contextlib.aclosing(generator):
        await outlet.wait_ready()
        async for item in generator:
            if not outlet.send_item(item):
                await outlet.wait_ready()


def accepts(function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether the function can be called so; True if it does not tell."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:
        return True
    return True
