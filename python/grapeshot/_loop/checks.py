"""Argument checks that several modules share. They raise exactly the errors that asyncio raises."""

from __future__ import annotations

import asyncio
import inspect
import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from grapeshot import _core

try:
    import ssl
except ImportError:  # a Python built without OpenSSL
    _SSL_SOCKETS: tuple[type, ...] = ()
else:
    _SSL_SOCKETS = (ssl.SSLSocket,)


def is_coroutine_like(callback: object) -> bool:
    """Whether ``callback`` is a coroutine or a coroutine function, neither of which a loop can call."""
    return asyncio.iscoroutine(callback) or inspect.iscoroutinefunction(callback)


def check_callback(callback: object, method: str) -> None:
    """Raise TypeError unless ``callback`` is a plain callable; ``method`` names the caller in the message."""
    if is_coroutine_like(callback):
        raise TypeError(f"coroutines cannot be used with {method}()")
    if not callable(callback):
        raise TypeError(f"a callable object was expected by {method}(), got {callback!r}")


def check_plain_socket(sock: object) -> None:
    """Raise TypeError if ``sock`` is an ``ssl.SSLSocket``, which an event loop cannot read from or write to."""
    if isinstance(sock, _SSL_SOCKETS):
        raise TypeError("Socket cannot be of type SSLSocket")


def check_stream_socket(sock: socket.socket) -> None:
    """Raise ValueError unless ``sock`` is of type ``SOCK_STREAM`` (any family; a Unix socket passes, as in asyncio)."""
    if sock.type != socket.SOCK_STREAM:
        raise ValueError(f"A Stream Socket was expected, got {sock!r}")


def check_unused_socket(loop: _core.Loop, sock: socket.socket) -> None:
    """Raise RuntimeError if a transport of ``loop`` already uses ``sock``. That transport is not affected."""
    if sock.fileno() != -1:  # not `>= 0`, because a mock of a socket in a program's tests may return any object
        loop._ensure_fd_no_transport(sock)


def check_tls_only_options(uses_tls: bool, **options: Any) -> None:
    """Raise ValueError for the first of ``options`` that is not None, unless the connection uses TLS."""
    if uses_tls:
        return
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name} is only meaningful with ssl")


def set_reuse_port(sock: socket.socket) -> None:
    """Set SO_REUSEPORT; raise ValueError where the system does not have it for this kind of socket."""
    if not hasattr(socket, "SO_REUSEPORT"):
        raise ValueError("reuse_port not supported by socket module")
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError:
        raise ValueError(
            "reuse_port not supported by socket module, SO_REUSEPORT defined but not implemented."
        ) from None
