"""The programs of examples/ run, serve, and stop cleanly on request; some also run on asyncio's loop.

service.py is tested in test_example_service.py; tokio_bridge and the program that needs Redis are tested in tests/apps.
"""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support import coro_is_available

ROOT = Path(__file__).resolve().parents[2]
CAP_S = 20.0

on_both_loops = pytest.mark.parametrize("loop_name", ["asyncio", "grapeshot"])


@pytest.fixture(autouse=True)
def no_latency_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, the warnings would be in the output of the examples."""
    monkeypatch.setenv("GRAPESHOT_LATENCY_WARNING", "0")


needs_coros = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")


@contextmanager
def running(example: str, loop_name: str, *, stop: signal.Signals = signal.SIGTERM) -> Iterator[int]:
    """Like `running_with`, with the example on the named kind of loop."""
    with running_with(example, "--loop", loop_name, stop=stop) as port:
        yield port


@contextmanager
def running_with(example: str, *arguments: str, stop: signal.Signals = signal.SIGTERM) -> Iterator[int]:
    """Starts the example and yields its port. Afterwards stops it and checks its exit status and its output."""
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / example), "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        first = process.stdout.readline()
        match = re.fullmatch(r"listening on 127\.0\.0\.1:(\d+)\n", first)
        assert match, f"{example} began with {first!r}\n{process.communicate(timeout=CAP_S)[1] if not first else ''}"
        yield int(match[1])
        process.send_signal(stop)
        out, err = process.communicate(timeout=CAP_S)
        assert (process.returncode, out, err) == (0, "stopped\n", "")
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def exchange(client: socket.socket, data: bytes) -> bytes:
    """Sends `data`, and receives the same number of bytes, or fewer if the peer closes the connection."""
    client.sendall(data)
    received = bytearray()
    while len(received) < len(data) and (piece := client.recv(65536)):
        received += piece
    return bytes(received)


@on_both_loops
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_echo_server(loop_name, stop):
    with running("echo_server.py", loop_name, stop=stop) as port:
        with socket.create_connection(("127.0.0.1", port), CAP_S) as first:
            with socket.create_connection(("127.0.0.1", port), CAP_S) as second:
                assert exchange(second, b"second") == b"second"
                assert exchange(first, b"first") == b"first"
            large = bytes(range(256)) * 256
            assert exchange(first, large) == large


def test_echo_server_closes_its_clients_when_it_stops():
    with ExitStack() as afterwards:
        with running("echo_server.py", "grapeshot") as port:
            client = afterwards.enter_context(socket.create_connection(("127.0.0.1", port), CAP_S))
            assert exchange(client, b"hello") == b"hello"
        assert client.recv(1) == b""


@on_both_loops
def test_aiohttp_hello(loop_name):
    with running("aiohttp_hello.py", loop_name) as port:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=CAP_S)
        try:
            for name in ("you", "them"):  # over one connection
                client.request("GET", f"/hello/{name}")
                assert client.getresponse().read() == f"Hello, {name}!\n".encode()
            client.request("POST", "/json", json.dumps({"a": [1, 2]}), {"Content-Type": "application/json"})
            assert json.loads(client.getresponse().read()) == {"received": {"a": [1, 2]}}
            client.request("GET", "/count/1000")
            assert client.getresponse().read().split() == [b"%d" % number for number in range(1000)]
            client.request("GET", "/nowhere")
            assert client.getresponse().status == 404
        finally:
            client.close()


@needs_coros
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_chat_server(stop):
    with ExitStack() as afterwards:

        def enter(name):
            client = afterwards.enter_context(socket.create_connection(("127.0.0.1", port), CAP_S))
            lines = afterwards.enter_context(client.makefile("rw"))
            assert lines.readline() == "What is your name?\n"
            print(name, file=lines, flush=True)
            return client, lines

        with running_with("chat_server.py", stop=stop) as port:
            _, ann = enter("Ann")
            bob_client, bob = enter("Bob")
            assert ann.readline() == "* Bob is here\n"
            print("hello, Ann", file=bob, flush=True)
            assert ann.readline() == "Bob: hello, Ann\n"
            print("hello, Bob", file=ann, flush=True)
            assert bob.readline() == "Ann: hello, Bob\n"
            bob_client.shutdown(socket.SHUT_RDWR)
            assert ann.readline() == "* Bob has left\n"
        assert ann.readline() == ""


@needs_coros
def test_crawler():
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / "crawler.py"), "--demo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CAP_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    missing, summary = done.stdout.splitlines()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/100: 404", missing)
    assert re.fullmatch(r"102 pages in \d+\.\d s", summary)


def test_prometheus_metrics():
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    command = [sys.executable, "-W", "error", str(ROOT / "examples" / "prometheus_metrics.py")]
    process = subprocess.Popen(
        [*command, "--port", "0", "--metrics-port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        ports = [int(process.stdout.readline().rpartition(":")[2]) for _ in range(2)]
        with socket.create_connection(("127.0.0.1", ports[0]), CAP_S) as client:
            for _ in range(5):
                assert exchange(client, b"12345678") == b"12345678"
            connection = http.client.HTTPConnection("127.0.0.1", ports[1], timeout=CAP_S)
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
            connection.close()
        samples = {
            (sample.name, sample.labels.get("le")): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        assert samples["grapeshot_writes_total", None] == 5
        assert samples["grapeshot_bytes_written_total", None] == 40
        assert samples["grapeshot_connections_accepted_total", None] == 1
        assert samples["grapeshot_running_seconds_total", None] > 0
        assert samples["grapeshot_timers", None] == 0
        count = samples["grapeshot_callback_durations_seconds_count", None]
        assert count == samples["grapeshot_callback_durations_seconds_bucket", "+Inf"] >= 6
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=CAP_S) == ("stopped\n", "")
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
