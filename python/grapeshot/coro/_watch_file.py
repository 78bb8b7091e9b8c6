"""``watch_file``: what happens to a file or to the entries of a directory, by inotify.

    names     the directory's watch: created, deleted, moved
    contents  the file's own watch: modified; made again when the name gets another file

So a file that editors replace (a new file is renamed to the old name) is still watched, and so is what a symbolic link
leads to, also when the link is replaced.
"""

from __future__ import annotations

import collections
import errno
import os
import struct
import sys

from . import _errors
from ._files import fd_sock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, NamedTuple

    class FileEvent(NamedTuple):
        """What :class:`watch_file` reports."""

        kind: str
        path: str
        destination: str | None = None
else:
    # typing is not imported for this.
    FileEvent = collections.namedtuple("FileEvent", "kind path destination", defaults=(None,))
    FileEvent.__doc__ = """What :class:`watch_file` reports: its ``kind``, the ``path``, and for a move the destination.

    The kinds are ``created`` (also: moved there), ``modified``, ``deleted``, ``moved`` (``destination`` is None if the
    new path is in another directory), and ``overflow``: events were lost, and nothing is known.
    """

# Of inotify(7).
_MODIFY, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x2, 0x40, 0x80, 0x100, 0x200
_DELETE_SELF, _MOVE_SELF, _UNMOUNT, _OVERFLOW, _IGNORED = 0x400, 0x800, 0x2000, 0x4000, 0x8000
_ONLY_DIRECTORY = 0x1000000
_NAMES = _CREATE | _DELETE | _MOVED_FROM | _MOVED_TO | _DELETE_SELF | _MOVE_SELF | _ONLY_DIRECTORY
_HEAD = struct.Struct("iIII")
_READ_LEN = 65536


