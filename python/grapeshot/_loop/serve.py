"""Listening: create_server, and the Server object that it and create_unix_server return.

Native code accepts connections (``loop._listen``) and makes their transports. A Server owns the listening sockets and
counts the open connections. The list of these connections is in the native loop.
"""

from __future__ import annotations

import asyncio
import collections.abc
import contextvars
import errno
import itertools
import os
import socket
import sys
from asyncio import trsock
from asyncio.log import logger
from collections.abc import Callable, Iterable, Sequence

from grapeshot import _core

from . import dns, origins, tls
from .base import BaseLoop, ComputedAttribute
from .checks import check_plain_socket, check_stream_socket, check_tls_only_options, set_reuse_port
from .connect import error_text
from .fixes import SKIPS_UNAVAILABLE_ADDRESSES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ProtocolFactory = Callable[[], asyncio.BaseProtocol]

# In Python 3.11, wait_closed() of a closed server does not wait for its connections. See Server.wait_closed().
_WAITS_FOR_CONNECTIONS = sys.version_info >= (3, 12)


class Server(asyncio.Server):
    """Listening sockets, and the connections accepted from them. :meth:`grapeshot.Loop.create_server` makes one.

    ::

        created --start_serving()--> serving --close()--> closed --last connection ends--> wait_closed() returns

    Each connection runs in a copy of the context in which the server was created, as in asyncio from Python 3.15 on.
    (Earlier versions use the context of ``start_serving``, which is the same one in most programs.)

    ``isinstance(server, asyncio.Server)`` holds, but the code of that class is not used. ``async with server`` closes
    the server at the end of the block. Only the loop's thread may use a server.
    """

    def __init__(
        self,
        loop: BaseLoop,
        sockets: list[socket.socket],
        protocol_factory: ProtocolFactory,
        backlog: int,
        on_closed: Callable[[], None] | None = None,
    ) -> None:
        self._loop = loop
        self._sockets: list[socket.socket] | None = sockets
        self._listeners: list[_core._Listener] = []
        self._protocol_factory = protocol_factory
        self._backlog = backlog
        self._on_closed = on_closed
        self._context = contextvars.copy_context()
        self._open_count = 0
        self._is_serving = False
        self._waiters: list[asyncio.Future[None]] | None = []
        self._serving_forever: asyncio.Future[None] | None = None
        if loop.get_debug():
            origins.note_opened(loop, self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} sockets={self.sockets!r}>"

    @property
    def sockets(self) -> tuple[trsock.TransportSocket, ...]:  # type: ignore[override]  # as in asyncio itself
        """The listening sockets, as views that cannot be closed. Empty once the server is closed."""
        return tuple(trsock.TransportSocket(sock) for sock in self._sockets or ())

    # private attributes of asyncio's Server that other code reads

    _serving = ComputedAttribute(lambda self: self._is_serving)
    _active_count = ComputedAttribute(lambda self: self._open_count)

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop that the server runs on."""
        return self._loop

    def is_serving(self) -> bool:
        """Whether new connections are accepted."""
        return self._is_serving

    async def start_serving(self) -> None:
        """Start accepting connections. Does nothing if the server is accepting already.

        Raises:
            OSError: a socket cannot listen, for instance EADDRINUSE.
            RuntimeError: the server is closed.
        """
        self._start_serving()
        await asyncio.sleep(0)

    async def serve_forever(self) -> None:
        """Accept connections until :meth:`close` is called, or until this coroutine is cancelled.

        In both cases, this method closes the server and the open connections, waits until the connections have ended,
        and then raises CancelledError. (On Python 3.11, as in that version's asyncio, it raises CancelledError at once
        and leaves the connections open.)

        Raises:
            RuntimeError: the server is closed, or serve_forever() is already running.
        """
        if self._serving_forever is not None:
            raise RuntimeError(f"server {self!r} is already being awaited on serve_forever()")
        if self._sockets is None:
            raise RuntimeError(f"server {self!r} is closed")
        self._start_serving()
        self._serving_forever = self._loop.create_future()
        try:
            await self._serving_forever
        except asyncio.CancelledError:
            self.close()
            if _WAITS_FOR_CONNECTIONS:
                self.close_clients()
            await self.wait_closed()
            raise
        finally:
            self._serving_forever = None

    def close(self) -> None:
        """Stop accepting and close the listening sockets. Idempotent.

        Open connections stay open, unless :meth:`serve_forever` is running, which then closes them (on Python 3.12 and
        later).
        """
        sockets = self._sockets
        if sockets is None:
            return
        self._sockets = None
        self._is_serving = False
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener._stop()
        for sock in sockets:
            sock.close()
        if self._on_closed is not None:
            self._on_closed()
        if self._serving_forever is not None and not self._serving_forever.done():
            self._serving_forever.cancel()
            self._serving_forever = None
        self._wakeup()

    def close_clients(self) -> None:
        """Close every open connection of this server after sending its buffered data. (In asyncio: Python 3.13+.)"""
        for transport in self._loop._server_transports(self):
            tls.outermost(transport).close()

    def abort_clients(self) -> None:
        """Close every open connection of this server at once and discard unsent data. (In asyncio: Python 3.13+.)"""
        for transport in self._loop._server_transports(self):
            tls.outermost(transport).abort()

    async def wait_closed(self) -> None:
        """Wait until the server is closed and its last connection has ended, as in asyncio from Python 3.12 on.

        On Python 3.11 this returns at once if the server is already closed, as in that version's asyncio. Programs
        written for that version may close a server while idle connections are open. If this waited for the connections,
        such programs would hang.
        """
        if self._waiters is None or (self._sockets is None and not _WAITS_FOR_CONNECTIONS):
            return
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        await waiter

    def _start_serving(self) -> None:
        if self._is_serving:
            return
        if self._sockets is None:
            raise RuntimeError(f"server {self!r} is closed")
        for sock in self._sockets:
            sock.listen(self._backlog)
        for sock in self._sockets:
            listener = self._context.run(self._loop._listen, sock, self._protocol_factory, self, self._backlog)
            self._listeners.append(listener)
        self._is_serving = True

    def _attach(self, transport: _core.StreamTransport | None = None) -> None:
        """Called by the native loop for each accepted connection. (In asyncio up to Python 3.12 it has no argument.)"""
        self._open_count += 1
        if self._loop._origins is None or transport is None:
            return
        opened_at = origins.origin_of(self._loop, self)
        if opened_at is not None:
            origins.note(self._loop, transport, f"{opened_at} (accepted)")

    def _detach(self, transport: _core.StreamTransport | None = None) -> None:
        """Called by the native loop after ``connection_lost``. The argument is optional, as in ``_attach``."""
        self._open_count -= 1
        self._wakeup()

    def _accepting(self, transport: _core.StreamTransport, is_waiting: bool) -> asyncio.Future[None] | None:
        """Make a task for the accepted connection ``transport``, because asyncio makes one for each connection.

        The native loop calls this only if something was scheduled while the connection was accepted: otherwise a
        program cannot notice that the task is missing. A connection with TLS gets its task from its protocol factory
        instead (:func:`grapeshot._loop.tls.serving_factory`). With ``is_waiting``, the task lasts until the returned
        future is done; otherwise the task ends with its first step.
        """
        waiter = self._loop.create_future() if is_waiting else None
        tls.start_accepting(self._loop, transport, waiter)
        return waiter

    def _wakeup(self) -> None:
        if self._sockets is not None or self._open_count > 0 or self._waiters is None:
            return
        waiters, self._waiters = self._waiters, None
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


async def create_server(
    loop: BaseLoop,
    protocol_factory: ProtocolFactory,
    host: str | Sequence[str] | None = None,
    port: int | str | None = None,
    *,
    family: int = socket.AF_UNSPEC,
    flags: int = socket.AI_PASSIVE,
    sock: socket.socket | None = None,
    backlog: int = 100,
    ssl: Any = None,
    reuse_address: bool | None = None,
    reuse_port: bool | None = None,
    keep_alive: bool | None = None,
    ssl_handshake_timeout: float | None = None,
    ssl_shutdown_timeout: float | None = None,
    start_serving: bool = True,
) -> Server:
    """Listen on ``host`` and ``port``, or on the bound ``sock``; return the :class:`asyncio.Server`.

    ``host`` may be a sequence of hosts. None and ``""`` mean every interface, with one socket for IPv4 and one for IPv6
    (an IPv6 socket never accepts IPv4 connections, even where the system would let it do so by default). With ``port``
    0, each socket gets a free port. ``backlog`` is the length of the queue of connections that are not accepted yet.
    ``keep_alive`` (available on every Python version) sets SO_KEEPALIVE, which accepted connections inherit.

    Raises:
        OSError: an address cannot be bound. The text contains the address. ``errno`` is the system's (EADDRINUSE, ...),
            or None if this machine has none of the addresses (from Python 3.11.8, 3.12.2 and 3.13 on).
        socket.gaierror: a host does not resolve.
        ValueError: arguments contradict each other, or ``sock`` is not a stream socket.
        TypeError: ``sock`` is an ``ssl.SSLSocket``, or ``ssl`` is a bool.

    Source: :meth:`asyncio.loop.create_server`.
    """
    if isinstance(ssl, bool):
        raise TypeError("ssl argument must be an SSLContext or None")
    check_tls_only_options(
        ssl is not None, ssl_handshake_timeout=ssl_handshake_timeout, ssl_shutdown_timeout=ssl_shutdown_timeout
    )
    if sock is not None:
        check_plain_socket(sock)
    protocol_factory = tls.serving_factory(loop, protocol_factory, ssl, ssl_handshake_timeout, ssl_shutdown_timeout)
    is_ours = sock is None
    if host is not None or port is not None:
        if sock is not None:
            raise ValueError("host/port and sock can not be specified at the same time")
        infos = await _resolve_hosts(loop, host, port, family, flags)
        if reuse_address is None:
            reuse_address = os.name == "posix" and sys.platform != "cygwin"
        sockets = bind_all(loop, infos, reuse_address, reuse_port, keep_alive)
    elif sock is None:
        raise ValueError("Neither host/port nor sock were specified")
    else:
        check_stream_socket(sock)
        sockets = [sock]
    server = await serve(loop, sockets, protocol_factory, backlog, start_serving, is_ours)
    if loop.get_debug():
        logger.info("%r is serving", server)
    return server


async def serve(
    loop: BaseLoop,
    sockets: list[socket.socket],
    protocol_factory: ProtocolFactory,
    backlog: int,
    start_serving: bool,
    is_ours: bool,
    on_closed: Callable[[], None] | None = None,
) -> Server:
    """Return a :class:`Server` on bound sockets. With ``start_serving`` it is already accepting.

    The server calls ``on_closed`` after it has closed its sockets. If the server cannot start, it closes the sockets
    only if ``is_ours`` is true; otherwise they stay open and belong to the caller.
    """
    for sock in sockets:
        sock.setblocking(False)
    server = Server(loop, sockets, protocol_factory, backlog, on_closed)
    if start_serving:
        try:
            await server.start_serving()
        except BaseException:
            if is_ours:
                server.close()
            raise
    return server


async def _resolve_hosts(
    loop: BaseLoop, host: str | Sequence[str] | None, port: int | str | None, family: int, flags: int
) -> list[dns.AddrInfo]:
    """Return the addresses of all hosts without duplicates, in the order of the hosts."""
    hosts: Iterable[Any]
    if host == "":
        hosts = [None]
    elif isinstance(host, str) or not isinstance(host, collections.abc.Iterable):
        hosts = [host]
    else:
        hosts = host
    lookups = (_resolve_host(loop, name, port, family, flags) for name in hosts)
    return list(dict.fromkeys(itertools.chain.from_iterable(await asyncio.gather(*lookups))))


async def _resolve_host(
    loop: BaseLoop, host: str | None, port: int | str | None, family: int, flags: int
) -> list[dns.AddrInfo]:
    infos = await dns.resolve(loop, (host, port), family=family, type_=socket.SOCK_STREAM, flags=flags)
    if not infos:
        raise OSError(f"getaddrinfo({host!r}) returned empty list")
    return infos


def bind_all(
    loop: BaseLoop,
    infos: list[dns.AddrInfo],
    reuse_address: bool | None,
    reuse_port: bool | None,
    keep_alive: bool | None,
) -> list[socket.socket]:
    """Return a bound socket for each address. On an error, close all of them.

    An address is left out if the system does not support its family. Where this Python's asyncio skips an address that
    this machine does not have, such an address is left out, too, and OSError is raised if no address is left.
    """
    sockets: list[socket.socket] = []
    try:
        for family, type_, proto, _, address in infos:
            loop._check_limits(False)
            try:
                sock = socket.socket(family, type_, proto)
            except OSError:
                # getaddrinfo also returns address families that this system does not support.
                if loop.get_debug():
                    logger.warning(
                        "create_server() failed to create socket.socket(%r, %r, %r)",
                        family,
                        type_,
                        proto,
                        exc_info=True,
                    )
                continue
            sockets.append(sock)
            _set_options(sock, reuse_address, reuse_port, keep_alive)
            if not _bind(loop, sock, address):
                sockets.pop().close()
        if not sockets and SKIPS_UNAVAILABLE_ADDRESSES:
            raise OSError(f"could not bind on any address out of {[info[4] for info in infos]!r}")
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def _set_options(
    sock: socket.socket, reuse_address: bool | None, reuse_port: bool | None, keep_alive: bool | None
) -> None:
    if reuse_address:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)
    if reuse_port and sock.family in (socket.AF_INET, socket.AF_INET6):
        # Since version 6.12.9, Linux refuses SO_REUSEPORT for families other than these two.
        set_reuse_port(sock)
    if keep_alive:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, True)
    if sock.family == socket.AF_INET6 and hasattr(socket, "IPPROTO_IPV6"):
        # Otherwise the IPv6 socket would occupy the IPv4 port as well, and binding the IPv4 socket would fail.
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, True)


def _bind(loop: BaseLoop, sock: socket.socket, address: Any) -> bool:
    """Bind ``sock``. Return False if this machine does not have the address and asyncio would skip it.

    Raises:
        OSError: with the system's errno and asyncio's text, which contains the address.
    """
    try:
        sock.bind(address)
        return True
    except OSError as exc:
        text = f"error while attempting to bind on address {address!r}: {error_text(exc)}"
        if exc.errno == errno.EADDRNOTAVAIL and SKIPS_UNAVAILABLE_ADDRESSES:
            if loop.get_debug():
                logger.warning(text)
            return False
        raise OSError(exc.errno, text) from None
