"""Pipes, terminals and files for coros: :class:`fd_sock` and :class:`file_sock`.

The kernel reports when a pipe, a FIFO or a terminal is ready, and the coro waits for that. A regular file is always
reported as ready, although reading it can block. So the calls on regular files go through the loop's queue of file
calls (``_loop/aio.py``). They use a position that the object keeps, not the file's own, except for writes in append
mode. The object moves its position only when the coro gets the result. So no data is lost if the coro is interrupted
earlier.

    close() --> ClosedError in the coros that wait --> the last user closes the descriptor

So the system cannot reuse the number of a descriptor while a coro waits on it or a call uses it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import stat
import threading
import warnings

from grapeshot import _core
from grapeshot._loop import aio

from . import _aio, _at_once, _errors
from ._countdown import Countdown
from ._socket import wait_for_read, wait_for_write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Self, TypeVar

    from _typeshed import FileDescriptorLike, ReadableBuffer, WriteableBuffer

    _T = TypeVar("_T")


class _CountedFd:
    """A descriptor and a count of its users in all threads.

    After :meth:`close`, the descriptor is closed as soon as it has no users.
    """

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
            self._release_fd()

    def close(self) -> None:
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
            is_last = not self._users
        if is_last:
            self._release_fd()

    def _release_fd(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release()


class fd_sock:  # noqa: N801  # Shrapnel's name
    """Gives a pipe, a FIFO, a terminal or a similar descriptor the methods of a socket.

    ``fd_sock(fd, *, closefd=True)``

    With ``closefd`` the object owns the descriptor, makes it nonblocking, and closes it in :meth:`close`. Otherwise the
    descriptor's mode does not change, because other processes may share the descriptor (standard input, for instance).
    Instead, a flag makes each single system call nonblocking. For kinds of files that do not support the flag, a real
    thread makes the calls.

    A ``recv`` that is interrupted loses no data. After an interrupted ``sendall`` it is not known how much was written.
    Outside of coros, the calls block the thread.
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
        # This comes last: if a call above raises, the object does not own the descriptor.
        self._fd = _CountedFd(fd, release)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"fd={self._fd.fd}"
        return f"<{type(self).__name__} {state}>"

    def __del__(self, _warn: Any = warnings.warn) -> None:
        counted: _CountedFd | None = getattr(self, "_fd", None)
        if counted is not None and not counted.is_closed and self._is_ours:
            _warn(f"unclosed {self!r}", ResourceWarning, source=self)
            counted.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ the descriptor

    @property
    def closed(self) -> bool:
        """Whether the object was closed."""
        return self._fd.is_closed

    def fileno(self) -> int:
        """Return the descriptor, or -1 after :meth:`close`."""
        return -1 if self.closed else self._fd.fd

    def close(self) -> None:
        """Close the object. Coros that wait on it get :class:`ClosedError`. A second call does nothing."""
        if self.closed:
            return
        self._fd.close()
        self._end_waits(list(self._waiting))

    def detach(self) -> int:
        """Close the object but not the descriptor, and return the descriptor, which the caller then owns.

        The descriptor has the same blocking mode again as before this object was made.
        """
        if self.closed:
            raise _errors.ClosedError("the file is closed")
        fd, self._fd._release = self._fd.fd, None
        if self._is_ours and self._was_blocking:
            os.set_blocking(fd, True)
        self.close()
        return fd

    def settimeout(self, timeout: float | None, /) -> None:
        """Limit each call to ``timeout`` seconds; None means no limit.

        With 0, a call that would have to wait raises BlockingIOError.
        """
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"the timeout must be None, or a number of seconds not below 0, got {timeout!r}")
        self._timeout_s = timeout

    def gettimeout(self) -> float | None:
        """Return the timeout in seconds that :meth:`settimeout` has set, or None."""
        return self._timeout_s

    # ------------------------------------------------------------------ reading and writing

    def recv(self, count: int, /) -> bytes:
        """Return the data that has arrived, at most ``count`` bytes; wait if there is none. Return b"" at the end.

        Raises:
            TimeoutError: no data came before the timeout.
            SimultaneousError: another coro is reading.
            ClosedError: the object is closed, or was closed during the wait.
        """
        if count <= 0:
            # With such a count, os.read returns b"" or raises OSError at once.
            return self._repeat(wait_for_read, lambda fd: os.read(fd, count))
        return self._repeat(
            wait_for_read, lambda fd: os.read(fd, count), lambda fd, wait: _at_once.read(fd, count, wait)
        )

    def recv_into(self, buffer: WriteableBuffer, /) -> int:
        """Read into a buffer; return the number of bytes, 0 at the end of the stream.

        Raises the same exceptions as :meth:`recv`.
        """
        with memoryview(buffer) as view, view.cast("B") as octets:
            data = self.recv(len(octets)) if self._stays_blocking else None
            if data is None:
                return self._repeat(wait_for_read, lambda fd: os.readv(fd, [octets]))
            octets[: len(data)] = data
        return len(data)

    def send(self, data: ReadableBuffer, /) -> int:
        """Write as much of the data as there is room for; return the number of bytes. Waits until there is some room.

        Raises the same exceptions as :meth:`recv`.
        """
        return self._send(data, Countdown(self._timeout_s))

    def _send(self, data: ReadableBuffer, left_s: Countdown) -> int:
        with memoryview(data) as view, view.cast("B") as octets:
            return self._repeat(
                wait_for_write,
                lambda fd: os.write(fd, octets),
                lambda fd, wait: _at_once.write(fd, octets, wait),
                left_s,
            )

    def sendall(self, data: ReadableBuffer, /) -> None:
        """Write all of the data. After an error it is not known how much was written.

        Raises the same exceptions as :meth:`recv`.
        """
        left_s = Countdown(self._timeout_s)
        with memoryview(data) as view, view.cast("B") as left:
            at = 0
            while at < len(left):
                at += self._send(left[at:], left_s)

    def write(self, data: ReadableBuffer, /) -> int:
        """Write all of the data, and return its length in bytes. Raises the same exceptions as :meth:`sendall`."""
        self.sendall(data)
        with memoryview(data) as view:
            return view.nbytes

    def _repeat(
        self,
        wait: Callable[..., None],
        call: Callable[[int], _T],
        call_at_once: Callable[[int, Callable[[], object]], _T] | None = None,
        left_s: Countdown | None = None,
    ) -> _T:
        """Repeat ``call(fd)`` until it succeeds. Each time it would block, call ``wait``.

        For a descriptor that stays in blocking mode, ``call_at_once`` (if given) is called once instead of ``call``. It
        repeats its system call itself. The timeout starts now, unless ``left_s`` is given.
        """
        with self._fd as fd:
            _core._coro_act()
            left_s = left_s or Countdown(self._timeout_s)
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
        co = _core._coro_current_or_none()
        if co is None:
            self._wait_here(wait, fd, left_s)
            return
        # Add the coro before testing `closed`. If another thread calls close(), either close() finds the coro, or the
        # test finds the object closed.
        self._waiting.add(co)
        try:
            self._wait_here(wait, fd, left_s)
        finally:
            self._waiting.discard(co)

    def _wait_here(self, wait: Callable[..., None], fd: int, left_s: float | None) -> None:
        if self.closed:  # closed by another coro while this one yielded, or by another thread
            raise _errors.ClosedError("the file is closed")
        try:
            wait(fd, left_s)
        except TimeoutError:
            if self._timeout_s == 0:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
            raise

    def _end_waits(self, coros: list[Any]) -> None:
        """Raise ClosedError in those of the coros that still wait."""
        elsewhere: dict[Any, list[Any]] = {}
        for co in coros:
            if co not in self._waiting:
                continue
            try:
                co._throw(_errors.ClosedError("the descriptor was closed while a coro waited on it"))
            except _errors.DeadCoroutine:
                pass
            except _errors.ScheduleError:  # the coro belongs to another thread, which must raise the exception
                elsewhere.setdefault(co._loop, []).append(co)
        for loop, others in elsewhere.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._end_waits, others)


