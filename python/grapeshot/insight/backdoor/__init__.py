"""A Python prompt inside a running process, for the process's own user and root only.

::

    with grapeshot.insight.backdoor.serve("/run/app.bd"):     # in a task or in a coro: open it now
        ...
    grapeshot.insight.backdoor.enable("/run/app.bd")          # open it when a signal or a variable asks for it

Connect to it with ``python -m grapeshot attach /run/app.bd``. docs/insight.md walks through a session.
"""

from __future__ import annotations

from ._enabling import Switch, enable
from ._server import Server, serve

__all__ = ["Server", "Switch", "enable", "serve"]

for _public in (Server, Switch, enable, serve):
    _public.__module__ = __name__
del _public
