"""BufferedProtocol, set_protocol, callbacks that call the transport."""

from __future__ import annotations

import asyncio
import random

import pytest
from support import WAYS, BufferedRecorder, Recorder, connected, iterations, until


async def drop(*protocols):
    for protocol in protocols:
        if protocol.transport is not None:
            protocol.transport.abort()
            await until(lambda p=protocol: p.is_lost)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("size", [1, 7, 4096, 1 << 20])
async def test_buffered_protocol(loop, how, size):
    data = random.Random(size).randbytes(2000 if size < 100 else 500_000)
    _, protocol, peer = await connected(loop, lambda: BufferedRecorder(size), how)
    with peer:
        await peer.send(data)
        await until(lambda: len(protocol.data) == len(data))
        assert protocol.data == data
        peer.close()
        await until(lambda: protocol.is_lost)
        assert protocol.events == ["made", "data", "eof", "lost"]
        assert all(isinstance(hint, int) for hint in protocol.hints)


async def test_buffers_of_several_types(loop):
    class Changing(BufferedRecorder):
        calls = 0

        def get_buffer(self, sizehint):
            self.calls += 1
            if self.calls % 2:
                return memoryview(self.buffer)[: self.calls % 13 + 1]
            return self.buffer

    data = random.Random(5).randbytes(100_000)
    _, protocol, peer = await connected(loop, Changing)
    with peer:
        await peer.send(data)
        await until(lambda: len(protocol.data) == len(data))
        assert protocol.data == data
        await drop(protocol)


@pytest.mark.parametrize(
    ("buffer", "error"), [(bytearray(), RuntimeError), (b"readonly", (BufferError, TypeError)), (None, TypeError)]
)
@pytest.mark.skip_on(uvloop="raises RuntimeError in all cases")
async def test_wrong_buffers(loop, reported, buffer, error):
    class Wrong(BufferedRecorder):
        def get_buffer(self, sizehint):
            return buffer

    transport, protocol, peer = await connected(loop, Wrong)
    with peer:
        await peer.send(b"data")
        await until(lambda: protocol.is_lost)
        [context] = reported
        assert isinstance(context["exception"], error)
        assert context["message"].startswith("Fatal")
        assert context["transport"] is transport
        assert context["protocol"] is protocol
        assert protocol.data == b""
        assert await peer.is_ended()
        assert protocol.lost_with[0] is context["exception"]
        reported.clear()


@pytest.mark.xfail_on(uvloop="its message differs")
async def test_the_message_for_an_empty_buffer(loop, reported):
    class Empty(BufferedRecorder):
        def get_buffer(self, sizehint):
            return bytearray()

    _, protocol, peer = await connected(loop, Empty)
    with peer:
        await peer.send(b"data")
        await until(lambda: protocol.is_lost)
        assert "get_buffer() returned an empty buffer" in str(reported.exceptions[0])
        reported.clear()


@pytest.mark.skip_on(uvloop="holds a view of the buffer")
async def test_the_buffer_is_free_in_buffer_updated(loop):
    """No view of the buffer exists when buffer_updated runs, so the protocol may resize the buffer."""

    class Resizing(BufferedRecorder):
        def buffer_updated(self, nbytes):
            super().buffer_updated(nbytes)
            self.buffer.extend(bytes(10))

    _, protocol, peer = await connected(loop, Resizing)
    with peer:
        await peer.send(b"x" * 50_000)
        await until(lambda: len(protocol.data) == 50_000)
        await drop(protocol)


async def test_get_and_set_protocol(loop):
    transport, first, peer = await connected(loop)
    second = Recorder()
    with peer:
        assert transport.get_protocol() is first
        await peer.send(b"one")
        await until(lambda: first.data == b"one")
        transport.set_protocol(second)
        assert transport.get_protocol() is second
        await peer.send(b"two")
        await until(lambda: second.data == b"two")
        transport.close()
        await until(lambda: second.is_lost)
        assert first.data == b"one"
        assert not first.is_lost
        assert second.events == ["data", "lost"]


