"""The part ``queue`` of :func:`grapeshot.coro.patch`.

``SimpleQueue`` is replaced. The other queues are Python code that waits with the patched locks of :mod:`threading`.
Programs may also poll a queue in a loop without waiting. With threads this works, because threads are preempted. Coros
are not, so calls that poll are counted like I/O that was ready at once: after a few of them in a row the coro yields.
"""

from __future__ import annotations

import functools
import queue
from queue import Empty

from grapeshot import _core

from . import _import_hooks, _originals, _thread, _waits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def _yield_after_failure(module: Any, name: str) -> None:
    """Patch a method of Queue: when it fails because the queue is empty or full, the coro may yield."""
    method, errors = getattr(module.Queue, name), (module.Empty, module.Full)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except errors:
            _waits.note_poll()
            raise

    setattr(module.Queue, name, call)


def _yield_after(module: Any, name: str) -> None:
    """Patch a method of Queue that never waits: after each call, the coro may yield."""
    method = getattr(module.Queue, name)

    @functools.wraps(method)
    def call(self: Any) -> Any:
        result = method(self)
        _waits.note_poll()
        return result

    setattr(module.Queue, name, call)


def _patch_queues(module: Any) -> None:
    for name in ("get", "put"):
        _yield_after_failure(module, name)
    for name in ("empty", "full", "qsize"):
        _yield_after(module, name)
    _thread.undisturbed(module.Queue, "task_done")


def patch() -> None:
    """Replace the names."""
    names = dict(vars(queue))
    names["threading"] = _originals.view("threading")
    for name in ("Queue", "PriorityQueue", "LifoQueue"):
        _originals.show("queue", name, _originals.clone_class(getattr(queue, name), names))
    _originals.replace("_queue", "SimpleQueue", _core.thread_queue)
    _originals.replace("queue", "SimpleQueue", _core.thread_queue)
    # Even after a reload, `_queue` must have the same class Empty: the queues raise it, and programs have imported it.
    _import_hooks.after_import("_queue", lambda module: setattr(module, "Empty", Empty))
    _import_hooks.after_import("queue", _patch_queues)
