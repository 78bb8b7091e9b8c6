"""Unix stream sockets: create_unix_connection and create_unix_server.

The code runs once per connection or server, in the loop's thread. Transports and accepting are the same as for TCP.
Arguments are checked in the same order, and with the same error texts, as in asyncio. ``cleanup_socket`` (in asyncio:
3.13+) works on every version.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
from asyncio.log import logger
from collections.abc import Callable

from grapeshot import _core

from . import connect, serve, tls
from .base import BaseLoop
from .checks import check_plain_socket, check_tls_only_options
from .opening import has_file, remove_stale_socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    _P = TypeVar("_P", bound=asyncio.BaseProtocol)

    Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]

# Whether this Python's asyncio removes a server's socket file when the server is closed.
_CLEANS_UP = sys.version_info >= (3, 13)

# How long to wait between attempts to connect while the server's queue is full: first the shortest pause, then twice
# as long each time, up to the longest.
_SHORTEST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05


async def create_unix_connection(
    loop: BaseLoop,
    protocol_factory: Callable[[], _P],
    path: Path | None = None,
    *,
    ssl: Any = None,
    sock: socket.socket | None = None,
    server_hostname: str | None = None,
    ssl_handshake_timeout: float | None = None,
    ssl_shutdown_timeout: float | None = None,
) -> tuple[asyncio.Transport, _P]:
    r"""Connect to the Unix socket at ``path``, or take the connected ``sock``; return ``(transport, protocol)``.

    A ``path`` that begins with a NUL (``"\0name"``) is a name in Linux' abstract namespace. While the server's queue of
    connections is full, the attempt is repeated. Use :func:`asyncio.timeout` to limit the time.

    Raises:
        OSError: no process listens at ``path`` (FileNotFoundError, ConnectionRefusedError), or ``path`` is too long (on
            Linux: more than 107 bytes).
        ValueError: arguments contradict each other, or ``sock`` is not a Unix stream socket.
        TypeError: ``path`` is not a path, or ``sock`` is an ``ssl.SSLSocket``.
        ssl.SSLError, ConnectionResetError, ConnectionAbortedError: the TLS handshake failed.

    Source: :meth:`asyncio.loop.create_unix_connection`.
    """
    if ssl and server_hostname is None:
        raise ValueError("you have to pass server_hostname when using ssl")
    check_tls_only_options(
        bool(ssl),
        server_hostname=server_hostname,
        ssl_handshake_timeout=ssl_handshake_timeout,
        ssl_shutdown_timeout=ssl_shutdown_timeout,
    )
    if path is not None:
        if sock is not None:
            raise ValueError("path and sock can not be specified at the same time")
        loop._check_limits(True)
        sock = await _connected(os.fspath(path))
    else:
        if sock is None:
            raise ValueError("no path and sock were specified")
        _check_unix_socket(sock)
    return await connect.open_transport(
        loop,
        sock,
        protocol_factory,
        ssl,
        ssl_handshake_timeout,
        ssl_shutdown_timeout,
        server_hostname=server_hostname,
    )


async def create_unix_server(
    loop: BaseLoop,
    protocol_factory: Callable[[], asyncio.BaseProtocol],
    path: Path | None = None,
    *,
    sock: socket.socket | None = None,
    backlog: int = 100,
    ssl: Any = None,
    ssl_handshake_timeout: float | None = None,
    ssl_shutdown_timeout: float | None = None,
    start_serving: bool = True,
    cleanup_socket: bool = _CLEANS_UP,
) -> serve.Server:
    """Listen on a Unix socket at ``path``, or on the bound ``sock``; return the :class:`asyncio.Server`.

    A socket file at ``path`` is removed first, even if another process is still listening on it. With
    ``cleanup_socket`` (the default from Python 3.13 on, available on every version), closing the server removes its
    file, unless another file has taken its place. Names that begin with a NUL are in Linux' abstract namespace and have
    no file.

    Raises:
        OSError: ``path`` cannot be bound. If another kind of file exists there, ``errno`` is EADDRINUSE and the text
            contains the path.
        ValueError: arguments contradict each other, or ``sock`` is not a Unix stream socket.
        TypeError: ``path`` is not a path, ``sock`` is an ``ssl.SSLSocket``, or ``ssl`` is a bool.

    Source: :meth:`asyncio.loop.create_unix_server`.
    """
    if isinstance(ssl, bool):
        raise TypeError("ssl argument must be an SSLContext or None")
    check_tls_only_options(
        bool(ssl), ssl_handshake_timeout=ssl_handshake_timeout, ssl_shutdown_timeout=ssl_shutdown_timeout
    )
    protocol_factory = tls.serving_factory(loop, protocol_factory, ssl, ssl_handshake_timeout, ssl_shutdown_timeout)
    is_ours = path is not None
    if path is not None:
        if sock is not None:
            raise ValueError("path and sock can not be specified at the same time")
        loop._check_limits(False)
        sock = bind(os.fspath(path))
    else:
        if sock is None:
            raise ValueError("path was not specified, and no sock specified")
        _check_unix_socket(sock)
    remove_file = file_remover(sock) if cleanup_socket else None
    return await serve.serve(loop, [sock], protocol_factory, backlog, start_serving, is_ours, remove_file)


def _check_unix_socket(sock: socket.socket) -> None:
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM:
        raise ValueError(f"A UNIX Domain Stream Socket was expected, got {sock!r}")
    check_plain_socket(sock)


async def _connected(path: str | bytes) -> socket.socket:
    """Return a new socket connected to ``path``.

    The system connects a Unix socket at once or not at all. EAGAIN means that the server's queue is full. No event
    reports when the queue has space again (connect(2)), so the attempt is repeated.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        pause_s = _SHORTEST_PAUSE_S
        while True:
            try:
                sock.connect(path)
                return sock
            except BlockingIOError:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    except BaseException:
        sock.close()
        raise


def bind(path: str | bytes) -> socket.socket:
    """Return a new socket bound to ``path``. A socket file there is removed first, even if it is in use."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        remove_stale_socket(path)
        sock.bind(path)
    except OSError as exc:
        sock.close()
        if exc.errno == errno.EADDRINUSE:
            raise OSError(errno.EADDRINUSE, f"Address {path!r} is already in use") from None
        raise
    except BaseException:
        sock.close()
        raise
    return sock


def file_remover(sock: socket.socket) -> Callable[[], None] | None:
    """Return a function that removes the file of a bound socket, or None if there is no file.

    The returned function does nothing if another file has taken the place of this one.
    """
    path = sock.getsockname()
    if not has_file(path):
        return None
    try:
        _is_socket, inode = _core._path_status(path)
    except FileNotFoundError:
        return None

    def remove() -> None:
        try:
            if _core._path_status(path)[1] == inode:
                _core._remove_path(path)
        except FileNotFoundError:
            pass
        except OSError as exc:
            logger.error("Unable to clean up listening UNIX socket %r: %r", path, exc)

    return remove
