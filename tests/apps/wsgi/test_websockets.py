"""flask-sock and Flask-SocketIO on `python -m grapeshot.coro.wsgi` and on gunicorn with grapeshot's worker class.

For comparison, most tests also run on gunicorn with threads. The other two servers patch the standard library, so
each server runs in its own process.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support import coro_is_available, wait_until

from tests.apps import requirements
from tests.apps.processes import Process
from tests.apps.wire import HOST, TIMEOUT_S, Wire, head

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

APPLICATION = r"""
import os
import threading

from flask import Flask
from flask_sock import Sock
from flask_socketio import SocketIO, emit

app = Flask(__name__)
sock = Sock(app)
socketio = SocketIO(app, async_mode="threading")
together = threading.Condition()
count = 0


@app.route("/")
def index():
    return str(count)


@sock.route("/echo")
def echo(ws):
    while (message := ws.receive()) != "end":
        ws.send(message)


@sock.route("/together/<int:wanted>")
def meet(ws, wanted):
    "Answer when `wanted` clients are here."
    global count
    with together:
        count += 1
        together.notify_all()
        together.wait_for(lambda: count >= wanted)
    ws.send("met")
    ws.receive()
    with together:
        count -= 1


@sock.route("/watch")
def watch(ws):
    print("watching", flush=True)
    try:
        ws.receive()
    finally:
        print("gone", flush=True)


@socketio.on("greet")
def greet(name):
    emit("greeting", f"hello {name}")
    emit("joined", name, broadcast=True)
    return "greeted"


@socketio.on("disconnect")
def disconnect(reason=None):
    os.write(1, b"disconnected\n")  # print() in several real threads would mix the lines
"""

HANDSHAKE = [
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
]
OPTIONS = ["--bind", f"{HOST}:0", "--no-control-socket"]
SERVERS = {
    "ours": ["-m", "grapeshot.coro.wsgi", "served:app", "--bind", f"{HOST}:0"],
    "worker": ["-m", "gunicorn", "-k", "grapeshot.coro.gunicorn.Worker", *OPTIONS, "served:app"],
    "threads": ["-m", "gunicorn", "-k", "gthread", "--threads", "60", *OPTIONS, "served:app"],
}


class Served:
    """The application on one of the servers."""

    def __init__(self, kind: str, folder: Path) -> None:
        (folder / "served.py").write_text(APPLICATION, encoding="utf-8")
        warnings = {"PYTHONWARNINGS": "ignore"} if kind == "threads" else {}
        self.process = Process(*SERVERS[kind], env=warnings, cwd=folder)
        try:
            line = self.process.wait_line("Listening", "http://")
            self.port = int(line.partition("http://")[2].partition(":")[2].split()[0])
        except BaseException:
            self.process.close()
            raise
        self.url = f"ws://{HOST}:{self.port}"

    def check(self) -> None:
        assert not any("Traceback" in line for line in self.process.output), self.process.output


@pytest.fixture(scope="module", params=list(SERVERS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    for module in ("flask_sock", "flask_socketio", "socketio", "websocket", "websockets"):
        requirements.package(module)
    server = Served(request.param, tmp_path_factory.mktemp("w"))
    with server.process:
        yield server
        server.check()


def client(url: str, **options: Any) -> Any:
    from websockets.sync.client import connect

    return connect(url, open_timeout=TIMEOUT_S, close_timeout=TIMEOUT_S, max_size=None, proxy=None, **options)


# ---------------------------------------------------------------- flask-sock


@pytest.mark.parametrize("compression", ["deflate", None])
def test_echo(served: Served, compression: str | None) -> None:
    with client(f"{served.url}/echo", compression=compression) as ws:
        assert [type(each).__name__ for each in ws.protocol.extensions] == ["PerMessageDeflate"] * bool(compression)
        for message in ("text \u20ac", b"octets", "", "a" * 200_000, os.urandom(2_000_000)):
            ws.send(message)
            assert ws.recv(timeout=TIMEOUT_S) == message
        ws.ping().wait(TIMEOUT_S)


def test_a_client_sends_fragments(served: Served) -> None:
    with client(f"{served.url}/echo") as ws:
        ws.send(["one", "two", "three"])
        assert ws.recv(timeout=TIMEOUT_S) == "onetwothree"


def test_many_clients_at_once(served: Served) -> None:
    count = 40
    all_here = threading.Barrier(count)

    def talk(number: int) -> None:
        with client(f"{served.url}/echo") as ws:
            all_here.wait(TIMEOUT_S)
            for turn in range(20):
                ws.send(f"{number} {turn}")
                assert ws.recv(timeout=TIMEOUT_S) == f"{number} {turn}"

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(talk, range(count)))


def test_clients_wait_for_each_other(served: Served) -> None:
    count = 20

    def meet(_: int) -> Any:
        with client(f"{served.url}/together/{count}") as ws:
            return ws.recv(timeout=TIMEOUT_S)

    with ThreadPoolExecutor(count) as pool:
        assert list(pool.map(meet, range(count))) == ["met"] * count


def test_the_server_says_goodbye(served: Served) -> None:
    from websockets.exceptions import ConnectionClosedOK

    with client(f"{served.url}/echo") as ws:
        ws.send("end")
        with pytest.raises(ConnectionClosedOK):
            ws.recv(timeout=TIMEOUT_S)


@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_client_that_disconnects_without_a_close_frame(served: Served, how: str) -> None:
    before = sum("gone" in line for line in served.process.output)
    wire = Wire(served.port)
    wire.send(head("GET", "/watch", *HANDSHAKE))
    assert wire.reply_head()[0] == 101
    (wire.close if how == "close" else wire.reset)()
    served.process.wait_line("gone", count=before + 1)
    with Wire(served.port) as other:
        assert other.get("/").status == 200


@pytest.mark.parametrize("served", ["ours", "worker"], indirect=True)
def test_frames_right_behind_the_request(served: Served) -> None:
    """gunicorn's worker gthread loses these frames, so it is not tested."""
    frame = b"\x81\x82\0\0\0\0hi"
    with Wire(served.port) as wire:
        wire.send(head("GET", "/echo", *HANDSHAKE) + frame * 2)
        assert wire.reply_head()[0] == 101
        assert wire.exactly(8) == b"\x81\x02hi" * 2
        wire.send(frame)
        assert wire.exactly(4) == b"\x81\x02hi"


