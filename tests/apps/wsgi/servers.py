"""WSGI applications on `grapeshot.coro.wsgi` in a thread, and clients that send raw bytes."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any

from support import CAP_S

from tests.apps.wire import HOST, TIMEOUT_S, parse_head

TEXT = [("Content-Type", "text/plain")]
_numbers = itertools.count()


def hello(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    start_response("200 OK", TEXT)
    return [b"hello"]


def echo(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    body = environ["wsgi.input"].read()
    start_response("200 OK", [*TEXT, ("Content-Length", str(len(body)))])
    return [body]


class Errors(logging.Handler):
    """An error log that keeps its records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.logger = logging.getLogger(f"tests.apps.wsgi.{next(_numbers)}")
        self.logger.setLevel(logging.ERROR)
        self.logger.propagate = False
        self.logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def text(self) -> str:
        return "\n".join(record.getMessage() for record in self.records)


class Lines(Errors):
    """An access log that keeps its lines."""

    def __init__(self) -> None:
        super().__init__()
        self.logger.setLevel("INFO")


class Served:
    """Run `wsgi.serve(application, ...)` on a loop in its own thread.

    A `with` block starts the server, and stops it gracefully when the block ends.
    """

    def __init__(self, application: Callable[..., Any], grace_s: float = CAP_S, **options: Any) -> None:
        self._application, self._grace_s, self._options = application, grace_s, options
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.contexts: list[dict[str, Any]] = []
        self.port = 0
        self._is_stopping = False

    def _run(self) -> None:
        from grapeshot import coro

        try:
            coro.run(self._main)
        finally:
            self._ready.set()

    def _main(self) -> None:
        from grapeshot import coro
        from grapeshot.coro import _bridge as bridge
        from grapeshot.coro import wsgi

        self.loop = bridge.own_loop()
        self.loop.set_exception_handler(lambda _loop, context: self.contexts.append(context))
        options = self._options
        where = {} if {"path", "sock"} & options.keys() else {"host": HOST, "port": 0}
        self.server = wsgi.serve(self._application, **where, **options)
        self._ending = coro.event()
        if where:
            self.port = self.server.sockets[0].getsockname()[1]
        self._ready.set()
        self._ending.wait()
        self.server.stop(self._grace_s)

    def __enter__(self) -> Served:
        self._thread.start()
        assert self._ready.wait(CAP_S)
        assert self._thread.is_alive(), "the server did not start"
        return self

    def begin_stop(self) -> None:
        """Begin to stop the server. Further calls do nothing: the loop may be closed soon after the first one."""
        if not self._is_stopping:
            self._is_stopping = True
            self.loop.call_soon_threadsafe(self._ending.set)

    def join(self) -> None:
        self._thread.join(3 * CAP_S)
        assert not self._thread.is_alive(), "the server does not end"
        assert self.contexts == []

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self.begin_stop()
        self.join()


def connect(address: Any) -> socket.socket:
    """Connect to a port of this machine, or to a path."""
    if isinstance(address, int):
        return socket.create_connection((HOST, address), TIMEOUT_S)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(TIMEOUT_S)
    sock.connect(address)
    return sock


def talk(address: Any, data: bytes, *, half_close: bool = True) -> bytes:
    """Send bytes, and return everything that the server sends until it closes the connection."""
    with connect(address) as sock:
        try:
            sock.sendall(data)
            if half_close:
                sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the server has stopped reading
        return drain(sock)


def drain(sock: socket.socket) -> bytes:
    received = b""
    try:
        while data := sock.recv(65536):
            received += data
    except ConnectionResetError:
        pass
    return received


def replies(data: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """Return the status, the fields and the body of each reply in the data of a server.

    A reply with a status below 200 has no body. The body of any other reply with a Transfer-Encoding, or without a
    Content-Length, is all of the remaining data.
    """
    found = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        status, fields = parse_head(head.split(b"\r\n"))
        length = int(fields.get("content-length", len(data)))
        if status < 200 or "transfer-encoding" in fields:
            length = 0 if status < 200 else len(data)
        found.append((status, fields, data[:length]))
        data = data[length:]
    return found


def statuses(data: bytes) -> list[int]:
    return [status for status, _, _ in replies(data)]


def only(data: bytes) -> tuple[int, dict[str, str], bytes]:
    [reply] = replies(data)
    return reply
