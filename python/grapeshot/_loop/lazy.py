"""Method modules that are imported only when one of their methods is first looked up.

A program that serves TCP needs neither subprocesses nor datagrams, for example. If all these modules were imported at
once, importing the package would take a third longer.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class LazyModule:
    """Represents a method module in a class body. The methods taken from it import the module when first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, function: str) -> _LazyMethod:
        return _LazyMethod(self._name, function)


class _LazyMethod:
    """A method whose module is not imported yet. On its first lookup it replaces itself with the real function."""

    def __init__(self, module: str, function: str) -> None:
        self._module = module
        self._function = function

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner = owner
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(importlib.import_module(self._module), self._function)
        setattr(self._owner, self._name, function)
        return function if instance is None else types.MethodType(function, instance)
