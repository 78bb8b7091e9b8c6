"""Shared by the commands ``python -m grapeshot.coro`` and ``python -m grapeshot.coro.wsgi``."""

from __future__ import annotations

import os


def open_back_door_if_asked() -> None:
    """If GRAPESHOT_BACKDOOR is set, open a back door as soon as a loop runs."""
    if os.environ.get("GRAPESHOT_BACKDOOR"):
        from grapeshot.insight.backdoor import _enabling

        _enabling.open_by_environment()
