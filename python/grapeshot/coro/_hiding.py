"""Coros that hide the loop: blocking-style code in them sees no running loop, as in a thread of its own.

If such code calls ``asyncio.run()`` or ``loop.run_until_complete()``, its asyncio code runs on the loop that already
runs the coro (see ``_borrowed_loop``). To make this possible, asyncio's functions that make, get and set loops, and
``all_tasks``, are wrapped when a coro hides the loop for the first time. Outside of these coros and of the asyncio code
that they run, the wrapped functions do what asyncio's do.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
import warnings

from grapeshot import _core
from grapeshot._loop import hooks

from ._borrowed_loop import BorrowedLoop
from ._borrowing import tasks_of_run

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, ParamSpec, TypeVar

    from ._coroutine import Coro
    from ._signatures import RunSync

    _P = ParamSpec("_P")
    _T = TypeVar("_T")

_is_prepared = False
_preparing = threading.RLock()  # reentrant: a finalizer may call prepare() while its thread is in prepare()


if TYPE_CHECKING:
    run_blocking: RunSync
else:

    async def run_blocking(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run ``fn``, which was written for a thread, in a new coro; return its result. The calling task waits.

        This is like ``run_sync``, but asyncio's functions see no running loop in the coro, as in a thread. So Django's
        ORM works there, and ``asyncio.run(main())`` runs ``main()`` on the loop that runs the coro. Awaitables that the
        code passes to ``await_`` do see the loop.
        """
        return await spawn_hiding(fn, *args, **kwargs)


def call_blocking(fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Call ``fn``, written for a thread, in the running coro; return its result. asyncio sees no running loop there.

    In a task, use ``run_blocking``, which does the same in a new coro.

    Raises:
        YieldFromMain: not called in a coro.
        TypeError: ``fn`` cannot be called, or is an async function.
        Exception: whatever the function raises.
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
        del coro, task  # an exception's traceback refers to this frame: avoid a reference cycle


def spawn_hiding(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Coro[Any]:
    """Like ``spawn``, but asyncio's functions see no running loop in the coro."""
    prepare()
    return _core._coro_spawn_hiding(fn, *args, **kwargs)  # type: ignore[no-any-return]


def prepare() -> None:
    """Wrap asyncio's functions if they are not wrapped yet."""
    global _is_prepared
    if _is_prepared:
        return
    with _preparing:
        if not _is_prepared:
            _wrap()
            _is_prepared = True


def _wrap() -> None:
    hooks.borrow = _borrow
    policy = getattr(asyncio.events, "_BaseDefaultEventLoopPolicy", None) or getattr(
        asyncio.events, "BaseDefaultEventLoopPolicy", None
    )
    # Python versions without loop policies have only the functions of asyncio.events, which asyncio also exports.
    owners: list[Any] = [asyncio.events, asyncio] if policy is None else [policy]
    for name, wrap in (("new_event_loop", _wrap_new), ("get_event_loop", _wrap_get), ("set_event_loop", _wrap_set)):
        function = wrap(getattr(owners[0], name))
        for owner in owners:
            setattr(owner, name, function)
    runner: Any = asyncio.Runner
    runner._lazy_init = _wrap_lazy_init(runner._lazy_init)
    asyncio.all_tasks = asyncio.tasks.all_tasks = _wrap_all_tasks(asyncio.tasks.all_tasks)


def _hiding_coro() -> Any:
    """Return the running coro if it hides the loop and is not itself running another loop; else None."""
    if _core._coro_is_hidden() and asyncio._get_running_loop() is None:
        return _core._coro_current_or_none()
    return None


def _borrow(loop: Any) -> BorrowedLoop | None:
    """Return a new borrowed loop for the running coro, or None if the coro does not hide ``loop``.

    If ``loop`` is None, any hidden loop will do.
    """
    coro = _hiding_coro()
    if coro is None or (loop is not None and coro._loop is not loop):
        return None
    return _make(coro)


def _make(coro: Any) -> BorrowedLoop:
    return BorrowedLoop(coro._loop)  # type: ignore[abstract]  # its module adds the other methods at run time


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
            # Before Python 3.14, asyncio makes a loop when the main thread has none.
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
    """Call a loop factory, and return a borrowed loop in place of a real one, which would block the thread."""
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
