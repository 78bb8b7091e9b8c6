"""TLS: contexts and time limits, TLS on outgoing and accepted connections, start_tls. The transport is native.

The ``ssl`` argument of every ``create_*`` and ``connect_*`` method is handled here. Errors and their texts are
asyncio's.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from asyncio import constants
from collections.abc import Callable

from grapeshot import _core

from .base import BaseLoop
from .opening import open_over

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from typing import Any, TypeVar

    _P = TypeVar("_P", bound=asyncio.BaseProtocol)

    TimeLimits = tuple[float, float]


def time_limits(handshake_timeout: float | None, shutdown_timeout: float | None) -> TimeLimits:
    """Return both limits in seconds. None is replaced by asyncio's default: 60 for the handshake, 30 for the shutdown.

    Raises:
        ValueError: a limit is not positive.
    """
    if handshake_timeout is None:
        handshake_timeout = constants.SSL_HANDSHAKE_TIMEOUT
    elif handshake_timeout <= 0:
        raise ValueError(f"ssl_handshake_timeout should be a positive number, got {handshake_timeout}")
    if shutdown_timeout is None:
        shutdown_timeout = constants.SSL_SHUTDOWN_TIMEOUT
    elif shutdown_timeout <= 0:
        raise ValueError(f"ssl_shutdown_timeout should be a positive number, got {shutdown_timeout}")
    return handshake_timeout, shutdown_timeout


def context_of(ssl_argument: Any, server_side: bool, server_hostname: str | None) -> ssl.SSLContext:
    """Return the context for an ``ssl`` argument: the argument itself, or for True the default context for clients.

    Raises:
        ValueError: the argument is True for a server, which needs a context with a certificate.
    """
    if not isinstance(ssl_argument, bool):
        return ssl_argument  # type: ignore[no-any-return]
    if server_side:
        raise ValueError("Server side SSL needs a valid SSLContext")
    import ssl

    context = ssl.create_default_context()
    if not server_hostname:
        context.check_hostname = False
    return context


def make_transport(
    loop: BaseLoop,
    protocol: asyncio.BaseProtocol,
    ssl_argument: Any,
    waiter: asyncio.Future[_core.SSLTransport | None] | None,
    limits: TimeLimits,
    *,
    server_side: bool = False,
    server_hostname: str | None = None,
    below: asyncio.WriteTransport | None = None,
) -> _core.SSLTransport:
    """Return a TLS transport for ``protocol``.

    The caller sets the TLS transport as the protocol of another transport, which carries the encrypted data. If the
    connection is already open, ``below`` is that other transport. In that case, ``connection_made`` of ``protocol`` was
    called before, and the protocol's methods are called in the context of the connection.
    """
    context = context_of(ssl_argument, server_side, server_hostname)
    name = None if server_side else server_hostname or None
    return loop._tls(protocol, context, waiter, server_side, name, *limits, below is None, False, below)


async def open_tls(
    loop: BaseLoop,
    sock: socket.socket,
    protocol_factory: Callable[[], _P],
    ssl_argument: Any,
    handshake_timeout: float | None,
    shutdown_timeout: float | None,
    *,
    server_side: bool = False,
    server_hostname: str | None = None,
) -> tuple[asyncio.Transport, _P]:
    """Make the protocol and its TLS transport over the connected ``sock``; return once the handshake is complete.

    The socket is closed if anything fails or the wait is cancelled.

    Raises:
        ssl.SSLError: the handshake failed. If the peer's certificate is not valid: ``ssl.SSLCertVerificationError``.
        ConnectionResetError: the peer closed the connection during the handshake.
        ConnectionAbortedError: the handshake took longer than ``handshake_timeout`` seconds.
        ValueError: a time limit is not positive, or the context does not accept ``server_hostname``.
    """

    def make(protocol: _P, waiter: asyncio.Future[Any]) -> _core.SSLTransport:
        limits = time_limits(handshake_timeout, shutdown_timeout)
        transport = make_transport(
            loop, protocol, ssl_argument, waiter, limits, server_side=server_side, server_hostname=server_hostname
        )
        loop._stream(sock, transport)
        return transport

    return await open_over(loop, sock, protocol_factory, make)


def serving_factory(
    loop: BaseLoop,
    protocol_factory: Callable[[], asyncio.BaseProtocol],
    context: ssl.SSLContext | None,
    handshake_timeout: float | None,
    shutdown_timeout: float | None,
) -> Callable[[], asyncio.BaseProtocol]:
    """Return the factory for the protocols of accepted connections. With a context, it wraps the protocols in TLS.

    Raises:
        ValueError: a time limit is not positive.
    """
    if not context:
        return protocol_factory
    limits = time_limits(handshake_timeout, shutdown_timeout)

    def factory() -> _core.SSLTransport:
        waiter = loop.create_future()
        transport = loop._tls(protocol_factory(), context, waiter, True, None, *limits, True, True)
        start_accepting(loop, transport, waiter)
        return transport

    return factory


def start_accepting(loop: BaseLoop, transport: asyncio.Transport, waiter: asyncio.Future[None] | None) -> None:
    """Make a task that represents the accepting of ``transport`` and lasts until ``waiter`` is done, as in asyncio.

    Without a waiter, the task ends with its first step.

    If a program cancels all tasks, including the task that serves the connection, it also cancels this task. Then the
    connection is closed.
    """
    task = loop.create_task(_accepted(waiter))
    task.add_done_callback(functools.partial(_close_if_cancelled, transport))


async def _accepted(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None:
        try:
            await waiter
        except Exception:
            pass  # the error was reported where it happened
        finally:
            del waiter  # its exception has a traceback that keeps the connection alive


def _close_if_cancelled(transport: asyncio.Transport, task: asyncio.Task[None]) -> None:
    if task.cancelled():
        transport.close()


def outermost(transport: _core.StreamTransport) -> asyncio.Transport:
    """Return the application's transport: ``transport`` itself, or the topmost TLS transport above it."""
    top: asyncio.Transport = transport
    while type(protocol := top.get_protocol()) is _core.SSLTransport:
        top = protocol
    return top


