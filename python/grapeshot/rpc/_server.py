"""The server: it has methods by name, listening sockets and connections, and can be closed gracefully."""

from __future__ import annotations

import asyncio
import os
import ssl as _ssl
from collections.abc import Callable
from os import PathLike
from types import TracebackType
from typing import Any, Self, TypedDict, TypeVar, overload

from ._codecs import Codec, make_codec
from ._connection import KEEPALIVE_S, check_keepalive
from ._handlers import Handler, make_handler
from ._messages import MAX_LIMIT, MIN_PACKET, check_limit
from ._packet_stream import MAX_LENGTH, MAX_PACKET
from ._server_connection import HELLO_S, ServerConnection

_F = TypeVar("_F", bound=Callable[..., Any])


class ServerOptions(TypedDict, total=False):
    """The keyword arguments of :class:`Server`."""

    codec: Codec | None
    max_calls: int
    max_call_bytes: int | None
    max_packet: int
    tracebacks: bool
    keepalive: float | None


class Server:
    """Offers methods that clients call by name.

    Args:
        codec: the default is :class:`Msgpack`. :class:`Pickle` works only on Unix sockets.
        max_calls: how many calls of one connection may be under way. Further calls wait at the client.
        max_call_bytes: the limit, in bytes, for the total length of the requests whose calls are under way on one
            connection. Once it is reached, further calls wait at the client. Requests shorter than 1 KiB neither count
            nor wait. The default is four times ``max_packet``.
        max_packet: the length of the longest request to accept, in bytes. The default is 1 MiB. Decoding a request may
            need a hundred times its length in memory.
        tracebacks: whether to send the text of the handler's traceback to the caller with an error.
        keepalive: if a client sends nothing for this many seconds, the server sends it a PING. If nothing arrives
            for the same time again, the connection is closed, which cancels its calls. None disables this.
    """

    def __init__(
        self,
        *,
        codec: Codec | None = None,
        max_calls: int = 1000,
        max_call_bytes: int | None = None,
        max_packet: int = MAX_PACKET,
        tracebacks: bool = False,
        keepalive: float | None = KEEPALIVE_S,
    ) -> None:
        check_limit("max_calls", max_calls, 1, MAX_LIMIT)
        check_limit("max_packet", max_packet, MIN_PACKET, MAX_LENGTH)
        if max_call_bytes is None:
            max_call_bytes = 4 * max_packet
        check_limit("max_call_bytes", max_call_bytes, 1, MAX_LIMIT)
        check_keepalive(keepalive)
        self.codec = make_codec(codec)
        self.max_calls = max_calls
        self.max_call_bytes = max_call_bytes
        self.max_packet = max_packet
        self.tracebacks = tracebacks
        self.keepalive = keepalive
        self._methods: dict[str, Handler] = {}
        self._servers: list[asyncio.Server] = []
        self._paths: list[tuple[str, os.stat_result]] = []
        self._connections: set[ServerConnection] = set()
        self._is_closing = False
        # Completed when the last connection has ended after close(). serve_forever() waits for it, too.
        self._ended: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self._methods)} methods, {len(self._connections)} connections>"

    # ------------------------------------------------------------------ methods

    def add(self, name: str, function: Callable[..., Any]) -> None:
        """Register a method: a function, an async function, or an async generator, whose items are streamed.

        A plain function is called in the loop's thread and must not block.

        Raises:
            TypeError: ``function`` is not one of these, or the name is not a string.
            ValueError: there is already a method with this name.
        """
        if not isinstance(name, str):
            raise TypeError(f"the name of a method must be a string, not {name!r}")
        if name in self._methods:
            raise ValueError(f"there is already a method with the name {name!r}")
        self._methods[name] = self._make_handler(function)

    def _make_handler(self, function: Callable[..., Any]) -> Handler:
        return make_handler(function)

    @overload
    def method(self, function: _F, /) -> _F: ...
    @overload
    def method(self, name: str, /) -> Callable[[_F], _F]: ...
    def method(self, function: Any, /) -> Any:
        """Decorator that registers a function under its own name, or under another: ``@server.method("name")``."""
        if not isinstance(function, str):
            name = getattr(function, "__name__", None)
            if name is None:
                raise TypeError(f"{function!r} has no name: use add(name, function)")
            self.add(name, function)
            return function
        name = function

        def register(function: _F) -> _F:
            self.add(name, function)
            return function

        return register

    # ------------------------------------------------------------------ listening

    async def listen(self, host: str | None, port: int, *, ssl: _ssl.SSLContext | None = None) -> None:
        """Listen on TCP. If ``ssl`` has ``verify_mode = ssl.CERT_REQUIRED``, clients need a certificate.

        Raises:
            ValueError: the codec works only between processes of one user, on a Unix socket.
            OSError: like ``loop.create_server``.
            RuntimeError: the server is closed, or was closed during the call.
        """
        if self.codec.is_for_one_user:
            problem = "needs a Unix socket (listen_unix), because clients can run any code in this process"
            raise ValueError(f"the codec {self.codec.name} {problem}")
        self._check_open()
        loop = asyncio.get_running_loop()
        handshake_s = None if ssl is None else HELLO_S
        server = await loop.create_server(self._make_connection, host, port, ssl=ssl, ssl_handshake_timeout=handshake_s)
        if self._is_closing:  # close() was called during the lookup of the name
            server.close()
        self._check_open()
        self._servers.append(server)

    async def listen_unix(self, path: str | PathLike[str], *, ssl: _ssl.SSLContext | None = None) -> None:
        """Listen on a Unix socket.

        Which users can connect depends on the permissions of the directory and, on Linux, also on the permissions of
        the socket file. The permissions of the file follow the process's umask.

        With :class:`Pickle`, only processes of this user can connect.

        Raises:
            OSError: like ``loop.create_unix_server``.
        """
        self._check_open()
        path = os.fsdecode(path)
        loop = asyncio.get_running_loop()
        handshake_s = None if ssl is None else HELLO_S
        server = await loop.create_unix_server(
            self._make_connection, path, ssl=ssl, ssl_handshake_timeout=handshake_s, start_serving=False
        )
        self._servers.append(server)
        if not path.startswith("\0"):
            if self.codec.is_for_one_user:
                os.chmod(path, 0o600)
            self._paths.append((path, os.stat(path)))
        await server.start_serving()

    def _check_open(self) -> None:
        if self._is_closing:
            raise RuntimeError("the server is closed")

    @property
    def addresses(self) -> list[Any]:
        """The addresses that the server listens on, in the form of ``getsockname()``."""
        return [sock.getsockname() for server in self._servers for sock in server.sockets]

    @property
    def connections(self) -> int:
        """The number of connected clients."""
        return len(self._connections)

    @property
    def calls(self) -> int:
        """The number of calls under way."""
        return sum(connection.calls for connection in self._connections)

    def _make_connection(self) -> ServerConnection:
        return ServerConnection(self, self._methods)

    def attach(self, connection: ServerConnection) -> None:
        """Add a connection. Called by the connection."""
        self._connections.add(connection)
        if self._is_closing:
            connection.abort()

    def detach(self, connection: ServerConnection) -> None:
        """Remove a connection that has ended. Called by the connection."""
        self._connections.discard(connection)
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._is_closing and not self._connections and self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    # ------------------------------------------------------------------ the end

    async def serve_forever(self) -> None:
        """Wait until the server has been closed with :meth:`close`."""
        await asyncio.shield(self._end())

    async def close(self, timeout: float | None = 10.0) -> None:
        """Stop listening, tell all clients to send no more calls, wait for the calls under way, close the connections.

        Calls that have not ended after ``timeout`` seconds are cancelled. The cleanup of cancelled calls may take as
        long again; then the connections are aborted. None means no limit. Calls that arrive after the clients were told
        to stop are not run; their clients send them again, to the next server at this address. If this coroutine is
        cancelled, it cancels the calls at once.
        """
        self._is_closing = True
        for server in self._servers:
            server.close()
        for path, status in self._paths:
            _remove(path, status)
        self._paths.clear()
        for connection in list(self._connections):
            connection.say_goodbye()
        ended = self._end()
        self._end_if_done()
        try:
            await asyncio.wait([ended], timeout=timeout)
        finally:
            for connection in list(self._connections):
                connection.cancel_calls()
        if self._connections:
            # wait until the cancelled handlers have cleaned up and their answers have been sent
            await asyncio.wait([ended], timeout=timeout)
        for connection in list(self._connections):
            connection.abort()
        await asyncio.shield(ended)

    def _end(self) -> asyncio.Future[None]:
        if self._ended is None:
            self._ended = asyncio.get_running_loop().create_future()
        return self._ended

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


def _remove(path: str, status: os.stat_result) -> None:
    """Remove a socket's file, unless the loop has removed it or the file now belongs to another server."""
    try:
        if os.path.samestat(os.stat(path), status):
            os.unlink(path)
    except FileNotFoundError:
        pass
