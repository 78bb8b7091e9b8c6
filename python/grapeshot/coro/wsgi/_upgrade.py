"""The socket of a connection, for applications that switch to another protocol on it, such as WebSocket.

If a request asks for an upgrade, its environ has an ``UpgradeSocket``, under the key that libraries expect. If the
application calls a method such as ``recv`` or ``send``, it takes over the connection. After that, the server neither
reads nor sends anything, and closes the connection when the application returns.
"""

from __future__ import annotations

import errno
import os
import socket

from grapeshot import _core

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# The key of Werkzeug's own server. simple-websocket, which flask-sock and Flask-SocketIO use, looks for it.
KEY = "werkzeug.socket"


class UpgradeSocket:
    """Behaves like the blocking socket of a server with threads.

    Calls such as ``getpeername`` do not take over the connection. Bytes that the client has sent directly after its
    request are received first; ``select`` does not see them. Several coros or threads may call ``sendall`` (and
    ``send`` without a timeout) at the same time: the bytes of one call stay together.
    """

    def __init__(self, connection: Any, response: Any, sock: Any) -> None:
        # None once the application has taken over the socket, or the request is over.
        self._connection = connection
        self._response = response
        # None once the request is over, unless the application has taken over the socket.
        self._sock = sock
        self._sending = _core.thread_lock()
        self._io_refs = 0
        self.sent_len = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._sock!r}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(self._asked(), name)
        if name in _TAKING:
            self._take()
        return found

    def expire(self) -> None:
        """Invalidate this socket, unless the application has taken over the connection."""
        if self._connection is not None:
            self._connection = self._response = self._sock = None

    def _asked(self) -> Any:
        if self._sock is None:
            raise OSError(errno.EBADF, f"{os.strerror(errno.EBADF)}: the request has been answered")
        return self._sock

    def _take(self) -> Any:
        sock, connection = self._asked(), self._connection
        if connection is not None:
            connection.hand_over(self._response)
            self._connection = self._response = None
        return sock

    # ------------------------------------------------------------------ the methods of sockets

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        sock = self._take()
        unread: bytes = getattr(sock, "_unread", b"")
        if unread and flags & socket.MSG_PEEK:
            return unread[:bufsize]
        data: bytes = sock.recv(bufsize, flags) if flags and not unread else sock.recv(bufsize)
        return data

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        sock = self._take()
        unread: bytes = getattr(sock, "_unread", b"")
        if unread and flags & socket.MSG_PEEK:
            with memoryview(buffer) as whole, whole.cast("B") as view:
                data = unread[: nbytes or len(view)]
                view[: len(data)] = data
            return len(data)
        if flags and not unread:
            count: int = sock.recv_into(buffer, nbytes, flags)
        else:
            count = sock.recv_into(buffer, nbytes) if nbytes else sock.recv_into(buffer)
        return count

    def send(self, data: Any, flags: int = 0, /) -> int:
        """Send all of the data, as libraries expect of a blocking socket. If there is a timeout, send what fits."""
        sock = self._take()
        if sock.gettimeout() is None:
            self.sendall(data, flags)
            return _len_of(data)
        sent: int = sock.send(data, flags)
        self.sent_len += sent
        return sent

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        sock = self._take()
        with self._sending:
            sock.sendall(data, flags)
        self.sent_len += _len_of(data)

    def fileno(self) -> int:
        return -1 if self._sock is None else self._take().fileno()

    def makefile(self, *args: Any, **kwargs: Any) -> Any:
        self._take()
        make: Any = socket.socket.makefile
        return make(self, *args, **kwargs)

    def close(self) -> None:
        if self._sock is not None and not self._io_refs:
            self._take().close()

    def _decref_socketios(self) -> None:
        self._io_refs -= 1

    def __enter__(self) -> UpgradeSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# The other methods that take over the connection: they change a state on which the server relies, or copy the socket.
_TAKING = {"detach", "dup", "recv_exact", "recvfrom", "recvfrom_into", "recvmsg", "recvmsg_into", "readv", "sendfile"}
_TAKING |= {"sendmsg", "sendto", "setblocking", "settimeout", "shutdown", "read", "write", "writev", "unwrap"}


def _len_of(data: Any) -> int:
    with memoryview(data) as view:
        return view.nbytes
