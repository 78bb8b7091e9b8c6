"""The application that `uvicorn` serves from the command line; see test_uvicorn.py."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import signal
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


@contextlib.asynccontextmanager
async def lifespan(_app: Starlette) -> AsyncIterator[None]:
    global gate
    gate = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, gate.set)
    print("lifespan started", flush=True)
    yield
    print("lifespan ended", flush=True)


async def loop_class(_request: Request) -> Response:
    loop = type(asyncio.get_running_loop())
    return PlainTextResponse(f"{loop.__module__}.{loop.__qualname__}")


async def protocol(_request: Request) -> Response:
    found = {type(thing).__name__ for thing in gc.get_objects() if isinstance(thing, HttpToolsProtocol)}
    return PlainTextResponse(" ".join(found))


async def number(request: Request) -> Response:
    return PlainTextResponse(request.query_params["n"])


async def digest(request: Request) -> Response:
    length, hashed = 0, hashlib.sha256()
    async for chunk in request.stream():
        length += len(chunk)
        hashed.update(chunk)
    return PlainTextResponse(f"{length} {hashed.hexdigest()}")


async def until_shutdown(_request: Request) -> Response:
    print("request held", flush=True)
    await gate.wait()
    return PlainTextResponse("released")


app = Starlette(
    lifespan=lifespan,
    routes=[
        Route("/loop", loop_class),
        Route("/protocol", protocol),
        Route("/number", number),
        Route("/digest", digest, methods=["POST"]),
        Route("/until-shutdown", until_shutdown),
    ],
)
