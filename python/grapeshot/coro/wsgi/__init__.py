"""A server for blocking-style WSGI applications (PEP 3333), with one coro per connection: :func:`serve`.

    >>> from grapeshot import coro
    >>> from grapeshot.coro import wsgi
    >>> def application(environ, start_response):
    ...     start_response("200 OK", [("Content-Type", "text/plain")])
    ...     return [b"Hello"]
    >>> def main():
    ...     with wsgi.serve(application, "localhost", 8000) as server:
    ...         server.wait_closed()

``python -m grapeshot.coro.wsgi module:application`` calls ``coro.patch()``, and then does the same. The server needs
httptools, which parses the requests: ``pip install 'grapeshot[wsgi]'``. The application sees no running asyncio loop.
"""

from __future__ import annotations

from grapeshot import _core
from grapeshot.coro import _hiding, _serve

from ._connection import Connection
from ._settings import Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging
    import os
    import socket
    import ssl as _ssl
    from collections.abc import Callable, Sequence
    from typing import Any

    from grapeshot.coro._socket import sock as Sock  # noqa: N812

__all__ = ["Server", "serve"]


class Server:
    """A running WSGI server. :func:`serve` makes servers.

    As a context manager it calls :meth:`stop` at the end of the block.
    """

    def __init__(self, settings: Settings, is_secure: bool) -> None:
        self._settings = settings
        self._is_secure = is_secure
        self._connections: set[Connection] = set()
        self._is_closed = False
        self._server: _serve.Server

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._settings.application!r} by {self._server!r}>"

    @property
    def sockets(self) -> tuple[Sock, ...]:
        """The listening sockets; empty once the server is closed."""
        return self._server.sockets

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return self._server.connections

    def close(self) -> None:
        """Stop accepting, and end idle connections. Busy ones end after the requests that they have received."""
        self._is_closed = True
        self._server.close()
        for connection in list(self._connections):
            connection.end()

    def wait_closed(self, timeout: float | None = None) -> bool:
        """Wait until the server is closed and its last connection has ended.

        Returns False if that takes longer than ``timeout`` seconds, else True.

        Raises:
            RuntimeError: called in the coro of one of its connections.
            YieldFromMain: not called in a coro.
        """
        return self._server.wait_closed(timeout)

    def stop(self, timeout: float | None = 30.0) -> None:
        """Close the server, and give requests in progress ``timeout`` seconds to end before they are shut down.

        If ``timeout`` is None, they are not shut down.

        Raises:
            RuntimeError: called in the coro of one of its connections.
            ScheduleError: called in another thread.
            YieldFromMain: not called in a coro.
        """
        self.close()
        self._server.stop(timeout)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _handle(self, sock: Any, address: Any) -> None:
        try:
            connection = Connection(self._settings, _core._coro_current(), sock, address, self._is_secure)
        except OSError:
            return  # the client has already closed the connection
        self._connections.add(connection)
        connection.is_ending = self._is_closed
        try:
            _hiding.call_blocking(connection.serve)
        finally:
            self._connections.discard(connection)


def serve(
    application: Callable[..., Any],
    host: str | Sequence[str] | None = None,
    port: int | str | None = None,
    *,
    path: str | bytes | os.PathLike[str] | None = None,
    sock: socket.socket | None = None,
    limit: int | None = 1000,
    ssl: _ssl.SSLContext | None = None,
    backlog: int = 2048,
    reuse_port: bool = False,
    timeout: float = 60.0,
    keepalive_timeout: float = 60.0,
    max_target_size: int = 8190,
    max_headers: int = 100,
    max_header_size: int = 8190,
    max_head_size: int = 65536,
    max_body: int | None = 1 << 30,
    access_log: logging.Logger | None = None,
    error_log: logging.Logger | None = None,
) -> Server:
    """Listen, and call a WSGI application for each request, in the coro of its connection; return the :class:`Server`.

    If a request asks for an upgrade (RFC 9110, 7.8), its environ has the socket as ``werkzeug.socket``, for libraries
    such as simple-websocket. By using this socket, the application takes over the connection until it returns.

    Args:
        host, port, path, sock, limit, ssl, backlog, reuse_port: the same as for ``coro.serve``.
        timeout: how many seconds a client may take to send the head of a request, to send the next part of a body, and
            to receive the next part of a response. If it takes longer, it gets 408, or the connection is closed.
        keepalive_timeout: how many seconds a connection may be idle between two requests.
        max_target_size: the greatest length of a request's target in bytes; a longer one gets 414.
        max_headers: how many header fields a request may have; with more it gets 431.
        max_header_size: the greatest length of one header field in bytes; a longer one gets 431.
        max_head_size: the greatest total length in bytes of a request's header fields and trailers; a request that
            exceeds this limit gets 431.
        max_body: the greatest length of a request's body in bytes (None: no limit); a longer one gets 413.
        access_log: this logger gets a line for each response, in the combined format followed by the duration in
            seconds.
        error_log: this logger gets errors of the application and, at level DEBUG, refused requests. The default is the
            logger ``grapeshot.wsgi``.

    Raises:
        OSError: an address cannot be bound.
        LimitError: the loop has reached its limit of descriptors or coros (:meth:`Loop.set_limits`).
        socket.gaierror: a host does not resolve.
        OverflowError: the port is not between 0 and 65535.
        ValueError, TypeError: arguments contradict each other, or have a wrong type.
    """
    settings = Settings(
        application,
        timeout,
        keepalive_timeout,
        max_target_size,
        max_headers,
        max_header_size,
        max_head_size,
        max_body,
        access_log,
        error_log,
    )
    if not callable(application):
        raise TypeError(f"a WSGI application must be callable, got {application!r}")
    server = Server(settings, ssl is not None)
    server._server = _serve.serve(
        server._handle,
        host,
        port,
        path=path,
        sock=sock,
        limit=limit,
        ssl=ssl,
        backlog=backlog,
        reuse_port=reuse_port,
    )
    return server
