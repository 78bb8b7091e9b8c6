"""The loop polls often: callbacks that keep scheduling other callbacks do not delay an event of a descriptor."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest
from support import HOST, Peer, Recorder, connected, listening, pipe_ends, raw_pair, until

STEPS = 8


class Chain:
    """A chain of callbacks, each of which schedules the next.

    `events` lists the numbers of the callbacks that have run, with "io" where the event arrived.
    """

    def __init__(self, loop):
        self.loop = loop
        self.events: list[object] = []
        self.over = loop.create_future()

    def begin(self):
        self.loop.call_soon(self._step, 1)

    def _step(self, number):
        self.events.append(number)
        self.note_step()
        if number < STEPS:
            self.loop.call_soon(self._step, number + 1)
        else:
            self.over.set_result(None)

    def note_step(self):
        pass

    def note(self, *_args):
        self.events.append("io")

    async def is_later_than_io(self, steps):
        """Wait for the end of the chain. Return whether at most `steps` of its callbacks ran before the event."""
        await self.over
        return "io" in self.events and self.events.index("io") <= steps


@pytest.fixture
def chain(loop):
    chain = Chain(loop)
    yield chain
    chain.over = chain.note_step = None


@pytest.fixture
def noting(chain):
    class Noting(Recorder):
        def data_received(self, data):
            chain.note()

        def datagram_received(self, data, _addr):
            chain.note()

    return Noting


@pytest.mark.parametrize("method", ["reader", "writer"])
async def test_a_callback(loop, chain, method):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.send(b"x")
        remove = getattr(loop, f"remove_{method}")
        chain.begin()
        getattr(loop, f"add_{method}")(ours, lambda: (chain.note(), remove(ours)))
        assert await chain.is_later_than_io(1)


async def test_a_callback_that_is_added_later(loop, chain):
    """A writer is added for a descriptor that already has a reader."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        loop.add_reader(ours, print)
        await asyncio.sleep(0.001)
        chain.begin()
        loop.add_writer(ours, lambda: (chain.note(), loop.remove_writer(ours)))
        assert await chain.is_later_than_io(1)
        loop.remove_reader(ours)


async def test_a_pipe(loop, chain, noting):
    with pipe_ends("pipe", "read") as ends:
        ends.send(b"x")
        transport, protocol = await loop.connect_read_pipe(noting, ends.file)
        chain.begin()
        assert await chain.is_later_than_io(1)
        transport.close()
        await until(lambda: protocol.is_lost)


async def test_a_connection(loop, chain, noting):
    ours, theirs = raw_pair()
    with theirs:
        theirs.send(b"x")
        transport, protocol = await loop.connect_accepted_socket(noting, ours)
        chain.begin()
        assert await chain.is_later_than_io(1)
        transport.close()
        await until(lambda: protocol.is_lost)


async def test_a_server(loop, chain, noting, serve):
    listener = listening()
    listener.setblocking(False)
    with socket.create_connection(listener.getsockname()) as client:
        client.send(b"x")
        server = await serve(noting, sock=listener)
        chain.begin()
        assert await chain.is_later_than_io(5)
        server.close()
    await asyncio.sleep(0.001)


async def test_datagrams(loop, chain, noting):
    ours, theirs = (socket.socket(type=socket.SOCK_DGRAM) for _ in range(2))
    with theirs:
        ours.bind((HOST, 0))
        theirs.sendto(b"x", ours.getsockname())
        transport, protocol = await loop.create_datagram_endpoint(noting, sock=ours)
        chain.begin()
        assert await chain.is_later_than_io(1)
        transport.close()
        await until(lambda: protocol.is_lost)


async def _pipe(loop, factory):
    ends = pipe_ends("pipe", "read")
    return *await loop.connect_read_pipe(factory, ends.file), ends, lambda: ends.send(b"x")


async def _connection(loop, factory):
    transport, protocol, peer = await connected(loop, factory)
    return transport, protocol, peer, lambda: peer.sock.send(b"x")


@pytest.mark.parametrize("make", [_pipe, _connection])
@pytest.mark.parametrize("is_seen", [False, True], ids=["at once", "after a while"])
async def test_resuming(loop, chain, noting, make, is_seen):
    transport, protocol, other, send = await make(loop, noting)
    with other:
        await asyncio.sleep(0.001)
        transport.pause_reading()
        send()
        if is_seen:
            await asyncio.sleep(0.001)
        transport.resume_reading()
        chain.begin()
        assert await chain.is_later_than_io(1)
        transport.close()
        await until(lambda: protocol.is_lost)


async def test_a_stream_whose_buffer_is_full(loop, chain):
    ours, theirs = socket.socketpair()
    transport, protocol = await loop.create_connection(Recorder, sock=ours)
    with Peer(theirs) as peer:
        transport.write(bytes(1 << 22))
        waiting = transport.get_write_buffer_size()
        assert waiting
        while not peer.is_silent():
            peer.sock.recv(1 << 20)
        left = []
        chain.note_step = lambda: left.append(transport.get_write_buffer_size())
        chain.begin()
        await chain.over
        assert left[1] < waiting
        transport.abort()
        await until(lambda: protocol.is_lost)


@pytest.mark.parametrize("short_steps", [0, 1, 5, 30, 63])
async def test_long_callbacks_one_after_the_other(loop, short_steps):
    """Only a few long callbacks run between two polls, even if the callbacks before them were short."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        events = []

        def long_step(number):
            until_s = time.perf_counter() + 0.001
            while time.perf_counter() < until_s:
                pass
            if "io" not in events and number < 20:
                events.append(number)
                loop.call_soon(long_step, number + 1)
            else:
                over.set_result(None)

        def short_step(left):
            if left:
                loop.call_soon(short_step, left - 1)
            else:
                theirs.send(b"x")
                long_step(0)

        over = loop.create_future()
        loop.add_reader(ours, lambda: (events.append("io"), loop.remove_reader(ours)))
        await asyncio.sleep(0.001)
        loop.call_soon(short_step, short_steps)
        await over
        assert "io" in events
        assert events.index("io") <= 5


async def test_operations(loop, chain):
    ours, theirs = socket.socketpair()
    with ours, Peer(theirs) as peer, listening() as listener, socket.socket() as client:
        for sock in (ours, listener, client):
            sock.setblocking(False)

        async def receive():
            await loop.sock_recv(ours, 1)

        async def accept():
            accepted, _ = await loop.sock_accept(listener)
            accepted.close()

        def connect():
            client.setblocking(True)
            client.connect(listener.getsockname())

        for operation, awake in ((receive, lambda: peer.sock.send(b"x")), (accept, connect)):
            task = asyncio.ensure_future(operation())
            await asyncio.sleep(0)
            awake()
            task.add_done_callback(chain.note)
            chain.begin()
            assert await chain.is_later_than_io(4)
            await task
            chain.events.clear()
            chain.over = loop.create_future()
