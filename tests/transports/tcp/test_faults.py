"""Protocols and factories that raise: the connection is closed, the error is reported, the loop continues, nothing
leaks. KeyboardInterrupt and SystemExit end the run instead.
"""

from __future__ import annotations

import asyncio
import socket

import pytest
from support import HOST, BufferedRecorder, Echo, Peer, Recorder, connected, iterations, run_script, until


class Broken(LookupError):
    pass


def failing(base, name, kind=Broken, once=False):
    def fails(self, *args):
        if name != "get_buffer":
            getattr(base, name)(self, *args)
        if once and getattr(self, "has_failed", False):
            return
        self.has_failed = True
        raise kind(name)

    return type("Failing", (base,), {name: fails})


async def works(loop, serve):
    """Checks that the loop still serves connections."""
    server = await serve(Echo, HOST, 0)
    with Peer(socket.create_connection(server.sockets[0].getsockname())) as peer:
        await peer.send(b"works")
        assert await peer.read_exactly(5) == b"works"
    server.close()
    await iterations(3)


@pytest.mark.parametrize("how", ["accepted", "client"])
@pytest.mark.xfail_on(uvloop="the message differs")
async def test_data_received(loop, reported, serve, how):
    transport, protocol, peer = await connected(loop, failing(Recorder, "data_received"), how)
    with peer:
        await peer.send(b"x")
        await until(lambda: protocol.is_lost)
        assert await peer.is_ended()
    [context] = reported
    assert context["message"] == "Fatal error: protocol.data_received() call failed."
    assert isinstance(context["exception"], Broken)
    assert context["transport"] is transport
    assert context["protocol"] is protocol
    assert protocol.lost_with == [context["exception"]]
    assert protocol.events == ["made", "data", "lost"]
    reported.clear()
    protocol.lost_with.clear()
    await works(loop, serve)


@pytest.mark.xfail_on(uvloop="the message differs")
async def test_eof_received(loop, reported, serve):
    transport, protocol, peer = await connected(loop, failing(Recorder, "eof_received"))
    with peer:
        peer.shutdown()
        await until(lambda: protocol.is_lost)
        assert await peer.read_to_end() == b""
    [context] = reported
    assert context["message"] == "Fatal error: protocol.eof_received() call failed."
    assert context["transport"] is transport
    assert protocol.lost_with == [context["exception"]]
    reported.clear()
    protocol.lost_with.clear()
    await works(loop, serve)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("get_buffer", "Fatal error: protocol.get_buffer() call failed."),
        ("buffer_updated", "Fatal error: protocol.buffer_updated() call failed."),
    ],
)
@pytest.mark.xfail_on(uvloop="the message differs")
async def test_buffered(loop, reported, serve, name, message):
    transport, protocol, peer = await connected(loop, failing(BufferedRecorder, name))
    with peer:
        await peer.send(b"x")
        await until(lambda: protocol.is_lost)
        assert await peer.is_ended()
    [context] = reported
    assert context["message"] == message
    assert isinstance(context["exception"], Broken)
    assert context["transport"] is transport
    assert protocol.lost_with == [context["exception"]]
    reported.clear()
    protocol.lost_with.clear()
    await works(loop, serve)


@pytest.mark.parametrize("how", ["accepted", "client", "server"])
@pytest.mark.skip_on(uvloop="the connection stays open and the transport leaks")
@pytest.mark.xfail_on(asyncio="reports the error and keeps the connection")
async def test_connection_made(loop, reported, serve, how):
    """asyncio only reports an error in connection_made. In grapeshot, the error also closes the connection."""
    made = []

    def factory():
        made.append(failing(Recorder, "connection_made")())
        return made[-1]

    if how == "server":
        server = await serve(factory, HOST, 0)
        peer = Peer(socket.create_connection(server.sockets[0].getsockname()))
    elif how == "client":
        with socket.socket() as listener:
            listener.bind((HOST, 0))
            listener.listen()
            task = loop.create_task(loop.create_connection(factory, *listener.getsockname()))
            await until(lambda: made)
            peer = Peer(listener.accept()[0])
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()
    else:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        task = loop.create_task(loop.connect_accepted_socket(factory, ours))
        peer = Peer(theirs)
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()
    with peer:
        try:
            await until(lambda: reported)
            await until(lambda: not peer.is_silent(), cap_s=1)
            assert await peer.read_to_end() == b""
        finally:
            for protocol in made:
                if protocol.transport is not None:
                    protocol.transport.abort()
            await iterations(5)
    assert isinstance(reported.exceptions[0], Broken)
    reported.clear()
    task = None
    await works(loop, serve)


