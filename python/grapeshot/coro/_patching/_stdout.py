"""The part ``stdout`` of :func:`grapeshot.coro.patch`: other coros run while one waits for the reader of its output.

It patches ``sys.stdout`` and ``sys.stderr``. The interpreter's own stream objects stay, because they may have data in
their buffers. Only the methods that wait are replaced, by functions that are set as attributes of these objects.

Finalizers and callbacks of the loop may print while a coro waits. The buffer has a lock that belongs to the thread, so
such a print would fail as a reentrant call if the coro waited inside the buffer. Instead, the raw file writes as much
as it can without waiting, and the coro waits between two calls of the buffer.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys

from grapeshot import _core
from grapeshot.coro import _at_once

from . import _os, _waits
from ._file_objects import WRITE_FORGETS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

_current_or_none = _core._coro_current_or_none
_is_among_coros = _core._coro_begins_thread


@contextlib.contextmanager
def _hold_in_thread(lock: Any) -> Iterator[bool]:
    """Hold the lock in code outside of coros.

    A callback or task must not wait for a coro of its own thread, because that coro could not go on. So a callback or
    task of a loop with coros never waits for the lock: if the lock is not free, it goes on without the lock. The value
    for ``with ... as`` is True if the lock is held.
    """
    # While the interpreter exits, a thread that was stopped may have the lock: do not wait for it then.
    taken = lock.acquire(False) or (not sys.is_finalizing() and not _is_among_coros() and lock.acquire())
    try:
        yield taken
    finally:
        if taken:
            lock.release()


class _Outlet:
    """Replaces the methods of ``sys.stdout.buffer`` or ``sys.stderr.buffer``, and of the raw file below."""

    def __init__(self, buffer: io.BufferedWriter, raw: io.FileIO) -> None:
        self._lock = _core.thread_rlock()
        self._raw = raw
        self._write, self._flush, self._write_raw = buffer.write, buffer.flush, raw.write
        # The coro that calls the buffer now.
        self._writer: Any = None
        # Whether the raw file had no room during the last call of the buffer.
        self._is_full = False
        # Data that interrupted writes have not written. It is kept here, because text streams drop data once they have
        # passed it on to the buffer.
        self._left: list[bytes] = []
        changed: Any = buffer
        changed.write, changed.flush = self.write, self.flush
        changed = raw
        changed.write = self.write_raw
        os.register_at_fork(after_in_child=self._lock._at_fork_reinit)

    def write_raw(self, data: Any, /) -> Any:
        fd = -1 if self._raw.closed else self._raw.fileno()
        if not _waits.can_wait() or not _waits.may_block(fd):
            return self._write_raw(data)
        if self._writer is not _current_or_none():
            return _os.write_all(fd, data)
        try:
            return _at_once.write_now(fd, data)
        except BlockingIOError:
            self._is_full = True
            return None

    def write(self, data: Any, /) -> int:
        """Write all of the data. If an exception interrupts a wait, the next call writes the rest."""
        if not _waits.can_wait():
            with _hold_in_thread(self._lock):
                self._write_left(self._write)
                return self._write(data)
        view = memoryview(data).cast("B")
        done = 0
        try:
            _waits.act()
            with self._lock:
                self._write_left(self._write_as_coro)
                done = len(view)
                self._write_as_coro(data)
        except OSError:
            raise
        except BaseException:
            if not done:
                self._left.append(bytes(view))
            raise
        return len(view)

    def _write_left(self, write: Callable[[Any], object]) -> None:
        while True:
            # No check before `pop`: a callback in another thread may take the data without the lock.
            try:
                data = self._left.pop(0)
            except IndexError:
                return
            write(data)

    def _write_as_coro(self, data: Any) -> None:
        rest = memoryview(data).cast("B")
        while True:
            try:
                self._call(self._write, rest)
            except BlockingIOError as error:
                if not self._is_full:
                    raise
                rest = rest[error.characters_written :]
            else:
                return
            try:
                self._wait()
            except BaseException:
                self._left.insert(0, bytes(rest))
                raise

    def flush(self) -> None:
        if not _waits.can_wait():
            with _hold_in_thread(self._lock):
                self._write_left(self._write)
                self._flush()
            return
        with self._lock:
            self._write_left(self._write_as_coro)
            while True:
                try:
                    self._call(self._flush)
                except BlockingIOError:
                    if not self._is_full:
                        raise
                    self._wait()
                else:
                    return

    def _call(self, method: Callable[..., Any], *args: Any) -> None:
        """Call a method of the buffer. In this call, the raw file does not wait."""
        self._writer, self._is_full = _current_or_none(), False
        try:
            method(*args)
        finally:
            self._writer = None

    def _wait(self) -> None:
        _waits.wait_for_descriptor(self._raw.fileno(), _waits.WRITABLE, None)


def _write_alone(text: Any) -> None:
    """Let one coro at a time into ``write`` of a text stream."""
    method, lock = text.write, _core.thread_rlock()
    os.register_at_fork(after_in_child=lock._at_fork_reinit)

    def write(data: str, /) -> int:
        if _waits.can_wait():
            with lock:
                return method(data)  # type: ignore[no-any-return]
        with _hold_in_thread(lock) as is_held:
            if is_held or not isinstance(data, str):
                return method(data)  # type: ignore[no-any-return]
            # Another call of the method is under way, usually in a coro that waits. The stream would lose text that is
            # passed to it meanwhile, so `data` goes to the buffer below the stream.
            text.buffer.write(data.encode(text.encoding, text.errors))
            if text.line_buffering and "\n" in data:
                text.buffer.flush()
            return len(data)

    text.write = write


def _wait_before_writes(raw: Any) -> None:
    """Patch a raw file without a buffer (``python -u``): its ``write`` writes everything, while other coros run."""
    original = raw.write

    def write(data: Any, /) -> Any:
        if raw.closed or not _waits.can_wait() or not _waits.may_block(raw.fileno()):
            return original(data)
        return _os.write_all(raw.fileno(), data)

    raw.write = write


def patch() -> None:
    """Patch the objects that ``sys.stdout`` and ``sys.stderr`` are now, if they are of the interpreter's classes."""
    for stream in (sys.stdout, sys.stderr):
        buffer: Any = stream.buffer if type(stream) is io.TextIOWrapper else None
        raw = buffer.raw if type(buffer) is io.BufferedWriter else buffer
        if type(raw) is not io.FileIO or raw.closed or "write" in vars(raw):
            continue
        if raw is buffer:
            _wait_before_writes(raw)
        else:
            _Outlet(buffer, raw)
        if WRITE_FORGETS:
            _write_alone(stream)
