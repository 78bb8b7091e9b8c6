"""Real threads, for code that blocks without yielding: :func:`run`, and :class:`Thread`.

``Thread`` makes a real thread even after ``coro.patch()``.
"""

from __future__ import annotations

from ._patching._thread import RealThread as Thread
from ._bridge import run_in_thread as run

__all__ = ["Thread", "run"]
