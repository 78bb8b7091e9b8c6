"""`grapeshot.coro.wsgi`: answers that are cut off, unusual header fields, and the access log."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from support import coro_is_available, wait_until

from tests.apps.wsgi.servers import TEXT, Errors, Lines, Served, connect, hello, only, talk

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

GET = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"


def ask(application: Callable[..., Any], **options: Any) -> tuple[int, dict[str, str], bytes]:
    with Served(application, **options) as served:
        return only(talk(served.port, GET))


# ---------------------------------------------------------------- an answer that is cut does not look whole


class Cut:
    """An answer that is cut off after its first part, or within its second one."""

    def __init__(self, how: str) -> None:
        self._how = how
        self.is_waiting = threading.Event()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterator[bytes]:
        from grapeshot import coro

        start_response("200 OK", TEXT)
        yield b"part"
        if self._how == "error":
            raise ZeroDivisionError
        if self._how == "interrupted write":
            with pytest.raises(TimeoutError), coro.timeout(0.1):
                start_response.__self__.write(b"a" * 20_000_000)  # type: ignore[attr-defined]
            return
        if self._how == "client takes nothing":
            yield b"a" * 20_000_000
        self.is_waiting.set()
        while True:
            coro.sleep_relative(0.01)


@pytest.mark.parametrize("how", ["error", "interrupted write", "client takes nothing", "server ends"])
def test_an_answer_of_http_1_0_that_is_cut_ends_with_a_reset(how: str) -> None:
    """The body of this answer ends with the connection, so a normal close would mean that the body is complete."""
    application = Cut(how)
    with Served(application, error_log=Errors().logger, timeout=0.2, grace_s=0.01) as served:
        with connect(served.port) as sock:
            sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert sock.recv(15) == b"HTTP/1.1 200 OK"
            if how == "server ends":
                assert application.is_waiting.wait(10)
                served.begin_stop()
            wait_until(lambda: not served._thread.is_alive() or served.server.connections == 0)
            with pytest.raises(ConnectionResetError):
                while sock.recv(65536):
                    pass


def test_an_answer_of_http_1_0_that_is_whole_ends_without_a_reset() -> None:
    class Parts:
        def __iter__(self) -> Iterator[bytes]:
            yield from (b"one", b"two")

        def close(self) -> None:
            raise ZeroDivisionError  # too late to change the answer

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Parts:
        start_response("200 OK", TEXT)
        return Parts()

    errors = Errors()
    with Served(application, error_log=errors.logger) as served, connect(served.port) as sock:
        sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
        data = b""
        while more := sock.recv(65536):
            data += more
    assert data.endswith(b"onetwo")
    assert len(errors.records) == 1


# ---------------------------------------------------------------- the value that was checked is the one that is sent


class Lying(str):
    """A string whose methods return different characters than it contains."""

    EVIL = "a\r\nX-Evil: 1"

    def __format__(self, spec: str) -> str:
        return self.EVIL

    def __str__(self) -> str:
        return self.EVIL

    def __repr__(self) -> str:
        return self.EVIL

    def encode(self, *_: Any) -> bytes:
        return self.EVIL.encode()

    def lower(self) -> str:
        return "x"

    def __getitem__(self, _: Any) -> str:
        return self.EVIL

    def isascii(self) -> bool:
        return True

    def isdigit(self) -> bool:
        return True


class Posing(Lying):
    """A string that has the hash of "Content-Type" and equals every string, so a dictionary takes it for that name."""

    def __hash__(self) -> int:
        return hash("Content-Type")

    def __eq__(self, other: object) -> bool:
        return True


class LyingBytes(bytes):
    def __len__(self) -> int:
        return 1

    def __bytes__(self) -> bytes:
        return b"evil"


@pytest.mark.parametrize(
    ("status", "field"),
    [
        (Lying("200 OK"), ("X", "y")),
        ("200 OK", (Lying("X"), "y")),
        ("200 OK", ("X", Lying("y"))),
        ("200 OK", (Lying("Content-Length"), Lying("5"))),
        ("200 OK", (Lying("Connection"), Lying("close"))),
    ],
)
def test_strings_of_other_classes_are_sent_as_they_are(status: str, field: tuple[str, str]) -> None:
    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        start_response(status, [field])
        return [LyingBytes(b"hello")]

    got, fields, body = ask(application)
    assert (got, body, fields["content-length"]) == (200, b"hello", "5")
    assert "x-evil" not in fields
    name, value = str.__str__(field[0]).lower(), str.__str__(field[1])
    assert fields[name] == value


@pytest.mark.parametrize("field", [(Posing("X\r\nY"), "z"), ("X", Posing("a\r\nY: z")), (Posing("X: a"), "z")])
def test_strings_of_other_classes_are_checked(field: tuple[str, str]) -> None:
    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        start_response("200 OK", [("Content-Type", "a/b"), field])
        return [b"hello"]

    assert ask(application, error_log=Errors().logger)[0] == 500


# ---------------------------------------------------------------- the access log


def logged(environ_of: dict[str, Any], request: bytes) -> str:
    """Return the log line of a request. The application changes the environ, as middleware does behind a proxy."""

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        environ.update(environ_of)
        return hello(environ, start_response)

    lines = Lines()
    with Served(application, access_log=lines.logger) as served:
        talk(served.port, request)
    [record] = lines.records
    return record.getMessage()


COMBINED = r'\S+ - - \[[^]]+\] "(?:[^"\\]|\\.)*" \d{3} \d+ "(?:[^"\\]|\\.)*" "(?:[^"\\]|\\.)*" \d+\.\d{6}'


@pytest.mark.parametrize("name", ["REMOTE_ADDR", "HTTP_REFERER", "HTTP_USER_AGENT"])
@pytest.mark.parametrize(
    "value", ['1.2.3.4" "x', '1.2.3.4 - - [x] "GET / HTTP/1.1" 200\n1.2.3.5', "\x1b[2J\0", None, 5, b"x", Lying("a\nb")]
)
def test_no_value_ends_a_line_of_the_access_log(name: str, value: Any) -> None:
    line = logged({name: value}, GET)
    assert re.fullmatch(COMBINED, line), line


@pytest.mark.parametrize("request_data", [GET, b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"])
def test_each_answer_has_a_line_of_the_same_form(request_data: bytes) -> None:
    assert re.fullmatch(COMBINED, logged({}, request_data))
