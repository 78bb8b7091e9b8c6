"""The classes that both implementations of ``watch_file`` use: :class:`FileEvent` and :class:`FileWatch`."""

from __future__ import annotations

import collections
import os

from . import _errors
from ._files import fd_sock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NamedTuple

    class FileEvent(NamedTuple):
        """An event that :class:`watch_file` reports."""

        kind: str
        path: str
        destination: str | None = None
else:
    # A collections.namedtuple at run time, so that typing need not be imported.
    FileEvent = collections.namedtuple("FileEvent", "kind path destination", defaults=(None,))
    FileEvent.__doc__ = """An event that :class:`watch_file` reports: a tuple of ``kind``, ``path`` and ``destination``.

    ``kind`` is one of:

    - ``created``: the path is new, or something was moved to this path
    - ``modified``: the contents changed
    - ``deleted``
    - ``moved``: renamed to ``destination``, which is None if the new path is in another directory, and also if the
      watched directory itself was moved
    - ``overflow``: events were lost, so anything may have changed
    """


class FileWatch:
    """Watches the entries of the directory ``path``. If ``path`` is not a directory, watches only this one path.

    ``sock`` becomes readable when something has happened. :meth:`receive` waits for that, and appends the new events to
    ``events``. Once ``has_ended`` is true, no more events come.
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
        """Wait until something has happened, and queue the events. Return False if the watch was closed.

        Raises:
            TimeoutError: nothing has happened within ``timeout_s``.
            SimultaneousError: another coro is waiting already.
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
