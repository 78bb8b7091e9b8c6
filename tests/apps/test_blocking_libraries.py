"""Unmodified blocking libraries: the same program with threads of plain Python and with coros (`coro.patch()`).

50 calls wait at the same time; with coros, they do so in one thread. Network errors appear as each library's own
exceptions. One process tries several libraries.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support import CAP_S, HOST, coro_is_available, free_port

from tests.apps import blocking_libraries
from tests.apps.certificates import Certificates
from tests.apps.daemons import MariaDBAddress, PostgresAddress
from tests.apps.slow_servers import LINE_SERVERS, SlowServers

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

ROOT = Path(__file__).resolve().parents[2]
COUNT = blocking_libraries.COUNT
PLACES = ("threads", "coros")
# For free-threaded builds there are no wheels of psycopg2, and none of psycopg's implementation in C.
HAS_WHEELS = not sysconfig.get_config_var("Py_GIL_DISABLED")

Job = dict[str, Any]


def run(place: str, jobs: list[Job]) -> dict[str, Any]:
    """Return what the program has seen in each job; the keys are the jobs' names."""
    command = [sys.executable, "-m", "tests.apps.blocking_program", place, json.dumps(jobs)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=6 * CAP_S, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


def overlap(library: str, way: str = "", **arguments: Any) -> Job:
    return {"name": f"{library} {way}".rstrip(), "library": library, "arguments": arguments}


def check_overlap(place: str, jobs: list[Job]) -> None:
    """Check that some calls overlap. How many overlap depends on the machine's speed, but if each call blocked the
    loop, none would.
    """
    for name, seen in run(place, jobs).items():
        assert not seen["wrong"], f"{name}: {len(seen['wrong'])} of {COUNT} are wrong\n{seen['wrong'][0]}"
        assert seen["most"] > 1, name
        if place == "coros":
            # If every call blocked the loop, the loop would run only a few iterations per call.
            assert seen["ticks"] > 20 * COUNT, name


@pytest.fixture
def slow() -> Iterator[SlowServers]:
    with SlowServers(COUNT) as servers:
        yield servers


on_both = pytest.mark.parametrize("place", PLACES)

# ---------------------------------------------------------------- servers that answer late

OF_HTTP = ("requests", "http.client", "botocore")
OF_LINES = {"smtplib": "smtp", "poplib": "pop3", "imaplib": "imap", "ftplib": "ftp"}
WITH_OWN_SERVER = ("xmlrpc", "flask", "thrift")


@on_both
def test_50_calls_over_http_wait_at_once(place: str, slow: SlowServers) -> None:
    check_overlap(place, [overlap(name, port=slow.http()) for name in OF_HTTP])
    assert [crowd.most for crowd in slow.crowds] == [COUNT] * len(OF_HTTP)
    assert len(slow.signed) == COUNT  # by botocore


@on_both
def test_50_calls_over_mail_and_ftp_wait_at_once(place: str, slow: SlowServers) -> None:
    check_overlap(place, [overlap(name, port=slow.lines(*LINE_SERVERS[of]())) for name, of in OF_LINES.items()])
    assert [crowd.most for crowd in slow.crowds] == [COUNT] * len(OF_LINES)


@on_both
def test_50_calls_to_memcached_wait_at_once(place: str, slow: SlowServers, memcached_server: int) -> None:
    check_overlap(place, [overlap("pymemcache", port=slow.proxy(memcached_server))])
    assert [crowd.most for crowd in slow.crowds] == [COUNT]


@on_both
def test_50_calls_to_a_server_in_the_same_process_wait_at_once(place: str) -> None:
    check_overlap(place, [overlap(name) for name in WITH_OWN_SERVER])


# ---------------------------------------------------------------- databases that sleep


@on_both
def test_50_calls_to_mariadb_wait_at_once(
    place: str, mariadb_server: MariaDBAddress, certificates: Certificates
) -> None:
    tcp = {"host": "localhost", "port": mariadb_server.port}
    ways: dict[str, dict[str, Any]] = {
        "tcp": {**tcp, "ssl_disabled": True},
        "tls": {**tcp, "ssl_ca": str(certificates.authority_file), "ssl_verify_identity": True},
        "unix": {"unix_socket": mariadb_server.path, "ssl_disabled": True},
    }
    jobs = [overlap("pymysql", way, **options) for way, options in ways.items()]
    check_overlap(place, jobs)


@on_both
def test_50_calls_to_postgresql_wait_at_once(place: str, postgres_server: PostgresAddress) -> None:
    login = {"user": postgres_server.user, "password": postgres_server.password, "dbname": postgres_server.database}
    tcp = {"host": HOST, "port": postgres_server.port, **login}
    jobs = [
        overlap("psycopg", "tls", **tcp, sslmode="require"),
        overlap("psycopg", "unix", **{**tcp, "host": postgres_server.folder}),
        overlap("django", **tcp),
    ]
    if HAS_WHEELS:
        jobs.append(overlap("psycopg2", **tcp, sslmode="disable"))
    check_overlap(place, jobs)


@pytest.mark.parametrize("first", ["import psycopg", "from grapeshot import coro; coro.patch()"])
@pytest.mark.parametrize(("chosen", "expected"), [(None, "wait_poll"), ("wait_c" if HAS_WHEELS else "wait_epoll",) * 2])
def test_psycopg_waits_in_python_unless_its_user_chose_otherwise(first: str, chosen: str, expected: str) -> None:
    code = f"""{first}
import psycopg.waiting
from grapeshot import coro
coro.patch()
print(psycopg.pq.__impl__, psycopg.waiting.wait is psycopg.waiting.{expected})"""
    environment = dict(os.environ) if chosen is None else {**os.environ, "PSYCOPG_WAIT_FUNC": chosen}
    command = [sys.executable, "-W", "ignore::grapeshot.coro.PatchWarning", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CAP_S, env=environment, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["binary" if HAS_WHEELS else "python", "True"]), done.stderr


# ---------------------------------------------------------------- trouble

# The exceptions that a library raises if the server refuses the connection, resets it, or stays silent.
ERRORS: dict[str, tuple[str, ...]] = {
    "requests": (
        "requests.exceptions.ConnectionError",
        "requests.exceptions.ConnectionError",
        "requests.exceptions.ReadTimeout",
    ),
    "http.client": ("urllib.error.URLError", "builtins.ConnectionResetError", "builtins.TimeoutError"),
    "botocore": (
        "botocore.exceptions.EndpointConnectionError",
        "botocore.exceptions.ConnectionClosedError",
        "botocore.exceptions.ReadTimeoutError",
    ),
    "pymysql": ("pymysql.err.OperationalError",) * 3,
    "psycopg": ("psycopg.OperationalError", "psycopg.OperationalError", "psycopg.errors.ConnectionTimeout"),
    "psycopg2": ("psycopg2.OperationalError",) * 2,  # no silent server: with a wait callback psycopg2 has no time limit
    "pymemcache": ("builtins.ConnectionRefusedError", "builtins.ConnectionResetError", "builtins.TimeoutError"),
    "smtplib": ("builtins.ConnectionRefusedError",) + ("smtplib.SMTPServerDisconnected",) * 2,
    "poplib": ("builtins.ConnectionRefusedError", "builtins.ConnectionResetError", "builtins.TimeoutError"),
    "imaplib": (
        "builtins.ConnectionRefusedError",
        "imaplib.IMAP4.abort" if sys.version_info >= (3, 14) else "builtins.ConnectionResetError",
        "builtins.TimeoutError",
    ),
    "ftplib": ("builtins.ConnectionRefusedError", "builtins.ConnectionResetError", "builtins.TimeoutError"),
    "xmlrpc": ("builtins.ConnectionRefusedError", "builtins.ConnectionResetError", "builtins.TimeoutError"),
    "thrift": ("thrift.transport.TTransport.TTransportException",) * 3,
}


def check_troubles(names: list[str], greetings: dict[str, bytes], slow: SlowServers) -> None:
    jobs: list[Job] = []
    for name in names:
        ports = {"refused": free_port(), "reset": slow.resetting(greetings.get(name, b"")), "silent": slow.silent()}
        if len(ERRORS[name]) == 2:
            del ports["silent"]
        jobs.append({"name": name, "library": name, "troubles": ports})
    with ThreadPoolExecutor() as pool:  # the calls mostly wait for their time limits
        plain, patched = pool.map(run, ("threads", "coros"), (jobs, jobs))
    assert {name: tuple(types[0] for types in seen.values()) for name, seen in plain.items()} == {
        name: ERRORS[name] for name in names
    }
    for seen in patched.values():
        del seen["ticks"], seen["longest_s"]
    assert patched == plain


def test_network_errors_raise_the_exceptions_of_the_library(slow: SlowServers) -> None:
    greetings = {name: LINE_SERVERS[of]()[0] for name, of in OF_LINES.items()}
    check_troubles(
        [name for name in ERRORS if name != "pymysql" and (HAS_WHEELS or name != "psycopg2")], greetings, slow
    )


def test_network_errors_raise_the_exceptions_of_pymysql(slow: SlowServers, mariadb_server: MariaDBAddress) -> None:
    with socket.create_connection((HOST, mariadb_server.port), CAP_S) as client:
        check_troubles(["pymysql"], {"pymysql": client.recv(1000)}, slow)
