"""Whether the other end of a connection is a process of this user."""

from __future__ import annotations

import os
import socket
import struct
from typing import Any

from grapeshot._peer import peer_uid


def check_same_user(sock: Any) -> None:
    """Check that the process at the other end has this process's user id.

    Raises:
        PermissionError: it has another one, or the system cannot tell.
    """
    if peer_uid is None or sock is None or sock.family != socket.AF_UNIX:
        raise PermissionError("the peer's user is not known: only unix sockets tell it, and not on each system")
    try:
        uid = peer_uid(sock)
    except (OSError, struct.error) as error:
        raise PermissionError(f"the peer's user is not known: {error}") from error
    if uid != os.geteuid():
        raise PermissionError(f"the peer is a process of user {uid}, not {os.geteuid()}")
