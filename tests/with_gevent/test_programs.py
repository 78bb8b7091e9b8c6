"""Programs and libraries made for gevent, with real servers, on a grapeshot loop and on gevent's own loop as a control.

Each program runs in a process of its own. On a grapeshot loop it also uses a library made for asyncio, from a greenlet.
The text of each program is below its test, so the file is long.
"""

from __future__ import annotations

import collections
import http.client
import importlib.util
import json
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support import HOST, free_port, gil_is_enabled, wait_until

from tests.apps.certificates import Certificates
from tests.apps.daemons import Postgres, Redis
from tests.apps.processes import Process
from tests.apps.requirements import framework

pytestmark = [
    pytest.mark.skipif(not gil_is_enabled(), reason="gevent declares that it needs the GIL"),
    pytest.mark.skipif(importlib.util.find_spec("gevent") is None, reason="gevent is not installed"),
    pytest.mark.slow,
]

LOOPS = {"grapeshot": "grapeshot.gevent.Loop", "libev": "libev-cext"}
CAP_S = 60

# The module `common`, which the programs import. Its `check_loop` fails if gevent does not run on the loop that the
# test asks for.
COMMON = """
import os
import gevent

IS_OURS = os.environ["GEVENT_LOOP"] == "grapeshot.gevent.Loop"
if IS_OURS:
    from grapeshot.gevent import await_

def loop_name():
    return type(gevent.get_hub().loop).__module__.partition(".")[0]

def check_loop():
    assert loop_name() == ("grapeshot" if IS_OURS else "gevent"), gevent.get_hub().loop

def until(condition):
    with gevent.Timeout(60):
        while not (value := condition()):
            gevent.sleep(0.005)
    return value

async def fetch(*urls):
    "Get all URLs at the same time with aiohttp."
    import aiohttp, asyncio
    async def get(session, url):
        async with session.get(url) as response:
            response.raise_for_status()
            return await response.text()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
        return await asyncio.gather(*(get(session, url) for url in urls))
"""


class Programs:
    """Starts programs whose gevent runs on one kind of loop."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.is_ours = kind == "grapeshot"
        self.folder = folder
        self._env = {"GEVENT_LOOP": LOOPS[kind], "HOME": str(folder)}
        self.write("common.py", COMMON)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="utf-8")

    def start(self, *arguments: str, **env: str) -> Process:
        return Process(*arguments, cwd=self.folder, env=self._env | env)

    def run(self, text: str, **env: str) -> list[str]:
        """Run a program to its end; return the lines that it prints."""
        self.write("program.py", text)
        with self.start("program.py", **env) as program:
            finish(program)
            return program.output


@pytest.fixture(params=list(LOOPS))
def programs(request: pytest.FixtureRequest, tmp_path: Path) -> Programs:
    return Programs(request.param, tmp_path)


def finish(program: Process) -> None:
    """Wait for the end of a program, and check that it had no errors."""
    code = program.process.wait(CAP_S)
    program.finish()  # reads the rest of its output
    text = "\n".join(program.output)
    assert code == 0, text
    assert "Traceback" not in text, text


class Site(ThreadingHTTPServer):
    """A server that replies with the path, and counts requests and connections. Each request for /meet waits until the
    number of waiting requests is `together`; then all of them get their replies.
    """

    request_queue_size = 128
    daemon_threads = False  # so that `server_close` waits for the threads

    def __init__(self, together: int) -> None:
        super().__init__((HOST, 0), Handler)
        self.together = threading.Barrier(together, timeout=CAP_S)
        self.lock = threading.Lock()
        self.requests: collections.Counter[str] = collections.Counter()
        self.connections: collections.Counter[str] = collections.Counter()  # by the user agent

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Site
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = CAP_S
    is_counted = False

    def do_GET(self) -> None:
        with self.server.lock:
            self.server.requests[self.path] += 1
            if not self.is_counted:
                self.is_counted = True
                self.server.connections[self.headers["User-Agent"].partition("/")[0]] += 1
        if self.path == "/meet":
            self.server.together.wait()
        body = self.path.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    with Site(request.param) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


# ---------------------------------------------------------------- locust


@pytest.mark.parametrize("site", [6], indirect=True)
@pytest.mark.parametrize("is_distributed", [False, True], ids=["one-process", "two-workers"])
def test_locust(programs: Programs, site: Site, is_distributed: bool) -> None:
    """Two kinds of users, whose first requests are answered together. Workers are forked and use zmq.green."""
    framework("locust")
    programs.write("locustfile.py", LOCUSTFILE)
    port = str(free_port())
    workers = ("--processes", "2", "--master-port", port, "--master-bind-port", port) if is_distributed else ()
    with programs.start(
        *("-m", "locust", "--headless", "--users", "6", "--spawn-rate", "100", "--host", site.url),
        *("--json-file", "stats", "--only-summary", *workers),
    ) as locust:
        finish(locust)
        assert any("exit code 0" in line for line in locust.output), locust.output
    stats = json.loads((programs.folder / "stats.json").read_text(encoding="utf-8"))
    expected = {"/meet": 6, "/FastUser": 30, "/RequestsUser": 30}
    if programs.is_ours:
        expected |= {"/aiohttp": 60}
    assert {entry["name"]: entry["num_requests"] for entry in stats} == expected
    assert not any(entry["num_failures"] for entry in stats)
    assert site.requests == expected


LOCUSTFILE = """
import time
import gevent
from locust import FastHttpUser, HttpUser, between, events
from locust.exception import StopUser
from locust.runners import WorkerRunner
from common import *

