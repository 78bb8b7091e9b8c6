"""``watch_file`` on Linux, with inotify. To watch a single file, it uses two watches that report different events:

    the watch of its directory  the name was created, deleted or moved
    the watch of the file       the contents were modified. When the name refers to another file, this watch is replaced

So a file is still watched after an editor has replaced it (by renaming a new file to the old name). If the name is a
symbolic link, the contents of its target are watched. If the link is replaced, the contents of its new target are
watched.

For the entries of a directory, a single watch of that directory reports all of these events.

Source: ``inotify(7)``.
"""

from __future__ import annotations

import errno
import os
import struct

from . import _errors
from ._file_events import FileWatch
from ._files import fd_sock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

# The constants of inotify(7).
_MODIFY, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x2, 0x40, 0x80, 0x100, 0x200
_DELETE_SELF, _MOVE_SELF, _UNMOUNT, _OVERFLOW, _IGNORED = 0x400, 0x800, 0x2000, 0x4000, 0x8000
_ONLY_DIRECTORY = 0x1000000
_NAMES = _CREATE | _DELETE | _MOVED_FROM | _MOVED_TO | _DELETE_SELF | _MOVE_SELF | _ONLY_DIRECTORY
_HEAD = struct.Struct("iIII")
_READ_LEN = 65536


class InotifyWatch(FileWatch):
    """See :class:`FileWatch`.

    Raises:
        NotImplementedError: the system does not have inotify.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._file_watch = -1
        self.sock = fd_sock(_inotify().open())
        try:
            contents = _MODIFY if self._is_directory else 0
            self._directory_watch = self._add(self._directory or ".", _NAMES | contents)
            self._watch_contents()
        except BaseException:
            self.sock.close()
            raise

    def _receive(self) -> None:
        self._take(self.sock.recv(_READ_LEN))

    # ------------------------------------------------------------------ watches

    def _add(self, path: str, mask: int) -> int:
        return _inotify().add(self.sock.fileno(), path, mask)

    def _watch_contents(self) -> None:
        """Watch the file that has the name now, if there is one."""
        self._unwatch_contents()
        if self._is_directory:
            return
        try:
            self._file_watch = self._add(self.path, _MODIFY)
        except FileNotFoundError:
            pass
        except OSError as exc:
            if exc.errno != errno.ELOOP:  # a symbolic link that leads to itself has no file to watch
                raise

    def _watch_again(self) -> bool:
        """Watch the file after an event. Return False if the system refuses; changes to the file are then not seen."""
        try:
            self._watch_contents()
        except OSError:
            return False
        return True

    def _unwatch_contents(self) -> None:
        watch, self._file_watch = self._file_watch, -1
        if watch >= 0:
            _inotify().remove(self.sock.fileno(), watch)

    # ------------------------------------------------------------------ events

    def _take(self, data: bytes) -> None:
        """Queue the events that the data describes."""
        raw = list(_parse(data))
        while raw and raw[-1][1] & _MOVED_FROM:
            # The event with the new name of a moved file may come with the next read.
            self.sock.settimeout(0)
            try:
                raw.extend(_parse(self.sock.recv(_READ_LEN)))
            except (BlockingIOError, _errors.ClosedError):
                break
        destinations = {cookie: name for _, mask, cookie, name in raw if mask & _MOVED_TO}
        sources = {cookie for _, mask, cookie, _ in raw if mask & _MOVED_FROM}
        for watch, mask, cookie, name in raw:
            if mask & _OVERFLOW:
                self._note("overflow", self.path)
                self._watch_again()
            elif watch == self._directory_watch:
                self._note_directory(mask, name, destinations.get(cookie), cookie in sources)
            elif watch == self._file_watch and mask & _MODIFY:
                self._note("modified", self.path)

    def _note_directory(self, mask: int, name: str, destination: str | None, is_from_here: bool) -> None:
        if mask & (_DELETE_SELF | _MOVE_SELF | _UNMOUNT | _IGNORED):
            self._note_end("moved" if mask & _MOVE_SELF else "deleted")
        elif self._is_directory:
            if mask & _MOVED_TO and is_from_here:
                return  # the event for the old name has reported the move
            self._note_name(mask, self._join(name), destination)
        elif name == self._name:
            self._note_name(mask, self.path, destination)
            # Watch the file before the program gets the event, so that no change after the event is missed.
            if not mask & (_CREATE | _MOVED_TO):
                self._unwatch_contents()
            elif not self._watch_again():
                self._note("overflow", self.path)

    def _note_name(self, mask: int, path: str, destination: str | None) -> None:
        if mask & (_CREATE | _MOVED_TO):
            self._note("created", path)
        elif mask & _DELETE:
            self._note("deleted", path)
        elif mask & _MODIFY:
            self._note("modified", path)
        elif mask & _MOVED_FROM:
            self._note("moved", path, None if destination is None else self._join(destination))


def _parse(data: bytes) -> Iterator[tuple[int, int, int, str]]:
    """Yield ``(watch, mask, cookie, name)`` for each event."""
    at = 0
    while at < len(data):
        watch, mask, cookie, name_len = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        yield watch, mask, cookie, os.fsdecode(data[at : at + name_len].rstrip(b"\0"))
        at += name_len


class _Inotify:
    """The system calls of inotify, called with ctypes because Python does not offer them."""

    def __init__(self) -> None:
        import ctypes

        self._ctypes: Any = ctypes
        self._libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(self._libc, "inotify_init1"):
            raise NotImplementedError("watch_file() needs inotify or kqueue, and this system has neither")

    def open(self) -> int:
        return self._check(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), None)

    def add(self, fd: int, path: str, mask: int) -> int:
        return self._check(self._libc.inotify_add_watch(fd, os.fsencode(path), self._ctypes.c_uint32(mask)), path)

    def remove(self, fd: int, watch: int) -> None:
        # Errors are ignored: if the file was deleted, the system has already removed the watch.
        self._libc.inotify_rm_watch(fd, watch)

    def _check(self, result: int, path: str | None) -> int:
        if result < 0:
            number = self._ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)
        return result


_made: list[_Inotify] = []


def _inotify() -> _Inotify:
    if not _made:
        _made.append(_Inotify())
    return _made[0]
