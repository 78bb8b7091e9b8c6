"""Remote procedure calls between processes: many at a time over one connection, answered in any order.

    >>> server = rpc.Server()
    >>> @server.method
    ... async def add(a, b):
    ...     return a + b
    >>> await server.listen("127.0.0.1", 7000)

    >>> async with rpc.Client("127.0.0.1", 7000) as client:
    ...     await client.call("add", 1, 2)
    3

This module works on any asyncio loop. :mod:`grapeshot.coro.rpc` has the same names (except ``PacketStream``) for
coros, which need no ``await``: ``client.call("add", 1, 2)`` returns 3. Messages are encoded as msgpack, with msgspec,
which ``pip install 'grapeshot[rpc]'`` installs. The guide is docs/rpc.md.
"""

from __future__ import annotations

from ._client import Client
from ._codecs import Codec, Msgpack, Pickle
from ._errors import (
    BadArguments,
    BadResult,
    ConnectionLost,
    DeadlineExceeded,
    PacketTooLarge,
    ProtocolError,
    RemoteCancelled,
    RemoteError,
    RpcError,
    UnknownMethod,
)
from ._packet_stream import PacketStream
from ._server import Server
from ._stream import Stream

__all__ = [
    "BadArguments",
    "BadResult",
    "Client",
    "Codec",
    "ConnectionLost",
    "DeadlineExceeded",
    "Msgpack",
    "PacketStream",
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

for _name in __all__:  # so that tracebacks, `help` and pickles show the public module
    globals()[_name].__module__ = __name__
del _name
