"""What the commands ``python -m grapeshot.coro`` and ``python -m grapeshot.coro.wsgi`` have in common."""

from __future__ import annotations

import os


def open_back_door_if_asked() -> None:
    """Open a back door with the first loop that runs, if GRAPESHOT_BACKDOOR is set."""
    if os.environ.get("GRAPESHOT_BACKDOOR"):
        from grapeshot.backdoor import _enabling

        _enabling.open_by_environment()
