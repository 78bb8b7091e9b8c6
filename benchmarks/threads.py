"""Measure loops in two threads of this process: `python -m benchmarks.threads KIND --loop LOOP`.

- `echo --style protocols`, `streams` or `coros`: each loop serves echoes and also runs clients. Both loops listen on
  one port (SO_REUSEPORT), so about half of the clients are served by the other loop. With `--apart` each loop has a
  port of its own, and its clients connect to that port. Prints `{"wall_us": per echo of both loops, "speedup": over one
  loop, ...}`.
- `items`: one loop passes items to the other through a queue. Prints `{"wall_us": per item, ...}`.
- `answers`: the same, but each item is answered before the next one is sent.

On grapeshot, `items` and `answers` use a `grapeshot.threads.Queue` of 100 places, from tasks or, with `--style coros`,
from coros. On other loops they use an `asyncio.Queue` in each loop, into which the other loop puts items with
`call_soon_threadsafe`. An `asyncio.Queue` has no limit here, because a loop cannot wait for a place in the queue of
another loop.

Threads run side by side only without the GIL, so `echo` needs an interpreter without it. A loop that lacks a feature
prints `{"unsupported": why}`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import multiprocessing
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

from benchmarks._loops import loop_factory, print_outcome
from benchmarks._machine import has_gil
from benchmarks.daemons import free_port

Loop = asyncio.AbstractEventLoop
SIZE, CLIENTS = 1024, 20
PLACES = 100


def _in_threads(run: Callable[[], object], threads: int, on_error: Callable[[], object]) -> None:
    """Call a function in each of several threads. Raise the first exception."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)
            on_error()

    running = [threading.Thread(target=work) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if errors:
        raise errors[0]


# ---------------------------------------------------------------- echoes


class Echo(asyncio.Protocol):
    """Send each piece back."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


class Client(asyncio.Protocol):
    """Send the next message as soon as the previous one has come back."""

    def __init__(self) -> None:
        # Each client has a message of its own, because threads that share an object contend for its reference count.
        self.message = bytes(SIZE)
        self.done = self.received = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.write(self.message)

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        if self.received == SIZE:
            self.received = 0
            self.done += 1
            self.transport.write(self.message)


def _listener(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(("127.0.0.1", port))
    sock.listen(1024)
    sock.setblocking(False)
    return sock


Counts = list[Callable[[], int]]


@contextlib.asynccontextmanager
async def _protocols(port: int, connect: Callable[[], object]) -> AsyncIterator[Counts]:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Echo, sock=_listener(port))
    connect()
    clients = [(await loop.create_connection(Client, "127.0.0.1", port))[1] for _ in range(CLIENTS)]
    yield [lambda client=client: client.done for client in clients]  # type: ignore[misc]
    for client in clients:
        client.transport.abort()
    server.close()


@contextlib.asynccontextmanager
async def _streams(port: int, connect: Callable[[], object]) -> AsyncIterator[Counts]:
    module: Any = asyncio
    if type(asyncio.get_running_loop()).__module__.startswith("grapeshot"):
        import grapeshot.streams as module  # other loops do not need it
    done = [0] * CLIENTS

    async def echo(reader: Any, writer: Any) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            writer.close()
            await writer.wait_closed()

    async def ask(number: int) -> None:
        reader, writer = await module.open_connection("127.0.0.1", port)
        message = bytes(SIZE)
        try:
            while True:
                writer.write(message)
                await reader.readexactly(SIZE)
                done[number] += 1
        finally:
            writer.transport.abort()

    server = await module.start_server(echo, sock=_listener(port))
    connect()
    tasks = [asyncio.ensure_future(ask(number)) for number in range(CLIENTS)]
    yield [lambda number=number: done[number] for number in range(CLIENTS)]  # type: ignore[misc]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    server.close()


@contextlib.asynccontextmanager
async def _coros(port: int, connect: Callable[[], object]) -> AsyncIterator[Counts]:
    if not type(asyncio.get_running_loop()).__module__.startswith("grapeshot"):
        raise NotImplementedError("coros need grapeshot's loop")
    from grapeshot import coro  # other loops do not need it

    done = [0] * CLIENTS

    def echo(sock: Any, address: object) -> None:
        with contextlib.suppress(ConnectionError):
            while data := sock.recv(65536):
                sock.sendall(data)

    def ask(number: int) -> None:
        message = bytes(SIZE)
        with coro.tcp_sock() as sock, contextlib.suppress(ConnectionError, EOFError):
            sock.connect(("127.0.0.1", port))
            while True:
                sock.sendall(message)
                sock.recv_exact(SIZE)
                done[number] += 1

    server = coro.serve(echo, sock=_listener(port))
    connect()
    clients = [coro.spawn(ask, number) for number in range(CLIENTS)]
    yield [lambda number=number: done[number] for number in range(CLIENTS)]  # type: ignore[misc]
    for client in clients:
        if not client.done():  # a client is done if the server that it uses has already stopped
            client.shutdown()
    await coro.run_sync(server.stop, 0)


STYLES = {"protocols": _protocols, "streams": _streams, "coros": _coros}


async def _serve(port: int, together: Any, args: argparse.Namespace) -> tuple[float, float]:
    """Return echoes per second of this loop's clients (another loop may answer them), and this thread's CPU usage."""
    loop = asyncio.get_running_loop()
    async with STYLES[args.style](port, together.wait) as counts:
        await asyncio.sleep(args.warm_up)
        before, began, cpu_s = sum(count() for count in counts), time.perf_counter(), time.thread_time()
        await asyncio.sleep(args.seconds)
        wall_s, cpu_s = time.perf_counter() - began, time.thread_time() - cpu_s
        rate = (sum(count() for count in counts) - before) / wall_s
        # Go on only when the other threads have measured: this loop may serve their clients.
        await loop.run_in_executor(None, together.wait)
    return rate, cpu_s / wall_s


def _rate(factory: Callable[[], Loop], threads: int, args: argparse.Namespace) -> tuple[float, float]:
    """Return the echoes per second of this many loops together, and the CPU time per echo in us."""
    together, rates, ports = threading.Barrier(threads), list[tuple[float, float]](), _ports(threads, args)

    def run() -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            rates.append(runner.run(_serve(ports.pop(), together, args)))

    _in_threads(run, threads, together.abort)
    return _total(rates)


def _rate_of_processes(processes: int, args: argparse.Namespace) -> tuple[float, float]:
    """Return the same as `_rate`, for this many processes with one loop each."""
    context = multiprocessing.get_context("spawn")
    together, rates, ports = context.Barrier(processes), context.SimpleQueue(), _ports(processes, args)
    children = [
        context.Process(target=_serve_alone, args=(ports.pop(), together, args, rates)) for _ in range(processes)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    if any(child.exitcode for child in children):
        raise RuntimeError("a process has failed")
    return _total([rates.get() for _ in children])


def _serve_alone(port: int, together: Any, args: argparse.Namespace, rates: Any) -> None:
    try:
        with asyncio.Runner(loop_factory=loop_factory(args.loop)) as runner:
            rates.put(runner.run(_serve(port, together, args)))
    except BaseException:
        together.abort()
        raise


def _ports(loops: int, args: argparse.Namespace) -> list[int]:
    """Return the port of each loop. Threads may pop their ports, because ``list.pop`` is atomic."""
    if not args.apart:
        return [free_port()] * loops
    free: set[int] = set()
    while len(free) < loops:
        free.add(free_port())
    return list(free)


def _total(rates: Sequence[tuple[float, float]]) -> tuple[float, float]:
    rate, busy = (sum(part) for part in zip(*rates, strict=True))
    return rate, busy / rate * 1e6


def echo(factory: Callable[[], Loop], args: argparse.Namespace) -> dict[str, float]:
    if has_gil():
        raise NotImplementedError("the GIL is enabled")
    one, cpu_us_of_one = _rate(factory, 1, args)
    two, cpu_us = _rate(factory, 2, args)
    processes, cpu_us_of_processes = _rate_of_processes(2, args)
    return {
        "wall_us": 1e6 / two,
        "rps": two,
        "speedup": two / one,
        "cpu_us": cpu_us,
        "rps_of_one": one,
        "cpu_us_of_one": cpu_us_of_one,
        "speedup_of_processes": processes / one,
        "cpu_us_of_processes": cpu_us_of_processes,
    }


# ---------------------------------------------------------------- items between loops


class _SharedQueue:
    """`grapeshot.threads.Queue`."""

    def __init__(self) -> None:
        from grapeshot import threads  # other loops do not need it

        queue: threads.Queue[int] = threads.Queue(PLACES)
        self.aput, self.aget, self.put, self.get = queue.aput, queue.aget, queue.put, queue.get

    def receive_here(self) -> None:
        """Nothing to do: any loop can receive."""


class _LoopQueue:
    """An `asyncio.Queue` of the receiver's loop."""

    def receive_here(self) -> None:
        self._loop, self._queue = asyncio.get_running_loop(), asyncio.Queue[int]()
        self.aget = self._queue.get

    async def aput(self, item: int) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, item)


