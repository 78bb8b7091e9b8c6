"""``watch_file``: what happens to a file or to the entries of a directory."""

from __future__ import annotations

import os
import select

from ._file_events import FileEvent, FileWatch
from ._socket_base import Countdown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


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

    Linux reports each event, in order (inotify). macOS and the BSDs tell that something has happened (kqueue), and what
    it was is found by a look at the directory and the file. There

    - what happens between two looks is seen as one: a file that comes and goes is not reported, a file that is replaced
      is ``created`` also in a directory, and what is written to a new file before the look belongs to ``created``;
    - a change of entries reads the whole directory;
    - the directory and each regular file that is watched are kept open. The directory's file system cannot be unmounted
      meanwhile. Files that may not be read are not ``modified``, and neither are those that there was no descriptor
      left for, after an ``overflow``;
    - a truncation that changes no length is not seen, and what is no regular file and leaves the directory is
      ``deleted``;
    - a child that was forked cannot use the object.

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
        """End the watch. A coro that waits for an event gets none any more. The second call does nothing."""
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
        """Return the next event, waiting for it; None if there will be none.

        Raises:
            TimeoutError: there was none within ``timeout`` seconds.
            SimultaneousError: another coro waits for an event.
        """
        watch = self._watch
        countdown = Countdown(timeout)
        while not watch.events:
            left_s = countdown()
            if watch.has_ended or watch.sock.closed or not watch.receive(left_s):
                return None
            if timeout and left_s == 0 and not watch.events:
                raise TimeoutError("timed out")  # other files of the directory may change for ever
        return watch.events.popleft()


def _new_watch(path: str) -> FileWatch:
    if hasattr(select, "kqueue"):
        from ._kqueue import KqueueWatch

        return KqueueWatch(path)
    from ._inotify import InotifyWatch

    return InotifyWatch(path)
