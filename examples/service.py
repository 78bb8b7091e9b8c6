"""A service as you would run it in production: limits, timeouts, metrics, a back door, and a graceful shutdown.

    python examples/service.py --port 8080 --backdoor /run/user/$UID/service.bd
    curl http://127.0.0.1:8080/hello/you            # also /wait/0.5, /large and /metrics (for Prometheus)
    python -m grapeshot attach /run/user/$UID/service.bd
    kill -TERM PID                                  # finishes the requests under way, for at most --deadline seconds

The service implements only a small part of HTTP/1.1, on asyncio's streams. For real HTTP, use a server such as uvicorn;
the rest of the program stays the same.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import signal
from typing import TypeAlias

import grapeshot
from grapeshot.insight import backdoor

HEAD_LEN = 16 * 1024
BODY_LEN = 64 * 1024
LARGE_LEN = 8 * 1024 * 1024

Answer: TypeAlias = tuple[int, bytes]


class BadRequestError(Exception):
    """An invalid request. The client gets the status and the text, and then the connection is closed."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Service:
    """Serves the connections, counts the answers, and shuts down gracefully."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.is_stopping = False
        self.answers: collections.Counter[int] = collections.Counter()
        self.under_way: set[asyncio.Task[None]] = set()
        self.idle: set[asyncio.StreamWriter] = set()

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client until it disconnects or misbehaves, or the service stops."""
        task = asyncio.current_task()
        assert task is not None
        self.under_way.add(task)
        try:
            while not self.is_stopping and await self.request(reader, writer):
                pass
        except BadRequestError as bad:
            with contextlib.suppress(TimeoutError, ConnectionError):
                await self.answer(writer, bad.status, f"{bad}\n".encode(), is_last=True)
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError):
            pass  # the client is too slow, or has disconnected
        except asyncio.CancelledError:
            if not self.is_stopping:
                raise
            # stop() has cancelled this task at the deadline. If the exception left the task, asyncio 3.11 would log it.
        finally:
            self.under_way.discard(task)
            self.idle.discard(writer)
            # Discard data that the client does not read. Otherwise the connection might never end.
            if writer.transport.get_write_buffer_size():
                writer.transport.abort()
            writer.close()

    async def request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Read and answer one request; return whether another one may follow."""
        self.idle.add(writer)
        async with asyncio.timeout(self.options.idle_timeout):
            first = await reader.read(1)
        self.idle.discard(writer)
        if not first:
            return False
        try:
            async with asyncio.timeout(self.options.request_timeout):
                method, path, is_last = await self.read_request(first, reader)
        except TimeoutError:
            raise BadRequestError(408, "the request took too long") from None
        if method != "GET":
            raise BadRequestError(405, "only GET is supported")
        status, body = await self.look_up(path)
        is_last = is_last or self.is_stopping
        await self.answer(writer, status, body, is_last=is_last)
        return not is_last

    async def read_request(self, first: bytes, reader: asyncio.StreamReader) -> tuple[str, str, bool]:
        """Return the method, the path, and whether the client asks to close the connection after the answer."""
        try:
            head = first + await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise BadRequestError(431, "the head is too long") from None
        line, *fields = head.decode("latin-1").split("\r\n")[:-2]
        words = line.split(" ")
        if len(words) != 3 or words[2] not in ("HTTP/1.0", "HTTP/1.1") or not words[1].startswith("/"):
            raise BadRequestError(400, "this is not an HTTP request")
        headers = {name.strip().lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
        length = headers.get("content-length", "0")
        is_number = length.isascii() and length.isdigit() and len(length) < 20  # int() refuses very long numbers
        if "transfer-encoding" in headers or not is_number or int(length) > BODY_LEN:
            raise BadRequestError(413, "the body is too long")
        await reader.readexactly(int(length))
        return words[0], words[1], words[2] == "HTTP/1.0" or headers.get("connection", "").lower() == "close"

    async def look_up(self, path: str) -> Answer:
        """Return the status and body for a path. This is the actual work of the service."""
        _, route, *rest = path.split("/")
        if route == "hello" and rest:
            return 200, f"Hello, {rest[0]}!\n".encode()
        if route == "wait" and rest:  # in place of a database query
            with contextlib.suppress(ValueError):
                await asyncio.sleep(min(float(rest[0]), 60))
                return 200, b"done\n"
        if route == "large":
            return 200, bytes(LARGE_LEN)
        if route == "metrics":
            return 200, self.metrics()
        return 404, b"not found\n"

    async def answer(self, writer: asyncio.StreamWriter, status: int, body: bytes, *, is_last: bool) -> None:
        """Send an answer. Raise TimeoutError if the client does not read it in time."""
        self.answers[status] += 1
        ending = "Connection: close\r\n" if is_last else ""
        writer.write(f"HTTP/1.1 {status} -\r\n{ending}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        async with asyncio.timeout(self.options.send_timeout):
            await writer.drain()

    def metrics(self) -> bytes:
        """Return the loop's statistics and the service's own numbers in the format of Prometheus."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, grapeshot.Loop)
        statistics = loop.statistics()
        lines = []
        for field in dataclasses.fields(statistics):
            value = getattr(statistics, field.name)
            if isinstance(value, (int, float)):
                is_gauge = field.name in statistics.GAUGES
                name = f"grapeshot_{field.name}" if is_gauge else f"grapeshot_{field.name}_total"
                lines += [f"# TYPE {name} {'gauge' if is_gauge else 'counter'}", f"{name} {value}"]
        lines += ["# TYPE service_connections gauge", f"service_connections {len(self.under_way)}"]
        lines += ["# TYPE service_answers_total counter"]
        lines += [f'service_answers_total{{status="{status}"}} {count}' for status, count in self.answers.items()]
        return "\n".join([*lines, ""]).encode()

    async def stop(self) -> None:
        """Let the requests under way finish within the deadline. Close idle connections at once."""
        self.is_stopping = True
        for writer in self.idle:
            writer.close()
        tasks = list(self.under_way)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self.options.deadline)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def serve(options: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, grapeshot.Loop)
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    loop.set_limits(connections=options.limit)
    service = Service(options)
    async with contextlib.AsyncExitStack() as afterwards:
        if options.backdoor:
            afterwards.enter_context(backdoor.serve(options.backdoor, namespace={"service": service}))
        server = await asyncio.start_server(service.connection, options.host, options.port, limit=HEAD_LEN)
        name, bound = server.sockets[0].getsockname()[:2]
        print(f"listening on {name}:{bound}", flush=True)
        await stopped.wait()
        server.close()  # from now on, new clients are refused
        await service.stop()
    print("stopped", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="A service with limits, metrics, a back door and a graceful shutdown.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080, help="0 for any free port")
    parser.add_argument("--backdoor", metavar="PATH", help="open a back door at this path")
    parser.add_argument("--limit", type=int, default=1000, help="the most connections; further clients have to wait")
    parser.add_argument("--idle-timeout", type=float, default=60.0, help="seconds to wait for the next request")
    parser.add_argument("--request-timeout", type=float, default=10.0, help="seconds to wait for the rest of a request")
    parser.add_argument("--send-timeout", type=float, default=30.0, help="seconds to wait until an answer is sent")
    parser.add_argument("--deadline", type=float, default=10.0, help="seconds for requests to finish at shutdown")
    grapeshot.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