def _pass(factory: Callable[[], Loop], args: argparse.Namespace, is_answered: bool) -> dict[str, float]:
    is_ours = type(probe := factory()).__module__.startswith("grapeshot")
    probe.close()
    if args.style == "coros" and not is_ours:
        raise NotImplementedError("coros need grapeshot's loop")
    there, back = (_SharedQueue() if is_ours else _LoopQueue() for _ in range(2))
    together = threading.Barrier(2)
    count, numbers = args.count, [1, 0]
    times: list[tuple[float, float]] = []

    async def send() -> None:
        for number in range(count):
            await there.aput(number)
            if is_answered:
                await back.aget()

    async def receive() -> None:
        for number in range(count):
            await there.aget()
            if is_answered:
                await back.aput(number)

    def send_in_coro() -> None:
        for number in range(count):
            there.put(number)  # type: ignore[union-attr]
            if is_answered:
                back.get()  # type: ignore[union-attr]

    def receive_in_coro() -> None:
        for number in range(count):
            there.get()  # type: ignore[union-attr]
            if is_answered:
                back.put(number)  # type: ignore[union-attr]

    async def main(number: int) -> None:
        (back if number == 0 else there).receive_here()
        together.wait()
        began, cpu_s = time.perf_counter(), time.thread_time()
        if args.style == "coros":
            from grapeshot import coro  # other loops do not need it

            await coro.run_sync(send_in_coro if number == 0 else receive_in_coro)
        else:
            await (send() if number == 0 else receive())
        times.append((time.perf_counter() - began, time.thread_time() - cpu_s))
        # Close this loop only when the other thread does not use it any more.
        await asyncio.get_running_loop().run_in_executor(None, together.wait)

    def run() -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main(numbers.pop()))

    _in_threads(run, 2, together.abort)
    wall_s, cpu_s = max(wall for wall, _ in times), sum(cpu for _, cpu in times)
    return {"wall_us": wall_s / count * 1e6, "cpu_us": cpu_s / count * 1e6, "rps": count / wall_s}


def items(factory: Callable[[], Loop], args: argparse.Namespace) -> dict[str, float]:
    return _pass(factory, args, is_answered=False)


def answers(factory: Callable[[], Loop], args: argparse.Namespace) -> dict[str, float]:
    return _pass(factory, args, is_answered=True)


KINDS = {"echo": echo, "items": items, "answers": answers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--loop", required=True, help="grapeshot, uvloop, asyncio or module:factory")
    parser.add_argument("--style", choices=STYLES, default="protocols", help="how the programs are written (protocols)")
    parser.add_argument("--apart", action="store_true", help="give each loop of echo a port of its own")
    parser.add_argument("--seconds", type=float, default=1.0, help="measured time of echo (1)")
    parser.add_argument("--warm-up", type=float, default=0.2, help="seconds before the measured time (0.2)")
    parser.add_argument("--count", type=int, default=20_000, help="how many items are passed (20000)")
    args = parser.parse_args()
    print_outcome(lambda: KINDS[args.kind](loop_factory(args.loop), args))


if __name__ == "__main__":
    # If `python -m` has just compiled this module, its constants are not immortal, and threads would contend for the
    # constants' reference counts. So import the module again: constants from a .pyc file are immortal.
    importlib.import_module("benchmarks.threads").main()
