"""Shrapnel's ``coro.backdoor``: a wrapper of :mod:`grapeshot.insight.backdoor` with Shrapnel's arguments.

::

    coro.spawn(coro.backdoor.serve, unix_path="/run/app.bd")    # like Shrapnel's function
    with coro.backdoor.serve("/run/app.bd"):                    # like grapeshot.insight.backdoor.serve
        ...
"""

from __future__ import annotations

import os

from grapeshot.insight import backdoor as _backdoor
from grapeshot.insight.backdoor import Server, Switch, enable

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
    """Open a back door at a Unix socket.

    With ``unix_path`` this function works like Shrapnel's: it does not return while the back door is open. If the
    calling coro is interrupted, the back door is closed. ``global_dict`` is the namespace of the prompt.

    With a path as its only positional argument this function works like :func:`grapeshot.insight.backdoor.serve`, and
    returns the server.

    Only root and the user who runs the process may connect. A TCP port cannot ensure that, so a TCP ``port`` and
    ``ip`` are not supported. Neither are ``welcome_message`` and ``client_class``: the prompt and its text are
    grapeshot's own.

    Raises:
        ValueError: no path is given, or an argument is not supported.
    """
    given = {"ip": ip, "welcome_message": welcome_message, "client_class": client_class}
    for name, value in given.items():
        if value:
            raise ValueError(f"grapeshot's back door has no {name}, got {value!r}: leave it out")
    if isinstance(port, (str, os.PathLike)) and unix_path is None:
        return _backdoor.serve(port, namespace=namespace if global_dict is None else global_dict)
    if port is not None or unix_path is None:
        raise ValueError(
            f"grapeshot's back door needs a path, unix_path='...', and has no TCP port: got {port=}, {unix_path=}"
        )
    with _backdoor.serve(unix_path, namespace=namespace if global_dict is None else global_dict) as server:
        while not server.is_closed:
            wait()
    return server
