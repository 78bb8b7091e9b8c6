"""A worker class for gunicorn: ``gunicorn -k grapeshot.coro.gunicorn.Worker app:app``.

Each connection has a coro of its own, and the standard library is patched (``coro.patch()``). gunicorn itself parses
the requests and makes the responses, and its settings have the same meaning as for its own asynchronous workers. The
application sees no running asyncio loop.

::

    master (not patched) --- fork ---> worker: patch(), load the application, run the loop
                                                 |
                 SIGTERM, max_requests, reload --'--> alive = False ---> close, wait for requests, end

With ``--preload`` the master loads the application before ``patch()`` is called, so the application's modules may
have imported original functions. ``patch()`` replaces most of them. A PatchWarning lists what was replaced, and what
could not be replaced. To avoid the warning, call ``coro.patch()`` at the top of gunicorn's configuration file. This
also patches the master, which does no harm: outside of coros the patched functions do what the originals do.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import time

from grapeshot import _core, coro
from grapeshot.coro import _bridge as bridge

try:
    from gunicorn import util  # type: ignore[import-untyped]
    from gunicorn.sock import ssl_context  # type: ignore[import-untyped]
    from gunicorn.workers.base_async import AsyncWorker  # type: ignore[import-untyped]
except ImportError as error:
    raise ImportError(
        "grapeshot.coro.gunicorn needs gunicorn: pip install 'grapeshot[gunicorn]'", name=error.name
    ) from error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any

__all__ = ["Worker"]

# Each time this many seconds have passed, the worker tells the master that it is alive, and checks that the master is
# alive.
_HEARTBEAT_S = 1.0
# If the first part of a body is not longer than this, it is copied behind the head. The copy costs less than another
# system call.
_JOIN_LEN = 64 * 1024


class _Listener:
    """Stands in for a listening socket, whose address gunicorn asks for even after the socket is closed."""

    def __init__(self, address: Any) -> None:
        self._address = address

    def getsockname(self) -> Any:
        return self._address


class _Settings:
    """A cache of gunicorn's settings, because gunicorn looks up 20 of them in each request."""

    def __init__(self, cfg: Any) -> None:
        self._cfg = cfg

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._cfg, name)
        setattr(self, name, value)
        return value

    def set(self, name: str, value: Any) -> None:
        """Change a setting, and drop the cache. Hooks may call this."""
        cfg = self._cfg
        cfg.set(name, value)
        self.__dict__ = {"_cfg": cfg}


