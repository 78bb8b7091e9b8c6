"""Ways to call another process. Each has a method that serves an echo, and one that calls the echo from many callers.

grpc.aio sends the payload as bytes without a schema. The others send it as one argument.
"""

from __future__ import annotations

import asyncio
import collections
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

from benchmarks import _loops

HOST = "127.0.0.1"
OURS, COROS, ON_ASYNCIO = "grapeshot", "coros", "on asyncio"
GRPC, RPYC, RPYC_THREADS = "grpc.aio", "rpyc", "rpyc threads"

# A function that makes the given number of calls from each caller, and returns when all are answered.
Round = Callable[[int], None]


class Peer(Protocol):
    def serve(self, ready: Callable[[int], None]) -> None:
        """Serve forever; pass the port to `ready`."""

    def drive(self, port: int, callers: int, payload: bytes, measure: Callable[[Round], None]) -> None:
        """Connect, and let `measure` run rounds of calls."""


def _drive(
    runner: asyncio.Runner,
    call: Callable[[bytes], Awaitable[bytes]],
    callers: int,
    payload: bytes,
    measure: Callable[[Round], None],
) -> None:
    async def caller(count: int) -> None:
        for _ in range(count):
            if len(await call(payload)) != len(payload):
                raise AssertionError("a wrong answer")

    async def work(count: int) -> None:
        await asyncio.gather(*(caller(count) for _ in range(callers)))

    measure(lambda count: runner.run(work(count)))


class Grapeshot:
    """grapeshot.rpc: tasks call, and an async function answers."""

    def __init__(self, loop: str) -> None:
        self._loop_factory = _loops.loop_factory(loop)

    def serve(self, ready: Callable[[int], None]) -> None:
        from grapeshot import rpc

        async def echo(payload: bytes) -> bytes:
            return payload

        async def main() -> None:
            async with rpc.Server() as server:
                server.add("echo", echo)
                await server.listen(HOST, 0)
                ready(server.addresses[0][1])
                await server.serve_forever()

        with asyncio.Runner(loop_factory=self._loop_factory) as runner:
            runner.run(main())

    def drive(self, port: int, callers: int, payload: bytes, measure: Callable[[Round], None]) -> None:
        from grapeshot import rpc

        with asyncio.Runner(loop_factory=self._loop_factory) as runner:
            client = rpc.Client(HOST, port)
            _drive(runner, lambda payload: client.call("echo", payload), callers, payload, measure)
            runner.run(client.close())


class Coros:
    """grapeshot.coro.rpc: coros call, and a coro per call answers."""

    def serve(self, ready: Callable[[int], None]) -> None:
        from grapeshot import coro
        from grapeshot.coro import rpc

        def main() -> None:
            with rpc.Server() as server:
                server.add("echo", lambda payload: payload)
                server.listen(HOST, 0)
                ready(server.addresses[0][1])
                server.serve_forever()

        coro.run(main)

    def drive(self, port: int, callers: int, payload: bytes, measure: Callable[[Round], None]) -> None:
        from grapeshot import coro
        from grapeshot.coro import rpc

        def main() -> None:
            with rpc.Client(HOST, port) as client:

                def caller(count: int) -> None:
                    for _ in range(count):
                        if len(client.call("echo", payload)) != len(payload):
                            raise AssertionError("a wrong answer")

                def take(count: int) -> None:
                    coro.in_parallel([(caller, (count,))] * callers)

                measure(take)

        coro.run(main)


class Grpc:
    """grpc.aio without protobuf: bytes in, bytes out; the handler is an async function."""

    def serve(self, ready: Callable[[int], None]) -> None:
        import grpc

        async def echo(payload: bytes, _context: object) -> bytes:
            return payload

        async def main() -> None:
            server = grpc.aio.server()
            methods = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Bench", methods),))
            ready(server.add_insecure_port(f"{HOST}:0"))
            await server.start()
            await server.wait_for_termination()

        asyncio.run(main())

    def drive(self, port: int, callers: int, payload: bytes, measure: Callable[[Round], None]) -> None:
        import grpc

        async def connect() -> tuple[Any, Any]:
            channel = grpc.aio.insecure_channel(f"{HOST}:{port}")
            return channel, channel.unary_unary("/bench.Bench/Echo")

        with asyncio.Runner() as runner:
            channel, call = runner.run(connect())
            _drive(runner, call, callers, payload, measure)
            runner.run(channel.close())


class Rpyc:
    """rpyc: one thread that keeps as many asynchronous calls (`rpyc.async_`) under way as there are callers."""

    def serve(self, ready: Callable[[int], None]) -> None:
        import rpyc
        from rpyc.utils.server import ThreadedServer

        class Service(rpyc.Service):  # type: ignore[misc]
            def exposed_echo(self, payload: bytes) -> bytes:
                return payload

        server = ThreadedServer(Service, hostname=HOST, port=0)
        server._listen()  # clients connect once they know the port, so listen now, before start()
        ready(server.port)
        server.start()

    def drive(self, port: int, callers: int, payload: bytes, measure: Callable[[Round], None]) -> None:
        import rpyc

        connection = rpyc.connect(HOST, port)
        call = rpyc.async_(connection.root.echo)

        def take(count: int) -> None:
            under_way: collections.deque[Any] = collections.deque()
            for _ in range(count * callers):
                if len(under_way) == callers and len(under_way.popleft().value) != len(payload):
                    raise AssertionError("a wrong answer")
                under_way.append(call(payload))
            for answer in under_way:
                answer.wait()

        measure(take)
        connection.close()


class RpycThreads(Rpyc):
    """rpyc with a thread for each caller, and one that receives. Each caller makes one call after another."""

    def drive(self, port: int, callers: int, payload: bytes, measure: Callable[[Round], None]) -> None:
        import rpyc

        connection = rpyc.connect(HOST, port)
        echo = connection.root.echo
        receiver = rpyc.BgServingThread(connection)

        def caller(count: int) -> None:
            for _ in range(count):
                if len(echo(payload)) != len(payload):
                    raise AssertionError("a wrong answer")

        def take(count: int) -> None:
            threads = [threading.Thread(target=caller, args=(count,)) for _ in range(callers)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        measure(take)
        receiver.stop()
        connection.close()


PEERS: dict[str, Callable[[], Peer]] = {
    OURS: lambda: Grapeshot("grapeshot"),
    ON_ASYNCIO: lambda: Grapeshot("asyncio"),
    COROS: Coros,
    GRPC: Grpc,
    RPYC: Rpyc,
    RPYC_THREADS: RpycThreads,
}
_NEEDS = {
    OURS: "msgspec, grapeshot.rpc",
    ON_ASYNCIO: "msgspec, grapeshot.rpc",
    COROS: "msgspec, grapeshot.coro.rpc",
    GRPC: "grpc.aio",
    RPYC: "rpyc",
    RPYC_THREADS: "rpyc",
}


def why_missing(name: str) -> str | None:
    """Return why this peer cannot take part here, or None. A new process tries to import what the peer needs."""
    return _loops.why_it_fails(f"import {_NEEDS[name]}")


def available(names: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Return the usable names, and the reason why each of the others is not usable. The reasons are also printed."""
    return _loops.available(names, why_missing)
