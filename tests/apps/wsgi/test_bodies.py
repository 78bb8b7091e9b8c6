"""`grapeshot.coro.wsgi`: request bodies, and files as answers."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from support import coro_is_available, wait_until

from tests.apps.certificates import Certificates
from tests.apps.wire import Wire, chunk, head
from tests.apps.wsgi.servers import TEXT, Errors, Served, echo, hello, replies, statuses, talk

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

GET = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("has_length", [True, False])
@pytest.mark.parametrize("kind", ["file", "buffered", "memory", "gzip", "tls"])
def test_file_wrapper(kind: str, has_length: bool, tmp_path: Path, certificates: Certificates) -> None:
    import gzip

    content = os.urandom(300_000)
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(content) if kind == "gzip" else content)
    files: list[Any] = []

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        if kind == "gzip":
            file: Any = gzip.open(path)
        elif kind == "memory":
            file = io.BytesIO(content)
        else:
            file = path.open("rb", buffering=0 if kind == "file" else -1)
        files.append(file)
        assert file.read(3) == content[:3]
        start_response("200 OK", [("Content-Length", "299990")] if has_length else [])
        return environ["wsgi.file_wrapper"](file, 1000)

    is_tls = kind == "tls"
    errors = Errors()
    options = {"ssl": certificates.for_server()} if is_tls else {}
    with Served(application, error_log=errors.logger, **options) as served:
        with Wire(served.port, certificates.for_client() if is_tls else None) as wire:
            reply = wire.get("/")
    wanted = content[3:]
    assert reply.body == (wanted[:299990] if has_length else wanted)
    assert [file.closed for file in files] == [True]
    assert "shorter" not in errors.text


# ---------------------------------------------------------------- bodies


def test_expect_is_answered_when_the_body_is_read() -> None:
    with Served(echo) as served, Wire(served.port) as wire:
        wire.send(head("POST", "/", "Content-Length: 4", "Expect: 100-continue"))
        assert wire.reply_head() == (100, {})
        wire.send(b"body")
        assert wire.reply().body == b"body"


def test_does_not_wait_for_a_body_without_100_continue() -> None:
    with Served(hello) as served, Wire(served.port) as wire:
        wire.send(head("POST", "/", "Content-Length: 4", "Expect: 100-continue"))
        assert wire.reply().body == b"hello"
        assert wire.is_at_end()


def test_the_unread_rest_of_a_body_is_skipped() -> None:
    with Served(hello) as served, Wire(served.port) as wire:
        wire.send(head("POST", "/", "Content-Length: 40000") + b"a" * 40000)
        assert wire.reply().body == b"hello"
        assert wire.get("/").body == b"hello"


def test_lines_of_a_body() -> None:
    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        source = environ["wsgi.input"]
        parts = [source.readline(), source.readline(2), source.read(3), *source.readlines(1), *source]
        start_response("200 OK", TEXT)
        return [repr(parts).encode()]

    body = b"one\ntwo three\nfour\nfive\nsix"
    with Served(application) as served, Wire(served.port) as wire:
        wire.send(head("POST", "/", "Transfer-Encoding: chunked"))
        for octet in body:
            wire.send(chunk(bytes([octet])))
        wire.send(chunk(b""))
        assert wire.reply().text == repr([b"one\n", b"tw", b"o t", b"hree\n", b"four\n", b"five\n", b"six"])


def test_a_client_that_goes_within_a_body() -> None:
    raised: list[BaseException] = []
    errors = Errors()

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        try:
            return echo(environ, start_response)
        except OSError as error:
            raised.append(error)
            raise

    with Served(application, error_log=errors.logger) as served:
        assert talk(served.port, head("POST", "/", "Content-Length: 10") + b"part") == b""
        wait_until(lambda: raised)
    assert isinstance(raised[0], ConnectionError)
    assert errors.text == ""


def test_the_body_of_a_request_whose_upgrade_is_ignored() -> None:
    """The server reads the bytes after the head as the body, because a proxy in front of it may do so.

    The server's parser, llhttp, takes these bytes for data of the new protocol. If the server took them for further
    requests, a client could get a request past the proxy.
    """
    inner = b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"
    fields = [b"Content-Length: %d" % len(inner), b"Transfer-Encoding: chunked"]
    for field, body in zip(fields, [inner, b"%x\r\n%b\r\n0\r\n\r\n" % (len(inner), inner)], strict=True):
        upgrade = b"POST / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: h2c\r\n" + field + b"\r\n\r\n"
        with Served(echo) as served:
            got = replies(talk(served.port, upgrade + body + GET))
        assert [(status, body) for status, _, body in got] == [(200, inner), (200, b"")]


# ---------------------------------------------------------------- memory


def test_only_some_of_many_requests_are_parsed_at_once() -> None:
    """A request that was parsed, and waits as an environ, takes far more memory than the bytes of the request."""
    from grapeshot.coro import wsgi
    from grapeshot.coro.wsgi import _connection

    waiting: list[int] = []
    connections: list[_connection.Connection] = []
    count = 5000

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        waiting.append(len(connections[0]._parser.requests))
        return hello(environ, start_response)

    class Noted(_connection.Connection):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            connections.append(self)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(wsgi, "Connection", Noted)
        with Served(application) as served:
            data = (
                b"POST / HTTP/1.1\r\nHost:a\r\nContent-Length:3\r\n\r\nabc"
                + b"GET / HTTP/1.1\r\nHost:a\r\n\r\n" * count
            )
            answers = talk(served.port, data)
    assert answers.count(b"HTTP/1.1 200 OK") == len(waiting) == count + 1
    assert max(waiting) < 200


def test_a_connection_leaves_no_garbage() -> None:
    import gc
    import weakref

    class Marker:
        pass

    seen: list[weakref.ref[Any]] = []

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        environ["marker"] = marker = Marker()
        seen.extend((weakref.ref(marker), weakref.ref(start_response.__self__._connection)))
        environ["wsgi.input"].read(1)
        return hello(environ, start_response)

    gc.collect()
    gc.disable()
    try:
        with Served(application) as served:
            data = head("GET", "/") + head("POST", "/", "Content-Length: 4") + b"body"
            assert statuses(talk(served.port, data)) == [200, 200]
            wait_until(lambda: served.server.connections == 0)
            wait_until(lambda: not any(reference() for reference in seen))
    finally:
        gc.enable()
