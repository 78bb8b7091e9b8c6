"""The common base of all sockets for coros: the native type, and in Python the methods that need not be fast."""

from __future__ import annotations

import _socket
import contextlib
import errno
import io
import os
import socket
import sys

from grapeshot import _core
from grapeshot._loop.aio import PART_LEN, Prefetch
from grapeshot._loop.locks import real_rlock

from . import _dns
from ._aio import wait_in_memory
from ._countdown import Countdown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Self

    from _typeshed import ReadableBuffer

    class _Native(socket.socket):
        """The native type, which is made at run time."""

        _accepted_class: type[socket.socket] | None

        def accept(self) -> tuple[Self, Any]: ...
        def accept_many(self, max: int = 0, /) -> list[tuple[Self, Any]]: ...  # noqa: A002
        def recv_exact(self, nbytes: int, /) -> bytes: ...
        def write(self, data: ReadableBuffer, /) -> int: ...
        def _wait(self, direction: int, timeout: float | None = None, /) -> None: ...
        def _note_unread(self, flag: bool, /) -> None: ...
else:
    # A subclass of the original socket.socket, even if a program replaces socket.socket later.
    _Native = _core._coro_socket_type(socket.socket)

# The values of _wait's argument `direction`.
READ, WRITE, CONNECT = 0, 1, 2
# The flag of calls that must not wait.
AT_ONCE = socket.MSG_DONTWAIT

_START_CONNECT: Callable[[socket.socket, Any], int] = socket.socket.connect_ex
_UNDER_WAY = frozenset((errno.EINPROGRESS, errno.EALREADY, errno.EINTR))
# Whether a second connect() returns the outcome of the first one.
_CONNECT_TELLS = sys.platform == "linux"
# The first and the longest pause between two attempts to connect while the server's queue is full, in seconds.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
# Flags of calls that do not receive the data of the stream.
_NOT_DATA = socket.MSG_OOB | getattr(socket, "MSG_ERRQUEUE", 0)
# The most bytes that one call of _receive_unread receives.
_MAX_LEN = 65536
_RECV: Callable[..., bytes] = socket.socket.recv
# Held while data is put back or taken out again. Reentrant, because a finalizer may receive data in a thread that holds
# this lock.
_putting_back = real_rlock()


