"""``sock_connect``: the operation on plain sockets that runs once per connection, and may have to ask for a name.

The others (``sock_recv`` and its relatives) are native: ``src/transports/sock``.
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
