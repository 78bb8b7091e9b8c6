"""aiohttp's client and its websockets, in plain text and over TLS. Client and server share the loop under test."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.apps.certificates import Certificates
from tests.apps.servers import PAYLOAD, PAYLOAD_DIGEST, iter_pieces
from tests.apps.wire import TIMEOUT_S, Wire, head

Run = Callable[..., Any]
CODES = web.AppKey("codes", list)  # the codes with which websockets were closed


class Ends:
    """A server and its clients, over HTTP or, with certificates, over HTTPS."""

    def __init__(self, certificates: Certificates | None) -> None:
        self.certificates = certificates

    @contextlib.asynccontextmanager
    async def serving(self, *routes: web.RouteDef, codes: list[int | None] | None = None) -> AsyncIterator[str]:
        """Run a server with these routes and yield its base URL."""
        app = web.Application()
        app[CODES] = [] if codes is None else codes
        app.add_routes(routes)
        async with self.serving_app(app) as (url, _):
            yield url

    @contextlib.asynccontextmanager
    async def serving_app(self, app: web.Application) -> AsyncIterator[tuple[str, web.AppRunner]]:
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            tls = self.certificates and self.certificates.for_server()
            await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024, ssl_context=tls).start()
            yield f"{'https' if tls else 'http'}://127.0.0.1:{runner.addresses[0][1]}", runner
        finally:
            await runner.cleanup()

    def session(self, *, limit: int = 100, **options: Any) -> aiohttp.ClientSession:
        tls = self.certificates.for_client() if self.certificates else True
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=limit, ssl=tls), **options)


@pytest.fixture(params=["http", "https"])
def ends(request: pytest.FixtureRequest, certificates: Certificates) -> Ends:
    return Ends(certificates if request.param == "https" else None)


async def send_payload(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    async for piece in iter_pieces():
        await response.write(piece)
    return response


async def digest(request: web.Request) -> web.Response:
    length, digest = 0, hashlib.sha256()
    async for chunk in request.content.iter_any():
        length += len(chunk)
        digest.update(chunk)
    return web.Response(text=f"{length} {digest.hexdigest()}")


async def number(request: web.Request) -> web.Response:
    return web.Response(text=request.query["n"])


def test_client_reuses_its_connection(run: Run, ends: Ends) -> None:
    async def main() -> None:
        made, reused = [], []

        async def on_create(*_: object) -> None:
            made.append(True)

        async def on_reuse(*_: object) -> None:
            reused.append(True)

        trace = aiohttp.TraceConfig()
        trace.on_connection_create_end.append(on_create)
        trace.on_connection_reuseconn.append(on_reuse)
        async with ends.serving(web.get("/number", number)) as url, ends.session(trace_configs=[trace]) as session:
            for n in range(100):
                async with session.get(f"{url}/number?n={n}") as response:
                    assert await response.text() == str(n)
        assert (len(made), len(reused)) == (1, 99)

    run(main())


def test_client_resolves_a_name(run: Run, ends: Ends) -> None:
    async def main() -> None:
        async with ends.serving(web.get("/number", number)) as url, ends.session() as session:
            async with session.get(f"{url.replace('127.0.0.1', 'localhost')}/number?n=1") as response:
                assert await response.text() == "1"

    run(main())


def test_client_streams_10_mb_both_ways(run: Run, ends: Ends) -> None:
    async def main() -> None:
        async with (
            ends.serving(web.get("/payload", send_payload), web.post("/digest", digest)) as url,
            ends.session() as session,
        ):
            received = hashlib.sha256()
            async with session.get(f"{url}/payload") as response:
                async for chunk in response.content.iter_any():
                    received.update(chunk)
            assert received.digest() == hashlib.sha256(PAYLOAD).digest()
            async with session.post(f"{url}/digest", data=iter_pieces()) as response:
                assert await response.text() == PAYLOAD_DIGEST

    run(main())


def test_client_has_500_requests_in_flight(run: Run, ends: Ends) -> None:
    async def main() -> None:
        waiting = 0
        all_there = asyncio.Event()

        async def gather(request: web.Request) -> web.Response:
            nonlocal waiting
            waiting += 1
            if waiting == 500:
                all_there.set()
            await all_there.wait()
            return await number(request)

        async with ends.serving(web.get("/gather", gather)) as url, ends.session(limit=0) as session:

            async def client(n: int) -> str:
                async with session.get(f"{url}/gather?n={n}") as response:
                    return await response.text()

            assert await asyncio.gather(*map(client, range(500))) == [str(n) for n in range(500)]

    run(main())


def test_client_gives_up_and_continues(run: Run, ends: Ends) -> None:
    async def main() -> None:
        never = asyncio.Event()

        async def held(_request: web.Request) -> web.Response:
            await never.wait()
            return web.Response()

        async def stall(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b"beginning")
            await never.wait()
            return response

        async with (
            ends.serving(web.get("/held", held), web.get("/stall", stall), web.get("/number", number)) as url,
            ends.session() as session,
        ):
            with pytest.raises(TimeoutError):
                await session.get(f"{url}/held", timeout=aiohttp.ClientTimeout(total=0.05))
            async with session.get(f"{url}/stall") as response:
                assert await response.content.readexactly(9) == b"beginning"
                reading = asyncio.ensure_future(response.content.read(1))
                await asyncio.sleep(0)
                reading.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reading
            async with session.get(f"{url}/number?n=3") as response:
                assert await response.text() == "3"
            never.set()

    run(main())


def test_server_disconnects_in_the_middle_of_its_reply(run: Run, ends: Ends) -> None:
    async def main() -> None:
        async def cut(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Length": str(len(PAYLOAD))})
            await response.prepare(request)
            await response.write(PAYLOAD[: 100 * 1024])
            assert request.transport is not None
            request.transport.close()
            return response

        async with ends.serving(web.get("/cut", cut), web.get("/number", number)) as url, ends.session() as session:
            async with session.get(f"{url}/cut") as response:
                with pytest.raises(aiohttp.ClientPayloadError):
                    await response.read()
            async with session.get(f"{url}/number?n=4") as response:
                assert await response.text() == "4"

    run(main())


# ---------------------------------------------------------------- websockets


async def echo(request: web.Request) -> web.WebSocketResponse:
    """Send back what arrives, and note the code with which the client closes."""
    socket = web.WebSocketResponse(max_msg_size=2 * len(PAYLOAD))
    await socket.prepare(request)
    async for message in socket:
        if message.type is aiohttp.WSMsgType.TEXT:
            await socket.send_str(message.data)
        else:
            await socket.send_bytes(message.data)
    request.app[CODES].append(socket.close_code)
    return socket


def test_websocket_echo(run: Run, ends: Ends) -> None:
    async def main() -> None:
        codes: list[int | None] = []
        async with ends.serving(web.get("/echo", echo), codes=codes) as url, ends.session() as session:
            async with session.ws_connect(f"{url}/echo", max_msg_size=2 * len(PAYLOAD)) as socket:
                for length in (0, 1, 125, 126, 65535, 65536, len(PAYLOAD)):
                    await socket.send_bytes(PAYLOAD[:length])
                    assert await socket.receive_bytes() == PAYLOAD[:length]
                for n in range(200):
                    await socket.send_str(f"message {n}")
                assert [await socket.receive_str() for _ in range(200)] == [f"message {n}" for n in range(200)]
                await socket.ping()
                await socket.close(code=4000)
        assert codes == [4000]

    run(main())


def test_websocket_broadcast_to_100_clients(run: Run, ends: Ends) -> None:
    async def main() -> None:
        members: set[web.WebSocketResponse] = set()

        async def room(request: web.Request) -> web.WebSocketResponse:
            socket = web.WebSocketResponse()
            await socket.prepare(request)
            members.add(socket)
            await socket.send_str("welcome")
            async for message in socket:
                await asyncio.gather(*(member.send_str(message.data) for member in members))
            members.discard(socket)
            return socket

        async with ends.serving(web.get("/room", room)) as url, ends.session() as session:
            sockets = [await session.ws_connect(f"{url}/room") for _ in range(100)]
            for socket in sockets:
                assert await socket.receive_str() == "welcome"
            for n in range(5):
                await sockets[n].send_str(f"to all {n}")
                assert [await socket.receive_str() for socket in sockets] == [f"to all {n}"] * 100
            for socket in sockets:
                await socket.close()

    run(main())


def test_websocket_client_is_lost(run: Run, ends: Ends) -> None:
    async def main() -> None:
        lost: asyncio.Queue[aiohttp.WSMsgType] = asyncio.Queue()

        async def listen(request: web.Request) -> web.WebSocketResponse:
            socket = web.WebSocketResponse()
            await socket.prepare(request)
            await socket.send_str("ready")
            lost.put_nowait((await socket.receive()).type)
            return socket

        async with ends.serving(web.get("/listen", listen)) as url, ends.session() as session:
            for _ in range(10):
                socket = await session.ws_connect(f"{url}/listen")
                assert await socket.receive_str() == "ready"
                assert socket._response.connection is not None
                transport = socket._response.connection.transport
                assert transport is not None
                transport.abort()
                how = await asyncio.wait_for(lost.get(), TIMEOUT_S)
                assert how in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR)
                await socket.close()

    run(main())


def test_websockets_are_closed_by_a_shutdown(run: Run, ends: Ends) -> None:
    async def main() -> None:
        members: list[web.WebSocketResponse] = []

        async def room(request: web.Request) -> web.WebSocketResponse:
            socket = web.WebSocketResponse()
            await socket.prepare(request)
            members.append(socket)
            await socket.send_str("welcome")
            async for _ in socket:
                pass
            return socket

        async def shut_down(_app: web.Application) -> None:
            for socket in members:
                await socket.close(code=aiohttp.WSCloseCode.GOING_AWAY)

        app = web.Application()
        app.add_routes([web.get("/room", room)])
        app.on_shutdown.append(shut_down)
        async with ends.serving_app(app) as (url, runner), ends.session() as session:
            sockets = [await session.ws_connect(f"{url}/room") for _ in range(10)]
            for socket in sockets:
                assert await socket.receive_str() == "welcome"
            _, *messages = await asyncio.gather(runner.cleanup(), *(socket.receive() for socket in sockets))
            assert [(message.type, message.data) for message in messages] == [(aiohttp.WSMsgType.CLOSE, 1001)] * 10

    run(main())


# ---------------------------------------------------------------- web.run_app, as a program

PROGRAM = """
    import asyncio, importlib, socket, sys
    from aiohttp import web

    module, _, attribute = sys.argv[1].partition(":")
    loop = getattr(importlib.import_module(module), attribute)()
    release = asyncio.Event()

    async def held(request):
        print("held", flush=True)
        await release.wait()
        return web.Response(text="released")

    async def let_go(app):
        release.set()

    app = web.Application()
    app.add_routes([web.get("/held", held)])
    app.on_shutdown.append(let_go)

    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], type(loop).__module__, flush=True)
    web.run_app(app, sock=listener, print=None, access_log=None, loop=loop)
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_run_app_ends_gracefully_by_a_signal(kind: str, factory_name: str, signum: signal.Signals) -> None:
    program = textwrap.dedent(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", program, factory_name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        port, module = process.stdout.readline().split()
        assert module.startswith(kind)
        with Wire(int(port)) as wire:
            wire.send(head("GET", "/held"))
            assert process.stdout.readline() == "held\n"
            process.send_signal(signum)
            assert wire.reply().text == "released"
            assert wire.is_at_end()
        _, errors = process.communicate(timeout=TIMEOUT_S)
        assert (process.returncode, errors) == (0, "")
    finally:
        process.kill()
        process.communicate()
