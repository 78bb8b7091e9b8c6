"""An echo server: sends back what it receives, until it is told to stop (Ctrl-C, SIGTERM).

    python examples/echo_server.py --port 8888          # then: nc 127.0.0.1 8888
    python examples/echo_server.py --loop asyncio       # the same program on asyncio's own loop

The server is written against asyncio alone; only `main` knows which loop it runs on.
"""

from __future__ import annotations

import argparse
import asyncio
import signal

import grapeshot


class Echo(asyncio.Protocol):
    """One connection. When the client reads too slowly, nothing more is read from it."""

    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)

    def pause_writing(self) -> None:
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        self.transport.resume_reading()


async def serve(host: str, port: int) -> None:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)

    server = await loop.create_server(Echo, host, port)
    async with server:
        name, bound = server.sockets[0].getsockname()[:2]
        print(f"listening on {name}:{bound}", flush=True)
        await stopped.wait()
        server.close()
        if hasattr(server, "close_clients"):  # Python 3.13 and later on asyncio's own loop, always on grapeshot
            server.close_clients()
    print("stopped", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Echo server.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8888, help="0 takes a free one")
    parser.add_argument("--loop", choices=["grapeshot", "asyncio"], default="grapeshot")
    options = parser.parse_args()

    factory = grapeshot.new_event_loop if options.loop == "grapeshot" else asyncio.SelectorEventLoop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve(options.host, options.port))


if __name__ == "__main__":
    main()
