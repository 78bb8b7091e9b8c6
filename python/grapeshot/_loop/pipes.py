"""Pipes, FIFOs and terminals as transports: connect_read_pipe and connect_write_pipe.

The code runs once per pipe, in the loop's thread. The transports are native.
"""

from __future__ import annotations

import asyncio
from asyncio.log import logger
from collections.abc import Callable

from . import origins
from .base import BaseLoop
from .opening import wait_opened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    from grapeshot import _core

    _P = TypeVar("_P", bound=asyncio.BaseProtocol)


async def connect_read_pipe(
    loop: BaseLoop, protocol_factory: Callable[[], _P], pipe: Any
) -> tuple[_core.ReadPipeTransport, _P]:
    """Read from ``pipe``, a file object over a pipe, FIFO, terminal or socket; return ``(transport, protocol)``.

    The transport owns ``pipe``, makes it non-blocking and closes it. When the last writer has closed the pipe,
    the protocol gets ``eof_received()`` and then, whatever that returns, ``connection_lost(None)``.

    Raises:
        ValueError: ``pipe`` is something else, for example a regular file, or is closed. The caller still owns it.
        OSError: the file object is open, but its descriptor was closed.

    Source: :meth:`asyncio.loop.connect_read_pipe`.
    """
    protocol = protocol_factory()
    waiter = loop.create_future()
    transport = loop._read_pipe(pipe, protocol, waiter)
    await wait_opened(waiter, transport)
    if loop.get_debug():
        origins.note_opened(loop, transport)
        logger.debug("Read pipe %r connected: (%r, %r)", pipe.fileno(), transport, protocol)
    return transport, protocol


async def connect_write_pipe(
    loop: BaseLoop, protocol_factory: Callable[[], _P], pipe: Any
) -> tuple[_core.WritePipeTransport, _P]:
    """Write to ``pipe``, a file object over a pipe, FIFO, terminal or socket; return ``(transport, protocol)``.

    The transport owns ``pipe``, makes it non-blocking and closes it. When the last reader has closed the pipe
    (terminals do not report that), the protocol gets ``connection_lost``: with BrokenPipeError if data was not written
    yet, otherwise with None.

    Raises: like :func:`connect_read_pipe`.

    Source: :meth:`asyncio.loop.connect_write_pipe`.
    """
    protocol = protocol_factory()
    waiter = loop.create_future()
    transport = loop._write_pipe(pipe, protocol, waiter)
    await wait_opened(waiter, transport)
    if loop.get_debug():
        origins.note_opened(loop, transport)
        logger.debug("Write pipe %r connected: (%r, %r)", pipe.fileno(), transport, protocol)
    return transport, protocol
