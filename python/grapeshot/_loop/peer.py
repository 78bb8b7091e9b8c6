"""Asks the kernel which user or process is at the other end of a Unix socket."""

from __future__ import annotations

import errno
import socket
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def _linux(sock: socket.socket) -> int:
    _pid, uid, _gid = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid  # type: ignore[no-any-return]


def peer_pid(sock: socket.socket) -> int:
    """On Linux, return the id of the process that called listen() at the other end.

    The listening socket may have been passed to another process since then.
    """
    pid, _uid, _gid = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid  # type: ignore[no-any-return]


def _openbsd(sock: socket.socket) -> int:
    uid, _gid, _pid = struct.unpack("IIi", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid  # type: ignore[no-any-return]


def _xucred(sock: socket.socket) -> int:
    """macOS and FreeBSD: LOCAL_PEERCRED returns a struct xucred, which begins with its version and the uid."""
    data = sock.getsockopt(0, getattr(socket, "LOCAL_PEERCRED", 1), 128)
    version, uid = struct.unpack_from("=II", data)
    if version != 0:
        raise OSError(errno.EPROTO, f"struct xucred has version {version}, expected 0")
    return uid  # type: ignore[no-any-return]


def _find_peer_function() -> Callable[[socket.socket], int] | None:
    system: str = sys.platform  # in a variable, because a type checker would evaluate sys.platform for one system
    if system == "linux":
        return _linux
    if system.startswith("openbsd"):
        return _openbsd
    return _xucred if system.startswith(("darwin", "freebsd", "dragonfly")) else None


# The function that returns the effective uid of the process at the other end. On a system that does not report the
# uid, `peer_uid` itself is None.
peer_uid = _find_peer_function()
