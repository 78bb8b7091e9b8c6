"""Coros that hide the loop: blocking-style code in them sees what it would see in a thread of its own.

asyncio's functions find no running loop there. Where such code runs asyncio code of its own (``asyncio.run()``,
``loop.run_until_complete()``), that becomes a run on the loop which runs the coro. For that, asyncio's functions that
make and set loops are wrapped when the first such coro is made; everywhere else they do what they did before.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
import warnings

from grapeshot import _core
from grapeshot._base import BaseLoop

from ._borrowed_loop import BorrowedLoop
from ._borrowing import tasks_of_run

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from contextvars import Context
    from typing import Any, Literal, ParamSpec, TypeVar, overload

    from ._coroutine import Coro

    _P = ParamSpec("_P")
    _T = TypeVar("_T")

_is_prepared = False
_preparing = threading.RLock()  # a finalizer may come here while the thread prepares


if TYPE_CHECKING:

    @overload
    async def run_blocking(
        fn: Callable[..., _T],
        /,
        *args: Any,
        name: object,
        context: Context | None = None,
        stack: Literal["shared", "own"] = "shared",
        **kwargs: Any,
    ) -> _T: ...

    @overload
    async def run_blocking(
        fn: Callable[..., _T],
        /,
        *args: Any,
        context: Context | None,
        stack: Literal["shared", "own"] = "shared",
        **kwargs: Any,
    ) -> _T: ...

    @overload
    async def run_blocking(
        fn: Callable[..., _T], /, *args: Any, stack: Literal["shared", "own"], **kwargs: Any
    ) -> _T: ...

    @overload
    async def run_blocking(fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T: ...


async def run_blocking(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run code that was written for a thread in a coro while the calling task waits; return its result.

    As ``run_sync``, but asyncio's functions see no running loop in the coro, as in a thread: Django's ORM works there,
    and ``asyncio.run(main())`` runs ``main()`` on the loop that runs the coro. What ``await_`` runs sees the loop.
    """
    return await spawn_hiding(fn, *args, **kwargs)


def call_blocking(fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Call code that was written for a thread in this coro, as ``run_blocking`` does in a coro of its own.

    Raises:
        YieldFromMain: not in a coro.
        TypeError: ``fn`` cannot be called, or is an async function.
        Exception: the function's.
    """
    _core._coro_check_function(fn, "call_blocking")
    coro = _core._coro_current()
    if coro._hides_loop:
        return fn(*args, **kwargs)
    prepare()
    vars(coro).pop("_set_loop", None)
    task = _core._coro_hide_loop()
    try:
        return fn(*args, **kwargs)
    finally:
        _core._coro_show_loop(task)
        del coro, task  # an exception keeps this frame


def spawn_hiding(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Coro[Any]:
    """Start a coro as ``spawn`` does, in which asyncio's functions see no running loop."""
    prepare()
    return _core._coro_spawn_hiding(fn, *args, **kwargs)  # type: ignore[no-any-return]


def prepare() -> None:
    """Wrap asyncio's functions, once. Everything goes on to work as before outside of coros that hide the loop."""
    global _is_prepared
    if _is_prepared:
        return
    with _preparing:
        if not _is_prepared:
            _wrap()
            _is_prepared = True


def _wrap() -> None:
    BaseLoop._borrow = staticmethod(_borrow)
    policy = getattr(asyncio.events, "_BaseDefaultEventLoopPolicy", None) or getattr(
        asyncio.events, "BaseDefaultEventLoopPolicy", None
    )
    # Without policies the functions of the module do what the policy's methods did.
    owners: list[Any] = [asyncio.events, asyncio] if policy is None else [policy]
    for name, wrap in (("new_event_loop", _wrap_new), ("get_event_loop", _wrap_get), ("set_event_loop", _wrap_set)):
        function = wrap(getattr(owners[0], name))
        for owner in owners:
            setattr(owner, name, function)
    runner: Any = asyncio.Runner
    runner._lazy_init = _wrap_lazy_init(runner._lazy_init)
    asyncio.all_tasks = asyncio.tasks.all_tasks = _wrap_all_tasks(asyncio.tasks.all_tasks)


def _hiding_coro() -> Any:
    """Return the running coro if it hides the loop, and no loop of its own runs in it; else None."""
    if _core._coro_is_hidden() and asyncio._get_running_loop() is None:
        return _core._coro_current_or_none()
    return None


def _borrow(loop: Any) -> BorrowedLoop | None:
    """Return a new borrowed loop for the running coro; None if it does not hide ``loop`` (None: any loop)."""
    coro = _hiding_coro()
    if coro is None or (loop is not None and coro._loop is not loop):
        return None
    return _make(coro)


def _make(coro: Any) -> BorrowedLoop:
    return BorrowedLoop(coro._loop)  # type: ignore[abstract]  # the module gives it the other methods


def _wrap_new(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def new_event_loop(*policy: Any) -> Any:
        loop = _borrow(None)
        return original(*policy) if loop is None else loop

    return new_event_loop


def _wrap_get(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_event_loop(*policy: Any) -> Any:
        coro = _hiding_coro()
        if coro is None:
            return original(*policy)
        own = vars(coro)
        if own.get("_stands_for_main_thread") and "_set_loop" not in own and sys.version_info < (3, 14):
            # asyncio makes a loop for the main thread.
            if sys.version_info >= (3, 12):
                warnings.warn("There is no current event loop", DeprecationWarning, stacklevel=2)
            own["_set_loop"] = _make(coro)
        if own.get("_set_loop") is None:
            raise RuntimeError(f"There is no current event loop in thread {threading.current_thread().name!r}.")
        return own["_set_loop"]

    return get_event_loop


def _wrap_set(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def set_event_loop(*args: Any) -> None:
        coro = _hiding_coro()
        loop = args[-1]
        if coro is None or (loop is not None and not isinstance(loop, asyncio.AbstractEventLoop)):
            original(*args)
        else:
            coro._set_loop = loop

    return set_event_loop


def _wrap_lazy_init(original: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(original)
    def _lazy_init(runner: Any) -> None:
        factory = runner._loop_factory
        if factory is None or _hiding_coro() is None:
            original(runner)
            return
        runner._loop_factory = functools.partial(_make_as, factory)
        try:
            original(runner)
        finally:
            runner._loop_factory = factory

    return _lazy_init


def _make_as(factory: Callable[[], asyncio.AbstractEventLoop]) -> asyncio.AbstractEventLoop:
    """Call a loop factory. A loop that would block the thread is closed, and a borrowed one takes its place."""
    loop = factory()
    if isinstance(loop, BorrowedLoop):
        return loop
    borrowed = _borrow(None)
    if borrowed is None:
        return loop
    if not loop.is_running():
        loop.close()
    return borrowed


def _wrap_all_tasks(original: Callable[..., set[Any]]) -> Callable[..., set[Any]]:
    @functools.wraps(original)
    def all_tasks(loop: Any = None) -> set[Any]:
        if isinstance(loop, BorrowedLoop):
            return loop._run.left()
        return tasks_of_run(loop, original(loop))

    return all_tasks
