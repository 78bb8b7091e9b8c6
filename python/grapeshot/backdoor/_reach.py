"""How a client reaches a back door: by the path of its socket, or by the id of the process, and who may be there.

What is typed goes to whoever listens, and what he writes goes to the terminal. So a client talks to root and to its
own user only, at a name that nobody else can have put there. By the id of a process it talks to that process, as the
kernel says who listens; root may do that for any user's, and then nothing of the output moves the cursor.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
from pathlib import Path
from typing import NamedTuple

from grapeshot import _peer

from . import _path

_ACCEPTS = 0x10000  # __SO_ACCEPTCON: the flag of a socket that listens, in /proc/net/unix
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class RefusedError(Exception):
    """No back door can be reached. The text is for the user."""


class Reached(NamedTuple):
    """The connection to a back door."""

    sock: socket.socket
    is_own: bool
    """Whether the process is one of this user. What another one writes must not reach a terminal as it is."""


def connect(target: str) -> Reached:
    """Connect to the back door at a path, or to that of the process with this id.

    Raises:
        RefusedError: nobody listens there, or somebody who is not to be trusted.
    """
    if _peer.peer_uid is None:
        raise RefusedError(f"{target}: this system does not tell who listens there")
    if target.isascii() and target.isdecimal():
        return _connect_to_process(int(target))
    try:
        path = _checked_path(target)
    except OSError as exc:
        raise RefusedError(f"{exc.filename or target}: {exc.strerror or exc}") from exc
    return _connect_to(path, {0, os.geteuid()}, None)


def _checked_path(path: str) -> str:
    """Return the real path of a socket that nobody but root and this user can have put there."""
    folder, name = os.path.split(os.path.abspath(path))
    path = os.path.join(_path.trusted_directory(folder), name)
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.EINVAL, "this is a symbolic link; give the path of the socket", path)
    if not stat.S_ISSOCK(status.st_mode):
        raise OSError(errno.EINVAL, "this is no socket", path)
    if status.st_uid not in (0, os.geteuid()):
        problem = f"the socket belongs to the user {status.st_uid}; root reaches it by the id of the process"
        raise PermissionError(errno.EPERM, problem, path)
    if status.st_mode & _OTHERS:
        mode = stat.S_IMODE(status.st_mode)
        raise PermissionError(errno.EPERM, f"others may use the socket: its mode is {mode:04o}, not 0600", path)
    return path


def _connect_to(path: str, users: set[int], pid: int | None) -> Reached:
    """Connect, if a process of one of the users listens there, and if it is the process with this id."""
    assert _peer.peer_uid is not None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            sock.connect(path)
            uid = _peer.peer_uid(sock)
        except OSError as exc:
            reason: object = exc.strerror or exc
            if isinstance(exc, ConnectionRefusedError):
                reason = "no process listens there"
            raise RefusedError(f"{path}: {reason}") from exc
        if uid not in users:
            raise RefusedError(f"{path}: a process of the user {uid} listens there; nothing was sent to it")
        if pid is not None and _peer.peer_pid(sock) != pid:
            raise RefusedError(f"{path}: another process than {pid} listens there; nothing was sent to it")
    except BaseException:
        sock.close()
        raise
    return Reached(sock, uid == os.geteuid())


# ---------------------------------------------------------------- by the id of a process


def _connect_to_process(pid: int) -> Reached:
    if not Path("/proc/self/net/unix").exists():
        raise RefusedError(f"{pid}: this system does not tell which sockets a process has; give the path of the socket")
    user = None
    try:
        user = int(_status(pid, "Uid").split()[1])  # the effective one
        path = _path_in(pid)
    except (FileNotFoundError, ProcessLookupError):  # the second one if it ends while a file is read
        raise RefusedError(f"there is no process {pid}; a file of that name is ./{pid}") from None
    except PermissionError:
        problem = "only that user and root can see its back door"
        raise RefusedError(f"the process {pid} belongs to the user {user}; {problem}") from None
    return _connect_to(path, {0, user}, pid)  # it may have been root when it opened the back door


def _path_in(pid: int) -> str:
    """Return the path at which this process reaches the only back door of another one. Raises as :func:`paths_of`."""
    paths = paths_of(pid)
    if not paths:
        raise RefusedError(f"the process {pid} has no back door open. {_remedy(pid)}")
    if len(paths) > 1:
        raise RefusedError("\n".join([f"the process {pid} has {len(paths)} back doors, give one of them:", *paths]))
    [path] = paths
    if os.stat(f"/proc/{pid}/ns/mnt").st_ino != os.stat("/proc/self/ns/mnt").st_ino:
        path = f"/proc/{pid}/root{path}"  # it is in a container
    return path


def paths_of(pid: int) -> list[str]:
    """Return the paths of the back doors that a process has open.

    Raises:
        FileNotFoundError, ProcessLookupError: there is no such process.
        PermissionError: it is another user's.
    """
    has = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            has.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except FileNotFoundError:
            continue  # closed meanwhile
    found = []
    # Number, references, protocol, flags, type, state, inode and path.
    for line in Path(f"/proc/{pid}/net/unix").read_text(errors="surrogateescape").splitlines()[1:]:
        fields = line.split(None, 7)
        if len(fields) == 8 and int(fields[3], 16) & _ACCEPTS and f"socket:[{fields[6]}]" in has:
            path = _path.linked_to(fields[7])
            if path is not None:
                found.append(path)
    return sorted(found)


def _remedy(pid: int) -> str:
    """Return how a process opens a back door. The signal would end one that does not handle it."""
    opens = "A program opens one with grapeshot.backdoor.serve() or enable(), or if it is started with"
    by_itself = f"{opens} GRAPESHOT_BACKDOOR=PATH python -m grapeshot (or grapeshot.coro, grapeshot.coro.wsgi)."
    signum = signal.SIGUSR2
    if _handles(pid, signum):
        return f"It handles SIGUSR2: `kill -USR2 {pid}` opens one if it has called grapeshot.backdoor.enable()."
    return f"It does not handle SIGUSR2, which would end it. {by_itself}"


def _handles(pid: int, signum: int) -> bool:
    return bool(int(_status(pid, "SigCgt") or "0", 16) >> (signum - 1) & 1)


def _status(pid: int, name: str) -> str:
    """Return what the kernel says of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((line.partition(":")[2] for line in lines if line.startswith(f"{name}:")), "")
