"""The names that a client of the back door finds. To add a helper, write a function and put it into ``HELPERS``."""

from __future__ import annotations

import asyncio
import builtins
import dataclasses
import inspect
import pydoc
import sys
import threading

from grapeshot import _accounting, _tree, _waits

from . import _output, _sampling

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def tree() -> None:
    """Print the coros and tasks with what they wait for, timers, sockets and threads (grapeshot.tree())."""
    print(_tree.tree())  # noqa: T201  # to the client


def tasks() -> None:
    """Print a line for each coro and task: its name, and what it waits for."""
    waits = _waits.Waits(_running_loop())
    for node in waits.nodes():
        print(f"{node} {node.state}")  # noqa: T201


def where(what: Any = None) -> None:
    """Print the stacks of all threads, tasks and coros, or of one: a task, a coro, or a part of a name."""
    waits = _waits.Waits(_running_loop())
    is_found = what is None
    for node in waits.nodes():
        if what is None or what is node.waiter or (isinstance(what, str) and what in node.name):
            is_found = True
            print("\n".join([f"{node} {node.state}", *(f"  {line}" for line in node.stack)]))  # noqa: T201
    frames = sys._current_frames()
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if frame is None or thread.ident == threading.get_ident():
            continue  # this thread runs the command
        if what is None or what is thread or (isinstance(what, str) and what in thread.name):
            is_found = True
            lines = _waits.stack_lines(_waits.thread_frames(frame))
            print("\n".join([f"thread {thread.name!r}", *(f"  {line}" for line in lines)]))  # noqa: T201
    if not is_found:
        print(f"{what!r} is no task, coro or other thread of this loop, and no part of a name of one")  # noqa: T201


def accounting(each: bool = False) -> None:
    """Print who has used the CPU, the descriptors, memory and limits, and what has grown since it was called last.

    What is alike is one row; ``each=True`` gives each a row of its own.
    """
    client = _output.client.get()
    found = _accounting.accounting(since=None if client is None else client.looks.get("accounting"))
    print(found.text(each))  # noqa: T201
    if client is not None:
        client.looks["accounting"] = dataclasses.replace(found, since=None)


def statistics() -> None:
    """Print what the loop has counted (loop.statistics())."""
    print(_sampling.number_lines(_running_loop()))  # noqa: T201


async def top(seconds: float = 2.0) -> None:
    """To be awaited: watch the loop, and print what it did a second, how long callbacks took and which were slow."""
    sampler = _sampling.Sampler(_running_loop())
    try:
        before = sampler.look()
        await asyncio.sleep(seconds)
        print(_sampling.rate_lines(before, sampler.look()))  # noqa: T201
    finally:
        sampler.end()


async def profile(seconds: float = 10.0, path: str | None = None) -> None:
    """To be awaited: profile the process, and print who had the CPU and who waited; a path is where to save it."""
    from grapeshot import profiler

    with profiler.profile(path) as found:
        await asyncio.sleep(seconds)
    print(found.table())  # noqa: T201


def leave() -> None:
    """End this connection. The process goes on."""
    raise SystemExit


HELPERS: dict[str, Callable[..., object]] = {
    "tree": tree,
    "tasks": tasks,
    "where": where,
    "accounting": accounting,
    "statistics": statistics,
    "top": top,
    "profile": profile,
    "exit": leave,
    "quit": leave,
}


class _Help:
    """``help`` alone lists what there is; ``help(x)`` is Python's help, without a pager."""

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names

    def __repr__(self) -> str:
        width = max(map(len, self._names))
        lines = [f"  {name:{width}}  {text}" for name, text in self._names.items()]
        return "\n".join(["await works. Ctrl-C interrupts what is awaited. There are:", *lines])

    def __call__(self, *args: Any) -> None:
        if not args:
            print(self)  # noqa: T201
        for thing in args:
            try:
                print(pydoc.plain(pydoc.render_doc(thing, "Help on %s:")))  # noqa: T201
            except ImportError as exc:
                print(exc)  # noqa: T201


def _no_input(prompt: object = "") -> str:
    """Refuse: reading the process's own input would block it."""
    raise RuntimeError("input() would wait for the input of the process, not for yours, and block it")


def namespace(loop: asyncio.AbstractEventLoop, more: dict[str, Any]) -> dict[str, Any]:
    """Return the names of a new client."""
    modules: dict[str, Any] = {"asyncio": asyncio, "grapeshot": sys.modules["grapeshot"]}
    if "grapeshot.coro" in sys.modules:
        modules["coro"] = sys.modules["grapeshot.coro"]
    described = {_signature(name, helper): _first_line(helper) for name, helper in HELPERS.items()}
    described["loop"] = "the event loop"
    described["_"] = "what the last expression gave"
    described[", ".join(modules)] = "the modules"
    if more:
        described[", ".join(more)] = "of the program"
    described["help(x)"] = "Python's help on x"
    return {
        "__name__": "__console__",
        "__doc__": None,
        "__builtins__": builtins,
        **modules,
        **HELPERS,
        "loop": loop,
        "help": _Help(described),
        "input": _no_input,
        **more,
    }


def _signature(name: str, helper: Callable[..., object]) -> str:
    parameters = ", ".join(inspect.signature(helper).parameters)
    return f"{name}({parameters})"


def _first_line(helper: Callable[..., object]) -> str:
    return (inspect.getdoc(helper) or "").split("\n")[0]


def _running_loop() -> Any:
    return _tree.running_loop()


_waits.LOOKING.add(__file__)
