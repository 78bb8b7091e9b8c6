"""Topic modules that are imported when one of their methods is first looked up.

A program that serves TCP needs neither subprocesses nor datagrams; with these five topics importing the package would
cost a third more.
"""

from __future__ import annotations

import types
from collections.abc import Callable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def _load(topic: str) -> types.ModuleType:
    if topic == "datagram":
        from . import _datagram

        return _datagram
    if topic == "pipes":
        from . import _pipes

        return _pipes
    if topic == "sendfile":
        from . import _sendfile

        return _sendfile
    if topic == "subprocess":
        from . import _subprocess

        return _subprocess
    from . import _unix

    return _unix


class Topic:
    """Stands for a topic module in a class body: its functions become methods, imported when needed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, function: str) -> _Later:
        return _Later(self._name, function)


class _Later:
    """A method whose module is not imported yet; it puts the function in its own place when it is looked up."""

    def __init__(self, topic: str, function: str) -> None:
        self._topic = topic
        self._function = function

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner = owner
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(_load(self._topic), self._function)
        setattr(self._owner, self._name, function)
        return function if instance is None else types.MethodType(function, instance)
