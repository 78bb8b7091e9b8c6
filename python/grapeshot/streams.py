"""asyncio's streams with native readers and writers, which make reading, writing and draining faster.

The four functions (``open_connection``, ``start_server``, and the same for Unix sockets) and the objects that they
return behave exactly like asyncio's: the same methods, limits and errors, and the same behaviour on cancellation.
``isinstance(reader, asyncio.StreamReader)`` holds. Call the functions directly, or let
``grapeshot.install(streams=True)`` put them in the place of asyncio's functions::

    reader, writer = await grapeshot.streams.open_connection("localhost", 6379)

On a loop that is not grapeshot's, the four functions call asyncio's.
"""

from __future__ import annotations

import asyncio
import types
from asyncio import streams as _asyncio

from . import _core
from ._loop import Loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from collections.abc import Awaitable, Callable
    from typing import Any

    ClientConnected = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None] | None]

__all__ = [
    "StreamReader",
    "StreamReaderProtocol",
    "StreamWriter",
    "open_connection",
    "open_unix_connection",
    "start_server",
    "start_unix_server",
]

# The functions that install(streams=True) replaces in asyncio.
FUNCTIONS = ("open_connection", "start_server", "open_unix_connection", "start_unix_server")
_DEFAULT_LIMIT = 2**16
# Keep asyncio's own functions, because install(streams=True) replaces these names later.
_open_connection = _asyncio.open_connection
_start_server = _asyncio.start_server
_open_unix_connection = _asyncio.open_unix_connection
_start_unix_server = _asyncio.start_unix_server


class StreamReader(_core._StreamReader, asyncio.StreamReader):
    """An :class:`asyncio.StreamReader` whose buffer is filled and read by native code."""

    read = _core._coroutine_method(asyncio.StreamReader.read, _core._StreamReader)
    readexactly = _core._coroutine_method(asyncio.StreamReader.readexactly, _core._StreamReader)
    readuntil = _core._coroutine_method(asyncio.StreamReader.readuntil, _core._StreamReader)
    readline = _core._coroutine_method(asyncio.StreamReader.readline, _core._StreamReader)


class StreamWriter(_core._StreamWriter, asyncio.StreamWriter):
    """An :class:`asyncio.StreamWriter` that writes and drains with native code."""

    drain = _core._coroutine_method(asyncio.StreamWriter.drain, _core._StreamWriter)


class StreamReaderProtocol(_core._StreamReaderProtocol, asyncio.StreamReaderProtocol):
    """An :class:`asyncio.StreamReaderProtocol` whose reader is filled by native transports without a Python call."""

    # asyncio's own function with our StreamWriter in its globals, so that it creates a native writer.
    connection_made = types.FunctionType(
        asyncio.StreamReaderProtocol.connection_made.__code__,
        {**vars(_asyncio), "StreamWriter": StreamWriter},
    )


_core._set_stream_types(StreamReader, StreamWriter, StreamReaderProtocol)


def _pair(loop: Loop, limit: int) -> tuple[StreamReader, StreamReaderProtocol]:
    reader = StreamReader(limit=limit, loop=loop)
    return reader, StreamReaderProtocol(reader, loop=loop)


def _factory(loop: Loop, limit: int, client_connected_cb: ClientConnected) -> Callable[[], StreamReaderProtocol]:
    def make() -> StreamReaderProtocol:
        return StreamReaderProtocol(StreamReader(limit=limit, loop=loop), client_connected_cb, loop=loop)

    return make


async def open_connection(
    host: str | None = None, port: int | str | None = None, *, limit: int = _DEFAULT_LIMIT, **kwds: Any
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Like :func:`asyncio.open_connection`."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, Loop):
        return await _open_connection(host, port, limit=limit, **kwds)
    reader, protocol = _pair(loop, limit)
    transport, _ = await loop.create_connection(lambda: protocol, host, port, **kwds)
    return reader, StreamWriter(transport, protocol, reader, loop)


async def start_server(
    client_connected_cb: ClientConnected,
    host: Any = None,
    port: int | str | None = None,
    *,
    limit: int = _DEFAULT_LIMIT,
    **kwds: Any,
) -> asyncio.Server:
    """Like :func:`asyncio.start_server`."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, Loop):
        return await _start_server(client_connected_cb, host, port, limit=limit, **kwds)
    return await loop.create_server(_factory(loop, limit, client_connected_cb), host, port, **kwds)


async def open_unix_connection(
    path: str | os.PathLike[str] | None = None, *, limit: int = _DEFAULT_LIMIT, **kwds: Any
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Like :func:`asyncio.open_unix_connection`."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, Loop):
        return await _open_unix_connection(path, limit=limit, **kwds)
    reader, protocol = _pair(loop, limit)
    transport, _ = await loop.create_unix_connection(lambda: protocol, path, **kwds)
    return reader, StreamWriter(transport, protocol, reader, loop)


async def start_unix_server(
    client_connected_cb: ClientConnected,
    path: str | os.PathLike[str] | None = None,
    *,
    limit: int = _DEFAULT_LIMIT,
    **kwds: Any,
) -> asyncio.Server:
    """Like :func:`asyncio.start_unix_server`."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, Loop):
        return await _start_unix_server(client_connected_cb, path, limit=limit, **kwds)
    return await loop.create_unix_server(_factory(loop, limit, client_connected_cb), path, **kwds)