class file_sock(fd_sock):  # noqa: N801
    """Gives a file the methods of a socket. Other coros run while the disk is read or written.

    ``file_sock(file, *, closefd=True)``

    ``file`` is a binary file object or a descriptor. With ``closefd``, :meth:`close` closes it. If a file object has a
    write buffer, the buffer is flushed when the ``file_sock`` is made. Block devices and directories are treated like
    regular files. Files of all other kinds work as in :class:`fd_sock`. Data that a file object has already read from a
    pipe into its buffer is not seen.

    The object has its own position in a regular file (:meth:`tell`, :meth:`seek`), which starts at the file's position.
    The file's position then stays where it is, unless the file is in append mode and the object writes. An interrupted
    ``recv`` does not move the object's position. Timeouts have no effect on regular files.
    """

    def __init__(self, file: FileDescriptorLike, *, closefd: bool = True) -> None:
        if isinstance(file, io.TextIOBase):
            raise TypeError(f"file_sock() needs a binary file, got the text file {file!r}: pass its .buffer")
        fd = file if isinstance(file, int) else file.fileno()
        # The bound method also keeps the file object alive.
        close = getattr(file, "close", lambda: os.close(fd))
        kind = os.fstat(fd).st_mode
        self._is_regular = stat.S_ISREG(kind) or stat.S_ISBLK(kind) or stat.S_ISDIR(kind)
        self._file = file
        # Held by the coro that uses the file. Nobody waits for this lock.
        self._in_use = threading.Lock()
        # A lock that is held while a call is under way. Both coros and threads can wait for this lock.
        self._under_way: Any = None
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
        self._fd = _CountedFd(fd, close if closefd else None)

    def recv(self, count: int, /) -> bytes:
        """Return up to ``count`` bytes, or b"" at the end of the file.

        Raises:
            SimultaneousError: another coro is using the file.
            ClosedError: the object is closed.
        """
        if not self._is_regular:
            return super().recv(count)
        if count < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

        def read(fd: int, on_end: Callable[[Any], object]) -> bytes:
            at = self._position
            data = _aio.read(fd, count, at, on_end)
            self._position = at + len(data)
            return data

        return self._use(read)

    def recv_into(self, buffer: WriteableBuffer, /) -> int:
        """Read into a buffer; return the number of bytes, 0 at the end. Raises the same exceptions as :meth:`recv`."""
        if not self._is_regular:
            return super().recv_into(buffer)
        # If the coro is interrupted, the call goes on. So the call must not write directly into the caller's buffer.
        with memoryview(buffer) as view, view.cast("B") as octets:
            data = self.recv(len(octets))
            octets[: len(data)] = data
        return len(data)

    def _send(self, data: ReadableBuffer, left_s: Countdown) -> int:
        if not self._is_regular:
            return super()._send(data, left_s)
        octets = aio.octets(data)

        def write(fd: int, on_end: Callable[[Any], object]) -> int:
            at = aio.OWN_POSITION if self._appends else self._position
            written = _aio.write(fd, octets, at, on_end)
            if not self._appends:
                self._position = at + written
            elif not self.closed:
                self._position = os.lseek(fd, 0, os.SEEK_CUR)
            return written

        return self._use(write)

    def tell(self) -> int:
        """Return the position in a regular file. Raises OSError for a pipe or terminal, which has none."""
        self._check_regular()
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move the position in a regular file, like :meth:`io.IOBase.seek`, and return it.

        Raises:
            OSError: this is a pipe, a terminal or the like, which has no position.
            ValueError: the position would be negative, or ``whence`` is unknown.
        """
        self._check_regular()
        with self._fd as fd:
            base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: os.fstat(fd).st_size}.get(whence)
        if base is None or base + offset < 0:
            raise ValueError(f"no such position in the file: offset {offset}, whence {whence}")
        self._position = base + offset
        return self._position

    def _check_regular(self) -> None:
        if not self._is_regular:
            raise OSError(errno.ESPIPE, os.strerror(errno.ESPIPE))

    def _use(self, call: Callable[[int, Callable[[Any], object]], _T]) -> _T:
        """Make a call with the descriptor, which stays open until the call has ended, even after an interruption."""
        if not self._in_use.acquire(blocking=False):
            raise _errors.SimultaneousError("another coro is using this file: one coro at a time may use it")
        try:
            self._wait_for_interrupted()
            fd = self._fd.__enter__()
            ended = self._under_way = _core.thread_lock()
            ended.acquire()

            def on_end(_: object) -> None:
                ended.release()
                self._fd.__exit__()

            return call(fd, on_end)
        finally:
            self._in_use.release()

    def _wait_for_interrupted(self) -> None:
        """Wait until the call of an interrupted coro has ended. Otherwise that call could write after the next one."""
        if self._under_way is not None:
            self._under_way.acquire()
            self._under_way = None
