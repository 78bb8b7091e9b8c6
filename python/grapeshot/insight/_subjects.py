"""Describes the tasks, coros, connections, servers and callbacks of a loop, and decides which of them are alike.

A thousand tasks of one function are alike if they have default names like ``Task-1014``. Two tasks that the program has
named "nightly" and "hourly" are not. Numbers in names are ignored: "worker 1" and "worker 2" are alike.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
from typing import NamedTuple

from grapeshot import _core

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_NUMBERS = re.compile(r"\d[\w.:]*")
_DEFAULT_NAME = re.compile(r"(Task-|coro )\d+")


class Subject(NamedTuple):
    """A task, a coro, a connection, a server or a callback."""

    kind: str
    """``"task"``, ``"coro"``, ``"connection"``, ``"server"`` or ``"callback"``."""
    name: str
    """The name that the program gave it; ``accepts`` for a server. Empty for a default name such as ``Task-7``."""
    function: str
    """The qualified name of its function, or of a connection's protocol class (see ``_protocol``). Empty if unknown."""
    place: str | None
    """Where that function begins, as ``file:line``."""

    @property
    def label(self) -> str:
        """Name and function."""
        return _label(self.name, self.function)

    @property
    def alike(self) -> str:
        """The label without the numbers in the name. It is the same for all subjects that are alike."""
        return _label(without_numbers(self.name), self.function)


def _label(name: str, function: str) -> str:
    if name and function:
        return f"{name} ({function})"
    return name or function or "without a name"


def without_numbers(name: str) -> str:
    """Return the name with one ``*`` in place of each number and the letters, dots and colons directly behind it."""
    return _NUMBERS.sub("*", name)


def subject_of(what: Any) -> Subject:
    """Describe ``what``, which a loop runs: a callback, a coro, a task, a transport or a listener."""
    owner = getattr(what, "__self__", what)
    if isinstance(owner, asyncio.BaseTransport):
        return Subject("connection", "", *_protocol(application_protocol(owner)))
    if type(owner).__name__ == "_Listener":
        return Subject("server", "accepts", "", None)
    if isinstance(owner, _core.Coro):
        return _subject("coro", owner.name, *_function(owner._function))
    get_coro = getattr(owner, "get_coro", None)
    if asyncio.isfuture(owner) and get_coro is not None:
        name = str(owner.get_name())  # type: ignore[attr-defined]
        return _subject("task", name, *_coroutine_function(get_coro()))
    return Subject("callback", "", *_function(what))


def _subject(kind: str, name: str, function: str, place: str | None) -> Subject:
    name = "" if _DEFAULT_NAME.fullmatch(name) else name
    if name and place is not None and place.startswith(_HERE):
        # A patched thread and a client of a back door run an internal function, whose name says little.
        function, place = "", None
    return Subject(kind, name, function, place)


def _coroutine_function(coroutine: Any) -> tuple[str, str | None]:
    """Return the qualified name of a coroutine's function, and where the function begins."""
    name = getattr(coroutine, "__qualname__", None) or type(coroutine).__qualname__
    code = getattr(coroutine, "cr_code", None) or getattr(coroutine, "gi_code", None)
    return str(name), _begin(code)


def application_protocol(transport: Any) -> Any:
    """Return the application's protocol, even if a TLS layer lies between it and the transport."""
    protocol = transport.get_protocol()
    above = getattr(protocol, "_app_protocol", None)
    return protocol if above is None else above


def _protocol(protocol: Any) -> tuple[str, str | None]:
    """Return the name of a protocol's class. For asyncio's streams, return the function that serves them instead."""
    serves = getattr(protocol, "_client_connected_cb", None)
    if isinstance(protocol, asyncio.StreamReaderProtocol) and serves is not None:
        return _function(serves)
    return type(protocol).__qualname__, None


def _function(function: Any) -> tuple[str, str | None]:
    """Return the qualified name of the function that a callback calls, and where the function begins."""
    while isinstance(function, functools.partial):
        function = function.func
    if function is None:
        return "", None
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name), _begin(getattr(function, "__code__", None))


def _begin(code: CodeType | None) -> str | None:
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"
