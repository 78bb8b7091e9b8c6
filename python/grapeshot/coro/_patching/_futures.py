"""The part ``futures`` of :func:`grapeshot.coro.patch`: turns threads of ``ThreadPoolExecutor`` into coros.

This part is patched only if it is named. Without it, ``ThreadPoolExecutor`` keeps real threads, for code that computes
or blocks. Coros can wait for the executor's futures either way.
"""

from __future__ import annotations

import concurrent.futures
import concurrent.futures.thread as _module
import contextlib
import functools
import importlib
import queue
import sys
import threading
import types
import weakref

from grapeshot.coro._errors import CancelledError

from . import _originals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class _Log:
    """The logger of the executor's workers. It drops the report of a worker that was cancelled when its loop ended."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def critical(self, message: str, *args: Any, **kwargs: Any) -> None:
        if not isinstance(sys.exc_info()[1], CancelledError):
            self._logger.critical(message, *args, **kwargs)


def _without_ended(adjust: Any) -> Any:
    """Patch ``_adjust_thread_count``: it no longer counts workers that were coros and whose loop has ended.

    A real worker lives as long as its executor, so the original counts all threads that the executor has started.
    """

    @functools.wraps(adjust)
    def _adjust_thread_count(self: Any) -> None:
        ended = [thread for thread in list(self._threads) if not thread.is_alive()]
        if ended:
            self._threads.difference_update(ended)
            # Take all permits, because the ended workers have left some behind. A living idle worker that loses its
            # permit still takes work.
            while self._idle_semaphore.acquire(blocking=False):
                pass
        adjust(self)

    return _adjust_thread_count


def _make_class() -> type:
    real: Any = _module.ThreadPoolExecutor
    base = types.ModuleType("_base")
    vars(base).update(vars(_module._base), LOGGER=_Log(_module._base.LOGGER))  # type: ignore[attr-defined]
    names = dict(vars(_module))
    # The interpreter waits at its exit for the threads in the original's _threads_queues. Coros end with their loop, so
    # they get a dict of their own.
    names.update(threading=threading, queue=queue, _base=base, _threads_queues=weakref.WeakKeyDictionary())
    names["_global_shutdown_lock"] = threading.Lock()
    names["_worker"] = _originals.clone_function(names["_worker"], names)
    members = {
        name: _originals.clone_function(value, names)
        for name, value in vars(real).items()
        if isinstance(value, types.FunctionType)
    }
    members["_adjust_thread_count"] = _without_ended(members["_adjust_thread_count"])
    members["__doc__"] = "A pool of threads. Threads that it starts when a coro submits work are coros."
    members["__module__"] = real.__module__
    kind: type = type(real)(real.__name__, (real,), members)
    return kind


def patch() -> None:
    """Replace the class; asyncio, grapeshot and InterpreterPoolExecutor keep the original, with real threads."""
    with contextlib.suppress(ImportError):
        # A call in another interpreter blocks its thread, so InterpreterPoolExecutor (Python 3.14 and later) needs real
        # threads. Import its module first: InterpreterPoolExecutor then derives from the original class.
        importlib.import_module("concurrent.futures.interpreter")
    kind = _make_class()
    concurrent.futures.ThreadPoolExecutor  # noqa: B018  # the package sets this name when it is first looked up
    _originals.replace("concurrent.futures.thread", "ThreadPoolExecutor", kind)
    _originals.replace("concurrent.futures", "ThreadPoolExecutor", kind)
    _originals.show("concurrent", "futures", _originals.view("concurrent.futures"))
    _originals.show("concurrent.futures", "thread", _originals.view("concurrent.futures.thread"))
