"""``serve(threads=N)``: a server whose connections are spread over several threads.

    calling thread    loop --- a Server, which also tells the others to close and to stop
    thread 2 ... N    loop --- a coro: starts a Server, waits until it is closed

All sockets are bound in the calling thread, so an address that cannot be bound raises there.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import os
import socket
import threading
import weakref

from grapeshot import threads as _threads
from grapeshot._start.threads import warn_of_gil

from ._bridge import await_, own_loop, run
from ._countdown import Countdown
from ._patching._thread import RealThread
from ._serve import Server

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class _Other:
    """A further thread, with a loop and a server."""

    def __init__(self, name: str, plain: list[socket.socket], listen: Callable[..., Server]) -> None:
        self.name = name
        self._plain, self._listen = plain, listen
        self._loop: Any = None
        self.server: Any = None
        # Set if serve() fails or the interpreter exits. Either may happen before the thread has started its server.
        self.must_end = False
        self.has_started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.has_ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        _running.add(self)
        RealThread(target=self._run, name=self.name).start()

    def _run(self) -> None:
        try:
            run(self._serve)
        except BaseException as exc:
            for each in self._plain:  # no effect on sockets that the server has taken over
                each.close()
            exc.add_note(f"raised in thread {self.name!r}")
            for future in (self.has_started, self.has_ended):
                if not future.done():
                    future.set_exception(exc)
        else:
            self.has_ended.set_result(None)

    def _serve(self) -> None:
        self._loop = own_loop()
        self.server = self._listen(self._loop, self._plain)
        self.has_started.set_result(None)
        if self.must_end:
            self.server.stop(0)
        self.server.wait_closed()

    def end(self) -> None:
        """Let the thread end as soon as it can, even if it is still starting."""
        self.must_end = True
        if self.server is not None:
            self.tell("stop", 0)

    def tell(self, method: str, *args: Any) -> None:
        """Let the further thread call a method of its server. Does not wait for the call."""
        if not self.has_ended.done():
            try:
                _threads.spawn_on(self._loop, getattr(self.server, method), *args)
            except RuntimeError:
                pass  # the loop has just been closed, and the server with it


# The further threads of all servers. When the interpreter exits, `_end_all` ends these threads, so that the process can
# end even if the loop of the calling thread never runs again.
_running: weakref.WeakSet[_Other] = weakref.WeakSet()


def _end_all() -> None:
    for other in list(_running):
        other.end()


threading._register_atexit(_end_all)  # type: ignore[attr-defined]
os.register_at_fork(after_in_child=_running.clear)


class ServerInThreads(Server):
    """The server of the calling thread. Its methods act on the servers of all threads."""

    _others: tuple[_Other, ...] = ()
    _accepts_here = True

    @property
    def connections(self) -> int:
        """The number of open connections, in all threads."""
        of_others: int = sum(other.server.connections for other in self._others)
        return len(self._connections) + of_others

    def close(self) -> None:
        """Stop accepting in all threads, and close the listening sockets. Open connections go on."""
        if not self._is_closed.is_set():
            super().close()
            self._tell("close")

    def wait_closed(self, timeout: float | None = None) -> bool:
        """Wait until the server is closed and its last connection has ended, in all threads.

        Returns False if that takes longer than ``timeout`` seconds, else True.

        Raises:
            Exception: the exception that ended one of the other threads. The server is then closed in all threads.
        """
        left_s = Countdown(timeout)
        if not super().wait_closed(left_s()):
            return False
        for other in self._others:
            if not other.has_ended.done():
                await_(asyncio.wait([asyncio.wrap_future(other.has_ended)], timeout=left_s()))
            if not other.has_ended.done():
                return False
            other.has_ended.result()
        return True

    def stop(self, timeout: float | None = 10.0) -> None:
        """Close the server, and give its connections ``timeout`` seconds to end before they are shut down."""
        self._check_waiter()
        self.close()  # raises ScheduleError if this is not the server's thread
        self._tell("stop", timeout)
        super().stop(timeout)

    def _shut_down_connections(self) -> None:
        super()._shut_down_connections()
        self._tell("_shut_down_connections")

    def _note_last_failure(self) -> None:
        self._accepts_here = False
        self._close_if_nobody_accepts()

    def _close_if_nobody_accepts(self) -> None:
        if not self._accepts_here and all(other.has_ended.done() for other in self._others):
            self.close()

    def _on_acceptor_end(self, co: Any) -> None:
        super()._on_acceptor_end(co)
        if not self._acceptors and not self._is_closed.is_set() and co.cancelled():
            # The loop is ending. The other threads must not go on alone.
            self._tell("stop", 0)

    def _tell(self, method: str, *args: Any) -> None:
        for other in self._others:
            other.tell(method, *args)

    def _on_thread_end(self, other: _Other) -> None:
        """Called in the thread that called ``serve``, when one of the other threads has ended."""
        if other.has_ended.exception() is not None and not self._is_closed.is_set():
            message = f"Thread {other.name!r} of a server has failed; the server is closed"
            self._loop.call_exception_handler({"message": message, "exception": other.has_ended.exception()})
            self.close()
        self._close_if_nobody_accepts()


def serve_in_threads(
    loop: Any,
    plain: list[socket.socket],
    on_closed: Callable[[], None] | None,
    listen: Callable[..., Server],
    limit: int | None,
    threads: int,
    *,
    is_own: bool,
) -> Server:
    """Start a server in this thread and in ``threads - 1`` others. ``is_own``: ``serve`` made the sockets itself."""
    parts: list[list[socket.socket]] = []
    try:
        warn_of_gil(threads)
        if is_own:
            for place, each in enumerate(plain):
                plain[place] = _sharing_port(each)
        for _ in range(threads - 1):
            parts.append([])
            for each in plain:
                parts[-1].append(_second_listener(each))
    except BaseException:
        for each in [*plain, *(each for part in parts for each in part)]:
            each.close()
        if on_closed is not None:
            on_closed()
        raise
    limits = [None if limit is None else limit // threads + (number < limit % threads) for number in range(threads)]
    server: Any = None
    others: list[_Other] = []
    try:
        server = listen(limits[0], loop, plain, on_closed, ServerInThreads)  # closes its own sockets if it fails
        for part in parts:
            name = f"{server._name}-{len(others) + 2}"
            others.append(_Other(name, part, functools.partial(listen, limits[len(others) + 1])))
            others[-1].has_started.result()  # blocks; no deadlock, because the new thread does not wait for this one
            server._others = tuple(others)
    except BaseException:
        for part in parts[len(others) :]:
            for each in part:
                each.close()
        for other in others:
            other.end()
        if server is not None:
            server.close()
        raise
    for other in others:
        other.has_ended.add_done_callback(functools.partial(_tell_of_end, loop, server, other))
    return server  # type: ignore[no-any-return]


def _tell_of_end(loop: Any, server: ServerInThreads, other: _Other, _: object) -> None:
    try:
        loop.call_soon_threadsafe(server._on_thread_end, other)
    except RuntimeError:
        pass  # the loop is closed


def _sharing_port(sock: socket.socket) -> socket.socket:
    """Replace a TCP socket without SO_REUSEPORT by one with this option, bound to the same address.

    No other program listens there: if one did, binding the given socket without the option would have failed. A unix
    socket, or a socket that has the option already, is returned as it is.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or _shares_port(sock):
        return sock
    address, v6_only = sock.getsockname(), _v6_only(sock)
    sock.close()
    return _bound_to(address, sock.family, sock.proto, v6_only)


def _second_listener(first: socket.socket) -> socket.socket:
    """Return a socket that gets a part of the connections to the address of ``first``."""
    if first.family not in (socket.AF_INET, socket.AF_INET6) or not _shares_port(first):
        return first.dup()
    return _bound_to(first.getsockname(), first.family, first.proto, _v6_only(first))


def _shares_port(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT))


def _v6_only(sock: socket.socket) -> int:
    return sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) if sock.family == socket.AF_INET6 else 0


def _bound_to(address: Any, family: int, proto: int, v6_only: int) -> socket.socket:
    """Return a TCP socket that shares the port of the address with others."""
    sock = socket.socket(family, socket.SOCK_STREAM, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, v6_only)
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock
