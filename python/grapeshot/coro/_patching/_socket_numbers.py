"""Finds the patched socket that belongs to a descriptor number.

The descriptor of a patched socket is nonblocking, even if the program has not set a timeout and expects calls to block.
So functions that get a number, such as ``os.read``, have to know whether it belongs to such a socket. A program gets
the number from ``fileno`` or ``detach``, which record it here.
"""

from __future__ import annotations

import os
import socket
import weakref

from grapeshot._loop.locks import real_rlock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_fstat, _set_blocking = os.fstat, os.set_blocking
_number_of = socket.socket.fileno
# number -> the socket, or if the socket was detached, the inode
_known: dict[int, weakref.ref[socket.socket] | int] = {}
# Held while this table is changed. Reentrant: a finalizer may change the table in a thread that holds the lock.
_changing = real_rlock()


def note(sock: socket.socket, number: int) -> None:
    """Record the number of a socket. Called when the program gets it from ``fileno``."""
    known = _known.get(number)
    if isinstance(known, weakref.ref) and known() is sock:
        return
    if number >= 0:
        with _changing:
            _known[number] = weakref.ref(sock)


def note_detached(number: int) -> None:
    """Record the number of a descriptor that was detached from a socket without a timeout."""
    if number < 0:
        return
    try:
        inode = _fstat(number).st_ino
    except OSError:
        return  # other code has closed the descriptor
    with _changing:
        _known[number] = inode


def _forget(number: int, known: object) -> None:
    with _changing:
        # Another real thread may have recorded another socket under this number in between.
        if _known.get(number) is known:
            del _known[number]


def is_blocking(number: int) -> bool:
    """Whether the descriptor belongs to a patched socket without a timeout. Programs expect its calls to block."""
    known = _known.get(number)
    if known is None:
        return False
    if isinstance(known, int):
        # The inode numbers of sockets come from a counter, so the inode number of a closed socket is not reused soon.
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
    """Put a socket without a timeout into blocking mode, because the child that will inherit it expects this mode.

    Parent and child share the mode. The calls of a patched socket in the parent still work, because each call tells the
    system not to wait. ``accept`` cannot do so, so listening sockets stay nonblocking.
    """
    try:
        number = file if isinstance(file, int) else file.fileno()
        if number >= 0 and is_blocking(number) and not _listens(number):
            _set_blocking(number, True)
    except (OSError, AttributeError, TypeError, ValueError):
        # `file` has no open descriptor. Popen, which calls this, reports that itself.
        pass


def _listens(number: int) -> bool:
    copy = socket.socket(fileno=os.dup(number))
    try:
        return bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    finally:
        copy.close()
