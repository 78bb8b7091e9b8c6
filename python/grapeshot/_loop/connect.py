"""create_connection and connect_accepted_socket: resolve the name, try the addresses, make a native transport.

The code runs once per connection, in the loop's thread. Arguments are checked in the same order, and with the same
error texts, as in the asyncio of the running Python version. ``all_errors`` (in asyncio: 3.12+) works on every version.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import socket
from asyncio.log import logger
from collections.abc import Callable, Coroutine, Iterable

from . import dns, tls
from .base import BaseLoop
from .checks import check_plain_socket, check_stream_socket, check_tls_only_options
from .fixes import SHOWS_WHOLE_ERROR
from .opening import open_over

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    _P = TypeVar("_P", bound=asyncio.BaseProtocol)


async def create_connection(
    loop: BaseLoop,
    protocol_factory: Callable[[], _P],
    host: str | None = None,
    port: int | str | None = None,
    *,
    ssl: Any = None,
    family: int = 0,
    proto: int = 0,
    flags: int = 0,
    sock: socket.socket | None = None,
    local_addr: tuple[str, int] | None = None,
    server_hostname: str | None = None,
    ssl_handshake_timeout: float | None = None,
    ssl_shutdown_timeout: float | None = None,
    happy_eyeballs_delay: float | None = None,
    interleave: int | None = None,
    all_errors: bool = False,
) -> tuple[asyncio.Transport, _P]:
    """Connect to ``host`` and ``port``, or take the connected ``sock``; return ``(transport, protocol)``.

    If the host has several addresses, they are tried one after another. With ``happy_eyeballs_delay``, the next attempt
    starts as soon as the previous one has failed, or has run for that many seconds. The first address that connects is
    used (RFC 8305). ``interleave`` is the number of addresses of the first family that are tried before the first
    address of another family. After that, the families alternate. The default with ``happy_eyeballs_delay`` is 1. If
    all attempts fail, an OSError is raised, or with ``all_errors`` an ExceptionGroup with the error of each attempt.

    Raises:
        LimitError: the loop has reached its limit of connections or descriptors (:meth:`Loop.set_limits`).
        OSError: every attempt to connect has failed, or the name does not resolve (:class:`socket.gaierror`).
        ExceptionGroup: every attempt to connect has failed, and ``all_errors`` is set.
        ValueError: arguments contradict each other, or ``sock`` is not a stream socket.
        TypeError: ``sock`` is an ``ssl.SSLSocket``.
        ssl.SSLError, ConnectionResetError, ConnectionAbortedError: the TLS handshake failed; see
            :func:`grapeshot._loop.tls.open_tls`.

    Source: :meth:`asyncio.loop.create_connection`.
    """
    if server_hostname is not None and not ssl:
        raise ValueError("server_hostname is only meaningful with ssl")
    if server_hostname is None and ssl and not host:
        raise ValueError("You must set server_hostname when using ssl without a host")
    check_tls_only_options(
        bool(ssl), ssl_handshake_timeout=ssl_handshake_timeout, ssl_shutdown_timeout=ssl_shutdown_timeout
    )
    if sock is not None:
        check_plain_socket(sock)
    if server_hostname is None and ssl:
        server_hostname = host
    if happy_eyeballs_delay is not None and interleave is None:
        interleave = 1
    if host is not None or port is not None:
        if sock is not None:
            raise ValueError("host/port and sock can not be specified at the same time")
        loop._check_limits(True)
        options = {"family": family, "proto": proto, "flags": flags}
        infos = await _resolve_or_fail(loop, (host, port), options)
        local_infos = None if local_addr is None else await _resolve_or_fail(loop, local_addr, options)
        if interleave:
            infos = _interleaved(infos, interleave)
        sock = await _connect_first(loop, infos, local_infos, happy_eyeballs_delay, all_errors)
    elif sock is None:
        raise ValueError("host and port was not specified and no sock specified")
    else:
        check_stream_socket(sock)
    transport, protocol = await open_transport(
        loop,
        sock,
        protocol_factory,
        ssl,
        ssl_handshake_timeout,
        ssl_shutdown_timeout,
        server_hostname=server_hostname,
    )
    if loop.get_debug():
        sock = transport.get_extra_info("socket")
        logger.debug("%r connected to %s:%r: (%r, %r)", sock, host, port, transport, protocol)
    return transport, protocol


async def connect_accepted_socket(
    loop: BaseLoop,
    protocol_factory: Callable[[], _P],
    sock: socket.socket,
    *,
    ssl: Any = None,
    ssl_handshake_timeout: float | None = None,
    ssl_shutdown_timeout: float | None = None,
) -> tuple[asyncio.Transport, _P]:
    """Take over ``sock``, a connection that was accepted elsewhere; return ``(transport, protocol)``.

    Raises:
        ValueError: ``sock`` is not a stream socket, or a TLS option is given without ``ssl``.
        TypeError: ``sock`` is an ``ssl.SSLSocket``.
        ssl.SSLError, ConnectionResetError, ConnectionAbortedError: the TLS handshake failed.

    Source: :meth:`asyncio.loop.connect_accepted_socket`.
    """
    check_stream_socket(sock)
    check_tls_only_options(
        bool(ssl), ssl_handshake_timeout=ssl_handshake_timeout, ssl_shutdown_timeout=ssl_shutdown_timeout
    )
    check_plain_socket(sock)
    transport, protocol = await open_transport(
        loop, sock, protocol_factory, ssl, ssl_handshake_timeout, ssl_shutdown_timeout, server_side=True
    )
    if loop.get_debug():
        logger.debug("%r handled: (%r, %r)", transport.get_extra_info("socket"), transport, protocol)
    return transport, protocol


async def open_transport(
    loop: BaseLoop,
    sock: socket.socket,
    protocol_factory: Callable[[], _P],
    ssl: Any = None,
    handshake_timeout: float | None = None,
    shutdown_timeout: float | None = None,
    *,
    server_side: bool = False,
    server_hostname: str | None = None,
) -> tuple[asyncio.Transport, _P]:
    """Make the protocol and a native transport over ``sock``; return after ``connection_made`` was called.

    With ``ssl`` it is a TLS transport, and ``connection_made`` is called after the handshake (see
    :func:`grapeshot._loop.tls.open_tls`). If the factory raises, or the wait is cancelled, the socket is closed.
    """
    if ssl:
        return await tls.open_tls(
            loop,
            sock,
            protocol_factory,
            ssl,
            handshake_timeout,
            shutdown_timeout,
            server_side=server_side,
            server_hostname=server_hostname,
        )
    return await open_over(loop, sock, protocol_factory, lambda protocol, waiter: loop._stream(sock, protocol, waiter))


async def _resolve_or_fail(loop: BaseLoop, address: Any, options: dict[str, int]) -> list[dns.AddrInfo]:
    infos = await dns.resolve(loop, address, type_=socket.SOCK_STREAM, **options)
    if not infos:
        raise OSError("getaddrinfo() returned empty list")
    return infos


def _interleaved(infos: Iterable[dns.AddrInfo], first_family_count: int) -> list[dns.AddrInfo]:
    """Reorder so that the families alternate, after ``first_family_count`` addresses of the family that comes first."""
    by_family: dict[int, collections.deque[dns.AddrInfo]] = {}
    for info in infos:
        by_family.setdefault(info[0], collections.deque()).append(info)
    families = list(by_family.values())
    ordered = []
    if first_family_count > 1:
        first = families[0]
        ordered = [first.popleft() for _ in range(min(first_family_count - 1, len(first)))]
    for taken in itertools.zip_longest(*families):
        ordered += [info for info in taken if info is not None]
    return ordered


async def _connect_first(
    loop: BaseLoop,
    infos: list[dns.AddrInfo],
    local_infos: list[dns.AddrInfo] | None,
    delay_s: float | None,
    all_errors: bool,
) -> socket.socket:
    """Return a socket connected to one of ``infos``. If all attempts fail, raise the same exception as asyncio."""
    errors: list[list[OSError]] = []

    def attempt(info: dns.AddrInfo) -> Coroutine[Any, Any, socket.socket]:
        own_errors: list[OSError] = []
        errors.append(own_errors)  # in the order in which the attempts start, not in which they fail
        return _connect_one(loop, info, local_infos, own_errors)

    try:
        if delay_s is None:
            sock = await _one_by_one(attempt, infos)
        else:
            sock = await _staggered(loop, attempt, infos, delay_s)
        if sock is not None:
            return sock
        raise _summary([exc for own_errors in errors for exc in own_errors], all_errors)
    finally:
        # Break a reference cycle: the exceptions' tracebacks refer to this frame, and this frame to the exceptions.
        errors.clear()


def _summary(errors: list[OSError], all_errors: bool) -> BaseException:
    """Return the exception to raise when every attempt has failed."""
    if not errors:
        return TimeoutError("create_connection failed")
    if all_errors:
        return ExceptionGroup("create_connection failed", errors)
    if len({str(exc) for exc in errors}) == 1:
        return errors[0]
    return OSError("Multiple exceptions: {}".format(", ".join(str(exc) for exc in errors)))


async def _one_by_one(
    attempt: Callable[[dns.AddrInfo], Coroutine[Any, Any, socket.socket]], infos: list[dns.AddrInfo]
) -> socket.socket | None:
    for info in infos:
        try:
            return await attempt(info)
        except OSError:
            continue  # the attempt has recorded the error
    return None


async def _staggered(
    loop: BaseLoop,
    attempt: Callable[[dns.AddrInfo], Coroutine[Any, Any, socket.socket]],
    infos: list[dns.AddrInfo],
    delay_s: float,
) -> socket.socket | None:
    """Race the attempts. Each starts ``delay_s`` seconds after the previous one, or earlier if that one has failed.

        attempt 1  |--------------- still trying ----------x  cancelled, socket closed
        attempt 2         |--- refused
        attempt 3             |------------ connected         the winner
                   0      delay

    An error other than OSError ends the race. When this function returns or raises, no attempt is running, and every
    socket except the winner's is closed.
    """
    running: set[asyncio.Task[socket.socket]] = set()
    waiting = collections.deque(infos)
    winner: socket.socket | None = None
    try:
        while winner is None and (waiting or running):
            newest = None
            if waiting:
                newest = loop.create_task(attempt(waiting.popleft()))
                running.add(newest)
            next_start_s = loop.time() + delay_s
            while winner is None and running:
                timeout_s = max(0.0, next_start_s - loop.time()) if waiting else None
                done, running = await asyncio.wait(running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                winner = _first_socket(done)
                if not done or newest in done:
                    break
    finally:
        try:
            await _stop_attempts(running)
        except BaseException:
            if winner is not None:
                winner.close()
            raise
    return winner


def _first_socket(done: Iterable[asyncio.Task[socket.socket]]) -> socket.socket | None:
    """Return the socket of an attempt that has connected, or None. Close the sockets of the other attempts.

    If no attempt has connected, but one has raised an error that is not an OSError, raise that error.

    For a failed task, this reads ``task.exception()``. Calling ``task.result()`` instead would raise the error in this
    frame, and the traceback of the error would keep the task alive.
    """
    winner: socket.socket | None = None
    unexpected: BaseException | None = None
    error: BaseException | None = None
    for task in done:
        if task.cancelled():
            continue
        error = task.exception()
        if error is not None:
            if not isinstance(error, OSError):  # the attempt has recorded an OSError
                unexpected = error
        elif winner is None:
            winner = task.result()
        else:
            task.result().close()
    try:
        if unexpected is not None and winner is None:
            raise unexpected
        return winner
    finally:
        unexpected = error = None  # break a reference cycle: the raised exception's traceback refers to this frame


async def _stop_attempts(running: set[asyncio.Task[socket.socket]]) -> None:
    """Cancel attempts and wait until they have ended. Close the socket of any that has connected already."""
    if not running:
        return
    for task in running:
        task.cancel()
    for result in await asyncio.gather(*running, return_exceptions=True):
        if isinstance(result, socket.socket):
            result.close()


async def _connect_one(
    loop: BaseLoop, info: dns.AddrInfo, local_infos: list[dns.AddrInfo] | None, errors: list[OSError]
) -> socket.socket:
    """Create, bind and connect one socket. On failure close it; an OSError is also appended to ``errors``."""
    family, type_, proto, _, address = info
    sock: socket.socket | None = None
    try:
        loop._check_limits(False)
        sock = socket.socket(family=family, type=type_, proto=proto)
        sock.setblocking(False)
        if local_infos is not None:
            _bind_local(sock, family, local_infos, errors)
        await loop.sock_connect(sock, address)
        return sock
    except BaseException as exc:
        if isinstance(exc, OSError):
            errors.append(exc)
        if sock is not None:
            try:
                sock.close()
            except OSError:
                pass  # the socket never connected, so no data is lost; raising this error would hide the first one
        raise
    finally:
        del errors  # break a reference cycle: the exception's traceback refers to this frame


def _bind_local(sock: socket.socket, family: int, local_infos: list[dns.AddrInfo], errors: list[OSError]) -> None:
    """Bind to the first local address of the right family that can be bound. If all fail, raise the last error."""
    failed = None
    for local_family, _, _, _, local_address in local_infos:
        if local_family != family:
            continue
        try:
            sock.bind(local_address)
            return
        except OSError as exc:
            reason = error_text(exc)
            failed = OSError(exc.errno, f"error while attempting to bind on address {local_address!r}: {reason}")
            errors.append(failed)
    try:
        if failed is not None:
            raise errors.pop()  # the caller appends the error that is raised
        raise OSError(f"no matching local address with {family=} found")
    finally:
        del errors, failed


def error_text(exc: OSError) -> str:
    """Return the lower-case reason that this Python's asyncio puts into its bind errors."""
    return str(exc).lower() if SHOWS_WHOLE_ERROR else (exc.strerror or str(exc)).lower()
