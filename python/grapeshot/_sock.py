"""Plain sockets: ``sock_recv`` and its relatives, for programs that keep the socket in their own hands.

Each operation makes the system call first and waits only if the call would block. Waiting means one reader or writer
callback that takes its registration away and completes a future; the call is then repeated *in the coroutine*, never in
the callback. So a task that is cancelled while it waits has not taken any byte from the socket, and the next operation
on the same socket finds it as it was.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable

from . import _dns
from ._base import BaseLoop
from ._checks import check_plain_socket

TYPE_CHECKING = False  # typing is not imported at run time: from Python 3.14 on asyncio does without it
if TYPE_CHECKING:
    from typing import Any

_WOULD_BLOCK = (BlockingIOError, InterruptedError)
_STILL_CONNECTING = frozenset((errno.EAGAIN, errno.EALREADY, errno.EINPROGRESS, errno.EINTR, errno.EWOULDBLOCK))


async def wait_readable(loop: BaseLoop, sock: socket.socket) -> None:
    """Return when ``sock`` has something to read, an end of stream or an error. Replaces a waiting reader."""
    fd = sock.fileno()
    loop._ensure_fd_no_transport(fd)
    future = loop.create_future()
    handle = loop._add_reader(fd, _complete, future, loop._remove_reader, fd)
    await _wait(future, handle, loop._remove_reader, fd)


async def wait_writable(loop: BaseLoop, sock: socket.socket) -> None:
    """Return when ``sock`` takes data again, is connected, or has failed. Replaces a waiting writer."""
    fd = sock.fileno()
    loop._ensure_fd_no_transport(fd)
    future = loop.create_future()
    handle = loop._add_writer(fd, _complete, future, loop._remove_writer, fd)
    await _wait(future, handle, loop._remove_writer, fd)


def _complete(future: asyncio.Future[None], remove: Callable[[int], bool], fd: int) -> None:
    # The registration goes away here, not when the coroutine runs: the level-triggered poller would report it again.
    remove(fd)
    if not future.done():
        future.set_result(None)


async def _wait(future: asyncio.Future[None], handle: asyncio.Handle, remove: Callable[[int], bool], fd: int) -> None:
    try:
        await future
    except BaseException:
        # A cancelled handle is one that another operation on this socket has replaced: that one's registration stays.
        if not handle.cancelled():
            remove(fd)
        raise


def _check(loop: BaseLoop, sock: socket.socket) -> None:
    check_plain_socket(sock)
    if loop.get_debug() and sock.gettimeout() != 0:
        raise ValueError("the socket must be non-blocking")


async def sock_recv(loop: BaseLoop, sock: socket.socket, nbytes: int) -> bytes:
    """Receive up to ``nbytes`` bytes; ``b""`` means that the peer has ended its side.

    Raises:
        OSError: the connection failed.
        TypeError: ``sock`` is an ``ssl.SSLSocket``.
        ValueError: in debug mode, ``sock`` is not non-blocking.
        RuntimeError: the descriptor belongs to a transport of this loop.
    """
    _check(loop, sock)
    while True:
        try:
            return sock.recv(nbytes)
        except _WOULD_BLOCK:
            await wait_readable(loop, sock)


async def sock_recv_into(loop: BaseLoop, sock: socket.socket, buf: Any) -> int:
    """Receive into the writable buffer ``buf``, at most its length; return the number of bytes, 0 at the end of stream.

    Raises: as :func:`sock_recv`.
    """
    _check(loop, sock)
    while True:
        try:
            return sock.recv_into(buf)
        except _WOULD_BLOCK:
            await wait_readable(loop, sock)


async def sock_sendall(loop: BaseLoop, sock: socket.socket, data: Any) -> None:
    """Send all of ``data`` (bytes-like, contiguous) on a connected socket.

    After an error or a cancellation nothing tells how much was sent.

    Raises: as :func:`sock_recv`, and TypeError if ``data`` is not bytes-like.
    """
    _check(loop, sock)
    with memoryview(data) as whole, whole.cast("B") as view:
        sent = 0
        while True:
            try:
                sent += sock.send(view[sent:] if sent else view)
            except _WOULD_BLOCK:
                pass
            if sent == len(view):
                return
            await wait_writable(loop, sock)


async def sock_connect(loop: BaseLoop, sock: socket.socket, address: Any) -> None:
    """Connect ``sock`` to ``address``; a host name in an Internet address is resolved first, off the loop's thread.

    Raises:
        OSError: ``Connect call failed <address>`` with the connection's errno, or the error of the call itself.
        socket.gaierror: the name does not resolve.
        TypeError, ValueError, RuntimeError: as :func:`sock_recv`.
    """
    _check(loop, sock)
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
        await wait_writable(loop, sock)
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error == 0:
            return
        if error not in _STILL_CONNECTING:
            # Raised without a local variable: an exception held by a frame of its own traceback would be a cycle.
            raise OSError(error, f"Connect call failed {address}")


async def sock_accept(loop: BaseLoop, sock: socket.socket) -> tuple[socket.socket, Any]:
    """Accept one connection on the listening ``sock``; return ``(connection, address)``, the connection non-blocking.

    Raises: as :func:`sock_recv`.
    """
    _check(loop, sock)
    while True:
        try:
            connection, address = sock.accept()
        except _WOULD_BLOCK:
            await wait_readable(loop, sock)
        else:
            connection.setblocking(False)
            return connection, address
