"""Connects a client to a back door, by the path of its socket or by process id, after checking who runs the process.

The process at the other end receives what the user types, and its output reaches the user's terminal. So a client
connects only to processes of root and of its own user, at a path that no one else can have created. If a process id is
given, the kernel confirms that this process is listening. Root may connect to the processes of any user by id; control
characters in the output of such a process are then replaced, so that it cannot move the cursor.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import sys
from pathlib import Path
from typing import NamedTuple

from grapeshot._loop import peer
from grapeshot.insight._tally import printable_lines

from . import _path

_ACCEPTS = 0x10000  # __SO_ACCEPTCON, the flag of a listening socket in /proc/net/unix
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class RefusedError(Exception):
    """The back door cannot be reached, or must not be trusted. The text tells the user why."""


class Reached(NamedTuple):
    """The connection to a back door."""

    sock: socket.socket
    is_own: bool
    """Whether the process belongs to this user. Output of another user's process must not be sent to a terminal
    unfiltered."""


def connect(target: str) -> Reached:
    """Connect to the back door with this path, or to the back door of the process with this id.

    Raises:
        RefusedError: no process is listening there, or the process is not to be trusted.
    """
    if peer.peer_uid is None:
        raise RefusedError(f"{target}: this system cannot tell which user is listening there")
    if target.isascii() and target.isdecimal():
        return _connect_to_process(int(target))
    try:
        path = _checked_path(target)
    except OSError as exc:
        raise RefusedError(f"{exc.filename or target}: {exc.strerror or exc}") from exc
    return _connect_to(path, {0, os.geteuid()}, None)


def connect_for_command(target: str) -> Reached | None:
    """Connect on behalf of a shell command. If that is refused, write the reason to stderr and return None."""
    try:
        return connect(target)
    except RefusedError as exc:
        # The message may contain paths that another user has chosen, with control characters in them.
        sys.stderr.write(f"{printable_lines(exc)}\n")
        return None


def _checked_path(path: str) -> str:
    """Return the real path of a socket, after checking that only root and this user can have created it."""
    folder, name = os.path.split(os.path.abspath(path))
    path = os.path.join(_path.trusted_directory(folder), name)
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.EINVAL, "this is a symbolic link; give the path of the socket itself", path)
    if not stat.S_ISSOCK(status.st_mode):
        raise OSError(errno.EINVAL, "this is not a socket", path)
    if status.st_uid not in (0, os.geteuid()):
        problem = f"the socket belongs to the user {status.st_uid}; root can reach it by giving the process id"
        raise PermissionError(errno.EPERM, problem, path)
    if status.st_mode & _OTHERS:
        mode = stat.S_IMODE(status.st_mode)
        raise PermissionError(errno.EPERM, f"other users can use the socket: its mode is {mode:04o}, not 0600", path)
    return path


def _connect_to(path: str, users: set[int], pid: int | None) -> Reached:
    """Connect to the socket. The listening process must belong to one of ``users`` and, with ``pid``, have that id."""
    assert peer.peer_uid is not None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            sock.connect(path)
            uid = peer.peer_uid(sock)
        except OSError as exc:
            reason: object = exc.strerror or exc
            if isinstance(exc, ConnectionRefusedError):
                reason = "no process is listening there"
            raise RefusedError(f"{path}: {reason}") from exc
        if uid not in users:
            raise RefusedError(f"{path}: a process of the user {uid} is listening there; nothing was sent to it")
        if pid is not None and peer.peer_pid(sock) != pid:
            raise RefusedError(f"{path}: a process other than {pid} is listening there; nothing was sent to it")
    except BaseException:
        sock.close()
        raise
    return Reached(sock, uid == os.geteuid())


# ---------------------------------------------------------------- by the id of a process


def _connect_to_process(pid: int) -> Reached:
    if not Path("/proc/self/net/unix").exists():
        raise RefusedError(f"{pid}: this system cannot tell which sockets a process has; give the path of the socket")
    user = None
    try:
        user = int(_status(pid, "Uid").split()[1])  # the effective user id
        path = _path_in(pid)
    except (FileNotFoundError, ProcessLookupError):  # ProcessLookupError if it ends while one of its files is read
        raise RefusedError(f"there is no process {pid}; for a socket of that name, write ./{pid}") from None
    except PermissionError:
        problem = "only that user and root can see its back door"
        raise RefusedError(f"the process {pid} belongs to the user {user}; {problem}") from None
    return _connect_to(path, {0, user}, pid)  # it may have been root when it opened the back door


def _path_in(pid: int) -> str:
    """Return the path at which this process can reach the only back door of another process.

    Raises the same exceptions as :func:`paths_of`, and RefusedError if there is no back door or more than one.
    """
    paths = paths_of(pid)
    if not paths:
        raise RefusedError(f"the process {pid} has no back door open. {_remedy(pid)}")
    if len(paths) > 1:
        raise RefusedError("\n".join([f"the process {pid} has {len(paths)} back doors; give the path of one:", *paths]))
    [path] = paths
    if os.stat(f"/proc/{pid}/ns/mnt").st_ino != os.stat("/proc/self/ns/mnt").st_ino:
        path = f"/proc/{pid}/root{path}"  # it is in a container
    return path


def paths_of(pid: int) -> list[str]:
    """Return the paths of the back doors that a process has open.

    Raises:
        FileNotFoundError, ProcessLookupError: there is no such process.
        PermissionError: it belongs to another user.
    """
    has = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            has.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except FileNotFoundError:
            continue  # it has just been closed
    found = []
    # The fields of a line: number, references, protocol, flags, type, state, inode and path.
    for line in Path(f"/proc/{pid}/net/unix").read_text(errors="surrogateescape").splitlines()[1:]:
        fields = line.split(None, 7)
        if len(fields) == 8 and int(fields[3], 16) & _ACCEPTS and f"socket:[{fields[6]}]" in has:
            path = _path.linked_to(fields[7])
            if path is not None:
                found.append(path)
    return sorted(found)


def _remedy(pid: int) -> str:
    """Tell the user how to make a process open a back door.

    ``kill -USR2`` is suggested only if the process handles SIGUSR2. Otherwise the signal would end the process.
    """
    opens = "A program opens a back door with grapeshot.insight.backdoor.serve() or enable(), or if it is started with"
    by_itself = f"{opens} GRAPESHOT_BACKDOOR=PATH python -m grapeshot (or grapeshot.coro, grapeshot.coro.wsgi)."
    signum = signal.SIGUSR2
    if _handles(pid, signum):
        return f"It handles SIGUSR2: `kill -USR2 {pid}` opens one if it has called grapeshot.insight.backdoor.enable()."
    return f"It does not handle SIGUSR2: this signal would end the process. {by_itself}"


def _handles(pid: int, signum: int) -> bool:
    return bool(int(_status(pid, "SigCgt") or "0", 16) >> (signum - 1) & 1)


def _status(pid: int, name: str) -> str:
    """Return a field of the kernel's status of a process, empty if there is no such field."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((line.partition(":")[2] for line in lines if line.startswith(f"{name}:")), "")
