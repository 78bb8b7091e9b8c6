"""TLS connections leave nothing behind: no reference cycles, and no memory that grows with their number."""

from __future__ import annotations

import asyncio
import gc
import os
import ssl
import textwrap
import weakref

import pytest
from support import HOST, Echo, Recorder, run_script, until
from tls.contexts import HOSTNAME, authority, certificate, client_context, server_context
from tls.endpoints import client_of, connected


@pytest.mark.skip_on(asyncio="leaves cycles", uvloop="leaves cycles")
async def test_no_cycles(loop, serve):
    """After connection_lost the objects of a connection are freed without the collector, on both sides."""
    gone = []

    class Watched(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            gone.extend((weakref.ref(transport), weakref.ref(self)))

    server = await serve(Watched, HOST, 0, ssl=server_context())
    transport, protocol = await loop.create_connection(
        Watched, *server.sockets[0].getsockname(), ssl=client_context(), server_hostname=HOSTNAME
    )
    gone.append(weakref.ref(transport.get_extra_info("ssl_object")))
    await until(lambda: len(gone) == 5, "both sides")
    gc.collect()
    gc.disable()
    try:
        transport.close()
        del transport, protocol
        await until(lambda: not any(ref() for ref in gone), "everything to go")
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["handshake fails", "time limit"])
@pytest.mark.skip_on(asyncio="leaves cycles", uvloop="leaves cycles")
async def test_no_cycles_after_a_failure(loop, serve, kind):
    made = []

    def factory():
        protocol = Recorder()
        made.append(weakref.ref(protocol))
        return protocol

    limit = {"ssl_handshake_timeout": 0.05} if kind == "time limit" else {}
    server = await serve(factory, HOST, 0, ssl=server_context(), **limit)
    gc.collect()
    gc.disable()
    try:
        if kind == "time limit":
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        else:
            with pytest.raises(ssl.SSLError):
                await client_of(server, ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
            writer = None
        await until(lambda: made and made[0]() is None, "the protocol to go")
    finally:
        gc.enable()
    if writer is not None:
        writer.close()
        await writer.wait_closed()


async def test_a_cycle_through_the_transport_is_collected(loop):
    class Holder(Recorder):
        pass

    transport, protocol, peer = await connected(loop, Holder)
    protocol.itself, protocol.kept = protocol, transport
    gone, lost = weakref.ref(protocol), protocol.lost_with
    transport.abort()
    await until(lambda: lost, "connection_lost")
    peer.close()
    del transport, protocol
    gc.collect()
    assert gone() is None


@pytest.fixture
def files(tmp_path):
    """The server's certificate with its key, and the authority, as files."""
    server, trusted = tmp_path / "server.pem", tmp_path / "authority.pem"
    certificate(HOSTNAME).private_key_and_cert_chain_pem.write_to_path(str(server))
    authority().cert_pem.write_to_path(str(trusted))
    return str(server), str(trusted)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="no /proc")
def test_flat_with_many_connections(files):
    """The resident memory after 300 and after 900 connections is the same, within noise."""
    code = f"""
        import asyncio, os, ssl

        server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server_side.load_cert_chain({files[0]!r})
        client_side = ssl.create_default_context(cafile={files[1]!r})

        def resident():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

        class Echo(asyncio.Protocol):
            def connection_made(self, transport):
                self.transport = transport

            def data_received(self, data):
                self.transport.write(data)

        async def batch(address, count):
            for _ in range(count // 10):
                await asyncio.gather(*(one(address, number) for number in range(10)))

        async def one(address, number):
            reader, writer = await asyncio.open_connection(*address, ssl=client_side, server_hostname={HOSTNAME!r})
            writer.write(b"x" * 1000)
            await reader.readexactly(1000)
            if number % 2:
                writer.transport.abort()
            else:
                writer.close()
            try:
                await writer.wait_closed()
            except OSError:
                pass

        async def main():
            server = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", 0, ssl=server_side)
            address = server.sockets[0].getsockname()
            await batch(address, 300)
            before = resident()
            await batch(address, 600)
            print(resident() - before)
            server.close()

        loop = new_event_loop()
        loop.run_until_complete(main())
        loop.close()
    """
    grown = int(run_script("grapeshot", textwrap.dedent(code)))
    # A connection takes about 50 KiB while it is open, so 600 leaked connections would take 30 MB.
    assert grown < 2_000_000


