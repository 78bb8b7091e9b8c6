"""gunicorn with `-k grapeshot.coro.gunicorn.Worker`, in real processes. The control is the worker gthread."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import coro_is_available, wait_until

from tests.apps.certificates import Certificates
from tests.apps.processes import Process
from tests.apps.wire import HOST, Wire, chunk, head
from tests.apps.wsgi.servers import connect, only, statuses, talk

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

OURS = ["-k", "grapeshot.coro.gunicorn.Worker"]
THREADS = ["-k", "gthread", "--threads", "30"]
KINDS = {"coros": OURS, "threads": THREADS}

APPLICATION = """
import asyncio, json, os, sys, threading, time
from pathlib import Path
from time import sleep

import flask

app = flask.Flask(__name__)
together = threading.Condition()
count = 0
TEXT = {"Content-Type": "text/plain"}


@app.route("/")
def index():
    return VERSION

@app.route("/pid")
def pid():
    return str(os.getpid())

@app.route("/together/<int:wanted>")
def meet(wanted):
    "Answer when `wanted` requests wait at once."
    global count
    with together:
        count += 1
        together.notify_all()
        together.wait_for(lambda: count >= wanted)
    return "met"

@app.route("/until/<name>")
def until(name):
    print("waiting for", name, "in", os.getpid(), flush=True)
    while not Path(name).exists():
        sleep(0.005)
    return "there"

@app.route("/echo", methods=["POST"])
def echo():
    return flask.request.stream.read()

@app.route("/stream/<name>")
def stream(name):
    def parts():
        yield "first"
        while not Path(name).exists():
            time.sleep(0.005)
        yield "second"
    return flask.Response(parts(), headers=TEXT)

@app.route("/file")
def file():
    return flask.send_file(__file__, mimetype="text/plain")

@app.route("/nothing")
def nothing():
    return "", 304

@app.route("/hints")
def hints():
    flask.request.environ["wsgi.early_hints"]([("Link", "</style>; rel=preload")])
    sleep(0.01)
    return "hinted"

@app.route("/boom")
def boom():
    raise ZeroDivisionError

@app.route("/exit")
def leave():
    sys.exit(3)

@app.route("/hang/unless/<int:pid>")
def hang(pid):
    if os.getpid() == pid:
        return "not here"
    print("hanging in", os.getpid(), flush=True)
    while True:
        pass

@app.route("/asyncio")
def with_asyncio():
    try:
        asyncio.get_running_loop()
    except RuntimeError as error:
        seen = str(error)
    return f"{seen}; {asyncio.run(asyncio.sleep(0, 'ran'))}"
"""


class Gunicorn(Process):
    """gunicorn, listening on a port and on a unix socket, with the application of this file."""

    def __init__(self, folder: Path, kind: str, *options: str, config: str = "", workers: int = 1) -> None:
        (folder / "served.py").write_text(f"VERSION = 'one'\n{APPLICATION}", encoding="utf-8")
        (folder / "gunicorn.conf.py").write_text(textwrap.dedent(config), encoding="utf-8")
        self.folder, self.path = folder, str(folder / "s")
        arguments = ["--bind", f"{HOST}:0", "--bind", f"unix:{self.path}", "--no-control-socket", *KINDS[kind]]
        super().__init__(
            "-m",
            "gunicorn",
            *arguments,
            *options,
            "served:app",
            cwd=folder,
            env={"PYTHONWARNINGS": "error::UserWarning"},
        )
        try:
            self.wait_line("Booting worker", count=workers)
            self.port = int(self.wait_line("Listening at").partition(f"{HOST}:")[2].partition(",")[0].partition(" ")[0])
        except BaseException:
            self.close()
            raise

    def worker(self) -> int:
        return int(only(talk(self.port, request("/pid")))[2])

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def has(self, *texts: str) -> bool:
        return any(all(text in line for text in texts) for line in self.output)

    def make(self, name: str) -> None:
        (self.folder / name).touch()


def request(path: str, method: str = "GET") -> bytes:
    return head(method, path, "Connection: close")


Start = Callable[..., Gunicorn]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A function that starts servers. They end with the test."""
    started: list[Gunicorn] = []

    def begin(kind: str, *options: str, **more: Any) -> Gunicorn:
        started.append(Gunicorn(tmp_path, kind, *options, **more))
        return started[-1]

    yield begin
    for each in started:
        each.close()


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gunicorn]:
    """A server for the tests that only send requests."""
    with Gunicorn(tmp_path_factory.mktemp("g"), request.param, "--keep-alive", "20") as started:
        yield started


