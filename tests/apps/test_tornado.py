"""Tornado on the loop under test: its IOLoop, timers, streams, TCP server, HTTP client and websockets, also over
TLS.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any

import pytest
import tornado.gen
import tornado.httpclient
import tornado.httpserver
import tornado.ioloop
import tornado.iostream
import tornado.locks
import tornado.tcpclient
import tornado.tcpserver
import tornado.web
import tornado.websocket

from tests.apps.certificates import Certificates
from tests.apps.servers import PAYLOAD, pieces
from tests.apps.wire import TIMEOUT_S

Run = Callable[..., Any]


@pytest.fixture(params=["plain", "tls"])
def tls(request: pytest.FixtureRequest, certificates: Certificates) -> dict[str, ssl.SSLContext | None]:
    """The TLS contexts `server` and `client`, which are None for plain text."""
    if request.param == "plain":
        return {"server": None, "client": None}
    return {"server": certificates.for_server(), "client": certificates.for_client()}


def test_ioloop_takes_the_installed_loop() -> None:
    """`IOLoop()` uses a loop of grapeshot after grapeshot.install(), and one of asyncio's own after uninstall()."""
    import grapeshot

    grapeshot.install()
    try:
        installed = tornado.ioloop.IOLoop(make_current=False)
    finally:
        grapeshot.uninstall()
    usual = tornado.ioloop.IOLoop(make_current=False)
    try:
        assert isinstance(installed.asyncio_loop, grapeshot.Loop)  # type: ignore[attr-defined]
        assert not isinstance(usual.asyncio_loop, grapeshot.Loop)  # type: ignore[attr-defined]

        async def main() -> str:
            assert tornado.ioloop.IOLoop.current() is installed
            await tornado.gen.sleep(0)
            return await installed.run_in_executor(None, lambda: "from a thread")

        assert installed.run_sync(main) == "from a thread"
        installed.run_sync(installed.asyncio_loop.shutdown_default_executor)  # type: ignore[attr-defined]
    finally:
        installed.close()
        usual.close()


def test_ioloop_callbacks_and_timers(run: Run) -> None:
    async def main() -> None:
        io_loop = tornado.ioloop.IOLoop.current()
        order: list[str] = []
        done = tornado.locks.Event()
        io_loop.call_later(0.02, order.append, "later")
        cancelled = io_loop.call_later(0.01, order.append, "never")
        io_loop.remove_timeout(cancelled)
        io_loop.add_callback(order.append, "first")
        io_loop.spawn_callback(order.append, "second")
        ticks: list[int] = []

        def tick() -> None:
            ticks.append(len(ticks))
            if len(ticks) >= 5 and "later" in order:
                done.set()

        periodic = tornado.ioloop.PeriodicCallback(tick, 5)
        periodic.start()
        thread = threading.Thread(target=io_loop.add_callback, args=(order.append, "thread"))
        thread.start()
        thread.join()
        await done.wait()
        periodic.stop()
        assert len(ticks) >= 5
        assert sorted(order) == ["first", "later", "second", "thread"]
        assert order.index("first") < order.index("second") < order.index("later")

    run(main())


def test_ioloop_handlers(run: Run) -> None:
    async def main() -> None:
        io_loop = tornado.ioloop.IOLoop.current()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            seen: list[bytes] = []
            readable, writable = tornado.locks.Event(), tornado.locks.Event()

            def on_event(sock: Any, events: int) -> None:
                if events & tornado.ioloop.IOLoop.WRITE:
                    io_loop.update_handler(sock, tornado.ioloop.IOLoop.READ)
                    writable.set()
                if events & tornado.ioloop.IOLoop.READ:
                    seen.append(sock.recv(100))
                    readable.set()

            io_loop.add_handler(ours, on_event, tornado.ioloop.IOLoop.READ | tornado.ioloop.IOLoop.WRITE)
            await writable.wait()
            theirs.send(b"data")
            await readable.wait()
            io_loop.remove_handler(ours)
            assert seen == [b"data"]

    run(main())


class LineServer(tornado.tcpserver.TCPServer):
    async def handle_stream(self, stream: tornado.iostream.IOStream, address: Any) -> None:
        try:
            while True:
                line = await stream.read_until(b"\n")
                if line == b"payload\n":
                    for piece in pieces():
                        await stream.write(piece)
                else:
                    await stream.write(line[::-1])
        except tornado.iostream.StreamClosedError:
            stream.close()


