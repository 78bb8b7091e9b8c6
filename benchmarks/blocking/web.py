"""The WSGI servers that are put under load: `python -m benchmarks.blocking.web KIND --style STYLE`.

They serve the same application, without an access log. `wsgi` is grapeshot.coro.wsgi or gevent.pywsgi; `gunicorn` is
gunicorn with one worker of grapeshot's or gevent's class. The program prints `{"address": ..., "pid": ...}`, where the
pid belongs to the process that serves, or `{"unsupported": why}`. It ends when its stdin is closed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks._machine import raise_descriptor_limit
from benchmarks.blocking.styles import GEVENT, OURS

BACKLOG = 2048
STDIN = 0
FIELDS = [("Content-Type", "text/plain"), ("Content-Length", "13")]
# Longer than any load, so that no connection is closed during one.
KEEP_ALIVE_S = 300
WORKERS = {OURS: "grapeshot.coro.gunicorn.Worker", GEVENT: "gevent"}


def hello(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    start_response("200 OK", FIELDS)
    return [b"Hello, world!"]


def say(host: str, port: int) -> None:
    print(json.dumps({"address": f"{host}:{port}", "pid": os.getpid()}), flush=True)


def serve_coros() -> None:
    from grapeshot import coro
    from grapeshot.coro import wsgi

    def main() -> None:
        with wsgi.serve(hello, "127.0.0.1", 0, backlog=BACKLOG) as server:
            say(*server.sockets[0].getsockname())
            coro.wait_for_read(STDIN)

    coro.run(main)


def serve_gevent() -> None:
    from gevent import monkey

    monkey.patch_all()
    import gevent
    from gevent.pywsgi import WSGIServer
    from gevent.socket import wait_read

    server = WSGIServer(("127.0.0.1", 0), hello, backlog=BACKLOG, log=None)
    server.start()
    say(*server.address)
    gevent.spawn(wait_read, STDIN).get()
    server.stop()


def serve_gunicorn(style: str) -> None:
    from gunicorn.app.base import BaseApplication

    class Application(BaseApplication):  # type: ignore[misc]  # gunicorn has no types
        def load_config(self) -> None:
            for name, value in {
                "bind": "127.0.0.1:0",
                "backlog": BACKLOG,
                "worker_class": WORKERS[style],
                "keepalive": KEEP_ALIVE_S,
                "control_socket_disable": True,
                "loglevel": "error",
                "post_worker_init": lambda worker: say(*worker.sockets[0].getsockname()),
                "when_ready": end_with_stdin,
            }.items():
                self.cfg.set(name, value)

        def load(self) -> Callable[..., Any]:
            return hello

    Application().run()


def end_with_stdin(arbiter: Any) -> None:
    """Make gunicorn's master end gracefully when stdin is closed."""

    def wait() -> None:
        os.read(STDIN, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


KINDS: dict[str, dict[str, Callable[[], None]]] = {
    "wsgi": {OURS: serve_coros, GEVENT: serve_gevent},
    "gunicorn": {OURS: lambda: serve_gunicorn(OURS), GEVENT: lambda: serve_gunicorn(GEVENT)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--style", required=True, help="grapeshot or gevent")
    args = parser.parse_args()
    raise_descriptor_limit()
    try:
        KINDS[args.kind][args.style]()
    except ImportError as error:
        print(json.dumps({"unsupported": str(error)}), flush=True)


if __name__ == "__main__":
    main()
