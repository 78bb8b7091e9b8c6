"""The part ``socket`` of :func:`grapeshot.coro.patch`: sockets whose calls let other coros run while they wait.

The class derives from the original ``socket.socket``, so ``isinstance`` works with both classes. Unlike with
:class:`grapeshot.coro.sock`, several coros may wait to read (or to write) on one socket, as threads may. The second
coro waits with ``_waits``. When both coros are woken, the coro that runs first gets the data.
"""

from __future__ import annotations

import _socket
import io
import socket as _module
import types

from grapeshot.coro._countdown import Countdown
from grapeshot.coro._errors import ClosedError, SimultaneousError
from grapeshot.coro._socket_base import AT_ONCE, READ, WRITE, CoroSocket

from . import _originals, _socket_numbers, _waits
from ._file_objects import Pair, Reader, SocketFile, Text, Writer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_accept, _recv, _recv_into = CoroSocket.accept, CoroSocket.recv, CoroSocket.recv_into
_recvfrom, _recvfrom_into = CoroSocket.recvfrom, CoroSocket.recvfrom_into
_recvmsg, _recvmsg_into = CoroSocket.recvmsg, CoroSocket.recvmsg_into
_send, _sendto, _sendmsg = CoroSocket.send, CoroSocket.sendto, CoroSocket.sendmsg
_wait, _setblocking = CoroSocket._wait, CoroSocket.setblocking
_fileno, _detach = CoroSocket.fileno, CoroSocket.detach
# The base class of socket.socket. Its methods never wait on a patched socket, because the descriptor is nonblocking.
_plain = _socket.socket
# The module `io` as makefile() sees it, with our file classes.
_files = types.ModuleType("io", io.__doc__)
vars(_files).update(vars(io), BufferedReader=Reader, BufferedWriter=Writer, BufferedRWPair=Pair, TextIOWrapper=Text)


def _is_at_once(flags: Any) -> bool:
    """Whether the flags of a call say that it must not wait."""
    return isinstance(flags, int) and bool(flags & AT_ONCE)


def _as_tuple(items: Any) -> Any:
    """Return an iterable as a tuple, so that several attempts can use it.

    Anything else is returned unchanged: the original method will refuse it.
    """
    try:
        iterator = iter(items)
    except TypeError:
        return items
    return tuple(iterator)