def test_a_request_that_is_not_a_websocket(served: Served) -> None:
    with Wire(served.port) as wire:
        assert wire.get("/", "Connection: Upgrade", "Upgrade: h2c").status == 200
        assert wire.get("/").status == 200


# ---------------------------------------------------------------- Flask-SocketIO


@pytest.mark.parametrize("transports", [["websocket"], ["polling"], ["polling", "websocket"]])
def test_socketio(served: Served, transports: list[str]) -> None:
    import socketio

    count = 5
    before = sum("disconnected" in line for line in served.process.output)
    clients = []
    try:
        for _ in range(count):
            sio = socketio.Client(reconnection=False, handle_sigint=False)
            got: list[str] = []
            joined: list[str] = []
            sio.on("greeting", got.append)
            sio.on("joined", joined.append)
            sio.connect(f"http://{HOST}:{served.port}", transports=transports, wait_timeout=TIMEOUT_S)
            clients.append((sio, got, joined))
            assert sio.transport() == transports[-1]
        # The client runs each handler in a thread of its own, so handlers may run late and in any order.
        names = [f"client {number}" for number in range(count)]
        for name, (sio, got, _) in zip(names, clients, strict=True):
            assert sio.call("greet", name, timeout=TIMEOUT_S) == "greeted"
            wait_until(lambda got=got: got, "the greeting")
            assert got == [f"hello {name}"]
        for _, _, joined in clients:
            wait_until(lambda joined=joined: len(joined) >= count, "all broadcasts")
            assert sorted(joined) == names
    finally:
        for sio, _, _ in clients:
            sio.disconnect()
            # The client does not close its socket if the server's close frame comes before the client sends its own.
            sio.eio.ws and sio.eio.ws.shutdown()
            sio.eio.http and sio.eio.http.close()
    served.process.wait_line("disconnected", count=before + count)


# ---------------------------------------------------------------- the end


def test_a_graceful_end(tmp_path: Path) -> None:
    """The server does not wait for clients that stay: their streams end, and the application notices this."""
    from websockets.exceptions import ConnectionClosedError

    for module in ("flask_sock", "flask_socketio", "websockets"):
        requirements.package(module)
    server = Served("ours", tmp_path)
    with server.process, client(f"{server.url}/watch") as ws:
        server.process.wait_line("watching")
        server.process.process.send_signal(signal.SIGTERM)
        with pytest.raises(ConnectionClosedError):
            ws.recv(timeout=TIMEOUT_S)
        server.process.wait_line("gone")
        assert server.process.finish() == 0
        server.check()
