"""`grapeshot.coro.wsgi`: limits, slow clients, the end of a server, and the command line."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from support import coro_is_available, wait_until

from tests.apps.certificates import Certificates
from tests.apps.processes import Process
from tests.apps.wire import Wire, chunk, head
from tests.apps.wsgi.servers import HOST, Served, connect, drain, replies, statuses, talk

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


def echo(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    body = environ["wsgi.input"].read()
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [body]


class Gate:
    """An application whose requests wait until the test opens the gate."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.waiting = 0

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        from grapeshot import coro

        self.waiting += 1
        try:
            while not self._open.is_set():
                coro.sleep_relative(0.001)
        finally:
            self.waiting -= 1
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"through"]

    def open(self) -> None:
        self._open.set()


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("options", "good", "bad", "status"),
    [
        ({"max_target_size": 10}, b"GET /234567890", b"GET /2345678901", 414),
        ({"max_headers": 2}, b"GET / HTTP/1.1\r\nX: y", b"GET / HTTP/1.1\r\nX: y\r\nZ: y", 431),
        ({"max_header_size": 10}, b"GET / HTTP/1.1\r\nX: 45678", b"GET / HTTP/1.1\r\nX: 456789", 431),
        ({"max_head_size": 20}, b"GET / HTTP/1.1\r\nX: 456789", b"GET / HTTP/1.1\r\nX: 4567890", 431),
    ],
)
@pytest.mark.parametrize("step", [1000, 1])
def test_limits_of_a_head(options: dict[str, int], good: bytes, bad: bytes, status: int, step: int) -> None:
    with Served(echo, **options) as served:
        for start, wanted in ((good, 200), (bad, status)):
            data = start if b"HTTP" in start else start + b" HTTP/1.1"
            data += b"\r\nHost: a\r\n\r\n"
            with connect(served.port) as sock:
                for first in range(0, len(data), step):
                    try:
                        sock.sendall(data[first : first + step])
                    except OSError:
                        break
                try:
                    sock.shutdown(socket.SHUT_WR)
                except OSError:
                    pass
                assert statuses(drain(sock)) == [wanted]


@pytest.mark.parametrize("data", [b"GET /" + b"a" * 10**6, b"GET / HTTP/1.1\r\nX: " + b"a" * 10**6, b"\r\n" * 10**6])
def test_a_head_without_end_is_not_kept(data: bytes) -> None:
    with Served(echo) as served:
        [status] = statuses(talk(served.port, data, half_close=False))
        assert status == (414 if data.startswith(b"GET /a") else 431)


def test_limit_of_a_body() -> None:
    with Served(echo, max_body=10) as served:
        for framing, data in (
            ("Content-Length: 11", b"a" * 11),
            ("Transfer-Encoding: chunked", chunk(b"a" * 6) + chunk(b"a" * 5) + chunk(b"")),
        ):
            [(status, fields, _)] = replies(talk(served.port, head("POST", "/", framing) + data))
            assert (status, fields["connection"]) == (413, "close")
        with Wire(served.port) as wire:
            wire.send(head("POST", "/", "Content-Length: 10") + b"a" * 10)
            assert wire.reply().body == b"a" * 10


def test_limit_of_connections() -> None:
    gate = Gate()
    with Served(gate, limit=1) as served, Wire(served.port) as first, Wire(served.port) as second:
        first.send(head("GET", "/"))
        wait_until(lambda: gate.waiting)
        second.send(head("GET", "/"))
        gate.open()
        assert first.reply().body == b"through"
        assert served.server.connections == 1
        first.close()
        assert second.reply().body == b"through"


# ---------------------------------------------------------------- slow clients


@pytest.mark.parametrize("data", [b"", b"\r\n"])
def test_a_connection_without_a_request_ends_silently(data: bytes) -> None:
    with Served(echo, keepalive_timeout=0.05, timeout=0.05) as served:
        assert talk(served.port, data, half_close=False) == b""
        assert statuses(talk(served.port, GET, half_close=False)) == [200]  # and then the server closes the connection


