"""``sock_connect``, and the signatures of the other operations on plain sockets.

``sock_connect`` is written in Python because it runs only once per connection and may have to resolve a name. The other
operations (``sock_recv`` and so on) are native: ``src/sock``. The functions of the same names in this module never run.
They provide signatures and docstrings, and make ``inspect`` and ``unittest.mock`` recognize coroutine functions.
"""

from __future__ import annotations

import errno
import socket

from . import dns
from .base import BaseLoop
from .checks import check_plain_socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from _typeshed import ReadableBuffer, WriteableBuffer

_WOULD_BLOCK = (BlockingIOError, InterruptedError)
_STILL_CONNECTING = frozenset((errno.EAGAIN, errno.EALREADY, errno.EINPROGRESS, errno.EINTR, errno.EWOULDBLOCK))


async def sock_connect(loop: BaseLoop, sock: socket.socket, address: Any) -> None:
    """Connect ``sock`` to ``address``. A host name in an Internet address is resolved first, in another thread.

    Raises:
        OSError: ``Connect call failed <address>`` with the connection's errno, or the error of ``connect()`` itself.
        socket.gaierror: the name does not resolve.
        TypeError, ValueError, RuntimeError: like :meth:`Loop.sock_recv`.
    """
    check_plain_socket(sock)
    if loop.get_debug() and sock.gettimeout() != 0:
        raise ValueError("the socket must be non-blocking")
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        infos = await dns.resolve(loop, address, family=sock.family, type_=sock.type, proto=sock.proto)
        address = infos[0][4]
    try:
        sock.connect(address)
        return
    except _WOULD_BLOCK as exc:
        if exc.errno == errno.EAGAIN and sock.family not in (socket.AF_INET, socket.AF_INET6):
            raise  # the backlog of a Unix listener is full: no connection was started, so there is nothing to wait for
        # After EINPROGRESS and EINTR, the system keeps connecting. connect() must not be called a second time.
    while True:
        await loop._wait_writable(sock)
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error == 0:
            return
        if error not in _STILL_CONNECTING:
            # Do not keep this exception in a local variable: its traceback refers to this frame, which would then be
            # part of a reference cycle.
            raise OSError(error, f"Connect call failed {address}")


# --- the native operations ------------------------------------------------------------------------


async def sock_recv(loop: BaseLoop, sock: socket.socket, nbytes: int) -> bytes:
    """Receive up to ``nbytes`` bytes. ``b""`` means that the peer has closed its sending side.

    Raises:
        OSError: the connection's error.
        TypeError: ``sock`` is an ``ssl.SSLSocket``.
        ValueError: in debug mode, ``sock`` is in blocking mode or has a timeout.
        RuntimeError: a transport uses the descriptor.
    """
    raise NotImplementedError


async def sock_recv_into(loop: BaseLoop, sock: socket.socket, buf: WriteableBuffer) -> int:
    """Receive at most ``len(buf)`` bytes into ``buf``; return how many, 0 at the end of the stream.

    Raises: like :meth:`sock_recv`.
    """
    raise NotImplementedError


async def sock_recvfrom(loop: BaseLoop, sock: socket.socket, bufsize: int) -> tuple[bytes, Any]:
    """Receive a datagram, truncated to ``bufsize`` bytes; return ``(data, address)``.

    The address is None if the sender's address is not known. Raises: like :meth:`sock_recv`.
    """
    raise NotImplementedError


async def sock_recvfrom_into(
    loop: BaseLoop, sock: socket.socket, buf: WriteableBuffer, nbytes: int = 0
) -> tuple[int, Any]:
    """Receive a datagram into ``buf``, at most ``nbytes`` bytes (0: ``len(buf)``); return ``(length, address)``.

    Raises: like :meth:`sock_recv`.
    """
    raise NotImplementedError


async def sock_sendall(loop: BaseLoop, sock: socket.socket, data: ReadableBuffer) -> None:
    """Send all of ``data`` on a connected socket.

    After an error or a cancellation there is no way to tell how much was sent. Raises: like :meth:`sock_recv`.
    """
    raise NotImplementedError


async def sock_sendto(loop: BaseLoop, sock: socket.socket, data: ReadableBuffer, address: Any) -> int:
    """Send one datagram to ``address``; return its length.

    Raises: like :meth:`sock_recv`.
    """
    raise NotImplementedError


async def sock_accept(loop: BaseLoop, sock: socket.socket) -> tuple[socket.socket, Any]:
    """Accept a connection on the listening ``sock``; return ``(connection, address)``.

    ``connection`` is a non-blocking socket. Raises: like :meth:`sock_recv`.
    """
    raise NotImplementedError
