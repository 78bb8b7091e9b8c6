"""Connections are closed and tasks cancelled while their events are queued, and descriptors are reused at once. No
connection may get another one's bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time

import pytest
from support import CAP_S, HOST, Recorder, gil_is_enabled, iterations, listening, until

# Without the GIL, some objects that the interpreter makes for a task still exist after the task has ended and the
# collector has run. This happens on asyncio and on grapeshot.
LEFT_WITHOUT_GIL = {} if gil_is_enabled() else {"asyncio": "no GIL", "grapeshot": "no GIL"}


class Tagged(asyncio.Protocol):
    """Echoes the data that it receives, and keeps it. Each connection of a test sends a byte value of its own."""

    def __init__(self):
        self.received = bytearray()
        self.transport = None
        self.made = self.lost = 0

    def connection_made(self, transport):
        self.made += 1
        self.transport = transport

    def data_received(self, data):
        assert not self.lost
        self.received += data
        self.transport.write(data)

    def connection_lost(self, exc):
        self.lost += 1
        self.transport = None


@pytest.mark.leaks_on(asyncio="connections accepted while the server closes are left to the collector")
@pytest.mark.parametrize("seed", range(3))
async def test_cancel_storm_with_reuse_of_descriptors(loop, serve, seed):
    """Every connection carries only its own byte value in both directions, even if other connections are aborted."""
    rng = random.Random(seed)
    served = []

    def factory():
        served.append(Tagged())
        return served[-1]

    server = await serve(factory, HOST, 0)
    address = server.sockets[0].getsockname()
    live: dict[socket.socket, tuple[int, bytearray]] = {}
    wrong = []
    number = 0

    def read(sock):
        value, _ = live[sock]
        try:
            data = sock.recv(65536)
        except (BlockingIOError, ConnectionResetError):
            return
        if data.strip(bytes([value])):
            wrong.append((value, data))

    for _ in range(400):
        match rng.randrange(6):
            case 0 | 1:
                number = number % 255 + 1
                sock = socket.create_connection(address, timeout=CAP_S)
                sock.setblocking(False)
                live[sock] = (number, bytearray())
            case 2 | 3 if live:
                for sock in rng.sample(list(live), min(len(live), 5)):
                    try:
                        sock.send(bytes([live[sock][0]]) * rng.randrange(1, 2000))
                    except (BlockingIOError, ConnectionResetError, BrokenPipeError):
                        continue
            case 4 if live:
                sock = rng.choice(list(live))
                if rng.random() < 0.5:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                del live[sock]
                sock.close()
            case 5:
                open_ones = [protocol for protocol in served if protocol.transport is not None]
                for protocol in rng.sample(open_ones, min(len(open_ones), 3)):
                    rng.choice((protocol.transport.abort, protocol.transport.close))()
        if rng.random() < 0.5:
            await asyncio.sleep(0)
        for sock in list(live):
            read(sock)
    for sock in live:
        sock.close()
    server.close()
    for _ in range(2):
        await until(lambda: all(protocol.transport is None for protocol in served))
        await asyncio.sleep(0.005)  # for connections whose connection_made had not run yet
    assert wrong == []
    assert all(protocol.lost == protocol.made for protocol in served)
    mixed = [protocol.received for protocol in served if len(set(protocol.received)) > 1]
    assert mixed == []


@pytest.mark.leaks_on(**LEFT_WITHOUT_GIL)
async def test_tasks_cancelled_in_the_middle_of_streams(loop, serve):
    """Tasks with streams are cancelled while replies are being sent. New connections reuse the freed descriptors."""
    rng = random.Random(9)

    handlers: set[asyncio.Task] = set()

    async def handle(reader, writer):
        handlers.add(asyncio.current_task())
        try:
            while line := await reader.readline():
                writer.write(line)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    server = await asyncio.start_server(handle, HOST, 0)
    address = server.sockets[0].getsockname()
    wrong = []

    async def client(name):
        reader, writer = await asyncio.open_connection(*address)
        try:
            for number in range(20):
                message = b"%d:%d\n" % (name, number)
                writer.write(message)
                answer = await reader.readline()
                if answer != message:
                    wrong.append((message, answer))
        finally:
            writer.transport.abort()

    tasks: set[asyncio.Task] = set()
    for name in range(200):
        tasks.add(loop.create_task(client(name)))
        await iterations(rng.randrange(4))
        if len(tasks) > 10:
            for task in rng.sample(sorted(tasks, key=id), 4):
                task.cancel()
        tasks = {task for task in tasks if not task.done()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    server.close()
    await iterations(20)
    await asyncio.gather(*handlers)
    assert wrong == []


@pytest.mark.skip_on(uvloop="a connect cancelled in its last steps leaves the connection open")
async def test_connects_cancelled_at_every_step(loop):
    """A connect that is cancelled in its n-th iteration leaves neither descriptors nor open protocols."""
    with listening() as listener:
        address = listener.getsockname()
        outcomes = set()
        for steps in range(12):
            made = []

            def factory(made=made):
                made.append(Recorder())
                return made[-1]

            task = loop.create_task(loop.create_connection(factory, *address))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            try:
                transport, _ = await task
                outcomes.add("connected")
                transport.abort()
            except asyncio.CancelledError:
                outcomes.add("cancelled")
            await until(lambda made=made: all(p.is_lost or not p.events for p in made))
        assert outcomes == {"connected", "cancelled"} or outcomes == {"cancelled"}


async def test_churn_leaves_the_number_of_descriptors_flat(loop, serve):
    import os

    server = await serve(Tagged, HOST, 0)
    address = server.sockets[0].getsockname()

    async def visit():
        transport, protocol = await loop.create_connection(Recorder, *address)
        transport.write(b"hello")
        await until(lambda: protocol.data == b"hello")
        transport.close()
        await until(lambda: protocol.is_lost)

    for _ in range(20):
        await visit()
    await iterations(5)
    before = len(os.listdir("/dev/fd"))
    for _ in range(10):
        await asyncio.gather(*(visit() for _ in range(20)))
    give_up = time.monotonic() + CAP_S
    while len(os.listdir("/dev/fd")) > before:
        assert time.monotonic() < give_up, "descriptors pile up"
        await asyncio.sleep(0.001)
