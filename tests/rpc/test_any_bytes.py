"""Arbitrary bytes from hypothesis: servers and clients survive them, and a packet stream splits them correctly."""

from __future__ import annotations

import asyncio
import contextlib
import struct

import msgspec
import pytest
from rpc.ends import FRAMED_SERVER_HELLO, Ends, RawClient, ends, framed, raw_client
from support import HOST, coro_is_available, until

import grapeshot
from grapeshot import rpc

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

pytestmark = [
    pytest.mark.only_on("asyncio", "grapeshot"),  # most files of this folder also test uvloop
    # From Python 3.14 on, hypothesis may warn about its own random generator.
    pytest.mark.filterwarnings("ignore:It looks like `register_random`"),
]

SETTINGS = settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-10, 2**63) | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
METHODS = st.sampled_from(["add", "later", "numbers", "fail", "hold", ""])
# Almost valid packets: most fields have the right type.
MESSAGES = st.one_of(
    st.tuples(st.just(1), st.integers(0, 9), METHODS, st.lists(VALUES, max_size=3)),
    st.tuples(st.sampled_from([1, 2]), st.integers(0, 9), METHODS, VALUES, VALUES, VALUES, st.integers(-1, 5)),
    st.tuples(st.sampled_from([3, 4]), st.integers(0, 9), st.integers(-1, 5)),
    st.lists(VALUES, max_size=6),
).map(msgspec.msgpack.encode)
PACKETS = st.lists(st.one_of(st.binary(max_size=40), MESSAGES), max_size=8)


@contextlib.asynccontextmanager
async def coro_ends(**options):
    """Like `ends`, with a server of coros."""
    from grapeshot import coro
    from grapeshot.coro import rpc as coro_rpc

    def numbers(count):
        yield from range(count)

    def serve():
        server = coro_rpc.Server(**options)
        server.add("add", lambda a, b=1: a + b)
        server.add("later", lambda value: coro.yield_slice())
        server.add("hold", lambda name=None: coro.event().wait())
        server.add("fail", lambda message: int(message))
        server.add("numbers", numbers)
        server.listen(HOST, 0)
        return server

    both = Ends(await coro.run_sync(serve), None, {})
    try:
        yield both
    finally:
        await coro.run_sync(both.server.close)


@pytest.mark.parametrize("style", ["tasks", "coros"])
def test_a_server_survives_any_packets(new_loop, style, caplog):
    """Whatever packets a client sends, its connection ends when the client has ended its side. The loop has no error to
    report, no call is left under way, and the server serves the next client.
    """
    loop = new_loop()
    if style == "coros" and not (coro_is_available() and isinstance(loop, grapeshot.Loop)):
        pytest.skip("coros need grapeshot's loop and an interpreter that supports them")
    start = coro_ends if style == "coros" else ends
    reported = []
    loop.set_exception_handler(lambda _loop, context: reported.append(context))

    async def attempt(both, packets, tail):
        caplog.clear()
        async with raw_client(both.port) as raw:
            raw.say_hello()
            for packet in packets:
                raw.send(packet)
            raw.writer.write(tail)
            if raw.writer.can_write_eof():
                raw.writer.write_eof()
            await raw.packet()
            await asyncio.wait_for(raw.rest(), 10)
        await until(lambda: both.server.connections == 0 and both.server.calls == 0)
        assert await both.client().call("add", 1) == 2
        await both.clients.pop().close()
        await until(lambda: both.server.connections == 0)
        assert len(caplog.records) <= 1
        assert all(len(record.getMessage()) < 500 and not record.exc_info for record in caplog.records)

    async def serve(inbox):
        async with start(max_packet=1000) as both:
            inbox.append(both)
            await inbox_closed.wait()

    inbox: list = []
    inbox_closed = asyncio.Event()
    serving = loop.create_task(serve(inbox))
    loop.run_until_complete(asyncio.sleep(0))
    while not inbox:
        loop.run_until_complete(asyncio.sleep(0))

    @SETTINGS
    @given(PACKETS, st.binary(max_size=8))
    def check(packets, tail):
        loop.run_until_complete(attempt(inbox[0], packets, tail))
        assert reported == []

    check()
    inbox_closed.set()
    loop.run_until_complete(serving)