@pytest.mark.parametrize("order", [(Recorder, BufferedRecorder), (BufferedRecorder, Recorder)])
async def test_switch_between_kinds(loop, order):
    transport, first, peer = await connected(loop, order[0])
    second = order[1]()
    second.events.append("made")
    with peer:
        await peer.send(b"one")
        await until(lambda: first.data == b"one")
        transport.set_protocol(second)
        await peer.send(b"two")
        await until(lambda: second.data == b"two")
        transport.set_protocol(first)
        await peer.send(b"three")
        await until(lambda: first.data == b"onethree")
        transport.close()
        await until(lambda: first.is_lost)


@pytest.mark.parametrize("kind", [Recorder, BufferedRecorder])
async def test_set_protocol_inside_the_callback(loop, kind):
    class Upgrading(Recorder):
        def data_received(self, data):
            super().data_received(data)
            self.transport.set_protocol(second)

    transport, first, peer = await connected(loop, Upgrading)
    second = kind()
    second.events.append("made")
    with peer:
        await peer.send(b"upgrade")
        await until(lambda: first.data)
        await peer.send(b"upgraded")
        await until(lambda: second.data == b"upgraded")
        assert first.data == b"upgrade"
        transport.close()
        await until(lambda: second.is_lost)


async def test_set_protocol_with_flow_control_under_way(loop):
    transport, first, peer = await connected(loop, small=True)
    second = Recorder()
    with peer:
        transport.write(bytes(1 << 20))
        assert first.events == ["made", "pause"]
        transport.set_protocol(second)
        await peer.read_exactly(1 << 20)
        await until(lambda: second.events == ["resume"])
        transport.close()
        await until(lambda: second.is_lost)


async def test_a_method_set_on_the_instance(loop):
    class Own(Recorder):
        def __init__(self):
            super().__init__()
            self.seen = []
            self.data_received = self.seen.append

    _, protocol, peer = await connected(loop, Own)
    with peer:
        await peer.send(b"a")
        await until(lambda: protocol.seen == [b"a"])
        assert protocol.data == b""
        await drop(protocol)


async def test_a_duck_typed_protocol(loop):
    class Duck:
        def __init__(self):
            self.data = b""
            self.lost = False

        def connection_made(self, transport):
            self.transport = transport

        def data_received(self, data):
            self.data += data

        def eof_received(self):
            return False

        def connection_lost(self, exc):
            self.lost = True

    transport, protocol, peer = await connected(loop, Duck)
    with peer:
        await peer.send(b"quack")
        await until(lambda: protocol.data == b"quack")
        peer.close()
        await until(lambda: protocol.lost)


@pytest.mark.skip_on(asyncio="wants an asyncio.BufferedProtocol")
async def test_a_duck_typed_protocol_with_buffers(loop):
    """A class with get_buffer() and buffer_updated(), and without data_received()."""

    class Duck(asyncio.BaseProtocol):
        def __init__(self):
            self.data = b""
            self.lost = False
            self.buffer = bytearray(3)

        def get_buffer(self, sizehint):
            return self.buffer

        def buffer_updated(self, nbytes):
            self.data += self.buffer[:nbytes]

        def eof_received(self):
            return False

        def connection_lost(self, exc):
            self.lost = True

    transport, protocol, peer = await connected(loop, Duck)
    with peer:
        await peer.send(b"quack")
        await until(lambda: protocol.data == b"quack")
        second = Recorder()
        transport.set_protocol(second)
        await peer.send(b"plain")
        await until(lambda: second.data == b"plain")
        transport.set_protocol(protocol)
        peer.close()
        await until(lambda: protocol.lost)


# ---------------------------------------------------------------- re-entrancy


class Acting(Recorder):
    """Acts on its transport inside data_received."""

    def __init__(self, act):
        super().__init__()
        self.act = act

    def data_received(self, data):
        super().data_received(data)
        self.act(self)


