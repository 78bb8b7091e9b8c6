"""Helpers for opening any kind of transport: waiting until it is open, and handling the files of Unix sockets."""

from __future__ import annotations

import asyncio
from asyncio.log import logger

from grapeshot import _core


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
