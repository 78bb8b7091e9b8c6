"""The same HTTP and HTTPS requests to aiohttp, tornado and uvicorn.

Each server runs on the loop under test. The clients use blocking sockets or asyncio's own loop.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import hashlib
import socket
import time
import warnings
from collections.abc import Callable, Iterator

import pytest

from tests.apps.certificates import Certificates
from tests.apps.servers import APPS, PAYLOAD, PAYLOAD_DIGEST, PIECE_LEN_BYTES, App, pieces
from tests.apps.wire import HOST, TIMEOUT_S, Stream, Wire, chunk, head, on_asyncio

CLIENTS = 500
CONTROL_CLIENTS = 100


# The runs on asyncio's loop only check the tests themselves, so plain HTTP is enough for them.
@pytest.fixture(params=["asyncio-http", "grapeshot-http", "grapeshot-https"])
def way(request: pytest.FixtureRequest) -> list[str]:
    """The kind of loop and the scheme."""
    chosen: list[str] = request.param.split("-")
    return chosen


@pytest.fixture
def kind(way: list[str]) -> str:
    return way[0]


@pytest.fixture
def scheme(way: list[str]) -> str:
    return way[1]


@pytest.fixture(params=list(APPS))
def app(
    request: pytest.FixtureRequest,
    factory: Callable[[], asyncio.AbstractEventLoop],
    scheme: str,
    certificates: Certificates,
) -> Iterator[App]:
    with APPS[request.param](factory, certificates if scheme == "https" else None) as running:
        yield running


def is_payload(body: bytes) -> bool:
    return len(body) == len(PAYLOAD) and hashlib.sha256(body).digest() == hashlib.sha256(PAYLOAD).digest()


def test_keep_alive(app: App) -> None:
    with Wire(app.port, app.for_client) as wire:
        own_port = str(wire.sock.getsockname()[1])
        for n in range(200):
            assert wire.get(f"/number?n={n}").text == str(n)
            assert wire.get("/peer").text == own_port
        assert wire.get("/hello", "Connection: close").text == "hello"
        assert wire.is_at_end()


def test_pipelining(app: App) -> None:
    body = b"x" * 5000
    post = head("POST", "/digest", f"Content-Length: {len(body)}") + body
    with Wire(app.port, app.for_client) as wire:
        gets = [head("GET", f"/number?n={n}") for n in range(60)]
        wire.send(b"".join([*gets[:30], post, *gets[30:]]))
        assert [wire.reply().text for _ in range(30)] == [str(n) for n in range(30)]
        assert wire.reply().text == f"{len(body)} {hashlib.sha256(body).hexdigest()}"
        assert [wire.reply().text for _ in range(30)] == [str(n) for n in range(30, 60)]


def test_a_request_byte_by_byte(app: App) -> None:
    with Wire(app.port, app.for_client) as wire:
        request = head("POST", "/digest", "Transfer-Encoding: chunked") + chunk(b"abc") + chunk(b"de") + chunk(b"")
        for byte in request:
            wire.send(bytes([byte]))
        assert wire.reply().text == f"5 {hashlib.sha256(b'abcde').hexdigest()}"


def test_streams_10_mb_down(app: App) -> None:
    with Wire(app.port, app.for_client) as wire:
        for _ in range(2):
            reply = wire.get("/payload")
            assert reply.fields["transfer-encoding"] == "chunked"
            assert is_payload(reply.body)
        assert wire.get("/hello").text == "hello"


def test_streams_10_mb_to_a_slow_reader(app: App) -> None:
    with Wire(app.port, app.for_client) as wire, Wire(app.port, app.for_client) as other:
        wire.send(head("GET", "/payload"))
        wire.reply_head()
        for _ in range(50):  # the slow reader does not delay other clients
            assert other.get("/hello").text == "hello"
        parts = []
        while length := int(wire.line(), 16):
            parts.append(wire.exactly(length))
            assert wire.line() == b""
        assert is_payload(b"".join(parts))


@pytest.mark.parametrize("coding", ["content-length", "chunked"])
def test_streams_10_mb_up(app: App, coding: str) -> None:
    with Wire(app.port, app.for_client) as wire:
        if coding == "chunked":
            wire.send(head("POST", "/digest", "Transfer-Encoding: chunked"))
            for piece in [*pieces(), b""]:
                wire.send(chunk(piece))
        else:
            wire.send(head("POST", "/digest", f"Content-Length: {len(PAYLOAD)}"))
            wire.send(PAYLOAD)
        assert wire.reply().text == PAYLOAD_DIGEST
        assert wire.get("/hello").text == "hello"


@pytest.mark.parametrize("coding", ["content-length", "chunked"])
def test_streams_10_mb_both_ways_at_once(app: App, coding: str) -> None:
    async def send(stream: Stream) -> None:
        chunked = coding == "chunked"
        field = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(PAYLOAD)}"
        stream.writer.write(head("POST", "/echo", field))
        for piece in pieces():
            stream.writer.write(chunk(piece) if chunked else piece)
            await stream.writer.drain()
        if chunked:
            stream.writer.write(chunk(b""))

    async def client() -> bytes:
        stream = await Stream.connect(app.port, app.for_client)
        try:
            _, reply = await asyncio.gather(send(stream), stream.reply())
            return reply.body
        finally:
            await stream.close()

    assert is_payload(on_asyncio(client()))


def test_500_concurrent_clients(app: App, kind: str) -> None:
    clients = CONTROL_CLIENTS if kind == "asyncio" else CLIENTS

    async def client(number: int) -> list[str]:
        stream = await Stream.connect(app.port, app.for_client)
        try:
            texts = [(await stream.get(f"/gather?n={clients}")).text]
            texts += [(await stream.get(f"/number?n={number * 10 + n}")).text for n in range(5)]
            return texts
        finally:
            await stream.close()

    async def everyone() -> list[list[str]]:
        return await asyncio.gather(*map(client, range(clients)))

    expected = [["together", *(str(number * 10 + n) for n in range(5))] for number in range(clients)]
    assert on_asyncio(everyone()) == expected


@pytest.mark.parametrize("how", ["close", "reset"])
def test_client_disconnects_in_the_middle_of_its_body(app: App, how: str) -> None:
    for count in range(1, 4):
        wire = Wire(app.port, app.for_client)
        wire.send(head("POST", "/digest", f"Content-Length: {len(PAYLOAD)}") + PAYLOAD[: 1024 * 1024])
        app.journal.wait("upload-begun", count)
        getattr(wire, how)()
    app.journal.wait("upload-lost", 3)
    with Wire(app.port, app.for_client) as wire:
        assert wire.get("/hello").text == "hello"


@pytest.mark.parametrize("how", ["close", "reset"])
def test_client_disconnects_in_the_middle_of_the_reply(app: App, how: str) -> None:
    for _ in range(3):
        wire = Wire(app.port, app.for_client)
        wire.send(head("GET", "/endless"))
        wire.exactly(1024 * 1024)
        getattr(wire, how)()
    app.journal.wait("download-lost", 3)
    with Wire(app.port, app.for_client) as wire:
        assert wire.get("/hello").text == "hello"


def test_many_clients_go_while_others_stay(app: App) -> None:
    """Descriptors are closed and reused all the time. No client gets the bytes of another client."""

    async def leaver() -> None:
        stream = await Stream.connect(app.port, app.for_client)
        stream.writer.write(head("GET", "/payload"))
        await stream.reader.readexactly(PIECE_LEN_BYTES)
        stream.writer.transport.abort()

    async def stayer(number: int) -> None:
        stream = await Stream.connect(app.port, app.for_client)
        for n in range(50):
            assert (await stream.get(f"/number?n={number}-{n}")).text == f"{number}-{n}"
        await stream.close()

    async def everyone() -> None:
        await asyncio.gather(*(leaver() if number % 2 else stayer(number) for number in range(60)))

    on_asyncio(everyone())


def test_graceful_shutdown_with_requests_in_flight(app: App) -> None:
    wires = [Wire(app.port, app.for_client) for _ in range(5)]
    idle = Wire(app.port, app.for_client)
    assert idle.get("/hello").text == "hello"
    for wire in wires:
        wire.send(head("GET", "/held"))
    app.journal.wait("held", len(wires))
    app.begin_shutdown()
    wait_until_refused(app.port)
    app.open_gate()
    for wire in wires:
        assert wire.reply().text == "released"
        assert wire.is_at_end()
        wire.close()
    assert idle.is_at_end()
    idle.close()
    app.join()
    if app.for_client is not None:
        # If a loop is closed while a transport waits for the peer's close_notify, the garbage collector frees the
        # transport, which warns that it is unclosed.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


def wait_until_refused(port: int) -> None:
    """Wait until no socket listens on the port; then check that a connection is refused. The wait tries to bind
    the port, which is possible as soon as no socket listens there, even while connections use the port.
    """
    give_up_s = time.monotonic() + TIMEOUT_S
    while is_listening(port):
        assert time.monotonic() < give_up_s, "the server still listens"
        time.sleep(0.01)
    with pytest.raises(ConnectionRefusedError):
        Wire(port)


def is_listening(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((HOST, port))
        except OSError as error:
            assert error.errno == errno.EADDRINUSE, error
            return True
        return False
