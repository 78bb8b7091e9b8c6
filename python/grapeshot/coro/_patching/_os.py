"""The part ``os`` of :func:`grapeshot.coro.patch`: I/O on pipes, sockets and terminals, and waits for children.

Calls for descriptors in nonblocking mode and for regular files are passed to the original functions. (The descriptor of
a patched socket without a timeout counts as blocking, although it is nonblocking.)
"""

from __future__ import annotations

import errno
import os
import sys
from operator import index

from grapeshot import _core
from grapeshot.coro import _at_once

from . import _handles, _originals, _waits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

_read, _write, _readv = os.read, os.write, os.readv
_readinto: Any = getattr(os, "readinto", None)
_writev, _sendfile = os.writev, os.sendfile
_system = os.system
_waitpid, _wait3, _wait4, _waitid = os.waitpid, os.wait3, os.wait4, os.waitid
_WNOWAIT, _WEXITED, _WSTOPPED, _WCONTINUED = os.WNOWAIT, os.WEXITED, os.WSTOPPED, os.WCONTINUED
# The largest number of buffers that the system accepts in one call.
_MAX_BUFFERS = os.sysconf("SC_IOV_MAX")


def _check(function: Callable[..., Any], *args: Any) -> None:
    """Raise the original's error if an argument after the descriptor is wrong.

    To find out, call the original with an invalid descriptor.
    """
    try:
        function(-1, *args)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise


def _number(fd: Any) -> int:
    return fd if type(fd) is int else index(fd)


def _until_possible(call: Callable[..., Any], fd: int, mask: int, *args: Any) -> Any:
    """Call the original. If the descriptor is nonblocking only because its socket is patched, wait and repeat the call.

    This is for calls outside of coros, so the wait blocks the thread.
    """
    while True:
        try:
            return call(fd, *args)
        except BlockingIOError:
            if not _waits.is_blocking_socket(fd):
                raise
        _waits.block_thread(fd, mask)


def read(fd: int, length: int, /) -> bytes:
    """Read from a file descriptor. Other coros run while the call waits for data of a pipe, socket or terminal."""
    fd, length = _number(fd), _number(length)
    if length <= 0 or not _waits.can_wait() or not _waits.may_block(fd):
        return _until_possible(_read, fd, _waits.READABLE, length)  # type: ignore[no-any-return]
    if length > sys.maxsize:
        _check(_read, length)
    return read_as_coro(fd, length)


def read_as_coro(fd: int, length: int) -> bytes:
    """Read at least one byte from a descriptor that may block."""
    _waits.act()
    return _at_once.read(fd, length, _waits.wait_to_read(fd))


def read_into_as_coro(fd: int, octets: memoryview) -> int:
    """Like :func:`read_as_coro`, but read into a buffer, which must not be empty; return the number of bytes."""
    return _scatter(read_as_coro(fd, len(octets)), [octets])


def readv(fd: int, buffers: Sequence[Any], /) -> int:
    """Read from a file descriptor into mutable bytes-like objects. Other coros run while the call waits."""
    fd = _number(fd)
    if _waits.can_wait() and _waits.may_block(fd):
        _check(_readv, buffers)
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        length = sum(map(len, views))
        if length and len(views) <= _MAX_BUFFERS:
            return _scatter(read_as_coro(fd, length), views)
    return _until_possible(_readv, fd, _waits.READABLE, buffers)  # type: ignore[no-any-return]


def _scatter(data: bytes, views: list[memoryview]) -> int:
    at = 0
    for view in views:
        part = data[at : at + len(view)]
        view[: len(part)] = part
        at += len(part)
    return at


def readinto(fd: int, buffer: Any, /) -> int:
    """Read into a buffer from a file descriptor. Other coros run while the call waits."""
    fd = _number(fd)
    if _waits.can_wait() and _waits.may_block(fd):
        _check(_readinto, buffer)
        with memoryview(buffer) as view, view.cast("B") as octets:
            if len(octets):
                return read_into_as_coro(fd, octets)
    return _until_possible(_readinto, fd, _waits.READABLE, buffer)  # type: ignore[no-any-return]


def write(fd: int, data: Any, /) -> int:
    """Write all of the bytes to a file descriptor. Other coros run while the call waits for room."""
    fd = _number(fd)
    if not _waits.can_wait() or not _waits.may_block(fd):
        return _until_possible(_write, fd, _waits.WRITABLE, data)  # type: ignore[no-any-return]
    if type(data) is not bytes:
        _check(_write, data)
    return write_all(fd, data)


def writev(fd: int, buffers: Sequence[Any], /) -> int:
    """Write all of the buffers to a file descriptor. Other coros run while the call waits for room."""
    fd = _number(fd)
    if not _waits.can_wait() or not _waits.may_block(fd):
        return _until_possible(_writev, fd, _waits.WRITABLE, buffers)  # type: ignore[no-any-return]
    _check(_writev, buffers)
    if not 0 < len(buffers) <= _MAX_BUFFERS:
        return _writev(fd, buffers)
    return write(fd, b"".join(buffers))


def write_all(fd: int, data: Any) -> int:
    """Write all of the bytes to a descriptor that may block."""
    with memoryview(data) as view, view.cast("B") as octets:
        return _write_all(fd, octets) if octets.nbytes else _write(fd, octets)


