"""Programs set attributes on transports and servers, which are ordinary objects in asyncio. The loop must respect such
attributes.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import pickle
import weakref
from unittest import mock

import pytest
from process.children import CAT, Events
from support import HOST, Recorder, connected, iterations, pipe_ends, until
from tls import endpoints
from transports.udp.endpoints import Datagrams

pytestmark = pytest.mark.skip_on(uvloop="its transports take no attributes")

METHODS = {
    "stream": ("write", "writelines", "write_eof", "close", "abort", "is_closing", "pause_reading", "get_extra_info"),
    "tls": ("write", "writelines", "close", "abort", "is_closing", "pause_reading", "resume_reading", "get_extra_info"),
    "datagram": ("sendto", "close", "abort", "is_closing", "get_extra_info", "get_protocol"),
    "read pipe": ("close", "is_closing", "pause_reading", "resume_reading", "get_extra_info", "set_protocol"),
    "write pipe": ("write", "writelines", "write_eof", "close", "abort", "get_write_buffer_size", "get_extra_info"),
    "subprocess": ("close", "is_closing", "kill", "terminate", "send_signal", "get_pid", "get_pipe_transport"),
}
KINDS = tuple(METHODS)


@contextlib.asynccontextmanager
async def opened(loop, kind):
    """A transport of this kind, which is closed after the block."""
    with contextlib.ExitStack() as stack:
        if kind == "stream":
            transport, protocol, peer = await connected(loop)
            stack.enter_context(peer)
        elif kind == "tls":
            transport, protocol, peer = await endpoints.connected(loop)
            stack.enter_context(peer)
        elif kind == "datagram":
            transport, protocol = await loop.create_datagram_endpoint(Datagrams, local_addr=(HOST, 0))
        elif kind == "subprocess":
            transport, protocol = await loop.subprocess_exec(Events, *CAT, stderr=None)
        else:
            direction, _ = kind.split()
            ends = stack.enter_context(pipe_ends("pipe", direction))
            connect = {"read": loop.connect_read_pipe, "write": loop.connect_write_pipe}[direction]
            transport, protocol = await connect(Recorder, ends.file)
        try:
            yield transport
        finally:
            getattr(transport, "abort", transport.close)()
            await until(lambda: transport.get_protocol() is None or "lost" in protocol.events, "connection_lost")
            await iterations(2)


# ---------------------------------------------------------------- methods replaced on the object


@pytest.mark.parametrize("kind", KINDS)
async def test_attributes_are_kept(loop, kind):
    async with opened(loop, kind) as transport:
        with pytest.raises(AttributeError):
            _ = transport.note
        transport.note = "mine"
        assert transport.note == "mine"
        assert vars(transport)["note"] == "mine"
        vars(transport)["other"] = 1
        assert transport.other == 1
        del transport.note
        with pytest.raises(AttributeError):
            _ = transport.note
        with pytest.raises(AttributeError):
            del transport.note


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in METHODS.items() for name in names])
async def test_a_method_is_replaced_and_restored(loop, kind, name):
    async with opened(loop, kind) as transport:
        own = getattr(transport, name)
        with mock.patch.object(transport, name) as replaced:
            getattr(transport, name)("argument")
        replaced.assert_called_once_with("argument")
        assert getattr(transport, name) == own
        setattr(transport, name, lambda: "replaced")
        assert getattr(transport, name)() == "replaced"
        delattr(transport, name)
        assert getattr(transport, name) == own


@pytest.mark.parametrize("kind", KINDS)
async def test_a_method_is_replaced_on_the_class(loop, kind):
    async with opened(loop, kind) as transport:
        own = transport.is_closing()
        with mock.patch.object(type(transport), "is_closing", lambda self: self):
            assert transport.is_closing() is transport
        assert transport.is_closing() is own is False


@pytest.mark.parametrize("kind", KINDS)
async def test_attributes_outlive_the_connection(loop, kind):
    async with opened(loop, kind) as transport:
        transport.note = "mine"
        type_before = type(transport)
    assert transport.note == "mine"
    assert type(transport) is type_before


@pytest.mark.parametrize("kind", KINDS)
async def test_cycles_through_attributes_are_collected(loop, kind):
    async with opened(loop, kind) as transport:
        transport.me = transport
        transport.own_close = transport.close
        transport.close = transport.own_close
        reference = weakref.ref(transport)
    del transport
    gc.collect()
    await iterations(1)
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("kind", KINDS)
async def test_a_transport_cannot_be_pickled(loop, kind):
    async with opened(loop, kind) as transport:
        transport.note = "mine"
        with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
            pickle.dumps(transport)


# ---------------------------------------------------------------- weak references


@pytest.mark.parametrize("kind", KINDS)
async def test_weak_references_to_transports(loop, kind):
    async with opened(loop, kind) as transport:
        reference = weakref.ref(transport)
        by_transport = weakref.WeakKeyDictionary({transport: "known"})
        assert reference() is transport
    assert by_transport[transport] == "known"
    del transport
    gc.collect()
    await iterations(1)
    gc.collect()
    assert reference() is None
    assert not by_transport


async def test_weak_references_to_servers_handles_and_loops(loop):
    server = await loop.create_server(Recorder, HOST, 0)
    handles = [loop.call_soon(print), loop.call_later(1000, print)]
    references = [weakref.ref(thing) for thing in (server, *handles, loop)]
    assert [reference() for reference in references] == [server, *handles, loop]
    for handle in handles:
        handle.cancel()
    server.close()
    await server.wait_closed()
    del server, handle, handles
    await iterations(1)
    gc.collect()
    assert [reference() for reference in references] == [None, None, None, loop]


async def test_attributes_of_a_server(loop):
    server = await loop.create_server(Recorder, HOST, 0)
    own = server.close
    server.note = "mine"
    server.close = lambda: "replaced"
    assert (server.note, server.close()) == ("mine", "replaced")
    del server.close
    assert server.close == own
    server.close()
    await server.wait_closed()


# ---------------------------------------------------------------- which method is called


async def test_a_stream_writer_writes_through_the_replaced_method(loop):
    """telnetlib3 replaces `write` to compress the data, and tracing tools replace it to observe writes."""
    received = loop.create_future()

    async def receive(reader, writer):
        received.set_result(await reader.read())
        writer.close()

    server = await asyncio.start_server(receive, HOST, 0)
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    written = []
    own = writer.transport.write
    writer.transport.write = lambda data: (written.append(data), own(data.upper()))
    writer.write(b"hello")
    assert written == [b"hello"]
    del writer.transport.write
    writer.write(b"bye")
    assert written == [b"hello"]
    writer.close()
    assert await received == b"HELLObye"
    await writer.wait_closed()
    server.close()
    await server.wait_closed()


async def test_a_method_replaced_inside_a_callback_is_used_in_the_rest_of_the_callback(loop):
    class Protocol(Recorder):
        def data_received(self, data):
            super().data_received(data)
            own = self.transport.write
            self.transport.write(b"one ")
            self.transport.write = lambda data: own(data.upper())
            self.transport.write(b"two ")
            del self.transport.write
            self.transport.write(b"three")

    transport, protocol, peer = await connected(loop, Protocol)
    with peer:
        await peer.send(b"x")
        assert await peer.read_exactly(13) == b"one TWO three"
        transport.close()
        await until(lambda: protocol.is_lost, "connection_lost")


async def test_a_full_stream_reader_pauses_through_the_replaced_method(loop):
    reader = asyncio.StreamReader(limit=10, loop=loop)
    transport, _, peer = await connected(loop, lambda: asyncio.StreamReaderProtocol(reader))
    with peer:
        own, calls = transport.pause_reading, []
        transport.pause_reading = lambda: (calls.append("pause"), own())
        transport.resume_reading = lambda: calls.append("resume")
        await peer.send(b"x" * 100)
        await until(lambda: calls, "the reader to be full")
        assert calls == ["pause"]
        assert not transport.is_reading()
        del transport.pause_reading
        await reader.readexactly(100)
        assert calls == ["pause", "resume"]
        del transport.resume_reading
        transport.close()
        await iterations(3)


async def test_a_subprocess_writes_through_a_replaced_method_of_its_pipe(loop):
    process = await asyncio.create_subprocess_exec(*CAT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    pipe = process.stdin.transport
    own = pipe.write
    pipe.write = lambda data: own(data.upper())
    process.stdin.write(b"hello")
    closed = []
    own_close = pipe.close
    pipe.close = lambda: (closed.append("pipe"), own_close())
    process.stdin.close()
    assert closed == ["pipe"]
    assert await process.stdout.read() == b"HELLO"
    assert await process.wait() == 0


async def test_close_of_a_subprocess_closes_its_pipes_through_replaced_methods(loop):
    transport, protocol = await loop.subprocess_exec(Events, *CAT, stderr=None)
    pipe, closed = transport.get_pipe_transport(0), []
    own = pipe.close
    pipe.close = lambda: (closed.append("pipe"), own())
    transport.close()
    assert closed == ["pipe"]
    await protocol.wait_lost()


@pytest.mark.parametrize("name", ["close", "abort"])
async def test_a_server_ends_its_clients_through_replaced_methods(loop, name):
    made = []

    class Protocol(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            made.append(self)

    server = await loop.create_server(Protocol, HOST, 0)
    if not hasattr(server, "close_clients"):
        server.close()
        pytest.skip("new in 3.13")
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    await until(lambda: made, "the connection")
    transport, calls = made[0].transport, []
    own = getattr(transport, name)
    setattr(transport, name, lambda: (calls.append(name), own()))
    getattr(server, f"{name}_clients")()
    assert calls == [name]
    await until(lambda: made[0].is_lost, "connection_lost")
    writer.close()
    server.close()
    await server.wait_closed()


async def test_sendfile_uses_the_replaced_methods(loop, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"content")
    transport, protocol, peer = await connected(loop)
    with peer, path.open("rb") as file:
        calls = []
        for name in ("pause_reading", "resume_reading"):
            own = getattr(transport, name)
            setattr(transport, name, lambda own=own, name=name: (calls.append(name), own()))
        assert await loop.sendfile(transport, file) == 7
        assert calls == ["pause_reading", "resume_reading"]
        assert await peer.read_exactly(7) == b"content"
        transport.close()
        await until(lambda: protocol.is_lost, "connection_lost")


async def test_a_datagram_is_sent_through_the_replaced_method(loop):
    transport, protocol = await loop.create_datagram_endpoint(Datagrams, local_addr=(HOST, 0))
    own = transport.sendto
    transport.sendto = lambda data, addr: own(data.upper(), addr)
    transport.sendto(b"hello", transport.get_extra_info("sockname"))
    await until(lambda: protocol.received, "the datagram")
    assert protocol.data == [b"HELLO"]
    transport.close()
    await until(lambda: protocol.is_lost, "connection_lost")
    await iterations(2)
