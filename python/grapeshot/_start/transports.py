"""Keeps a loop's own transports where a library calls aiofastnet instead of the loop: ``install(transports=True)``.

aiofastnet has functions such as ``create_connection(loop, ...)``, which put its own transports on any loop. aiohttp
(version 3.15 and later) and picows call them wherever aiofastnet is installed. This module replaces aiofastnet's
functions with functions that, if the loop is grapeshot's, call the loop's method of the same name.
"""

from __future__ import annotations

import functools
import sys

from grapeshot._loop import Loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_NAMES = (
    "connect_accepted_socket",
    "connect_read_pipe",
    "connect_write_pipe",
    "create_connection",
    "create_datagram_endpoint",
    "create_server",
    "create_unix_connection",
    "create_unix_server",
    "sendfile",
    "start_tls",
)
# Arguments that the loop's methods do not have: the sizes of aiofastnet's own buffers.
_OWN_ARGUMENTS = ("ssl_incoming_bio_size", "ssl_outgoing_bio_size")

# For each name, the function that replaces aiofastnet's, and aiofastnet's own.
_replaced: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}


def replace() -> None:
    """Replace the functions in aiofastnet, and in all modules that have imported them.

    Without aiofastnet, do nothing.
    """
    try:
        import aiofastnet  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return
    for name in _NAMES:
        theirs = getattr(aiofastnet, name, None)
        if theirs is not None and name not in _replaced:
            ours = _for_any_loop(name, theirs, aiofastnet.Transport)
            _replaced[name] = ours, theirs
            _exchange(name, theirs, ours)


def restore() -> None:
    """Undo :func:`replace`."""
    for name, (ours, theirs) in _replaced.items():
        _exchange(name, ours, theirs)
    _replaced.clear()


def _for_any_loop(name: str, theirs: Callable[..., Any], transport_type: type) -> Callable[..., Any]:
    @functools.wraps(theirs)
    async def call(loop: Any, *args: Any, **kwargs: Any) -> Any:
        # sendfile() and start_tls() may get a transport that aiofastnet made before replace() was called.
        if not isinstance(loop, Loop) or (args and isinstance(args[0], transport_type)):
            return await theirs(loop, *args, **kwargs)
        for argument in _OWN_ARGUMENTS:
            kwargs.pop(argument, None)
        return await getattr(loop, name)(*args, **kwargs)

    return call


def _exchange(name: str, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is before:
            setattr(module, name, after)