USERS, EACH = 6, 10  # users, and how often each of them asks

def ask(user):
    name = f"/{type(user).__name__}"
    assert user.client.get(name).text == name
    if IS_OURS:
        start = time.perf_counter()
        [text] = await_(fetch(f"{user.host}/aiohttp"))
        events.request.fire(
            request_type="GET", name=text, response_time=1000 * (time.perf_counter() - start), response_length=len(text)
        )
    user.left -= 1
    if not user.left:
        raise StopUser

class Begin:
    wait_time = between(0.001, 0.01)
    tasks = [ask]
    fixed_count = 3
    left = EACH
    def on_start(self):
        assert self.client.get("/meet").text == "/meet"

class FastUser(Begin, FastHttpUser): pass
class RequestsUser(Begin, HttpUser): pass

@events.test_start.add_listener
def watch(environment, **_):
    check_loop()
    def quit():
        expected = USERS * (1 + EACH * (2 if IS_OURS else 1))
        until(lambda: environment.stats.total.num_requests == expected)
        environment.runner.quit()
    if not isinstance(environment.runner, WorkerRunner):
        gevent.spawn(quit)
"""


# ---------------------------------------------------------------- gunicorn


def test_gunicorn(programs: Programs) -> None:
    """200 requests wait in the application at the same time. At the end, the server waits for running requests."""
    framework("gunicorn")
    framework("flask")
    programs.write("app.py", FLASK_APP)
    port = free_port()
    with programs.start(
        *("-m", "gunicorn", "--worker-class", "gevent", "--bind", f"{HOST}:{port}"),
        *("--graceful-timeout", str(CAP_S), "app:app"),
        PORT=str(port),
    ) as server:
        server.wait_line("Booting worker")
        assert get(port, "/loop") == ("grapeshot" if programs.is_ours else "gevent")
        clients = [begin(port, "/meet/200") for _ in range(200)]
        assert {end(client) for client in clients} == {"200 are here"}
        # If a client goes away or the application fails, the other requests go on.
        leaving = [begin(port, "/held") for _ in range(3)]
        server.wait_line("held", count=3)
        for client in leaving:
            client.close()
        assert http_status(port, "/fail") == 500
        if programs.is_ours:
            assert get(port, "/aiohttp") == ["grapeshot"] * 20
        held = [begin(port, "/held") for _ in range(5)]
        server.wait_line("held", count=8)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not accepts(port), "the server to stop listening", CAP_S)
        programs.write("gate", "")
        assert {end(client) for client in held} == {"released"}
        assert server.process.wait(CAP_S) == 0
        server.finish()
        assert sum("Traceback" in line for line in server.output) == 1, server.output  # the traceback of /fail


def begin(port: int, path: str) -> http.client.HTTPConnection:
    """Send a request, and do not wait for the response."""
    client = http.client.HTTPConnection(HOST, port, timeout=CAP_S)
    client.request("GET", path)
    return client


def end(client: http.client.HTTPConnection) -> object:
    response = client.getresponse()
    body = response.read()
    client.close()
    assert response.status == 200, body
    result: object = json.loads(body)
    return result


def get(port: int, path: str) -> object:
    wait_until(lambda: accepts(port), "the server to listen", CAP_S)
    return end(begin(port, path))


def http_status(port: int, path: str) -> int:
    client = begin(port, path)
    status = client.getresponse().status
    client.close()
    return status


def accepts(port: int) -> bool:
    client = http.client.HTTPConnection(HOST, port, timeout=CAP_S)
    try:
        client.connect()
    except (ConnectionRefusedError, ConnectionResetError):  # a reset if the server stops before it accepts
        return False
    finally:
        client.close()
    return True


FLASK_APP = """
import pathlib
import flask
import gevent.event
from common import *

