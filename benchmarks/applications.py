"""The HTTP and websocket servers that are measured: small applications of widely used libraries."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from benchmarks._serving import BACKLOG, address_of, burn, listen, options, say

HELLO = b"Hello, world!"
BURNT_S = 0.1


def body() -> bytes:
    """Return the body for `/`: HELLO, repeated up to the requested length."""
    return (HELLO * (options.body_len // len(HELLO) + 1))[: options.body_len]


async def serve_aiohttp(stop: asyncio.Future[None]) -> None:
    """An aiohttp application: `/` says hello, `/burn` computes first, and `/users/{user_id}` answers with JSON."""
    from aiohttp import web

    text = body().decode()

    async def hello(request: web.Request) -> web.Response:
        return web.Response(text=text)

    async def user(request: web.Request) -> web.Response:
        user_id = int(request.match_info["user_id"])
        return web.json_response({"id": user_id, "name": f"user {user_id}", "tags": ["reader", "writer"]})

    async def compute(request: web.Request) -> web.Response:
        await asyncio.get_running_loop().run_in_executor(None, burn, BURNT_S)
        return web.Response(text=text)

    app = web.Application()
    app.add_routes([web.get("/", hello), web.get("/users/{user_id}", user), web.get("/burn", compute)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    sock = listen()
    address = address_of(sock)  # some loops take over the descriptor, so read the address first
    await web.SockSite(runner, sock, backlog=BACKLOG).start()
    say(address=address)
    await stop
    await runner.cleanup()


async def serve_uvicorn(stop: asyncio.Future[None]) -> None:
    """A bare ASGI application under uvicorn with httptools. Fails if uvicorn does not use httptools."""
    import uvicorn
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    content = body()
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(content)).encode())]

    async def hello(scope: object, receive: object, send: Callable[[dict[str, object]], Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    config = uvicorn.Config(hello, http="httptools", lifespan="off", access_log=False, log_level="warning")
    config.load()
    if config.http_protocol_class is not HttpToolsProtocol:
        raise SystemExit(f"uvicorn uses {config.http_protocol_class}, not httptools")
    server = uvicorn.Server(config)
    sock = listen()
    serving = asyncio.ensure_future(server.serve(sockets=[sock]))
    say(address=address_of(sock))
    await asyncio.wait((serving, stop), return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    await serving


async def serve_websockets(stop: asyncio.Future[None]) -> None:
    """Send each message back, without compression."""
    from websockets.asyncio.server import ServerConnection, serve
    from websockets.exceptions import ConnectionClosed

    async def echo(connection: ServerConnection) -> None:
        # The load ends by closing its sockets.
        with contextlib.suppress(ConnectionClosed):
            async for message in connection:
                await connection.send(message)

    sock = listen()
    address = address_of(sock)
    server = await serve(echo, sock=sock, compression=None, ping_interval=None, backlog=BACKLOG)
    say(address=address)
    await stop
    server.close(close_connections=True)
    await server.wait_closed()


KINDS: dict[str, Callable[[asyncio.Future[None]], Awaitable[None]]] = {
    "aiohttp": serve_aiohttp,
    "uvicorn": serve_uvicorn,
    "websockets": serve_websockets,
}
