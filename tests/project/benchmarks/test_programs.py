"""The harness that runs gevent, eventlet, FastAPI, Django and Celery programs: each program answers in each style."""

from __future__ import annotations

import importlib.util
import json

import pytest
from project.benchmarks.samples import MESSAGE, connect, receive

from benchmarks import daemons, digest, tables
from benchmarks._load import PROGRAMS, Child, server_command
from benchmarks.measure import own_sample
from benchmarks.programs import servers, styles
from benchmarks.programs.__main__ import SUITE

pytest.importorskip("grapeshot.coro", reason="no coros on this interpreter", exc_type=ImportError)


def need(*modules):
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")


def need_redis():
    if not daemons.is_there("redis"):
        pytest.skip("redis-server is not installed")


def get(connection):
    """Return the answer to a request for `/`."""
    connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    data = b""
    while not data.endswith(servers.HELLO):
        data += connection.recv(1000)
    return data


@pytest.mark.parametrize("style", styles.GEVENT_LOOPS)
def test_gevents_servers_answer(style):
    need("gevent")
    with Child(server_command("gevent-echo", style), None) as running, connect(running.ready["address"]) as connection:
        connection.sendall(MESSAGE)
        assert receive(connection, len(MESSAGE)) == MESSAGE
    with Child(server_command("gevent-pywsgi", style), None) as running:
        with connect(running.ready["address"]) as connection:
            assert get(connection).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("style", styles.EVENTLET_HUBS)
def test_eventlets_server_answers(style):
    need("eventlet", "uvloop")
    command = server_command("eventlet-echo", style)
    with Child(command, None) as running, connect(running.ready["address"]) as connection:
        connection.sendall(MESSAGE)
        assert receive(connection, len(MESSAGE)) == MESSAGE


@pytest.mark.parametrize("style", servers.KINDS["fastapi"])
def test_the_application_says_hello(style):
    need("fastapi", "redis", "uvloop")
    need_redis()
    with daemons.redis_server() as address:
        command = server_command("fastapi", style, {"redis": address})
        with Child(command, None) as running, connect(running.ready["address"]) as connection:
            assert get(connection).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("style", servers.KINDS["django"])
def test_the_project_says_hello(style):
    need("django", "psycopg", "uvicorn", "uvloop")
    if not daemons.is_there("asyncpg"):
        pytest.skip("PostgreSQL is not installed")
    with daemons.postgres_server() as folder:
        command = server_command("django", style, {"postgres": folder})
        with Child(command, None) as running, connect(running.ready["address"]) as connection:
            assert get(connection).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("style", [styles.OURS, styles.THREAD_POOL])
def test_a_worker_does_its_tasks(style):
    need("celery", "redis")
    need_redis()
    sample = own_sample("programs.worker", styles.POOLS[style], style, "--tasks", "300", is_pinned=False)
    assert sample["tasks"] == 300
    assert min(sample["cpu_us"], sample["wall_us"]) > 0


def test_every_case_has_a_program_for_each_of_its_participants():
    assert set(PROGRAMS) == set(servers.KINDS)
    assert set(styles._NEEDED) == set(styles.ALL)
    for case in SUITE.cases:
        assert case.only[0] == styles.OURS
        assert set(case.only) <= set(styles.ALL)
        assert {bound.peer for bound in case.bounds} <= set(case.only[1:])


def test_the_committed_table_shows_the_committed_numbers():
    committed = json.loads(SUITE.committed.read_text(encoding="utf-8"))
    assert tables.markdown(committed) + "\n" == SUITE.committed.with_suffix(".md").read_text(encoding="utf-8")
    names = [name for case in SUITE.cases for name in (case.name, digest.wall_name(case.name) if case.wall else None)]
    assert [case["name"] for case in committed["cases"]] == [name for name in names if name is not None]