def test_dropped_with_the_loop_warns(files):
    """If both ends of a TLS connection are open when their loop is freed, each of the four transports gives a warning:
    at each end, the TLS transport and the transport below it.
    """
    code = f"""
        import asyncio, gc, ssl, warnings

        server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server_side.load_cert_chain({files[0]!r})
        client_side = ssl.create_default_context(cafile={files[1]!r})

        async def main():
            loop = asyncio.get_running_loop()
            made = loop.create_future()

            class Server(asyncio.Protocol):
                def connection_made(self, transport):
                    made.set_result(None)

            server = await loop.create_server(Server, "127.0.0.1", 0, ssl=server_side)
            await loop.create_connection(
                asyncio.Protocol, *server.sockets[0].getsockname(), ssl=client_side, server_hostname={HOSTNAME!r}
            )
            await made
            server.close()

        loop = new_event_loop()
        loop.run_until_complete(main())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loop.close()
            del loop
            gc.collect()
        for warning in caught:
            if "unclosed transport" in str(warning.message):  # the socket object may be warned about as well
                print(warning.category.__name__, str(warning.message).split()[2])
    """
    warned = sorted(run_script("grapeshot", textwrap.dedent(code)).split("\n")[:-1])
    assert warned == ["ResourceWarning <SSLTransport"] * 2 + ["ResourceWarning <StreamTransport"] * 2


@pytest.mark.parametrize("kind", ["asyncio", "grapeshot"])
def test_memory_that_is_lent_to_openssl_cannot_be_taken(files, kind):
    """OpenSSL's message callback runs while memory is lent to OpenSSL. The callback cannot get a view of that memory
    through the objects that gc.get_objects() returns.
    """
    code = f"""
        import asyncio, gc, ssl

        server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server_side.load_cert_chain({files[0]!r})
        client_side = ssl.create_default_context(cafile={files[1]!r})
        kept, tracked, views, calls = [], [], [], 0

        def look(_connection, _direction, *_rest):
            global calls
            calls += 1
            objects = gc.get_objects()
            tracked.extend(thing for thing in objects if type(thing).__name__ == "_BufferView")
            for thing in objects:
                if type(thing) is tuple:
                    kept.extend(item for item in thing if type(item).__name__ == "_BufferView")
            try_all()

        def try_all():
            for thing in kept:
                try:
                    views.append(memoryview(thing))
                except BufferError:
                    pass

        server_side._msg_callback = client_side._msg_callback = look

        class Echo(asyncio.Protocol):
            def connection_made(self, transport):
                self.transport = transport

            def data_received(self, data):
                self.transport.write(data)

        class Client(asyncio.BufferedProtocol):
            def __init__(self):
                self.buffer, self.data, self.done = bytearray(5000), b"", asyncio.Event()

            def get_buffer(self, size):
                return memoryview(self.buffer)

            def buffer_updated(self, size):
                self.data += self.buffer[:size]
                if len(self.data) == 40_000:
                    self.done.set()

        async def main():
            gc.collect()
            gc.freeze()
            loop = asyncio.get_running_loop()
            server = await loop.create_server(Echo, "127.0.0.1", 0, ssl=server_side)
            transport, protocol = await loop.create_connection(
                Client, *server.sockets[0].getsockname(), ssl=client_side, server_hostname={HOSTNAME!r}
            )
            transport.write(b"x" * 40_000)
            await protocol.done.wait()
            assert protocol.data == b"x" * 40_000
            transport.write(b"y" * 1000)
            try_all()
            transport.abort()
            server.close()
            await server.wait_closed()
            try_all()

        loop = new_event_loop()
        loop.run_until_complete(main())
        loop.close()
        server_side._msg_callback = client_side._msg_callback = None
        print(calls > 5, len(tracked), len(views), bool(kept))
    """
    found = run_script(kind, textwrap.dedent(code)).split()
    assert found[:3] == ["True", "0", "0"]


async def test_the_loop_keeps_a_connection_alive(loop, serve):
    """An idle connection stays open although the program keeps no reference to its transports."""
    server = await serve(Echo, HOST, 0, ssl=server_context())
    with await client_of(server) as peer:
        gc.collect()
        await peer.write(b"still there")
        assert await peer.read_exactly(11) == b"still there"
        await peer.unwrap()
