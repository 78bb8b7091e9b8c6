"""Applications that change their environ, raise unusual errors or end writes early. They run on `grapeshot.coro.wsgi`,
and on gunicorn with grapeshot's worker class. The control is gunicorn's sync worker.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import coro_is_available, wait_until

from tests.apps.processes import SEARCH_PATH, Process
from tests.apps.wire import chunk, head
from tests.apps.wsgi.servers import TEXT, Errors, Served, connect, drain, replies

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

Start = Callable[..., Iterable[bytes]]
LENGTH = 10_000_000


class NoLength:
    """A result without a length, whose `__len__` raises NotImplementedError instead of TypeError."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self) -> Iterator[bytes]:
        return iter((b"a", b"b"))


def late_reader(environ: dict[str, Any], start_response: Start) -> Iterator[bytes]:
    start_response("200 OK", TEXT)
    yield b"first"
    yield environ["wsgi.input"].read()


def silent(environ: dict[str, Any], start_response: Start) -> Iterator[bytes]:
    start_response("200 OK", TEXT)
    yield b""
    raise ZeroDivisionError


def interrupted(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    """Give up a write that takes too long, and continue."""
    from grapeshot import coro

    write = start_response("200 OK", [("Content-Length", str(2 * LENGTH))])
    try:
        with coro.timeout(0.1):
            write(b"a" * LENGTH)
    except coro.TimeoutError:
        Path(environ["QUERY_STRING"]).touch()
    return [b"b" * LENGTH]


def application(environ: dict[str, Any], start_response: Any) -> Any:
    path = environ["PATH_INFO"]
    if path in ("/late", "/silent", "/interrupted"):
        return {"/late": late_reader, "/silent": silent, "/interrupted": interrupted}[path](environ, start_response)
    if path == "/cancelled":
        raise asyncio.CancelledError
    if path == "/exit":
        raise GeneratorExit
    if path == "/method":
        environ["REQUEST_METHOD"] = environ["QUERY_STRING"]
    elif path == "/clear":
        environ.clear()
        raise ZeroDivisionError
    elif path == "/204":
        start_response("204 No Content", [("Content-Length", "5")])
        return []
    start_response("200 OK", TEXT)
    if path == "/no-length":
        return NoLength()
    return [repr(next(environ["wsgi.input"], None)).encode() if path == "/next" else b"hello"]


@pytest.fixture(scope="module", params=["ours", "worker", "sync"])
def address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if request.param == "ours":
        with Served(application, error_log=Errors().logger) as served:
            yield served.port
        return
    path = str(tmp_path_factory.mktemp("g") / "s")
    options = ["--bind", f"unix:{path}", "--no-control-socket"]
    if request.param == "worker":
        options += ["-k", "grapeshot.coro.gunicorn.Worker"]
    environment = {"PYTHONPATH": SEARCH_PATH, "PYTHONWARNINGS": "ignore"}
    with Process("-m", "gunicorn", *options, f"{__name__}:application", env=environment) as process:
        process.wait_line("Booting worker")
        yield path
        assert not any("Bad file descriptor" in line for line in process.output)


def ask(address: Any, request: bytes) -> bytes:
    with connect(address) as sock:
        sock.sendall(request)
        sock.shutdown(socket.SHUT_WR)
        return drain(sock)


@pytest.mark.parametrize(("sent", "seen", "has_body"), [("HEAD", "GET", False), ("GET", "HEAD", True)])
def test_middleware_changes_the_method(address: Any, sent: str, seen: str, has_body: bool) -> None:
    data = ask(address, head(sent, f"/method?{seen}"))
    assert data.startswith(b"HTTP/1.1 200 OK\r\n")
    assert (b"hello" in data.partition(b"\r\n\r\n")[2]) == has_body


@pytest.mark.parametrize("path", ["/clear", "/cancelled", "/exit"])
def test_errors_are_500(address: Any, path: str) -> None:
    assert ask(address, head("GET", path)).startswith(b"HTTP/1.1 500 ")


def test_no_content_has_no_length(address: Any) -> None:
    [(status, fields, body)] = replies(ask(address, head("GET", "/204")))
    assert (status, fields.get("content-length"), body) == (204, None, b"")


def test_a_length_that_is_not_implemented(address: Any) -> None:
    assert ask(address, head("GET", "/no-length")).endswith(chunk(b"a") + chunk(b"b") + chunk(b""))


def test_an_input_without_body_is_an_iterator(address: Any) -> None:
    assert b"None" in ask(address, head("GET", "/next")).partition(b"\r\n\r\n")[2]


def test_the_head_of_an_answer_that_fails(address: Any) -> None:
    data = ask(address, head("GET", "/silent"))
    if isinstance(address, int):
        assert data.startswith(b"HTTP/1.1 500 ")  # PEP 3333: the head waits for the first part that is not empty
    else:
        assert data.startswith(b"HTTP/1.1 200 ")
        assert data.endswith(b"\r\n\r\n")


def test_no_100_continue_is_sent_inside_an_answer(address: Any) -> None:
    with connect(address) as sock:
        sock.sendall(head("POST", "/late", "Content-Length: 4", "Expect: 100-continue"))
        received = b""
        while b"first" not in received:
            received += sock.recv(65536)
        sock.sendall(b"body")
        sock.shutdown(socket.SHUT_WR)
        received += drain(sock)
    answer = received.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert answer.partition(b"\r\n\r\n")[2] == chunk(b"first") + chunk(b"body") + chunk(b"")


@pytest.mark.parametrize("address", ["ours", "worker"], indirect=True)
def test_nothing_follows_a_part_that_was_not_sent(address: Any, tmp_path: Path) -> None:
    given_up = tmp_path / "given-up"
    with connect(address) as sock:
        sock.sendall(head("GET", f"/interrupted?{given_up}") + head("GET", "/"))
        wait_until(given_up.exists)
        data = drain(sock).partition(b"\r\n\r\n")[2]
    assert data == b"a" * len(data)
    assert len(data) < LENGTH