app = flask.Flask(__name__)
waiting, everybody = [], gevent.event.Event()

@app.get("/loop")
def loop():
    return flask.jsonify(loop_name())

@app.get("/meet/<int:count>")
def meet(count):
    waiting.append(flask.request)
    if len(waiting) == count:
        everybody.set()
    assert everybody.wait(60)
    return flask.jsonify(f"{len(waiting)} are here")

@app.get("/held")
def held():
    print("held", flush=True)
    until(pathlib.Path("gate").exists)
    return flask.jsonify("released")

@app.get("/fail")
def fail():
    raise LookupError("on purpose")

@app.get("/aiohttp")
def ask_itself():
    texts = await_(fetch(*[f"http://127.0.0.1:{os.environ['PORT']}/loop"] * 20))
    return flask.jsonify([flask.json.loads(text) for text in texts])
"""


# ---------------------------------------------------------------- celery


def test_celery(programs: Programs, tmp_path: Path) -> None:
    """Tasks of `celery -P gevent`: results, time limits, retries, revocation, and a warm shutdown."""
    framework("celery")
    framework("redis")
    programs.write("tasks.py", TASKS)
    with Redis(Certificates(tmp_path)) as redis:
        env = {"REDIS": f"redis://{HOST}:{redis.address.port}", "C_FORCE_ROOT": "1"}
        with programs.start(
            *("-m", "celery", "-A", "tasks", "worker", "-P", "gevent", "-c", "30", "-l", "info"),
            *("--without-mingle", "--without-gossip"),
            **env,
        ) as worker:
            worker.wait_line("ready.")
            assert programs.run(CELERY_CLIENT, **env) == [
                "{'grapeshot'}" if programs.is_ours else "{'gevent'}",
                "LookupError",
                "TimeLimitExceeded",
                "3",
                "b'a child'",
                "TaskRevokedError None",
                "TaskRevokedError GreenletExit",
                *(["[b'0', b'1', b'2', b'3', b'4']"] if programs.is_ours else []),
                "begun",
            ]
            worker.process.send_signal(signal.SIGTERM)
            worker.wait_line("Warm shutdown")
            programs.run('from tasks import *; store.set("gate", 1)', **env)
            assert worker.process.wait(CAP_S) == 0, worker.output
            worker.finish()
            assert programs.run('from tasks import *; print(app.AsyncResult("last").get(timeout=60))', **env) == [
                "let through"
            ]
        assert sum("Traceback" in line for line in worker.output) == 1, worker.output  # the traceback of fail()


TASKS = """
import subprocess, sys, time
import redis
from celery import Celery
from common import *

app = Celery("tasks", broker=os.environ["REDIS"] + "/0", backend=os.environ["REDIS"] + "/1")
app.conf.update(broker_connection_retry_on_startup=True, accept_content=["pickle", "json"], result_serializer="pickle")
store = redis.Redis.from_url(os.environ["REDIS"] + "/2", socket_timeout=None)

