"""``watch_file``: reports changes of a file or of the entries of a directory."""

from __future__ import annotations

import os
import select

from ._countdown import Countdown
from ._file_events import FileEvent, FileWatch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


class watch_file:  # noqa: N801  # Shrapnel's name
    """Reports changes of a file, which need not exist yet, or of a directory's entries (but not in subdirectories).

    This class is experimental: docs/versions.md says why.

    ``watch_file(path)`` is an iterator over :class:`FileEvent`, and a context manager::

        with coro.watch_file("settings.toml") as events:
            for event in events:
                if event.kind in {"created", "modified"}:
                    reload()

    The watch begins when the object is made. When a program replaces the file, the event is ``created``. The iteration
    ends when the object is closed, or after the event which says that the watched directory (for a file: its directory)
    was deleted or moved. An interrupted wait loses no event. Changes through ``mmap``, and changes that other machines
    make to a shared file system, are not seen.

    On Linux (inotify) the system reports each event, in order. On macOS and the BSDs (kqueue) it only reports that
    something has happened. ``watch_file`` then checks the directory and the files to find out what has changed. So on
    these systems:

    - All changes between two checks are seen as one. A file that is created and deleted in between is not reported. If
      a file is deleted in between and another file gets its name, ``deleted`` is not reported. Data that is written to
      a new file before the check is not reported as ``modified``, only as ``created``.
    - After each change of the entries of a watched directory, the whole directory is read.
    - The directory and each regular file that is watched are kept open, so the file system of the directory cannot be
      unmounted. ``modified`` is not reported for files that the process is not allowed to read, or for which no
      descriptor was left; in the second case there is an ``overflow`` event.
    - A truncation that does not change the length is not seen. If anything but a regular file is moved away, the event
      is ``deleted``.
    - A forked child cannot use the object.

    Raises:
        FileNotFoundError: the directory does not exist.
        OSError: the system has no watch or descriptor left.
        NotImplementedError: the system has neither inotify nor kqueue.
    """

    def __init__(self, path: str | bytes | os.PathLike[str]) -> None:
        self._watch = _new_watch(os.fsdecode(path))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path!r}{', closed' if self._watch.sock.closed else ''}>"

    @property
    def path(self) -> str:
        """The path that was given."""
        return self._watch.path

    def close(self) -> None:
        """End the watch. A coro that waits for an event gets None. A second call does nothing."""
        self._watch.sock.close()

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
        """Wait for the next event, and return it. Return None if the watch has ended.

        Raises:
            TimeoutError: no event came within ``timeout`` seconds.
            SimultaneousError: another coro is waiting for an event.
        """
        watch = self._watch
        countdown = Countdown(timeout)
        while not watch.events:
            left_s = countdown()
            if watch.has_ended or watch.sock.closed or not watch.receive(left_s):
                return None
            # If a file is watched, receive() also returns when only other files in its directory have changed, and then
            # it raises no TimeoutError. So check the time here.
            if timeout and left_s == 0 and not watch.events:
                raise TimeoutError("timed out")
        return watch.events.popleft()


def _new_watch(path: str) -> FileWatch:
    if hasattr(select, "kqueue"):
        from ._kqueue import KqueueWatch

        return KqueueWatch(path)
    from ._inotify import InotifyWatch

    return InotifyWatch(path)
