"""The servers that are put under load: `python -m benchmarks.programs.servers KIND --style STYLE`.

`gevent-echo` and `gevent-pywsgi` are gevent's StreamServer and its WSGI server, on a loop of gevent or of grapeshot.
`eventlet-echo` is an echo server of eventlet, on its epoll hub or on its asyncio hub with one of several loops.
`fastapi` is an application under uvicorn. Its endpoint is an ordinary function, which waits in Redis for 100 ms.
`django` is a project under uvicorn. Its asynchronous view uses the ORM, which waits in PostgreSQL for 100 ms.

A server prints `{"address": ...}` when it listens, or `{"unsupported": why}`. It ends when its stdin is closed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from benchmarks._machine import raise_descriptor_limit
from benchmarks._serving import BACKLOG, address_of, listen, say
from benchmarks.programs.styles import (
    EVENTLET_HUBS,
    GEVENT_LOOPS,
    MANY_THREADS,
    OURS,
    REQUEST_THREADS,
    THREADS,
    UVLOOP_HUB,
)

STDIN = 0
HELLO = b"Hello, world!"
READ_LEN = 4096
WAIT_S = 0.1
CONNECTIONS = 5000  # more than the load opens


def serve_gevent(make_server: Callable[[], Any], style: str) -> NoReturn:
    import gevent

    gevent.config.loop = GEVENT_LOOPS[style]
    from gevent import monkey

    monkey.patch_all()
    from gevent.socket import wait_read

    server = make_server()
    server.start()
    say(address=f"{server.server_host}:{server.server_port}")
    gevent.spawn(wait_read, STDIN).get()
    os._exit(0)


def echo_server() -> Any:
    import socket

    from gevent.server import StreamServer

    def echo(connection: socket.socket, _: object) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := connection.recv(READ_LEN):
            connection.sendall(data)

    return StreamServer(("127.0.0.1", 0), echo, backlog=BACKLOG)


def wsgi_server() -> Any:
    from gevent.pywsgi import WSGIServer

    def hello(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", str(len(HELLO)))])
        return [HELLO]

    return WSGIServer(("127.0.0.1", 0), hello, backlog=BACKLOG, log=None)


def serve_eventlet(style: str) -> NoReturn:
    """Serve an echo with a green thread for each connection."""
    import socket

    os.environ["EVENTLET_HUB"] = EVENTLET_HUBS[style]
    if style == OURS:
        import grapeshot

        grapeshot.install()
    elif style == UVLOOP_HUB:
        import uvloop

        uvloop.install()
    warnings.simplefilter("ignore")  # eventlet says that it is deprecated
    import eventlet
    import eventlet.hubs

    eventlet.monkey_patch()

    def echo(connection: socket.socket, _: object) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := connection.recv(READ_LEN):
            connection.sendall(data)

    listener = eventlet.listen(("127.0.0.1", 0), backlog=BACKLOG)
    eventlet.spawn(eventlet.serve, listener, echo, concurrency=CONNECTIONS)
    say(address=f"127.0.0.1:{listener.getsockname()[1]}")
    eventlet.hubs.trampoline(STDIN, read=True)
    os._exit(0)


def serve_asgi(style: str, make_application: Callable[[], Any]) -> None:
    """Serve with uvicorn: on grapeshot with blocking functions in coros, or on uvloop with threads."""
    if style == OURS:
        from grapeshot import coro, new_event_loop

        coro.patch(to_thread=True)
        coro.set_latency_warning(0)  # threads have no such warning
    else:
        from uvloop import new_event_loop
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run_uvicorn(make_application))


def make_fastapi(style: str, redis_address: str) -> Any:
    import anyio.to_thread
    import redis
    from fastapi import FastAPI
    from fastapi.responses import PlainTextResponse

    host, _, port = redis_address.partition(":")
    pool = redis.ConnectionPool(host=host, port=int(port), socket_timeout=None, max_connections=CONNECTIONS)
    store = redis.Redis(connection_pool=pool)
    app = FastAPI()

    @app.get("/", response_class=PlainTextResponse)
    def hello() -> str:
        store.blpop(["nothing is pushed here"], timeout=WAIT_S)
        return HELLO.decode()

    if style != THREADS:  # for many threads; anyio's default limit does not count the functions that run in coros
        anyio.to_thread.current_default_thread_limiter().total_tokens = 1000
    return app


def make_django(socket_folder: str) -> Any:
    import django
    from asgiref.sync import sync_to_async
    from django.conf import settings
    from django.core.asgi import get_asgi_application
    from django.http import HttpRequest, HttpResponse
    from django.urls import path

    database = {"ENGINE": "django.db.backends.postgresql", "HOST": socket_folder, "USER": "tester", "NAME": "postgres"}
    settings.configure(ALLOWED_HOSTS=["*"], ROOT_URLCONF=__name__, DATABASES={"default": database})
    django.setup()
    from django.db import models

    class Item(models.Model):
        class Meta:
            app_label = "benchmark"

    def query() -> int:
        return len(list(Item.objects.raw(f"SELECT 1 AS id, pg_sleep({WAIT_S})")))

    async def hello(_: HttpRequest) -> HttpResponse:
        await sync_to_async(query)()
        return HttpResponse(HELLO, content_type="text/plain", headers={"Content-Length": str(len(HELLO))})

    urlpatterns.append(path("", hello))
    return get_asgi_application()


urlpatterns: list[Any] = []  # Django reads it from this module


async def run_uvicorn(make_application: Callable[[], Any]) -> None:
    import uvicorn

    app = make_application()
    config = uvicorn.Config(app, http="httptools", lifespan="off", access_log=False, log_level="error", backlog=BACKLOG)
    server = uvicorn.Server(config)
    sock = listen()
    serving = asyncio.ensure_future(server.serve(sockets=[sock]))
    say(address=address_of(sock))
    is_over = asyncio.Event()
    asyncio.get_running_loop().add_reader(STDIN, is_over.set)
    await is_over.wait()
    server.should_exit = True
    await serving


KINDS: dict[str, tuple[str, ...]] = {
    "gevent-echo": tuple(GEVENT_LOOPS),
    "gevent-pywsgi": tuple(GEVENT_LOOPS),
    "eventlet-echo": tuple(EVENTLET_HUBS),
    "fastapi": (OURS, THREADS, MANY_THREADS),
    "django": (OURS, REQUEST_THREADS),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--style", required=True, help="a column of the table")
    parser.add_argument("--redis", default="127.0.0.1:6379", help="the address of a Redis server, for fastapi")
    parser.add_argument("--postgres", default="/tmp", help="the folder of PostgreSQL's Unix socket, for django")
    args = parser.parse_args()
    if args.style not in KINDS[args.kind]:
        parser.error(f"{args.kind} has the styles {', '.join(KINDS[args.kind])}")
    raise_descriptor_limit()
    try:
        if args.kind == "fastapi":
            serve_asgi(args.style, lambda: make_fastapi(args.style, args.redis))
        elif args.kind == "django":
            serve_asgi(args.style, lambda: make_django(args.postgres))
        elif args.kind == "eventlet-echo":
            serve_eventlet(args.style)
        else:
            serve_gevent(echo_server if args.kind == "gevent-echo" else wsgi_server, args.style)
    except ImportError as error:
        print(json.dumps({"unsupported": str(error)}), flush=True)


if __name__ == "__main__":
    main()
