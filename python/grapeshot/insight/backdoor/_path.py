"""The socket file of a back door: in which directories it may be, and which files it may replace.

A path is trusted if only root and this user can have created it and can change it. When the socket file appears at its
path, it already has the mode 0600: it is created in a directory that only this user can enter, gets its mode there, and
is then linked to its path.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

_BACKLOG = 16
# How long to wait for the lock on a directory. A back door holds it only for a few system calls, but in a directory
# such as /tmp any user can hold it for longer.
_LOCK_WITHIN_S = 2.0
_MAX_LINKS = 40  # the same as in the kernel
# The prefix of the private directory in which a socket is created.
_PRIVATE = ".bd"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def trusted_directory(directory: str) -> str:
    """Return the real path of a directory, after checking that only root and this user can change what is there.

    The directory, and each directory above it, must belong to root or to this user. It must not be writable by the
    group or by others, unless it is sticky, like /tmp. Access control lists are covered, because the permissions they
    give to others appear in the group's bits. Each symbolic link on the way must also belong to root or to this user,
    because its owner could make it point elsewhere.

    Raises:
        PermissionError: another user could replace the socket, a directory above it, or a link.
        OSError: the directory does not exist.
    """
    trusted = {0, os.geteuid()}
    found, links = "/", 0
    _check_directory(found, trusted)
    left = directory.split("/")[::-1]
    while left:
        name = left.pop()
        if name == "..":
            found = os.path.dirname(found)
        if name in ("", ".", ".."):
            continue
        path = os.path.join(found, name)
        if os.path.islink(path):
            user = os.lstat(path).st_uid
            if user not in trusted:
                raise PermissionError(errno.EPERM, f"the symbolic link belongs to the user {user}", path)
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), directory)
            target = os.readlink(path)
            found = "/" if target.startswith("/") else found
            left.extend(reversed(target.split("/")))
            continue
        _check_directory(path, trusted)
        found = path
    return found


def _check_directory(directory: str, trusted: set[int]) -> None:
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "not a directory", directory)
    if status.st_uid not in trusted:
        raise PermissionError(errno.EPERM, f"the directory belongs to the user {status.st_uid}", directory)
    if status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
        raise PermissionError(errno.EPERM, "others can write to the directory, and it is not sticky", directory)


def linked_to(made: str) -> str | None:
    """Return the final path of a back door's socket that was created at the path ``made``. None for other paths.

    :class:`SocketFile` creates the socket in a private directory and then links it to its final path.
    """
    private, name = os.path.split(made)
    folder, temporary = os.path.split(private)
    return os.path.join(folder, name) if temporary.startswith(_PRIVATE) and folder.startswith("/") else None


class SocketFile:
    """A listening socket, and its file, which has mode 0600."""

    def __init__(self, path: str) -> None:
        """Listen at ``path``. A socket that a dead process has left there is replaced.

        Raises:
            PermissionError: the directory is not safe (:func:`trusted_directory`), or another user's socket is there.
            FileExistsError: a symbolic link, or another file that is not a socket, is there.
            ValueError: ``path`` has no file name, or contains a NUL.
            OSError: a process is listening there (EADDRINUSE), or the path is too long for a socket (ENAMETOOLONG).
        """
        if not os.path.basename(path) or "\0" in path:
            raise ValueError(f"not a valid path for a socket: {path!r}")
        folder, name = os.path.split(os.path.abspath(path))
        folder = trusted_directory(folder)
        self.path = os.path.join(folder, name)
        self._pid = os.getpid()
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.sock.setblocking(False)
            self._bind(folder, name)
            self._identity = _identity(self.path)
        except BaseException:
            self.sock.close()
            raise

    def _bind(self, folder: str, name: str) -> None:
        with tempfile.TemporaryDirectory(prefix=_PRIVATE, dir=folder) as private:  # of mode 0700
            # Tools that list sockets show this path, so its last part is the file name that the caller has chosen.
            made = os.path.join(private, name)
            try:
                self.sock.bind(made)
            except OSError as exc:
                if exc.errno is not None:
                    raise
                # The path is too long. The socket module raises an OSError without an errno for that.
                extra = len(made) - len(self.path)
                problem = f"the path is too long for a socket: it is first made at a path with {extra} more characters"
                raise OSError(errno.ENAMETOOLONG, problem, self.path) from None
            os.chmod(made, 0o600)
            self.sock.listen(_BACKLOG)
            try:
                os.link(made, self.path)
                return
            except FileExistsError:
                pass
            with _locked(folder, self.path):
                while True:
                    try:
                        os.link(made, self.path)
                        return
                    except FileExistsError:
                        _remove_stale(self.path, private)

    def close(self) -> None:
        """Close the socket, and remove its file unless another file has replaced it or this is a forked child."""
        self.sock.close()
        if os.getpid() != self._pid:
            return
        try:
            if _identity(self.path) == self._identity:
                os.unlink(self.path)
        except FileNotFoundError:
            pass


def _identity(path: str) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino


@contextmanager
def _locked(folder: str, path: str) -> Iterator[None]:
    """Hold a lock so that only one process or thread at a time replaces a socket in the directory.

    Creating a socket at a path that is free does not need the lock.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        give_up = time.monotonic() + _LOCK_WITHIN_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise OSError(errno.EADDRINUSE, "another process holds the lock on the directory", path) from None
                time.sleep(0.001)
        yield
    finally:
        os.close(descriptor)


def _remove_stale(path: str, private: str) -> None:
    """Remove the socket of a dead process. The caller holds the lock on the directory.

    Raises the errors of :class:`SocketFile` if there is anything else at the path.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        what = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "a file that is not a socket"
        raise FileExistsError(errno.EEXIST, f"{what} already exists there", path)
    if status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"a socket of the user {status.st_uid} already exists there", path)
    if _is_alive(path):
        raise OSError(errno.EADDRINUSE, "a process is already listening there", path)
    # If the file was removed by hand in the meantime, there may be a new socket already. So rename whatever is there,
    # and check whether it is the file that was examined.
    taken = f"{os.path.join(private, os.path.basename(path))}.old"
    try:
        os.rename(path, taken)
    except FileNotFoundError:
        return
    if _identity(taken) != (status.st_dev, status.st_ino):
        os.link(taken, path)
        os.unlink(taken)
        raise OSError(errno.EADDRINUSE, "another process has just started to listen there", path)
    os.unlink(taken)


def _is_alive(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except BlockingIOError:
            return True  # its queue of connections is full
        return True