class watch_file:  # noqa: N801  # Shrapnel's name
    """Reports what happens to a file, which need not exist yet, or to the entries of a directory (not below them).

    ``watch_file(path)``, an iterator over :class:`FileEvent` and a context manager::

        with coro.watch_file("settings.toml") as events:
            for event in events:
                if event.kind in {"created", "modified"}:
                    reload()

    It watches from the moment it is made. A program that replaces a file causes ``created``. The iteration ends when
    the object is closed, and behind the event for the end of the watched directory, or of the one that has the file. A
    wait that is interrupted has lost no event. Changes through ``mmap`` and those that other machines make are not
    seen.

    Raises:
        FileNotFoundError: the directory does not exist.
        OSError: the system has no watch left.
        NotImplementedError: the system has no inotify.
    """

    def __init__(self, path: str | bytes | os.PathLike[str]) -> None:
        self._path = os.fsdecode(path)
        self._is_directory = os.path.isdir(self._path)
        stripped = self._path.rstrip("/") or "/"
        self._directory = stripped if self._is_directory else os.path.dirname(stripped)
        self._name = os.path.basename(stripped)
        self._events: collections.deque[FileEvent] = collections.deque()
        self._has_ended = False
        self._file_watch = -1
        self._sock = fd_sock(_inotify().open())
        try:
            contents = _MODIFY if self._is_directory else 0
            self._directory_watch = self._add(self._directory or ".", _NAMES | contents)
            self._watch_contents()
        except BaseException:
            self._sock.close()
            raise

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._path!r}{', closed' if self._sock.closed else ''}>"

    @property
    def path(self) -> str:
        """The path that was given."""
        return self._path

    def close(self) -> None:
        """End the watch. A coro that waits for an event gets none any more. The second call does nothing."""
        self._sock.close()

    def __enter__(self) -> watch_file:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[FileEvent]:
        return self

    def __next__(self) -> FileEvent:
        event = self.wait()
        if event is None:
            raise StopIteration
        return event

    def wait(self, timeout: float | None = None) -> FileEvent | None:
        """Return the next event, waiting for it; None if there will be none.

        Raises:
            TimeoutError: there was none within ``timeout`` seconds.
            SimultaneousError: another coro waits for an event.
        """
        self._sock.settimeout(timeout if timeout is None else max(timeout, 0.0))
        while not self._events:
            if self._has_ended or self._sock.closed:
                return None
            try:
                data = self._sock.recv(_READ_LEN)
            except BlockingIOError:
                raise TimeoutError("timed out") from None
            except _errors.ClosedError:
                return None
            self._take(data)
        return self._events.popleft()

    # ------------------------------------------------------------------ watches

    def _add(self, path: str, mask: int) -> int:
        return _inotify().add(self._sock.fileno(), path, mask)

    def _watch_contents(self) -> None:
        """Watch the file that has the name now, if there is one."""
        self._unwatch_contents()
        if self._is_directory:
            return
        try:
            self._file_watch = self._add(self._path, _MODIFY)
        except FileNotFoundError:
            pass
        except OSError as exc:
            if exc.errno != errno.ELOOP:  # a link that leads to itself is nothing to watch
                raise

    def _unwatch_contents(self) -> None:
        watch, self._file_watch = self._file_watch, -1
        if watch >= 0:
            _inotify().remove(self._sock.fileno(), watch)

    # ------------------------------------------------------------------ events

    def _take(self, data: bytes) -> None:
        """Queue the events of what was read."""
        raw = list(_parse(data))
        while raw and raw[-1][1] & _MOVED_FROM:
            # The other half of a move may be in the next read.
            self._sock.settimeout(0)
            try:
                raw.extend(_parse(self._sock.recv(_READ_LEN)))
            except (BlockingIOError, _errors.ClosedError):
                break
        destinations = {cookie: name for _, mask, cookie, name in raw if mask & _MOVED_TO}
        sources = {cookie for _, mask, cookie, _ in raw if mask & _MOVED_FROM}
        for watch, mask, cookie, name in raw:
            if mask & _OVERFLOW:
                self._note("overflow", self._path)
                self._watch_contents()
            elif watch == self._directory_watch:
                self._note_directory(mask, name, destinations.get(cookie), cookie in sources)
            elif watch == self._file_watch and mask & _MODIFY:
                self._note("modified", self._path)

    def _note_directory(self, mask: int, name: str, destination: str | None, is_from_here: bool) -> None:
        if mask & (_DELETE_SELF | _MOVE_SELF | _UNMOUNT | _IGNORED):
            if not self._has_ended:
                self._has_ended = True
                self._note("moved" if mask & _MOVE_SELF else "deleted", self._path)
        elif self._is_directory:
            if mask & _MOVED_TO and is_from_here:
                return  # the event of the other half tells both
            self._note_name(mask, self._join(name), destination)
        elif name == self._name:
            if mask & (_CREATE | _MOVED_TO):
                # Before anybody hears of the file, so that later changes are seen.
                self._watch_contents()
            else:
                self._unwatch_contents()
            self._note_name(mask, self._path, destination)

    def _note_name(self, mask: int, path: str, destination: str | None) -> None:
        if mask & (_CREATE | _MOVED_TO):
            self._note("created", path)
        elif mask & _DELETE:
            self._note("deleted", path)
        elif mask & _MODIFY:
            self._note("modified", path)
        elif mask & _MOVED_FROM:
            self._note("moved", path, None if destination is None else self._join(destination))

    def _note(self, kind: str, path: str, destination: str | None = None) -> None:
        event = FileEvent(kind, path, destination)
        if kind != "modified" or not self._events or self._events[-1] != event:
            self._events.append(event)

    def _join(self, name: str) -> str:
        return os.path.join(self._directory, name)


def _parse(data: bytes) -> Iterator[tuple[int, int, int, str]]:
    """Yield the watch, the mask, the cookie and the name of each event."""
    at = 0
    while at < len(data):
        watch, mask, cookie, name_len = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        yield watch, mask, cookie, os.fsdecode(data[at : at + name_len].rstrip(b"\0"))
        at += name_len


class _Inotify:
    """The system calls, which Python does not have."""

    def __init__(self) -> None:
        import ctypes

        self._ctypes: Any = ctypes
        self._libc = ctypes.CDLL(None, use_errno=True)

    def open(self) -> int:
        return self._check(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), None)

    def add(self, fd: int, path: str, mask: int) -> int:
        return self._check(self._libc.inotify_add_watch(fd, os.fsencode(path), self._ctypes.c_uint32(mask)), path)

    def remove(self, fd: int, watch: int) -> None:
        # An error means that it has ended with its file.
        self._libc.inotify_rm_watch(fd, watch)

    def _check(self, result: int, path: str | None) -> int:
        if result < 0:
            number = self._ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)
        return result


_made: list[_Inotify] = []


def _inotify() -> _Inotify:
    if not _made:
        if sys.platform != "linux":
            raise NotImplementedError("watch_file() needs inotify, which only Linux has")
        _made.append(_Inotify())
    return _made[0]
