"""The names available at a back door's prompt. To add a helper, write a function and add it to ``HELPERS``."""

from __future__ import annotations

import asyncio
import builtins
import dataclasses
import inspect
import pydoc
import sys
import threading

from grapeshot.insight import _accounting, _tree, _waits

from . import _output, _sampling

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def tree() -> None:
    """Print the coros and tasks (with what they wait for), timers, sockets and threads (grapeshot.insight.tree())."""
    print(_tree.tree())  # noqa: T201  # to the client


def tasks() -> None:
    """Print a line for each coro and task: its name, and what it waits for."""
    waits = _waits.Waits(_running_loop())
    for node in waits.nodes():
        print(f"{node} {node.state}")  # noqa: T201


def where(what: Any = None) -> None:
    """Print the stacks of all threads, tasks and coros, of a given one, or of those whose names contain a text."""
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
            continue  # this is the thread that runs the command
        if what is None or what is thread or (isinstance(what, str) and what in thread.name):
            is_found = True
            lines = _waits.stack_lines(_waits.thread_frames(frame)) if _waits.threads_are_readable() else []
            print("\n".join([f"thread {thread.name!r}", *(f"  {line}" for line in lines)]))  # noqa: T201
    if not is_found:
        print(f"{what!r} is not a task or coro of this loop or another thread, and no name of one contains it")  # noqa: T201


def accounting(each: bool = False) -> None:
    """Print the use of CPU time, descriptors and memory, the limits, and the growth since the last call.

    Items that are alike share a row; with ``each=True``, every item has a row of its own.
    """
    client = _output.client.get()
    found = _accounting.accounting(since=None if client is None else client.looks.get("accounting"))
    print(found.text(each))  # noqa: T201
    if client is not None:
        client.looks["accounting"] = dataclasses.replace(found, since=None)


def statistics() -> None:
    """Print the loop's statistics (loop.statistics())."""
    print(_sampling.number_lines(_running_loop()))  # noqa: T201


async def top(seconds: float = 2.0) -> None:
    """Await it: watch the loop for some seconds, and print rates, how long callbacks took and which were slow."""
    sampler = _sampling.Sampler(_running_loop())
    try:
        before = sampler.collect()
        await asyncio.sleep(seconds)
        print(_sampling.rate_lines(before, sampler.collect()))  # noqa: T201
    finally:
        sampler.end()


async def profile(seconds: float = 10.0, path: str | None = None) -> None:
    """Await it: profile the process for some seconds, print who used CPU and who waited, save the profile to path."""
    from grapeshot.insight import profiler

    with profiler.profile(path) as found:
        await asyncio.sleep(seconds)
    print(found.table())  # noqa: T201


def leave() -> None:
    """Close this connection. The process keeps running."""
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
    """``help`` alone lists the available names; ``help(x)`` shows Python's help without a pager."""

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names

    def __repr__(self) -> str:
        width = max(map(len, self._names))
        lines = [f"  {name:{width}}  {text}" for name, text in self._names.items()]
        return "\n".join(["You can use await here; Ctrl-C interrupts it. These names are available:", *lines])

    def __call__(self, *args: Any) -> None:
        if not args:
            print(self)  # noqa: T201
        for thing in args:
            try:
                print(pydoc.plain(pydoc.render_doc(thing, "Help on %s:")))  # noqa: T201
            except ImportError as exc:
                print(exc)  # noqa: T201


def _no_input(prompt: object = "") -> str:
    """Refuse, because reading the process's own standard input would block its loop."""
    raise RuntimeError("input() does not work here: it would read the standard input of the process and block its loop")


def namespace(loop: asyncio.AbstractEventLoop, more: dict[str, Any]) -> dict[str, Any]:
    """Return the namespace for a new client."""
    modules: dict[str, Any] = {"asyncio": asyncio, "grapeshot": sys.modules["grapeshot"]}
    if "grapeshot.coro" in sys.modules:
        modules["coro"] = sys.modules["grapeshot.coro"]
    described = {_signature(name, helper): _first_line(helper) for name, helper in HELPERS.items()}
    described["loop"] = "the event loop"
    described["_"] = "the value of the last expression"
    described[", ".join(modules)] = "these modules"
    if more:
        described[", ".join(more)] = "provided by the program"
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


_waits.HIDDEN_FILES.add(__file__)
