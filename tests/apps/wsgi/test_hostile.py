"""`grapeshot.coro.wsgi` and hostile clients: mutated streams, streams cut anywhere, and parts that never end."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from support import coro_is_available, wait_until

from tests.apps.certificates import Certificates
from tests.apps.wire import Wire, chunk, head
from tests.apps.wsgi.servers import TEXT, Errors, Served, connect, drain, echo, hello, replies, statuses, talk

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n"
UPGRADE = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: x\r\n"


# ---------------------------------------------------------------- the parser, which gets the pieces directly


class Outcome:
    """What a connection finds in a stream that arrives in these pieces: the requests, and the refusal, if any."""

    def __init__(self, pieces: Iterable[bytes], **limits: int) -> None:
        from grapeshot.coro.wsgi._request import RequestError, RequestParser
        from grapeshot.coro.wsgi._settings import Settings

        options = {"max_target_size": 200, "max_headers": 10, "max_header_size": 200, "max_head_size": 500} | limits
        settings = Settings(hello, 60, 60, max_body=1000, access_log=None, error_log=None, **options)
        parser = RequestParser({}, settings, lambda body: None)
        requests: list[Any] = []
        for piece in pieces:
            if requests and requests[-1].body is not None and not requests[-1].body.is_complete:
                parser.feed(piece)
            else:
                assert not parser.requests
                assert parser.rest == b""
                parser.feed(piece)
            while (request := parser.take()) is not None:
                requests.append(request)
            if parser.error is not None:
                break
        self.requests = [
            (request.method, request.target, request.asks_upgrade, request.keep_alive, *_body_of(request))
            for request in requests
        ]
        error = parser.error
        assert error is None or isinstance(error, RequestError), error
        assert error is None or not isinstance(error.__cause__, Exception), error.__cause__
        self.status = "" if error is None else error.status


def _body_of(request: Any) -> tuple[bytes, bool]:
    body = request.body
    return (b"", True) if body is None else (bytes(body.buffer), body.is_complete)


def pieces_of(data: bytes, cuts: Iterable[int]) -> Iterator[bytes]:
    ends = sorted({cut for cut in cuts if 0 < cut < len(data)} | {len(data)})
    start = 0
    for end in ends:
        yield data[start:end]
        start = end


def post(framing: str, body: bytes) -> bytes:
    return head("POST", "/p", framing) + body


CORPUS = [
    GET,
    head("OPTIONS", "/x", "X: a RTSP/1.0 b", "Y: GET / RTSP/1.0"),
    head("GET", "http://b/x?y"),
    b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    post("Content-Length: 11", b"GET / RTSP/"),
    post("Content-Length: 3", b"a:b"),
    post("Content-Length: 0", b""),
    post("Transfer-Encoding: chunked", chunk(b"GET / RTSP/1.0\r\n") + chunk(b"b" * 20) + b"0;e=f\r\nX-T: 1\r\n\r\n"),
    UPGRADE + b"\r\n",
    UPGRADE.replace(b"GET", b"POST") + b"Content-Length: 3\r\n\r\nabc",
    UPGRADE.replace(b"GET", b"POST") + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(b"abc") + b"0\r\nX: y\r\n\r\n",
    b"OPTIONS / RTSP/1.0\r\nHost: a\r\n\r\n",
    b"GET  /x  RTSP/1.1\r\nHost: a\r\n\r\n",
    b"\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    post("Content-Length: " + "0" * 180 + "4", b"body"),
]
TOKENS = [b"\r", b"\n", b"\r\n", b" ", b":", b"\0", b"\xff", b"0", b";", b" RTSP/1.0", b"Upgrade: h2c\r\n", b"\r\n\r\n"]


def mutated(data: bytes, chance: random.Random) -> bytes:
    result = bytearray(data)
    for _ in range(chance.choice((0, 0, 1, 1, 2, 4))):
        at = chance.randrange(len(result) + 1)
        kind = chance.randrange(4)
        if kind == 0:
            result[at:at] = chance.choice(TOKENS)
        elif kind == 1:
            del result[at : at + chance.randrange(1, 8)]
        elif kind == 2:
            result[at : at + 1] = bytes([chance.randrange(256)])
        else:
            start = chance.randrange(len(result) + 1)
            result[at:at] = result[start : start + chance.randrange(20)]
    return bytes(result)


@pytest.mark.parametrize("seed", range(40))
def test_cuts_change_nothing(seed: int) -> None:
    """However a stream is cut, it gives the same requests, and it is refused in all cases or in none."""
    chance = random.Random(seed)
    for _ in range(25):
        data = mutated(b"".join(chance.choice(CORPUS) for _ in range(chance.randrange(1, 5))), chance)
        whole = Outcome([data])
        for cuts in (range(len(data)), [chance.randrange(len(data) + 1) for _ in range(3)]):
            cut = Outcome(pieces_of(data, cuts))
            # If there are several reasons to refuse a request, the cuts may decide which one is found first.
            assert (cut.requests, bool(cut.status)) == (whole.requests, bool(whole.status)), (data, list(cuts))


def test_a_header_value_is_not_a_request_line() -> None:
    """A header value is not parsed as a request line, no matter where the stream is cut."""
    data = head("GET", "/x", "X: GET /x RTSP/1.0", "Y: a RTSP/1.0", "GET: / RTSP/1.0") + post(
        "Content-Length: 3", b"a:b"
    )
    for at in range(len(data)):
        outcome = Outcome([data[:at], data[at:]])
        assert outcome.status == ""
        assert len(outcome.requests) == 2


@pytest.mark.parametrize(
    "line", [b"GET / RTSP/1.0", b"POST  /x  RTSP/1.1", b"OPTIONS * RTSP/1.0", b"\r\nGET / RTSP/1.0"]
)
@pytest.mark.parametrize("before", [b"", post("Content-Length: 3", b"a:b"), post("Content-Length: 2", b"\nG")])
def test_requests_of_rtsp_are_refused_however_they_arrive(before: bytes, line: bytes) -> None:
    data = before + line + b"\r\nHost: a\r\n\r\n"
    for at in range(len(data)):
        assert Outcome([data[:at], data[at:]]).status == "400 Bad Request"


# ---------------------------------------------------------------- parts without end

LENGTH = 4_000_000
ENDLESS = {
    "the value of a trailer": b"3\r\nabc\r\n0\r\nX: " + b"a" * LENGTH,
    "the name of a trailer": b"3\r\nabc\r\n0\r\n" + b"a" * LENGTH,
    "trailers": b"3\r\nabc\r\n0\r\n" + b"X: y\r\n" * (LENGTH // 6),
    "a chunk extension": b"3;" + b"a" * LENGTH,
    "the last chunk extension": b"3\r\nabc\r\n0;" + b"a" * LENGTH,
    "the size of a chunk": b"3\r\nabc\r\n" + b"0" * LENGTH,
    "extensions of small chunks": b"1;%b\r\na\r\n" % (b"e" * 1000) * (LENGTH // 1000),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_chunk_headers_and_trailers_are_limited(name: str) -> None:
    errors = Errors()
    with Served(echo, error_log=errors.logger) as served:
        [(status, fields, _)] = replies(talk(served.port, CHUNKED + b"\r\n" + ENDLESS[name], half_close=False))
        assert (status, fields["connection"]) == (431, "close")
        assert statuses(talk(served.port, GET)) == [200]
    assert errors.text == ""


@pytest.mark.parametrize("name", ENDLESS)
def test_chunk_headers_and_trailers_are_limited_after_the_answer(name: str) -> None:
    with Served(hello) as served:
        data = CHUNKED + b"\r\n" + ENDLESS[name]
        assert statuses(talk(served.port, data, half_close=False)) == [200]
        wait_until(lambda: served.server.connections == 0)


@pytest.mark.parametrize("size", [b"1", b"00000001", b"1;a=b"])
def test_small_chunks_are_not_treated_as_abuse(size: bytes) -> None:
    body = b"x" * 30_000
    chunks = b"".join(b"%b\r\n%c\r\n" % (size, octet) for octet in body)
    with Served(echo) as served, Wire(served.port) as wire:
        wire.send(CHUNKED + b"\r\n" + chunks + b"0\r\nX-Sum: 1\r\n\r\n")
        assert wire.reply().body == body
        # The chunk headers of this body do not count for the next one.
        wire.send(CHUNKED + b"\r\n" + chunks + b"0\r\nX-Sum: 1\r\n\r\n")
        assert wire.reply().body == body
        wire.send(GET)
        assert wire.reply().body == b""


def trickle(port: int, start: bytes) -> bytes:
    """Send a byte now and then; return what the server sends until it closes."""
    received = b""
    with connect(port) as sock:
        sock.sendall(start)
        sock.settimeout(0.02)
        while True:
            try:
                data = sock.recv(1000)
                if not data:
                    return received
                received += data
                if b"\r\n\r\n" in received:
                    sock.settimeout(10)
                    return received + drain(sock)
            except TimeoutError:
                try:
                    sock.sendall(b"a")
                except OSError:
                    sock.settimeout(10)
                    return received + drain(sock)


@pytest.mark.parametrize("start", [b"3;", b"3\r\nabc\r\n0\r\nX: "])
def test_a_slow_chunk_extension_or_trailer_does_not_extend_the_time_limit(start: bytes) -> None:
    with Served(echo, timeout=0.2) as served:
        assert trickle(served.port, CHUNKED + b"\r\n" + start).startswith(b"HTTP/1.1 408")


def test_one_byte_lines_of_a_long_body() -> None:
    """`readline(size)` searches for the end of a line only in the next `size` bytes, not in the whole body."""
    body = b"a" * 60_000

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        source = environ["wsgi.input"]
        parts = [source.readline(1) for _ in range(len(body))]
        start_response("200 OK", TEXT)
        return [b"".join(parts)]

    with Served(application) as served, Wire(served.port) as wire:
        wire.send(post("Content-Length: 60000", body))
        assert wire.reply().body == body


# ---------------------------------------------------------------- the client gets a status for an error of the parser


@pytest.mark.parametrize(
    "upgrade", [UPGRADE + b"\r\n", UPGRADE.replace(b"GET", b"POST") + b"Content-Length: 3\r\n\r\nabc"]
)
@pytest.mark.parametrize(
    ("bad", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET /%b HTTP/1.1\r\nHost: a\r\n\r\n" % (b"a" * 9000), 414),
        (b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n", 501),
        (b"GET / HTTP/1.1\r\nX : y\r\n\r\n", 400),
    ],
)
def test_a_bad_request_behind_an_upgrade(upgrade: bytes, bad: bytes, status: int) -> None:
    with Served(echo) as served:
        assert statuses(talk(served.port, upgrade + bad)) == [200, status]


def test_an_upgrade_with_as_many_fields_as_there_may_be() -> None:
    fields = b"".join(b"X-%d: y\r\n" % number for number in range(6))
    request = UPGRADE.replace(b"GET", b"POST") + fields + b"Content-Length: 3\r\n\r\nabc"
    chunks = (
        UPGRADE.replace(b"GET", b"POST") + fields + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(b"ab") + chunk(b"")
    )
    with Served(echo, max_headers=10, max_head_size=200) as served:
        assert [body for _, _, body in replies(talk(served.port, request + chunks + GET))] == [b"abc", b"ab", b""]


def test_trailers_behind_an_upgrade_are_checked() -> None:
    request = UPGRADE.replace(b"GET", b"POST") + b"Transfer-Encoding: chunked\r\n\r\n0\r\nHost: b\r\n\r\n"
    with Served(echo) as served:
        assert statuses(talk(served.port, request)) == [400]


@pytest.mark.parametrize("digits", [b"0" * 5000, b"0" * 5000 + b"4", b"1" * 5000])
def test_a_length_of_thousands_of_digits(digits: bytes) -> None:
    lengths: list[str] = []

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        lengths.append(environ["CONTENT_LENGTH"])
        return echo(environ, start_response)

    with Served(application) as served:
        got = statuses(talk(served.port, b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %b\r\n\r\nbody" % digits))
    if digits[:1] == b"1":
        assert got == [400]
    else:
        assert got[0] == 200
        assert lengths == ["4" if digits.endswith(b"4") else "0"]


def test_an_application_that_reads_while_it_handles_an_error() -> None:
    errors = Errors()

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            return echo(environ, start_response)

    with Served(application, error_log=errors.logger, max_body=10) as served, Wire(served.port) as wire:
        wire.send(CHUNKED + b"\r\n")
        wire.send(chunk(b"a" * 11))
        assert wire.reply().status == 413
    assert errors.text == ""


# ---------------------------------------------------------------- the server survives


@pytest.mark.parametrize("seed", range(4))
def test_mutated_streams_do_not_disturb_other_clients(seed: int) -> None:
    """Mutated streams to a real server: each connection ends, and no server error is reported."""
    chance = random.Random(1000 + seed)
    errors = Errors()
    with Served(echo, error_log=errors.logger, timeout=5) as served, Wire(served.port) as wire:
        for _ in range(60):
            data = mutated(b"".join(chance.choice(CORPUS) for _ in range(chance.randrange(1, 5))), chance)
            with connect(served.port) as sock:
                for piece in pieces_of(data, [chance.randrange(len(data) + 1) for _ in range(chance.randrange(4))]):
                    try:
                        sock.sendall(piece)
                    except OSError:
                        break
                try:
                    sock.shutdown(1)
                except OSError:
                    pass
                answers = drain(sock)
            assert answers == b"" or answers.startswith(b"HTTP/1.1 ")
            wire.send(GET)
            assert wire.reply().status == 200
        wire.close()
        wait_until(lambda: served.server.connections == 0)
    assert errors.text == ""


def test_a_tls_client_that_never_pauses_leaves_time_for_others(certificates: Certificates) -> None:
    """The client's data is there before the application reads it, so no read ever waits."""
    length = 100_000  # the system's buffers hold this much data
    sent = threading.Event()
    turns = [0]

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        from grapeshot import coro

        def others() -> None:
            while True:
                coro.yield_slice()
                turns[0] += 1

        coro.threads.run(sent.wait)
        other = coro.spawn(others)
        coro.yield_slice()
        before = turns[0]
        body = environ["wsgi.input"].read()
        turns.append(turns[0] - before)
        other.shutdown()
        start_response("200 OK", TEXT)
        return [str(len(body)).encode()]

    tls = certificates.for_server()
    with Served(application, ssl=tls) as served, Wire(served.port, certificates.for_client()) as wire:
        wire.send(head("POST", "/", f"Content-Length: {length}"))
        for _ in range(length // 1000):
            wire.send(b"a" * 1000)  # the server reads each TLS record separately
        sent.set()
        assert wire.reply().text == str(length)
    assert turns[1] > 0
