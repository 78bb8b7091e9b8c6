"""UDP and unix datagrams, in each world (see conftest.py): coros, threads, and threads with plain sockets."""

from __future__ import annotations

import errno
import socket

import pytest
from support import HOST, coro_is_available

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro


def test_questions_and_answers(world):
    def answer(sock, count):
        for _ in range(count):
            data, address = sock.recvfrom(100)
            assert sock.sendto(data.upper(), address) == len(data)

    def main():
        with world.socket(type=socket.SOCK_DGRAM) as server, world.socket(type=socket.SOCK_DGRAM) as client:
            server.bind((HOST, 0))
            client.bind((HOST, 0))
            other = world.spawn(answer, server, 3)
            for message in (b"a", b"", b"bcd"):
                client.sendto(message, server.getsockname())
                assert client.recvfrom(100) == (message.upper(), server.getsockname())
            other.join()

    world.run(main)


def test_a_datagram_is_one_read(world):
    """The part of a datagram that does not fit is lost, and the next read gets the next datagram."""

    def main():
        near, far = world.pair(socket.SOCK_DGRAM)
        with near, far:
            for message in (b"abcdef", b"gh", b""):
                near.send(message)
            assert far.recv(3) == b"abc"
            buffer = bytearray(10)
            assert far.recv_into(buffer) == 2
            assert far.recv(10) == b""
            # After an empty datagram, the next one can be received.
            near.send(b"i")
            assert far.recv(10) == b"i"

    world.run(main)


def test_large_datagrams(world):
    def main():
        near, far = world.pair(socket.SOCK_DGRAM)
        with near, far:
            for length in (60_000, 100_000):
                near.send(bytes(length))
                assert far.recv(1 << 20) == bytes(length)
                near.send(bytes(length))
                assert len(far.recv(length // 2)) == length // 2

    world.run(main)


def test_a_refused_datagram(world):
    def main():
        with world.socket(type=socket.SOCK_DGRAM) as client:
            with world.socket(type=socket.SOCK_DGRAM) as server:
                server.bind((HOST, 0))
                client.connect(server.getsockname())
            client.send(b"x")
            with pytest.raises(ConnectionRefusedError) as caught:
                client.recv(10)
            assert caught.value.errno == errno.ECONNREFUSED

    world.run(main)


def test_a_sender_waits_for_space():
    def main():
        near, far = coro.socketpair(type=socket.SOCK_DGRAM)
        with near, far:

            def send():
                for number in range(2000):
                    near.send(b"%d" % number)

            sender = coro.spawn(send)
            assert [int(far.recv(100)) for _ in range(2000)] == list(range(2000))
            sender.join()

    coro.run(main)
