"""For type checkers only: the signatures that ``spawn`` and similar functions share.

A type checker checks the arguments against the signature of the function ``fn``, unless ``name``, ``context`` or
``stack`` is given: Python's type system cannot add such keywords to the parameters of a function.
"""

from collections.abc import Callable
from contextvars import Context
from types import CodeType
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

class RunSync(Protocol):
    __code__: CodeType

    @overload
    async def __call__(
        self,
        fn: Callable[..., _T],
        /,
        *args: Any,
        name: object,
        context: Context | None = None,
        stack: _Stack = "shared",
        **kwargs: Any,
    ) -> _T: ...
    @overload
    async def __call__(
        self, fn: Callable[..., _T], /, *args: Any, context: Context | None, stack: _Stack = "shared", **kwargs: Any
    ) -> _T: ...
    @overload
    async def __call__(self, fn: Callable[..., _T], /, *args: Any, stack: _Stack, **kwargs: Any) -> _T: ...
    @overload
    async def __call__(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T: ...

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
