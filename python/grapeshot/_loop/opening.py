"""Helpers that make a transport over a socket, wait until it is open, and handle the files of Unix sockets."""

from __future__ import annotations

import asyncio
import socket
from asyncio.log import logger
from collections.abc import Callable

from grapeshot import _core

from . import origins
from .base import BaseLoop
from .checks import check_unused_socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    _P = TypeVar("_P", bound=asyncio.BaseProtocol)
    _T = TypeVar("_T", bound=asyncio.BaseTransport)


async def open_over(
    loop: BaseLoop,
    sock: socket.socket,
    protocol_factory: Callable[[], _P],
    make: Callable[[_P, asyncio.Future[Any]], _T],
) -> tuple[_T, _P]:
    """Make the protocol, and with ``make(protocol, waiter)`` its transport over ``sock``.

    Returns both once the transport is open. If the factory or ``make`` raises, if the transport cannot be opened, or if
    the wait is cancelled, the socket is closed.

    Raises:
        RuntimeError: another transport of the loop uses the socket. That transport is not affected.
    """
    check_unused_socket(loop, sock)
    try:
        sock.setblocking(False)
        protocol = protocol_factory()
        waiter = loop.create_future()
        transport = make(protocol, waiter)
    except BaseException:
        sock.close()
        raise
    if loop.get_debug():
        origins.note_opened(loop, transport)
    try:
        await wait_opened(waiter, transport)
    finally:
        del waiter  # break a reference cycle: the waiter's exception has a traceback that refers to this frame
    return transport, protocol


async def wait_opened(waiter: asyncio.Future[None], transport: asyncio.BaseTransport) -> None:
    """Return when ``waiter`` is done, which is after ``connection_made``. On an exception, close ``transport``."""
    try:
        await waiter
    except BaseException:
        transport.close()
        raise
    finally:
        del waiter  # break a reference cycle: the waiter's exception has a traceback that refers to this frame


def has_file(path: str | bytes) -> bool:
    """Whether a Unix address is in the file system, that is, neither unnamed nor in Linux' abstract namespace."""
    return path[:1] not in ("", b"", "\0", b"\0")


def remove_stale_socket(path: str | bytes) -> None:
    """Remove the file at ``path`` if it is a socket. An error (EACCES, for instance) is logged.

    Any other kind of file is kept; ``bind()`` then fails and reports it.
    """
    if not has_file(path):
        return
    try:
        is_socket, _inode = _core._path_status(path)
        if is_socket:
            _core._remove_path(path)
    except FileNotFoundError:
        pass
    except OSError as exc:
        # In some directories this user may create sockets but not remove them. bind() then raises the proper error.
        logger.error("Unable to check or remove stale UNIX socket %r: %r", path, exc)
