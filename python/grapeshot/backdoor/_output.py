"""Where output goes: what the code of a client writes goes to that client, and all else where it went before.

Whose code runs is a context variable. So it holds for the tasks, coros and ``asyncio.to_thread`` calls that a command
makes, too. ``sys.stdout``, ``sys.stderr`` and ``sys.displayhook`` are replaced while there are clients.
"""

from __future__ import annotations

import contextvars
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any, Protocol

    class Client(Protocol):
        """Where the output of a command goes."""

        name: str
        names: dict[str, Any]
        at_end: set[Callable[[], None]]
        looks: dict[str, Any]

        def write(self, text: str) -> bool:
            """Send a text. False: the client is gone."""


client: contextvars.ContextVar[Client | None] = contextvars.ContextVar("grapeshot_backdoor_client", default=None)

_STREAMS = ("stdout", "stderr")


class Stream:
    """Stands for ``sys.stdout`` or ``sys.stderr``; ``below`` is what was there before."""

    def __init__(self, below: Any) -> None:
        self.below = below

    def write(self, text: str) -> int:
        """Write to the client whose code runs, otherwise to the stream below."""
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
        """Whether it is a terminal. A client is none."""
        return client.get() is None and self.below is not None and self.below.isatty()

    def flush(self) -> None:
        """Flush the stream below. What goes to a client is not buffered here."""
        if client.get() is None and self.below is not None:
            self.below.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)


class _Display:
    """Stands for ``sys.displayhook``: each client has a ``_`` of its own."""

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


def take() -> None:
    """Begin to separate the output of clients. Each call is undone by one of :func:`give_back`."""
    global _users
    _users += 1
    if _users == 1:
        for name in _STREAMS:
            setattr(sys, name, Stream(getattr(sys, name)))
        sys.displayhook = _Display(sys.displayhook)


def give_back() -> None:
    """Undo a :func:`take`. What somebody else has put there meanwhile stays."""
    global _users
    _users -= 1
    if _users == 0:
        for name in _STREAMS:
            stream: Any = getattr(sys, name)
            if isinstance(stream, Stream):
                setattr(sys, name, stream.below)
        if isinstance(sys.displayhook, _Display):
            sys.displayhook = sys.displayhook.below
