"""Sockets are closed under their transports while forked children still hold them, and new files get the descriptor
numbers of the closed sockets. No byte may reach the wrong file.
"""

from __future__ import annotations

import pytest
from support import run_script

STORM = """
import asyncio, os, random, signal, socket, time

class Connection(asyncio.Protocol):
    def __init__(self, tag, sock, peer):
        self.tag, self.sock, self.peer, self.transport = tag, sock, peer, None
        self.is_lost, self.count = False, 0
    def connection_made(self, transport):
        self.transport = transport
    def data_received(self, data):
        assert not data.strip(self.tag), (self.tag, data)
        self.count += len(data)
        self.transport.write(data)
    def connection_lost(self, exc):
        self.is_lost = True

class Buffered(asyncio.BufferedProtocol):
    connection_made, connection_lost = Connection.connection_made, Connection.connection_lost
    __init__ = Connection.__init__
    def get_buffer(self, hint):
        self.buffer = bytearray(1000)
        return self.buffer
    def buffer_updated(self, count):
        Connection.data_received(self, bytes(self.buffer[:count]))

children = []

def fork():
    # A process that holds whatever is open now, and does nothing.
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        while os.getppid() == parent:
            time.sleep(0.01)
        os._exit(0)
    children.append(pid)

def end_child():
    pid = children.pop(0)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)

async def main():
    loop = asyncio.get_running_loop()
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(100)
    live, gone, strangers = [], [], []
    number = 0

    def look(connection):
        try:
            data = connection.peer.recv(100_000)
        except (BlockingIOError, ConnectionError):
            return
        assert not data.strip(connection.tag), (connection.tag, data)

    for step in range(600):
        match rng.randrange(8):
            case 0 | 1 if len(live) < 30:
                number = number % 200 + 1
                peer = socket.create_connection(listener.getsockname())
                sock, _ = listener.accept()
                peer.setblocking(False)
                kind = rng.choice((Connection, Buffered))
                _, protocol = await loop.create_connection(
                    lambda: kind(bytes([number]), sock, peer), sock=sock)
                live.append(protocol)
            case 2 if live:
                for connection in rng.sample(live, min(4, len(live))):
                    try:
                        connection.peer.send(connection.tag * rng.randrange(1, 3000))
                    except (BlockingIOError, ConnectionError):
                        pass
            case 3 if live:
                connection = live.pop(rng.randrange(len(live)))
                connection.sock.close()  # under its transport
                gone.append(connection)
            case 4 if gone:
                connection = rng.choice(gone)
                rng.choice((
                    lambda: connection.transport.write(connection.tag * 100),
                    connection.transport.close, connection.transport.abort,
                    connection.transport.pause_reading, connection.transport.resume_reading,
                ))()
                try:
                    connection.peer.send(connection.tag * 10)
                except (BlockingIOError, ConnectionError):
                    pass
            case 5 if len(strangers) < 10:
                strangers.append(socket.socketpair())
                for sock in strangers[-1]:
                    sock.setblocking(False)
            case 6 if strangers:
                ours, theirs = strangers.pop(rng.randrange(len(strangers)))
                for sender, receiver in ((ours, theirs), (theirs, ours)):
                    sender.send(b"foreign")
                    assert receiver.recv(1000) == b"foreign"
                ours.close()
                theirs.close()
            case 7:
                if len(children) > 2:
                    end_child()
                elif rng.random() < 0.3:
                    fork()
        for connection in live:
            look(connection)
        if rng.random() < 0.5:
            await asyncio.sleep(0)
        if step % 50 == 0:
            await asyncio.sleep(0.001)
    while children:
        end_child()
    for connection in live + gone:
        connection.transport.abort()
    for ours, theirs in strangers:
        ours.close(), theirs.close()
    await asyncio.sleep(0.01)
    assert all(connection.is_lost for connection in live + gone)
    assert sum(connection.count for connection in live) > 0
    for connection in live + gone:
        connection.peer.close()
    listener.close()
"""


@pytest.mark.skip_on(
    asyncio="fails when a new file gets the number of a socket that was closed under its transport",
    uvloop="keeps sockets open until its transports are closed",
)
@pytest.mark.parametrize("seed", range(4))
def test_a_storm_with_duplicates_in_forked_children(loop_kind, seed):
    run_script(
        loop_kind,
        STORM
        + f"""
rng = random.Random({seed})
loop = new_event_loop()
loop.run_until_complete(main())
loop.close()
""",
    )