class _KeepAlive(coro.timeout):
    """A timeout for gunicorn's keep-alive: it ends the block without an exception."""

    def __exit__(  # type: ignore[override]
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        try:
            super().__exit__(kind, exc, traceback)
        except coro.TimeoutError:
            return True
        return False


class _Client(coro.sock):
    """A connection that sends the head of a response together with the first part of its body.

    gunicorn sends the two separately.
    """

    # b"" when a response begins, then its head until the head is sent, None afterwards.
    _head: bytes | None = None
    # A lock that keeps the bytes of one `send` together, because several coros of the application may call `send`. The
    # first `send` without a timeout makes the lock.
    _sending: Any = None

    def begin_answer(self) -> None:
        self._head = b""

    def end_answer(self) -> None:
        head, self._head = self._head, None
        if head:
            self._send_whole(head)

    def _send_whole(self, data: Any, flags: int = 0) -> None:
        try:
            if self._sending is None:
                super().sendall(data, flags)
            else:
                with self._sending:
                    super().sendall(data, flags)
        except BaseException:
            # Part of the data may have been sent. If the application catches the exception and sends more, the client
            # would take that for the missing rest, so end the connection.
            with contextlib.suppress(OSError):
                super().shutdown(socket.SHUT_RDWR)
            raise

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        head = self._head
        if head is None:
            self._send_whole(data, flags)
        elif head:
            self._head = None
            self._send_whole(head + data if len(data) <= _JOIN_LEN else head, flags)
            if len(data) > _JOIN_LEN:
                self._send_whole(data, flags)
        elif data[:7] == b"HTTP/1." and data[9:10] != b"1" and data[-4:] == b"\r\n\r\n":
            self._head = data
        else:
            self._send_whole(data, flags)  # 103 Early Hints

    def send(self, data: Any, flags: int = 0, /) -> int:
        """Send all of the data, as WebSocket libraries expect of a blocking socket. With a timeout, send what fits."""
        self.end_answer()
        if self.gettimeout() is not None:
            return super().send(data, flags)
        if self._sending is None:
            vars(self).setdefault("_sending", _core.thread_lock())  # keeps a lock that another thread has just set
        self._send_whole(data, flags)
        with memoryview(data) as view:
            return view.nbytes

    def sendfile(self, file: Any, offset: int = 0, count: int | None = None) -> int:
        self.end_answer()
        return super().sendfile(file, offset, count)

    def shutdown(self, how: int, /) -> None:
        self.end_answer()
        super().shutdown(how)


_make_date: Callable[[float | None], str] = util.http_date
# Not time.monotonic, because programs may replace that, as tests do.
_monotonic = _core._coro_monotonic
_date = ""
_date_s = 0


def _http_date(timestamp: float | None = None) -> str:
    """Replaces gunicorn's function, which formats the time for each response. This one formats it once a second."""
    global _date, _date_s
    if timestamp is not None:
        return _make_date(timestamp)
    now_s = int(time.time())
    if now_s != _date_s:
        _date, _date_s = _make_date(now_s), now_s
    return _date


def _put_back(unreader: Any, sock: Any) -> None:
    """Put bytes back into the socket: those that gunicorn has received after the head of a request.

    The application may take over the socket, and must then receive these bytes.
    """
    if rest := unreader.buf.getvalue():
        unreader.buf = io.BytesIO()
        sock._put_back(rest)


class Worker(AsyncWorker):  # type: ignore[misc]  # gunicorn has no types
    """Serves the connections of a worker process in coros."""

    cfg: Any
    _is_alive = True
    _is_quitting = False
    # The loop while it runs, and the event that wakes the loop's first coro.
    _loop: Any = None
    _changed: Any = None

    @property
    def alive(self) -> bool:
        """Whether the worker goes on.

        gunicorn sets this to False in a signal handler, in a thread (reload) or in a request (max_requests).
        """
        return self._is_alive

    @alive.setter
    def alive(self, value: bool) -> None:
        self._is_alive = value
        if not value:
            self._wake()

    def _wake(self) -> None:
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has just been closed
                loop.call_soon_threadsafe(self._changed.set)

    def init_process(self) -> None:
        """Called in the new process: patch, then let gunicorn import the application and run the worker."""
        coro.patch()
        super().init_process()

    def run(self) -> None:
        self.cfg = _Settings(self.cfg)
        util.http_date = _http_date
        try:
            coro.run(self._serve, name="worker")
        finally:
            self._loop = None

    # ------------------------------------------------------------------ the first coro

    def _serve(self) -> None:
        self._changed = coro.event()
        self._loop = bridge.own_loop()
        context = ssl_context(self.cfg) if self.cfg.is_ssl else None
        servers = [self._listen(listener, context) for listener in self.sockets]
        while self.alive:
            self.notify()
            if self.ppid != os.getppid():
                self.log.info("Parent changed, shutting down: %s", self)
                break
            self._changed.wait(_HEARTBEAT_S)
        for server in servers:
            server.close()
        if self._is_quitting:
            self.cfg.worker_int(self)
        else:
            self._wait_for(servers)
        for server in servers:
            server.stop(0)

    def _listen(self, listener: Any, context: Any) -> coro.Server:
        known = _Listener(listener.getsockname())

        def handle(sock: Any, address: Any) -> None:
            if context is None:
                sock = _Client(sock.family, sock.type, sock.proto, fileno=sock.detach())
            coro.call_blocking(self.handle, known, sock, address)

        return coro.serve(
            handle, sock=listener.sock, limit=self.worker_connections, ssl=context, backlog=self.cfg.backlog
        )

    def _wait_for(self, servers: list[coro.Server]) -> None:
        """Wait until no connections are left, for at most ``graceful_timeout`` seconds."""
        end_s = _monotonic() + self.cfg.graceful_timeout
        while any(server.connections for server in servers):
            left_s = end_s - _monotonic()
            if left_s <= 0:
                self.log.warning("Worker graceful timeout (pid:%s)", self.pid)
                return
            self.notify()
            if self._is_quitting:
                return
            next(server for server in servers if server.connections).wait_closed(min(left_s, _HEARTBEAT_S))

    # ------------------------------------------------------------------ methods that the base class calls

    def timeout_ctx(self) -> _KeepAlive:
        return _KeepAlive(self.cfg.keepalive)

    def handle_request(self, listener_name: Any, req: Any, sock: Any, addr: Any) -> Any:
        if any(name == "UPGRADE" for name, _ in req.headers):
            _put_back(req.unreader, sock)
        if type(sock) is not _Client:
            return super().handle_request(listener_name, req, sock, addr)
        sock.begin_answer()
        try:
            return super().handle_request(listener_name, req, sock, addr)
        finally:
            sock.end_answer()

    def handle_error(self, req: Any, client: Any, addr: Any, exc: BaseException) -> None:
        # When the worker ends, it interrupts the coros of the remaining connections. That is not an error of a request.
        if not isinstance(exc, coro.Interrupted):
            super().handle_error(req, client, addr, exc)

    # ------------------------------------------------------------------ signal handlers, which interrupt any code

    def handle_quit(self, sig: int, frame: Any) -> None:
        # The base class raises SystemExit here, which would interrupt the running coro, perhaps within a request.
        if self._loop is None:
            super().handle_quit(sig, frame)
        self._is_quitting = True
        self.alive = False

    def handle_usr1(self, sig: int, frame: Any) -> None:
        # The base class takes locks of the logging module, which the interrupted coro may hold.
        if self._loop is None:
            super().handle_usr1(sig, frame)
        else:
            self._loop.call_soon_threadsafe(coro.spawn, super().handle_usr1, sig, frame)
