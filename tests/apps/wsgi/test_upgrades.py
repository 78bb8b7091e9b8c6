"""`grapeshot.coro.wsgi`: applications that take over the socket of an Upgrade request, to speak another protocol."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from support import coro_is_available, wait_until

from tests.apps.certificates import Certificates
from tests.apps.wire import Wire, chunk, head
from tests.apps.wsgi.servers import TEXT, Errors, Lines, Served, connect, drain, hello, only, replies, talk

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

KEY = "werkzeug.socket"
ASK = head("GET", "/", "Connection: Upgrade", "Upgrade: x")
GET = head("GET", "/")
SWITCH = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n"
Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def line_of(sock: Any) -> bytes:
    line = b""
    while not line.endswith(b"\n") and (octet := sock.recv(1)):
        line += octet
    return line


def echo_lines(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """Continue with a protocol of lines, and echo each line."""
    sock = environ[KEY]
    sock.sendall(SWITCH)
    while (line := line_of(sock)) not in (b"", b"end\n"):
        sock.sendall(line)
    return []


# ---------------------------------------------------------------- which side owns the connection


@pytest.mark.parametrize("is_tls", [False, True])
def test_data_behind_the_request_is_received_first(is_tls: bool, certificates: Certificates) -> None:
    options = {"ssl": certificates.for_server()} if is_tls else {}
    with (
        Served(echo_lines, **options) as served,
        Wire(served.port, certificates.for_client() if is_tls else None) as wire,
    ):
        wire.send(ASK + b"one\ntwo\n" + GET)
        assert wire.reply_head()[0] == 101
        assert wire.exactly(8 + len(GET)) == b"one\ntwo\n" + GET
        wire.send(b"three\n")
        assert wire.line_lf() == b"three"
        wire.send(b"end\n")
        assert wire.is_at_end()
        wait_until(lambda: served.server.connections == 0)


@pytest.mark.parametrize(
    ("how", "is_tls"),
    [
        ("recv_into", False),
        ("recv_into", True),
        ("makefile", False),
        ("makefile", True),
        ("peek", False),
        ("peek_into", False),
        ("read", True),
    ],
)
def test_ways_to_receive(how: str, is_tls: bool, certificates: Certificates) -> None:
    got: list[Any] = []

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        sock = environ[KEY]
        if how == "recv_into":
            for size in (3, 3, 1):
                buffer = bytearray(size)
                got.append(bytes(buffer[: sock.recv_into(buffer)]))
        elif how == "makefile":
            with sock.makefile("rwb") as file:
                got.extend((file.read(3), file.read(3), file.read(1)))
        elif how == "peek":
            got.append(sock.recv(3, socket.MSG_PEEK))
            got.extend((sock.recv(6)[3:], sock.recv(1)))
        elif how == "peek_into":
            buffer = bytearray(3)
            assert sock.recv_into(buffer, 0, socket.MSG_PEEK) == 3
            got.extend((bytes(buffer), sock.recv(6)[3:], sock.recv(1)))
        else:
            got.extend((sock.read(3), sock.read(3), sock.read(1)))
        sock.sendall(b"done")
        return []

    options = {"ssl": certificates.for_server()} if is_tls else {}
    with (
        Served(application, **options) as served,
        Wire(served.port, certificates.for_client() if is_tls else None) as wire,
    ):
        wire.send(ASK + b"abcdef")
        wire.send(b"g")
        assert wire.file.read() == b"done"
    assert got == [b"abc", b"def", b"g"]


def test_a_request_is_ordinary_if_its_socket_is_not_taken() -> None:
    seen: list[Any] = []

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        sock = environ.get(KEY)
        if sock is not None:
            # These calls alone do not take the socket over.
            seen.append(
                (sock, sock.family, sock.getpeername()[0], sock.getsockname()[0], sock.gettimeout(), repr(sock))
            )
        return hello(environ, start_response)

    with Served(application) as served:
        data = talk(served.port, ASK + GET + ASK + GET)
        assert [(status, body) for status, _, body in replies(data)] == [(200, b"hello")] * 4
    assert len(seen) == 2
    for sock, *_ in seen:
        for call in (lambda s=sock: s.recv(1), lambda s=sock: s.send(b"x"), lambda s=sock: s.settimeout(1)):
            with pytest.raises(OSError, match="has been answered") as caught:
                call()
            assert caught.value.errno == errno.EBADF
        assert sock.fileno() == -1
        sock.close()


@pytest.mark.parametrize(
    "request_data",
    [
        GET,
        head("GET", "/", "Upgrade: x"),
        b"GET / HTTP/1.0\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n",
        head("POST", "/", "Connection: Upgrade", "Upgrade: x", "Content-Length: 1") + b"a",
        head("POST", "/", "Connection: Upgrade", "Upgrade: x", "Transfer-Encoding: chunked") + chunk(b""),
    ],
)
def test_an_invalid_upgrade_request_gets_no_socket(request_data: bytes) -> None:
    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        start_response("200 OK", TEXT)
        return [repr(KEY in environ).encode()]

    with Served(application) as served:
        assert only(talk(served.port, request_data))[2] == b"False"


@pytest.mark.parametrize("how", ["returns parts", "ConnectionError", "StopIteration", "ZeroDivisionError", "writes"])
def test_nothing_is_answered_after_an_upgrade(how: str) -> None:
    errors, lines = Errors(), Lines()

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        echo_lines(environ, start_response)
        if how.endswith("Error"):
            raise {"ConnectionError": ConnectionError, "ZeroDivisionError": ZeroDivisionError}[how]
        if how == "StopIteration":
            raise StopIteration
        write = start_response("200 OK", TEXT)
        if how == "writes":
            write(b"part")
        return [b"answer"]

    with Served(application, error_log=errors.logger, access_log=lines.logger) as served:
        assert talk(served.port, ASK + b"a\nend\n" + GET) == SWITCH + b"a\n"
        wait_until(lambda: served.server.connections == 0)
    assert ("ZeroDivisionError" in str([record.exc_info for record in errors.records])) == (how == "ZeroDivisionError")
    assert len(errors.records) == (how == "ZeroDivisionError")
    [record] = lines.records
    assert f'" 101 {len(SWITCH) + 2} "' in record.getMessage()


def test_an_answer_that_has_begun_keeps_the_socket() -> None:
    raised: list[BaseException] = []

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        start_response("200 OK", [*TEXT, ("Content-Length", "4")])(b"ab")
        try:
            environ[KEY].send(b"x")
        except RuntimeError as error:
            raised.append(error)
        return [b"cd"]

    with Served(application) as served:
        assert only(talk(served.port, ASK))[2] == b"abcd"
    assert "has begun" in str(raised[0])


# ---------------------------------------------------------------- a blocking socket


def test_each_send_sends_everything_in_one_piece() -> None:
    """`send` sends everything, like `sendall` of a blocking socket, because libraries ignore what `send` returns."""
    length, senders = 3_000_000, 4
    counts: list[int] = []

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        from grapeshot import coro

        sock = environ[KEY]
        assert line_of(sock) == b"go\n"
        assert sock.gettimeout() is None
        work = [lambda letter=letter: counts.append(sock.send(letter * length)) for letter in (b"a", b"b", b"c", b"d")]
        coro.in_parallel([(each, ()) for each in work])
        return []

    with Served(application, timeout=0.1) as served, connect(served.port) as sock:
        sock.sendall(ASK + b"go\n")
        data = drain(sock)
    assert len(data) == length * senders
    assert sorted(data[start : start + length] for start in range(0, len(data), length)) == [
        letter * length for letter in (b"a", b"b", b"c", b"d")
    ]
    assert counts == [length] * senders


def test_two_coros_of_the_application_send_and_receive() -> None:
    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        from grapeshot import coro

        sock, lines = environ[KEY], coro.fifo()

        def receive() -> None:
            while line := line_of(sock):
                lines.push(line)
            lines.push(b"")

        reader = coro.spawn(receive)
        while line := lines.pop():
            sock.send(line.upper())
        reader.join()
        return []

    with Served(application) as served, Wire(served.port) as wire:
        wire.send(ASK + b"one\n")
        assert wire.line_lf() == b"ONE"
        wire.send(b"two\n")
        assert wire.line_lf() == b"TWO"
        wire.sock.shutdown(socket.SHUT_WR)
        assert wire.is_at_end()


def test_an_application_that_returns_while_somebody_still_reads() -> None:
    """Another coro still reads, as a thread of simple-websocket does. That coro sees that the socket is closed."""
    ended = threading.Event()

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        from grapeshot import coro

        sock = environ[KEY]

        def receive() -> None:
            with pytest.raises(OSError, match="closed"):
                sock.recv(1)
            ended.set()

        coro.spawn(receive)
        coro.yield_slice()
        sock.send(b"bye\n")
        return []

    with Served(application) as served, Wire(served.port) as wire:
        wire.send(ASK)
        assert wire.line_lf() == b"bye"
        assert wire.is_at_end()
        assert ended.wait(10)
        wait_until(lambda: served.server.connections == 0)


# ---------------------------------------------------------------- the end


@pytest.mark.parametrize("is_tls", [False, True])
def test_a_graceful_end_is_an_end_of_the_stream(is_tls: bool, certificates: Certificates) -> None:
    """The application reads the end of the stream. After that, it may send a last message, but not over TLS.

    OpenSSL treats the end of a stream without close_notify as an error, and cannot send anything after that.
    """
    ended = threading.Event()

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        echo_lines(environ, start_response)
        ended.set()
        if not is_tls:
            environ[KEY].sendall(b"bye\n")
        return []

    options = {"ssl": certificates.for_server()} if is_tls else {}
    with (
        Served(application, **options) as served,
        Wire(served.port, certificates.for_client() if is_tls else None) as wire,
    ):
        wire.send(ASK + b"one\n")
        assert wire.reply_head()[0] == 101
        assert wire.line_lf() == b"one"
        served.begin_stop()
        served.join()
        assert ended.is_set()
        if not is_tls:
            assert wire.line_lf() == b"bye"
            assert wire.is_at_end()


def test_an_upgrade_while_the_server_ends() -> None:
    gate = threading.Event()
    waiting = threading.Event()

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        from grapeshot import coro

        waiting.set()
        coro.threads.run(gate.wait)
        return echo_lines(environ, start_response)

    with Served(application) as served, Wire(served.port) as wire:
        wire.send(ASK)
        assert waiting.wait(10)
        served.begin_stop()
        wait_until(lambda: not served.server.sockets)
        gate.set()
        assert wire.reply_head()[0] == 101
        assert wire.is_at_end()
        served.join()


def test_the_grace_has_an_end_for_upgrades_too() -> None:
    ended: list[BaseException] = []

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        from grapeshot import coro

        environ[KEY].sendall(SWITCH)
        try:
            while True:
                coro.sleep_relative(0.01)
        except BaseException as error:
            ended.append(error)
            raise

    with Served(application, grace_s=0.05) as served, Wire(served.port) as wire:
        wire.send(ASK)
        assert wire.reply_head()[0] == 101
        served.begin_stop()
        served.join()
        assert wire.is_at_end()
    assert len(ended) == 1


def test_a_client_that_resets() -> None:
    raised: list[BaseException] = []
    errors = Errors()

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        try:
            return echo_lines(environ, start_response)
        except OSError as error:
            raised.append(error)
            raise

    with Served(application, error_log=errors.logger) as served:
        wire = Wire(served.port)
        wire.send(ASK)
        assert wire.reply_head()[0] == 101
        wire.reset()
        wait_until(lambda: served.server.connections == 0)
    assert isinstance(raised[0], ConnectionResetError)
    assert errors.text == ""


def test_an_upgrade_leaves_no_garbage() -> None:
    import gc
    import weakref

    seen: list[weakref.ref[Any]] = []

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        seen.append(weakref.ref(environ[KEY]))
        if environ["PATH_INFO"] == "/take":
            echo_lines(environ, start_response)
            return []
        return hello(environ, start_response)

    gc.collect()
    gc.disable()
    try:
        with Served(application) as served:
            talk(served.port, ASK + ASK.replace(b"/ ", b"/take ") + b"end\n")
            wait_until(lambda: served.server.connections == 0)
            wait_until(lambda: len(seen) == 2 and not any(reference() for reference in seen))
    finally:
        gc.enable()
