"""The socket file of a back door: in which directories it may lie, and what it replaces.

A name is trusted if nobody but root and this user could have put it there or can change it. The file never exists with
a wider mode than 0600: the socket is made in a directory that only this user can enter, and linked to its place.
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
# Who has the lock keeps it for some system calls. Any user can take it in a directory such as /tmp.
_LOCK_WITHIN_S = 2.0
_MOST_LINKS = 40  # as the kernel
# How the directory begins in which a socket is made.
_PRIVATE = ".bd"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def trusted_directory(directory: str) -> str:
    """Return the real path of an absolute path, of which only root and this user can change what lies there.

    It and each directory on the way must belong to root or to this user, and must not be writable by the group or by
    others, unless it is sticky, as /tmp. Access lists count: what they allow to others shows in the bits of the group.
    So must each symbolic link on the way belong to one of them: its owner can let it point elsewhere.

    Raises:
        PermissionError: somebody else could replace the socket, a directory above, or a link.
        OSError: the directory is not there.
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
            if links > _MOST_LINKS:
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
    """Return where the socket is that was made at a path (:class:`SocketFile`), None if it is no back door's."""
    private, name = os.path.split(made)
    folder, temporary = os.path.split(private)
    return os.path.join(folder, name) if temporary.startswith(_PRIVATE) and folder.startswith("/") else None


class SocketFile:
    """A listening socket, and its file of mode 0600."""

    def __init__(self, path: str) -> None:
        """Listen at ``path``, in the place of a socket that a dead process has left.

        Raises:
            PermissionError: the directory is not safe (:func:`trusted_directory`), or another user's socket lies there.
            FileExistsError: something lies there that is no socket: a file, a symbolic link.
            ValueError: the path has no name of a file, or is no path.
            OSError: EADDRINUSE: a process listens there; ENAMETOOLONG: the system takes no path of a socket so long.
        """
        if not os.path.basename(path) or "\0" in path:
            raise ValueError(f"a path of a socket is needed, not {path!r}")
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
            # Tools that list sockets show this path. It has the name, too.
            made = os.path.join(private, name)
            try:
                self.sock.bind(made)
            except OSError as exc:
                if exc.errno is not None:
                    raise
                # The module socket says so, without a number.
                problem = f"the path is too long for a socket, with {len(made) - len(self.path)} characters more"
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
        """Close the socket and remove its file, if it is still this one. In a forked child the file stays."""
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
    """Only one process or thread at a time replaces a socket in the directory. Those that make a new one go on."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        give_up = time.monotonic() + _LOCK_WITHIN_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise OSError(errno.EADDRINUSE, "another process holds the lock of the directory", path) from None
                time.sleep(0.001)
        yield
    finally:
        os.close(descriptor)


def _remove_stale(path: str, private: str) -> None:
    """Take away the socket of a dead process, with the lock of the directory.

    Raises what :class:`SocketFile` does if something else lies there.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        what = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "something"
        raise FileExistsError(errno.EEXIST, f"{what} that is no socket lies there", path)
    if status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"a socket of the user {status.st_uid} lies there", path)
    if _is_alive(path):
        raise OSError(errno.EADDRINUSE, "a process listens there", path)
    # Whoever removed it by hand meanwhile may have a socket of its own there already.
    taken = f"{os.path.join(private, os.path.basename(path))}.old"
    try:
        os.rename(path, taken)
    except FileNotFoundError:
        return
    if _identity(taken) != (status.st_dev, status.st_ino):
        os.link(taken, path)
        os.unlink(taken)
        raise OSError(errno.EADDRINUSE, "another process has begun to listen there", path)
    os.unlink(taken)


def _is_alive(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except BlockingIOError:
            return True  # its queue is full
        return True