@pytest.mark.parametrize("name", ["close", "abort"])
async def test_end_inside_data_received(loop, name):
    seen = []

    def act(protocol):
        getattr(protocol.transport, name)()
        seen.append(protocol.is_lost)

    _, protocol, peer = await connected(loop, lambda: Acting(act))
    with peer:
        await peer.send(b"x" * 500_000)
        await until(lambda: protocol.is_lost)
        assert seen == [False]
        assert protocol.events == ["made", "data", "lost"]
        assert protocol.lost_with == [None]


async def test_write_then_close_inside_data_received(loop):
    def act(protocol):
        protocol.transport.write(b"re")
        protocol.transport.write(b"ply")
        protocol.transport.close()
        protocol.transport.write(b"not sent")

    _, protocol, peer = await connected(loop, lambda: Acting(act))
    with peer:
        await peer.send(b"x")
        assert (await peer.read_to_end()).startswith(b"reply")
        await until(lambda: protocol.is_lost)


async def test_write_then_abort_inside_data_received(loop):
    def act(protocol):
        protocol.transport.write(b"x")
        protocol.transport.abort()

    _, protocol, peer = await connected(loop, lambda: Acting(act))
    with peer:
        await peer.send(b"x")
        await until(lambda: protocol.is_lost)
        assert protocol.events == ["made", "data", "lost"]


async def test_write_eof_inside_data_received(loop):
    def act(protocol):
        protocol.transport.write(b"reply")
        protocol.transport.write_eof()

    _, protocol, peer = await connected(loop, lambda: Acting(act))
    with peer:
        await peer.send(b"x")
        assert await peer.read_to_end() == b"reply"
        await drop(protocol)


async def test_order_of_writes_in_and_outside_of_callbacks(loop):
    """Writes from inside and outside of callbacks keep their order."""
    expected = bytearray()
    rng = random.Random(11)

    def put(transport, label):
        data = label * rng.choice((1, 10, 3000))
        expected.extend(data)
        if rng.random() < 0.5:
            transport.write(data)
        else:
            transport.writelines([data[:1], data[1:]])

    def act(protocol):
        for _ in range(rng.randrange(4)):
            put(protocol.transport, b"i")
        loop.call_soon(put, protocol.transport, b"s")

    transport, protocol, peer = await connected(loop, lambda: Acting(act), small=True)
    received = bytearray()
    with peer:
        for _ in range(200):
            await peer.send(b"x")
            put(transport, b"o")
            await asyncio.sleep(0)
            while not peer.is_silent():
                received += await peer.recv()
        await iterations(5)
        while len(received) < len(expected):
            received += await peer.recv()
        assert received == expected
        await drop(protocol)


async def test_the_buffer_size_inside_a_callback(loop):
    """Flow control counts data that is written inside data_received."""

    def act(protocol):
        transport = protocol.transport
        transport.write(bytes(2 << 20))
        transport.write(bytes(2 << 20))

    _, protocol, peer = await connected(loop, lambda: Acting(act), small=True)
    with peer:
        await peer.send(b"x")
        received = len(await peer.read_exactly(4 << 20))
        assert received == 4 << 20
        await until(lambda: protocol.events[-1] == "resume")
        assert [event for event in protocol.events if event != "data"] == ["made", "pause", "resume"]
        await drop(protocol)


async def test_write_to_another_transport_inside_a_callback(loop):
    """A callback of the source writes to the target. The data is sent, although the target's socket has no event."""
    _, target, target_peer = await connected(loop)

    def act(_protocol):
        for _ in range(3):
            target.transport.write(b"abc")

    _, source, source_peer = await connected(loop, lambda: Acting(act))
    with target_peer, source_peer:
        await source_peer.send(b"x")
        assert await target_peer.read_exactly(9) == b"abcabcabc"
        await drop(target, source)


