"""Name resolution: names go to the system's resolver in the executor, IP addresses are answered at once.

Most IP addresses with a numeric port never get here, because ``Loop.getaddrinfo`` answers them natively
(``src/dns.rs``). The rest (with a zone, with ``host=None``, with unusual flags, or in debug mode) still needs no server
and no file, so this module calls the C library directly: that takes about 2 us, and a thread would take 50.
``inet_pton`` decides whether a host is an IP address. The answer comes from the C library, so scope ids, flags and the
order of several socket types are exactly the same as in :func:`socket.getaddrinfo`.
"""

from __future__ import annotations

import socket
from asyncio.log import logger

from .base import BaseLoop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    AddrInfo = tuple[Any, Any, int, str, Any]

_STREAM_PROTOCOLS = frozenset((0, socket.IPPROTO_TCP, socket.IPPROTO_UDP))
_NUMERIC_NAMES = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV


async def getaddrinfo(
    loop: BaseLoop,
    host: bytes | str | None,
    port: bytes | str | int | None,
    *,
    family: int = 0,
    type: int = 0,  # noqa: A002
    proto: int = 0,
    flags: int = 0,
) -> list[Any]:
    """Return what :func:`socket.getaddrinfo` returns, without blocking the loop.

    ``Loop.getaddrinfo`` calls this for everything that it does not answer natively. IP addresses (``"127.0.0.1"``,
    ``"::1"``, ``"fe80::1%eth0"``) and ``host=None``, with a numeric port or no port, are answered at once. Everything
    else goes to the default executor, even an empty host, for which the resolver raises an error.

    Raises:
        socket.gaierror: the name does not resolve.
        RuntimeError: the default executor was shut down, or the loop is closed.
    """
    args = (host, port, family, type, proto, flags)
    if is_answered_at_once(host, port, family):
        return _lookup_logged(loop, *args) if loop.get_debug() else _lookup(*args)
    if loop.get_debug():
        return await loop.run_in_executor(None, _lookup_logged, loop, *args)
    # The function is read from the socket module at each call, because programs and tests replace it.
    return await loop.run_in_executor(None, socket.getaddrinfo, *args)


async def getnameinfo(loop: BaseLoop, sockaddr: Any, flags: int = 0) -> tuple[str, str]:
    """Return ``(host, service)`` for a socket address, like :func:`socket.getnameinfo`, without blocking the loop.

    With both ``NI_NUMERICHOST`` and ``NI_NUMERICSERV`` there is nothing to look up, so no thread is needed.

    Raises:
        socket.gaierror: the address has no name, or ``sockaddr`` is not an address.
    """
    is_numeric = flags & _NUMERIC_NAMES == _NUMERIC_NAMES and isinstance(sockaddr, tuple) and len(sockaddr) >= 2
    if is_numeric and _is_literal(sockaddr[0], socket.AF_UNSPEC):
        return socket.getnameinfo(sockaddr, flags)
    return await loop.run_in_executor(None, socket.getnameinfo, sockaddr, flags)


async def resolve(
    loop: BaseLoop,
    address: Any,
    *,
    family: int = 0,
    type_: int = socket.SOCK_STREAM,
    proto: int = 0,
    flags: int = 0,
) -> list[AddrInfo]:
    """Return the address infos for ``(host, port[, flowinfo, scope_id])``.

    For most IP addresses without a zone, ``getaddrinfo`` is not called; it would drop ``flowinfo`` and ``scope_id``.

    Raises:
        socket.gaierror: the name does not resolve.
    """
    host, port = address[:2]
    info = _literal_info(host, port, family, type_, proto, *address[2:])
    if info is not None:
        return [info]
    return await loop.getaddrinfo(host, port, family=family, type=type_, proto=proto, flags=flags)


def _literal_info(
    host: Any, port: Any, family: int, type_: int, proto: int, flowinfo: int = 0, scope_id: int = 0
) -> AddrInfo | None:
    """Return the only address info of an IP address without a zone, or None if the resolver is needed."""
    if host is None or proto not in _STREAM_PROTOCOLS:
        return None
    if type_ == socket.SOCK_STREAM:
        proto = socket.IPPROTO_TCP
    elif type_ == socket.SOCK_DGRAM:
        proto = socket.IPPROTO_UDP
    else:
        return None
    if port is None or port == "" or port == b"":
        number = 0
    else:
        try:
            number = int(port)
        except (TypeError, ValueError):
            return None  # a service name, which the resolver has to look up
    if isinstance(host, (bytes, bytearray)):
        host = host.decode("ascii", "replace")
    if "%" in host:
        return None  # the zone has to be turned into a scope id
    literal_family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if not _is_literal(host, family):
        return None
    if literal_family == socket.AF_INET6:
        return literal_family, type_, proto, "", (host, number, flowinfo, scope_id)
    return literal_family, type_, proto, "", (host, number)


def is_answered_at_once(host: Any, port: Any, family: int) -> bool:
    """Whether the C library can answer without asking a server and without the hosts and services files."""
    if isinstance(port, (bytes, str)):
        if port and not (port.isdigit() and port.isascii()):
            return False
    elif port is not None and not isinstance(port, int):
        return False
    return host is None or _is_literal(host, family)


def _is_literal(host: Any, family: int) -> bool:
    """Whether ``host`` is an IPv4 or IPv6 address (with or without a zone) of the requested family (0: either)."""
    if isinstance(host, (bytes, bytearray)):
        host = host.decode("ascii", "replace")
    elif not isinstance(host, str):
        return False
    literal_family = socket.AF_INET
    if ":" in host:
        literal_family = socket.AF_INET6
        host = host.partition("%")[0]
    if family not in (socket.AF_UNSPEC, literal_family):
        return False
    try:
        socket.inet_pton(literal_family, host)
    except (OSError, ValueError):  # ValueError: a null character or a lone surrogate
        return False
    return True


def _lookup(host: Any, port: Any, family: int, type_: int, proto: int, flags: int) -> list[Any]:
    return socket.getaddrinfo(host, port, family, type_, proto, flags)


def _lookup_logged(
    loop: BaseLoop, host: Any, port: Any, family: int, type_: int, proto: int, flags: int
) -> list[AddrInfo]:
    """Look up in debug mode: log the question, the answer and how long it took, at level INFO if it was slow."""
    parts = [f"{host}:{port!r}"]
    given = {"family": family, "type": type_, "proto": proto, "flags": flags}
    parts += [f"{name}={value!r}" for name, value in given.items() if value]
    question = ", ".join(parts)
    logger.debug("Get address info %s", question)
    start_s = loop.time()
    answer = _lookup(host, port, family, type_, proto, flags)
    took_s = loop.time() - start_s
    report = f"Getting address info {question} took {took_s * 1e3:.3f}ms: {answer!r}"
    if took_s >= loop.slow_callback_duration:
        logger.info(report)
    else:
        logger.debug(report)
    return answer
