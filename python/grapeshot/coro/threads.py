"""Real threads, for code that blocks without yielding.

:func:`run` calls a function in one, and ``Thread`` makes one even after ``coro.patch()``. :func:`in_thread` and
:func:`modules_in_thread` name functions that async code keeps calling in real threads (see
:class:`grapeshot.coro.CoroPoolExecutor`).
"""

from __future__ import annotations

from ._bridge import run_in_thread as run
from ._executor import in_thread, modules_in_thread
from ._patching._thread import RealThread as Thread

__all__ = ["Thread", "in_thread", "modules_in_thread", "run"]
