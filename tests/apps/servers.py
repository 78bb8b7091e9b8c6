"""One small application on three servers (aiohttp, tornado, uvicorn), each on its own loop in its own thread.

Each server speaks HTTP, or HTTPS if it is given certificates. A route that notes an event writes it to the server's
`Journal`.

The routes, the same on all three servers:

    GET  /hello            "hello"
    GET  /number?n=7       "7"
    GET  /peer             the port of the client
    GET  /payload          PAYLOAD, streamed in chunks
    GET  /gather?n=500     replies when n such requests are in flight at once
    GET  /held             notes "held", replies "released" when the test opens the gate
    GET  /endless          streams until the client is gone, then notes "download-lost"
    POST /digest           reads the body as a stream, and replies "<length> <sha256>"; notes "upload-begun" when data
                           arrives, and "upload-lost" if the client disconnects
    POST /echo             streams the body back while it arrives
"""

from __future__ import annotations

import asyncio
import collections
import hashlib
import logging
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any

import tornado.httpserver
import tornado.httputil
import tornado.ioloop
import tornado.iostream
import tornado.web
import uvicorn
from aiohttp import web
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tests.apps.certificates import Certificates

CAP_S = 30.0
BACKLOG = 1024
PIECE_LEN_BYTES = 64 * 1024
PAYLOAD = random.Random(1729).randbytes(10 * 1024 * 1024)
PAYLOAD_DIGEST = f"{len(PAYLOAD)} {hashlib.sha256(PAYLOAD).hexdigest()}"


def pieces(data: bytes = PAYLOAD) -> list[bytes]:
    return [data[start : start + PIECE_LEN_BYTES] for start in range(0, len(data), PIECE_LEN_BYTES)]


