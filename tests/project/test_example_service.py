"""Attacks on examples/service.py: slow or silent clients, garbage, too many clients, another user at the back door.

If the service still runs after an attack, it must have the same descriptors as before. Other tests in this file check
the service's answers, its profiles, and how it shuts down.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from insight.callers import NOBODY, call, connected_as_nobody, needs_root, output_of
from support import wait_until

ROOT = Path(__file__).resolve().parents[2]
CAP_S = 20.0


class Running:
    """The service as a process of its own."""

    def __init__(self, folder: Path, **options: float) -> None:
        folder.chmod(0o700)
        self.backdoor = folder / "service.bd"
        arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        command = [sys.executable, "-W", "error", str(ROOT / "examples" / "service.py"), "--port", "0", *arguments]
        self.process = subprocess.Popen(
            [*command, "--backdoor", str(self.backdoor)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        first = self.process.stdout.readline()
        match = re.fullmatch(r"listening on 127\.0\.0\.1:(\d+)\n", first)
        assert match, first or self.process.communicate(timeout=CAP_S)[1]
        self.port = int(match[1])
        # The first request may open descriptors that stay open, so the descriptors are counted after this request.
        self.get("/hello/first")
        self.fds = self.count_fds()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), CAP_S)

    def get(self, path: str) -> bytes:
        with self.connect() as client:
            client.sendall(f"GET {path} HTTP/1.1\r\nConnection: close\r\n\r\n".encode())
            return rest_of(client)

    def metric(self, name: str) -> float:
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.get("/metrics").decode(), re.MULTILINE)
        assert found, name
        return float(found[1])

    def count_fds(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd")) if os.path.exists("/proc/self/fd") else 0

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        assert self.process.communicate(timeout=CAP_S) == ("stopped\n", "")
        assert self.process.returncode == 0


def rest_of(client: socket.socket) -> bytes:
    """Return everything that arrives until the service closes the connection."""
    received = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(65536):
            received += piece
    return bytes(received)


@pytest.fixture
def start(tmp_path):
    """A function that starts the service. If the service still runs after the test, it must have closed all
    descriptors that it opened for the test, and must stop without an error.
    """
    started = []

    def begin(**options):
        started.append(Running(tmp_path, **options))
        return started[-1]

    yield begin
    for service in started:
        try:
            if service.process.poll() is None:
                wait_until(lambda service=service: service.count_fds() == service.fds, "the descriptors to be closed")
                service.end()
        finally:
            service.process.kill()
            service.process.communicate()


def test_the_service_answers(start):
    service = start()
    with service.connect() as client:
        client.sendall(
            b"GET /hello/you HTTP/1.1\r\n\r\nGET /hello/them HTTP/1.1\r\nContent-Length: 3\r\n\r\nabcGET /nowhere"
        )
        client.sendall(b" HTTP/1.0\r\n\r\n")
        got = rest_of(client)
    assert re.findall(rb"HTTP/1.1 (\d+)", got) == [b"200", b"200", b"404"]
    assert b"Hello, you!\n" in got
    assert b"Hello, them!\n" in got
    assert service.metric('service_answers_total{status="404"}') == 1
    assert service.metric("service_connections") == 1, "the connection of this request"
    assert service.metric("grapeshot_connections_accepted_total") >= 4


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (bytes(range(128, 256)) + b"\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET hello HTTP/1.1\r\n\r\n", 400),
        (b"DELETE /hello/you HTTP/1.1\r\n\r\n", 405),
        (b"GET / HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n", 413),
        (b"GET / HTTP/1.1\r\nContent-Length: \xb2\r\n\r\n", 413),
        (b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 413),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 40_000, 431),
    ],
    ids=["bytes", "TLS", "no path", "method", "long body", "wrong length", "chunked", "long head"],
)
def test_garbage_is_refused(start, data, status):
    service = start()
    with service.connect() as client:
        client.sendall(data)
        assert rest_of(client).startswith(b"HTTP/1.1 %d " % status)
    assert b"Hello, you!" in service.get("/hello/you")


def test_slow_and_silent_clients_do_not_hold_up_the_service(start):
    service = start(request_timeout=0.3, idle_timeout=0.3)
    with service.connect() as slow, service.connect():
        slow.sendall(b"GET /hello")
        assert b"Hello, you!" in service.get("/hello/you"), "while one client is slow and another is silent"
        assert rest_of(slow).startswith(b"HTTP/1.1 408 ")
    with service.connect() as silent:
        assert rest_of(silent) == b""


def test_a_client_that_does_not_read_loses_its_connection(start):
    service = start(send_timeout=0.3)
    with service.connect() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(b"GET /large HTTP/1.1\r\n\r\n")
        wait_until(lambda: service.metric("grapeshot_bytes_written_total") > 100_000, "the answer to be under way")
        wait_until(lambda: service.metric("service_connections") == 1, "the end of the connection")


def test_a_client_that_has_ended_its_side_gets_its_answer(start):
    service = start()
    with service.connect() as client:
        client.sendall(b"GET /wait/0.1 HTTP/1.1\r\n\r\n")
        client.shutdown(socket.SHUT_WR)
        assert rest_of(client).endswith(b"done\n")


def test_more_clients_than_the_limit_wait_for_a_place(start):
    service = start(limit=5)
    clients = [service.connect() for _ in range(7)]
    try:
        for client in clients:
            client.sendall(b"GET /hello/you HTTP/1.1\r\n\r\n")
        for client in clients[:5]:
            assert client.recv(1000).startswith(b"HTTP/1.1 200 ")
        clients[5].settimeout(0.1)
        with pytest.raises(TimeoutError):
            clients[5].recv(1)
        for client in clients[:2]:
            client.close()
        for client in clients[5:]:
            client.settimeout(CAP_S)
            assert client.recv(1000).startswith(b"HTTP/1.1 200 ")
    finally:
        for client in clients:
            client.close()
    wait_until(lambda: service.count_fds() == service.fds, "the descriptors to be closed")
    service.process.send_signal(signal.SIGTERM)
    out, err = service.process.communicate(timeout=CAP_S)
    assert out == "stopped\n"
    assert len(err.splitlines()) == 1
    assert "has paused accepting: 5 connections of this loop are open" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_requests_under_way_finish_at_the_end(start, number):
    service = start()
    with service.connect() as busy, service.connect() as idle:
        busy.sendall(b"GET /wait/1.5 HTTP/1.1\r\n\r\n")
        wait_until(lambda: service.metric("service_connections") == 3, "the request to be under way")
        service.process.send_signal(number)
        assert rest_of(idle) == b"", "the idle connection must be closed"
        with pytest.raises(ConnectionRefusedError):
            service.connect()
        got = rest_of(busy)
        assert got.endswith(b"done\n")
        assert b"Connection: close" in got
    assert service.process.communicate(timeout=CAP_S) == ("stopped\n", "")


def test_the_deadline_ends_longer_requests(start):
    service = start(deadline=0.2)
    with service.connect() as busy:
        busy.sendall(b"GET /wait/50 HTTP/1.1\r\n\r\n")
        wait_until(lambda: service.metric("service_connections") == 2, "the request to be under way")
        service.end()
        assert rest_of(busy) == b""


def test_the_back_door_looks_inside(start, tmp_path):
    service = start()

    async def talk():
        with await call(service.backdoor) as caller:
            assert await caller.ask("service.answers[200] >= 1") == "True\n"
            assert "Task-1" in await caller.ask("tasks()")
            assert "Limits: connections 1000" in await caller.ask("accounting()")

    asyncio.run(talk())


def test_the_service_can_be_profiled_while_it_serves(start, tmp_path):
    service = start()
    saved = tmp_path / "service.profile"

    async def talk():
        with await call(service.backdoor) as caller:
            await caller.send(f"await profile(1.0, {os.fspath(saved)!r})\n".encode())
            for _ in range(50):
                await asyncio.to_thread(service.get, "/metrics")
            return await caller.read_until(">>> ")

    assert "Service.metrics" in asyncio.run(talk())
    shown = subprocess.run(
        [sys.executable, "-m", "grapeshot", "profile", "show", str(saved)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Service.metrics" in shown.stdout


@needs_root
def test_another_user_is_refused_at_the_back_door(start, tmp_path):
    service = start()
    for folder in (tmp_path, *list(tmp_path.parents)[:-1]):
        if not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)
    service.backdoor.chmod(0o666)

    async def talk():
        return await output_of(*await connected_as_nobody(service.backdoor))

    assert asyncio.run(talk()) == b"got "
    assert b"Hello, you!" in service.get("/hello/you")
    service.process.terminate()
    assert f"a client of the user {NOBODY} was refused" in service.process.communicate(timeout=CAP_S)[1]
