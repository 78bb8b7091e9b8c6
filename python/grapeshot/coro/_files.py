"""Pipes, terminals and files for coros: :class:`fd_sock` and :class:`file_sock`.

The kernel tells when a pipe, a FIFO or a terminal is ready, and the coro waits for that. Regular files are always
"ready", and reading them blocks all the same, so real threads read and write them. They do it at a position that the
object keeps, not at the file's own: a coro that is interrupted meanwhile has not moved it, and has lost nothing.

    close() --> ClosedError in those that wait --> the last one to leave closes the descriptor

So the number of a descriptor stays taken as long as a coro waits for it or a thread uses it.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import stat
import threading
import warnings

from grapeshot import _core

from . import _at_once, _errors
from ._socket import wait_for_read, wait_for_write
from ._socket_base import Countdown
from .bridge import run_in_thread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Self, TypeVar

    from _typeshed import FileDescriptorLike, ReadableBuffer, WriteableBuffer

    _T = TypeVar("_T")


class _Hold:
    """A descriptor and those who use it, in any thread. It is closed when it should be and nobody uses it."""

    def __init__(self, fd: int, release: Callable[[], object] | None) -> None:
        self.fd = fd
        self.is_closed = False
        self._release = release
        self._users = 0
        self._lock = threading.Lock()

    def __enter__(self) -> int:
        with self._lock:
            if self.is_closed:
                raise _errors.ClosedError("the file is closed")
            self._users += 1
        return self.fd

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            is_last = self.is_closed and not self._users
        if is_last:
            self._let_go()

    def close(self) -> None:
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
            is_last = not self._users
        if is_last:
            self._let_go()

    def _let_go(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release()


class fd_sock:  # noqa: N801  # Shrapnel's name
    """A descriptor of a pipe, a FIFO, a terminal or the like, with the calls of a socket.

    ``fd_sock(fd, *, closefd=True)``

    With ``closefd`` the object owns the descriptor: it closes it, and makes it nonblocking. Otherwise it leaves the
    descriptor as it is, because other processes may share it (standard input, for instance). Its calls are then
    nonblocking by themselves, or made by a real thread for the few kinds of files that have no such calls.

    An interrupted ``recv`` has lost nothing. After an interrupted ``sendall`` nobody knows how much was written. In a
    thread without coros the calls block the thread.
    """

    def __init__(self, fd: int, *, closefd: bool = True) -> None:
        self._set_up(fd, (lambda: os.close(fd)) if closefd else None, is_ours=closefd)

    def _set_up(self, fd: int, release: Callable[[], object] | None, *, is_ours: bool) -> None:
        self._timeout_s: float | None = None
        self._waiting: set[Any] = set()
        self._was_blocking = os.get_blocking(fd)
        self._is_ours = is_ours
        if is_ours and self._was_blocking:
            os.set_blocking(fd, False)
        self._stays_blocking = self._was_blocking and not is_ours
        # The last step: an object whose descriptor is refused owns none.
        self._hold = _Hold(fd, release)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"fd={self._hold.fd}"
        return f"<{type(self).__name__} {state}>"

    def __del__(self, _warn: Any = warnings.warn) -> None:
        hold: _Hold | None = getattr(self, "_hold", None)
        if hold is not None and not hold.is_closed and self._is_ours:
            _warn(f"unclosed {self!r}", ResourceWarning, source=self)
            hold.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ the descriptor

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._hold.is_closed

    def fileno(self) -> int:
        """Return the descriptor, -1 if it is closed."""
        return -1 if self.closed else self._hold.fd

    def close(self) -> None:
        """Close it; coros that wait for it get :class:`ClosedError`. The second call does nothing."""
        if self.closed:
            return
        self._hold.close()
        self._end_waits()

    def detach(self) -> int:
        """Return the descriptor, which the caller then owns, as it was before. The object is closed."""
        if self.closed:
            raise _errors.ClosedError("the file is closed")
        fd, self._hold._release = self._hold.fd, None
        if self._is_ours and self._was_blocking:
            os.set_blocking(fd, True)
        self.close()
        return fd

    def settimeout(self, timeout: float | None, /) -> None:
        """Limit each call to so many seconds; None: no limit. With 0 a call that would wait raises BlockingIOError."""
        if timeout is not None and not timeout >= 0:
            raise ValueError("a timeout is None, or 0 or above")
        self._timeout_s = timeout

    def gettimeout(self) -> float | None:
        """Return what :meth:`settimeout` has set."""
        return self._timeout_s

    # ------------------------------------------------------------------ reading and writing

    def recv(self, count: int, /) -> bytes:
        """Read what is there, ``count`` bytes at most; wait until there is something. Empty at the end of the stream.

        Raises:
            TimeoutError: there was nothing before the timeout.
            SimultaneousError: another coro reads.
            ClosedError: the object is closed, or was closed meanwhile.
        """
        if count <= 0:
            # An error, or empty.
            return self._repeat(wait_for_read, lambda fd: os.read(fd, count))
        return self._repeat(
            wait_for_read, lambda fd: os.read(fd, count), lambda fd, wait: _at_once.read(fd, count, wait)
        )

    def recv_into(self, buffer: WriteableBuffer, /) -> int:
        """Read into a buffer; return the number of bytes, 0 at the end of the stream. Raises: as :meth:`recv`."""
        with memoryview(buffer) as view, view.cast("B") as octets:
            data = self.recv(len(octets)) if self._stays_blocking else None
            if data is None:
                return self._repeat(wait_for_read, lambda fd: os.readv(fd, [octets]))
            octets[: len(data)] = data
        return len(data)

    def send(self, data: ReadableBuffer, /) -> int:
        """Write a part of the data, as much as there is room for; return its length. Raises: as :meth:`recv`."""
        with memoryview(data) as view, view.cast("B") as octets:
            return self._repeat(
                wait_for_write, lambda fd: os.write(fd, octets), lambda fd, wait: _at_once.write(fd, octets, wait)
            )

    def sendall(self, data: ReadableBuffer, /) -> None:
        """Write all of the data. After an error nobody knows how much was written. Raises: as :meth:`recv`."""
        with memoryview(data) as view, view.cast("B") as left:
            at = 0
            while at < len(left):
                at += self.send(left[at:])

    def write(self, data: ReadableBuffer, /) -> int:
        """Write all of the data, and return its length. Raises: as :meth:`sendall`."""
        self.sendall(data)
        with memoryview(data) as view:
            return view.nbytes

    def _repeat(
        self,
        wait: Callable[..., None],
        call: Callable[[int], _T],
        call_at_once: Callable[[int, Callable[[], object]], _T] | None = None,
    ) -> _T:
        """Call until the descriptor is ready. ``call_at_once`` is for one that stays in blocking mode."""
        with self._hold as fd:
            _core._coro_act()
            left_s = Countdown(self._timeout_s)
            if self._stays_blocking and call_at_once is not None:
                return call_at_once(fd, lambda: self._wait(wait, fd, left_s()))
            while True:
                try:
                    return call(fd)
                except BlockingIOError:
                    if self._timeout_s == 0:
                        raise
                self._wait(wait, fd, left_s())

    def _wait(self, wait: Callable[..., None], fd: int, left_s: float | None) -> None:
        if self.closed:  # while the coro has yielded
            raise _errors.ClosedError("the file is closed")
        co = _core._coro_current_or_none()
        if co is None:
            self._wait_here(wait, fd, left_s)
            return
        self._waiting.add(co)
        try:
            self._wait_here(wait, fd, left_s)
        finally:
            self._waiting.discard(co)

    def _wait_here(self, wait: Callable[..., None], fd: int, left_s: float | None) -> None:
        try:
            wait(fd, left_s)
        except TimeoutError:
            if self._timeout_s == 0:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
            raise

    def _end_waits(self) -> None:
        """Raise ClosedError in the coros that wait."""
        for co in list(self._waiting):
            try:
                co._throw(_errors.ClosedError("the descriptor was closed while a coro waited on it"))
            except _errors.DeadCoroutine:
                pass
            except _errors.ScheduleError:  # another thread's: told there
                co._loop.call_soon_threadsafe(self._end_waits)
                return


class file_sock(fd_sock):  # noqa: N801
    """A file with the calls of a socket. Real threads read and write a regular file, so that the loop goes on.

    ``file_sock(file, *, closefd=True)``

    ``file`` is a binary file object, or a descriptor. What is no regular file is used as by :class:`fd_sock`. With
    ``closefd`` the object closes the file. What a buffered file has to write is written first; what it has read ahead
    of a pipe is not seen.

    A regular file is read and written at a position of the object's own (:meth:`tell`, :meth:`seek`), which begins at
    the file's and does not move that. An interrupted ``recv`` does not move it either. Timeouts do not concern regular
    files.
    """

    def __init__(self, file: FileDescriptorLike, *, closefd: bool = True) -> None:
        if isinstance(file, io.TextIOBase):
            raise TypeError("file_sock() takes a binary file: give it the file's buffer")
        fd = file if isinstance(file, int) else file.fileno()
        # Also keeps the file object.
        close = getattr(file, "close", lambda: os.close(fd))
        kind = os.fstat(fd).st_mode
        self._is_regular = stat.S_ISREG(kind) or stat.S_ISBLK(kind) or stat.S_ISDIR(kind)
        self._file = file
        self._is_in_use = False
        self._position = 0
        if isinstance(file, io.BufferedIOBase) and file.writable():
            file.flush()
        if not self._is_regular:
            self._set_up(fd, close if closefd else None, is_ours=closefd)
            return
        self._position = os.lseek(fd, 0, os.SEEK_CUR) if isinstance(file, int) else file.tell()  # type: ignore[attr-defined]
        self._appends = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND)
        self._timeout_s = None
        self._waiting = set()
        self._was_blocking = False
        self._stays_blocking = False
        self._is_ours = closefd
        self._hold = _Hold(fd, close if closefd else None)

    def recv(self, count: int, /) -> bytes:
        """Read up to ``count`` bytes. Empty at the end.

        Raises:
            SimultaneousError: another coro uses the file.
            ClosedError: the object is closed.
        """
        if not self._is_regular:
            return super().recv(count)
        at = self._position
        data = self._in_thread(lambda fd: os.pread(fd, count, at))
        self._position = at + len(data)
        return data

    def recv_into(self, buffer: WriteableBuffer, /) -> int:
        """Read into a buffer; return the number of bytes, 0 at the end. Raises: as :meth:`recv`."""
        if not self._is_regular:
            return super().recv_into(buffer)
        # The thread of a coro that was interrupted must not write into the caller's buffer any more.
        with memoryview(buffer) as view, view.cast("B") as octets:
            data = self.recv(len(octets))
            octets[: len(data)] = data
        return len(data)

    def send(self, data: ReadableBuffer, /) -> int:
        """Write the data, and return the length of what was written. Raises: as :meth:`recv`."""
        if not self._is_regular:
            return super().send(data)
        at, octets = self._position, bytes(data)
        if self._appends:
            written, self._position = self._in_thread(lambda fd: (os.write(fd, octets), os.lseek(fd, 0, os.SEEK_CUR)))
            return written
        written = self._in_thread(lambda fd: os.pwrite(fd, octets, at))
        self._position = at + written
        return written

    def tell(self) -> int:
        """Return the position in a regular file. Raises OSError for what has none."""
        self._check_regular()
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move the position in a regular file, as :meth:`io.IOBase.seek`, and return it."""
        self._check_regular()
        with self._hold as fd:
            base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: os.fstat(fd).st_size}.get(whence)
        if base is None or base + offset < 0:
            raise ValueError(f"no such position: offset {offset}, whence {whence}")
        self._position = base + offset
        return self._position

    def _check_regular(self) -> None:
        if not self._is_regular:
            raise OSError(errno.ESPIPE, os.strerror(errno.ESPIPE))

    def _in_thread(self, call: Callable[[int], _T]) -> _T:
        """Call in a thread while the coro waits. The descriptor stays open until the thread is through."""

        def use() -> _T:
            with self._hold as fd:
                return call(fd)

        if self._is_in_use:
            raise _errors.SimultaneousError("another coro uses this file")
        if not _core._coro_is_on_loop():
            return use()
        self._is_in_use = True
        try:
            return run_in_thread(use)
        finally:
            self._is_in_use = False
