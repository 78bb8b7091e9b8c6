"""Reads and writes on descriptors that must stay in blocking mode, because other processes may share them.

A read can block even though the descriptor was ready a moment ago: another process may have taken the data. So each
system call here has a flag that makes only this call nonblocking. If the call would block, it is repeated after a wait.
No system has such a flag for all kinds of files. A file for which there is no flag is handled in another way: once it
is ready, a real thread reads or writes it for a coro. (Where no coro can wait, the calling thread reads or writes it.
:func:`write_now` does not wait until a file is ready, and always writes in the calling thread.)
"""

from __future__ import annotations

import _thread
import errno
import os
import select
import stat

from grapeshot import _core
from grapeshot._loop.locks import real_rlock

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
# The most bytes to write in one call if the call can block. If the call runs in a real thread and the coro is
# interrupted, the caller does not learn how many of these bytes were written.
_PIECE_LEN = 4096


class _ThreadCall:
    """A call that runs in a real thread while coros wait for it."""

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
        """Wait until the call has ended; return its result or raise its exception."""
        self._finished.acquire()
        self._finished.release()
        if self._error is not None:
            raise self._error
        return self._value


class _ReadCall(_ThreadCall):
    """A call that takes data from a file. If the waiting coro is interrupted, the next reader gets the data."""

    def __init__(self, fd: int, call: Callable[[], Any]) -> None:
        self._identity = _identity_of(fd)
        self._mark = _mark(fd)
        super().__init__(call)

    def is_of(self, fd: int) -> bool:
        """Whether the descriptor still refers to the open file of this call.

        False if a parent process made the call.
        """
        return self._identity == _identity_of(fd) and (self._mark is None or _is_marked(self._mark, fd))

    def has_failed(self) -> bool:
        return self._error is not None

    def take(self, length: int | None) -> Any:
        """Return the first ``length`` bytes of the result, and keep the rest. With None, return the whole result."""
        value = self._value
        self._value = None if length is None else value[length:]
        return value if length is None else value[:length]

    def is_used_up(self) -> bool:
        return not self._value


# descriptor -> its call: one that still runs in a real thread, or one whose result was not fully taken yet
_pending_reads: dict[int, _ReadCall] = {}
# Held while this table or a result in it is changed. Reentrant, because a thread that holds it may run a finalizer that
# reads from a descriptor.
_changing = real_rlock()


def _identity_of(fd: int) -> tuple[int, ...]:
    status = _fstat(fd)
    return _getpid(), status.st_dev, status.st_ino, status.st_rdev


def _mark(fd: int) -> Any:
    """Return an epoll object with ``fd`` registered, if ``fd`` is a character device and epoll accepts it; else None.

    ``fstat`` returns the same identity for the masters of all pseudo-terminals. An epoll object tells them apart,
    because it refers to the open file itself. It does not keep the file open.
    """
    if _Epoll is None or not stat.S_ISCHR(_fstat(fd).st_mode):
        return None
    try:
        mark = _Epoll()
        mark.register(fd, 0)
    except OSError:
        # epoll does not support this device, or the process has too many descriptors.
        return None
    return mark


def _is_marked(mark: Any, fd: int) -> bool:
    try:
        mark.register(fd, 0)
    except FileExistsError:
        return True
    return False


def _pending_read_of(fd: int) -> _ReadCall | None:
    pending = _pending_reads.get(fd)
    if pending is not None and not pending.is_of(fd):
        # The number now refers to another file, or this is the child of a fork.
        _forget(fd, pending)
        return None
    return pending


def _forget(fd: int, pending: _ReadCall) -> None:
    with _changing:
        if _pending_reads.get(fd) is pending:
            del _pending_reads[fd]


def _read_in_thread(fd: int, call: Callable[[], Any], length: int | None) -> Any:
    while True:
        with _changing:
            pending = _pending_read_of(fd)
            if pending is None:
                pending = _pending_reads[fd] = _ReadCall(fd, call)
        try:
            pending.wait()
        except BaseException:
            # Either the call has failed, or the wait was interrupted. In the second case the next reader gets the data.
            if pending.has_failed():
                _forget(fd, pending)
            raise
        with _changing:
            if _pending_reads.get(fd) is pending:
                value = pending.take(length)
                if pending.is_used_up():
                    del _pending_reads[fd]
                return value
        # Another coro took all of the data: start a new call.


def is_ready(fd: int, mask: int) -> bool:
    """Whether the descriptor is ready now, or has an error that a call would report."""
    poll = _poll()
    poll.register(fd, mask)
    return bool(poll.poll(0))


def accept(sock: Any) -> Any:
    """Accept a connection in a real thread; return None if no connection is waiting.

    This is for a socket in blocking mode on which other processes accept connections, too: a call in the loop's own
    thread could block.
    """
    from ._socket_base import CoroSocket

    fd = sock.fileno()
    if _pending_read_of(fd) is None and not is_ready(fd, select.POLLIN):
        return None
    return _read_in_thread(fd, lambda: CoroSocket.accept(sock), None)


def read(fd: int, length: int, wait: Callable[[], object]) -> bytes:
    """Return 1 to ``length`` bytes, or b"" at the end. ``wait()`` must wait until the file is readable."""
    while not _pending_reads or _pending_read_of(fd) is None:
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
    return _read_in_thread(fd, lambda: _read(fd, length), length)  # type: ignore[no-any-return]


def write_now(fd: int, data: Any) -> int:
    """Write as much as fits without waiting; return the number of bytes. Raises BlockingIOError if there is no room."""
    written = _write_now(fd, data)
    if written is None:
        if not is_ready(fd, select.POLLOUT):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        written = _write(fd, memoryview(data)[:_PIECE_LEN])
    return written


def write(fd: int, data: memoryview, wait: Callable[[], object]) -> int:
    """Write some of the data; return the number of bytes written. ``wait()`` must wait until there is room."""
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
    return _ThreadCall(lambda: _write(fd, piece)).wait()  # type: ignore[no-any-return]
