"""The harness that compares blocking-style servers: the servers of all installed libraries answer."""

from __future__ import annotations

import importlib.util
import os
import select
import subprocess
import sys
import time

import pytest
from project.benchmarks.samples import CAP_S, MESSAGE, connect, receive

from benchmarks._load import BLOCKING, WEB, Child, server_command
from benchmarks._loops import RAW
from benchmarks.blocking import clients, styles, web
from benchmarks.blocking.__main__ import SUITE
from benchmarks.blocking.cases import OTHERS
from benchmarks.blocking.styles import GEVENT, OURS
from benchmarks.measure import own_sample
from benchmarks.servers import KINDS

pytest.importorskip("grapeshot.coro", reason="no coros on this interpreter", exc_type=ImportError)


def where_installed(name, *others):
    reason = f"{name} is not installed"
    return pytest.param(*others, name, marks=pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=reason))


SERVERS = [where_installed(name, kind) for kind, made in styles.STYLES.items() for name in made]


def unsupported(kind, style):
    """Return whether the server says that the style does not support this kind."""
    command = server_command(kind, style)
    said = subprocess.run(command, input="", capture_output=True, text=True, timeout=CAP_S, check=True).stdout
    return "unsupported" in said


@pytest.mark.parametrize(("kind", "style"), SERVERS)
def test_the_server_echoes_on_many_connections(kind, style):
    if kind == "patched" and unsupported(kind, style):
        pytest.skip("this style does not patch sockets")
    with Child(server_command(kind, style, {"read_len": 1000}), None) as running:
        connections = [connect(running.ready["address"]) for _ in range(5)]
        try:
            for _ in range(2):
                for connection in connections:
                    connection.sendall(MESSAGE)
                for connection in reversed(connections):
                    assert receive(connection, len(MESSAGE)) == MESSAGE
        finally:
            for connection in connections:
                connection.close()


@pytest.mark.parametrize("style", [where_installed(name) for name in styles.STYLES["blocking"]])
def test_a_light_request_need_not_wait_for_a_burning_one(style):
    burn_ms = 1500
    with Child(server_command("blocking", style, {"read_len": 4096, "burn_ms": burn_ms}), None) as running:
        with connect(running.ready["address"]) as burning, connect(running.ready["address"]) as light:
            began = time.monotonic()
            burning.sendall(b"burning!")
            light.sendall(b"light...")
            assert receive(light, 8) == b"light..."
            assert select.select([burning], [], [], 0)[0] == []
            assert receive(burning, 8) == b"burning!"
            # Burning this much CPU time takes at least as much real time.
            assert time.monotonic() - began >= burn_ms / 1e3


@pytest.mark.parametrize("kind", WEB)
@pytest.mark.parametrize("style", web.WORKERS)
def test_the_web_server_says_hello(kind, style):
    for module in {"wsgi": ["httptools"], "gunicorn": ["gunicorn"]}[kind] + [style]:
        pytest.importorskip(module)
    with Child(server_command(kind, style), None) as running:
        os.kill(running.ready["pid"], 0)
        with connect(running.ready["address"]) as connection:
            for _ in range(3):
                connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
                data = b""
                while not data.endswith(b"Hello, world!"):
                    data += connection.recv(1000)
                assert data.startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize(
    ("library", "style"), [*((library, OURS) for library in clients.LIBRARIES), ("pymysql", GEVENT)]
)
def test_a_client_calls_in_each_style(library, style):
    for needed in (library, style):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    sample = own_sample("blocking.clients", library, style, "--style", style, "--seconds", "0.001")
    assert sample["rounds"] >= 3
    assert sample["cpu_ns"] > 0


def test_every_case_has_a_server_for_each_of_its_participants():
    for case in SUITE.cases:
        assert case.only[0] == styles.OURS
        for who in case.only:
            assert who in styles.STYLES["blocking"] or who in OTHERS, (case.name, who)
        assert {bound.peer for bound in case.bounds} <= {None, *case.only}
    assert set(BLOCKING) == set(styles.STYLES)
    assert set(WEB) == set(web.KINDS)
    assert {kind for kind, loop in OTHERS.values() if loop != RAW} <= set(KINDS)


def test_a_peer_that_is_not_installed_is_left_out_loudly(capsys, monkeypatch):
    monkeypatch.setattr(styles, "why_missing", lambda name: "no module" if name == "runloom" else None)
    assert styles.available(["grapeshot", "runloom"]) == (["grapeshot"], {"runloom": "no module"})
    assert "runloom IS LEFT OUT: no module" in capsys.readouterr().err


def test_a_missing_module_is_named():
    assert styles.why_missing(styles.TASKS) is None
    assert "no_such_module" in styles.why_missing("no_such_module")
    assert styles.why_missing(RAW) is None or sys.platform != "linux"
