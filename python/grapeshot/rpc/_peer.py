"""Who is at the other end of a unix socket, as the kernel says."""

from __future__ import annotations

import os
import socket
import struct
import sys
from typing import Any

_LOCAL_PEERCRED = 1  # macOS and the BSDs
_IS_LINUX = sys.platform == "linux"


def check_same_user(sock: Any) -> None:
    """Check that the process at the other end has this process's user id.

    Raises:
        PermissionError: it has another one, or the socket cannot tell.
    """
    try:
        uid = _peer_uid(sock)
    except (OSError, AttributeError, struct.error) as error:
        raise PermissionError(f"the peer's user is not known: {error}") from error
    if uid != os.geteuid():
        raise PermissionError(f"the peer is a process of user {uid}, not {os.geteuid()}")


def _peer_uid(sock: Any) -> int:
    if sock.family != socket.AF_UNIX:
        raise OSError("this is no unix socket")
    if _IS_LINUX:
        # struct ucred: pid, uid, gid. Source: unix(7)
        _, uid, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII")))
        return int(uid)
    # struct xucred: version, uid, ... Source: unix(4) of FreeBSD, sys/ucred.h of macOS
    credentials = sock.getsockopt(0, _LOCAL_PEERCRED, 256)
    version, uid = struct.unpack_from("II", credentials)
    if version != 0:
        raise OSError(f"credentials of version {version}")
    return int(uid)
