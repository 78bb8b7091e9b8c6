"""The handlers of a server's methods, and how each kind of function is run.

function           called in the connection's callback, so it must not block
async function     run as a task, whose first step runs at once (from Python 3.12 on, if the loop has no task factory)
async generator    run by a task, which sends the generator's items as the client accepts them
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, NamedTuple, Protocol


class BadCallError(Exception):
    """The function cannot be called with these arguments. ``args[0]`` is the TypeError."""


class BadResultError(Exception):
    """The function's result, or an item of its stream, cannot be sent. ``args[0]`` is the codec's error."""


class Running(Protocol):
    """A call that is running: a task, or another object with these methods."""

    def done(self) -> bool: ...
    def cancel(self) -> bool: ...
    def cancelled(self) -> bool: ...
    def exception(self) -> BaseException | None: ...
    def result(self) -> Any: ...
    def add_done_callback(self, fn: Callable[[Any], object], /) -> object: ...


class Outlet(Protocol):
    """Sends the items of a stream."""

    def send_item(self, item: Any) -> bool:
        """Send an item. If this returns False, call wait_ready() before sending the next one."""

    async def wait_ready(self) -> None: ...


# Starts a call. Takes an outlet (None unless the call streams its results), the function and its arguments.
Start = Callable[[Any, Callable[..., Any], Any, Any], Running]


class Handler(NamedTuple):
    """A registered method. ``start`` is None for a function that is called in place."""

    function: Callable[..., Any]
    start: Start | None
    is_stream: bool


def make_handler(function: Callable[..., Any]) -> Handler:
    """Make a handler for ``function``. Raises TypeError if it is not callable, or is a plain generator function."""
    if not callable(function):
        raise TypeError(f"a method must be callable, got {function!r}")
    if inspect.isgeneratorfunction(function):
        problem = "a generator function would block the loop; use an async generator, or grapeshot.coro.rpc"
        raise TypeError(f"{function!r}: {problem}")
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
    """Whether the function's signature accepts these arguments. True if it has no signature."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:
        return True
    return True
