"""The part ``to_thread`` of :func:`grapeshot.coro.patch`: coros, not threads, run the blocking functions of async code.

It patches ``asyncio.to_thread``, anyio's ``to_thread.run_sync`` (and with it the endpoints, dependencies and background
tasks of Starlette and FastAPI that are plain functions) and asgiref's ``sync_to_async`` (and with it Django's views,
middleware and ORM under ASGI). Functions that need a real thread (``_executor.needs_thread``) still get one, and so do
all functions on loops other than grapeshot's.

``patch()`` without arguments leaves this part out; ``patch(to_thread=True)`` includes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import gc
import sys
import threading
import warnings

from grapeshot._loop.base import BaseLoop
from grapeshot.coro._executor import CoroPoolExecutor, executor_of, needs_thread

from . import PatchWarning, _import_hooks, _originals
from ._thread import RealThread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeGuard

_to_thread = asyncio.to_thread
_real_local: Any = _originals.get_original("_thread", "_local")
_has_warned = False


def _has_coros(loop: object) -> TypeGuard[BaseLoop]:
    """Whether the loop is one of grapeshot's. If not, warn once, because nothing else shows that threads are used."""
    global _has_warned
    if isinstance(loop, BaseLoop):
        return True
    if loop is not None and not _has_warned:
        _has_warned = True
        kind = type(loop)
        warnings.warn(
            f"coro.patch(to_thread=True) has no effect on {kind.__module__}.{kind.__qualname__}: blocking functions run"
            " in threads there; start the program with grapeshot's loop, for example with"
            " uvicorn --loop grapeshot:new_event_loop",
            PatchWarning,
            stacklevel=3,
        )
    return False


async def to_thread(func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Like ``asyncio.to_thread``, but in a coro, unless the function needs a real thread or the loop is not ours."""
    loop = asyncio.get_running_loop()
    if needs_thread(func, [*args, *kwargs.values()]) or not _has_coros(loop):
        return await _to_thread(func, *args, **kwargs)
    call = functools.partial(contextvars.copy_context().run, func, *args, **kwargs)
    return await _submit(loop, call)


def _submit(loop: BaseLoop, fn: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
    job = executor_of(loop)._submit_to_coro(loop, fn, *args)
    if loop._ledger is not None:  # coros have called asyncio.run(), and each such run waits for its jobs
        loop._ledger.job_submitted(job)
    return asyncio.wrap_future(job, loop=loop)


def patch() -> None:
    """Replace ``asyncio.to_thread`` now, and the functions of the other packages when they are imported."""
    _originals.replace("asyncio.threads", "to_thread", to_thread)
    _originals.replace("asyncio", "to_thread", to_thread)
    _import_hooks.after_import("anyio._backends._asyncio", _patch_anyio)
    _import_hooks.after_import("anyio.from_thread", _patch_anyio_portals)
    _import_hooks.after_import("asgiref.sync", _patch_asgiref)


# ---------------------------------------------------------------- anyio


def _patch_anyio(module: Any) -> None:
    backend = module.AsyncIOBackend
    run_in_thread = backend.run_sync_in_worker_thread
    module.WorkerThread._grapeshot_is_real = True
    if type(module.threadlocals) is _real_local:
        # anyio was imported before patch(), so coros would share the attributes of its thread-local object: replace it.
        # A running worker thread of anyio would need the old object. No such thread should be running: patch() belongs
        # at the beginning of a program, and these threads end with their loop.
        old, new = module.threadlocals, threading.local()
        for name, holder in list(sys.modules.items()):
            if name.startswith("anyio.") and vars(holder).get("threadlocals") is old:
                vars(holder)["threadlocals"] = new

    async def run_sync_in_worker_thread(
        cls: Any, func: Callable[..., Any], args: Any, abandon_on_cancel: bool = False, limiter: Any = None
    ) -> Any:
        loop = asyncio.get_running_loop()
        if needs_thread(func, args) or not _has_coros(loop):
            return await run_in_thread(func, args, abandon_on_cancel=abandon_on_cancel, limiter=limiter)
        await cls.checkpoint()
        # If the caller passes no limiter, there is no limit: anyio's default limiter exists because threads are
        # expensive, and coros are not.
        async with limiter or contextlib.nullcontext():
            with module.CancelScope(shield=not abandon_on_cancel) as scope:
                context = contextvars.copy_context()
                context.run(module.set_current_async_library, None)
                if not abandon_on_cancel and scope._parent_scope is not None:
                    scope = scope._parent_scope  # noqa: PLW2901  # check_cancelled() looks at this scope
                call = functools.partial(_call_for_anyio, module, loop, scope, context)
                return await _submit(loop, call, func, args)

    backend.run_sync_in_worker_thread = classmethod(run_sync_in_worker_thread)


def _patch_anyio_portals(module: Any) -> None:
    """Let ``start_blocking_portal()`` use a real thread, because the portal needs a loop of its own."""
    module.Thread = RealThread


def _call_for_anyio(
    module: Any, loop: Any, scope: Any, context: contextvars.Context, func: Callable[..., Any], args: Any
) -> Any:
    """Call the function, with the loop and the cancel scope stored where anyio's ``from_thread`` looks for them."""
    with module.claim_worker_thread(module.AsyncIOBackend, loop):
        module.threadlocals.current_cancel_scope = scope
        try:
            return context.run(func, *args)
        except StopIteration as exc:
            raise RuntimeError("coroutine raised StopIteration") from exc
        finally:
            del module.threadlocals.current_cancel_scope


# ---------------------------------------------------------------- asgiref


class _Executor:
    """``SyncToAsync._executor``: the executor for functions that are not thread-sensitive.

    None means the loop's default executor. For functions that can run in a coro, an executor for coros replaces None.
    """

    def __get__(self, sync_to_async: Any, kind: type | None = None) -> Any:
        if sync_to_async is None:
            return self
        executor = vars(sync_to_async)["_executor"]
        if executor is None and not sync_to_async._thread_sensitive and not needs_thread(sync_to_async.func):
            loop = asyncio._get_running_loop()
            return executor_of(loop) if _has_coros(loop) else None
        return executor

    def __set__(self, sync_to_async: Any, executor: object) -> None:
        vars(sync_to_async)["_executor"] = executor


class _SerialExecutor:
    """``SyncToAsync.single_thread_executor``: one for each loop, instead of one for the process."""

    def __init__(self, original: object) -> None:
        self._original = original

    def __get__(self, sync_to_async: Any, kind: type | None = None) -> Any:
        loop = asyncio._get_running_loop()
        return executor_of(loop, 1) if _has_coros(loop) else self._original


def _patch_asgiref(module: Any) -> None:
    """Call functions in coros, not in threads.

    Each ThreadSensitiveContext has one coro for its thread-sensitive functions. The loop has one coro for all other
    thread-sensitive functions.
    """
    kind = module.SyncToAsync
    made = (vars(each).get("_storage") for each in gc.get_objects() if type(each).__module__ == "asgiref.local")
    if any(type(each) is _real_local for each in (kind.threadlocal, *made)):
        warnings.warn(
            "asgiref was imported before coro.patch(to_thread=True), which should be called first: sync_to_async() "
            "keeps threads, because coros would share asgiref's thread-local objects, such as Django's connections",
            PatchWarning,
            stacklevel=4,
        )
        return
    module.ThreadPoolExecutor = CoroPoolExecutor
    kind._executor = _Executor()
    kind.single_thread_executor = _SerialExecutor(kind.single_thread_executor)
