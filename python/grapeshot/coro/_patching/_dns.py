"""The part ``dns`` of :func:`grapeshot.coro.patch`: a thread looks up host names while the coro waits."""

from __future__ import annotations

import _socket
import functools
import socket

from grapeshot import _core
from grapeshot._loop.dns import is_answered_at_once
from grapeshot.coro._bridge import run_in_thread

from . import _originals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_getaddrinfo = socket.getaddrinfo
_can_wait = _core._coro_can_wait


def getaddrinfo(host: Any, port: Any, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0) -> list[Any]:  # noqa: A002
    """Resolve host and port into a list of address info entries. Other coros run while it waits."""
    if not _can_wait() or is_answered_at_once(host, port, family):
        return _getaddrinfo(host, port, family, type, proto, flags)
    return run_in_thread(_getaddrinfo, host, port, family, type, proto, flags)


def _is_number(name: object) -> bool:
    """Whether a host is a literal IPv4 address, which needs no lookup."""
    try:
        _socket.inet_aton(name)  # type: ignore[arg-type]
    except (OSError, TypeError, ValueError):
        return False
    return True


def _off_thread(function: Callable[..., Any], is_quick: Callable[..., bool]) -> Callable[..., Any]:
    @functools.wraps(function)
    def resolve(*args: Any) -> Any:
        if not _can_wait() or not args or is_quick(args[0]):
            return function(*args)
        return run_in_thread(function, *args)

    return resolve


def patch() -> None:
    """Replace the names. Functions that call them, such as ``getfqdn``, then use the replacements."""
    names = dict(vars(socket))
    _originals.replace("socket", "getaddrinfo", getaddrinfo)
    for name in ("gethostbyname", "gethostbyname_ex"):
        _originals.replace("socket", name, _off_thread(getattr(_socket, name), _is_number))
    for name in ("gethostbyaddr", "getnameinfo"):
        _originals.replace("socket", name, _off_thread(getattr(_socket, name), lambda _: False))
    _originals.show("socket", "getfqdn", _originals.clone_function(names["getfqdn"], names))
