"""Probes of connections and servers: TCP and TLS."""

from __future__ import annotations

import asyncio
import asyncio.trsock
import contextlib
import socket
from typing import Any

from benchmarks.probes import (
    CAP_S,
    HOST,
    Echo,
    Recorder,
    contexts,
    exchange,
    port_of,
    probe,
    received,
    sync_probe,
    until,
)

# ---------------------------------------------------------------- connections


class Buffered(asyncio.BufferedProtocol):
    def __init__(self) -> None:
        self.buffer, self.data, self.events = bytearray(100), bytearray(), list[str]()

    def get_buffer(self, sizehint: int) -> bytearray:
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data += self.buffer[:nbytes]

    def connection_lost(self, exc: Exception | None) -> None:
        self.events.append("lost")


@probe
async def tcp(loop: Any) -> None:
    for factory in (Recorder, Buffered):
        server, transport, protocol = await exchange(loop, factory)
        transport.close()
        await until(lambda protocol=protocol: "lost" in protocol.events)
        server.close()


@probe
async def transport_types(loop: Any) -> None:
    _, transport, _ = await exchange(loop)
    sock = transport.get_extra_info("socket")
    assert isinstance(transport, asyncio.Transport), f"{type(transport).__name__} is not an asyncio.Transport"
    assert isinstance(sock, asyncio.trsock.TransportSocket), f"{type(sock).__name__} is not a TransportSocket"


@probe
async def half_close(loop: Any) -> None:
    protocol = Recorder()
    server = await loop.create_server(lambda: protocol, HOST, 0)
    with socket.create_connection((HOST, port_of(server))) as peer:
        peer.shutdown(socket.SHUT_WR)
        await until(lambda: "eof" in protocol.events)
        protocol.transport.write(b"after the end")
        assert await received(peer) == b"after the end"
        protocol.transport.write_eof()
        assert await received(peer) == b""


@probe
async def happy_eyeballs(loop: Any) -> None:
    server = await loop.create_server(Echo, HOST, 0)
    await loop.create_connection(Recorder, "localhost", port_of(server), happy_eyeballs_delay=0.2, interleave=1)


@probe
async def all_errors(loop: Any) -> None:
    try:
        await loop.create_connection(Recorder, "localhost", 1, all_errors=True)
    except ExceptionGroup:
        return
    raise AssertionError("no ExceptionGroup")


@probe
async def close_clients(loop: Any) -> None:
    server, transport, protocol = await exchange(loop)
    server.close()
    await asyncio.sleep(0.01)
    assert "lost" not in protocol.events
    server.close_clients()
    await until(lambda: "eof" in protocol.events)
    transport.close()
    server, _, protocol = await exchange(loop)
    server.abort_clients()
    await until(lambda: protocol.events[-1] != "made")


@probe
async def keep_alive(loop: Any) -> None:
    server = await loop.create_server(Echo, HOST, 0, keep_alive=True)
    assert server.sockets[0].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


@sync_probe
def factory_fails(factory: Any) -> None:
    """If the protocol factory raises, the client's connection is closed, and the server goes on."""
    loop = factory()
    loop.set_exception_handler(lambda _loop, _context: None)

    def fail() -> Any:
        raise RuntimeError("no protocol")

    async def main() -> None:
        server = await loop.create_server(fail, HOST, 0)
        for _ in range(2):
            reader, writer = await asyncio.open_connection(HOST, port_of(server))
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), CAP_S) == b""
            writer.close()

    loop.run_until_complete(main())


# ---------------------------------------------------------------- TLS


@probe
async def tls(loop: Any) -> None:
    _, transport, protocol = await exchange(loop, tls=contexts())
    assert transport.get_extra_info("cipher")
    transport.close()
    await until(lambda: protocol.events[-1] == "lost")


@probe
async def start_tls(loop: Any) -> None:
    server_context, client_context = contexts()

    async def upgrade(reader: Any, writer: Any) -> None:
        writer.write(await reader.readline())
        await writer.start_tls(server_context)
        writer.write((await reader.readline()).upper())

    server = await asyncio.start_server(upgrade, HOST, 0)
    reader, writer = await asyncio.open_connection(HOST, port_of(server))
    writer.write(b"starttls\n")
    assert await reader.readline() == b"starttls\n"
    await writer.start_tls(client_context)
    writer.write(b"secret\n")
    assert await reader.readline() == b"SECRET\n"


@probe
async def tls_in_tls(loop: Any) -> None:
    """A client's TLS connection through a proxy that is itself reached by TLS."""
    server_context, client_context = contexts()
    server = await loop.create_server(Echo, HOST, 0, ssl=server_context)

    async def proxy(reader: Any, writer: Any) -> None:
        inner_reader, inner_writer = await asyncio.open_connection(HOST, port_of(server))

        async def pump(source: Any, sink: Any) -> None:
            while data := await source.read(65536):
                sink.write(data)

        with contextlib.suppress(OSError):
            await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))

    outer = await asyncio.start_server(proxy, HOST, 0, ssl=server_context)
    transport, _ = await loop.create_connection(asyncio.Protocol, HOST, port_of(outer), ssl=client_context)
    protocol = Recorder()
    inner = await loop.start_tls(transport, protocol, client_context, server_hostname="localhost")
    inner.write(b"through two")
    await until(lambda: protocol.data == b"through two")
