"""create_datagram_endpoint: resolve the addresses, make the socket, make a native transport.

The code runs once per endpoint, in the loop's thread. Arguments are checked in the same order, and with the same error
texts, as in the asyncio of the running Python version.
"""

from __future__ import annotations

import asyncio
import os
import socket
from asyncio.log import logger
from collections.abc import Callable

from . import dns
from .base import BaseLoop
from .checks import set_reuse_port
from .fixes import ACCEPTS_ALL_BUT_STREAMS
from .opening import open_over, remove_stale_socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    _P = TypeVar("_P", bound=asyncio.BaseProtocol)

    # (family, proto), (local address, remote address)
    Candidate = tuple[tuple[int, int], tuple[Any, Any]]


async def create_datagram_endpoint(
    loop: BaseLoop,
    protocol_factory: Callable[[], _P],
    local_addr: Any = None,
    remote_addr: Any = None,
    *,
    family: int = 0,
    proto: int = 0,
    flags: int = 0,
    reuse_port: bool | None = None,
    allow_broadcast: bool | None = None,
    sock: socket.socket | None = None,
) -> tuple[asyncio.DatagramTransport, _P]:
    """Make a socket bound to ``local_addr`` and connected to ``remote_addr``; return ``(transport, protocol)``.

    The addresses have the form ``(host, port)``. With ``family=socket.AF_UNIX`` they are paths (str, bytes,
    :class:`os.PathLike`; abstract names begin with a NUL), and a stale socket file at ``local_addr`` is removed first.
    With ``allow_broadcast`` the socket is not connected, but the transport still sends to ``remote_addr``. Instead of
    addresses, you may pass ``sock``, an open datagram socket (from Python 3.11.8, 3.12.2 and 3.13 on: any open socket
    except a stream socket). This method makes ``sock`` nonblocking, but does not bind or connect it.

    Raises:
        OSError: no address worked (this is the error of the first one), or a name does not resolve
            (:class:`socket.gaierror`).
        ValueError: arguments contradict each other, or ``sock`` has the wrong type.
        TypeError: an address has the wrong type.

    Source: :meth:`asyncio.loop.create_datagram_endpoint`.
    """
    remote = None
    if sock is not None:
        _check_socket(sock)
        given = {
            "local_addr": local_addr,
            "remote_addr": remote_addr,
            "family": family,
            "proto": proto,
            "flags": flags,
            "reuse_port": reuse_port,
            "allow_broadcast": allow_broadcast,
        }
        problems = ", ".join(f"{name}={value}" for name, value in given.items() if value)
        if problems:
            raise ValueError(f"socket modifier keyword arguments can not be used when sock is specified. ({problems})")
    else:
        candidates = await _candidates(loop, local_addr, remote_addr, family, proto, flags)
        sock, remote = await _first_socket(
            loop, candidates, bool(local_addr), bool(remote_addr), bool(reuse_port), bool(allow_broadcast)
        )
    transport, protocol = await open_over(
        loop, sock, protocol_factory, lambda protocol, waiter: loop._datagram(sock, protocol, remote, waiter)
    )
    if loop.get_debug():
        if local_addr:
            logger.info(
                "Datagram endpoint local_addr=%r remote_addr=%r created: (%r, %r)",
                local_addr,
                remote_addr,
                transport,
                protocol,
            )
        else:
            logger.debug("Datagram endpoint remote_addr=%r created: (%r, %r)", remote_addr, transport, protocol)
    return transport, protocol


def _check_socket(sock: socket.socket) -> None:
    """Raise ValueError for a stream socket. Where asyncio accepts only SOCK_DGRAM, raise it for any other type."""
    if ACCEPTS_ALL_BUT_STREAMS:
        if sock.type == socket.SOCK_STREAM:
            raise ValueError(f"A datagram socket was expected, got {sock!r}")
    elif sock.type != socket.SOCK_DGRAM:
        raise ValueError(f"A UDP Socket was expected, got {sock!r}")


async def _candidates(
    loop: BaseLoop, local_addr: Any, remote_addr: Any, family: int, proto: int, flags: int
) -> list[Candidate]:
    """Return the families and addresses to try, in order. Addresses that are not given are None."""
    if not (local_addr or remote_addr):
        if family == 0:
            raise ValueError("unexpected address family")
        return [((family, proto), (None, None))]
    if hasattr(socket, "AF_UNIX") and family == socket.AF_UNIX:
        local, remote = _unix_address(local_addr), _unix_address(remote_addr)
        if local:
            remove_stale_socket(local)
        return [((family, proto), (local, remote))]
    found: dict[tuple[int, int], list[Any]] = {}
    for index, address in enumerate((local_addr, remote_addr)):
        if address is None:
            continue
        if not (isinstance(address, tuple) and len(address) == 2):
            raise TypeError("2-tuple is expected")
        infos = await dns.resolve(loop, address, family=family, type_=socket.SOCK_DGRAM, proto=proto, flags=flags)
        if not infos:
            raise OSError("getaddrinfo() returned empty list")
        for info_family, _, info_proto, _, sockaddr in infos:
            found.setdefault((info_family, info_proto), [None, None])[index] = sockaddr
    pairs: list[Candidate] = [
        (key, (local, remote))
        for key, (local, remote) in found.items()
        if not ((local_addr and local is None) or (remote_addr and remote is None))
    ]
    if not pairs:
        raise ValueError("can not get address information")
    return pairs


def _unix_address(address: Any) -> Any:
    if isinstance(address, os.PathLike):
        address = os.fspath(address)
    if address is not None and not isinstance(address, (str, bytes)):
        raise TypeError("string is expected")
    return address


async def _first_socket(
    loop: BaseLoop,
    candidates: list[Candidate],
    binds: bool,
    connects: bool,
    reuse_port: bool,
    allow_broadcast: bool,
) -> tuple[socket.socket, Any]:
    """Return the socket of the first candidate that works, and its remote address (None if ``connects`` is false).

    If no candidate works, raise the OSError of the first one.
    """
    errors: list[OSError] = []
    try:
        for (family, proto), (local, remote) in candidates:
            sock = None
            try:
                loop._check_limits(False)
                sock = socket.socket(family=family, type=socket.SOCK_DGRAM, proto=proto)
                if reuse_port:
                    set_reuse_port(sock)
                if allow_broadcast:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
                sock.setblocking(False)
                if binds:
                    sock.bind(local)
                if connects and not allow_broadcast:
                    await loop.sock_connect(sock, remote)
                return sock, remote if connects else None
            except BaseException as exc:
                if sock is not None:
                    sock.close()
                if not isinstance(exc, OSError):
                    raise
                errors.append(exc)
        raise errors[0]
    finally:
        # Break a reference cycle: the exceptions' tracebacks refer to this frame, and this frame to the exceptions.
        errors.clear()
