"""Real threads for what cannot yield: :func:`run`."""

from __future__ import annotations

from .bridge import run_in_thread as run

__all__ = ["run"]
