"""A Python prompt inside a process that runs, for its own user only.

::

    with grapeshot.backdoor.serve("/run/app.bd"):     # in a task or in a coro
        ...
    grapeshot.backdoor.enable("/run/app.bd")          # opens only when a signal or a variable asks

``python -m grapeshot attach /run/app.bd`` is the other end. docs/insight.md walks through it.
"""

from __future__ import annotations

from ._enabling import Switch, enable
from ._server import Server, serve

__all__ = ["Server", "Switch", "enable", "serve"]

for _public in (Server, Switch, enable, serve):
    _public.__module__ = __name__
del _public
