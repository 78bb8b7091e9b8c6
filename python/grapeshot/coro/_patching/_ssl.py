"""The part ``ssl`` of :func:`grapeshot.coro.patch`: sockets of an ``SSLContext`` let other coros run while they wait.

The name ``ssl.SSLSocket`` is not replaced, because the module ``ssl`` itself uses it. Instead, contexts make sockets of
the class in this module, which derives from ``ssl.SSLSocket``.
"""

from __future__ import annotations

import ssl

from grapeshot.coro._tls import TlsSocket

from ._socket import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class SSLSocket(TlsSocket, socket):
    """A TLS socket whose handshake, reads and writes let other coros run."""

    _accepted_class = socket

    def accept(self) -> tuple[ssl.SSLSocket, Any]:  # type: ignore[override]
        """Accept a connection. Do the TLS handshake with its client if ``do_handshake_on_connect`` is set."""
        plain, address = socket.accept(self)
        secure = self.context.wrap_socket(
            plain,
            do_handshake_on_connect=self.do_handshake_on_connect,  # type: ignore[attr-defined]
            suppress_ragged_eofs=self.suppress_ragged_eofs,  # type: ignore[attr-defined]
            server_side=True,
        )
        return secure, address

    def do_handshake(self, block: bool = False) -> None:
        if block and self.gettimeout() == 0:
            self.settimeout(None)
            try:
                super().do_handshake()
            finally:
                self.settimeout(0)
        else:
            super().do_handshake()


SSLSocket.__module__ = "ssl"


def patch() -> None:
    """Make contexts use the class of this module for their sockets."""
    ssl.SSLContext.sslsocket_class = SSLSocket
