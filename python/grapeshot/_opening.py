"""What opening a transport has in common, whatever it carries: the wait for it, and the files of Unix sockets."""

from __future__ import annotations

import asyncio
from asyncio.log import logger

from . import _core


async def wait_opened(waiter: asyncio.Future[None], transport: asyncio.BaseTransport) -> None:
    """Return when ``waiter`` is done: ``connection_made`` has run. An exception closes ``transport``."""
    try:
        await waiter
    except BaseException:
        transport.close()
        raise
    finally:
        del waiter  # holds the exception whose traceback holds this frame


def has_file(path: str | bytes) -> bool:
    """Whether a Unix address is in the file system: neither unnamed nor in Linux' abstract namespace."""
    return path[:1] not in ("", b"", "\0", b"\0")


def remove_stale_socket(path: str | bytes) -> None:
    """Remove what lies at ``path`` if it is a socket; an error (EACCES for instance) is logged.

    Anything else stays, and ``bind()`` reports it.
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
        # A directory may allow to make sockets, and not to remove them. Then bind() says what matters.
        logger.error("Unable to check or remove stale UNIX socket %r: %r", path, exc)
