"""Sockets whose calls let other coros run while they wait: :class:`sock` and the functions that make them.

A ``sock`` is a :class:`socket.socket`, with the same methods, results and errors. A call waits only if the operation
would block. A coro that is interrupted while it waits loses no data: the next call gets it. This does not apply to
``sendall``: as with every socket, it is not known after an error how much was sent.

Outside of coros, the same object blocks the thread, like an ordinary socket.
"""

from __future__ import annotations

import socket

from grapeshot import _core

from ._socket_base import CoroSocket

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterable, Sequence
    from typing import Any, overload

    from _typeshed import ReadableBuffer, WriteableBuffer

wait_for_read = _core._coro_wait_for_read
wait_for_write = _core._coro_wait_for_write


class sock(CoroSocket):  # noqa: N801  # Shrapnel's name
    """A socket for coros: a :class:`socket.socket` whose calls let other coros run while they wait.

    ``sock(family=AF_INET, type=SOCK_STREAM, proto=0, fileno=None)``

    ``settimeout`` limits how long one call may take; a call that takes longer raises :class:`TimeoutError`. One coro at
    a time may wait to read, and one to write; a second one gets :class:`SimultaneousError`. Closing the socket raises
    :class:`ClosedError` in the coros that wait on it. Calls that succeed without waiting are counted, and after a few
    of them the coro yields (see :func:`set_selfishness`), so that a busy connection does not starve other coros.
    """

    __slots__ = ()

    if TYPE_CHECKING:

        @overload
        def readv(self, buffers: Iterable[WriteableBuffer], /) -> int: ...
        @overload
        def readv(self, sizes: Iterable[int], /) -> tuple[bytes, ...]: ...

    def readv(self, buffers: Any, /) -> Any:
        """Receive into several buffers, or receive several parts of known sizes.

        Given buffers, wait until there is some data, and fill one buffer after the other; return the number of bytes,
        0 at the end of the stream.

        Given sizes, as in Shrapnel, wait until all bytes have come, and return a tuple with one bytes object per size.
        If the stream ends earlier, the tuple has only the data that came, and its last item may be shorter.

        Raises:
            ValueError: a size is negative.
            TypeError: the list has both sizes and buffers.
        """
        items = list(buffers)
        if items and all(isinstance(item, int) for item in items):
            return self._read_sizes(items)
        return self.recvmsg_into(items)[0]

    def _read_sizes(self, sizes: list[int]) -> tuple[bytes, ...]:
        if min(sizes) < 0:
            raise ValueError(f"a size must not be negative, got {min(sizes)}")
        whole = sum(sizes)
        try:
            data = self.recv_exact(whole)
        except EOFError:
            # The stream has ended: return the data that came before.
            data = self.recv(whole)
        parts = []
        at = 0
        for size in sizes:
            if at == len(data) < whole:
                break
            parts.append(data[at : at + size])
            at += len(parts[-1])
        return tuple(parts)

    def writev(self, buffers: Sequence[ReadableBuffer], /) -> int:
        """Send the whole contents of all buffers, without joining them in memory; return the number of bytes."""
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        whole = sum(len(view) for view in views)
        left = whole
        while left:
            sent = self.sendmsg(views[:1024])
            left -= sent
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]
        return whole

    def start_tls(
        self, context: ssl.SSLContext, *, server_side: bool = False, server_hostname: str | None = None
    ) -> ssl.SSLSocket:
        """Start TLS on this connection; return the new socket, which takes over the descriptor. This object is closed.

        Other coros run during the handshake. The new socket is an :class:`ssl.SSLSocket`, and its calls let other coros
        run while they wait, like the calls of this one.

        Raises:
            ssl.SSLError: the handshake failed. The connection is closed.
            TimeoutError: the handshake took longer than the socket's timeout.
            ValueError: a :meth:`recv_exact` that failed has left data in this object that was not read yet.
        """
        if getattr(self, "_unread", b""):
            raise ValueError("recv_exact() has left data that was not read: read it with recv() before start_tls()")
        from ._tls import wrap

        return wrap(self, context, server_side=server_side, server_hostname=server_hostname)


# Put the native methods on this class itself. CPython calls them faster than inherited methods, and the calls take less
# room on the stack of a coro that waits.
_core._coro_bind_socket_methods(sock)


def tcp_sock() -> sock:
    """Return a socket for TCP over IPv4."""
    return sock(socket.AF_INET, socket.SOCK_STREAM)


def tcp6_sock() -> sock:
    """Return a socket for TCP over IPv6."""
    return sock(socket.AF_INET6, socket.SOCK_STREAM)


def udp_sock() -> sock:
    """Return a socket for UDP over IPv4."""
    return sock(socket.AF_INET, socket.SOCK_DGRAM)


def udp6_sock() -> sock:
    """Return a socket for UDP over IPv6."""
    return sock(socket.AF_INET6, socket.SOCK_DGRAM)


def unix_sock() -> sock:
    """Return a unix stream socket, whose addresses are paths."""
    return sock(socket.AF_UNIX, socket.SOCK_STREAM)


def socketpair(
    family: int = getattr(socket, "AF_UNIX", socket.AF_INET),
    type: int = socket.SOCK_STREAM,  # noqa: A002
    proto: int = 0,
) -> tuple[sock, sock]:
    """Return two sockets that are connected to each other."""
    near, far = socket.socketpair(family, type, proto)
    try:
        return (
            sock(near.family, near.type, near.proto, fileno=near.detach()),
            sock(far.family, far.type, far.proto, fileno=far.detach()),
        )
    finally:
        # If making a `sock` raised, close the sockets that were not detached. On the others close() has no effect.
        near.close()
        far.close()