async def test_connection_lost(loop, reported, serve):
    transport, protocol, peer = await connected(loop, failing(Recorder, "connection_lost"))
    with peer:
        transport.close()
        await until(lambda: protocol.is_lost)
        assert await peer.read_to_end() == b""
        await until(lambda: reported)
    assert isinstance(reported.exceptions[0], Broken)
    assert len(reported) == 1
    reported.clear()
    await works(loop, serve)


@pytest.mark.parametrize("name", ["data_received", "eof_received"])
async def test_data_written_before_the_error(loop, reported, name):
    """After a fatal error, the connection ends at once, even if its buffer still has unsent data."""

    class Failing(failing(Recorder, name)):
        def connection_made(self, transport):
            super().connection_made(transport)
            transport.write(bytes(1 << 20))

    _, protocol, peer = await connected(loop, Failing, small=True)
    with peer:
        await peer.send(b"x")
        peer.shutdown()
        await until(lambda: protocol.is_lost)
        assert await peer.is_ended()
    assert len(reported) == 1
    assert protocol.events.count("lost") == 1


@pytest.mark.xfail_on(asyncio="reports errors of factories only in debug mode")
@pytest.mark.skip_on(uvloop="the accepted client is left hanging")
async def test_a_failing_factory_of_a_server(loop, reported, serve):
    calls = []

    def factory():
        calls.append(1)
        if len(calls) < 4:
            raise Broken("factory")
        return Echo()

    server = await serve(factory, HOST, 0)
    address = server.sockets[0].getsockname()
    for _ in range(3):
        with Peer(socket.create_connection(address)) as peer:
            await until(lambda: not peer.is_silent(), "the client to be released")
            assert await peer.is_ended()
    with Peer(socket.create_connection(address)) as peer:
        await peer.send(b"works")
        assert await peer.read_exactly(5) == b"works"
    server.close()
    await iterations(3)
    assert [str(error) for error in reported.exceptions] == ["factory"] * 3
    reported.clear()


@pytest.mark.skip_on(uvloop="the connection stays open forever", asyncio="the connection stays open forever")
async def test_a_factory_that_returns_no_protocol(loop, reported, serve):
    """The connection without a protocol is closed, and the next one is served."""
    calls = []

    def factory():
        calls.append(1)
        return object() if len(calls) == 1 else Echo()

    server = await serve(factory, HOST, 0)
    address = server.sockets[0].getsockname()
    with Peer(socket.create_connection(address)):
        await until(lambda: reported)
    with Peer(socket.create_connection(address)) as peer:
        await peer.send(b"works")
        assert await peer.read_exactly(5) == b"works"
    server.close()
    await iterations(3)
    reported.clear()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("name", ["data_received", "connection_made", "connection_lost", "eof_received"])
@pytest.mark.skip_on(uvloop="reports the interrupt like any error, or loses the transport")
def test_interrupts_leave_the_loop(loop, reported, kind, name):
    """The run raises the interrupt, the loop can run again and be closed, and no descriptor is left open."""
    made = []

    def factory():
        made.append(failing(Recorder, name, kind, once=True)())
        return made[-1]

    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.send(b"x")

    async def main():
        transport, _ = await loop.connect_accepted_socket(factory, ours)
        await until(lambda: made[0].data or name != "data_received")
        if name == "connection_lost":
            transport.close()
        if name == "eof_received":
            theirs.shutdown(socket.SHUT_WR)
        await asyncio.sleep(5)

    with theirs:
        with pytest.raises(kind):
            loop.run_until_complete(main())
        transport = made[0].transport

        async def after():
            if transport is not None:
                transport.abort()
            await iterations(5)
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
                await asyncio.wait([task])
            return "goes on"

        assert loop.run_until_complete(after()) == "goes on"
    reported.clear()


class LeavesWhenMade(Recorder):
    def connection_made(self, transport):
        super().connection_made(transport)
        raise KeyboardInterrupt


