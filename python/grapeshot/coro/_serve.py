"""TCP and unix servers with one coro per connection: :func:`serve` and the :class:`Server` that it returns.

    listening socket --- one coro: take a place, accept, spawn ---> one coro per connection: TLS, then the handler
            ^                          |
            '------ wait for more -----'      (it does not hold a place while it waits)

A ``limit`` sets the number of places, and each open connection holds one. A server belongs to the thread in which
``serve`` was called, and to the loop that runs, or will run, in this thread.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import socket

from grapeshot import _core
from grapeshot._loop import serve as _serve
from grapeshot._loop import unix
from grapeshot._loop.limits import LimitError
from grapeshot._start.threads import check as check_threads

from . import _dns
from ._bridge import own_loop
from ._coroutine import shut_down
from ._countdown import Countdown
from ._socket import sock as Sock  # noqa: N812
from ._socket import wait_for_read
from ._sync import event, inverted_semaphore, semaphore

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl as _ssl
    from collections.abc import Callable, Sequence
    from typing import Any

    from ._coroutine import Coro

# asyncio's logger, as for the loop's own servers.
_logger = logging.getLogger("asyncio")

# When a server has run out of descriptors or memory, it waits this many seconds before it accepts again. The loop's own
# servers wait equally long.
_RETRY_DELAY_S = 1.0
_OUT_OF_RESOURCES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
# Errors that concern only one connection, which was lost before it was accepted. Source: accept(2).
_OF_CONNECTION = frozenset(
    getattr(errno, name)
    for name in errno.errorcode.values()
    if name
    in {
        "ECONNABORTED",
        "EHOSTDOWN",
        "EHOSTUNREACH",
        "ENETDOWN",
        "ENETUNREACH",
        "ENONET",
        "ENOPROTOOPT",
        "EOPNOTSUPP",
        "EPERM",
        "EPROTO",
    }
)


class Server:
    """Listening sockets, and a coro for each connection that was accepted from them. :func:`serve` makes servers.

    As a context manager it calls :meth:`stop` at the end of the block, even after an exception.
    """

    def __init__(
        self,
        handler: Callable[[Any, Any], object],
        sockets: list[Sock],
        limit: int | None,
        context: _ssl.SSLContext | None,
        handshake_timeout_s: float,
        on_closed: Callable[[], None] | None,
    ) -> None:
        self._handler = handler
        self._name = getattr(handler, "__qualname__", type(handler).__qualname__)
        self._sockets = sockets
        self._places = None if limit is None else semaphore(limit)
        self._context = context
        self._handshake_timeout_s = handshake_timeout_s
        self._on_closed = on_closed
        self._loop: Any = None
        # Each coro and its socket. The socket is closed when the coro has ended, even if the coro never ran.
        self._acceptors: dict[Coro[Any], Sock] = {}
        self._connections: dict[Coro[Any], socket.socket] = {}
        self._is_closed = event()
        # Wakes acceptors that wait because the loop has reached one of its limits.
        self._has_ended = event()
        self._is_pause_logged = False
        # counts the coros that have not ended, both acceptors and connections
        self._under_way = inverted_semaphore()

    def __repr__(self) -> str:
        if self._is_closed.is_set():
            return f"<{type(self).__name__} closed, {len(self._connections)} connections>"
        addresses = ", ".join(str(sock.getsockname()) for sock in self._sockets)
        return f"<{type(self).__name__} on {addresses}, {len(self._connections)} connections>"

    @property
    def sockets(self) -> tuple[Sock, ...]:
        """The listening sockets; empty once the server is closed."""
        return () if self._is_closed.is_set() else tuple(self._sockets)

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._connections)

    def close(self) -> None:
        """Stop accepting, and close the listening sockets. Open connections go on. A second call does nothing.

        Raises:
            ScheduleError: called in a thread other than the server's.
        """
        if self._is_closed.is_set():
            return
        for co in list(self._acceptors):
            co._check_thread()
        self._is_closed.set()
        for co in list(self._acceptors):
            if co._status != "running":
                shut_down(co)
        for sock in self._sockets:
            sock.close()
        if self._on_closed is not None:
            self._on_closed()

    def wait_closed(self, timeout: float | None = None) -> bool:
        """Wait until the server is closed and its last connection has ended.

        Returns False if that takes longer than ``timeout`` seconds, else True.

        Raises:
            RuntimeError: called in the coro of one of this server's connections.
            YieldFromMain: not called in a coro.
        """
        self._check_waiter()
        left_s = Countdown(timeout)
        return self._is_closed.wait(left_s()) and self._under_way.block_till_zero(left_s())

    def stop(self, timeout: float | None = 10.0) -> None:
        """Close the server, and give its connections ``timeout`` seconds to end before they are shut down.

        This method returns when all connections have ended. If ``timeout`` is None, they are not shut down. If the
        calling coro is interrupted during the wait, they are shut down at once.

        Raises the exceptions of :meth:`close` and :meth:`wait_closed`.
        """
        self._check_waiter()
        self.close()
        try:
            has_ended = self.wait_closed(timeout)
        except BaseException:
            self._shut_down_connections()
            self.wait_closed()
            raise
        if not has_ended:
            self._shut_down_connections()
            self.wait_closed()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self, loop: Any) -> None:
        self._loop = loop
        for sock in self._sockets:
            co: Coro[Any] = _core._coro_spawn(self._accept_all, sock, name=f"accept {sock.getsockname()}")
            self._acceptors[co] = sock
            self._under_way.acquire()
            co.add_done_callback(self._on_acceptor_end)

    def _check_waiter(self) -> None:
        if _core._coro_current() in self._connections:
            raise RuntimeError("a connection cannot wait for its own end")

    def _shut_down_connections(self) -> None:
        for co in list(self._connections):
            shut_down(co)

    # ------------------------------------------------------------------ accepting

    def _accept_all(self, listener: Sock) -> None:
        """Accept connections until the server is closed, or until accept() fails in a way that is not temporary."""
        with listener:
            while not self._is_closed.is_set():
                try:
                    self._loop._check_limits(False)
                    self._accept(listener)
                except LimitError as exc:
                    self._wait_for_place(exc)
                except OSError as exc:
                    if self._is_closed.is_set():
                        return
                    if exc.errno in _OUT_OF_RESOURCES:
                        # The listening socket stays readable, so without a pause this coro would retry all the time.
                        self._report("socket.accept() out of system resource", exc, listener)
                        _core._coro_sleep_relative(_RETRY_DELAY_S)
                    elif exc.errno not in _OF_CONNECTION:
                        self._report("socket.accept() failed", exc, listener)
                        return

    def _accept(self, listener: Sock) -> None:
        """Take a place, then accept one connection. If no client is waiting, wait for one without holding a place."""
        places = self._places
        if places is not None:
            places.acquire()
        try:
            _core._coro_act()  # yields now and then, so that other coros run even if clients connect all the time
            connection, address = listener.accept()
            self._spawn(connection, address)
        except BlockingIOError:
            if places is not None:
                places.release()
            wait_for_read(listener)
        except BaseException:
            if places is not None:
                places.release()
            raise

    def _wait_for_place(self, exc: LimitError) -> None:
        """Wait until a connection of this server has ended, but at most _RETRY_DELAY_S.

        The loop's limits count all descriptors and coros, not only this server's. The time is limited because other
        code may also make room, and that does not end this wait.
        """
        if not self._is_pause_logged:
            self._is_pause_logged = True
            _logger.warning("%r has paused accepting: %s", self, exc)
        self._has_ended.clear()
        self._has_ended.wait(_RETRY_DELAY_S)

    def _spawn(self, connection: Sock, address: Any) -> None:
        co: Coro[Any] | None = None
        try:
            while co is None:
                try:
                    co = _core._coro_spawn(self._serve, connection, address, name=f"{self._name} {address}")
                except LimitError as exc:
                    self._wait_for_place(exc)
        except BaseException as exc:
            connection.close()
            if isinstance(exc, MemoryError):
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from exc
            raise
        self._connections[co] = connection
        self._under_way.acquire()
        co.add_done_callback(self._on_connection_end)

    def _on_acceptor_end(self, co: Coro[Any]) -> None:
        self._acceptors.pop(co).close()
        self._under_way.release()
        if not self._acceptors and not co.cancelled():
            self._note_last_failure()

    def _note_last_failure(self) -> None:
        """Called when accept() has failed on the last listening socket."""
        self.close()

    def _on_connection_end(self, co: Coro[Any]) -> None:
        self._connections.pop(co).close()
        self._under_way.release()
        self._has_ended.set()
        if self._places is not None:
            self._places.release()
        exc = co._failure_unseen()
        if exc is not None and not co.cancelled():
            co._failure()  # marks the exception as seen, so that it is not reported again when the coro is freed
            message = "Exception in the handler of a connection"
            self._loop.call_exception_handler({"message": message, "exception": exc, "coro": co})

    def _report(self, message: str, exc: OSError, listener: Sock) -> None:
        self._loop.call_exception_handler({"message": message, "exception": exc, "socket": listener})

    # ------------------------------------------------------------------ a connection

    def _serve(self, connection: Sock, address: Any) -> None:
        if self._context is None:
            with connection:
                self._handler(connection, address)
            return
        connection.settimeout(self._handshake_timeout_s)
        try:
            secure: Any = connection.start_tls(self._context, server_side=True)
        except OSError as exc:
            # Log it only in debug mode, like the loop's own servers: scanners and clients that do not trust the
            # certificate fail all the time.
            if self._loop.get_debug():
                _logger.debug("%r: TLS handshake with %r failed", self, address, exc_info=exc)
            return
        with secure:
            secure.settimeout(socket.getdefaulttimeout())
            self._handler(secure, address)
            _send_close_notify(secure)


def _send_close_notify(secure: Any) -> None:
    """Send TLS's close_notify to the peer, without waiting for the peer's own close_notify."""
    if secure.fileno() < 0:
        return
    try:
        secure.settimeout(0)
        secure.unwrap()
    except (OSError, ValueError):
        pass  # OSError: unwrap() would wait for the peer, or the peer is gone; ValueError: the handler has ended TLS


def serve(
    handler: Callable[[Any, Any], object],
    host: str | Sequence[str] | None = None,
    port: int | str | None = None,
    *,
    path: str | bytes | os.PathLike[str] | None = None,
    sock: socket.socket | None = None,
    limit: int | None = None,
    ssl: _ssl.SSLContext | None = None,
    ssl_handshake_timeout: float = 60.0,
    backlog: int = 100,
    reuse_port: bool = False,
    threads: int = 1,
) -> Server:
    """Listen, and call ``handler(sock, address)`` in a coro of its own for each connection; return the :class:`Server`.

    ::

        def echo(sock, address):
            while data := sock.recv(65536):
                sock.sendall(data)

        with coro.serve(echo, "localhost", 8888) as server:
            server.wait_closed()

    The connection is closed when the handler returns or raises. An exception of a handler ends only that connection,
    and is reported to the exception notifier or the loop's exception handler. With TLS (``ssl``), the handler is called
    after the handshake. The handshake runs in the connection's coro, so it does not delay other connections.

    Args:
        host: one host or several; None and ``""`` mean every interface, one socket for IPv4 and one for IPv6.
        port: 0 chooses a free port for each socket; ``server.sockets`` tells which.
        path: the path of a unix socket, instead of host and port. An existing socket file is replaced. Closing the
            server removes the file.
        sock: a stream socket that is bound or listening, instead of an address. The server takes it over.
        limit: how many connections may be open at once. When the limit is reached, the server does not accept more
            until one has ended; further clients wait in the system's queue, whose length is ``backlog``.
        ssl: the context for TLS; None means no TLS.
        ssl_handshake_timeout: how many seconds a TLS handshake may take.
        backlog: the length of the system's queue of connections that were not accepted yet.
        reuse_port: whether other sockets may listen on the same port (``SO_REUSEPORT``).
        threads: how many threads serve: the calling thread, and further threads with a loop each. On a free-threaded
            Python they run at the same time; with the GIL they are not faster than one thread, and a warning says so.
            The system spreads the connections over them: each thread listens on the same port (``SO_REUSEPORT``). With
            a path, or with a ``sock`` that lacks this option, all threads accept from the same socket. The threads
            divide ``limit`` among themselves. The server's methods must be called in the thread that called ``serve``,
            and act on all threads.

    Raises:
        OSError: an address cannot be bound.
        RuntimeError: a thread cannot be started.
        LimitError: the loop has reached its limit of descriptors or coros (:meth:`Loop.set_limits`).
        socket.gaierror: a host does not resolve.
        OverflowError: the port is not between 0 and 65535.
        ValueError, TypeError: arguments contradict each other, or have a wrong type.
    """
    _core._coro_check_function(handler, "serve")
    check_threads(handler, threads)
    if limit is not None and limit < threads:
        raise ValueError(f"the limit of connections must be at least {threads}, got {limit}")
    if ssl is not None and not hasattr(ssl, "wrap_socket"):
        raise TypeError("ssl argument must be an SSLContext or None")
    if (path is not None) + (sock is not None) + (host is not None or port is not None) != 1:
        raise ValueError("serve() needs exactly one of these: a host and a port, a path, or a socket")
    loop = own_loop()
    plain, on_closed = _bound(loop, host, port, path, sock, reuse_port)
    listen = functools.partial(_listen, handler, ssl, ssl_handshake_timeout, backlog)
    if threads == 1:
        return listen(limit, loop, plain, on_closed)
    from ._serve_in_threads import serve_in_threads  # most programs do not need it

    return serve_in_threads(loop, plain, on_closed, listen, limit, threads, is_own=sock is None)


def _listen(
    handler: Callable[[Any, Any], object],
    context: _ssl.SSLContext | None,
    handshake_timeout_s: float,
    backlog: int,
    limit: int | None,
    loop: Any,
    plain: list[socket.socket],
    on_closed: Callable[[], None] | None = None,
    kind: type[Server] = Server,
) -> Server:
    """Start a server that takes over the bound sockets."""
    listeners: list[Sock] = []
    try:
        for each in plain:
            listeners.append(_taken_over(each))
            listeners[-1].listen(backlog)
        server = kind(handler, listeners, limit, context, handshake_timeout_s, on_closed)
        server._start(loop)
    except BaseException:
        for each in [*plain, *listeners]:
            each.close()
        if on_closed is not None:
            on_closed()
        raise
    return server


def _bound(
    loop: Any,
    host: str | Sequence[str] | None,
    port: int | str | None,
    path: str | bytes | os.PathLike[str] | None,
    sock: socket.socket | None,
    reuse_port: bool,
) -> tuple[list[socket.socket], Callable[[], None] | None]:
    """Return bound sockets, and for a unix socket the function that removes its file."""
    if sock is not None:
        if sock.type != socket.SOCK_STREAM:
            raise ValueError(f"A stream socket was expected, got {sock!r}")
        return [sock], None
    if path is not None:
        bound = unix.bind(os.fspath(path))
        return [bound], unix.file_remover(bound)
    if isinstance(port, int) and not 0 <= port <= 65535:
        # Check it here, because getaddrinfo() would silently use the lowest 16 bits.
        raise OverflowError("bind(): port must be 0-65535.")
    hosts = [None] if host in (None, "") else [host] if isinstance(host, str) else list(host or ())
    infos = [
        info
        for each in hosts
        for info in _dns.getaddrinfo(each, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    ]
    return _serve.bind_all(loop, list(dict.fromkeys(infos)), os.name == "posix", reuse_port, None), None


def _taken_over(plain: socket.socket) -> Sock:
    """Return a nonblocking :class:`sock` that takes over the descriptor of ``plain``."""
    listener = Sock(plain.family, plain.type, plain.proto, fileno=plain.detach())
    listener.settimeout(0)
    if plain.family != getattr(socket, "AF_UNIX", None):
        try:
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)  # connections inherit it
        except OSError:
            pass  # not TCP
    return listener