class Journal:
    """A log of events inside the server. Any thread can write to it and wait for an entry."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._counts: collections.Counter[str] = collections.Counter()

    def note(self, event: str) -> None:
        with self._changed:
            self._counts[event] += 1
            self._changed.notify_all()

    def wait(self, event: str, count: int = 1) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._counts[event] >= count, CAP_S), f"never came: {event}"


class App(ABC):
    """The application on one server. `with` starts it in a thread and stops it gracefully."""

    def __init__(
        self, factory: Callable[[], asyncio.AbstractEventLoop], certificates: Certificates | None = None
    ) -> None:
        self.factory = factory
        self.certificates = certificates
        self.for_client = certificates and certificates.for_client()  # the client's side of TLS
        self.journal = Journal()
        self.contexts: list[dict[str, Any]] = []
        self.port = 0
        self._gathered = 0
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=type(self).__name__)

    def __enter__(self) -> App:
        self._thread.start()
        assert self._ready.wait(CAP_S)
        if self._error is not None:
            self._thread.join()
            raise self._error
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread.is_alive():
            self.begin_shutdown()
            self._call(self._gate.set)
        self.join()
        if error[0] is None:
            assert not self.contexts, f"reported to the exception handler: {self.contexts}"

    def join(self) -> None:
        """Wait until the server has ended, and raise the error that ended it, if any."""
        self._thread.join(CAP_S)
        assert not self._thread.is_alive(), "the server does not end"
        if self._error is not None:
            raise self._error

    def begin_shutdown(self) -> None:
        """Ask for a graceful shutdown, without waiting for it."""
        self._call(self._stopping.set)

    def open_gate(self) -> None:
        """Release the requests of /held."""
        self._call(self._gate.set)

    def _call(self, callback: Callable[[], Any]) -> None:
        try:
            self.loop.call_soon_threadsafe(callback)
        except RuntimeError:
            if not self.loop.is_closed():  # a closed loop means that the server has just ended
                raise

    def _run(self) -> None:
        try:
            self.drive(self._main())
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()

    def drive(self, main: Coroutine[Any, Any, None]) -> None:
        """Run the server on a new loop."""
        with asyncio.Runner(loop_factory=self.factory) as runner:
            runner.run(main)

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.loop.set_exception_handler(lambda _loop, context: self.contexts.append(context))
        self._stopping, self._gate, self._all_there = asyncio.Event(), asyncio.Event(), asyncio.Event()
        await self.start()
        self._ready.set()
        await self._stopping.wait()
        await self.shut_down()

    @abstractmethod
    async def start(self) -> None:
        """Start to listen, and set `port`."""

    @abstractmethod
    async def shut_down(self) -> None:
        """Stop listening, let requests in flight finish, and close the other connections."""

    async def gather(self, count: int) -> None:
        self._gathered += 1
        if self._gathered == count:
            self._all_there.set()
        await self._all_there.wait()

    async def hold(self) -> str:
        self.journal.note("held")
        await self._gate.wait()
        return "released"


class AiohttpApp(App):
    async def start(self) -> None:
        app = web.Application()
        app.add_routes(
            [
                web.get("/hello", self.hello),
                web.get("/number", self.number),
                web.get("/peer", self.peer),
                web.get("/payload", self.payload),
                web.get("/gather", self.gathered),
                web.get("/held", self.held),
                web.get("/endless", self.endless),
                web.post("/digest", self.digest),
                web.post("/echo", self.echo),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=CAP_S)
        await self._runner.setup()
        tls = self.certificates and self.certificates.for_server()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=BACKLOG, ssl_context=tls).start()
        self.port = self._runner.addresses[0][1]

    async def shut_down(self) -> None:
        await self._runner.cleanup()

    async def hello(self, _request: web.Request) -> web.Response:
        return web.Response(text="hello")

    async def number(self, request: web.Request) -> web.Response:
        return web.Response(text=request.query["n"])

    async def peer(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        return web.Response(text=str(request.transport.get_extra_info("peername")[1]))

    async def payload(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        for piece in pieces():
            await response.write(piece)
        await response.write_eof()
        return response

    async def gathered(self, request: web.Request) -> web.Response:
        await self.gather(int(request.query["n"]))
        return web.Response(text="together")

    async def held(self, _request: web.Request) -> web.Response:
        return web.Response(text=await self.hold())

    async def endless(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(PAYLOAD[:PIECE_LEN_BYTES])
        finally:
            self.journal.note("download-lost")

    async def digest(self, request: web.Request) -> web.Response:
        length, digest = 0, hashlib.sha256()
        try:
            async for chunk in request.content.iter_any():
                if not length:
                    self.journal.note("upload-begun")
                length += len(chunk)
                digest.update(chunk)
        except BaseException:
            self.journal.note("upload-lost")
            raise
        return web.Response(text=f"{length} {digest.hexdigest()}")

    async def echo(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        async for chunk in request.content.iter_any():
            await response.write(chunk)
        await response.write_eof()
        return response


class TornadoHandler(tornado.web.RequestHandler):
    app: TornadoApp

    def initialize(self, app: TornadoApp) -> None:
        self.app = app
        app.in_flight.add(self)
        app.idle.clear()

    def leave(self) -> None:
        self.app.in_flight.discard(self)
        if not self.app.in_flight:
            self.app.idle.set()

    def on_finish(self) -> None:
        self.leave()

    def on_connection_close(self) -> None:
        self.leave()

    async def get(self, name: str) -> None:
        await getattr(self, "get_" + name)()

    async def get_hello(self) -> None:
        self.write("hello")

    async def get_number(self) -> None:
        self.write(self.get_query_argument("n"))

    async def get_peer(self) -> None:
        connection: Any = self.request.connection
        self.write(str(connection.stream.socket.getpeername()[1]))

    async def get_payload(self) -> None:
        for piece in pieces():
            self.write(piece)
            await self.flush()

    async def get_gather(self) -> None:
        await self.app.gather(int(self.get_query_argument("n")))
        self.write("together")

    async def get_held(self) -> None:
        self.write(await self.app.hold())

    async def get_endless(self) -> None:
        try:
            while True:
                self.write(PAYLOAD[:PIECE_LEN_BYTES])
                await self.flush()
        except tornado.iostream.StreamClosedError:
            self.app.journal.note("download-lost")


@tornado.web.stream_request_body
class TornadoUpload(TornadoHandler):
    def prepare(self) -> None:
        self.length, self.digest = 0, hashlib.sha256()

    async def data_received(self, chunk: bytes) -> None:
        if not self.length:
            self.app.journal.note("upload-begun")
        self.length += len(chunk)
        if self.request.path == "/echo":
            self.write(chunk)
            await self.flush()
        else:
            self.digest.update(chunk)

    def on_connection_close(self) -> None:
        super().on_connection_close()
        self.app.journal.note("upload-lost")

    async def post(self, name: str) -> None:
        if name == "digest":
            self.write(f"{self.length} {self.digest.hexdigest()}")


class TornadoApp(App):
    def drive(self, main: Coroutine[Any, Any, None]) -> None:
        io_loop = tornado.ioloop.IOLoop(asyncio_loop=self.factory(), make_current=True)
        try:
            io_loop.run_sync(lambda: main)
        finally:
            io_loop.run_sync(io_loop.asyncio_loop.shutdown_default_executor)  # type: ignore[attr-defined]
            io_loop.close()

    async def start(self) -> None:
        self.in_flight: set[TornadoHandler] = set()
        self.idle = asyncio.Event()
        self.idle.set()
        app = tornado.web.Application(
            [
                ("/(digest|echo)", TornadoUpload, {"app": self}),
                ("/([a-z]+)", TornadoHandler, {"app": self}),
            ],
            log_function=lambda _handler: None,
        )
        tls = self.certificates and self.certificates.for_server()
        self._server = tornado.httpserver.HTTPServer(app, ssl_options=tls)
        self._server.listen(0, "127.0.0.1", backlog=BACKLOG)
        [listener] = self._server._sockets.values()
        self.port = listener.getsockname()[1]

    async def shut_down(self) -> None:
        self._server.stop()
        await self.idle.wait()  # tornado cannot wait for requests in flight: close_all_connections cuts them off
        await self._server.close_all_connections()


class Endless:
    """Plain ASGI: streams until `receive` reports that the client has disconnected, because uvicorn's `send` does not
    report it.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    async def __call__(self, _scope: Any, receive: Any, send: Any) -> None:
        async def wait_gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        gone = asyncio.create_task(wait_gone())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.done():
            await send({"type": "http.response.body", "body": PAYLOAD[:PIECE_LEN_BYTES], "more_body": True})
            await asyncio.sleep(0)  # `send` may return without having waited
        await gone
        self._journal.note("download-lost")


