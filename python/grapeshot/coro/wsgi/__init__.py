"""A server for blocking-style WSGI applications (PEP 3333), with a coro for each connection: :func:`serve`.

    >>> from grapeshot import coro
    >>> from grapeshot.coro import wsgi
    >>> def application(environ, start_response):
    ...     start_response("200 OK", [("Content-Type", "text/plain")])
    ...     return [b"Hello"]
    >>> def main():
    ...     with wsgi.serve(application, "localhost", 8000) as server:
    ...         server.wait_closed()

``python -m grapeshot.coro.wsgi module:application`` does it from the command line, after ``coro.install()``. httptools
parses the requests (``pip install 'grapeshot[wsgi]'``). asyncio's functions see no running loop in the application.
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
    """An application that is served. Made by :func:`serve`. As a context manager it ends with the block: see stop()."""

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
        """How many connections are open."""
        return self._server.connections

    def close(self) -> None:
        """Stop accepting, and end connections that are idle. The others end with the answer to their last request."""
        self._is_closed = True
        self._server.close()
        for connection in list(self._connections):
            connection.end()

    def wait_closed(self, timeout: float | None = None) -> bool:
        """Wait until the server is closed and its last connection has ended; return whether that was in time.

        Raises:
            RuntimeError: in the coro of one of its connections.
            YieldFromMain: not in a coro.
        """
        return self._server.wait_closed(timeout)

    def stop(self, timeout: float | None = 30.0) -> None:
        """Close the server, wait up to ``timeout`` seconds for requests that are under way, and shut down what is left.

        None waits as long as it takes. Raises: as :meth:`wait_closed`.
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
            return  # the client has gone already
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

    The environ of a request that asks for an upgrade (RFC 9110, 7.8) has its socket as ``werkzeug.socket``, for
    libraries such as simple-websocket. Whoever uses it goes on with the connection until the application returns.

    Args:
        host, port, path, sock, limit, ssl, backlog, reuse_port: as of ``coro.serve``.
        timeout: how many seconds a client may take for the head of a request, for the next part of a body, and to take
            the next part of an answer. It gets 408, or the connection ends.
        keepalive_timeout: how many seconds a connection may wait for its next request.
        max_target_size, max_headers, max_header_size, max_head_size, max_body: limits of a request: the bytes of its
            target, how many fields it has, the bytes of one and of all of them, the bytes of its body (None: no
            limit). Beyond them it is answered with 414, 431 or 413. max_head_size also limits the trailers of a body.
        access_log: gets a line for each answer, in the combined format, with the time in seconds at its end.
        error_log: gets errors of the application, and at level DEBUG requests that were refused. By default it is the
            logger ``grapeshot.wsgi``.

    Raises:
        OSError: an address cannot be bound.
        socket.gaierror: a host does not resolve.
        ValueError, TypeError: arguments that contradict each other, or of a wrong kind.
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
        raise TypeError(f"a WSGI application is called, and {application!r} cannot be")
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
