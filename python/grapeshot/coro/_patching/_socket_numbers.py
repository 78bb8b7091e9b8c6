"""Patched sockets by the numbers of their descriptors.

The descriptor of a patched socket is in nonblocking mode, also where the program believes that it blocks. So functions
that get its number have to know whose it is. A program has the number from ``fileno`` or ``detach``, which note it.
"""

from __future__ import annotations

import os
import socket
import weakref

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_fstat, _set_blocking = os.fstat, os.set_blocking
_number_of = socket.socket.fileno
# number -> the socket, or the inode of one that has given its descriptor away
_known: dict[int, weakref.ref[socket.socket] | int] = {}


def note(sock: socket.socket, number: int) -> None:
    """The program gets to know the number of a socket."""
    known = _known.get(number)
    if isinstance(known, weakref.ref) and known() is sock:
        return
    if number >= 0:
        _known[number] = weakref.ref(sock)


def note_detached(number: int) -> None:
    """A socket without a timeout has given its descriptor away."""
    if number >= 0:
        _known[number] = _fstat(number).st_ino


def _forget(number: int, known: object) -> None:
    # Real threads may come here at the same time, and another one may have noted another socket.
    if _known.get(number) is known:
        _known.pop(number, None)


def is_blocking(number: int) -> bool:
    """Whether the descriptor is that of a patched socket without a timeout."""
    known = _known.get(number)
    if known is None:
        return False
    if isinstance(known, int):
        # The inode of a socket is not used again.
        if _fstat(number).st_ino == known:
            return True
        _forget(number, known)
        return False
    sock = known()
    if sock is not None and _number_of(sock) == number:
        return sock.gettimeout() is None
    _forget(number, known)
    return False


def lend(file: Any) -> None:
    """A child process gets a descriptor, and expects its mode to be what the program believes it is.

    Parent and child have the mode in common. The calls of a patched socket do not depend on it, as they say that they
    must not wait; only ``accept`` cannot say so. So a listening socket stays nonblocking.
    """
    try:
        number = file if isinstance(file, int) else file.fileno()
        if number >= 0 and is_blocking(number) and not _listens(number):
            _set_blocking(number, True)
    except (OSError, AttributeError, TypeError, ValueError):
        # It has no descriptor, or none that is open: the caller says so.
        pass


def _listens(number: int) -> bool:
    copy = socket.socket(fileno=os.dup(number))
    try:
        return bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    finally:
        copy.close()
