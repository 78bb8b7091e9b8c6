"""Calls between processes, made by coros and answered in coros: :mod:`grapeshot.rpc` without ``await``.

    >>> def divide(a, b):
    ...     return a / b
    >>> def main():
    ...     with rpc.Server() as server:
    ...         server.add("divide", divide)
    ...         server.listen("127.0.0.1", 0)
    ...         with rpc.Client(*server.addresses[0]) as client:
    ...             return client.call("divide", 1, 2)
    >>> coro.run(main)
    0.5

If a method is a plain function, each call of it runs in a coro of its own, and may wait. Clients and servers of this
module can talk to servers and clients of :mod:`grapeshot.rpc`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Self, TypeVar, overload

from grapeshot import _core
from grapeshot import rpc as _rpc
from grapeshot.rpc import (
    BadArguments,
    BadResult,
    Codec,
    ConnectionLost,
    DeadlineExceeded,
    Msgpack,
    PacketTooLarge,
    Pickle,
    ProtocolError,
    RemoteCancelled,
    RemoteError,
    RpcError,
    UnknownMethod,
    _handlers,
)

from ._bridge import await_

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl as _ssl
    from os import PathLike
    from types import TracebackType
    from typing import Unpack

    from grapeshot.rpc._client import ClientOptions
    from grapeshot.rpc._server import ServerOptions

__all__ = [
    "BadArguments",
    "BadResult",
    "Client",
    "Codec",
    "ConnectionLost",
    "DeadlineExceeded",
    "Msgpack",
    "PacketTooLarge",
    "Pickle",
    "ProtocolError",
    "RemoteCancelled",
    "RemoteError",
    "RpcError",
    "Server",
    "Stream",
    "UnknownMethod",
]

_F = TypeVar("_F", bound=Callable[..., Any])


class Client:
    """Like :class:`grapeshot.rpc.Client`, with the same arguments. Any number of coros may make calls at the same time.

    If a coro is interrupted while it waits for an answer, its call is cancelled.
    """

    def __init__(self, host: str | None = None, port: int | None = None, **options: Unpack[ClientOptions]) -> None:
        self._client = _rpc.Client(host, port, **options)

    def __repr__(self) -> str:
        return repr(self._client)

    def call(self, method: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Call a method; return its result. Raises the same exceptions as :meth:`grapeshot.rpc.Client.call`."""
        return await_(self._client.call(method, *args, timeout=timeout, **kwargs))

    def stream(self, method: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Stream:
        """Call a method that streams its results (``for item in client.stream("rows", "users")``)."""
        return Stream(self._client.stream(method, *args, timeout=timeout, **kwargs))

    def connect(self) -> None:
        """Open the connection now, not at the first call. Raises ConnectionLost if that fails, as a call does."""
        await_(self._client.connect())

    def close(self) -> None:
        """Close the connection at once. Calls in progress and later calls raise ConnectionLost."""
        await_(self._client.close())

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Stream(Iterator[Any]):
    """The results of a call, as an iterator. :meth:`Client.stream` makes streams.

    If a ``for`` loop over the stream is left early, the handler is cancelled once the stream is freed. Use the stream
    in a ``with`` block to cancel the handler as soon as the block ends.
    """

    def __init__(self, stream: _rpc.Stream) -> None:
        self._stream = stream

    def __next__(self) -> Any:
        try:
            return await_(self._stream.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        """Cancel the call if it is still running. No more items come after this."""
        self._stream.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Server:
    """Like :class:`grapeshot.rpc.Server`, with the same arguments, but plain functions and generators run in coros."""

    def __init__(self, **options: Unpack[ServerOptions]) -> None:
        self._server = _CoroServer(**options)

    def __repr__(self) -> str:
        return repr(self._server)

    def add(self, name: str, function: Callable[..., Any]) -> None:
        """Register a method. Plain functions and generators run in coros; async ones are allowed, too.

        Raises the same exceptions as :meth:`grapeshot.rpc.Server.add`.
        """
        self._server.add(name, function)

    @overload
    def method(self, function: _F, /) -> _F: ...
    @overload
    def method(self, name: str, /) -> Callable[[_F], _F]: ...
    def method(self, function: Any, /) -> Any:
        """Register a function under its own name (``@server.method``) or another (``@server.method("files.read")``)."""
        return self._server.method(function)

    def listen(self, host: str | None, port: int, *, ssl: _ssl.SSLContext | None = None) -> None:
        """Listen on TCP. Raises the same exceptions as :meth:`grapeshot.rpc.Server.listen`."""
        await_(self._server.listen(host, port, ssl=ssl))

    def listen_unix(self, path: str | PathLike[str], *, ssl: _ssl.SSLContext | None = None) -> None:
        """Listen on a unix socket. Raises the same exceptions as :meth:`grapeshot.rpc.Server.listen_unix`."""
        await_(self._server.listen_unix(path, ssl=ssl))

    @property
    def addresses(self) -> list[Any]:
        """The addresses that the server listens on, as ``getsockname()`` returns them."""
        return self._server.addresses

    @property
    def connections(self) -> int:
        """The number of connected clients."""
        return self._server.connections

    @property
    def calls(self) -> int:
        """The number of calls in progress."""
        return self._server.calls

    def serve_forever(self) -> None:
        """Wait until the server is closed."""
        await_(self._server.serve_forever())

    def close(self, timeout: float | None = 10.0) -> None:
        """Close the server gracefully, like :meth:`grapeshot.rpc.Server.close`."""
        await_(self._server.close(timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _CoroServer(_rpc.Server):
    def _make_handler(self, function: Callable[..., Any]) -> _handlers.Handler:
        if inspect.isgeneratorfunction(function):
            return _handlers.Handler(function, _start_stream, True)
        handler = _handlers.make_handler(function)
        return handler if handler.start is not None else _handlers.Handler(function, _start, False)


def _start(_outlet: None, function: Callable[..., Any], args: Any, kwargs: Any) -> _handlers.Running:
    running: _handlers.Running = _core._coro_spawn(_call, function, args, kwargs, name=_name_of(function))
    return running


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", "call")  # a functools.partial has no name


def _call(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except TypeError as error:
        if _handlers.accepts(function, args, kwargs):
            raise
        raise _handlers.BadCallError(error) from None


def _start_stream(outlet: _handlers.Outlet, function: Callable[..., Any], args: Any, kwargs: Any) -> _handlers.Running:
    # This only binds the arguments, and raises TypeError if they do not fit; the generator runs in the coro.
    generator = function(*args, **kwargs)
    running: _handlers.Running = _core._coro_spawn(_send_items, outlet, generator, name=_name_of(function))
    return running


def _send_items(outlet: _handlers.Outlet, generator: Any) -> None:
    try:
        await_(outlet.wait_ready())
        for item in generator:
            if not outlet.send_item(item):
                await_(outlet.wait_ready())
    finally:
        generator.close()
