"""Host name lookups for coros: the loop's resolver looks up the name in a native thread while the coro waits.

A literal address needs no lookup, so the answer is made in the coro's own thread.
"""

from __future__ import annotations

import socket

from grapeshot import _core
from grapeshot._loop import dns

from ._bridge import await_, run_in_thread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def getaddrinfo(
    host: bytes | str | None,
    port: bytes | str | int | None,
    family: int = 0,
    type: int = 0,  # noqa: A002
    proto: int = 0,
    flags: int = 0,
) -> list[Any]:
    """Like :func:`socket.getaddrinfo`, but other coros run while it waits.

    Raises:
        socket.gaierror: the name does not resolve.
    """
    args = (host, port, family, type, proto, flags)
    if not _core._coro_is_on_loop():
        return dns.current("getaddrinfo")(*args)  # type: ignore[no-any-return]
    question = dns.question_of_addresses(*args)
    if question is dns.AT_ONCE:
        return dns.current("getaddrinfo")(*args)  # type: ignore[no-any-return]
    if question is None:
        return run_in_thread(dns.current("getaddrinfo"), *args)
    return dns.address_infos(look_up(question))


def look_up(question: dns.Question) -> Any:
    """Ask the resolver of this coro's loop, and wait for the answer."""
    return await_(dns.ask(_core._coro_current()._loop, question))


def numeric_address(family: int, address: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return an Internet address in which a host name is replaced by the first numeric address it resolves to.

    An address without a name is returned unchanged. If no coro is running, every address is returned unchanged.
    ``connect`` calls this, and so does the native code of ``bind``, ``sendto`` and ``sendmsg``.

    Raises:
        socket.gaierror: the name does not resolve.
    """
    host = address[0] if address else None
    is_name = isinstance(host, (str, bytes)) and not dns.is_special(host)
    if not is_name or dns.is_answered_at_once(host, None, family) or not _core._coro_is_on_loop():
        return address
    # With a socket type (any will do), each address is returned once. Without one, it is returned once per type.
    infos = getaddrinfo(host, None, family, socket.SOCK_DGRAM)
    return (infos[0][4][0], *address[1:])
