"""Uses a Rust extension that contains tokio: its timers, sockets and channels are awaited here, and it calls Python.

    pip install maturin
    maturin develop -m examples/tokio_bridge/Cargo.toml     # builds the crate in this directory (Rust 1.88+)
    python examples/tokio_bridge/demo.py
    python examples/tokio_bridge/demo.py --loop asyncio     # the same on asyncio's own loop

The crate uses pyo3-async-runtimes, which makes tokio's futures awaitable on the running asyncio loop, and vice versa.
"""

from __future__ import annotations

import argparse
import asyncio

import tokio_bridge

import grapeshot


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    line = await reader.readline()
    writer.write(line.upper())
    await writer.drain()
    writer.close()
    await writer.wait_closed()


async def double(number: int) -> int:
    await asyncio.sleep(0.01)
    return 2 * number


async def main() -> None:
    print("tokio's timer:", await tokio_bridge.sleep(0.01, "slept"))

    # Two runtimes in one process: the server on this loop, the client on tokio's sockets.
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        questions = (tokio_bridge.ask(host, port, f"question {number}") for number in range(3))
        print("tokio's sockets:", ", ".join(await asyncio.gather(*questions)))

    print("Python called from tokio:", await tokio_bridge.sum_of(double, [1, 2, 3]))
    print("a channel:", [number async for number in tokio_bridge.Counter(5)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="tokio futures on a Python event loop.")
    parser.add_argument("--loop", choices=["grapeshot", "asyncio"], default="grapeshot")
    factory = grapeshot.new_event_loop if parser.parse_args().loop == "grapeshot" else asyncio.SelectorEventLoop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())
    # The interpreter must not exit while one of tokio's threads is calling into it.
    tokio_bridge.wait_until_idle()
