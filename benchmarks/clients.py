"""Measure client libraries in this process: `python -m benchmarks.clients KIND --loop LOOP --address ADDRESS`.

The server is the same for all loops, and runs on another core; only this process's CPU time counts. Prints
`{"cpu_us": per operation, "rps": operations per second, "requests": operations}`, or `{"unsupported": why}`.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from benchmarks._loops import loop_factory, print_outcome
from benchmarks.applications import HELLO

# How many operations run at a time. Each of them has a connection of its own.
AT_A_TIME = {"aiohttp": 50, "redis": 10, "asyncpg": 10}
STALL_S = 30.0
# Does one operation and checks the answer. The argument is the number of the worker, from 0 on.
Operation = Callable[[int], Awaitable[None]]


@asynccontextmanager
async def aiohttp_client(address: str) -> AsyncIterator[Operation]:
    """GET requests in one session."""
    import aiohttp

    url = f"http://{address}/"
    connector = aiohttp.TCPConnector(limit=AT_A_TIME["aiohttp"])
    async with aiohttp.ClientSession(connector=connector) as session:

        async def get(number: int) -> None:
            async with session.get(url) as response:
                if response.status != 200 or await response.read() != HELLO:
                    raise AssertionError(f"wrong answer with status {response.status}")

        yield get


@asynccontextmanager
async def redis_client(address: str) -> AsyncIterator[Operation]:
    """SET and GET with redis-py; each command takes a connection from the client's pool."""
    import redis.asyncio

    host, _, port = address.rpartition(":")
    async with redis.asyncio.Redis(host=host, port=int(port)) as client:

        async def set_and_get(number: int) -> None:
            value = b"%d" % number
            await client.set(f"key {number}", value)
            if await client.get(f"key {number}") != value:
                raise AssertionError("the server returned a wrong value")

        yield set_and_get


@asynccontextmanager
async def asyncpg_client(address: str) -> AsyncIterator[Operation]:
    """Run a prepared statement with asyncpg; each worker has a connection. The address is the folder of the
    server's socket.
    """
    import asyncpg

    count = AT_A_TIME["asyncpg"]
    connections = [await asyncpg.connect(host=address, user="tester", database="postgres") for _ in range(count)]
    try:
        statements = [await connection.prepare("SELECT $1::int + 1") for connection in connections]

        async def fetch(number: int) -> None:
            if await statements[number].fetchval(number) != number + 1:
                raise AssertionError("the server returned a wrong value")

        yield fetch
    finally:
        for connection in connections:
            await connection.close()


KINDS = {"aiohttp": aiohttp_client, "redis": redis_client, "asyncpg": asyncpg_client}


async def measure(kind: str, address: str, seconds: float, warm_up_s: float) -> dict[str, float]:
    async with KINDS[kind](address) as operation:
        count, is_over = 0, False

        async def work(number: int) -> None:
            nonlocal count
            while not is_over:
                await operation(number)
                count += 1

        workers = [asyncio.create_task(work(number)) for number in range(AT_A_TIME[kind])]
        finished = asyncio.gather(*workers)
        # A worker ends early only if it raises; gather then raises that error.
        await asyncio.wait((finished,), timeout=warm_up_s)
        before, cpu_s, wall_s = count, time.process_time(), time.perf_counter()
        await asyncio.wait((finished,), timeout=seconds)
        # On a very busy machine it can happen that no operation ends in this time. Then go on, for at most STALL_S.
        while count == before and not finished.done() and time.perf_counter() - wall_s < STALL_S:
            await asyncio.wait((finished,), timeout=seconds)
        done, cpu_s, wall_s = count - before, time.process_time() - cpu_s, time.perf_counter() - wall_s
        is_over = True
        await finished
    if not done:
        raise AssertionError("nothing was done in the measured time")
    return {"cpu_us": cpu_s / done * 1e6, "rps": done / wall_s, "requests": done}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--loop", required=True, help="grapeshot, uvloop, asyncio or module:factory")
    parser.add_argument("--address", required=True, help="the server's address; for asyncpg, the folder of its socket")
    parser.add_argument("--seconds", type=float, default=1.0, help="measured time (1)")
    parser.add_argument("--warm-up", type=float, default=0.4, help="seconds before the measured time (0.4)")
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=loop_factory(args.loop)) as runner:
        print_outcome(lambda: runner.run(measure(args.kind, args.address, args.seconds, args.warm_up)))


if __name__ == "__main__":
    main()
