"""Reads and writes of files at given offsets, while other coros run: Shrapnel's ``aio_read`` and ``aio_write``.

Where no coro runs, the calls block the thread.
"""

from __future__ import annotations

import contextlib
import errno
import os

from grapeshot import _core
from grapeshot._loop import aio

from ._bridge import await_

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from _typeshed import ReadableBuffer


def aio_read(fd: int, nbytes: int, offset: int, /) -> bytes:
    """Return up to ``nbytes`` bytes of a file from ``offset`` on; b"" at the end of the file.

    The file's position does not move.

    If the coro is interrupted, the system may still use the descriptor for a moment, and the program must not close it
    during that time. A :class:`file_sock` takes care of this.

    Raises:
        OSError: as :func:`os.pread`.
    """
    _check(fd, nbytes, offset)
    return read(fd, nbytes, offset)


def aio_write(fd: int, data: ReadableBuffer, offset: int, /) -> int:
    """Write data to a file at ``offset``; return the number of bytes written. The file's position does not move.

    If the coro is interrupted, it is not known how much was written. The system may still use the descriptor for a
    moment, and the program must not close it during that time. A :class:`file_sock` takes care of this.

    Raises:
        OSError: as :func:`os.pwrite`.
    """
    _check(fd, 0, offset)
    return write(fd, aio.octets(data), offset)


def _check(fd: int, nbytes: int, offset: int) -> None:
    if nbytes < 0 or offset < 0:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    os.lseek(fd, 0, os.SEEK_CUR)  # raises the error that os.pread() raises for a pipe


def _nothing(_: object) -> None:
    pass


def read(fd: int, size: int, offset: int, on_end: Callable[[Any], object] = _nothing) -> bytes:
    """Like :func:`aio_read`. ``on_end`` is called once, when the descriptor is no longer in use."""
    data: bytes | None
    try:
        if _core._coro_is_on_loop():
            _core._coro_act()
            data = aio.read_now(fd, size, offset)
        else:
            data = os.pread(fd, size, offset)
    except BaseException:
        on_end(None)
        raise
    if data is None:
        return _wait_for("read", fd, size, offset, on_end=on_end)  # type: ignore[no-any-return]
    on_end(None)
    return data


def write(fd: int, data: bytes, offset: int, on_end: Callable[[Any], object] = _nothing) -> int:
    """Like :func:`aio_write`, but an offset of -1 means the file's own position. ``on_end``: see :func:`read`."""
    if _core._coro_is_on_loop():
        return _wait_for("write", fd, data, offset, on_end=on_end)  # type: ignore[no-any-return]
    try:
        return os.write(fd, data) if offset == aio.OWN_POSITION else os.pwrite(fd, data, offset)
    finally:
        on_end(None)


def wait_in_memory(prefetch: aio.Prefetch, fd: int, offset: int, length: int) -> None:
    """Wait until the kernel has a part of a file in memory. Where no coro runs, do nothing."""
    if _core._coro_is_on_loop() and prefetch.is_needed(offset, length):
        with contextlib.suppress(OSError):
            _wait_for("read", fd, length, offset, on_end=_nothing)


def _wait_for(name: str, *args: Any, on_end: Callable[[Any], object]) -> Any:
    """Start a call in the loop's :class:`aio.AioQueue`, and wait for the outcome of the call."""
    try:
        queue = aio.queue_of(_core._coro_current()._loop)
    except BaseException:
        on_end(None)
        raise
    future = queue.start(name, *args, on_end=on_end)
    try:
        return await_(future)
    finally:
        if not future.done():
            future.cancel()
