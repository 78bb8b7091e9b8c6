"""An echo server: it sends back whatever it receives, until it is stopped with Ctrl-C or SIGTERM.

    python examples/echo_server.py --port 8888          # then: nc 127.0.0.1 8888
    python examples/echo_server.py --loop asyncio       # the same program on asyncio's own loop

The server uses only asyncio's interface. `main` chooses the event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import signal

import grapeshot


class Echo(asyncio.Protocol):
    """One connection. While the client does not read the echoes, the server stops reading from it."""

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
        if hasattr(server, "close_clients"):  # in asyncio from Python 3.13 on, in grapeshot always
            server.close_clients()
    print("stopped", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="An echo server.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8888, help="0 for any free port")
    parser.add_argument("--loop", choices=["grapeshot", "asyncio"], default="grapeshot")
    options = parser.parse_args()

    factory = grapeshot.new_event_loop if options.loop == "grapeshot" else asyncio.SelectorEventLoop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve(options.host, options.port))


if __name__ == "__main__":
    main()