def test_iostream(run: Run, tls: dict[str, Any]) -> None:
    async def main() -> None:
        server = LineServer(ssl_options=tls["server"])
        server.listen(0, "127.0.0.1")
        [listener] = server._sockets.values()
        client = tornado.tcpclient.TCPClient()
        port = listener.getsockname()[1]
        streams = [await client.connect("127.0.0.1", port, ssl_options=tls["client"]) for _ in range(50)]
        for n, stream in enumerate(streams):
            await stream.write(f"line {n}\n".encode())
        for n, stream in enumerate(streams):
            assert await stream.read_bytes(len(f"line {n}\n")) == f"line {n}\n".encode()[::-1]
        await streams[0].write(b"payload\n")
        data = await streams[0].read_bytes(len(PAYLOAD))
        assert hashlib.sha256(data).digest() == hashlib.sha256(PAYLOAD).digest()
        for stream in streams:
            stream.close()
        client.close()
        server.stop()
        await settle()

    run(main())


def test_start_tls_on_an_iostream(run: Run, certificates: Certificates) -> None:
    """As in SMTP, both ends exchange plain text before they start TLS."""

    class Upgrading(tornado.tcpserver.TCPServer):
        async def handle_stream(self, stream: tornado.iostream.IOStream, address: Any) -> None:
            assert await stream.read_until(b"\n") == b"STARTTLS\n"
            await stream.write(b"go on\n")
            secured = await stream.start_tls(server_side=True, ssl_options=certificates.for_server())
            await secured.write((await secured.read_until(b"\n")).upper())
            secured.close()

    async def main() -> None:
        server = Upgrading()
        server.listen(0, "127.0.0.1")
        [listener] = server._sockets.values()
        stream = await tornado.tcpclient.TCPClient().connect("127.0.0.1", listener.getsockname()[1])
        await stream.write(b"STARTTLS\n")
        assert await stream.read_until(b"\n") == b"go on\n"
        secured = await stream.start_tls(False, certificates.for_client(), server_hostname="localhost")
        await secured.write(b"secret\n")
        assert await secured.read_until(b"\n") == b"SECRET\n"
        secured.close()
        server.stop()
        await settle()

    run(main())


async def settle() -> None:
    """Wait until all other tasks have ended: handlers end when they notice that their clients have disconnected."""
    give_up_s = asyncio.get_running_loop().time() + TIMEOUT_S
    me = asyncio.current_task()
    while [task for task in asyncio.all_tasks() if task is not me]:
        assert asyncio.get_running_loop().time() < give_up_s
        await asyncio.sleep(0.001)


class Digest(tornado.web.RequestHandler):
    def get(self) -> None:
        self.write(PAYLOAD)

    def post(self) -> None:
        self.write(hashlib.sha256(self.request.body).hexdigest())


class Socket(tornado.websocket.WebSocketHandler):
    def on_message(self, message: str | bytes) -> None:
        self.write_message(message, binary=isinstance(message, bytes))


def listening(
    app: tornado.web.Application, tls: ssl.SSLContext | None = None
) -> tuple[tornado.httpserver.HTTPServer, int]:
    server = tornado.httpserver.HTTPServer(app, ssl_options=tls)
    server.listen(0, "127.0.0.1", backlog=1024)
    [listener] = server._sockets.values()
    return server, listener.getsockname()[1]


def test_http_client(run: Run, tls: dict[str, Any]) -> None:
    async def main() -> None:
        app = tornado.web.Application([("/", Digest)], log_function=lambda _: None)
        server, port = listening(app, tls["server"])
        url = f"{'https' if tls['server'] else 'http'}://127.0.0.1:{port}/"
        defaults = {"ssl_options": tls["client"]}
        client = tornado.httpclient.AsyncHTTPClient(force_instance=True, max_clients=100, defaults=defaults)
        received = hashlib.sha256()
        await client.fetch(url, streaming_callback=received.update)
        assert received.digest() == hashlib.sha256(PAYLOAD).digest()
        bodies = [PAYLOAD[n * 1000 : (n + 1) * 1000] for n in range(100)]
        replies = await asyncio.gather(*(client.fetch(url, method="POST", body=body) for body in bodies))
        assert [reply.body.decode() for reply in replies] == [hashlib.sha256(body).hexdigest() for body in bodies]
        client.close()
        server.stop()
        await server.close_all_connections()

    run(main())


def test_websocket(run: Run, tls: dict[str, Any]) -> None:
    async def main() -> None:
        app = tornado.web.Application([("/", Socket)], log_function=lambda _: None)
        server, port = listening(app, tls["server"])
        url = f"{'wss' if tls['server'] else 'ws'}://127.0.0.1:{port}/"
        request = tornado.httpclient.HTTPRequest(url, ssl_options=tls["client"])
        sockets = [await tornado.websocket.websocket_connect(request) for _ in range(20)]
        for n, client in enumerate(sockets):
            await client.write_message(f"message {n}")
            await client.write_message(PAYLOAD[: 1024 * n], binary=True)
        for n, client in enumerate(sockets):
            assert await client.read_message() == f"message {n}"
            assert await client.read_message() == PAYLOAD[: 1024 * n]
        for client in sockets:
            client.close()
            assert await client.read_message() is None
        server.stop()
        await server.close_all_connections()
        await settle()

    run(main())
