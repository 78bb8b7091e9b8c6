"""Ways to write a blocking-style server. They all have the same few methods, so that one program measures them
all.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from benchmarks import _loops
from benchmarks._load import UnsupportedError
from benchmarks._loops import RAW

OURS, GEVENT, RUNLOOM = "grapeshot", "gevent", "runloom"
# Other servers, shown for comparison. Both run on grapeshot's loop.
PROTOCOL, TASKS = "protocol", "tasks"

Function = Callable[..., Any]


class Style(Protocol):
    """The functions that every style provides."""

    # Runs a program in a cooperative thread and waits until it returns.
    run: Function
    # Starts a cooperative thread that calls a function with these arguments.
    spawn: Function
    # Makes a TCP socket. While one of its calls waits, other threads of the style run.
    make_socket: Function
    # Waits until a descriptor can be read.
    wait_readable: Function
    # Calls a function in a real thread. Other threads of the style run in the meantime.
    run_in_thread: Function


class Coros:
    """grapeshot's coros, with coro sockets."""

    def __init__(self) -> None:
        from grapeshot import coro

        self.run: Function = coro.run
        self.spawn: Function = coro.spawn
        self.make_socket: Function = coro.tcp_sock
        self.wait_readable: Function = coro.wait_for_read
        self.run_in_thread: Function = coro.threads.run


class PatchedCoros(Coros):
    """grapeshot's coros, with Python's own `socket` module, patched."""

    def __init__(self) -> None:
        super().__init__()
        from grapeshot import coro

        try:
            coro.patch("socket")
        except ValueError as error:
            raise UnsupportedError(str(error)) from error
        self.make_socket: Function = socket.socket


class Gevent:
    """gevent's own socket class, which is also the class that gevent's monkey patching installs."""

    def __init__(self) -> None:
        import gevent
        import gevent.socket

        def run(program: Function, *arguments: Any) -> Any:
            return gevent.spawn(program, *arguments).get()

        self.run: Function = run
        self.spawn = gevent.spawn
        self.make_socket = gevent.socket.socket
        self.wait_readable = gevent.socket.wait_read
        self.run_in_thread = lambda function, *arguments: gevent.get_hub().threadpool.apply(function, arguments)


class Runloom:
    """runloom on one thread. It has only patched sockets."""

    def __init__(self) -> None:
        import runloom

        runloom.monkey.patch()

        def run(program: Function, *arguments: Any) -> None:
            runloom.run(1, lambda: program(*arguments))

        self.run: Function = run
        self.spawn: Function = runloom.fiber
        self.make_socket: Function = socket.socket
        self.wait_readable: Function = lambda fd: runloom.wait_fd(fd, 1)
        self.run_in_thread: Function = runloom.blocking


STYLES: dict[str, dict[str, Callable[[], Style]]] = {
    "blocking": {OURS: Coros, GEVENT: Gevent, RUNLOOM: Runloom},
    "patched": {OURS: PatchedCoros, GEVENT: Gevent, RUNLOOM: Runloom},
}


def why_missing(name: str) -> str | None:
    """Return why this style cannot take part here, or None. To find out, import its module in a new process."""
    if name == RAW:
        return None if sys.platform == "linux" else "the raw server is made for epoll"
    module = {OURS: "grapeshot.coro", PROTOCOL: "grapeshot", TASKS: "grapeshot"}.get(name, name)
    return _loops.why_it_fails(f"import {module}")


def available(names: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Return the names that can take part, and the reason why each of the others cannot. Also print the reasons."""
    return _loops.available(names, why_missing)
