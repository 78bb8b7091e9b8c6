"""Shrapnel's ``coro.backdoor``, which leads to :mod:`grapeshot.backdoor`.

::

    coro.spawn(coro.backdoor.serve, unix_path="/run/app.bd")    # as in Shrapnel
    with coro.backdoor.serve("/run/app.bd"):                    # as grapeshot.backdoor.serve
        ...
"""

from __future__ import annotations

import os

from grapeshot import backdoor as _backdoor
from grapeshot.backdoor import Server, Switch, enable

from ._scheduling import wait

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["Server", "Switch", "enable", "serve"]


def serve(
    port: Any = None,
    ip: str = "",
    unix_path: str | os.PathLike[str] | None = None,
    welcome_message: str | None = None,
    global_dict: dict[str, Any] | None = None,
    client_class: Any = None,
    *,
    namespace: dict[str, Any] | None = None,
) -> Server:
    """Open a back door at a unix socket.

    With ``unix_path`` this is Shrapnel's function: the coro that calls it stays in it, and the door is closed when that
    coro is interrupted. ``global_dict`` is what a client's names are looked up in. With a path as its only positional
    argument it is :func:`grapeshot.backdoor.serve`, which returns the server.

    Only the process's own user gets a prompt, which begins with grapeshot's own lines. So there are no TCP ports, no
    ``welcome_message`` and no ``client_class``.

    Raises:
        ValueError: no path is given, or what grapeshot's back door does not have.
    """
    given = {"ip": ip, "welcome_message": welcome_message, "client_class": client_class}
    for name, value in given.items():
        if value:
            raise ValueError(f"grapeshot's back door has no {name}, got {value!r}: leave it out")
    if isinstance(port, (str, os.PathLike)) and unix_path is None:
        return _backdoor.serve(port, namespace=namespace if global_dict is None else global_dict)
    if port is not None or unix_path is None:
        raise ValueError(f"grapeshot's back door has no TCP port, got port={port!r}: give it a path, unix_path='...'")
    with _backdoor.serve(unix_path, namespace=namespace if global_dict is None else global_dict) as server:
        while not server.is_closed:
            wait()
    return server