def _write_all(fd: int, data: memoryview) -> int:
    wait = _waits.wait_to_write(fd)
    _waits.act()
    written = _at_once.write(fd, data, wait)
    while written < len(data):
        try:
            written += _at_once.write(fd, data[written:], wait)
        except OSError:
            # Report what was written. The program's next call gets the error.
            break
    return written


def sendfile(out_fd: int, in_fd: int, offset: Any, count: int) -> int:
    """Copy bytes from a file to a descriptor. Other coros run while the call waits for room."""
    out_fd = _number(out_fd)
    if not _waits.can_wait() or not _waits.may_block(out_fd):
        return _until_possible(_sendfile, out_fd, _waits.WRITABLE, in_fd, offset, count)  # type: ignore[no-any-return]
    _check(_sendfile, in_fd, offset, count)
    _waits.act()
    while True:
        if os.get_blocking(out_fd):
            # sendfile() has no flag against blocking, so the call is made in a real thread.
            _waits.wait_for_descriptor(out_fd, _waits.WRITABLE, None)
            return _handles.call_in_real_thread(lambda: _sendfile(out_fd, in_fd, offset, count))  # type: ignore[no-any-return]
        try:
            return _sendfile(out_fd, in_fd, offset, count)
        except BlockingIOError:
            _waits.wait_for_descriptor(out_fd, _waits.WRITABLE, None)


def write_some(fd: int, data: Any) -> int:
    """Wait until there is some room in a descriptor that may block, and write as much as fits."""
    with memoryview(data) as view, view.cast("B") as octets:
        _waits.act()
        return _at_once.write(fd, octets, _waits.wait_to_write(fd)) if octets.nbytes else _write(fd, octets)


# ---------------------------------------------------------------- children


def _wait_for_child(kind: int, ident: int, options: int) -> None:
    """Wait until a child has a state that ``waitid`` would return. The caller can still fetch that state afterwards."""
    states = options & (_WSTOPPED | _WCONTINUED | _WEXITED)
    if kind == os.P_PID and states == _WEXITED:
        try:
            watch = _core._open_child_watch(ident)
        except OSError:
            pass  # usually because the child does not exist any more
        else:
            try:
                _waits.wait_for_descriptor(watch, _waits.READABLE, None)
            finally:
                os.close(watch)
            return

    def wait() -> None:
        # With WNOWAIT the call does not fetch the state. Errors are ignored: the caller's next call gets them, too.
        try:
            _waitid(kind, ident, states | _WNOWAIT)
        except OSError:
            pass

    _handles.run_in_real_thread(wait)


def _waitid_target(pid: int) -> tuple[int, int]:
    if pid > 0:
        return os.P_PID, pid
    if pid == -1:
        return os.P_ALL, 0
    return os.P_PGID, -pid or os.getpgrp()


def _until_there(call: Callable[[int], Any], pid: int, options: int) -> Any:
    """Repeat a call of ``waitpid``, ``wait3`` or ``wait4`` until it returns a child."""
    while True:
        result = call(options | os.WNOHANG)
        if result[0]:
            return result
        states = _WEXITED
        states |= _WSTOPPED if options & os.WUNTRACED else 0
        states |= _WCONTINUED if options & os.WCONTINUED else 0
        _wait_for_child(*_waitid_target(pid), states)


def _is_wait(options: object) -> bool:
    return isinstance(options, int) and not options & os.WNOHANG and _waits.can_wait()


def waitpid(pid: int, options: int, /) -> tuple[int, int]:
    """Wait for completion of a given child process. Other coros run while the call waits."""
    if not _is_wait(options) or not isinstance(pid, int):
        return _waitpid(pid, options)
    return _until_there(lambda options: _waitpid(pid, options), pid, options)  # type: ignore[no-any-return]


def wait() -> tuple[int, int]:
    """Wait for completion of a child process. Other coros run while the call waits."""
    return waitpid(-1, 0)


def wait3(options: int) -> Any:
    """Wait for completion of a child process. Other coros run while the call waits."""
    if not _is_wait(options):
        return _wait3(options)
    return _until_there(_wait3, -1, options)


def wait4(pid: int, options: int) -> Any:
    """Wait for completion of a specific child process. Other coros run while the call waits."""
    if not _is_wait(options) or not isinstance(pid, int):
        return _wait4(pid, options)
    return _until_there(lambda options: _wait4(pid, options), pid, options)


def waitid(idtype: int, ident: int, options: int, /) -> Any:
    """Wait for the status of one or more child processes. Other coros run while the call waits."""
    if not _is_wait(options):
        return _waitid(idtype, ident, options)
    while True:
        result = _waitid(idtype, ident, options | os.WNOHANG)
        if result is not None:
            return result
        _wait_for_child(idtype, ident, options)


def system(command: Any) -> int:
    """Execute the command in a subshell. Other coros run while the call waits."""
    if not _waits.can_wait():
        return _system(command)
    return _handles.call_in_real_thread(lambda: _system(command))  # type: ignore[no-any-return]


def patch() -> None:
    """Replace the names in ``os``. The module ``posix`` is not patched."""
    for function in (read, readv, readinto, write, writev, sendfile, waitpid, wait, wait3, wait4, waitid, system):
        if hasattr(os, function.__name__):
            _originals.replace("os", function.__name__, function)
