"""``sendfile`` and ``sock_sendfile``: with the system call where that works, otherwise by reading and writing.

The system call is repeated whenever the socket accepts more. Between two calls the loop runs an iteration, so that
sending a large file to a fast peer does not block everything else. At the end, also after an error, the file's position
is behind the last byte that was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from asyncio import constants
from collections.abc import Awaitable, Callable

from grapeshot import _core

from . import aio
from .base import BaseLoop
from .checks import check_plain_socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


# How many bytes the fallback for transports reads at a time, in a thread of the executor.
_BLOCK_LEN = 64 * 1024


async def sock_sendfile(
    loop: BaseLoop,
    sock: socket.socket,
    file: Any,
    offset: int = 0,
    count: int | None = None,
    *,
    fallback: bool | None = True,
) -> int:
    """Send ``count`` bytes (None: all) of ``file``, beginning at ``offset``, on a connected socket.

    Returns the number of bytes sent.

    Raises:
        asyncio.SendfileNotAvailableError: the system call does not work here, and ``fallback`` is false.
        OSError: the connection failed. ``file.tell()`` is the position behind the last byte sent.
        TypeError, ValueError: an argument has a wrong type or value, ``sock`` is not a plain stream socket or, in
            debug mode, ``sock`` is blocking.
    """
    if loop.get_debug() and sock.gettimeout() != 0:
        raise ValueError("the socket must be non-blocking")
    check_plain_socket(sock)
    _check_arguments(sock, file, offset, count)
    try:
        return await loop._sock_sendfile_native(sock, file, offset, count)
    except asyncio.SendfileNotAvailableError:
        if not fallback:
            raise
    return await _sock_sendfile_fallback(loop, sock, file, offset, count)


async def sendfile(
    loop: BaseLoop,
    transport: asyncio.WriteTransport,
    file: Any,
    offset: int = 0,
    count: int | None = None,
    *,
    fallback: bool = True,
) -> int:
    """Send ``count`` bytes (None: all) of ``file``, beginning at ``offset``; return the number of bytes sent.

    The bytes are sent after all data that was written before. During the call, the transport does not read. If the
    system call is used, the transport also refuses writes.

    Raises:
        RuntimeError: the transport is closing, does not support sendfile, is already sending a file, or can use only
            the fallback (like a TLS transport) while ``fallback`` is false.
        asyncio.SendfileNotAvailableError: the transport can use the system call, but the system call does not work
            here, and ``fallback`` is false.
        ConnectionError: the connection was lost. ``file.tell()`` is the position behind the last byte sent.
        TypeError, ValueError: like :func:`sock_sendfile`, if the system call is used. The fallback does not check the
            arguments.
    """
    if transport.is_closing():
        raise RuntimeError("Transport is closing")
    mode = getattr(transport, "_sendfile_compatible", constants._SendfileMode.UNSUPPORTED)
    if mode is constants._SendfileMode.UNSUPPORTED:
        raise RuntimeError(f"sendfile is not supported for transport {transport!r}")
    if mode is constants._SendfileMode.TRY_NATIVE:
        try:
            return await loop._sendfile_native(transport, file, offset, count)
        except asyncio.SendfileNotAvailableError:
            if not fallback:
                raise
    if not fallback:
        raise RuntimeError(f"fallback is disabled and native sendfile is not supported for transport {transport!r}")
    return await _sendfile_fallback(loop, transport, file, offset, count)


def _check_arguments(sock: socket.socket, file: Any, offset: int, count: int | None) -> None:
    if "b" not in getattr(file, "mode", "b"):
        raise ValueError("file should be opened in binary mode")
    if sock.type != socket.SOCK_STREAM:
        raise ValueError("only SOCK_STREAM type sockets are supported")
    if count is not None:
        if not isinstance(count, int):
            raise TypeError(f"count must be a positive integer (got {count!r})")
        if count <= 0:
            raise ValueError(f"count must be a positive integer (got {count!r})")
    if not isinstance(offset, int):
        raise TypeError(f"offset must be a non-negative integer (got {offset!r})")
    if offset < 0:
        raise ValueError(f"offset must be a non-negative integer (got {offset!r})")


# --- by the system -----------------------------------------------------------------------------------


async def sock_sendfile_native(loop: BaseLoop, sock: socket.socket, file: Any, offset: int, count: int | None) -> int:
    """:func:`sock_sendfile` without a fallback."""
    return await _send_by_system(loop, sock, file, offset, count, lambda: loop._wait_writable(sock))


async def sendfile_native(
    loop: BaseLoop, transport: _core.StreamTransport, file: Any, offset: int, count: int | None
) -> int:
    """:func:`sendfile` on a native transport without a fallback."""
    sock = transport.get_extra_info("socket")
    if sock is None:
        raise ConnectionError("Connection is closed by peer")

    async def wait_writable() -> None:
        writable: asyncio.Future[None] = loop.create_future()
        transport._wait_writable(writable)
        await writable

    was_reading = transport.is_reading()
    transport.pause_reading()
    try:
        drained: asyncio.Future[None] = loop.create_future()
        transport._start_sendfile(drained)
        try:
            await drained
            _check_arguments(sock, file, offset, count)
            return await _send_by_system(loop, sock, file, offset, count, wait_writable)
        finally:
            transport._end_sendfile()
    finally:
        if was_reading:
            transport.resume_reading()


async def _send_by_system(
    loop: BaseLoop,
    sock: socket.socket,
    file: Any,
    offset: int,
    count: int | None,
    wait_writable: Callable[[], Awaitable[None]],
) -> int:
    try:
        file_fd = file.fileno()
        file_len = _core._file_len(file_fd)
    except (AttributeError, OSError) as exc:  # io.UnsupportedOperation is an OSError
        raise asyncio.SendfileNotAvailableError("not a regular file") from exc
    if not (count or file_len):
        return 0
    total = 0
    has_waited = False
    prefetch = aio.Prefetch(file_fd)
    try:
        while True:
            left = count - total if count else file_len
            if left <= 0:
                return total
            part_len = prefetch.limited(offset, min(left, aio.PART_LEN))
            if prefetch.is_needed(offset, part_len):
                # The system call would block the loop until the disk has delivered this part.
                with contextlib.suppress(OSError):
                    await aio.queue_of(loop).start("read", file_fd, part_len, offset)
            try:
                sent = _core._send_file(sock.fileno(), file_fd, offset, part_len)
            except (BlockingIOError, InterruptedError):
                await wait_writable()
                has_waited = True
            except OSError as exc:
                if not total:
                    # Most likely the system cannot map the file. The fallback may work, or raise a clearer error.
                    raise asyncio.SendfileNotAvailableError("os.sendfile call failed") from exc
                if exc.errno == errno.ENOTCONN and has_waited:
                    raise ConnectionError("socket is not connected", errno.ENOTCONN) from exc
                raise
            else:
                if not sent:
                    return total
                offset += sent
                total += sent
                await asyncio.sleep(0)
    finally:
        with contextlib.suppress(OSError):  # a pipe has no position
            _core._set_position(file_fd, offset)


# --- by reading and writing --------------------------------------------------------------------------


async def _sock_sendfile_fallback(
    loop: BaseLoop, sock: socket.socket, file: Any, offset: int, count: int | None
) -> int:
    async def write(data: memoryview) -> None:
        await loop.sock_sendall(sock, data)

    block_len = constants.SENDFILE_FALLBACK_READBUFFER_SIZE
    return await _send_by_blocks(loop, file, offset, count, block_len, write)


async def _sendfile_fallback(
    loop: BaseLoop, transport: asyncio.WriteTransport, file: Any, offset: int, count: int | None
) -> int:
    sender = _FallbackProtocol(loop, transport)

    async def write(data: memoryview) -> None:
        transport.write(data)
        await sender.drain()

    try:
        return await _send_by_blocks(loop, file, offset, count, _BLOCK_LEN, write)
    finally:
        sender.restore()


async def _send_by_blocks(
    loop: BaseLoop,
    file: Any,
    offset: int,
    count: int | None,
    block_len: int,
    write: Callable[[memoryview], Awaitable[None]],
) -> int:
    has_position = hasattr(file, "seek")
    if has_position:
        file.seek(offset)
    buffer = memoryview(bytearray(min(count, block_len) if count else block_len))
    total = 0
    try:
        while not count or total < count:
            block = buffer[: count - total] if count else buffer
            read_len = await loop.run_in_executor(None, file.readinto, block)
            if not read_len:
                break
            await write(block[:read_len])
            total += read_len
        return total
    finally:
        if total and has_position:
            file.seek(offset + total)


class _FallbackProtocol(asyncio.Protocol):
    """Replaces a transport's protocol while blocks are written, to learn of pauses and of a lost connection."""

    def __init__(self, loop: BaseLoop, transport: Any) -> None:
        self._loop = loop
        self._transport = transport
        self._protocol = transport.get_protocol()
        self._was_reading = transport.is_reading()
        self._was_paused = bool(getattr(transport, "_protocol_paused", False))
        self._writable: asyncio.Future[None] | None = loop.create_future() if self._was_paused else None
        transport.pause_reading()
        transport.set_protocol(self)

    async def drain(self) -> None:
        """Wait until the transport accepts more. If the connection is lost, raise its error or ConnectionError."""
        if self._transport.is_closing():
            raise ConnectionError("Connection closed by peer")
        if self._writable is not None:
            await self._writable

    def restore(self) -> None:
        """Give the transport back to its protocol."""
        self._transport.set_protocol(self._protocol)
        if self._was_reading:
            self._transport.resume_reading()
        is_paused = self._writable is not None
        if self._writable is not None:
            self._writable.cancel()
        if self._was_paused and not is_paused:
            self._protocol.resume_writing()
        elif is_paused and not self._was_paused and not self._transport.is_closing():
            self._protocol.pause_writing()

    def pause_writing(self) -> None:
        if self._writable is None:
            self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._writable is not None:
            if not self._writable.done():
                self._writable.set_result(None)
            self._writable = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_exception(exc or ConnectionError("Connection is closed by peer"))
            self._writable.exception()  # mark as retrieved: drain() may not be waiting now
        self._protocol.connection_lost(exc)