class CoroSocket(_Native):
    """The native type plus the methods in Python. :class:`sock`, patched sockets and TLS sockets derive from it."""

    __slots__ = ("_unread",)

    if TYPE_CHECKING:
        _unread: bytes

    def connect(self, address: Any, /) -> None:
        """Connect to an address, whose host may be a name.

        Raises:
            TimeoutError: the connection took longer than the socket's timeout.
            OSError: the connection failed.
            socket.gaierror: the name does not resolve.
        """
        code = self._connect(address)
        if code:
            raise OSError(code, os.strerror(code))

    def connect_ex(self, address: Any, /) -> int:
        """Connect; return 0 or an errno. Raises socket.gaierror if a name does not resolve."""
        try:
            return self._connect(address)
        except TimeoutError:
            return errno.EWOULDBLOCK

    def _connect(self, address: Any) -> int:
        if self.family in (socket.AF_INET, socket.AF_INET6) and isinstance(address, tuple):
            address = _dns.numeric_address(self.family, address)
        time_left_s = Countdown(self.gettimeout())
        code = _START_CONNECT(self, address)
        pause_s = _FIRST_PAUSE_S
        while code == errno.EAGAIN and self.family == socket.AF_UNIX and self.getblocking():
            # The queue of the listening socket is full. The system does not report when there is room: try repeatedly.
            time_left_s.pause(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
            code = _START_CONNECT(self, address)
        while code in _UNDER_WAY and self.getblocking():
            self._wait(CONNECT, time_left_s())
            if _CONNECT_TELLS:
                # After a failed attempt, this also resets the socket, so that it can be used for another attempt.
                code = _START_CONNECT(self, address)
            else:
                code = self.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return 0 if code == errno.EISCONN else code

    def _sendfile_use_sendfile(self, file: Any, offset: int = 0, count: int | None = None) -> int:
        self._check_sendfile_params(file, offset, count)  # type: ignore[attr-defined]
        try:
            number = file.fileno()
            file_len = os.fstat(number).st_size
        except (AttributeError, OSError, io.UnsupportedOperation) as error:
            raise socket._GiveupOnSendfile(error) from None  # type: ignore[attr-defined]
        if not file_len:
            return 0
        if not self.getblocking():
            raise ValueError("non-blocking sockets are not supported")
        if os.get_blocking(self.fileno()):
            # Other code that shares the descriptor has made it blocking, so os.sendfile() would block the thread.
            # send(), which is used instead, does not.
            raise socket._GiveupOnSendfile("the descriptor is in blocking mode")  # type: ignore[attr-defined]
        start = offset
        prefetch = Prefetch(number)
        try:
            while count is None or offset - start < count:
                wanted = PART_LEN if count is None else min(count - (offset - start), PART_LEN)
                wanted = prefetch.limited(offset, wanted)
                # Wait until this part of the file is in memory. Otherwise os.sendfile() would block the thread until
                # the disk has delivered the part.
                wait_in_memory(prefetch, number, offset, wanted)
                try:
                    sent = os.sendfile(self.fileno(), number, offset, wanted)
                except BlockingIOError:
                    self._wait(WRITE, self.gettimeout())
                    continue
                except OSError as error:
                    if offset == start:
                        # The system cannot send this kind of file to a socket directly.
                        raise socket._GiveupOnSendfile(error) from None  # type: ignore[attr-defined]
                    raise
                if not sent:
                    break
                offset += sent
        finally:
            if offset > start and hasattr(file, "seek"):
                file.seek(offset)
        return offset - start

    # These methods are for data that was received but not returned yet, because a recv_exact has failed or because a
    # server hands its connection over to other code. Native code calls the methods, too.

    def _put_back(self, data: bytes) -> None:
        with _putting_back:
            self._unread = data + getattr(self, "_unread", b"")
            self._note_unread(True)

    def _take_unread(self, count: int) -> bytes | None:
        with _putting_back:
            data = getattr(self, "_unread", b"")
            self._unread = data[count:]
            self._note_unread(len(data) > count)
        return data[:count] or None

    def _take_unread_into(self, buffer: Any, count: int) -> int | None:
        data = self._take_unread(count)
        if data is None:
            return None
        with memoryview(buffer) as view, view.cast("B") as octets:
            octets[: len(data)] = data
        return len(data)

    def _receive_unread(self, method: str, args: tuple[Any, ...]) -> Any:
        """Call a receiving method on the data that was put back, and return its result.

        The data is sent through a pair of connected sockets, and the method itself is called on the socket at the other
        end. So its checks, its results and its errors are the usual ones. Return None if no such data is left, if the
        call asks for urgent data or the error queue, or if the socket is closed.
        """
        flags = args[-1]
        if self.fileno() < 0 or (isinstance(flags, int) and flags & _NOT_DATA):
            return None
        with _putting_back:
            unread = getattr(self, "_unread", b"")
            if not unread:
                self._note_unread(False)
                return None
            data = unread
            if isinstance(flags, int) and flags & (socket.MSG_PEEK | socket.MSG_WAITALL):
                # Such a call must also see the data in the kernel, which comes after the data that was put back.
                with contextlib.suppress(OSError):
                    data += _RECV(self, _MAX_LEN, socket.MSG_PEEK | AT_ONCE)
            near, far = _socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                near.settimeout(0)
                far.settimeout(0)
                far.send(data[:_MAX_LEN])
                result = getattr(near, method)(*args)
            finally:
                near.close()
                far.close()
            first = result[0] if isinstance(result, tuple) else result
            count = first if isinstance(first, int) else len(first)
            if not flags & socket.MSG_PEEK:
                self._take_unread(min(count, len(unread)))
                if count > len(unread):
                    _RECV(self, count - len(unread), AT_ONCE)
        if self.family == socket.AF_UNIX and method.startswith(("recvfrom", "recvmsg")):
            with contextlib.suppress(OSError):  # not connected any more
                result = (*result[:-1], self.getpeername() or None)
        return result