@app.task
def meet(count):
    store.incr("here")
    while int(store.get("here")) < count:
        time.sleep(0.01)
    return loop_name()

@app.task
def fail():
    raise LookupError("on purpose")

@app.task(time_limit=0.2)
def slow():
    time.sleep(600)

@app.task(autoretry_for=(KeyError,), max_retries=2, retry_backoff=False, default_retry_delay=0.05)
def again():
    if store.incr("again") < 3:
        raise KeyError
    return int(store.get("again"))

@app.task
def start_child():
    return subprocess.check_output([sys.executable, "-c", "print('a child', end='')"])

@app.task
def wait(name):
    store.set(name, "begun")
    try:
        until(lambda: store.get("gate"))
        return "let through"
    except BaseException as exc:
        store.set(name, type(exc).__name__)
        raise

@app.task
def use_asyncio(count):
    import asyncio
    import redis.asyncio
    async def main():
        async with redis.asyncio.Redis.from_url(os.environ["REDIS"] + "/2") as client:
            await asyncio.gather(*(client.set(f"key {number}", number) for number in range(count)))
            return await asyncio.gather(*(client.get(f"key {number}") for number in range(count)))
    return await_(main())
"""
CELERY_CLIENT = """
from tasks import *

def outcome(result):
    try:
        return result.get(timeout=60)
    except Exception as exc:
        return type(exc).__name__

def noted(name, value):
    return until(lambda: store.get(name) == value.encode() and value)

print({outcome(result) for result in [meet.delay(30) for _ in range(30)]})
for task in (fail, slow, again, start_child):
    print(outcome(task.delay()))
app.control.revoke("early", reply=True)
print(outcome(wait.apply_async(("early",), task_id="early")), store.get("early"))
running = wait.delay("running")
noted("running", "begun")
running.revoke(terminate=True)
print(outcome(running), noted("running", "GreenletExit"))
if IS_OURS:
    print(outcome(use_asyncio.delay(5)))
wait.apply_async(("last",), task_id="last")
print(noted("last", "begun"), flush=True)
os._exit(0)  # some of celery's results would print errors when the interpreter ends
"""


# ---------------------------------------------------------------- Flask-SocketIO


def test_flask_socketio(programs: Programs) -> None:
    """A room of clients with different transports, acknowledgements in both directions, and a background task."""
    framework("flask_socketio")
    framework("websocket")  # python-socketio's client uses it
    programs.write("server.py", SOCKETIO_SERVER)
    port = free_port()
    with programs.start("server.py", PORT=str(port)) as server:
        wait_until(lambda: accepts(port), "the server to listen", CAP_S)
        transports = ["polling", "websocket", *(["asyncio"] if programs.is_ours else [])]
        lines = programs.run(SOCKETIO_CLIENT, PORT=str(port))
        assert lines == [
            *(f"{name}: joined {'grapeshot' if programs.is_ours else 'gevent'}" for name in transports),
            f"answers: {transports}",
            *(f"{name}: {['hello from ' + other for other in transports]}" for name in transports),
            *(f"{name}: {list(range(10))} and the end" for name in transports),
            *(["asked itself"] if programs.is_ours else []),
            f"left: {len(transports)}",
        ]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(CAP_S) == 0, server.output
        server.finish()
        # pywsgi can mistake the last frame of a WebSocket for a request. The reply to it fails: the client is gone.
        gone = [line for line in server.output if line.startswith(("BrokenPipeError", "ConnectionResetError"))]
        assert sum("Traceback" in line for line in server.output) == len(gone), server.output


SOCKETIO_SERVER = """
import gevent.monkey
gevent.monkey.patch_all()
import signal
import flask
from flask_socketio import SocketIO, emit, join_room
from common import *

app = flask.Flask(__name__)
socketio = SocketIO(app, async_mode="gevent")
names, left = {}, []

@app.get("/")
def index():
    return "itself"

