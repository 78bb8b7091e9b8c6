"""gevent on a grapeshot loop: greenlets and asyncio's tasks in one thread.

``GEVENT_LOOP=grapeshot.gevent.Loop`` makes gevent use the loop. ``python -m grapeshot.gevent app.py`` also makes
gevent use it, calls ``gevent.monkey.patch_all()``, and runs the program. :func:`await_` lets a greenlet wait for
asyncio, and :func:`run_sync` lets a task wait for a greenlet.
"""

from __future__ import annotations

try:
    import gevent as _gevent  # type: ignore[import-untyped]  # noqa: F401
except ImportError as error:
    raise ImportError("grapeshot.gevent needs gevent: pip install gevent", name=error.name) from error

from ._await import await_, run_sync
from ._loop import Loop

__all__ = ["Loop", "await_", "run_sync"]
