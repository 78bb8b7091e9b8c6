"""Storms: interruptions, closed and reused descriptors, connections that come and go, clients that misbehave.

The environment variable `STORM_SCALE=20` makes the storms longer: 20 times as many bytes, rounds or clients. Each storm
prints its `STORM_SEED=...`; set that variable to repeat the storm.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import os
import random
import resource
import socket
import struct

import pytest
from support import HOST, coro_is_available

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro

SCALE = int(os.environ.get("STORM_SCALE", "1"))
# A storm that does not end fails after this time.
CAP_S = 60 * SCALE


class Stop(Exception):
    """The exception with which coros are interrupted."""


@pytest.fixture
def chance():
    seed = int(os.environ.get("STORM_SEED", "0")) or random.randrange(1, 1 << 32)
    print(f"STORM_SEED={seed}")
    return random.Random(seed)


def run(storm, *args):
    return coro.run(coro.with_timeout, CAP_S, storm, *args)


def tcp_pair():
    with socket.create_server((HOST, 0)) as listener:
        near = coro.tcp_sock()
        near.connect(listener.getsockname())
        far, _ = listener.accept()
    return near, coro.sock(fileno=far.detach())


def reset(sock):
    """Close the connection with RST."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


# ---- interruptions ---------------------------------------------------------------------------------------------------


class Stream:
    """Random bytes through one connection. A reader or writer that is interrupted continues where it was."""

    def __init__(self, pair, size, chance):
        self.near, self.far = pair
        self.chance = chance
        self.data = chance.randbytes(size)
        self.received = bytearray()
        self.interruptions = 0
        for sock in pair:
            # Small buffers make both sides wait.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.coros = [coro.spawn(self.write), coro.spawn(self.read)]

    def write(self):
        sent = 0
        while sent < len(self.data):
            part = memoryview(self.data)[sent : sent + self.chance.randrange(1, 30_000)]
            send = self.chance.choice([self.near.send, lambda part: self.near.sendmsg([part[:5], part[5:]])])
            with self.interrupted():
                sent += send(part)
        self.near.shutdown(socket.SHUT_WR)

    def read(self):
        while True:
            left = len(self.data) - len(self.received)
            size = self.chance.randrange(1, 20_000)
            with self.interrupted():
                part = self.read_part(size, left)
                if not part:
                    return
                self.received += part

    def read_part(self, size, left):
        kind = self.chance.randrange(5)
        if kind == 0:
            buffer = bytearray(size)
            return buffer[: self.far.recv_into(buffer)]
        if kind == 1:
            buffers = [bytearray(3), bytearray(size)]
            count = self.far.readv(buffers)
            return b"".join(buffers)[:count]
        if kind == 2 and left:
            return self.far.recv_exact(min(size, left))
        if kind == 3:
            with coro.timeout(0.0001):
                return self.far.recv(size)
        return self.far.recv(size)

    @contextlib.contextmanager
    def interrupted(self):
        try:
            yield
        except (Stop, coro.TimeoutError):
            self.interruptions += 1

    def check(self):
        assert hashlib.sha256(self.received).digest() == hashlib.sha256(self.data).digest()


@pytest.mark.parametrize(
    ("make_pair", "size"), [(tcp_pair, 40_000), (lambda: coro.socketpair(), 500_000)], ids=["tcp", "unix"]
)
def test_interruptions_of_streams(make_pair, size, chance):
    """No byte is lost or duplicated, no matter when a read or write is interrupted or times out."""

    def storm():
        streams = [Stream(make_pair(), size * SCALE, chance) for _ in range(8)]
        working = [co for stream in streams for co in stream.coros]
        coro.yield_slice()  # let each coro begin: only then can it catch an interruption
        while working:
            for co in [co for co in working if co.done()]:
                co.join()
                working.remove(co)
            for co in chance.sample(working, min(2, len(working))):
                if co._status in ("waiting", "ready"):
                    co.raise_exception(Stop)
            for _ in range(chance.randrange(1, 4)):
                coro.yield_slice()
        for stream in streams:
            stream.check()
            stream.near.close()
            stream.far.close()
        return sum(stream.interruptions for stream in streams)

    assert run(storm) > 20


# ---- descriptors -----------------------------------------------------------------------------------------------------


class Place:
    """A series of connections. Each new connection may reuse the descriptor numbers of closed ones."""

    def __init__(self, number, chance):
        self.number, self.chance = number, chance
        self.endings = {}

    def work(self, rounds):
        for turn in range(rounds):
            mark = f"{self.number}.{turn}".encode()
            near, far = self.chance.choice([tcp_pair, coro.socketpair])()
            reader = coro.spawn(self.read, near, mark)
            coro.yield_slice()
            ending = self.chance.choice([self.send, self.close, self.close_behind, self.detach, self.hang_up])
            self.endings.setdefault(ending.__name__, set()).add(ending(near, far, mark, reader))
            for sock in (near, far):
                sock.close()

    def read(self, near, mark):
        try:
            data = near.recv_exact(len(mark)) if self.chance.randrange(2) else near.recv(100)
        except coro.ClosedError:
            return "closed"
        except EOFError:
            return "end"
        assert data in (mark, b""), "bytes of another connection"
        return "data" if data else "end"

    def send(self, near, far, mark, reader):
        far.sendall(mark)
        return reader.join()

    def close(self, near, far, mark, reader):
        near.close()
        return reader.join()

    def close_behind(self, near, far, mark, reader):
        """Close the descriptor with `os.close`, and give its number to another file at once. The reader's wait ends
        when this method waits for the other file.
        """
        number = near.fileno()
        mine, another = socket.socketpair()
        os.close(number)
        os.dup2(mine.fileno(), number)
        mine.close()
        with coro.sock(fileno=number) as other, another:
            another.sendall(b"other")
            assert other.recv(100) == b"other"
            other.settimeout(0.0001)
            with pytest.raises(TimeoutError):
                other.recv(1)
            near.detach()
        return reader.join()

    def detach(self, near, far, mark, reader):
        number = near.detach()
        outcome = reader.join()
        os.close(number)
        return outcome

    def hang_up(self, near, far, mark, reader):
        far.close()
        return reader.join()