@socketio.on("join")
def join(name):
    names[flask.request.sid] = name
    join_room("everybody")
    return f"joined {loop_name()}"

@socketio.on("say")
def say(text):
    emit("said", text, to="everybody")
    return "done"

@socketio.on("question")
def question():
    "Ask all clients at the same time."
    jobs = [gevent.spawn(socketio.call, "your name", to=sid) for sid in names]
    return sorted(job.get() for job in jobs)

@socketio.on("start")
def start(count):
    def count_up():
        for number in range(count):
            socketio.emit("number", number, to="everybody")
            socketio.sleep(0.001)
        socketio.emit("end", to="everybody")
    socketio.start_background_task(count_up)

@socketio.on("fetch")
def ask_itself():
    [text] = await_(fetch(f"http://127.0.0.1:{os.environ['PORT']}/"))
    return f"asked {text}"

@socketio.on("disconnect")
def disconnect(reason):
    left.append(flask.request.sid)

@socketio.on("left")
def count_left():
    return len(left)

check_loop()
gevent.signal_handler(signal.SIGTERM, lambda: gevent.spawn(socketio.wsgi_server.stop))
socketio.run(app, port=int(os.environ["PORT"]))
"""
SOCKETIO_CLIENT = """
import gevent.monkey
gevent.monkey.patch_all()
import socketio
from common import *

url = f"http://127.0.0.1:{os.environ['PORT']}"

class Client:
    "Wraps a client of python-socketio. The methods of an AsyncClient return awaitables, which `call` awaits."
    def __init__(self, name, client, call):
        self.name, self.client, self.call = name, client, call
        self.said, self.numbers, self.is_over = [], [], False
        client.on("said", self.said.append)
        client.on("number", self.numbers.append)
        client.on("end", self.end)
        client.on("your name", lambda: name)

    def end(self):
        self.is_over = True

    def ask(self, *args):
        return self.call(self.client.call(*args))

def same(value):
    return value

clients = [Client(name, socketio.Client(), same) for name in ("polling", "websocket")]
for each in clients:
    each.client.connect(url, transports=[each.name])
    assert each.client.transport() == each.name
if IS_OURS:
    async def make():
        return socketio.AsyncClient()
    clients.append(Client("asyncio", await_(make()), await_))
    await_(clients[-1].client.connect(url, transports=["websocket"]))
for each in clients:
    print(f"{each.name}: {each.ask('join', each.name)}")
print("answers:", sorted(clients[0].ask("question"), key=[each.name for each in clients].index))
for each in clients:
    assert each.ask("say", f"hello from {each.name}") == "done"
for each in clients:
    until(lambda: len(each.said) == len(clients))
    print(f"{each.name}: {each.said}")
clients[1].client.emit("start", 10)
for each in clients:
    until(lambda: each.is_over)
    print(f"{each.name}: {each.numbers} and the end")
if IS_OURS:
    print(clients[1].ask("fetch"))
for each in clients:
    each.call(each.client.disconnect())
with socketio.SimpleClient() as last:
    last.connect(url)
    print("left:", until(lambda: (count := last.call("left")) == len(clients) and count))
"""


# ---------------------------------------------------------------- zmq.green


def test_zmq_green(programs: Programs) -> None:
    """Requests and replies, and a publisher with subscribers, between greenlets."""
    framework("zmq")
    assert programs.run(ZMQ_PROGRAM) == [
        "[0, 100, 200, 300, 400]",
        "[[0, 1, 98, 99], [0, 1, 98, 99], [0, 1, 98, 99]]",
        "both",
        "ended GreenletExit()",
        *(["[0, 100, 200, 300, 400]"] if programs.is_ours else []),
    ]


ZMQ_PROGRAM = """
import gevent.monkey
gevent.monkey.patch_all()
import zmq.green as zmq
from common import *

check_loop()
context = zmq.Context()

# The requests of five clients reach four workers through a queue (`front`, `back` and `forward`).
front, back = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
front_url = f"tcp://127.0.0.1:{front.bind_to_random_port('tcp://127.0.0.1')}"
back.bind("inproc://workers")

