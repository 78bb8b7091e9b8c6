"""Good and bad requests and their answers, from `grapeshot.coro.wsgi` and, as the control, from gunicorn's sync worker.

gunicorn gets each request as a whole. grapeshot gets it twice: as a whole, and byte by byte (long bad requests: in
pieces of 1000 bytes). Where the two servers differ on purpose, DIFFERS gives the reason.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from support import coro_is_available

from tests.apps.processes import SEARCH_PATH, Process
from tests.apps.wire import TIMEOUT_S
from tests.apps.wsgi.servers import Served, connect, drain, replies

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")


def line(text: str, *fields: str, body: bytes = b"") -> bytes:
    """A request of HTTP/1.1 with a Host."""
    return "\r\n".join([f"{text} HTTP/1.1", "Host: a", *fields, "", ""]).encode("latin-1") + body


def get(*fields: str) -> bytes:
    return line("GET /", *fields)


def post(*fields: str, body: bytes) -> bytes:
    return line("POST /", *fields, body=body)


def chunked(body: bytes) -> bytes:
    return post("Transfer-Encoding: chunked", body=body)


# Good requests, and the method, path, query and body that the application must get.
GOOD: dict[str, tuple[bytes, tuple[str, str, str, bytes]]] = {
    "plain": (get(), ("GET", "/", "", b"")),
    "options": (line("OPTIONS /x"), ("OPTIONS", "/x", "", b"")),
    "rare method": (line("PROPFIND /x"), ("PROPFIND", "/x", "", b"")),
    "query": (line("GET /x?a=b?c"), ("GET", "/x", "a=b?c", b"")),
    "empty query": (line("GET /x?"), ("GET", "/x", "", b"")),
    "escapes": (line("GET /%20%ff%2f?%20"), ("GET", "/ \xff/", "%20", b"")),
    "fragment": (line("GET /x#y"), ("GET", "/x", "", b"")),
    "two slashes": (line("GET //x//y"), ("GET", "//x//y", "", b"")),
    "absolute": (b"GET http://b/x?y HTTP/1.1\r\nHost: a\r\n\r\n", ("GET", "/x", "y", b"")),
    "absolute, only a host": (b"GET http://b/?y HTTP/1.1\r\nHost: a\r\n\r\n", ("GET", "/", "y", b"")),
    "http 1.0": (b"GET /x HTTP/1.0\r\n\r\n", ("GET", "/x", "", b"")),
    "one empty line before": (b"\r\n" + get(), ("GET", "/", "", b"")),
    "tabs": (get("X:\ta\tb\t"), ("GET", "/", "", b"")),
    "empty field": (get("X:", "Y: "), ("GET", "/", "", b"")),
    "latin-1": (get("X: \xe4"), ("GET", "/", "", b"")),
    "all signs of a token": (get("!#$%&'*+-.^`|~09azAZ: x"), ("GET", "/", "", b"")),
    "length": (post("Content-Length: 4", body=b"body"), ("POST", "/", "", b"body")),
    "length of zeros": (post("Content-Length: 0004", body=b"body"), ("POST", "/", "", b"body")),
    "length of one zero": (post("Content-Length: 0", body=b""), ("POST", "/", "", b"")),
    "get with body": (line("GET /", "Content-Length: 4", body=b"body"), ("GET", "/", "", b"body")),
    "chunks": (chunked(b"3\r\none\r\nA\r\n0123456789\r\n0\r\n\r\n"), ("POST", "/", "", b"one0123456789")),
    "chunk with zeros": (chunked(b"003\r\none\r\n000\r\n\r\n"), ("POST", "/", "", b"one")),
    "chunk extension": (chunked(b'3;a=b;c="d"\r\none\r\n0;e\r\n\r\n'), ("POST", "/", "", b"one")),
    "trailer": (chunked(b"3\r\none\r\n0\r\nX-Sum: 1\r\n\r\n"), ("POST", "/", "", b"one")),
    "Chunked": (post("transfer-encoding: Chunked", body=b"0\r\n\r\n"), ("POST", "/", "", b"")),
    "host of ipv6": (b"GET / HTTP/1.1\r\nHost: [::1]:80\r\n\r\n", ("GET", "/", "", b"")),
    "rtsp in a field": (get("X: a RTSP/1.0", "Y: GET / RTSP/1.0"), ("GET", "/", "", b"")),
    "rtsp in a body": (
        post("Content-Length: 18", body=b"GET / RTSP/1.0\r\n\r\n"),
        ("POST", "/", "", b"GET / RTSP/1.0\r\n\r\n"),
    ),
    "empty host": (b"GET / HTTP/1.1\r\nHost:\r\n\r\n", ("GET", "/", "", b"")),
}
BAD: dict[str, tuple[bytes, int]] = {
    # The request line.
    "no version": (b"GET /\r\n\r\n", 505),
    "no target": (b"GET HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "http 0.9": (b"GET / HTTP/0.9\r\nHost: a\r\n\r\n", 505),
    "http 1.2": (b"GET / HTTP/1.2\r\nHost: a\r\n\r\n", 505),
    "http 2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "http 2 in the syntax of http 1": (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
    "lower case version": (b"GET / http/1.1\r\nHost: a\r\n\r\n", 400),
    "a space after the version": (b"GET / HTTP/1.1 \r\nHost: a\r\n\r\n", 400),
    "rtsp": (b"OPTIONS / RTSP/1.1\r\nHost: a\r\n\r\n", 400),
    "rtsp with a method of http": (b"GET /  RTSP/1.0\r\nHost: a\r\n\r\n", 400),
    "icecast": (b"SOURCE / ICE/1.0\r\nHost: a\r\n\r\n", 501),
    "ftp": (b"GET / FTP/1.1\r\nHost: a\r\n\r\n", 400),
    "no method": (b" / HTTP/1.1\r\nHost: a\r\n\r\n", 501),
    "lower case method": (line("get /"), 501),
    "unknown method": (line("BLARGH /"), 501),
    "connect": (b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n", 501),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 501),
    "a name as target": (line("GET x"), 400),
    "an authority as target": (line("GET a:80"), 400),
    "* as target": (line("GET *"), 400),
    "ftp target": (line("GET ftp://a/"), 400),
    "a control in the target": (line("GET /\x01"), 400),
    "a tab in the target": (line("GET /\t"), 400),
    "del in the target": (line("GET /\x7f"), 400),
    "not ascii in the target": (line("GET /\xe4"), 400),
    "a space in the target": (line("GET /a b"), 400),
    # Line ends.
    "bare lf": (b"GET / HTTP/1.1\nHost: a\n\n", 400),
    "bare lf after a field": (b"GET / HTTP/1.1\r\nHost: a\nX: y\r\n\r\n", 400),
    "bare lf at the end": (b"GET / HTTP/1.1\r\nHost: a\r\n\n", 400),
    "bare cr in a field": (get("X: a\rb"), 400),
    "obs-fold": (get("X: a", " b"), 400),
    "obs-fold at first": (b"GET / HTTP/1.1\r\n X: a\r\nHost: a\r\n\r\n", 400),
    # Fields.
    "a space before the colon": (get("X : a"), 400),
    "no colon": (get("X"), 400),
    "no name": (get(": a"), 400),
    "a space in a name": (get("X Y: a"), 400),
    "a bracket in a name": (get("X(: a"), 400),
    "not ascii in a name": (get("X\xe4: a"), 400),
    "nul in a value": (get("X: a\0"), 400),
    "del in a value": (get("X: a\x7f"), 400),
    # Host.
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "two hosts": (get("Host: b"), 400),
    "the same host twice": (get("Host: a"), 400),
    "a space in the host": (b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n", 400),
    "a path as host": (b"GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", 400),
    "a user as host": (b"GET / HTTP/1.1\r\nHost: a@b\r\n\r\n", 400),
    "a user in the target": (line("GET http://a@b/"), 400),
    # Requests that test the length of a body.
    "length twice": (post("Content-Length: 4", "Content-Length: 4", body=b"body"), 400),
    "two lengths": (post("Content-Length: 4", "Content-Length: 5", body=b"body"), 400),
    "list of lengths": (post("Content-Length: 4, 4", body=b"body"), 400),
    "length with a sign": (post("Content-Length: +4", body=b"body"), 400),
    "negative length": (post("Content-Length: -4", body=b"body"), 400),
    "length in hex": (post("Content-Length: 0x4", body=b"body"), 400),
    "length with _": (post("Content-Length: 1_0", body=b"body567890"), 400),
    "length with a space": (post("Content-Length: 1 0", body=b"body567890"), 400),
    "length beyond 64 bits": (post("Content-Length: 18446744073709551620", body=b"body"), 400),
    "other digits": (post("Content-Length: \xb2", body=b"ab"), 400),
    "length and chunks": (post("Content-Length: 4", "Transfer-Encoding: chunked", body=b"0\r\n\r\n"), 400),
    "chunks and length": (post("Transfer-Encoding: chunked", "Content-Length: 4", body=b"0\r\n\r\n"), 400),
    "chunked twice": (post("Transfer-Encoding: chunked", "Transfer-Encoding: chunked", body=b"0\r\n\r\n"), 400),
    "chunked, chunked": (post("Transfer-Encoding: chunked, chunked", body=b"0\r\n\r\n"), 400),
    "chunked in quotes": (post('Transfer-Encoding: "chunked"', body=b"0\r\n\r\n"), 501),
    "xchunked": (post("Transfer-Encoding: xchunked", body=b"0\r\n\r\n"), 501),
    "identity": (post("Transfer-Encoding: identity", body=b"0\r\n\r\n"), 501),
    "chunked, identity": (post("Transfer-Encoding: chunked, identity", body=b"0\r\n\r\n"), 400),
    "gzip": (post("Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n"), 501),
    "a control before chunked": (post("Transfer-Encoding: \x0bchunked", body=b"0\r\n\r\n"), 400),
    "chunked in http 1.0": (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    # Chunks.
    "no chunk size": (chunked(b"\r\none\r\n0\r\n\r\n"), 400),
    "chunk size in 0x": (chunked(b"0x3\r\none\r\n0\r\n\r\n"), 400),
    "negative chunk size": (chunked(b"-3\r\none\r\n0\r\n\r\n"), 400),
    "chunk size with _": (chunked(b"0_3\r\none\r\n0\r\n\r\n"), 400),
    "chunk size beyond 64 bits": (chunked(b"10000000000000003\r\none\r\n0\r\n\r\n"), 400),
    "a space before a chunk size": (chunked(b" 3\r\none\r\n0\r\n\r\n"), 400),
    "bare lf after a chunk size": (chunked(b"3\none\r\n0\r\n\r\n"), 400),
    "bare lf in a chunk extension": (chunked(b"3;a\nb\r\none\r\n0\r\n\r\n"), 400),
    "bare lf after a chunk": (chunked(b"3\r\none\n0\r\n\r\n"), 400),
    "chunk too long": (chunked(b"2\r\none\r\n0\r\n\r\n"), 400),
    "length in a trailer": (chunked(b"0\r\nContent-Length: 3\r\n\r\n"), 400),
    "host in a trailer": (chunked(b"0\r\nHost: b\r\n\r\n"), 400),
    "bad trailer": (chunked(b"0\r\nX Y: b\r\n\r\n"), 400),
    # Other requests.
    "expectation": (post("Expect: the best", "Content-Length: 4", body=b"body"), 417),
    "two types": (post("Content-Type: a/b", "Content-Type: c/d", "Content-Length: 0", body=b""), 400),
    "long target": (line(f"GET /{'a' * 8190}"), 414),
    "long field": (get(f"X: {'a' * 8190}"), 431),
    "long name": (get(f"{'a' * 8190}: X"), 431),
    "many fields": (get(*(f"X{number}: a" for number in range(100))), 431),
}
# Requests that gunicorn's sync worker answers differently: its status (0: no answer), and the reason for our status.
RFC_505 = "RFC 9110, 15.6.6, has a status for versions"
RFC_501 = "RFC 9110, 15.6.2, has a status for unknown methods; llhttp knows the methods that IANA lists"
DIFFERS: dict[str, tuple[int, str]] = {
    "no version": (400, "llhttp reads it as HTTP/0.9"),
    "http 0.9": (400, RFC_505),
    "http 1.2": (200, "gunicorn takes every HTTP/1.x; llhttp stops at 1.1"),
    "http 2": (400, RFC_505),
    "http 2 in the syntax of http 1": (400, RFC_505),
    "no method": (400, RFC_501),
    "lower case method": (400, RFC_501),
    "unknown method": (200, RFC_501),
    "connect": (200, "an application of WSGI cannot be a tunnel"),
    "tls": (400, RFC_501),
    "icecast": (400, RFC_501),
    "ftp target": (200, "RFC 9112, 3.2.2: a target of another scheme is for a proxy"),
    "no host": (200, "RFC 9112, 3.2: a server must answer 400"),
    "a space in the host": (200, "RFC 9112, 3.2: a server must answer 400"),
    "a path as host": (200, "RFC 9112, 3.2: a server must answer 400"),
    "a user as host": (200, "RFC 9112, 3.2: a server must answer 400"),
    "a user in the target": (200, "RFC 9110, 4.2.4: a user name is an error, because it may hide the real host"),
    "length beyond 64 bits": (200, "llhttp counts in 64 bits"),
    "identity": (400, "RFC 9112, 6.1: 501 is for a coding that a server does not know"),
    "gzip": (200, "gunicorn does not decompress the body"),
    "chunk size beyond 64 bits": (0, "gunicorn closes without an answer; llhttp counts in 64 bits"),
}


def echo(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    body = environ["wsgi.input"].read()
    got = repr((environ["REQUEST_METHOD"], environ["PATH_INFO"], environ.get("QUERY_STRING", ""), body))
    data = got.encode("latin-1", "backslashreplace")
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", str(len(data)))])
    return [data]


@pytest.fixture(scope="module")
def ours() -> Iterator[int]:
    with Served(echo) as served:
        yield served.port


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = str(tmp_path_factory.mktemp("g") / "s")
    options = ["--bind", f"unix:{path}", "--no-control-socket", "--limit-request-line", "8190"]
    environment = {"PYTHONPATH": SEARCH_PATH, "PYTHONWARNINGS": "ignore"}
    with Process("-m", "gunicorn", *options, f"{__name__}:echo", env=environment) as process:
        process.wait_line("Booting worker")
        yield path


def send(address: Any, data: bytes, step: int) -> bytes:
    """Send data in pieces of `step` bytes; return what the server answers until it closes."""
    with connect(address) as sock:
        if not isinstance(address, str):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            for start in range(0, len(data), step):
                sock.sendall(data[start : start + step])
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the server has stopped reading
        sock.settimeout(TIMEOUT_S)
        return drain(sock)


@pytest.mark.parametrize("name", GOOD)
def test_good(name: str, ours: int, control: str) -> None:
    data, wanted = GOOD[name]
    for address, step in ((control, 1 << 20), (ours, 1 << 20), (ours, 1)):
        [(status, _, body)] = replies(send(address, data, step))
        assert (status, body.decode("latin-1")) == (200, repr(wanted)), (address, step)


@pytest.mark.parametrize("name", BAD)
def test_bad(name: str, ours: int, control: str) -> None:
    data, wanted = BAD[name]
    for step in (1 << 20, 1) if len(data) < 1000 else (1 << 20, 1000):
        [(status, fields, _)] = replies(send(ours, data + get(), step))
        assert (status, fields["connection"]) == (wanted, "close"), step
    # Compare only the status: the Content-Length of gunicorn's error page may be wrong.
    theirs = int(send(control, data, 1 << 20)[9:12] or b"0")
    assert theirs == (DIFFERS[name][0] if name in DIFFERS else wanted)


def test_requests_before_a_bad_one_are_answered(ours: int) -> None:
    data = get() + post("Content-Length: 4", body=b"body") + get("X : y") + get()
    assert [status for status, _, _ in replies(send(ours, data, 1 << 20))] == [200, 200, 400]


def test_requests_at_once_are_answered_in_order(ours: int) -> None:
    data = b"".join(line(f"POST /{number}", f"Content-Length: {number}", body=b"a" * number) for number in range(50))
    for step in (1 << 20, 7):
        bodies = [body for _, _, body in replies(send(ours, data, step))]
        assert bodies == [repr(("POST", f"/{number}", "", b"a" * number)).encode() for number in range(50)]


def test_nothing_is_answered_after_the_last_request(ours: int) -> None:
    assert len(replies(send(ours, get("Connection: close") + get(), 1 << 20))) == 1
