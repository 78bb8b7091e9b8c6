"""An aiohttp application on grapeshot: a greeting, a JSON echo and a streamed body.

    python examples/aiohttp_hello.py --port 8080
    curl http://127.0.0.1:8080/hello/you
    curl -d '{"a": 1}' http://127.0.0.1:8080/json
    curl http://127.0.0.1:8080/count/3

Needs aiohttp (`pip install aiohttp`). aiohttp needs no change for grapeshot; `main` chooses the event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import signal

from aiohttp import web

import grapeshot


async def hello(request: web.Request) -> web.Response:
    return web.Response(text=f"Hello, {request.match_info['name']}!\n")


async def echo_json(request: web.Request) -> web.Response:
    return web.json_response({"received": await request.json()})


async def count(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/plain"})
    await response.prepare(request)
    for number in range(int(request.match_info["n"])):
        await response.write(f"{number}\n".encode())
        await asyncio.sleep(0)
    await response.write_eof()
    return response


def make_app() -> web.Application:
    app = web.Application()
    app.add_routes(
        [
            web.get("/hello/{name}", hello),
            web.post("/json", echo_json),
            web.get(r"/count/{n:\d+}", count),
        ]
    )
    return app


async def serve(host: str, port: int) -> None:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)

    runner = web.AppRunner(make_app(), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        name, bound = runner.addresses[0][:2]
        print(f"listening on {name}:{bound}", flush=True)
        await stopped.wait()
    finally:
        await runner.cleanup()
    print("stopped", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="A small aiohttp application.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080, help="0 for any free port")
    parser.add_argument("--loop", choices=["grapeshot", "asyncio"], default="grapeshot")
    options = parser.parse_args()

    factory = grapeshot.new_event_loop if options.loop == "grapeshot" else asyncio.SelectorEventLoop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve(options.host, options.port))


if __name__ == "__main__":
    main()