def test_descriptors_are_closed_and_reused_under_waiters(chance):
    def storm():
        places = [Place(number, chance) for number in range(10)]
        coro.in_parallel([(place.work, (40 * SCALE,)) for place in places])
        endings = {}
        for place in places:
            for name, outcomes in place.endings.items():
                endings.setdefault(name, set()).update(outcomes)
        return endings

    closed = {"closed"}
    assert run(storm) == {
        "send": {"data"},
        "close": closed,
        "close_behind": closed,
        "detach": closed,
        "hang_up": {"end"},
    }


# ---- connections -----------------------------------------------------------------------------------------------------


class Echo:
    """An echo server that counts its connections."""

    def __init__(self):
        self.served = 0

    def __call__(self, sock, address):
        self.served += 1
        sock.settimeout(CAP_S)
        try:
            while data := sock.recv(65536):
                sock.sendall(data)
        except ConnectionError:
            pass


def visit(address, chance):
    with coro.tcp_sock() as client:
        client.connect(address)
        ending = chance.choice(["reset", "half-close", "close", "close"])
        data = chance.randbytes(chance.randrange(1, 3000))
        client.sendall(data)
        if ending == "reset":
            reset(client)
        else:
            assert client.recv_exact(len(data)) == data
        if ending == "half-close":
            client.shutdown(socket.SHUT_WR)
            assert client.recv(1) == b""


def used():
    """Return the number of open descriptors, and the resident memory in KiB."""
    gc.collect()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return len(os.listdir("/proc/self/fd")), pages * resource.getpagesize() // 1024


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the test counts descriptors in /proc")
def test_connections_come_and_go(chance, eviction):
    """10,000 clients (1,000 in the eviction mode `always`) come and go, 250 at a time. At the end, the number of open
    descriptors is not higher than after the first 500 clients, and hardly more memory is used.
    """
    waves = (40 if eviction == "lazy" else 4) * SCALE
    size = 250

    def storm():
        echo = Echo()
        with coro.serve(echo, HOST, 0, backlog=size) as server:
            address = server.sockets[0].getsockname()
            for wave in range(waves):
                coro.in_parallel([(visit, (address, chance))] * size)
                if wave == 1:
                    first = settled(first_of=None)
            last = settled(first_of=first[0])
        assert echo.served == waves * size
        return first, last

    def settled(first_of):
        """Wait until the server has seen the end of the last client, and until at most `first_of` descriptors are open
        (None: any number). Return `used()`.
        """
        with coro.timeout(CAP_S):
            while len(coro.get_live_coros()) > 3 or (first_of is not None and used()[0] > first_of):
                coro.sleep_relative(0.001)
        return used()

    first, last = run(storm)
    assert last[0] <= first[0]
    assert last[1] < first[1] + 4096 + first[1] // 10


def test_slow_and_half_open_clients(chance):
    """Some clients are slow, stop sending within a line, half-close, leave with RST or never read. They do not delay
    the other clients.
    """
    line = b"a line that is not short\n"

    def handler(sock, address):
        sock.settimeout(0.5)
        try:
            for received in coro.read_stream(sock):
                sock.sendall(received * 1000 if received == b"much\n" else received)
        except TimeoutError:
            timed_out.append(address)
        except ConnectionError:
            pass

    def connect(address):
        client = coro.tcp_sock()
        client.connect(address)
        return client

    def slow(address):
        with connect(address) as client:
            for place in range(len(line)):
                client.sendall(line[place : place + 1])
                coro.sleep_relative(0.001)
            assert client.recv_exact(len(line)) == line

    def silent(address):
        with connect(address) as client:
            client.sendall(line[:-1])
            assert client.recv(1) == b"", "the server has not given up"

    def half_closed(address):
        with connect(address) as client:
            client.sendall(line + line)
            client.shutdown(socket.SHUT_WR)
            assert client.recv_exact(2 * len(line)) == 2 * line
            assert client.recv(1) == b""

    def leaving(address):
        client = connect(address)
        client.sendall(line[: chance.randrange(1, len(line))])
        reset(client)

    def deaf(address):
        with connect(address) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            with pytest.raises(OSError) as caught:  # when the server gives up
                while True:
                    client.send(b"much\n" * 10)
            assert caught.value.errno in (errno.ECONNRESET, errno.EPIPE)

    def lively(address):
        with connect(address) as client:
            for _ in range(20 * SCALE):
                client.sendall(line)
                assert client.recv_exact(len(line)) == line

    timed_out = []
    kinds = [slow, silent, half_closed, leaving, deaf, lively]

    def storm():
        with coro.serve(handler, HOST, 0) as server:
            address = server.sockets[0].getsockname()
            coro.in_parallel([(kind, (address,)) for kind in kinds for _ in range(20)])
            with coro.timeout(CAP_S):
                while len(coro.get_live_coros()) > 3:
                    coro.sleep_relative(0.001)

    run(storm)
    assert len(timed_out) == 40, "the silent and the deaf clients must time out"
