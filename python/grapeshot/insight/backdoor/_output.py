"""Sends output of a client's commands to that client. All other output goes where it went before.

A context variable tells which client's code is running. So tasks, coros and ``asyncio.to_thread`` calls that a command
starts are covered, too. While there are clients, ``sys.stdout``, ``sys.stderr`` and ``sys.displayhook`` are replaced.
"""

from __future__ import annotations

import contextvars
import sys

from grapeshot._loop.locks import real_rlock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any, Protocol

    class Client(Protocol):
        """The client that receives the output of a command."""

        name: str
        names: dict[str, Any]
        at_end: set[Callable[[], None]]
        looks: dict[str, Any]

        def write(self, text: str) -> bool:
            """Send a text. Return False if the client has disconnected."""


client: contextvars.ContextVar[Client | None] = contextvars.ContextVar("grapeshot_backdoor_client", default=None)

_STREAMS = ("stdout", "stderr")


class Stream:
    """Replaces ``sys.stdout`` or ``sys.stderr``. ``below`` is the stream that was there before."""

    def __init__(self, below: Any) -> None:
        self.below = below

    def write(self, text: str) -> int:
        """Write to the client whose code is running, or else to the stream below."""
        writer = client.get()
        if writer is not None:
            if not isinstance(text, str):
                raise TypeError(f"write() argument must be str, not {type(text).__name__}")
            if writer.write(text):
                return len(text)
        return len(text) if self.below is None else self.below.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def isatty(self) -> bool:
        """Whether the stream below is a terminal. False while a client's code is running."""
        return client.get() is None and self.below is not None and self.below.isatty()

    def flush(self) -> None:
        """Flush the stream below, unless a client's code is running: output to a client is not buffered here."""
        if client.get() is None and self.below is not None:
            self.below.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)


class _Display:
    """Replaces ``sys.displayhook``, so that each client has a ``_`` of its own."""

    def __init__(self, below: Callable[[Any], object]) -> None:
        self.below = below

    def __call__(self, value: Any) -> None:
        shown = client.get()
        if shown is None:
            self.below(value)
        elif value is not None:
            sys.stdout.write(f"{value!r}\n")
            shown.names["_"] = value


_users = 0
# Held while `_users` and the streams are changed.
_changing = real_rlock()


def take() -> None:
    """Start redirecting the output of clients. Each call must be paired with a call of :func:`give_back`."""
    global _users
    with _changing:
        _users += 1
        if _users == 1:
            for name in _STREAMS:
                setattr(sys, name, Stream(getattr(sys, name)))
            sys.displayhook = _Display(sys.displayhook)


def give_back() -> None:
    """Undo one call of :func:`take`. A stream or hook that other code has set since then is kept."""
    global _users
    with _changing:
        _users -= 1
        if _users == 0:
            for name in _STREAMS:
                stream: Any = getattr(sys, name)
                if isinstance(stream, Stream):
                    setattr(sys, name, stream.below)
            if isinstance(sys.displayhook, _Display):
                sys.displayhook = sys.displayhook.below
