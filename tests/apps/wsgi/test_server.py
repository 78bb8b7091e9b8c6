"""`grapeshot.coro.wsgi.serve`: the requirements of PEP 3333 for environ, answers and errors."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from wsgiref.validate import validator

import pytest
from support import coro_is_available

from tests.apps.wire import Wire, chunk, head
from tests.apps.wsgi.servers import TEXT, Errors, Served, connect, drain, hello, only, replies, statuses, talk

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

GET = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"


def ask(application: Callable[..., Any], request: bytes = GET, **options: Any) -> tuple[int, dict[str, str], bytes]:
    with Served(application, **options) as served:
        return only(talk(served.port, request))


# ---------------------------------------------------------------- environ and answers


def test_the_validator_of_the_standard_library_has_no_complaint() -> None:
    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(100)
        lines = [environ["wsgi.input"].readline(100), *environ["wsgi.input"]]
        start_response("200 OK", [*TEXT, ("Content-Length", str(len(body)))])
        assert lines == [b""]
        return [body]

    errors = Errors()
    with Served(validator(application), error_log=errors.logger) as served, Wire(served.port) as wire:
        wire.send(head("POST", "/a%20b?c=d", "Content-Length: 4") + b"body")
        assert wire.reply().body == b"body"
        wire.send(head("OPTIONS", "*"))
        assert wire.reply().body == b""
        wire.send(head("POST", "/", "Transfer-Encoding: chunked") + chunk(b"one") + chunk(b"two") + chunk(b""))
        assert wire.reply().body == b"onetwo"
    assert errors.text == ""


def test_environ() -> None:
    seen: list[dict[str, Any]] = []

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        seen.append(environ)
        return hello(environ, start_response)

    request = (
        b"GET http://other:81/a%2Fb%C3%A4//?q=%20#frag HTTP/1.0\r\nHost: a\r\nX-A: 1\r\nX-A:  2 \t\r\nX_B: 3\r\n"
        b"Cookie: a=1\r\nCookie: b=2\r\nContent-Type: text/x\r\nX-Empty:\r\n\r\n"
    )
    with Served(application) as served:
        assert only(talk(served.port, request))[2] == b"hello"
        port = str(served.port)
    [environ] = seen
    wanted = {
        "REQUEST_METHOD": "GET",
        "SCRIPT_NAME": "",
        "PATH_INFO": "/a/b\xc3\xa4//",
        "QUERY_STRING": "q=%20",
        "RAW_URI": "http://other:81/a%2Fb%C3%A4//?q=%20#frag",
        "SERVER_PROTOCOL": "HTTP/1.0",
        "SERVER_NAME": "127.0.0.1",
        "SERVER_PORT": port,
        "REMOTE_ADDR": "127.0.0.1",
        "HTTP_HOST": "other:81",
        "HTTP_X_A": "1,2",
        "HTTP_COOKIE": "a=1; b=2",
        "HTTP_X_EMPTY": "",
        "CONTENT_TYPE": "text/x",
        "wsgi.url_scheme": "http",
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
    }
    assert {name: environ.get(name) for name in wanted} == wanted
    assert not {"HTTP_X_B", "HTTP_CONTENT_TYPE", "CONTENT_LENGTH"} & environ.keys()


def of_parts(*parts: bytes, fields: Iterable[tuple[str, str]] = TEXT, status: str = "200 OK") -> Callable[..., Any]:
    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterator[bytes]:
        start_response(status, list(fields))
        yield from parts

    return application


def test_parts_are_chunked_and_leave_at_once() -> None:
    gate = threading.Event()

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterator[bytes]:
        from grapeshot import coro

        start_response("200 OK", TEXT)
        yield b"first"
        coro.threads.run(gate.wait)
        yield b""
        yield b"second"

    with Served(application) as served, Wire(served.port) as wire:
        wire.send(head("GET", "/"))
        assert wire.reply_head()[1]["transfer-encoding"] == "chunked"
        assert (wire.line(), wire.line()) == (b"5", b"first")
        gate.set()
        assert [wire.line() for _ in range(4)] == [b"6", b"second", b"0", b""]


@pytest.mark.parametrize(
    ("request_line", "keeps"),
    [(b"GET / HTTP/1.0\r\n", False), (b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n", False)],
)
def test_parts_of_unknown_length_end_with_the_connection_in_http_1_0(request_line: bytes, keeps: bool) -> None:
    _, fields, body = ask(of_parts(b"a", b"b"), request_line + b"\r\n")
    assert (body, fields["connection"]) == (b"ab", "close")
    assert "transfer-encoding" not in fields


def test_http_1_0_keeps_a_connection_if_asked() -> None:
    with Served(hello) as served:
        request = b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
        first, second = replies(talk(served.port, request * 2))
        assert first[1]["connection"] == second[1]["connection"] == "keep-alive"
        assert only(talk(served.port, b"GET / HTTP/1.0\r\n\r\n" * 2))[1]["connection"] == "close"


@pytest.mark.parametrize("result", [[b"hello"], (b"hello",), []])
def test_the_length_of_one_part_is_known(result: Any) -> None:
    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        start_response("200 OK", TEXT)
        return result

    _, fields, body = ask(application)
    assert (fields["content-length"], body) == (str(len(body)), b"".join(result))


def test_write_and_then_parts() -> None:
    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        write = start_response("200 OK", [*TEXT, ("Content-Length", "6")])
        write(b"one")
        return [b"two"]

    assert ask(application)[2] == b"onetwo"


@pytest.mark.parametrize("status", ["200 OK", "204 No Content", "304 Not Modified"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_answers_without_a_body(status: str, method: str) -> None:
    with Served(of_parts(b"body", fields=[], status=status)) as served:
        data = talk(served.port, f"{method} / HTTP/1.1\r\nHost: a\r\n\r\n".encode() * 2)
    if (status, method) == ("200 OK", "GET"):
        assert data.count(b"body") == 2
    else:
        assert b"body" not in data
        assert data.count(status.encode()) == 2  # the second answer follows directly
        assert b"chunked" not in data


def test_head_tells_the_length_of_the_body() -> None:
    _, fields, body = ask(hello, b"HEAD / HTTP/1.0\r\n\r\n")
    assert (fields["content-length"], body) == ("5", b"")


def test_a_body_longer_than_its_length_is_cut() -> None:
    errors, closed = Errors(), []

    class Parts:
        def __iter__(self) -> Iterator[bytes]:
            yield from (b"ab", b"cd", b"never asked for")

        def close(self) -> None:
            closed.append(True)

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Parts:
        start_response("200 OK", [*TEXT, ("Content-Length", "3")])
        return Parts()

    with Served(application, error_log=errors.logger) as served:
        assert only(talk(served.port, GET.replace(b"close", b"x") * 2))[2] == b"abc"
    assert "longer than its Content-Length" in errors.text
    assert closed == [True]


def test_a_body_shorter_than_its_length_ends_the_connection() -> None:
    errors = Errors()
    application = of_parts(b"ab", fields=[*TEXT, ("Content-Length", "3")])
    with Served(application, error_log=errors.logger) as served:
        assert only(talk(served.port, GET.replace(b"close", b"x") * 2))[2] == b"ab"
    assert "1 bytes before its Content-Length" in errors.text


# ---------------------------------------------------------------- errors of the application


def test_an_error_before_the_answer_is_500_and_is_logged() -> None:
    errors = Errors()

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        start_response("200 OK", TEXT)
        raise ZeroDivisionError("the reason")

    status, _, body = ask(application, error_log=errors.logger)
    assert (status, body) == (500, b"Internal Server Error\n")
    [record] = errors.records
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


def test_an_error_within_the_answer_cuts_it() -> None:
    errors, closed = Errors(), []

    class Parts:
        def __iter__(self) -> Iterator[bytes]:
            yield b"part"
            raise ZeroDivisionError

        def close(self) -> None:
            closed.append(True)

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Parts:
        start_response("200 OK", TEXT)
        return Parts()

    with Served(application, error_log=errors.logger) as served:
        data = talk(served.port, GET)
    assert data.endswith(b"4\r\npart\r\n")  # the last chunk is missing
    assert closed == [True]
    assert len(errors.records) == 1


def test_exc_info_replaces_an_answer_that_has_not_begun() -> None:
    import sys

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        start_response("200 OK", [("X-First", "1")])
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            start_response("503 Busy", TEXT, sys.exc_info())
        return [b"busy"]

    status, fields, body = ask(application)
    assert (status, body) == (503, b"busy")
    assert "x-first" not in fields


def test_exc_info_is_raised_if_the_answer_has_begun() -> None:
    import sys

    raised = []

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        start_response("200 OK", TEXT)(b"part")
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            try:
                start_response("500 Error", TEXT, sys.exc_info())
            except ZeroDivisionError as error:
                raised.append(error)
                raise
        return []

    with Served(application, error_log=Errors().logger) as served:
        assert talk(served.port, GET).endswith(b"4\r\npart\r\n")
    assert len(raised) == 1


@pytest.mark.parametrize(
    ("status", "fields"),
    [
        ("200", []),
        ("200 OK\r\nX: 1", []),
        (200, []),
        ("200 OK", [("X", "a\r\nY: b")]),
        ("200 OK", [("X\r\nY", "b")]),
        ("200 OK", [("X: a", "b")]),
        ("200 OK", [("", "b")]),
        ("200 OK", [("X", "\u20ac")]),
        ("200 OK", [("X", 1)]),
        ("200 OK", [("Content-Length", "-1")]),
        ("200 OK", [("Content-Length", "1"), ("Content-Length", "1")]),
        ("200 OK", [("Transfer-Encoding", "chunked")]),
        ("200 OK", [("Upgrade", "x")]),
    ],
)
def test_heads_that_are_refused(status: Any, fields: Any) -> None:
    errors, raised = Errors(), []

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        try:
            start_response(status, fields)
        except (TypeError, ValueError) as error:
            raised.append(error)
            raise
        return [b"x"]

    assert ask(application, error_log=errors.logger)[0] == 500
    assert len(raised) == 1


@pytest.mark.parametrize("what", ["no start_response", "start_response twice", "text", "None", "SystemExit"])
def test_other_errors_of_applications(what: str) -> None:
    errors = Errors()

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        if what == "no start_response":
            return [b"x"]
        start_response("200 OK", TEXT)
        if what == "start_response twice":
            start_response("200 OK", TEXT)
        if what == "SystemExit":
            raise SystemExit
        return None if what == "None" else ["text"]

    with Served(application, error_log=errors.logger) as served:
        assert statuses(talk(served.port, GET)) == [500]
        assert statuses(talk(served.port, GET)) == [500]  # the server goes on
    assert len(errors.records) == 2


# ---------------------------------------------------------------- the loop is hidden, and other coros run


def test_applications_see_no_running_loop_and_wait_beside_each_other() -> None:
    import asyncio

    from grapeshot import coro

    waiting: list[Any] = []

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        waiting.append(environ)
        while len(waiting) < 20:
            coro.sleep_relative(0.001)
        start_response("200 OK", TEXT)
        return [asyncio.run(asyncio.sleep(0, b"slept"))]

    with Served(application) as served:
        wires = [Wire(served.port) for _ in range(20)]
        for wire in wires:
            wire.send(head("GET", "/"))
        assert [wire.reply().body for wire in wires] == [b"slept"] * 20
        for wire in wires:
            wire.close()


def test_a_unix_socket_is_removed_at_the_end() -> None:
    with tempfile.TemporaryDirectory(prefix="w-") as folder:
        path = os.path.join(folder, "s")
        with Served(hello, path=path):
            assert only(talk(path, GET))[2] == b"hello"
        assert not os.path.exists(path)


def test_arguments() -> None:
    from grapeshot.coro import wsgi

    with pytest.raises(TypeError, match="must be callable"):
        wsgi.serve(None, "127.0.0.1", 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keepalive_timeout"):
        wsgi.serve(hello, "127.0.0.1", 0, keepalive_timeout=0)
    with pytest.raises(ValueError, match="a host and a port"):
        wsgi.serve(hello)


def test_a_connection_over_a_socket_of_the_program() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with Served(hello, sock=listener), connect(port) as client:
            client.sendall(GET)
            assert only(drain(client))[2] == b"hello"
