"""``sock_connect``: the operation on plain sockets that runs once per connection, and may have to ask for a name.

The others (``sock_recv`` and its relatives) are native: ``src/sock``. Their functions here give them their
signatures and docstrings and never run: ``inspect`` and ``unittest.mock`` see that they are coroutine functions.
"""

from __future__ import annotations

import errno
import socket

from . import _dns
from ._base import BaseLoop
from ._checks import check_plain_socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from _typeshed import ReadableBuffer, WriteableBuffer

_WOULD_BLOCK = (BlockingIOError, InterruptedError)
_STILL_CONNECTING = frozenset((errno.EAGAIN, errno.EALREADY, errno.EINPROGRESS, errno.EINTR, errno.EWOULDBLOCK))


async def sock_connect(loop: BaseLoop, sock: socket.socket, address: Any) -> None:
    """Connect ``sock`` to ``address``; a host name in an Internet address is resolved first, off the loop's thread.

    Raises:
        OSError: ``Connect call failed <address>`` with the connection's errno, or the error of the call itself.
        socket.gaierror: the name does not resolve.
        TypeError, ValueError, RuntimeError: as :meth:`Loop.sock_recv`.
    """
    check_plain_socket(sock)
    if loop.get_debug() and sock.gettimeout() != 0:
        raise ValueError("the socket must be non-blocking")
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        infos = await _dns.resolve(loop, address, family=sock.family, type_=sock.type, proto=sock.proto)
        address = infos[0][4]
    try:
        sock.connect(address)
        return
    except _WOULD_BLOCK as exc:
        if exc.errno == errno.EAGAIN and sock.family not in (socket.AF_INET, socket.AF_INET6):
            raise  # a Unix listener's backlog is full: no connection is under way that could be waited for
        # EINPROGRESS, and EINTR: the connection goes on in the background and must not be started a second time.
    while True:
        await loop._wait_writable(sock)
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error == 0:
            return
        if error not in _STILL_CONNECTING:
            # Raised without a local variable: an exception held by a frame of its own traceback would be a cycle.
            raise OSError(error, f"Connect call failed {address}")


# --- the native ones ------------------------------------------------------------------------------


async def sock_recv(loop: BaseLoop, sock: socket.socket, nbytes: int) -> bytes:
    """Receive up to ``nbytes`` bytes; ``b""`` means that the peer has ended its side.

    Raises:
        OSError: the connection's error.
        TypeError: ``sock`` is an ``ssl.SSLSocket``.
        ValueError: in debug mode, ``sock`` is not non-blocking.
        RuntimeError: a transport uses the descriptor.
    """
    raise NotImplementedError


async def sock_recv_into(loop: BaseLoop, sock: socket.socket, buf: WriteableBuffer) -> int:
    """Receive into ``buf``, at most its length; return the number of bytes, 0 at the end of the stream.

    Raises: as :meth:`sock_recv`.
    """
    raise NotImplementedError


async def sock_recvfrom(loop: BaseLoop, sock: socket.socket, bufsize: int) -> tuple[bytes, Any]:
    """Receive a datagram, cut off at ``bufsize`` bytes; return ``(data, address)``, the address None if unknown.

    Raises: as :meth:`sock_recv`.
    """
    raise NotImplementedError


async def sock_recvfrom_into(
    loop: BaseLoop, sock: socket.socket, buf: WriteableBuffer, nbytes: int = 0
) -> tuple[int, Any]:
    """Receive a datagram into ``buf``, at most ``nbytes`` bytes (0: its length); return ``(length, address)``.

    Raises: as :meth:`sock_recv`.
    """
    raise NotImplementedError


async def sock_sendall(loop: BaseLoop, sock: socket.socket, data: ReadableBuffer) -> None:
    """Send all of ``data`` on a connected socket; after an error or a cancellation nothing tells how much went.

    Raises: as :meth:`sock_recv`.
    """
    raise NotImplementedError


async def sock_sendto(loop: BaseLoop, sock: socket.socket, data: ReadableBuffer, address: Any) -> int:
    """Send one datagram to ``address``; return its length.

    Raises: as :meth:`sock_recv`.
    """
    raise NotImplementedError


async def sock_accept(loop: BaseLoop, sock: socket.socket) -> tuple[socket.socket, Any]:
    """Accept a connection on the listening ``sock``; return ``(connection, address)``, the former non-blocking.

    Raises: as :meth:`sock_recv`.
    """
    raise NotImplementedError
