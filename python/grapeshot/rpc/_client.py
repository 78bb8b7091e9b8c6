"""The client. The first call opens the connection, and the first call after a loss opens a new one."""

from __future__ import annotations

import asyncio
import os
import random
import ssl as _ssl
from collections.abc import Coroutine
from os import PathLike
from types import TracebackType
from typing import Any, Self, TypedDict

from ._client_connection import ClientConnection, Request
from ._codecs import Codec, make_codec
from ._connection import KEEPALIVE_S, check_keepalive
from ._deadline import current_deadline, earliest
from ._errors import ConnectionLost, DeadlineExceeded, NotSent, ProtocolError
from ._messages import MAX_CREDIT, MIN_PACKET, check_limit
from ._packet_stream import MAX_LENGTH, MAX_PACKET
from ._stream import Stream

# Between attempts to connect, the client waits for a random part of a time that doubles with each attempt.
_FIRST_DELAY_S = 0.05
_MAX_DELAY_S = 5.0
# A connection that has lasted for this many seconds was a working one, even if it has not answered a call.
_STABLE_S = 1.0
# Errors that trying again does not cure.
_FATAL = (_ssl.SSLError, PermissionError, ProtocolError)


class ClientOptions(TypedDict, total=False):
    """The keyword arguments of :class:`Client`."""

    path: str | PathLike[str] | None
    ssl: _ssl.SSLContext | None
    server_hostname: str | None
    codec: Codec | None
    max_packet: int
    connect_timeout: float
    stream_window: int
    keepalive: float | None


