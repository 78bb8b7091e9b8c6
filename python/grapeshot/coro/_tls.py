"""TLS for the sockets of coros, with the program's own :class:`ssl.SSLContext`.

OpenSSL reads and writes the nonblocking descriptor itself. When it would block, it says whether it needs to read or to
write. Each method here then waits until the descriptor is ready for that, and calls OpenSSL again.
"""

from __future__ import annotations

import ssl

from grapeshot import _core

from ._countdown import Countdown
from ._socket_base import READ, WRITE, CoroSocket

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from typing import Any, TypeVar

    _T = TypeVar("_T")


class TlsSocket(ssl.SSLSocket, CoroSocket):
    """An :class:`ssl.SSLSocket` whose calls, and whose handshake, let other coros run while they wait."""

    # The class of an accepted connection before the handshake.
    _accepted_class = CoroSocket

    def _repeat(self, call: Callable[..., _T], *args: Any) -> _T:
        """Repeat the call until it succeeds, and in between wait until the descriptor is ready."""
        if self.gettimeout() == 0:
            return call(*args)
        _core._coro_act()  # yields now and then, so that a peer that sends all the time does not starve other coros
        time_left_s = Countdown(self.gettimeout())
        while True:
            try:
                return call(*args)
            except ssl.SSLWantReadError:
                direction = READ
            except ssl.SSLWantWriteError:
                direction = WRITE
            self._wait(direction, time_left_s())

    def read(self, len: int = 1024, buffer: Any = None) -> Any:  # noqa: A002
        if getattr(self, "_unread", b""):
            # Data that a server had received before it handed the connection over to other code.
            if buffer is None:
                return self._take_unread(len)
            with memoryview(buffer) as view:
                return self._take_unread_into(buffer, min(len, view.nbytes) if len > 0 else view.nbytes)
        return self._repeat(super().read, len, buffer)

    def write(self, data: Any) -> int:
        return self._repeat(super().write, data)

    def send(self, data: Any, flags: int = 0) -> int:
        return self._repeat(super().send, data, flags)

    def do_handshake(self, block: bool = False) -> None:
        self._check_connected()  # type: ignore[attr-defined]
        self._repeat(self._sslobj.do_handshake)  # type: ignore[attr-defined]

    def unwrap(self) -> socket.socket:
        return self._repeat(super().unwrap)

    def accept(self) -> tuple[ssl.SSLSocket, Any]:  # type: ignore[override]
        """Accept a connection, and do the TLS handshake with its client."""
        plain, address = CoroSocket.accept(self)
        try:
            return (
                wrap(
                    plain,
                    self.context,
                    server_side=True,
                    do_handshake_on_connect=self.do_handshake_on_connect,  # type: ignore[attr-defined]
                    suppress_ragged_eofs=self.suppress_ragged_eofs,  # type: ignore[attr-defined]
                ),
                address,
            )
        except BaseException:
            plain.close()
            raise


def wrap(
    plain: socket.socket, context: ssl.SSLContext, *, do_handshake_on_connect: bool = True, **options: Any
) -> TlsSocket:
    """Return a :class:`TlsSocket` that takes over the descriptor of ``plain``.

    The options are the same as for :meth:`ssl.SSLContext.wrap_socket`.
    """
    # _create() must not do the handshake: if an interruption ended it there, some versions of Python would leave the
    # socket open. The code below does the handshake, and closes the socket after any exception.
    secure: Any = TlsSocket._create(  # type: ignore[attr-defined]
        plain, context=context, do_handshake_on_connect=False, **options
    )
    secure.do_handshake_on_connect = do_handshake_on_connect
    if do_handshake_on_connect and secure._connected:
        try:
            secure.do_handshake()
        except BaseException:
            secure.close()
            raise
    return secure  # type: ignore[no-any-return]
