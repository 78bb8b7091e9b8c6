"""An imitation of ``select.kqueue`` with its filter for vnodes, made with inotify.

On Linux, the tests of ``coro.watch_file`` use this imitation instead of a real kqueue.

The events are derived from what Linux reports about the open files. As with ``EV_CLEAR``, all changes of one file are
combined into one event, and the descriptor of the queue is readable while there are events. As on FreeBSD and macOS,
``DELETE`` is also reported for a file that has other links left and for a file that another one replaces, and a
truncation is reported as a change of attributes.
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

# Constants from inotify(7).
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
        """Return the notes that kqueue would report when inotify reports the bits of `mask` for the file."""
        old, self.status = self.status, os.fstat(self.fd)
        notes = 0
        if mask & _MODIFY:
            # O_TRUNC and truncate() set the size without writing anything.
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
        """Whether a lower link count means a deletion. A directory also loses a link when a subdirectory is deleted."""
        return self.status.st_nlink == 0 or not os.path.isdir(f"/proc/self/fd/{self.fd}")


class kqueue:
    def __init__(self) -> None:
        self._fd = _checked(_libc.inotify_init1(os.O_CLOEXEC))
        self._vnodes: dict[int, _Vnode] = {}
        # The keys of both dicts are inotify's watches, one per inode. The values are sets of descriptors. In `_watches`
        # these are descriptors of the inode itself, and in `_parents` descriptors of its subdirectories.
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
        assert timeout == 0, "only a timeout of 0 is supported"
        notes = self._read()
        assert len(notes) <= max_events, "events that do not fit would be lost"
        return [kevent(fd, KQ_FILTER_VNODE, KQ_EV_CLEAR, each) for fd, each in notes.items()]

    def _add(self, fd: int, notes: int) -> None:
        assert not notes & ~_ALL_NOTES
        mask = _MODIFY | _ATTRIB | _MOVED | _CREATE | _DELETE | _MOVE_SELF
        self._vnodes[fd] = _Vnode(fd, notes)
        self._watches[self._watch(f"/proc/self/fd/{fd}", mask)].add(fd)
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            # While a directory is open, only its parent gets an event about its deletion.
            self._parents[self._watch(f"/proc/self/fd/{fd}/..", _DELETE)].add(fd)

    def _watch(self, path: str, mask: int) -> int:
        return _checked(_libc.inotify_add_watch(self._fd, path.encode(), ctypes.c_uint32(mask)))

    def _delete(self, fd: int) -> None:
        del self._vnodes[fd]
        watch = next(watch for watch, fds in self._watches.items() if fd in fds)
        self._watches[watch].remove(fd)
        if not self._watches[watch]:
            _libc.inotify_rm_watch(self._fd, watch)
        for fds in self._parents.values():
            fds.discard(fd)

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
    """Return the events that a watch reports now. If the watch has ended, the last item is None."""
    found = []
    while None not in found:
        try:
            found.append(watch.wait(0))
        except TimeoutError:
            break
    return found