@pytest.mark.parametrize("data", [b"G", b"GET / HTTP/1.1\r\nHost: a\r\n"])
def test_a_slow_head(data: bytes) -> None:
    with Served(echo, timeout=0.05) as served:
        assert statuses(talk(served.port, data, half_close=False)) == [408]


def test_a_head_byte_by_byte_has_one_limit() -> None:
    with Served(echo, timeout=0.2) as served, connect(served.port) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nX: ")
        try:
            while True:  # without a limit this would never end
                sock.sendall(b"a")
                sock.settimeout(0.01)
                try:
                    answer = sock.recv(1000)
                    break
                except TimeoutError:
                    pass
        except ConnectionError:
            answer = b""
        assert answer.startswith(b"HTTP/1.1 408")


def test_a_slow_body() -> None:
    with Served(echo, timeout=0.05) as served:
        request = head("POST", "/", "Content-Length: 10") + b"part"
        assert statuses(talk(served.port, request, half_close=False)) == [408]


def test_a_client_that_takes_nothing() -> None:
    ended = threading.Event()

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        try:
            while True:
                yield b"a" * 65536
        finally:
            ended.set()

    with Served(application, timeout=0.05) as served, Wire(served.port) as wire:
        wire.send(head("GET", "/"))
        assert ended.wait(10)
        wait_until(lambda: served.server.connections == 0)


# ---------------------------------------------------------------- the end


def test_a_graceful_end() -> None:
    gate = Gate()
    with Served(gate) as served, Wire(served.port) as idle, Wire(served.port) as busy, Wire(served.port) as used:
        wait_until(lambda: served.server.connections == 3)
        busy.send(head("GET", "/") * 2)
        wait_until(lambda: gate.waiting == 1)
        used.send(head("GET", "/"))
        wait_until(lambda: gate.waiting == 2)
        served.begin_stop()
        assert idle.is_at_end()
        with pytest.raises(OSError, match="refused"):
            connect(served.port)
        gate.open()
        for wire in (busy, used):
            reply = wire.reply()
            assert (reply.body, reply.fields["connection"]) == (b"through", "close")
            assert wire.is_at_end()
        served.join()


def test_the_grace_has_an_end() -> None:
    gate = Gate()
    with Served(gate, grace_s=0.05) as served, Wire(served.port) as wire:
        wire.send(head("GET", "/"))
        wait_until(lambda: gate.waiting == 1)
        served.begin_stop()
        served.join()
        assert gate.waiting == 0
        assert wire.is_at_end()


def test_a_graceful_end_with_tls(certificates: Certificates) -> None:
    with Served(echo, ssl=certificates.for_server()) as served, Wire(served.port, certificates.for_client()) as wire:
        assert wire.get("/").status == 200
        served.begin_stop()
        assert wire.is_at_end()  # not an error, because the server has ended TLS properly
        served.join()


# ---------------------------------------------------------------- the command line

