"""``queue.SimpleQueue`` of :func:`grapeshot.coro.install`.

The other queues are Python code on :mod:`threading`, so they wait as its locks do.
"""

from __future__ import annotations

import queue

from grapeshot import _core

from . import _originals


def patch() -> None:
    """Replace the names."""
    names = dict(vars(queue))
    names["threading"] = _originals.view("threading")
    for name in ("Queue", "PriorityQueue", "LifoQueue"):
        _originals.show("queue", name, _originals.clone_class(getattr(queue, name), names))
    _originals.replace("_queue", "SimpleQueue", _core.thread_queue)
    _originals.replace("queue", "SimpleQueue", _core.thread_queue)