@pytest.mark.parametrize("name", ["close", "abort"])
async def test_end_of_another_transport_whose_event_is_pending(loop, name):
    """Two transports are ready in one iteration. The callback of the first one ends the other, which gets no data."""
    for _ in range(10):
        protocols = []

        def act(protocol, protocols=protocols):
            for other in protocols:
                if other is not protocol and other.transport is not None:
                    getattr(other.transport, name)()

        peers = []
        for _ in range(2):
            _, protocol, peer = await connected(loop, lambda act=act: Acting(act))
            protocols.append(protocol)
            peers.append(peer)
        for peer in peers:
            peer.sock.send(b"x")
        await until(lambda protocols=protocols: any(protocol.is_lost for protocol in protocols))
        await iterations(3)
        assert sorted(len(protocol.data) for protocol in protocols) == [0, 1]
        await drop(*protocols)
        for peer in peers:
            peer.close()


async def test_a_finalizer_closes_the_transport_during_a_collection(loop):
    """Data that was written before the collection is still sent."""
    import gc

    transport, protocol, peer = await connected(loop)

    class Closer:
        def __del__(self):
            transport.close()

    with peer:
        cycle = [Closer()]
        cycle.append(cycle)
        del cycle
        transport.write(b"before")
        gc.collect()
        assert transport.is_closing()
        assert await peer.read_to_end() == b"before"
        await until(lambda: protocol.is_lost)


@pytest.mark.skip_on(asyncio="calls buffer_updated() of the new protocol", uvloop="like asyncio")
@pytest.mark.parametrize("after", [Recorder, BufferedRecorder])
async def test_set_protocol_inside_get_buffer(loop, after):
    """get_buffer() is called before the data is received, so all of it goes to the new protocol."""
    second = after()

    class Leaving(BufferedRecorder):
        def get_buffer(self, sizehint):
            self.transport.set_protocol(second)
            return self.buffer

    transport, protocol, peer = await connected(loop, Leaving)
    with peer:
        second.connection_made(transport)
        await peer.send(b"x" * 10_000)
        await until(lambda: second.data == b"x" * 10_000)
        assert not protocol.data
        await drop(second)


async def test_set_protocol_and_close_inside_one_callback(loop):
    second = Recorder()

    def act(protocol):
        protocol.transport.set_protocol(second)
        protocol.transport.close()

    _, protocol, peer = await connected(loop, lambda: Acting(act))
    with peer:
        await peer.send(b"x")
        await until(lambda: second.is_lost)
        assert second.events == ["lost"]
        assert protocol.events == ["made", "data"]


async def test_write_inside_connection_made(loop):
    class Greeting(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            transport.write(b"220 ")
            transport.writelines([b"hel", b"lo"])

    for how in WAYS:
        _, protocol, peer = await connected(loop, Greeting, how)
        with peer:
            assert await peer.read_exactly(9) == b"220 hello"
            await drop(protocol)


@pytest.mark.parametrize("name", ["close", "abort"])
@pytest.mark.parametrize("how", WAYS)
async def test_end_inside_connection_made(loop, how, name):
    class Leaving(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            getattr(transport, name)()
            self.kept = transport

    made = []

    def factory():
        made.append(Leaving())
        return made[-1]

    if how == "server":
        import socket

        server = await loop.create_server(factory, "127.0.0.1", 0)
        peer = socket.create_connection(server.sockets[0].getsockname())
        await until(lambda: made and made[0].is_lost)
        server.close()
        peer.close()
    else:
        _, _, peer = await connected(loop, factory, how)
        with peer:
            await until(lambda: made[0].is_lost)
    assert made[0].events == ["made", "lost"]


async def test_write_inside_eof_received_and_connection_lost(loop, caplog):
    class Polite(Recorder):
        def eof_received(self):
            super().eof_received()
            self.transport.write(b"bye")

        def connection_lost(self, exc):
            transport = self.transport
            super().connection_lost(exc)
            transport.write(b"too late")
            transport.close()
            transport.abort()

    _, protocol, peer = await connected(loop, Polite)
    with peer:
        peer.shutdown()
        assert await peer.read_to_end() == b"bye"
        await until(lambda: protocol.is_lost)
        await iterations(3)
        assert protocol.events == ["made", "eof", "lost"]