@pytest.mark.parametrize("side", ["accepted", "connected"])
@pytest.mark.skip_on(uvloop="reports the interrupt like any error, or loses the transport")
def test_an_interrupt_in_connection_made_keeps_the_connection(loop, side):
    """The connection continues in the loop's next run, and so do the tasks that wait for the connection or for the
    server.
    """
    made = []

    def factory():
        made.append(LeavesWhenMade())
        return made[-1]

    async def main():
        server = await loop.create_server(factory if side == "accepted" else Echo, HOST, 0)
        address = server.sockets[0].getsockname()
        if side == "accepted":
            with Peer(socket.create_connection(address)) as peer:
                await peer.send(b"works")
                await until(lambda: made and made[0].data == b"works", "the data")
        else:
            transport, protocol = await loop.create_connection(factory, *address)
            transport.write(b"works")
            await until(lambda: protocol.data == b"works", "the data")
            transport.close()
        await until(lambda: made[0].is_lost, "connection_lost")
        server.close()
        await server.wait_closed()

    task = loop.create_task(main())
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(task)
    loop.run_until_complete(task)


async def test_errors_on_many_connections(loop, reported, serve):
    """Most of the 60 protocols fail, each in one of three callbacks."""
    import random

    rng = random.Random(3)
    names = ["data_received", "eof_received", "connection_lost", None]
    made = []

    def factory():
        name = rng.choice(names)
        made.append(failing(Recorder, name)() if name else Recorder())
        return made[-1]

    server = await serve(factory, HOST, 0)
    peers = [Peer(socket.create_connection(server.sockets[0].getsockname())) for _ in range(60)]
    for peer in peers:
        await peer.send(b"x")
        peer.shutdown()
    await until(lambda: len(made) == 60 and all(protocol.is_lost for protocol in made))
    for peer in peers:
        peer.close()
    server.close()
    await iterations(5)
    broken = [protocol for protocol in made if type(protocol) is not Recorder]
    assert len(reported) == len(broken)
    for protocol in made:
        protocol.lost_with.clear()
    reported.clear()


EMFILE = """
    import asyncio, errno, os, resource, socket, sys, time
    loop = new_event_loop()
    reports = []
    loop.set_exception_handler(lambda loop, context: reports.append(context))

    class Hello(asyncio.Protocol):
        def connection_made(self, transport):
            transport.write(b"hello")
            transport.close()

    async def until(condition):
        give_up = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < give_up
            await asyncio.sleep(0.001)

    async def main():
        server = await loop.create_server(Hello, "127.0.0.1", 0)
        address = server.sockets[0].getsockname()
        clients = [socket.socket() for _ in range(3)]
        for client in clients:
            client.setblocking(False)
        highest = max(int(fd) for fd in os.listdir("/dev/fd"))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
        hog = []
        while True:
            try:
                hog.append(os.dup(0))
            except OSError:
                break
        for client in clients:
            client.connect_ex(address)
        await until(lambda: reports)
        before = time.process_time()
        await asyncio.sleep(0.3)
        busy = time.process_time() - before
        print("errno", errno.errorcode[reports[0]["exception"].errno])
        print("message", reports[0]["message"])
        print("socket", type(reports[0]["socket"]).__name__)
        print("few reports", len(reports) <= 101)  # asyncio reports an error for each place in the backlog
        print("not busy", busy < 0.2)
        print("others run", await asyncio.sleep(0.001, True))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in hog:
            os.close(fd)
        received = []
        for client in clients:
            data = b""
            while len(data) < 5:
                try:
                    data += client.recv(5 - len(data))
                except BlockingIOError:
                    await asyncio.sleep(0.001)
            received.append(data)
            client.close()
        print("recovered", received == [b"hello"] * 3)
        server.close()
        await asyncio.sleep(0.01)

    loop.run_until_complete(main())
    reports.clear()
    loop.close()
"""


@pytest.mark.skip_on(uvloop="reports the error in another way and spins")
def test_no_descriptors_left_at_accept(loop_kind):
    lines = run_script(loop_kind, EMFILE).strip().split("\n")
    assert lines == [
        "errno EMFILE",
        "message socket.accept() out of system resource",
        "socket TransportSocket",
        "few reports True",
        "not busy True",
        "others run True",
        "recovered True",
    ]