async def start_tls(
    loop: BaseLoop,
    transport: asyncio.WriteTransport,
    protocol: asyncio.BaseProtocol,
    sslcontext: ssl.SSLContext,
    *,
    server_side: bool = False,
    server_hostname: str | None = None,
    ssl_handshake_timeout: float | None = None,
    ssl_shutdown_timeout: float | None = None,
) -> asyncio.Transport | None:
    """Encrypt a connection that is already open; return the transport that ``protocol`` must use from now on.

    As in asyncio, this method returns None if ``transport`` was closed before the handshake could begin.

    ``transport`` may be any transport with ``_start_tls_compatible``, including a TLS transport. If a server's
    StreamReader has already received a part of the handshake, that part is passed on. ``connection_made`` of
    ``protocol`` is not called a second time.

    Raises:
        TypeError: ``sslcontext`` is not an ``ssl.SSLContext``, or ``transport`` does not support start_tls.
        ssl.SSLError, ConnectionResetError, ConnectionAbortedError: the handshake failed; the connection is closed.
        ValueError: a time limit is not positive, or the context does not accept ``server_hostname``.

    Source: :meth:`asyncio.loop.start_tls`.
    """
    import ssl

    if not isinstance(sslcontext, ssl.SSLContext):
        raise TypeError(f"sslcontext is expected to be an instance of ssl.SSLContext, got {sslcontext!r}")
    if not getattr(transport, "_start_tls_compatible", False):
        raise TypeError(f"transport {transport!r} is not supported by start_tls()")
    waiter: asyncio.Future[_core.SSLTransport | None] = loop.create_future()
    above = make_transport(
        loop,
        protocol,
        sslcontext,
        waiter,
        time_limits(ssl_handshake_timeout, ssl_shutdown_timeout),
        server_side=server_side,
        server_hostname=server_hostname,
        below=transport,
    )
    inner: Any = transport
    inner.pause_reading()  # the TLS transport must get no data before its connection_made
    if server_side and isinstance(protocol, asyncio.StreamReaderProtocol):
        _take_received(protocol, above)
    inner.set_protocol(above)
    starting = loop.call_soon(above.connection_made, inner)
    resuming = loop.call_soon(inner.resume_reading)
    try:
        return await waiter
    except BaseException:
        inner.close()
        starting.cancel()
        resuming.cancel()
        raise
    finally:
        del waiter  # break a reference cycle: the waiter's exception has a traceback that refers to this frame


def _take_received(protocol: asyncio.StreamReaderProtocol, above: _core.SSLTransport) -> None:
    """Move the data in the StreamReader's buffer to the TLS transport.

    This data is the beginning of the handshake: a client may send it together with its request to start TLS.
    """
    reader: Any = protocol._stream_reader  # type: ignore[attr-defined]
    if reader is not None and reader._buffer:
        above._feed(bytes(reader._buffer))
        reader._buffer.clear()