class Echo:
    """Plain ASGI: sends back what it receives.

    Starlette's StreamingResponse cannot be used: to notice a disconnect, it calls `receive` itself, and it would
    discard the parts of the body that it gets.
    """

    async def __call__(self, _scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        more = True
        while more:
            message = await receive()
            assert message["type"] == "http.request"
            more = message["more_body"]
            await send({"type": "http.response.body", "body": message["body"], "more_body": more})


class UvicornApp(App):
    def starlette(self) -> Starlette:
        routes = [
            Route("/hello", self.hello),
            Route("/number", self.number),
            Route("/peer", self.peer),
            Route("/payload", self.payload),
            Route("/gather", self.gathered),
            Route("/held", self.held),
            Route("/endless", Endless(self.journal)),
            Route("/digest", self.digest, methods=["POST"]),
            Route("/echo", Echo(), methods=["POST"]),
        ]
        return Starlette(routes=routes)

    async def start(self) -> None:
        config = uvicorn.Config(
            self.starlette(),
            host="127.0.0.1",
            port=0,
            http="httptools",
            lifespan="off",
            log_config=None,
            access_log=False,
            ssl_certfile=self.certificates and self.certificates.chain_file,
            ssl_keyfile=self.certificates and self.certificates.key_file,
        )
        config.load()
        assert config.http_protocol_class is HttpToolsProtocol
        self.server = uvicorn.Server(config)
        self._serving = asyncio.create_task(self.server.serve())
        while not self.server.started:
            assert not self._serving.done(), self._serving
            await asyncio.sleep(0)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]

    async def shut_down(self) -> None:
        self.server.should_exit = True
        await self._serving

    async def hello(self, _request: Request) -> Response:
        return PlainTextResponse("hello")

    async def number(self, request: Request) -> Response:
        return PlainTextResponse(request.query_params["n"])

    async def peer(self, request: Request) -> Response:
        assert request.client is not None
        return PlainTextResponse(str(request.client.port))

    async def payload(self, _request: Request) -> Response:
        return StreamingResponse(iter_pieces())

    async def gathered(self, request: Request) -> Response:
        await self.gather(int(request.query_params["n"]))
        return PlainTextResponse("together")

    async def held(self, _request: Request) -> Response:
        return PlainTextResponse(await self.hold())

    async def digest(self, request: Request) -> Response:
        length, digest = 0, hashlib.sha256()
        try:
            async for chunk in request.stream():
                if not length:
                    self.journal.note("upload-begun")
                length += len(chunk)
                digest.update(chunk)
        except ClientDisconnect:
            self.journal.note("upload-lost")
            return Response()
        return PlainTextResponse(f"{length} {digest.hexdigest()}")


async def iter_pieces() -> Any:
    for piece in pieces():
        yield piece


APPS: dict[str, type[App]] = {"aiohttp": AiohttpApp, "tornado": TornadoApp, "uvicorn": UvicornApp}

for name in ("aiohttp.server", "tornado.access", "tornado.general", "uvicorn.error"):
    logging.getLogger(name).setLevel(logging.CRITICAL)  # in some tests clients disconnect without notice