# ---------------------------------------------------------------- requests


def test_requests_on_one_connection(served: Gunicorn) -> None:
    with Wire(served.port) as wire:
        assert [wire.get("/").text for _ in range(3)] == ["one"] * 3
        wire.send(head("POST", "/echo", "Content-Length: 4") + b"body")
        assert wire.reply().text == "body"
        wire.send(head("POST", "/echo", "Transfer-Encoding: chunked") + chunk(b"one") + chunk(b"two") + chunk(b""))
        assert wire.reply().text == "onetwo"
        wire.send(head("POST", "/echo", "Content-Length: 4", "Expect: 100-continue"))
        assert wire.reply_head()[0] == 100
        wire.send(b"body")
        assert wire.reply().text == "body"
    assert only(talk(served.path, request("/")))[2] == b"one"


def test_requests_wait_beside_each_other(served: Gunicorn) -> None:
    wires = [Wire(served.port) for _ in range(20)]
    for wire in wires:
        wire.send(head("GET", "/together/20"))
    assert [wire.reply().text for wire in wires] == ["met"] * 20
    for wire in wires:
        wire.close()


def test_parts_leave_when_they_are_made(served: Gunicorn) -> None:
    with Wire(served.port) as wire:
        wire.send(head("GET", "/stream/go-on"))
        assert wire.reply_head()[1]["transfer-encoding"] == "chunked"
        assert (wire.line(), wire.line()) == (b"5", b"first")
        served.make("go-on")
        assert [wire.line() for _ in range(4)] == [b"6", b"second", b"0", b""]
        assert wire.get("/").text == "one"


def test_answers_without_body_files_and_hints(served: Gunicorn) -> None:
    with Wire(served.port) as wire:
        wire.send(head("GET", "/nothing"))
        assert wire.reply_head()[0] == 304
        wire.send(head("HEAD", "/"))
        assert wire.reply_head()[1]["content-length"] == "3"
        assert wire.get("/file").body == (served.folder / "served.py").read_bytes()
        wire.send(head("GET", "/hints"))
        assert wire.reply_head() == (103, {"link": "</style>; rel=preload"})
        assert wire.reply().text == "hinted"


def test_errors_of_the_application(served: Gunicorn) -> None:
    assert statuses(talk(served.port, request("/boom"))) == [500]
    served.wait_line("ZeroDivisionError")
    assert only(talk(served.port, request("/")))[2] == b"one"


def test_a_bad_request(served: Gunicorn) -> None:
    assert talk(served.port, b"GET / HTTP/1.1\r\nHost : a\r\n\r\n").startswith(b"HTTP/1.1 400 ")


def test_no_running_loop_is_seen(served: Gunicorn) -> None:
    assert only(talk(served.port, request("/asyncio")))[2] == b"no running event loop; ran"


@pytest.mark.parametrize("kind", KINDS)
def test_tls(start: Start, kind: str, certificates: Certificates) -> None:
    files = ["--certfile", str(certificates.chain_file), "--keyfile", str(certificates.key_file)]
    server = start(kind, *files, "--keep-alive", "20")
    with Wire(server.port, certificates.for_client()) as wire:
        assert [wire.get("/").text, wire.get("/").text] == ["one", "one"]
        wire.send(head("POST", "/echo", "Content-Length: 300000") + b"a" * 300_000)
        assert wire.reply().body == b"a" * 300_000
    with connect(server.port) as plain:
        with contextlib.suppress(ConnectionResetError):
            plain.sendall(request("/"))
            plain.recv(100)  # an alert, an answer or the end; the server must go on
    with Wire(server.port, certificates.for_client()) as wire:
        assert wire.get("/").text == "one"


# ---------------------------------------------------------------- the life of a worker


@pytest.mark.parametrize("kind", KINDS)
def test_a_graceful_end_waits_for_requests(start: Start, kind: str) -> None:
    server = start(kind)
    with Wire(server.port) as busy:
        busy.send(head("GET", "/until/released"))
        server.wait_line("waiting for released")
        server.signal(signal.SIGTERM)
        server.wait_line("Handling signal: term")
        server.make("released")
        assert busy.reply().text == "there"
    assert server.finish() == 0