def worker():
    with context.socket(zmq.REP) as sock:
        sock.connect("inproc://workers")
        while True:
            number = int(sock.recv())
            gevent.sleep(0.001)
            sock.send(b"%d" % (number * number))

def forward(source, target):
    while True:
        target.send_multipart(source.recv_multipart())

servants = [gevent.spawn(worker) for _ in range(4)]
servants += [gevent.spawn(forward, front, back), gevent.spawn(forward, back, front)]

def client(number):
    with context.socket(zmq.REQ) as sock:
        sock.connect(front_url)
        total = 0
        for factor in range(100):
            sock.send(b"%d" % factor)
            assert int(sock.recv()) == factor * factor
            total += number
        return total

print([job.get(timeout=60) for job in [gevent.spawn(client, number) for number in range(5)]])

# A publisher, which begins when all subscribers are there.
publisher = context.socket(zmq.PUB)
url = f"tcp://127.0.0.1:{publisher.bind_to_random_port('tcp://127.0.0.1')}"
present = set()

def subscriber(name):
    numbers = []
    with context.socket(zmq.SUB) as sock:
        sock.connect(url)
        sock.subscribe(b"number")
        sock.subscribe(b"begin")
        while True:
            topic, data = sock.recv_multipart()
            if topic == b"begin":
                present.add(name)
            elif data == b"end":
                return numbers
            else:
                numbers.append(int(data))

def publish():
    while len(present) < 3:
        publisher.send_multipart([b"begin", b""])
        gevent.sleep(0.005)
    for number in range(100):
        publisher.send_multipart([b"number", b"%d" % number])
        publisher.send_multipart([b"nobody asks", b"%d" % number])
    publisher.send_multipart([b"number", b"end"])

jobs = [gevent.spawn(subscriber, name) for name in range(3)]
gevent.spawn(publish)
print([job.get(timeout=60)[:2] + job.get()[-2:] for job in jobs])

# The poller, and the end of greenlets that wait.
pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
pull.bind("inproc://poll")
push.connect("inproc://poll")
poller = zmq.Poller()
poller.register(pull, zmq.POLLIN)
poller.register(push, zmq.POLLOUT)
gevent.spawn_later(0.01, push.send, b"x")
until(lambda: dict(poller.poll(1000)) == {pull: zmq.POLLIN, push: zmq.POLLOUT})
print("both")
gevent.killall(servants)
print("ended", *{repr(job.value) for job in servants})

if IS_OURS:
    # Sockets of zmq.asyncio in tasks send requests to a socket of zmq.green in a greenlet.
    import asyncio
    import zmq.asyncio
    answering = context.socket(zmq.ROUTER)
    port = answering.bind_to_random_port("tcp://127.0.0.1")

    def answer():
        while True:
            answering.send_multipart(answering.recv_multipart())

    async def ask(shared, number):
        total = 0
        with shared.socket(zmq.REQ) as sock:
            sock.connect(f"tcp://127.0.0.1:{port}")
            for _ in range(100):
                await sock.send(b"%d" % number)
                total += int(await sock.recv())
        return total

    async def main():
        with zmq.asyncio.Context() as shared:
            return await asyncio.gather(*(ask(shared, number) for number in range(5)))

    servant = gevent.spawn(answer)
    print(await_(main()))
    servant.kill()
    answering.close()

for sock in (front, back, publisher, pull, push):
    sock.close()
context.term()
"""


# ---------------------------------------------------------------- psycogreen


def test_psycogreen(programs: Programs, tmp_path: Path) -> None:
    """Ten greenlets wait for their queries at the same time, as the server's list of queries shows."""
    framework("psycogreen")
    framework("psycopg2")
    framework("asyncpg")
    with Postgres(Certificates(tmp_path)) as server:
        address = server.address
        url = f"postgresql://{address.user}@{HOST}:{address.port}/{address.database}"
        assert programs.run(PSYCOGREEN_PROGRAM, DATABASE=url, PGPASSWORD=address.password) == [
            "10 run",
            "{'QueryCanceled'}",
            "Timeout",
            "[0, 1, 4, 9, 16, 25, 36, 49, 64, 81]",
            "200000 numbers",
            *(["[0, 1, 8, 27, 64]"] if programs.is_ours else []),
        ]


