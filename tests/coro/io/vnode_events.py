"""``select.kqueue`` with the filter for vnodes, by inotify: what it takes to run ``coro.watch_file`` of the BSDs.

The notes are made from what Linux really reports of the open files. Those of one file become one event, as with
``EV_CLEAR``, and the descriptor of the queue can be read while there are events. As on FreeBSD and macOS, ``DELETE``
is also told of a file that has other links left, and of one that another file replaces, and a truncation is a change
of attributes.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
from collections import defaultdict
from typing import NamedTuple

KQ_FILTER_VNODE = -4
KQ_EV_ADD, KQ_EV_DELETE, KQ_EV_CLEAR = 0x1, 0x2, 0x20
KQ_NOTE_DELETE, KQ_NOTE_WRITE, KQ_NOTE_EXTEND, KQ_NOTE_ATTRIB = 0x1, 0x2, 0x4, 0x8
KQ_NOTE_LINK, KQ_NOTE_RENAME, KQ_NOTE_REVOKE = 0x10, 0x20, 0x40
_ALL_NOTES = 0x7F

# Of inotify(7).
_MODIFY, _ATTRIB, _MOVED, _CREATE, _DELETE, _MOVE_SELF = 0x2, 0x4, 0xC0, 0x100, 0x200, 0x800
_HEAD = struct.Struct("iIII")
_libc = ctypes.CDLL(None, use_errno=True)


class kevent(NamedTuple):
    ident: int
    filter: int
    flags: int = KQ_EV_ADD
    fflags: int = 0


class _Vnode:
    def __init__(self, fd: int, notes: int) -> None:
        self.fd = fd
        self.wanted = notes
        self.status = os.fstat(fd)

    def notes(self, mask: int) -> int:
        """What the mask of an event of the file means."""
        old, self.status = self.status, os.fstat(self.fd)
        notes = 0
        if mask & _MODIFY:
            # O_TRUNC and truncate() set the size, and write nothing.
            is_shorter = self.status.st_size < old.st_size
            notes |= KQ_NOTE_ATTRIB if is_shorter else KQ_NOTE_WRITE
            notes |= KQ_NOTE_EXTEND if self.status.st_size > old.st_size else 0
        if mask & (_CREATE | _DELETE | _MOVED):
            notes |= KQ_NOTE_WRITE
        if mask & _MOVE_SELF:
            notes |= KQ_NOTE_RENAME
        if mask & _ATTRIB:
            notes |= KQ_NOTE_ATTRIB
        if self.status.st_nlink != old.st_nlink:
            notes |= KQ_NOTE_LINK
            notes |= KQ_NOTE_DELETE if self.status.st_nlink < old.st_nlink and self.has_lost_link() else 0
        return notes & self.wanted

    def has_lost_link(self) -> bool:
        """A directory also has the links of those in it."""
        return self.status.st_nlink == 0 or not os.path.isdir(f"/proc/self/fd/{self.fd}")


class kqueue:
    def __init__(self) -> None:
        self._fd = _checked(_libc.inotify_init1(os.O_CLOEXEC))
        self._vnodes: dict[int, _Vnode] = {}
        # By inotify's watches, of which each inode has one: the descriptors of the file, or of the directories below.
        self._watches: defaultdict[int, set[int]] = defaultdict(set)
        self._parents: defaultdict[int, set[int]] = defaultdict(set)

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def control(self, changes: list[kevent] | None, max_events: int, timeout: float | None = None) -> list[kevent]:
        for change in changes or ():
            assert change.filter == KQ_FILTER_VNODE
            if change.flags & KQ_EV_DELETE:
                self._delete(change.ident)
            else:
                assert change.flags == KQ_EV_ADD | KQ_EV_CLEAR
                self._add(change.ident, change.fflags)
        if not max_events:
            return []
        assert timeout == 0, "nothing here waits in the queue"
        notes = self._read()
        assert len(notes) <= max_events, "inotify cannot give some of them back"
        return [kevent(fd, KQ_FILTER_VNODE, KQ_EV_CLEAR, each) for fd, each in notes.items()]

    def _add(self, fd: int, notes: int) -> None:
        assert not notes & ~_ALL_NOTES
        mask = _MODIFY | _ATTRIB | _MOVED | _CREATE | _DELETE | _MOVE_SELF
        self._vnodes[fd] = _Vnode(fd, notes)
        self._watches[self._watch(f"/proc/self/fd/{fd}", mask)].add(fd)
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            # The end of a directory that is open is told to the one above only.
            self._parents[self._watch(f"/proc/self/fd/{fd}/..", _DELETE)].add(fd)

    def _watch(self, path: str, mask: int) -> int:
        return _checked(_libc.inotify_add_watch(self._fd, path.encode(), ctypes.c_uint32(mask)))

    def _delete(self, fd: int) -> None:
        del self._vnodes[fd]
        watch = next(watch for watch, fds in self._watches.items() if fd in fds)
        self._watches[watch].remove(fd)
        if not self._watches[watch]:
            _libc.inotify_rm_watch(self._fd, watch)

    def _read(self) -> dict[int, int]:
        found: dict[int, int] = {}
        while select.select([self._fd], [], [], 0)[0]:
            data, at = os.read(self._fd, 65536), 0
            while at < len(data):
                watch, mask, _, name_len = _HEAD.unpack_from(data, at)
                at += _HEAD.size + name_len
                for fd in self._watches[watch]:
                    found[fd] = found.get(fd, 0) | self._vnodes[fd].notes(mask)
                for fd in self._parents[watch]:
                    found[fd] = found.get(fd, 0) | self._vnodes[fd].notes(0)
        return {fd: notes for fd, notes in found.items() if notes}


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def events_of(watch):
    """What a watch has to tell now, and None at its end."""
    found = []
    while None not in found:
        try:
            found.append(watch.wait(0))
        except TimeoutError:
            break
    return found
