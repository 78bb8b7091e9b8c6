"""The probes of the feature table: each function tests one feature, and raises if the loop lacks that feature.

Each probe runs in a process of its own (see features.py), and uses only the standard library and the loop's factory. A
probe tests behaviour, not names: a method that exists but raises NotImplementedError does not count. This module has
the list of probes and their common helpers.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import socket
import ssl
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
CAP_S = 5.0
certificate_folder = Path()  # with cert.pem and key.pem

Loop = asyncio.AbstractEventLoop
Probe = Callable[[Callable[[], Loop]], Any]
PROBES: dict[str, Probe] = {}


def sync_probe(function: Probe) -> Probe:
    """Register a probe that takes the loop's factory."""
    PROBES[function.__name__] = function
    return function


def probe(function: Callable[[Any], Coroutine[Any, Any, Any]]) -> None:
    """Register a probe: a coroutine function that takes the running loop. The probe fails if anything calls the loop's
    exception handler.
    """

    def run(factory: Callable[[], Loop]) -> None:
        contexts: list[dict[str, Any]] = []
        loop = factory()
        loop.set_exception_handler(lambda _loop, context: contexts.append(context))
        try:
            loop.run_until_complete(asyncio.wait_for(function(loop), 3 * CAP_S))
        finally:
            with contextlib.suppress(Exception):
                loop.close()
        assert not contexts, f"reported to the exception handler: {contexts[0].get('message')}"

    PROBES[function.__name__] = run


async def until(condition: Callable[[], Any]) -> None:
    give_up_s = time.monotonic() + CAP_S
    while not condition():
        assert time.monotonic() < give_up_s, "the condition has not come true"
        await asyncio.sleep(0.001)


def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the server's context and the client's."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate_folder / "cert.pem", certificate_folder / "key.pem")
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    return server, client


async def received(sock: socket.socket) -> bytes:
    """Return the next bytes that arrive at `sock`, or b"" at the end of the stream. `sock` is a socket that the loop
    does not manage.
    """
    sock.setblocking(False)
    give_up_s = time.monotonic() + CAP_S
    while True:
        try:
            return sock.recv(100)
        except BlockingIOError:
            assert time.monotonic() < give_up_s, "nothing arrives"
            await asyncio.sleep(0.001)


class Recorder(asyncio.Protocol):
    def __init__(self) -> None:
        self.data, self.events, self.transport = bytearray(), list[str](), None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.events.append("made")

    def data_received(self, data: bytes) -> None:
        self.data += data

    def eof_received(self) -> bool:
        self.events.append("eof")
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self.events.append("lost")


class Collector(Recorder):
    def eof_received(self) -> bool:
        self.events.append("eof")
        return False


class Echo(Collector):
    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


def port_of(server: Any) -> int:
    port: int = server.sockets[0].getsockname()[1]
    return port


async def exchange(loop: Any, factory: Any = Recorder, **options: Any) -> tuple[Any, Any, Any]:
    """Start an echo server, connect to it, and wait for one echo. Return the server, the transport and the protocol."""
    tls = options.pop("tls", None)
    server = await loop.create_server(Echo, HOST, 0, ssl=tls and tls[0])
    transport, protocol = await loop.create_connection(factory, HOST, port_of(server), ssl=tls and tls[1], **options)
    transport.write(b"hello")
    await until(lambda: protocol.data == b"hello")
    return server, transport, protocol


def every_probe() -> dict[str, Probe]:
    """Return all probes by name, in the order of the modules."""
    for module in ("connections", "channels", "scheduling"):
        importlib.import_module(f"{__name__}.{module}")
    return PROBES
