"""``watch_file`` on macOS and the BSDs, with kqueue.

kqueue's vnode events say that something has happened to an open file or directory, but give no names:

    the directory   its entries have changed: they are compared with the previous list of entries
    each file       its contents have changed, or it was renamed or deleted

Entries are told apart by their inode numbers. The system cannot reuse the inode number of a watched file, because the
watch has the file open. All names are looked up in the open directory. So the watch also works after chdir(), and
after the path has come to name another directory.

Source: ``kqueue(2)`` of macOS, FreeBSD, NetBSD, OpenBSD.
"""

from __future__ import annotations

import errno
import os
import select
import stat

from ._file_events import FileWatch
from ._files import fd_sock
from ._socket import wait_for_read

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_select: Any = select  # type checkers on other systems do not know its kqueue names

_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK | os.O_CLOEXEC
# On macOS, O_EVTONLY opens a file for events only; its file system can then still be unmounted.
_FILE_FLAGS = getattr(os, "O_EVTONLY", os.O_RDONLY) | os.O_NONBLOCK | os.O_CLOEXEC
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_MAX_EVENTS = 256


class _Vnodes(fd_sock):
    """A kqueue and the descriptors that it watches, which are closed with it."""

    def __init__(self) -> None:
        queue, fds = _select.kqueue(), set[int]()

        def release() -> None:
            queue.close()
            while fds:
                os.close(fds.pop())

        self._queue, self._fds = queue, fds
        # A kqueue cannot be made nonblocking. So `receive` polls it with a timeout of 0. If there is no event, it waits
        # until the kqueue is readable, and polls again.
        self._set_up(queue.fileno(), release, is_ours=False)
        self._is_ours = True

    def add(self, fd: int) -> None:
        """Watch a file. Its descriptor is closed with the kqueue, or at once if the file cannot be watched."""
        notes = _select.KQ_NOTE_WRITE | _select.KQ_NOTE_EXTEND | _select.KQ_NOTE_ATTRIB | _select.KQ_NOTE_LINK
        notes |= _select.KQ_NOTE_DELETE | _select.KQ_NOTE_RENAME | _select.KQ_NOTE_REVOKE
        try:
            self._change(fd, _select.KQ_EV_ADD | _select.KQ_EV_CLEAR, notes)
        except BaseException:
            os.close(fd)
            raise
        self._fds.add(fd)

    def remove(self, fd: int) -> None:
        """Stop watching a file, and close its descriptor."""
        self._fds.remove(fd)
        try:
            self._change(fd, _select.KQ_EV_DELETE)
        except OSError:
            pass  # the watch has ended because the file system was unmounted
        finally:
            os.close(fd)

    def _change(self, fd: int, flags: int, notes: int = 0) -> None:
        self._queue.control([_select.kevent(fd, _select.KQ_FILTER_VNODE, flags, notes)], 0)

    def receive(self, take: Callable[[dict[int, int]], None]) -> None:
        """Wait for events, and call ``take`` with a dict of the notes (``KQ_NOTE_...`` bits) of each descriptor.

        While ``take`` runs, no other thread closes any of the descriptors.
        """

        def call(_: int) -> None:
            notes: dict[int, int] = {}
            events = self._queue.control(None, _MAX_EVENTS, 0)
            if not events:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            for event in events:
                notes[event.ident] = notes.get(event.ident, 0) | event.fflags
            take(notes)

        self._repeat(wait_for_read, call)


class _Entry:
    """A directory entry: its inode, and a descriptor if the file itself is watched."""

    __slots__ = ("fd", "inode", "is_link", "link_count", "size")

    def __init__(self, inode: tuple[int, int]) -> None:
        self.inode = inode
        self.fd = -1
        self.is_link = False
        self.size = self.link_count = 0

    def update(self) -> bool:
        """Read the file's status; return True if its size has changed since the last call."""
        status, old_size = os.fstat(self.fd), self.size
        self.is_link = _inode(status) != self.inode
        self.size, self.link_count = status.st_size, status.st_nlink
        return self.size != old_size

    def was_renamed(self, notes: int) -> bool | None:
        """Return True if the file that lost its name was renamed, False if it was deleted, None if unknown."""
        if self.fd < 0 or self.is_link:
            return None
        link_count = os.fstat(self.fd).st_nlink
        if link_count == 0:
            return False
        if notes & (_select.KQ_NOTE_RENAME | _select.KQ_NOTE_DELETE):
            return bool(notes & _select.KQ_NOTE_RENAME)
        return link_count >= self.link_count