PSYCOGREEN_PROGRAM = """
import gevent.monkey
gevent.monkey.patch_all()
import gevent.pool
import psycogreen.gevent
psycogreen.gevent.patch_psycopg()
import psycopg2
from common import *

check_loop()
DATABASE = os.environ["DATABASE"]
RUNNING = "FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep%' AND state = 'active'"

def ask(query, *values):
    connection = psycopg2.connect(DATABASE)
    try:
        with connection.cursor() as cursor:
            cursor.execute(query, values or None)
            return cursor.fetchone()[0]
    finally:
        connection.close()

# Ten greenlets run this function. When all ten queries run, the program cancels them.
def sleep():
    try:
        return ask("SELECT pg_sleep(600)")
    except psycopg2.errors.QueryCanceled as exc:
        return type(exc).__name__

jobs = [gevent.spawn(sleep) for _ in range(10)]
until(lambda: ask(f"SELECT count(*) {RUNNING}") == 10)
print("10 run")
assert ask(f"SELECT count(pg_cancel_backend(pid)) {RUNNING}") == 10
print({job.get(timeout=60) for job in jobs})

# A greenlet gives up. The server may not have noticed yet that the connection is closed, and may still sleep.
try:
    with gevent.Timeout(0.1):
        ask("SELECT pg_sleep(600)")
except gevent.Timeout:
    print("Timeout")
ask(f"SELECT count(pg_terminate_backend(pid)) {RUNNING}")

pool = gevent.pool.Pool(5)
print(pool.map(lambda number: ask("SELECT %s * %s FROM pg_sleep(0.001)", number, number), range(10)))
print(len(ask("SELECT array_agg(number) FROM generate_series(1, 200000) AS number")), "numbers")

if IS_OURS:
    import asyncio
    import asyncpg

    async def main():
        async with asyncpg.create_pool(DATABASE, min_size=2, max_size=3) as connections:
            return await asyncio.gather(*(connections.fetchval(f"SELECT {number}::int8 ^ 3") for number in range(5)))

    greenlet = gevent.spawn(await_, main())
    assert ask("SELECT 'beside'") == "beside"
    print([int(value) for value in greenlet.get()])
"""


# ---------------------------------------------------------------- geventhttpclient


@pytest.mark.parametrize("site", [5], indirect=True)
def test_geventhttpclient(programs: Programs, site: Site) -> None:
    """A client has five connections, which forty greenlets share."""
    framework("geventhttpclient")
    assert programs.run(HTTP_CLIENT, URL=site.url) == [
        "{'/meet'}",
        "400 replies",
        *(["{'/meet'}"] if programs.is_ours else []),
    ]
    # By the user agent up to the slash: the client's is python/gevent-http-client-VERSION, aiohttp's Python/VERSION.
    expected = {"python": 5}
    if programs.is_ours:
        expected["Python"] = 5
    assert site.connections == expected
    assert sum(site.requests.values()) == 405 + (5 if programs.is_ours else 0)


HTTP_CLIENT = """
from geventhttpclient import HTTPClient
from common import *

check_loop()
URL = os.environ["URL"]
client = HTTPClient.from_url(URL, concurrency=5, network_timeout=60, connection_timeout=60)

def get(path):
    response = client.get(path)
    assert response.status_code == 200
    return response.read().decode()

# The server replies when five requests wait.
print({job.get() for job in [gevent.spawn(get, "/meet") for _ in range(5)]})

def work(number):
    return [get(f"/{number}/{count}") == f"/{number}/{count}" for count in range(10)]

jobs = [gevent.spawn(work, number) for number in range(40)]
print(sum(sum(job.get()) for job in jobs), "replies")
client.close()
if IS_OURS:
    print(set(await_(fetch(*[f"{URL}/meet"] * 5))))
"""