def test_the_grace_has_an_end(start: Start) -> None:
    server = start("coros", "--graceful-timeout", "1")
    with Wire(server.port) as busy:
        busy.send(head("GET", "/until/never"))
        server.wait_line("waiting for never")
        server.signal(signal.SIGTERM)
        assert server.finish() == 0
        assert busy.is_at_end()


def test_an_application_that_exits(start: Start) -> None:
    server = start("coros")
    assert statuses(talk(server.port, request("/exit"))) == [500]
    server.wait_line("SystemExit: 3")
    assert only(talk(server.port, request("/")))[2] == b"one"


@pytest.mark.parametrize("kind", KINDS)
def test_max_requests(start: Start, kind: str) -> None:
    server = start(kind, "--max-requests", "2")
    first = {server.worker(), server.worker()}
    assert len(first) == 1
    server.wait_line("Booting worker", count=2)
    assert server.worker() not in first


def test_other_workers_go_on_when_one_ends(start: Start) -> None:
    server = start("coros", "--workers", "2", workers=2)
    os.kill(server.worker(), signal.SIGTERM)
    server.wait_line("Booting worker", count=3)
    for _ in range(20):
        assert only(talk(server.port, request("/")))[2] == b"one"
        assert only(talk(server.path, request("/")))[2] == b"one"


def test_a_worker_that_hangs_is_replaced(start: Start) -> None:
    """The worker whose request only waits is not replaced, even if the request waits for longer than the timeout."""
    server = start("coros", "--timeout", "1", "--workers", "2", workers=2)
    with Wire(server.port) as waiting:
        waiting.send(head("GET", "/until/late"))
        good = server.wait_line("waiting for late in").rpartition(" ")[2]
        tries = []

        def hangs() -> bool:
            """Ask once, and again after each answer of the good worker. Return whether the other worker hangs."""
            if not tries or select.select([tries[-1]], [], [], 0)[0]:
                tries.append(connect(server.port))
                tries[-1].sendall(request(f"/hang/unless/{good}"))
            return server.has("hanging in")

        wait_until(hangs)
        bad = server.wait_line("hanging in").rpartition(" ")[2]
        server.wait_line("WORKER TIMEOUT", bad)
        server.wait_line("in hang")  # the log says where it hangs
        server.wait_line("Booting worker", count=3)
        server.make("late")
        assert waiting.reply().text == "there"
    assert not server.has("WORKER TIMEOUT", good)
    assert only(talk(server.port, request("/")))[2] == b"one"
    for sock in tries:
        sock.close()


def change(server: Gunicorn) -> Path:
    """Change the application. The file gets a time in the future, so that its bytecode is out of date."""
    path = server.folder / "served.py"
    path.write_text(path.read_text().replace("'one'", "'the second'"), encoding="utf-8")
    os.utime(path, (time.time() + 10, time.time() + 10))
    return path


def test_a_changed_application(start: Start) -> None:
    config = """
        from gunicorn.reloader import Reloader

        Reloader.__init__.__defaults__ = (None, 0.05, None)  # the interval, for which gunicorn has no setting
    """
    server = start("coros", "--reload", "--reload-engine", "poll", config=config)
    assert only(talk(server.port, request("/")))[2] == b"one"
    path = change(server)
    later_s = itertools.count(time.time() + 20)

    def reloads() -> bool:
        # gunicorn remembers the file's time at its first check, so a change before that check is not noticed.
        os.utime(path, (next(later_s),) * 2)
        return server.has("Worker reloading")

    wait_until(reloads)
    wait_until(lambda: only(talk(server.port, request("/")))[2] == b"the second")


def test_a_hangup(start: Start) -> None:
    server = start("coros")
    assert only(talk(server.port, request("/")))[2] == b"one"
    change(server)
    server.signal(signal.SIGHUP)
    server.wait_line("Booting worker", count=2)
    wait_until(lambda: only(talk(server.port, request("/")))[2] == b"the second")


def test_logs_are_opened_again(start: Start) -> None:
    server = start("coros", "--access-logfile", "access")
    log, old = server.folder / "access", server.folder / "old"
    talk(server.port, request("/?first"))
    wait_until(lambda: "first" in log.read_text())
    log.rename(old)
    server.signal(signal.SIGUSR1)
    wait_until(log.exists)

    def is_logged() -> bool:
        talk(server.port, request("/?second"))
        return "second" in log.read_text()

    wait_until(is_logged)


