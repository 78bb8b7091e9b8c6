"""Helpers of the subprocess tests: short programs, a recording protocol, a list of the children."""

from __future__ import annotations

import asyncio
from typing import Any

import psutil
from support import until

SHELL = "/bin/sh"


def sh(script: str) -> tuple[str, str, str]:
    """Return the arguments that run `script` in a shell."""
    return SHELL, "-c", script


# A program that ends when its standard input is closed.
CAT = sh("exec cat")
# A program that runs until it is killed.
BLOCKED = sh("exec sleep 3600")


class Events(asyncio.SubprocessProtocol):
    """Records its callbacks in order, and collects the data of each pipe in `data`."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.data = {1: b"", 2: b""}
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.events.append("made")

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if ("data", fd) not in self.events:
            self.events.append(("data", fd))
        self.data[fd] += data

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self.events.append(("pipe lost", fd))

    def process_exited(self) -> None:
        self.events.append("exited")

    def connection_lost(self, exc: Exception | None) -> None:
        self.events.append("lost")

    async def wait_lost(self) -> None:
        await until(lambda: "lost" in self.events, "connection_lost")


# Children that do not belong to the test: servers of other tests may run for the whole session.
_others: set[int] = set()


def note_other_children() -> None:
    """Exclude the current children from the result of `children()`."""
    _others.clear()
    _others.update(children())


def children() -> set[int]:
    """Return the ids of this process's children, except those in `_others`. A child that has ended is included until
    its status is fetched.
    """
    return {child.pid for child in psutil.Process().children()} - _others


def has_children() -> bool:
    """Return whether `children()` finds any."""
    return bool(children())
