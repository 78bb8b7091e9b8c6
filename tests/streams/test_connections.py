"""Readers and writers of TCP connections, with asyncio's streams and with grapeshot.streams."""

from __future__ import annotations

import asyncio
import random

import pytest
from support import HOST, Peer, iterations, listening, until


class Streams:
    """`connect` starts a server, opens a connection to it, and returns the client's reader and writer and the server's
    reader and writer. `finish` ends all connections and servers.
    """

    def __init__(self, api, loop):
        self.api = api
        self.loop = loop
        self.writers = []
        self.servers = []

    async def connect(self, limit=2**16):
        accepted = self.loop.create_future()

        def handle(reader, writer):
            accepted.set_result((reader, writer))

        server = await self.api.start_server(handle, HOST, 0, limit=limit)
        self.servers.append(server)
        client = await self.api.open_connection(*server.sockets[0].getsockname(), limit=limit)
        server_side = await accepted
        self.writers += [client[1], server_side[1]]
        return client, server_side

    async def finish(self):
        for writer in self.writers:
            writer.transport.abort()
        for server in self.servers:
            server.close()
        self.writers.clear()
        self.servers.clear()
        await iterations(5)


@pytest.fixture
def streams(api, loop):
    made = Streams(api, loop)
    yield made
    loop.run_until_complete(made.finish())


async def test_lines_in_pieces(loop, streams):
    (reader, _), (_, other) = await streams.connect()
    text = b"".join(b"%d:%s\n" % (n, b"x" * (n * 37 % 200)) for n in range(300))
    rng = random.Random(1)

    async def feed():
        position = 0
        while position < len(text):
            size = rng.randrange(1, 300)
            other.write(text[position : position + size])
            position += size
            if rng.random() < 0.3:
                await asyncio.sleep(0)
        other.write_eof()

    task = loop.create_task(feed())
    lines = [line async for line in reader]
    await task
    assert b"".join(lines) == text
    assert len(lines) == 300


async def test_read_to_the_end(loop, streams):
    (reader, _), (_, other) = await streams.connect()
    data = random.Random(2).randbytes(3 << 20)

    async def feed():
        other.write(data)
        await other.drain()
        other.close()

    task = loop.create_task(feed())
    assert await reader.read() == data
    assert reader.at_eof()
    await task


async def test_drain_waits_for_the_reader(loop, streams):
    (reader, _), (_, other) = await streams.connect(limit=1000)
    other.write(bytes(16 << 20))
    task = loop.create_task(other.drain())
    await iterations(5)
    assert not task.done()
    received = 0
    while received < 16 << 20:
        received += len(await reader.read(1 << 20))
    await task
    assert other.transport.get_write_buffer_size() <= 65536


async def test_the_reader_pauses_its_transport(loop, streams):
    (reader, writer), (_, other) = await streams.connect(limit=1000)
    other.write(bytes(100_000))
    await until(lambda: not writer.transport.is_reading())
    assert len(await reader.readexactly(100_000)) == 100_000
    await iterations(2)
    assert writer.transport.is_reading()


async def test_echo_in_both_directions(loop, streams):
    (reader, writer), (other_reader, other_writer) = await streams.connect()

    async def echo():
        while data := await other_reader.read(65536):
            other_writer.write(data)
            await other_writer.drain()
        other_writer.close()

    data = random.Random(3).randbytes(2 << 20)

    async def send():
        for position in range(0, len(data), 50_000):
            writer.write(data[position : position + 50_000])
            await writer.drain()
        writer.write_eof()

    tasks = [loop.create_task(echo()), loop.create_task(send())]
    assert await reader.read() == data
    await asyncio.gather(*tasks)


async def test_writelines_and_extra_info(loop, streams):
    (reader, writer), (_, other) = await streams.connect()
    other.writelines([b"a", b"b", b"c\n"])
    assert await reader.readline() == b"abc\n"
    assert writer.get_extra_info("peername") == other.get_extra_info("sockname")
    assert writer.can_write_eof()
    assert not writer.is_closing()
    writer.close()
    assert writer.is_closing()
    await writer.wait_closed()
    assert await reader.read() == b""


async def test_read_raises_a_reset(api, loop):
    with listening() as listener:
        reader, writer = await api.open_connection(*listener.getsockname())
        Peer(listener.accept()[0]).reset()
        with pytest.raises(ConnectionResetError):
            await reader.read(10)
        writer.close()
        with pytest.raises(ConnectionResetError):
            await writer.wait_closed()
        reader = writer = None


async def test_drain_after_the_connection_is_lost(api, loop):
    with listening() as listener:
        reader, writer = await api.open_connection(*listener.getsockname())
        peer = Peer(listener.accept()[0])
        writer.write(bytes(16 << 20))
        task = loop.create_task(writer.drain())
        await iterations(3)
        peer.reset()
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            await task
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            await writer.drain()
        writer.close()
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            await writer.wait_closed()
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            await reader.read()
        reader = writer = task = None


async def test_start_server_with_a_coroutine(api, loop):
    seen = []

    async def handle(reader, writer):
        seen.append(await reader.readline())
        writer.write(b"answer\n")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await api.start_server(handle, HOST, 0)
    address = server.sockets[0].getsockname()

    async def ask(number):
        reader, writer = await api.open_connection(*address)
        writer.write(b"%d\n" % number)
        assert await reader.read() == b"answer\n"
        writer.close()
        await writer.wait_closed()

    await asyncio.gather(*(ask(number) for number in range(50)))
    server.close()
    await server.wait_closed()
    assert sorted(int(line) for line in seen) == list(range(50))


async def test_feed_and_read_concurrently_from_many(api, loop):
    """Each of many clients sends its own numbers, and gets the sum of exactly these numbers back."""

    async def handle(reader, writer):
        total = 0
        async for line in reader:
            total += int(line)
        writer.write(b"%d\n" % total)
        writer.close()

    server = await api.start_server(handle, HOST, 0)
    address = server.sockets[0].getsockname()

    async def client(seed):
        rng = random.Random(seed)
        reader, writer = await api.open_connection(*address)
        numbers = [rng.randrange(10**6) for _ in range(200)]
        for number in numbers:
            writer.write(b"%d\n" % number)
            if rng.random() < 0.1:
                await asyncio.sleep(0)
        writer.write_eof()
        assert int(await reader.readline()) == sum(numbers)
        writer.close()
        await writer.wait_closed()

    await asyncio.gather(*(client(seed) for seed in range(40)))
    server.close()
    await iterations(5)
