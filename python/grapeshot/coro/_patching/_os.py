"""``os`` of :func:`grapeshot.coro.install`: reads and writes of pipes, sockets and terminals, and waits for children.

A descriptor in nonblocking mode, and a regular file, is left to the original function.
"""

from __future__ import annotations

import errno
import os

from . import _handles, _originals, _waits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

_read, _write, _readv = os.read, os.write, os.readv
_readinto: Any = getattr(os, "readinto", None)
_writev, _pwritev = os.writev, os.pwritev
_system = os.system
_waitpid, _wait3, _wait4, _waitid = os.waitpid, os.wait3, os.wait4, os.waitid
_WNOWAIT, _WEXITED, _WSTOPPED, _WCONTINUED = os.WNOWAIT, os.WEXITED, os.WSTOPPED, os.WCONTINUED
# The system writes this much to a pipe that is writable without blocking.
_ATOMIC_LEN = 4096


def read(fd: int, length: int, /) -> bytes:
    """Read from a file descriptor. Other coros run while a pipe, a socket or a terminal has nothing."""
    if length and _waits.can_wait() and _waits.may_block(fd):
        _waits.wait_until_ready(fd, _waits.READABLE)
    return _read(fd, length)


def readv(fd: int, buffers: Sequence[Any], /) -> int:
    """Read from a file descriptor into an iterable of mutable bytes-like objects, as :func:`read`."""
    if _waits.can_wait() and _waits.may_block(fd):
        _waits.wait_until_ready(fd, _waits.READABLE)
    return _readv(fd, buffers)


def readinto(fd: int, buffer: Any, /) -> int:
    """Read into a buffer from a file descriptor, as :func:`read`."""
    if _waits.can_wait() and _waits.may_block(fd):
        _waits.wait_until_ready(fd, _waits.READABLE)
    return _readinto(fd, buffer)  # type: ignore[no-any-return]


def write(fd: int, data: Any, /) -> int:
    """Write all of the bytes to a file descriptor. Other coros run while a pipe, a socket or a terminal is full."""
    if not _waits.can_wait() or isinstance(data, str) or not _waits.may_block(fd):
        return _write(fd, data)
    with memoryview(data) as view, view.cast("B") as octets:
        return _write_all(fd, octets) if octets.nbytes else _write(fd, octets)


def writev(fd: int, buffers: Sequence[Any], /) -> int:
    """Write the buffers to a file descriptor, as :func:`write`."""
    if not _waits.can_wait() or not _waits.may_block(fd):
        return _writev(fd, buffers)
    return write(fd, b"".join(buffers))


def _write_all(fd: int, data: memoryview) -> int:
    written = 0
    _waits.act()
    while written < len(data):
        try:
            written += _write_now(fd, data[written:])
        except BlockingIOError:
            _waits.wait_for_descriptor(fd, _waits.WRITABLE, None)
        except OSError:
            if written:
                # The next call finds the error again.
                break
            raise
    return written


def _write_now(fd: int, data: memoryview) -> int:
    """Write what is possible at once. Raises BlockingIOError if that is nothing."""
    try:
        return _pwritev(fd, (data,), -1, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ESPIPE, errno.EINVAL):
            raise
    # A terminal, or an older kernel.
    if not _waits.is_ready(fd, _waits.WRITABLE):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return _write(fd, data[:_ATOMIC_LEN])


# ---------------------------------------------------------------- children


def _wait_for_child(kind: int, ident: int, options: int) -> None:
    """Wait until a child has a state that ``waitid`` would return; it stays to be fetched."""
    states = options & (_WSTOPPED | _WCONTINUED | _WEXITED)
    if kind == os.P_PID and states == _WEXITED:
        try:
            pidfd = os.pidfd_open(ident)
        except OSError:
            # An old kernel, or the child is gone, or somebody else's.
            pass
        else:
            try:
                _waits.wait_for_descriptor(pidfd, _waits.READABLE, None)
            finally:
                os.close(pidfd)
            return

    def wait() -> None:
        # It takes nothing. An error comes to the caller at its next call.
        try:
            _waitid(kind, ident, states | _WNOWAIT)
        except OSError:
            pass

    _handles.run_in_real_thread(wait)


def _which(pid: int) -> tuple[int, int]:
    if pid > 0:
        return os.P_PID, pid
    if pid == -1:
        return os.P_ALL, 0
    return os.P_PGID, -pid or os.getpgrp()


def _until_there(call: Callable[[int], Any], pid: int, options: int) -> Any:
    """Repeat a call of the family of ``waitpid`` until it returns a child."""
    while True:
        result = call(options | os.WNOHANG)
        if result[0]:
            return result
        states = _WEXITED
        states |= _WSTOPPED if options & os.WUNTRACED else 0
        states |= _WCONTINUED if options & os.WCONTINUED else 0
        _wait_for_child(*_which(pid), states)


def _is_wait(options: object) -> bool:
    return isinstance(options, int) and not options & os.WNOHANG and _waits.can_wait()


def waitpid(pid: int, options: int, /) -> tuple[int, int]:
    """Wait for completion of a given child process. Other coros run meanwhile."""
    if not _is_wait(options) or not isinstance(pid, int):
        return _waitpid(pid, options)
    return _until_there(lambda options: _waitpid(pid, options), pid, options)  # type: ignore[no-any-return]


def wait() -> tuple[int, int]:
    """Wait for completion of a child process. Other coros run meanwhile."""
    return waitpid(-1, 0)


def wait3(options: int) -> Any:
    """Wait for completion of a child process. Other coros run meanwhile."""
    if not _is_wait(options):
        return _wait3(options)
    return _until_there(_wait3, -1, options)


def wait4(pid: int, options: int) -> Any:
    """Wait for completion of a specific child process. Other coros run meanwhile."""
    if not _is_wait(options) or not isinstance(pid, int):
        return _wait4(pid, options)
    return _until_there(lambda options: _wait4(pid, options), pid, options)


def waitid(idtype: int, ident: int, options: int, /) -> Any:
    """Wait for the status of one or more child processes. Other coros run meanwhile."""
    if not _is_wait(options):
        return _waitid(idtype, ident, options)
    while True:
        result = _waitid(idtype, ident, options | os.WNOHANG)
        if result is not None:
            return result
        _wait_for_child(idtype, ident, options)


def system(command: Any) -> int:
    """Execute the command in a subshell. Other coros run meanwhile."""
    if not _waits.can_wait():
        return _system(command)
    outcome: list[Any] = []

    def call() -> None:
        try:
            outcome.append(_system(command))
        except BaseException as error:
            outcome.append(error)

    _handles.run_in_real_thread(call)
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]  # type: ignore[no-any-return]


def patch() -> None:
    """Replace the names. ``posix`` stays as it is."""
    for function in (read, readv, readinto, write, writev, waitpid, wait, wait3, wait4, waitid, system):
        if hasattr(os, function.__name__):
            _originals.replace("os", function.__name__, function)