# ---------------------------------------------------------------- settings


def test_worker_connections(start: Start) -> None:
    server = start("coros", "--worker-connections", "1", "--keep-alive", "20")
    with Wire(server.port) as first, connect(server.port) as second:
        assert first.get("/").text == "one"
        second.sendall(request("/"))
        second.setblocking(False)
        assert first.get("/").text == "one"  # meanwhile, the worker had time to answer the second client
        with pytest.raises(BlockingIOError):
            second.recv(1)
        first.close()
        second.settimeout(20)
        assert second.recv(1) == b"H"


def test_keep_alive(start: Start) -> None:
    server = start("coros", "--keep-alive", "1")
    wires = [Wire(server.port) for _ in range(4)]
    for wire in wires[2:]:
        assert wire.get("/").text == "one"
    for wire in wires[1::2]:
        wire.send(b"GET / HT")
    for wire in wires:
        assert wire.is_at_end()
        wire.close()


def test_hooks_patches_and_a_quick_end(start: Start) -> None:
    config = """
        import json

        def post_worker_init(worker):
            from grapeshot import coro
            print("post_worker_init", json.dumps([coro.is_patched("socket"), worker.wsgi.name]), flush=True)

        def pre_request(worker, req):
            print("pre_request", req.path, flush=True)

        def post_request(worker, req, environ, resp):
            print("post_request", resp.status, flush=True)

        def worker_int(worker):
            print("worker_int", flush=True)
    """
    server = start("coros", config=config)
    assert json.loads(server.wait_line("post_worker_init").partition(" ")[2]) == [True, "served"]
    talk(server.port, request("/"))
    server.wait_line("pre_request /")
    server.wait_line("post_request 200 OK")
    with Wire(server.port) as busy:
        busy.send(head("GET", "/until/never"))
        server.wait_line("waiting for never")
        server.signal(signal.SIGINT)
        server.wait_line("worker_int")
        assert server.finish() == 0
        assert busy.is_at_end()


@pytest.mark.parametrize("config", ["", "from grapeshot import coro\ncoro.patch()\n"], ids=["late", "first"])
def test_preload(start: Start, config: str) -> None:
    """The master imports the application, which contains `from time import sleep`.

    Even so, a request that calls this `sleep` does not delay other requests.
    """
    server = start("coros", "--preload", config=config)
    with Wire(server.port) as waiting:
        waiting.send(head("GET", "/until/go"))
        server.wait_line("waiting for go")
        assert only(talk(server.port, request("/")))[2] == b"one"
        server.make("go")
        assert waiting.reply().text == "there"
    server.signal(signal.SIGTERM)
    assert server.finish() == 0
    assert not config or not any("PatchWarning" in line for line in server.output)


# ---------------------------------------------------------------- Django

DJANGO = """
import threading
import django
from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import HttpResponse
from django.urls import path

settings.configure(
    ALLOWED_HOSTS=["*"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "db.sqlite3"}},
    ROOT_URLCONF=__name__,
    SECRET_KEY="x",
)
django.setup()
from django.db import connection

together = threading.Barrier(5)

def count(request):
    with connection.cursor() as cursor:
        cursor.execute("SELECT 6 * 7")
        together.wait()  # five requests at once, each with a connection of its own
        return HttpResponse(f"{cursor.fetchone()[0]}")

urlpatterns = [path("", count)]
application = get_wsgi_application()
"""


@pytest.mark.parametrize("server", ["gunicorn", "wsgi"])
def test_djangos_orm(server: str, tmp_path: Path) -> None:
    (tmp_path / "served.py").write_text(DJANGO, encoding="utf-8")
    bind = f"{HOST}:0"
    command = {
        "gunicorn": ["gunicorn", "--bind", bind, "--no-control-socket", *OURS, "served"],
        "wsgi": ["grapeshot.coro.wsgi", "--bind", bind, "served"],
    }[server]
    with Process("-m", *command, cwd=tmp_path, env={"DJANGO_ALLOW_ASYNC_UNSAFE": ""}) as process:
        port = int(process.wait_line("Listening", "http").partition(f"{HOST}:")[2].partition(" ")[0])
        wires = [Wire(port) for _ in range(5)]
        for wire in wires:
            wire.send(head("GET", "/"))
        assert [wire.reply().text for wire in wires] == ["42"] * 5
        for wire in wires:
            wire.close()
