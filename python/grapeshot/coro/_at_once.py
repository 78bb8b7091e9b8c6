"""Reads and writes of descriptors in blocking mode that other processes may share.

A descriptor that was found ready may block all the same: another process has taken what was there. So the calls are
nonblocking by themselves, and are repeated after each wait. The few kinds of files that have no such call are read and
written by a real thread, once they are ready.
"""

from __future__ import annotations

import _thread
import errno
import os
import select
import stat

from grapeshot import _core

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_read_now = _core._coro_read_now
_write_now = _core._coro_write_now
_start_real = _thread.start_new_thread
_read, _write, _fstat, _getpid = os.read, os.write, os.fstat, os.getpid
_poll = select.poll
_Epoll: Any = getattr(select, "epoll", None)
# The longest write of a real thread: what is not written yet when its coro is interrupted is lost to the caller.
_PIECE_LEN = 4096


class _RealThread:
    """A call in a real thread, for which coros wait."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._value: Any = None
        self._error: BaseException | None = None
        self._finished = _core.thread_lock()
        self._finished.acquire()
        _start_real(self._run, ())

    def _run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:
            self._error = error
        finally:
            self._finished.release()

    def wait(self) -> Any:
        """Wait for the end, and return or raise what the call has."""
        self._finished.acquire()
        self._finished.release()
        if self._error is not None:
            raise self._error
        return self._value


class _Taking(_RealThread):
    """A call that takes something from a file. What it has for a coro that was interrupted belongs to the next one."""

    def __init__(self, fd: int, call: Callable[[], Any]) -> None:
        self._identity = _identity_of(fd)
        self._mark = _mark(fd)
        super().__init__(call)

    def is_of(self, fd: int) -> bool:
        """Whether the number still is that of the same open file, in the same process."""
        return self._identity == _identity_of(fd) and (self._mark is None or _is_marked(self._mark, fd))

    def take(self, length: int | None) -> Any:
        """Return what there is, of bytes at most ``length``."""
        value = self._value
        self._value = None if length is None else value[length:]
        return value if length is None else value[:length]

    def is_used_up(self) -> bool:
        return not self._value


# descriptor -> the call of a real thread that goes on, or that has left something
_takings: dict[int, _Taking] = {}


def _identity_of(fd: int) -> tuple[int, ...]:
    status = _fstat(fd)
    return _getpid(), status.st_dev, status.st_ino, status.st_rdev


def _mark(fd: int) -> Any:
    """Return an epoll object that has a character device; None for others, and where that is not possible.

    All masters of pseudo-terminals have one identity. An epoll object knows the open file itself, and does not keep it
    open.
    """
    if _Epoll is None or not stat.S_ISCHR(_fstat(fd).st_mode):
        return None
    try:
        mark = _Epoll()
        mark.register(fd, 0)
    except OSError:
        # Devices that nobody can wait for, or too many descriptors.
        return None
    return mark


def _is_marked(mark: Any, fd: int) -> bool:
    try:
        mark.register(fd, 0)
    except FileExistsError:
        return True
    return False


def _taking_of(fd: int) -> _Taking | None:
    taking = _takings.get(fd)
    if taking is not None and not taking.is_of(fd):
        # The number has got another file, or this is the child of a fork.
        del _takings[fd]
        return None
    return taking


def _take_in_thread(fd: int, call: Callable[[], Any], length: int | None) -> Any:
    while True:
        taking = _taking_of(fd)
        if taking is None:
            taking = _takings[fd] = _Taking(fd, call)
        try:
            taking.wait()
        except OSError:
            if _takings.get(fd) is taking:
                del _takings[fd]
            raise
        if _takings.get(fd) is taking:
            value = taking.take(length)
            if taking.is_used_up():
                del _takings[fd]
            return value
        # Another coro has taken all of it.


def is_ready(fd: int, mask: int) -> bool:
    """Whether the descriptor is ready now, or a call would fail."""
    poll = _poll()
    poll.register(fd, mask)
    return bool(poll.poll(0))


def accept(sock: Any) -> Any:
    """Accept a connection in a real thread: other processes accept from the same socket, which is in blocking mode.

    Return None if there is no connection.
    """
    from ._socket_base import CoroSocket

    fd = sock.fileno()
    if _taking_of(fd) is None and not is_ready(fd, select.POLLIN):
        return None
    return _take_in_thread(fd, lambda: CoroSocket.accept(sock), None)


def read(fd: int, length: int, wait: Callable[[], object]) -> bytes:
    """Read up to ``length`` bytes, at least 1. ``wait`` waits until the descriptor is ready to be read."""
    while not _takings or _taking_of(fd) is None:
        try:
            data = _read_now(fd, length)
        except BlockingIOError:
            wait()
            continue
        if data is not None:
            return data
        if is_ready(fd, select.POLLIN):
            break
        wait()
    if not _core._coro_can_wait():
        return _read(fd, length)
    return _take_in_thread(fd, lambda: _read(fd, length), length)  # type: ignore[no-any-return]


def write_now(fd: int, data: Any) -> int:
    """Write what is possible at once; return the number of bytes. Raises BlockingIOError if there is no room."""
    written = _write_now(fd, data)
    if written is None:
        if not is_ready(fd, select.POLLOUT):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        written = _write(fd, memoryview(data)[:_PIECE_LEN])
    return written


def write(fd: int, data: memoryview, wait: Callable[[], object]) -> int:
    """Write the front of the data; return the number of bytes. ``wait`` waits until there is room."""
    while True:
        try:
            written = _write_now(fd, data)
        except BlockingIOError:
            wait()
            continue
        if written is not None:
            return written
        if is_ready(fd, select.POLLOUT):
            break
        wait()
    piece = bytes(data[:_PIECE_LEN])
    if not _core._coro_can_wait():
        return _write(fd, piece)
    return _RealThread(lambda: _write(fd, piece)).wait()  # type: ignore[no-any-return]
