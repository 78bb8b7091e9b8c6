"""A FastAPI application that uses a blocking driver: mailboxes in Redis, accessed with redis-py's blocking client.

    redis-server --port 6379 &
    python examples/fastapi_redis.py --port 8000
    curl 127.0.0.1:8000/mail/ann &                              # waits for mail
    curl -X POST '127.0.0.1:8000/mail/ann?text=hello'

Needs a Redis server, and `pip install fastapi uvicorn redis`. A thousand requests can wait in BLPOP at the same time,
because each waits in a coro and not in a thread of a pool. In the meantime, asyncio's tasks keep running.
"""

from __future__ import annotations

from grapeshot import coro

coro.patch()  # before importing modules that use sockets

import argparse
import contextlib
import socket

import fastapi
import redis
import uvicorn

import grapeshot


def make_app(client: redis.Redis) -> fastapi.FastAPI:
    app = fastapi.FastAPI()

    @app.post("/mail/{name}")
    async def send(name: str, text: str) -> dict[str, int]:
        return {"unread": await coro.run_blocking(client.rpush, name, text)}

    @app.get("/mail/{name}")
    async def receive(name: str, seconds: float = 30) -> dict[str, str | None]:
        found = await coro.run_blocking(client.blpop, name, timeout=seconds)
        return {"text": found[1] if found else None}

    return app


async def serve(host: str, port: int, redis_url: str) -> None:
    # No timeout for sockets, because a BLPOP may wait for long. `receive` passes a timeout to each BLPOP.
    client = redis.Redis.from_url(redis_url, decode_responses=True, socket_timeout=None)
    listener = socket.create_server((host, port))
    name, bound = listener.getsockname()[:2]
    print(f"listening on {name}:{bound}", flush=True)
    config = uvicorn.Config(make_app(client), log_level="warning", timeout_graceful_shutdown=1)
    await uvicorn.Server(config).serve(sockets=[listener])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Mailboxes over HTTP.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 for any free port")
    parser.add_argument("--redis", default="redis://127.0.0.1:6379", help="the server's URL, as redis-py expects it")
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again after it has shut down
        grapeshot.run(serve(options.host, options.port, options.redis))
