"""Accepting connections: callbacks that the factory schedules, and the cancellation of all tasks during an accept."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest
from support import HOST, Peer, Recorder, iterations, until
from tls.contexts import server_context

UVLOOP = pytest.mark.skip_on(uvloop="accepts without a task")


class Served(asyncio.StreamReaderProtocol):
    """A protocol whose task serves and closes the connection, as in mail servers."""

    made: list[Served]

    def __init__(self, loop):
        self.reader = asyncio.StreamReader(loop=loop)
        super().__init__(self.reader, loop=loop)
        self.loop = loop
        self.transport = None
        self.has_served = False
        self.is_over = False
        self.made.append(self)

    def connection_made(self, transport):
        super().connection_made(transport)
        self.transport = transport
        self.task = self.loop.create_task(self.serve())

    async def serve(self):
        self.has_served = True
        try:
            while await self.reader.readline():
                pass
        finally:
            self.transport.close()

    def connection_lost(self, exc):
        super().connection_lost(exc)
        self.is_over = True


def cancel_all(loop):
    loop.stop()
    for task in asyncio.all_tasks(loop):
        task.cancel()


def shut_down(loop, server):
    """Do what aiosmtpd's controller does after its loop was stopped."""
    server.close()
    loop.run_until_complete(asyncio.wait_for(server.wait_closed(), 10))
    loop.run_until_complete(iterations(3))


def listen(loop, factory, **options):
    return loop.run_until_complete(loop.create_server(factory, HOST, 0, **options))


def schedule_soon(loop, note):
    loop.call_soon(note)


def schedule_task(loop, note):
    async def work():
        note()

    loop.create_task(work())


def schedule_future(loop, note):
    future = loop.create_future()
    future.add_done_callback(lambda _: note())
    future.set_result(None)


@pytest.mark.parametrize("schedule", [schedule_soon, schedule_task, schedule_future])
async def test_callbacks_of_the_factory_run_first(loop, serve, schedule):
    order = []

    class Noting(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            order.append("made")

    made = []

    def factory():
        schedule(loop, lambda: order.append("scheduled"))
        made.append(Noting())
        return made[-1]

    server = await serve(factory, HOST, 0)
    with Peer(socket.create_connection(server.sockets[0].getsockname())) as peer:
        await peer.send(b"x")
        await until(lambda: made and made[0].data == b"x")
        assert order == ["scheduled", "made"]
        made[0].transport.close()
        await until(lambda: made[0].is_lost)


@UVLOOP
async def test_callbacks_of_the_factory_see_the_task(loop, serve):
    """There are two tasks: this test and the task that accepts."""
    made = []

    def factory():
        loop.call_soon(lambda: made[-1].seen.append(len(asyncio.all_tasks())))
        made.append(Recorder())
        made[-1].seen = []
        return made[-1]

    server = await serve(factory, HOST, 0)
    with Peer(socket.create_connection(server.sockets[0].getsockname())):
        await until(lambda: made and made[0].transport is not None)
        made[0].transport.close()
        await until(lambda: made[0].is_lost)
        assert made[0].seen == [2]


@UVLOOP
@pytest.mark.leaks_on(asyncio="a connection whose task never began is left to the collector")
@pytest.mark.parametrize("is_gone", [True, False])
@pytest.mark.parametrize("count", range(10))
def test_everything_is_cancelled_while_a_connection_is_accepted(new_loop, count, is_gone):
    """All tasks are cancelled after `count` iterations. Each connection whose connection_made() was called must end."""
    loop = new_loop()
    Served.made = []
    server = listen(loop, lambda: Served(loop))
    client = socket.create_connection(server.sockets[0].getsockname())
    if is_gone:
        client.close()

    def step(rest):
        if rest:
            loop.call_soon(step, rest - 1)
        else:
            cancel_all(loop)

    loop.call_soon(step, count)
    loop.run_forever()
    shut_down(loop, server)
    assert all(protocol.is_over for protocol in Served.made if protocol.transport is not None)
    client.close()
    Served.made = []


@UVLOOP
@pytest.mark.parametrize("is_gone", [True, False])
def test_another_thread_stops_the_loop_while_a_protocol_is_made(new_loop, is_gone):
    """`cancel_all` is queued while the factory runs. It runs before connection_made() makes the protocol's task."""
    loop = new_loop()
    Served.made = []
    asked, queued = threading.Event(), threading.Event()

    def stop():
        asked.wait()
        loop.call_soon_threadsafe(cancel_all, loop)
        queued.set()

    def factory():
        asked.set()
        queued.wait()
        return Served(loop)

    server = listen(loop, factory)
    client = socket.create_connection(server.sockets[0].getsockname())
    if is_gone:
        client.close()
    thread = threading.Thread(target=stop)
    thread.start()
    loop.run_forever()
    thread.join()
    shut_down(loop, server)
    assert [protocol.is_over for protocol in Served.made] == [True]
    client.close()
    Served.made = []


@UVLOOP
def test_another_thread_stops_the_loop_while_a_connection_is_made(new_loop):
    """`cancel_all` is queued before the first step of the protocol's task. It cancels the task, which never begins."""
    loop = new_loop()
    Served.made = []
    asked, queued = threading.Event(), threading.Event()

    class Late(Served):
        def connection_made(self, transport):
            asked.set()
            queued.wait()
            super().connection_made(transport)

    def stop():
        asked.wait()
        loop.call_soon_threadsafe(cancel_all, loop)
        queued.set()

    server = listen(loop, lambda: Late(loop))
    client = socket.create_connection(server.sockets[0].getsockname())
    thread = threading.Thread(target=stop)
    thread.start()
    loop.run_forever()
    thread.join()
    shut_down(loop, server)
    assert [(protocol.has_served, protocol.is_over) for protocol in Served.made] == [(False, True)]
    client.close()
    Served.made = []


@UVLOOP
def test_connections_survive_a_stop(new_loop):
    """stop() alone does not end connections."""
    loop = new_loop()
    Served.made = []
    server = listen(loop, lambda: Served(loop))
    with socket.create_connection(server.sockets[0].getsockname()) as client:
        loop.call_soon(loop.stop)
        while not Served.made:
            loop.call_soon(loop.stop)
            loop.run_forever()
        loop.run_until_complete(iterations(5))
        protocol = Served.made[0]
        assert protocol.has_served
        assert asyncio.all_tasks(loop) == {protocol.task}
        client.close()
        loop.run_until_complete(until(lambda: protocol.is_over))
    shut_down(loop, server)
    Served.made = []


@UVLOOP
def test_a_handshake_is_cancelled(new_loop):
    """The client of this handshake sends nothing."""
    loop = new_loop()
    made = []

    def factory():
        made.append(Recorder())
        return made[-1]

    server = listen(loop, factory, ssl=server_context())
    with Peer(socket.create_connection(server.sockets[0].getsockname())) as peer:
        loop.run_until_complete(until(lambda: made and asyncio.all_tasks(loop)))
        loop.run_until_complete(iterations(5))
        assert len(asyncio.all_tasks(loop)) == 1
        loop.call_soon(cancel_all, loop)
        loop.run_forever()
        shut_down(loop, server)
        assert loop.run_until_complete(peer.read_to_end()) == b""
    assert made[0].events == []
