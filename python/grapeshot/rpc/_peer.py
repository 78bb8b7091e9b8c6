"""Checks that the other end of a connection is a process of the same user."""

from __future__ import annotations

import os
import socket
import struct
from typing import Any

from grapeshot._loop.peer import peer_uid


def check_same_user(sock: Any) -> None:
    """Check that the process at the other end has the same user id as this process.

    Raises:
        PermissionError: it has another user id, or the system cannot tell.
    """
    if peer_uid is None or sock is None or sock.family != socket.AF_UNIX:
        raise PermissionError("cannot determine the peer's user: that needs a Unix socket and support by the system")
    try:
        uid = peer_uid(sock)
    except (OSError, struct.error) as error:
        raise PermissionError(f"cannot determine the peer's user: {error}") from error
    if uid != os.geteuid():
        raise PermissionError(f"the peer is a process of user {uid}, not {os.geteuid()}")