class SharedWaits(CoroSocket):
    """A socket on which several coros may wait to read, and several to write."""

    __slots__ = ()

    def _wait(self, direction: int, timeout: float | None = None, /) -> None:
        try:
            _wait(self, direction, timeout)
        except SimultaneousError:
            self._wait_beside(direction, timeout)

    def _wait_beside(self, direction: int, timeout: float | None) -> None:
        """Wait until the socket is ready, although another coro already has the socket's entry in the fd table."""
        fd = self.fileno()
        if fd < 0:
            raise ClosedError("the socket is closed")
        mask = _waits.READABLE if direction == READ else _waits.WRITABLE
        if not _waits.wait_for_events(fd, mask, timeout):
            raise TimeoutError("timed out")

    def _share(self, call: Callable[..., Any], direction: int, args: Any, kwargs: Any = {}) -> Any:  # noqa: B006
        """Repeat a call that raised SimultaneousError. Calls raise it before they have received or sent anything."""
        left_s = Countdown(self.gettimeout())
        while True:
            self._wait_beside(direction, left_s())
            try:
                return call(self, *args, **kwargs)
            except SimultaneousError:
                continue

    def setblocking(self, flag: Any, /) -> None:
        # Raises EBADF, as the original does, if other code has closed the descriptor.
        _plain.setblocking(self, False)
        _setblocking(self, flag)

    def fileno(self) -> int:
        number = _fileno(self)
        _socket_numbers.note(self, number)
        return number

    def detach(self) -> int:
        is_blocking = self.gettimeout() is None
        number = _detach(self)
        if is_blocking:
            _socket_numbers.note_detached(number)
        return number

    makefile = _originals.clone_function(
        _module.socket.makefile, {**vars(_module), "io": _files, "SocketIO": SocketFile}
    )

    def _is_plain(self, flags: Any) -> bool:
        """Whether the flags forbid a receiving call to wait, and the socket has no data in ``_unread``."""
        return _is_at_once(flags) and not getattr(self, "_unread", b"")

    def accept(self) -> tuple[Any, Any]:
        try:
            return _accept(self)
        except SimultaneousError:
            return self._share(_accept, READ, ())  # type: ignore[no-any-return]

    def recv(self, *args: Any) -> bytes:
        if len(args) > 1 and self._is_plain(args[1]):
            return _plain.recv(self, *args)
        try:
            return _recv(self, *args)
        except SimultaneousError:
            return self._share(_recv, READ, args)  # type: ignore[no-any-return]

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        if self._is_plain(args[2] if len(args) > 2 else kwargs.get("flags", 0)):
            return _plain.recv_into(self, *args, **kwargs)
        try:
            return _recv_into(self, *args, **kwargs)
        except SimultaneousError:
            return self._share(_recv_into, READ, args, kwargs)  # type: ignore[no-any-return]

    def recvfrom(self, *args: Any) -> tuple[bytes, Any]:
        if len(args) > 1 and self._is_plain(args[1]):
            return _plain.recvfrom(self, *args)
        try:
            return _recvfrom(self, *args)
        except SimultaneousError:
            return self._share(_recvfrom, READ, args)  # type: ignore[no-any-return]

    def recvfrom_into(self, *args: Any, **kwargs: Any) -> tuple[int, Any]:
        if self._is_plain(args[2] if len(args) > 2 else kwargs.get("flags", 0)):
            return _plain.recvfrom_into(self, *args, **kwargs)
        try:
            return _recvfrom_into(self, *args, **kwargs)
        except SimultaneousError:
            return self._share(_recvfrom_into, READ, args, kwargs)  # type: ignore[no-any-return]

    def recvmsg(self, *args: Any) -> Any:
        if len(args) > 2 and self._is_plain(args[2]):
            return _plain.recvmsg(self, *args)
        try:
            return _recvmsg(self, *args)
        except SimultaneousError:
            return self._share(_recvmsg, READ, args)

    def recvmsg_into(self, *args: Any) -> Any:
        if args:
            args = (_as_tuple(args[0]), *args[1:])
        if len(args) > 2 and self._is_plain(args[2]):
            return _plain.recvmsg_into(self, *args)
        try:
            return _recvmsg_into(self, *args)
        except SimultaneousError:
            return self._share(_recvmsg_into, READ, args)

    def send(self, *args: Any) -> int:
        if len(args) > 1 and _is_at_once(args[1]):
            return _plain.send(self, *args)
        try:
            return _send(self, *args)
        except SimultaneousError:
            return self._share(_send, WRITE, args)  # type: ignore[no-any-return]

    def sendto(self, *args: Any) -> int:
        if len(args) > 2 and _is_at_once(args[1]):
            return _plain.sendto(self, *args)
        try:
            return _sendto(self, *args)
        except SimultaneousError:
            return self._share(_sendto, WRITE, args)  # type: ignore[no-any-return]

    def sendmsg(self, *args: Any) -> int:
        args = (*map(_as_tuple, args[:2]), *args[2:])
        if len(args) > 2 and _is_at_once(args[2]):
            return _plain.sendmsg(self, *args)
        try:
            return _sendmsg(self, *args)
        except SimultaneousError:
            return self._share(_sendmsg, WRITE, args)  # type: ignore[no-any-return]

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        # This does not call the native sendall, because its SimultaneousError would not tell how much was sent.
        left_s: Countdown | None = None
        try:
            sent = self.send(data, flags) if flags else _send(self, data)
        except SimultaneousError:
            sent = 0
        if type(data) is bytes and sent == len(data):
            return
        with memoryview(data) as view, view.cast("B") as octets:
            while sent < len(octets):
                try:
                    sent += _plain.send(self, octets[sent:], flags | AT_ONCE)
                except BlockingIOError:
                    if self.gettimeout() == 0 or _is_at_once(flags):
                        raise
                    left_s = left_s or Countdown(self.gettimeout())
                    self._wait(WRITE, left_s())


class socket(SharedWaits):  # noqa: N801
    """A socket. While a coro waits in one of its methods, other coros run. Elsewhere, a wait blocks the thread."""

    __slots__ = ()


socket.__module__ = "socket"
socket._accepted_class = socket

# Functions that make sockets. They look up the class by its name, so modules that keep the originals get copies of
# these functions, which use the original class.
_MAKERS = ("create_connection", "create_server", "fromfd", "has_dualstack_ipv6", "socketpair")


def patch() -> None:
    """Replace the names in ``socket``. The module ``_socket`` is not patched."""
    names = dict(vars(_module))
    for name in _MAKERS:
        if hasattr(_module, name):
            names[name] = _originals.clone_function(names[name], names)
            _originals.show("socket", name, names[name])
    _originals.replace("socket", "socket", socket)
