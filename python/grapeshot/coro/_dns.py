"""Names are resolved in a thread of the loop's executor while the coro waits. Literals never leave its thread."""

from __future__ import annotations

import socket

from grapeshot import _core
from grapeshot._dns import is_answered_at_once

from .bridge import run_in_thread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# As they are before a program patches them.
_getaddrinfo = socket.getaddrinfo
# Hosts that the C library is not asked for.
_SPECIAL = frozenset(("", "<broadcast>", b"", b"<broadcast>"))


def getaddrinfo(
    host: bytes | str | None,
    port: bytes | str | int | None,
    family: int = 0,
    type: int = 0,  # noqa: A002
    proto: int = 0,
    flags: int = 0,
) -> list[Any]:
    """Return what :func:`socket.getaddrinfo` returns, while other coros run.

    Raises:
        socket.gaierror: the name does not resolve.
    """
    if is_answered_at_once(host, port, family) or not _core._coro_is_on_loop():
        return _getaddrinfo(host, port, family, type, proto, flags)
    return run_in_thread(_getaddrinfo, host, port, family, type, proto, flags)


def numeric_address(family: int, address: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return an Internet address with the first number that its host has. What is no name comes back as it is.

    Native code calls it for the addresses that ``connect``, ``bind`` and ``sendto`` get.

    Raises:
        socket.gaierror: the name does not resolve.
    """
    host = address[0] if address else None
    is_name = isinstance(host, (str, bytes)) and host not in _SPECIAL
    if not is_name or is_answered_at_once(host, None, family) or not _core._coro_is_on_loop():
        return address
    # The type says only that each address comes once.
    infos = getaddrinfo(host, None, family, socket.SOCK_DGRAM)
    return (infos[0][4][0], *address[1:])
