"""Real threads, for code that blocks without yielding.

:func:`run` calls a function in a real thread, and ``Thread`` is a real thread even after ``coro.patch()``.
:func:`in_thread` and :func:`modules_in_thread` mark functions that a :class:`grapeshot.coro.CoroPoolExecutor` must call
in real threads, not in coros.
"""

from __future__ import annotations

from ._bridge import run_in_thread as run
from ._executor import in_thread, modules_in_thread
from ._patching._thread import RealThread as Thread

__all__ = ["Thread", "in_thread", "modules_in_thread", "run"]