class KqueueWatch(FileWatch):
    """See :class:`FileWatch`."""

    sock: _Vnodes

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.sock = _Vnodes()
        try:
            self._root = os.open(self._directory or ".", _DIRECTORY_FLAGS)
            self.sock.add(self._root)
            # The directory is watched before its entries are listed. So a change during the listing causes an event,
            # and the entries are listed again.
            self._entries = {name: self._new_entry(name, inode) for name, inode in self._scan().items()}
        except BaseException:
            self.sock.close()
            raise

    def _receive(self) -> None:
        self.sock.receive(self._take)

    # ------------------------------------------------------------------ the directory

    def _scan(self) -> dict[str, tuple[int, int]]:
        """Return ``{name: inode}`` for the names that are watched and exist now."""
        if self._is_directory:
            return self._scan_directory()
        try:
            return {self._name: _inode(os.stat(self._name, dir_fd=self._root, follow_symlinks=False))}
        except FileNotFoundError:
            return {}

    def _scan_directory(self) -> dict[str, tuple[int, int]]:
        inodes = {}
        try:
            with os.scandir(self._root) as entries:
                for entry in entries:
                    try:
                        inodes[entry.name] = _inode(entry.stat(follow_symlinks=False))
                    except FileNotFoundError:
                        pass  # deleted since it was listed
        except FileNotFoundError:
            pass  # the directory was deleted
        return inodes

    def _new_entry(self, name: str, inode: tuple[int, int]) -> _Entry:
        """Return a new entry, and watch its contents if it is a regular file that the process may read.

        Raises:
            OSError: no descriptor or memory is left.
        """
        entry = _Entry(inode)
        follow = not self._is_directory
        try:
            # Open regular files only: the process at the other end of a FIFO, for instance, may notice an open().
            if stat.S_ISREG(os.stat(name, dir_fd=self._root, follow_symlinks=follow).st_mode):
                fd = os.open(name, _FILE_FLAGS | (0 if follow else os.O_NOFOLLOW), dir_fd=self._root)
                self.sock.add(fd)
                entry.fd = fd
                entry.update()
        except OSError as exc:
            if exc.errno in _SHORTAGES:
                raise
        return entry

    # ------------------------------------------------------------------ events

    def _take(self, notes: dict[int, int]) -> None:
        """Queue the events that follow from the notes of the descriptors."""
        of_directory = notes.pop(self._root, 0)
        gone = _select.KQ_NOTE_DELETE | _select.KQ_NOTE_REVOKE
        if of_directory or any(each & (gone | _select.KQ_NOTE_RENAME) for each in notes.values()):
            try:
                self._compare(self._scan(), notes)
            except OSError:
                self._note("overflow", self.path)
        for name, entry in self._entries.items():
            of_file = notes.get(entry.fd, 0)
            # Some systems report a truncation only as a change of attributes, so the size is compared, too.
            if of_file and (entry.update() or of_file & (_select.KQ_NOTE_WRITE | _select.KQ_NOTE_EXTEND)):
                self._note("modified", self._path_of(name))
        if of_directory & gone:
            self._note_end("deleted")
        elif of_directory & _select.KQ_NOTE_RENAME:
            self._note_end("moved")

    def _compare(self, inodes: dict[str, tuple[int, int]], notes: dict[int, int]) -> None:
        """Queue the events that explain the difference between the entries known so far and ``inodes``."""
        old = self._entries
        left = [name for name, entry in old.items() if inodes.get(name) != entry.inode]
        everywhere = self._scan_directory() if left and not self._is_directory else inodes
        arrived = {inode: name for name, inode in everywhere.items() if name not in old or old[name].inode != inode}
        # Change the entries only now, after the scans, because a scan may raise an error. The code below raises one
        # only if the file system fails.
        self._entries = {name: entry for name, entry in old.items() if inodes.get(name) == entry.inode}
        for name in left:
            self._note_left(name, old[name], name in inodes, arrived, notes)
        for name, inode in inodes.items():
            if name not in self._entries:
                self._note_arrived(name, inode)

    def _note_left(
        self, name: str, entry: _Entry, is_replaced: bool, arrived: dict[tuple[int, int], str], notes: dict[int, int]
    ) -> None:
        destination = arrived.get(entry.inode)
        was_renamed = entry.was_renamed(notes.get(entry.fd, 0))
        if destination is not None and was_renamed is not False:
            del arrived[entry.inode]
            self._note("moved", self._path_of(name), self._join(destination))
            if self._is_directory:
                self._entries[destination] = entry
                return
        elif was_renamed:
            self._note("moved", self._path_of(name))
        elif not is_replaced:
            self._note("deleted", self._path_of(name))
        if entry.fd >= 0:
            # Drop the notes of this descriptor: after the close, its number may be given to another file.
            notes.pop(entry.fd, None)
            self.sock.remove(entry.fd)

    def _note_arrived(self, name: str, inode: tuple[int, int]) -> None:
        # Watch the file before the event is reported, so that no change after the event is missed.
        try:
            self._entries[name] = self._new_entry(name, inode)
        except OSError:
            self._entries[name] = _Entry(inode)
            self._note("overflow", self.path)
        self._note("created", self._path_of(name))

    def _path_of(self, name: str) -> str:
        return self._join(name) if self._is_directory else self.path


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
