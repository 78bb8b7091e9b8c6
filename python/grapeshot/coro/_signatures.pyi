"""For type checkers only: the signatures that ``spawn`` and its relatives have in common.

A coro's arguments are checked against its function's, unless ``name``, ``context`` or ``stack`` is given: what can be
written as a type knows no way to have both.
"""

from collections.abc import Callable
from contextvars import Context
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, overload

from ._coroutine import Coro

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Stack = Literal["shared", "own"]

class Spawn(Protocol):
    @overload
    def __call__(
        self,
        fn: Callable[..., _T],
        /,
        *args: Any,
        name: object,
        context: Context | None = None,
        stack: _Stack = "shared",
        **kwargs: Any,
    ) -> Coro[_T]: ...
    @overload
    def __call__(
        self, fn: Callable[..., _T], /, *args: Any, context: Context | None, stack: _Stack = "shared", **kwargs: Any
    ) -> Coro[_T]: ...
    @overload
    def __call__(self, fn: Callable[..., _T], /, *args: Any, stack: _Stack, **kwargs: Any) -> Coro[_T]: ...
    @overload
    def __call__(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Coro[_T]: ...

class SpawnLater(Protocol):
    @overload
    def __call__(
        self,
        seconds: float,
        fn: Callable[..., _T],
        /,
        *args: Any,
        name: object,
        context: Context | None = None,
        stack: _Stack = "shared",
        **kwargs: Any,
    ) -> Coro[_T]: ...
    @overload
    def __call__(
        self,
        seconds: float,
        fn: Callable[..., _T],
        /,
        *args: Any,
        context: Context | None,
        stack: _Stack = "shared",
        **kwargs: Any,
    ) -> Coro[_T]: ...
    @overload
    def __call__(
        self, seconds: float, fn: Callable[..., _T], /, *args: Any, stack: _Stack, **kwargs: Any
    ) -> Coro[_T]: ...
    @overload
    def __call__(self, seconds: float, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Coro[_T]: ...