ANSWERS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from([5, 7, 9]), st.integers(-1, 5), VALUES),
        st.tuples(st.just(9), st.integers(-1, 5), st.none() | st.text(max_size=5)),
        st.tuples(st.just(6), st.integers(-1, 5), st.integers(-1, 6), st.text(max_size=5), st.text(max_size=5), VALUES),
        st.tuples(st.sampled_from([8, 10, 11]), st.integers(-1, 5)),
        st.lists(VALUES, max_size=6),
    ).map(msgspec.msgpack.encode)
    | st.binary(max_size=40),
    max_size=8,
)


def test_a_client_survives_any_answers(new_loop, caplog):
    """Calls and streams end, possibly with an RpcError. No connection is left, and nothing is reported or logged."""
    loop = new_loop()
    reported = []
    loop.set_exception_handler(lambda _loop, context: reported.append(context))

    class Answering(asyncio.Protocol):
        answers = b""

        def connection_made(self, transport):
            connections.add(self)
            self.transport = transport
            transport.write(FRAMED_SERVER_HELLO)

        def data_received(self, data):
            if b"method" in data:
                self.transport.write(self.answers)
                self.transport.close()

        def connection_lost(self, exc):
            connections.discard(self)

    async def read(client):
        return [item async for item in client.stream("method")]

    async def attempt(answers, tail):
        Answering.answers = b"".join(map(framed, answers)) + tail
        server = await loop.create_server(Answering, HOST, 0)
        client = rpc.Client(*server.sockets[0].getsockname(), connect_timeout=0.05)
        calls = (client.call("method", 1), read(client), client.call("method", 2), read(client))
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException):
                assert isinstance(result, rpc.RpcError)
                assert str(result)
        await client.close()
        server.close()
        await until(lambda: not connections and not client._connections)
        assert reported == []
        assert caplog.records == []

    connections: set = set()

    @settings(SETTINGS, max_examples=50)
    @given(ANSWERS, st.binary(max_size=8))
    def check(answers, tail):
        loop.run_until_complete(attempt(answers, tail))

    check()


class Taking(rpc.PacketStream):
    def __init__(self) -> None:
        super().__init__(max_packet=50)
        self.packets: list[bytes] = []
        self.errors: list[str] = []

    def packet_received(self, packet: bytes) -> None:
        self.packets.append(packet)
        if packet.startswith(b"hold"):
            self.hold()
            asyncio.get_running_loop().call_soon(self.take_again)

    def closing(self, error: rpc.ProtocolError) -> None:
        self.errors.append(str(error))


@pytest.mark.parametrize("turns_are_short", [False, True])
def test_a_packet_stream_splits_bytes_that_come_in_any_pieces(new_loop, monkeypatch, turns_are_short):
    loop = new_loop()
    if turns_are_short:  # only a few packets are handled in one iteration of the loop
        monkeypatch.setattr("grapeshot.rpc._packet_stream._TURN_S", 0.0)
        monkeypatch.setattr("grapeshot.rpc._packet_stream._CHECK_BYTES", 1)

    async def attempt(packets, cuts, oversized):
        stream: list[Taking] = []

        def make() -> Taking:
            stream.append(Taking())
            return stream[0]

        server = await loop.create_server(make, HOST, 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        raw = RawClient(reader, writer)
        data = b"".join(struct.pack(">I", len(packet)) + packet for packet in packets)
        data += struct.pack(">I", 51) + b"content" if oversized else b""
        position = 0
        for cut in [*cuts, len(data)]:
            if writer.is_closing():  # the server has refused a length and closed the connection
                break
            writer.write(data[position : position + cut])
            position += cut
            await asyncio.sleep(0)
        if oversized:
            await raw.rest()
        await until(lambda: stream and len(stream[0].packets) == len(packets))
        assert stream[0].packets == packets
        assert len(stream[0].errors) == oversized
        writer.close()
        server.close()
        with contextlib.suppress(ConnectionError):  # the server may have reset the connection
            await writer.wait_closed()
        await until(lambda: not stream[0].is_attached)

    @settings(SETTINGS, max_examples=60)
    @given(
        st.lists(st.one_of(st.binary(max_size=50), st.just(b"hold")), max_size=10),
        st.lists(st.integers(1, 30), max_size=20),
        st.booleans(),
    )
    def check(packets, cuts, oversized):
        loop.run_until_complete(attempt(packets, cuts, oversized))

    check()
