"""What the two ways of watching files share: :class:`FileEvent` and the queue of events."""

from __future__ import annotations

import collections
import os

from . import _errors
from ._files import fd_sock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NamedTuple

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


class FileWatch:
    """A watch of the directory ``path``, or of the entry of a directory that ``path`` names.

    ``sock`` can be read when something has happened. ``events`` holds what is known of it, and after ``has_ended``
    there will be no more.
    """

    sock: fd_sock

    def __init__(self, path: str) -> None:
        self.path = path
        self.events: collections.deque[FileEvent] = collections.deque()
        self.has_ended = False
        self._is_directory = os.path.isdir(path)
        stripped = path.rstrip("/") or "/"
        self._directory = stripped if self._is_directory else os.path.dirname(stripped)
        self._name = os.path.basename(stripped)

    def receive(self, timeout_s: float | None) -> bool:
        """Wait until something has happened, and queue the events. False if the watch was closed.

        Raises:
            TimeoutError: nothing has happened for so long.
            SimultaneousError: another coro waits.
        """
        self.sock.settimeout(timeout_s)
        try:
            self._receive()
        except BlockingIOError:
            raise TimeoutError("timed out") from None
        except _errors.ClosedError:
            return False
        return True

    def _receive(self) -> None:
        raise NotImplementedError

    def _note(self, kind: str, path: str, destination: str | None = None) -> None:
        event = FileEvent(kind, path, destination)
        if kind != "modified" or not self.events or self.events[-1] != event:
            self.events.append(event)

    def _note_end(self, kind: str) -> None:
        if not self.has_ended:
            self.has_ended = True
            self._note(kind, self.path)

    def _join(self, name: str) -> str:
        return os.path.join(self._directory, name)