class Client:
    """Calls the methods of a :class:`Server` at ``host`` and ``port``, or at the Unix socket ``path``.

    Any number of tasks may make calls at the same time. All calls go through one connection, which the first call
    opens. A call waits while the server does not read, or while the server already has as many calls under way as it
    accepts. A client belongs to one event loop.

    Args:
        ssl: the context for TLS. To send a client certificate, use its ``load_cert_chain``.
        server_hostname: the name that the server's certificate must have. The default is ``host``.
        codec: the default is :class:`Msgpack`. :class:`Pickle` requires ``path``.
        max_packet: the length of the longest answer to accept, in bytes. The default is 1 MiB.
        connect_timeout: how long calls wait for a connection, in seconds, over all attempts.
        stream_window: how many items of a stream the server may send ahead of the reader, at most 1,048,576.
        keepalive: if the server sends nothing for this many seconds, the client sends it a PING. If nothing arrives
            for the same time again, the connection is regarded as lost. None disables this.

    Raises:
        TypeError, ValueError: the address or an option is not valid.
    """

    def __init__(
        self,
        host: str | None = None,
        port: int | None = None,
        *,
        path: str | PathLike[str] | None = None,
        ssl: _ssl.SSLContext | None = None,
        server_hostname: str | None = None,
        codec: Codec | None = None,
        max_packet: int = MAX_PACKET,
        connect_timeout: float = 10.0,
        stream_window: int = 16,
        keepalive: float | None = KEEPALIVE_S,
    ) -> None:
        if (path is None) == (host is None) or (host is None) != (port is None):
            raise ValueError(f"pass either host and port, or path; got {host=}, {port=}, {path=}")
        check_limit("stream_window", stream_window, 1, MAX_CREDIT)
        check_limit("max_packet", max_packet, MIN_PACKET, MAX_LENGTH)
        check_keepalive(keepalive)
        if not connect_timeout > 0:
            raise ValueError(f"connect_timeout must be more than 0 seconds, got {connect_timeout}")
        self._codec = make_codec(codec)
        if self._codec.is_for_one_user and path is None:
            problem = "needs a Unix socket (path), because the peer can run any code in this process"
            raise ValueError(f"the codec {self._codec.name} {problem}")
        self._host, self._port = host, port
        self._path = None if path is None else os.fsdecode(path)
        self._ssl = ssl
        self._server_hostname = server_hostname or (host or "" if ssl is not None else None)
        self._max_packet = max_packet
        self._connect_timeout_s = connect_timeout
        self._stream_window = stream_window
        self._keepalive_s = keepalive
        # The connection for new calls.
        self._connection: ClientConnection | None = None
        # All open connections, including the ones whose server has said goodbye and which only deliver answers.
        self._connections: set[ClientConnection] = set()
        self._connecting: asyncio.Task[Exception | None] | None = None
        self._is_closed = False
        # The loop's time() at the start of the current series of attempts to connect. The series ends when an attempt
        # fails with one of the _FATAL errors, or when connect_timeout has passed. It also ends when a connection that
        # has worked (that is, has given answers or has lasted for a while) takes no more calls.
        self._trouble_since: float | None = None
        self._connected_at = 0.0
        self._delay_s = _FIRST_DELAY_S

    def __repr__(self) -> str:
        where = self._path if self._path is not None else f"{self._host}:{self._port}"
        state = "closed" if self._is_closed else "connected" if self._connection is not None else "not connected"
        return f"<{type(self).__name__} of {where}, {state}>"

    # ------------------------------------------------------------------ calls

    def call(self, method: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """Call a method and return its result: ``await client.call("add", 1, 2)``.

        The server runs the method at most once. ``timeout`` is in seconds. It is sent to the server, which cancels the
        handler when the time is over. If a handler makes a call itself, the handler's own deadline applies to that
        call, too. Cancelling a call cancels its handler. If the method has a parameter named ``timeout``, pass the
        argument for it by position.

        Raises:
            RemoteError: the method has raised. Subclasses of RemoteError mean that the server has no such method, that
                the method cannot be called like this, that its result cannot be sent, or that its handler was
                cancelled.
            DeadlineExceeded: the time is over. This is a TimeoutError.
            ConnectionLost: there was no connection, or it was lost. ``sent`` tells whether the method may have run.
            PacketTooLarge: the encoded arguments are longer than the server accepts.
            TypeError: the codec cannot encode an argument, or the name of the method is not a string.
        """
        if not isinstance(method, str):
            raise TypeError(f"the name of a method must be a string, not {method!r}")
        inherited = current_deadline.get()
        if timeout is None and inherited is None:
            return self._call((method, args, kwargs, None, 0))
        return self._call_in_time(method, args, kwargs, timeout, inherited)

    def stream(self, method: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Stream:
        """Call a method that streams its results: ``async for item in client.stream("rows", "users")``.

        ``timeout`` is the limit for the whole stream. Reading the stream raises the same errors as :meth:`call`.
        """
        if not isinstance(method, str):
            raise TypeError(f"the name of a method must be a string, not {method!r}")
        return Stream(self._connected, (method, args, kwargs, current_deadline.get(), self._stream_window), timeout)

    async def _call(self, request: Request) -> Any:
        while True:
            connection = self._connection
            if connection is None:
                connection = await self._connected()
            future = connection.new_future()
            number = connection.start(future, request)
            try:
                return await future
            except NotSent:
                continue
            except asyncio.CancelledError:
                connection.abandon(number, future)
                raise
            finally:
                del future  # break a cycle: the traceback of the future's exception refers to this frame

    async def _call_in_time(
        self, method: str, args: Any, kwargs: Any, timeout: float | None, inherited: float | None
    ) -> Any:
        deadline = earliest(inherited, timeout)
        try:
            async with asyncio.timeout_at(deadline):
                return await self._call((method, args, kwargs, deadline, 0))
        except TimeoutError as error:
            if isinstance(error, DeadlineExceeded):
                raise
            raise DeadlineExceeded(f"{method} did not answer in time") from None

    # ------------------------------------------------------------------ the connection

    async def connect(self) -> None:
        """Open the connection now instead of with the first call. Raises ConnectionLost, like a call."""
        await self._connected()

    async def _connected(self) -> ClientConnection:
        """Return the connection for new calls. If there is none, open one first."""
        while self._connection is None:
            if self._is_closed:
                raise ConnectionLost("the client is closed", sent=False)
            if self._connecting is None:
                self._connecting = asyncio.get_running_loop().create_task(self._connect())
            connecting = self._connecting
            await asyncio.wait([connecting])
            error = None if connecting.cancelled() else connecting.result()
            if error is not None:
                # not str(error) of a ConnectionLost, which adds that the call has not run: the new error adds that, too
                message = str(error.args[0] if isinstance(error, ConnectionLost) else error) or type(error).__name__
                raise ConnectionLost(f"cannot connect: {message}", sent=False) from error
        return self._connection

    async def _connect(self) -> Exception | None:
        """Open the connection. Return None on success, else the error."""
        loop = asyncio.get_running_loop()
        is_again = self._trouble_since is not None
        if self._trouble_since is None:
            self._trouble_since = loop.time()
        end = self._trouble_since + self._connect_timeout_s
        last: Exception | None = None
        try:
            while True:
                if is_again:
                    await asyncio.sleep(min(random.uniform(0, self._delay_s), end - loop.time()))
                    self._delay_s = min(self._delay_s * 2, _MAX_DELAY_S)
                is_again = True
                try:
                    async with asyncio.timeout_at(end):
                        self._connection = await self._open()
                    self._connected_at = loop.time()
                    return None
                except (OSError, ConnectionLost, ProtocolError) as error:
                    if isinstance(error, _FATAL) or loop.time() >= end:
                        self._forget_trouble()
                        # the previous attempt's error says more than a timeout
                        return last if last is not None and isinstance(error, TimeoutError) else error
                    last = error.with_traceback(None)  # its traceback would refer to this frame
        finally:
            self._connecting = None

    async def _open(self) -> ClientConnection:
        connection = ClientConnection(self._codec, self._max_packet, self._keepalive_s, self._on_leaving)
        self._connections.add(connection)
        loop = asyncio.get_running_loop()
        tls: dict[str, Any] = {"ssl": self._ssl, "server_hostname": self._server_hostname}
        try:
            if self._path is not None:
                await loop.create_unix_connection(lambda: connection, self._path, **tls)
            elif self._host is not None and self._port is not None:
                await loop.create_connection(lambda: connection, self._host, self._port, **tls)
            await connection.made
            if not connection.takes_calls:  # the server's goodbye has come together with its hello
                raise ConnectionLost("the server has closed the connection", sent=False)
        except BaseException:
            connection.abort()
            if connection.made.done() and not connection.made.cancelled():
                connection.made.exception()  # mark the exception as retrieved
            connection.made.cancel()
            if not connection.is_attached:
                self._connections.discard(connection)
            raise
        return connection

    def _on_leaving(self, connection: ClientConnection) -> None:
        if not connection.is_open:
            self._connections.discard(connection)
        if self._connection is connection:
            self._connection = None
            lasted_s = asyncio.get_running_loop().time() - self._connected_at
            if connection.has_answers or lasted_s >= _STABLE_S:
                self._forget_trouble()

    def _forget_trouble(self) -> None:
        self._trouble_since = None
        self._delay_s = _FIRST_DELAY_S

    async def close(self) -> None:
        """Close the connection at once. Calls under way raise ConnectionLost, and so do later calls."""
        self._is_closed = True
        connecting = self._connecting
        if connecting is not None:
            connecting.cancel()
            await asyncio.wait([connecting])
        for connection in list(self._connections):
            connection.leave("the client is closed")
        while self._connections:
            await asyncio.wait([connection.lost for connection in self._connections])

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