ASGI = """
async def function(scope, receive, send): ...
class Application:
    async def __call__(self, scope, receive, send): ...
instance = Application()
"""
APPLICATION = """
import socket, threading, time
from grapeshot import coro

released = threading.Event()

def application(environ, start_response):
    path = environ["PATH_INFO"]
    if path == "/wait":
        print("waiting", flush=True)
        released.wait()
    if path == "/release":
        released.set()
    if path == "/boom":
        raise ZeroDivisionError
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"patched" if coro.is_patched("socket") else b"plain"]

def make():
    return application
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "served.py").write_text(APPLICATION, encoding="utf-8")
    (tmp_path / "asgi.py").write_text(ASGI, encoding="utf-8")
    return tmp_path


def start(folder: Path, *arguments: str) -> Process:
    return Process("-W", "error", "-m", "grapeshot.coro.wsgi", *arguments, cwd=folder)


def port_of(process: Process) -> int:
    return int(process.wait_line("Listening on http").rpartition(":")[2])


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_command_line(folder: Path, signum: int) -> None:
    path = os.path.relpath(folder / "s", folder)
    with start(folder, "served", "--port", "0", "--unix", path, "--access-log", "-") as process:
        port = port_of(process)
        process.wait_line("Listening on unix:s")
        with Wire(port) as wire, Wire(port) as waiting:
            assert wire.get("/", 'Referer: a"b', "User-Agent: c").body == b"patched"
            line = process.wait_line("GET / HTTP/1.1")
            assert re.fullmatch(r'127\.0\.0\.1 - - \[[^]]+\] "GET / HTTP/1\.1" 200 7 "a\\"b" "c" \d+\.\d{6}', line), (
                line
            )
            waiting.send(head("GET", "/wait"))
            process.wait_line("waiting")
            process.process.send_signal(signum)
            process.wait_line("Ending")
            assert wire.is_at_end()
            process.process.send_signal(0)  # the process still runs, because a request is under way
            waiting.sock.setblocking(False)
            with pytest.raises(BlockingIOError):
                waiting.sock.recv(1)
        # The client of the request under way has gone, so only that request keeps the server running.
        process.process.send_signal(signum)
        assert process.finish() == -signum
        assert not any("Traceback" in line for line in process.output), process.output


def test_command_line_ends_after_the_last_request(folder: Path) -> None:
    with start(folder, "served:make()", "--bind", f"{HOST}:0") as process, Wire(port_of(process)) as waiting:
        waiting.send(head("GET", "/wait") + head("GET", "/release"))
        process.wait_line("waiting")
        with Wire(port_of(process)) as wire:
            assert wire.get("/boom").status == 500
            process.wait_line("ZeroDivisionError")
        with Wire(port_of(process)) as wire:
            wire.send(head("GET", "/release"))
            process.process.send_signal(signal.SIGTERM)
            assert waiting.reply().body == b"patched"
        assert process.finish() == 0


def test_command_line_opens_a_back_door(folder: Path) -> None:
    folder.chmod(0o700)
    path = folder / "served.bd"
    command = ("-m", "grapeshot.coro.wsgi", "served", "--port", "0")
    with (
        Process(*command, cwd=folder, env={"GRAPESHOT_BACKDOOR": str(path)}) as process,
        Wire(port_of(process)) as wire,
    ):
        assert wire.get("/").body == b"patched"
        wait_until(path.exists, "the back door to open")
        process.process.send_signal(signal.SIGTERM)
        assert process.finish() == 0
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nowhere"], "no module 'nowhere'"),
        (["served:nothing"], "has no 'nothing'"),
        (["served:released"], "cannot be called"),
        (["asgi:function"], "'asgi:function' is async"),
        (["asgi:instance"], "'asgi:instance' is async"),
        (["served", "--bind", "nonsense"], "or fd:N, got 'nonsense'"),
        (["served", "--unix", "/nowhere/s"], "unix:/nowhere/s: [Errno 2] No such file"),
        (["served", "--bind", f"{HOST}:99999"], f"{HOST}:99999: bind(): port must be 0-65535"),
        (["served", "--port", "99999"], "99999: bind(): port must be 0-65535"),
        (["served", "--certfile", "nowhere"], "--certfile nowhere: [Errno 2] No such file"),
        (["served", "--access-log", "nowhere/log"], "nowhere/log'"),
        (["served", "--chdir", "nowhere"], "--chdir: [Errno 2] No such file"),
        (["served", "--limit", "0"], "must be at least 1, got 0"),
    ],
)
def test_command_line_errors(folder: Path, arguments: list[str], text: str) -> None:
    with start(folder, *arguments) as process:
        assert process.finish() == 1
        assert text in process.output[-1]
        assert not any("Traceback" in line for line in process.output)


def test_command_line_shows_where_an_application_fails(folder: Path) -> None:
    (folder / "broken.py").write_text("int('x')", encoding="utf-8")
    with start(folder, "broken") as process:
        assert process.finish() == 1
        assert any("broken.py" in line for line in process.output)
        assert process.output[-1].startswith("ValueError: invalid literal")


def test_without_httptools(folder: Path) -> None:
    (folder / "httptools.py").write_text("raise ImportError", encoding="utf-8")
    with start(folder, "served") as process:
        assert process.finish() == 1
        assert "grapeshot.coro.wsgi needs httptools: pip install 'grapeshot[wsgi]'" in process.output[-1]
