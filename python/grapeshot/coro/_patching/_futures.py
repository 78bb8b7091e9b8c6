"""The part ``futures`` of :func:`grapeshot.coro.install`, which has to be asked for: pools whose threads are coros.

Without it ``ThreadPoolExecutor`` has real threads, for what computes or blocks. Coros can wait for its futures either
way.
"""

from __future__ import annotations

import concurrent.futures
import concurrent.futures.thread as _module
import contextlib
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
    """The logger of the executor's workers, which the end of their loop ends as well. That is no error."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def critical(self, message: str, *args: Any, **kwargs: Any) -> None:
        if not isinstance(sys.exc_info()[1], CancelledError):
            self._logger.critical(message, *args, **kwargs)


def _make_class() -> type:
    real: Any = _module.ThreadPoolExecutor
    base = types.ModuleType("_base")
    vars(base).update(vars(_module._base), LOGGER=_Log(_module._base.LOGGER))  # type: ignore[attr-defined]
    names = dict(vars(_module))
    # The originals have their threads end when the interpreter exits. Coros end with their loop.
    names.update(threading=threading, queue=queue, _base=base, _threads_queues=weakref.WeakKeyDictionary())
    names["_global_shutdown_lock"] = threading.Lock()
    names["_worker"] = _originals.clone_function(names["_worker"], names)
    members = {
        name: _originals.clone_function(value, names)
        for name, value in vars(real).items()
        if isinstance(value, types.FunctionType)
    }
    members["__doc__"] = "A pool of threads, which are coros where a coro submits the work."
    members["__module__"] = real.__module__
    kind: type = type(real)(real.__name__, (real,), members)
    return kind


def patch() -> None:
    """Replace the class. asyncio, grapeshot and pools of interpreters keep the one with real threads."""
    with contextlib.suppress(ImportError):
        # Its class (3.14 and later) derives from the one that it finds. A call of an interpreter blocks its thread.
        importlib.import_module("concurrent.futures.interpreter")
    kind = _make_class()
    concurrent.futures.ThreadPoolExecutor  # noqa: B018  # the package sets the name when somebody asks for it
    _originals.replace("concurrent.futures.thread", "ThreadPoolExecutor", kind)
    _originals.replace("concurrent.futures", "ThreadPoolExecutor", kind)
    _originals.show("concurrent", "futures", _originals.view("concurrent.futures"))
    _originals.show("concurrent.futures", "thread", _originals.view("concurrent.futures.thread"))
