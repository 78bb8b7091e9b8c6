"""Real threads for what cannot yield: :func:`run`, and :class:`Thread`, which stays real after ``coro.install()``."""

from __future__ import annotations

from ._patching._thread import RealThread as Thread
from .bridge import run_in_thread as run

__all__ = ["Thread", "run"]
