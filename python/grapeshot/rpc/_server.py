"""The server: methods by name, listening sockets, connections, and a graceful end."""

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
from ._messages import MIN_PACKET, check_limit
from ._packet_stream import MAX_LENGTH, MAX_PACKET
from ._server_connection import HELLO_S, ServerConnection

_F = TypeVar("_F", bound=Callable[..., Any])


class ServerOptions(TypedDict, total=False):
    """The keywords of :class:`Server`."""

    codec: Codec | None
    max_calls: int
    max_packet: int
    tracebacks: bool
    keepalive: float | None


class Server:
    """Methods that clients call by name.

    Args:
        codec: :class:`Msgpack` unless given. :class:`Pickle` can be served on unix sockets only.
        max_calls: how many calls of one connection may be under way; further calls wait at the client.
        max_packet: the longest request that is accepted, in bytes: 1 MiB unless given. A request may need a hundred
            times its length in memory.
        tracebacks: whether errors carry the text of the handler's traceback to the caller.
        keepalive: after so many seconds without a byte from a client it is asked for a sign of life. If none comes for
            as long again, its connection is closed, which cancels its calls. None: never.
    """

    def __init__(
        self,
        *,
        codec: Codec | None = None,
        max_calls: int = 1000,
        max_packet: int = MAX_PACKET,
        tracebacks: bool = False,
        keepalive: float | None = KEEPALIVE_S,
    ) -> None:
        check_limit("max_calls", max_calls, 1)
        check_limit("max_packet", max_packet, MIN_PACKET, MAX_LENGTH)
        check_keepalive(keepalive)
        self.codec = make_codec(codec)
        self.max_calls = max_calls
        self.max_packet = max_packet
        self.tracebacks = tracebacks
        self.keepalive = keepalive
        self._methods: dict[str, Handler] = {}
        self._servers: list[asyncio.Server] = []
        self._paths: list[tuple[str, os.stat_result]] = []
        self._connections: set[ServerConnection] = set()
        self._is_closing = False
        # Done when the last connection has ended after close(); serve_forever() waits for it, too.
        self._ended: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self._methods)} methods, {len(self._connections)} connections>"

    # ------------------------------------------------------------------ methods

    def add(self, name: str, function: Callable[..., Any]) -> None:
        """Register a method: a function, an async function, or an async generator, whose items are streamed.

        A function is called in the loop's thread, in place, and must not block.

        Raises:
            TypeError: it is none of these, or the name is no string.
            ValueError: there is a method of this name.
        """
        if not isinstance(name, str):
            raise TypeError(f"the name of a method must be a string, not {name!r}")
        if name in self._methods:
            raise ValueError(f"there is a method {name!r} already")
        self._methods[name] = self._make_handler(function)

    def _make_handler(self, function: Callable[..., Any]) -> Handler:
        return make_handler(function)

    @overload
    def method(self, function: _F, /) -> _F: ...
    @overload
    def method(self, name: str, /) -> Callable[[_F], _F]: ...
    def method(self, function: Any, /) -> Any:
        """Register a function under its name (``@server.method``) or another one (``@server.method("files.read")``)."""
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
        """Listen on TCP. With ``verify_mode = ssl.CERT_REQUIRED`` in the context, clients need a certificate.

        Raises:
            ValueError: the codec is for one user's processes only.
            OSError: as ``loop.create_server``.
        """
        if self.codec.is_for_one_user:
            raise ValueError(f"{self.codec.name} is for unix sockets only: whoever connects can run any code")
        self._check_open()
        loop = asyncio.get_running_loop()
        in_time = None if ssl is None else HELLO_S
        server = await loop.create_server(self._make_connection, host, port, ssl=ssl, ssl_handshake_timeout=in_time)
        self._servers.append(server)

    async def listen_unix(self, path: str | PathLike[str], *, ssl: _ssl.SSLContext | None = None) -> None:
        """Listen on a unix socket. Who may connect is for the folder's permissions to say; with Pickle only this user.

        Raises:
            OSError: as ``loop.create_unix_server``.
        """
        self._check_open()
        path = os.fsdecode(path)
        loop = asyncio.get_running_loop()
        in_time = None if ssl is None else HELLO_S
        server = await loop.create_unix_server(
            self._make_connection, path, ssl=ssl, ssl_handshake_timeout=in_time, start_serving=False
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
        """The addresses that it listens on, as ``getsockname()`` returns them."""
        return [sock.getsockname() for server in self._servers for sock in server.sockets]

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self._connections)

    @property
    def calls(self) -> int:
        """How many calls are under way."""
        return sum(connection.calls for connection in self._connections)

    def _make_connection(self) -> ServerConnection:
        return ServerConnection(self, self._methods)

    def attach(self, connection: ServerConnection) -> None:
        """Know a connection. Called by the connection."""
        self._connections.add(connection)
        if self._is_closing:
            connection.abort()

    def detach(self, connection: ServerConnection) -> None:
        """Forget a connection that has ended. Called by the connection."""
        self._connections.discard(connection)
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._is_closing and not self._connections and self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    # ------------------------------------------------------------------ the end

    async def serve_forever(self) -> None:
        """Wait until somebody has closed the server."""
        await asyncio.shield(self._end())

    async def close(self, timeout: float | None = 10.0) -> None:
        """Stop listening, say goodbye to all clients, wait for the calls under way, close the connections.

        Calls that have not ended after ``timeout`` seconds (None: wait as long as it takes) are cancelled. Clients send
        what they had sent too late to the next server at this address. If this is cancelled, it cancels the calls at
        once.
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
            # handlers clean up, and their answers leave
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
    """Remove a socket's file, unless it is another server's by now or the loop has removed it."""
    try:
        if os.path.samestat(os.stat(path), status):
            os.unlink(path)
    except FileNotFoundError:
        pass
