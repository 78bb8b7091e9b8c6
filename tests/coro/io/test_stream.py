"""Stream sockets. Tests with the fixture `world` also run with plain sockets in threads, as a control."""

from __future__ import annotations

import errno
import os
import socket

import pytest
from support import HOST, coro_is_available

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro

BIG = bytes(range(256)) * 4096 * 8


def test_echo(world):
    def serve(listener):
        connection, address = listener.accept()
        with connection:
            assert address[0] == HOST
            assert type(connection) is world.class_()
            assert connection.gettimeout() is None
            while data := connection.recv(4096):
                connection.sendall(data)

    def main():
        with world.socket() as listener, world.socket() as client:
            listener.bind((HOST, 0))
            listener.listen()
            server = world.spawn(serve, listener)
            client.connect(listener.getsockname())
            for length in (1, 100, 4096):
                client.sendall(b"x" * length)
                received = b""
                while len(received) < length:
                    received += client.recv(10_000)
                assert received == b"x" * length
            client.shutdown(socket.SHUT_WR)
            assert client.recv(1) == b""
            server.join()

    world.run(main)


def test_reads_of_changing_sizes_return_all_data(world):
    """Reads of different sizes take turns. In a coro, some receive into the loop's buffer, others straight into a new
    `bytes`. Each message is confirmed before the next one is sent.
    """
    lengths = [102_400, 102_400, 10, 102_400, 8192, 8191, 65_536, 65_536, 102_400, 200_000, 1, 40_000] * 3

    def receive(connection):
        for number, length in enumerate(lengths):
            message, asked_for = b"", (65_536, 4096, 262_144)[number % 3]
            while len(message) < length:
                part = connection.recv(asked_for)
                assert 0 < len(part) <= asked_for
                message += part
            assert message == BIG[number : number + length]
            connection.sendall(b"+")
        assert connection.recv(65_536) == b""

    def main():
        near, far = world.tcp_pair()
        with near, far:
            receiver = world.spawn(receive, far)
            for number, length in enumerate(lengths):
                near.sendall(BIG[number : number + length])
                assert near.recv(1) == b"+"
            near.shutdown(socket.SHUT_WR)
            receiver.join()

    world.run(main)


def test_many_echoes_at_once():
    """The server has a coro for each of its 100 connections, and each client is a coro, too."""

    def serve(connection):
        with connection:
            while data := connection.recv(4096):
                connection.sendall(data)

    def accept(listener, count):
        while count:
            for connection, _ in listener.accept_many():
                coro.spawn(serve, connection)
                count -= 1

    def talk(address, number):
        with coro.tcp_sock() as client:
            client.connect(address)
            for turn in range(20):
                message = b"%d %d" % (number, turn)
                client.sendall(message)
                assert client.recv_exact(len(message)) == message

    def main():
        with coro.tcp_sock() as listener:
            listener.bind((HOST, 0))
            listener.listen(100)
            acceptor = coro.spawn(accept, listener, 100)
            coro.in_parallel([(talk, (listener.getsockname(), number)) for number in range(100)])
            acceptor.join()

    coro.run(main)


def test_a_large_sendall_against_a_slow_reader(world):
    def read(sock):
        parts = []
        while data := sock.recv(30_000):
            parts.append(data)
        return b"".join(parts)

    def main():
        near, far = world.tcp_pair()
        with near, far:
            reader = world.spawn(read, far)
            assert near.sendall(bytearray(BIG)) is None
            near.close()
            assert reader.join() == BIG

    world.run(main)


def test_half_close(world):
    """After one direction has ended, the other one continues."""

    def answer(sock):
        received = b""
        while data := sock.recv(100):
            received += data
        sock.sendall(received[::-1])
        sock.shutdown(socket.SHUT_WR)

    def main():
        near, far = world.tcp_pair()
        with near, far:
            other = world.spawn(answer, far)
            near.sendall(b"abc")
            near.shutdown(socket.SHUT_WR)
            assert near.recv(100) == b"cba"
            assert near.recv(100) == b""
            other.join()

    world.run(main)


def test_recv_into(world):
    def main():
        near, far = world.pair()
        with near, far:
            near.sendall(b"abcdef")
            buffer = bytearray(10)
            assert far.recv_into(buffer, 4) == 4
            assert far.recv_into(memoryview(buffer)[4:]) == 2
            assert buffer == b"abcdef\0\0\0\0"
            near.sendall(b"xyz")
            assert far.recv_into(buffer, nbytes=2) == 2
            assert far.recv_into(buffer, 0, socket.MSG_PEEK) == 1
            assert far.recv_into(buffer, 1, 0) == 1
            assert buffer[:2] == b"zy"

    world.run(main)


def test_recv_and_its_variants_wait_for_data(world):
    def main():
        near, far = world.pair()
        with near, far:

            def later(data):
                world.spawn(near.sendall, data).join()

            calls = [
                (lambda: far.recv(10), b"1"),
                (lambda: far.recv(10, 0), b"1"),
                (lambda: far.recvfrom(10)[0], b"1"),
                (lambda: far.recvmsg(10)[0], b"1"),
                (lambda: far.recvmsg_into([bytearray(10)])[0], 1),
                (lambda: far.recv_into(bytearray(10)), 1),
                (lambda: far.recvfrom_into(bytearray(10))[0], 1),
            ]
            for call, expected in calls:
                sender = world.spawn(later, b"1")
                assert call() == expected
                sender.join()

    world.run(main)


def test_recv_exact():
    def main():
        near, far = coro.socketpair()
        with near, far:
            reader = coro.spawn(far.recv_exact, 10)
            for part in (b"012", b"3456", b"789ab"):
                near.sendall(part)
                coro.yield_slice()
                coro.yield_slice()
            assert reader.join() == b"0123456789"
            assert far.recv_exact(0) == b""
            assert far.recv_exact(2) == b"ab"
            with pytest.raises(ValueError, match="negative"):
                far.recv_exact(-1)
            with pytest.raises(TypeError):
                far.recv_exact()

    coro.run(main)


def test_recv_exact_at_the_end_of_the_stream_keeps_the_data():
    def main():
        near, far = coro.socketpair()
        with far:
            near.sendall(b"0123")
            near.close()
            with pytest.raises(EOFError, match="after 4 of 10 bytes"):
                far.recv_exact(10)
            assert far.recv(3) == b"012"
            assert far.recv(3) == b"3"
            assert far.recv(3) == b""

    coro.run(main)


def test_an_interrupted_recv_exact_keeps_the_data():
    def main():
        near, far = coro.socketpair()
        with near, far:
            reader = coro.spawn(far.recv_exact, 10)
            near.sendall(b"0123")
            coro.sleep_relative(0.001)
            reader.interrupt()
            assert reader.join() is None
            buffer = bytearray(2)
            assert far.recv_into(buffer) == 2
            assert buffer == b"01"
            near.sendall(b"456789")
            assert far.recv_exact(8) == b"23456789"
            # All kept data has been read. So when the socket is empty, the next read waits for new data, as usual.
            near.sendall(b"a")
            assert far.recv(10) == b"a"
            late = coro.spawn(far.recv, 10)
            coro.yield_slice()
            near.sendall(b"b")
            assert late.join() == b"b"

    coro.run(main)


def test_readv_and_writev():
    def main():
        near, far = coro.socketpair()
        with near, far:
            first, second = bytearray(3), bytearray(5)
            reader = coro.spawn(far.readv, [first, second])
            coro.yield_slice()
            assert near.writev([b"ab", bytearray(b"cde"), memoryview(b"f")]) == 6
            assert reader.join() == 6
            assert (first, second) == (b"abc", b"def\0\0")
            assert near.writev([]) == 0
            many = [b"%04d" % number for number in range(3000)]
            writer = coro.spawn(near.writev, many)
            assert far.recv_exact(12_000) == b"".join(many)
            assert writer.join() == 12_000

    coro.run(main)


def test_readv_with_sizes():
    """As in Shrapnel, `readv` returns a tuple with all that was asked for, or with what arrived before the end."""

    def main():
        near, far = coro.socketpair()
        with near, far:
            reader = coro.spawn(far.readv, [3, 0, 2])
            coro.yield_slice()
            near.sendall(b"abc")
            coro.yield_slice()
            near.sendall(b"defgh")
            assert reader.join() == (b"abc", b"", b"de")
            assert far.readv((1, True)) == (b"f", b"g")
            # An interrupted call has lost nothing.
            reader = coro.spawn(far.readv, [5, 5])
            coro.yield_slice()
            reader.raise_exception(KeyError)
            with pytest.raises(KeyError):
                reader.join()
            near.sendall(b"ijklmno")
            near.shutdown(socket.SHUT_WR)
            assert far.readv([4, 4, 4]) == (b"hijk", b"lmno")
            assert far.readv([4]) == ()
            with pytest.raises(ValueError, match="got -1"):
                far.readv([2, -1])
            with pytest.raises(TypeError):
                far.readv([2, bytearray(1)])

    coro.run(main)


def test_writev_of_more_than_fits():
    def main():
        near, far = coro.socketpair()
        with near, far:
            parts = [BIG[: 1 << 20], b"", BIG[1 << 20 :]]
            writer = coro.spawn(near.writev, parts)
            assert far.recv_exact(len(BIG)) == BIG
            assert writer.join() == len(BIG)

    coro.run(main)


def test_write_returns_the_length():
    def main():
        near, far = coro.socketpair()
        with near, far:
            writer = coro.spawn(near.write, BIG)
            assert far.recv_exact(len(BIG)) == BIG
            assert writer.join() == len(BIG)
            assert near.write(bytearray(b"xy")) == 2
            with pytest.raises(TypeError):
                near.write(b"xy", 0)

    coro.run(main)


def test_accept_many():
    def main():
        with coro.tcp_sock() as listener:
            listener.bind((HOST, 0))
            listener.listen(10)
            clients = [coro.tcp_sock() for _ in range(5)]
            for client in clients:
                client.connect(listener.getsockname())
            some = listener.accept_many(2)
            assert len(some) == 2
            others = listener.accept_many()
            assert len(others) == 3
            addresses = {client.getsockname() for client in clients}
            assert {address for _, address in some + others} == addresses
            assert all(type(sock) is coro.sock for sock, _ in some + others)
            waiting = coro.spawn(listener.accept_many)
            coro.yield_slice()
            with coro.tcp_sock() as late:
                late.connect(listener.getsockname())
                ((sock, address),) = waiting.join()
                assert address == late.getsockname()
                sock.close()
            for sock in [*clients, *(sock for sock, _ in some + others)]:
                sock.close()

    coro.run(main)


def test_accept_many_keeps_what_it_has_accepted_if_a_class_raises(monkeypatch):
    reported = []
    monkeypatch.setattr("sys.unraisablehook", lambda args: reported.append(args.exc_value))

    class Picky(coro.sock):
        accepted = 0

        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            if "fileno" in options:
                Picky.accepted += 1
                if Picky.accepted in (3, 4):
                    raise ValueError(f"connection {Picky.accepted}")

    def main():
        with Picky(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.bind((HOST, 0))
            listener.listen(10)
            clients = [coro.tcp_sock() for _ in range(5)]
            for client in clients:
                client.connect(listener.getsockname())
            first = listener.accept_many()
            assert [address for _, address in first] == [client.getsockname() for client in clients[:2]]
            assert [str(error) for error in reported] == ["connection 3"]
            with pytest.raises(ValueError, match="connection 4"):
                listener.accept_many()
            rest = listener.accept_many()
            assert [address for _, address in rest] == [clients[4].getsockname()]
            assert clients[2].recv(1) == clients[3].recv(1) == b""
            for sock in [*clients, *(sock for sock, _ in first + rest)]:
                sock.close()

    coro.run(main)


def test_makefile(world):
    def answer(sock):
        with sock.makefile("rwb") as file:
            for line in file:
                file.write(line.upper())
                file.flush()
        sock.shutdown(socket.SHUT_WR)

    def main():
        near, far = world.tcp_pair()
        with near, far:
            other = world.spawn(answer, far)
            with near.makefile("rw", encoding="utf-8", newline="\n") as file:
                for line in ("one\n", "two\n"):
                    file.write(line)
                    file.flush()
                    assert file.readline() == line.upper()
                near.shutdown(socket.SHUT_WR)
                assert file.read() == ""
            other.join()

    world.run(main)


def test_sendfile(world, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(BIG)

    def read(sock):
        parts = []
        while data := sock.recv(100_000):
            parts.append(data)
        return b"".join(parts)

    def main():
        near, far = world.tcp_pair()
        with near, far, path.open("rb") as file:
            reader = world.spawn(read, far)
            assert near.sendfile(file, 5, 10) == 10
            assert file.tell() == 15
            assert near.sendfile(file, 100) == len(BIG) - 100
            near.close()
            assert reader.join() == BIG[5:15] + BIG[100:]

    world.run(main)


def test_a_unix_socket_with_a_path(world, tmp_path):
    path = str(tmp_path / "socket")

    def serve(listener):
        connection, _ = listener.accept()
        with connection:
            connection.sendall(connection.recv(10) * 2)

    def main():
        with world.socket(socket.AF_UNIX) as listener, world.socket(socket.AF_UNIX) as client:
            listener.bind(path)
            listener.listen()
            server = world.spawn(serve, listener)
            client.connect(path)
            client.sendall(b"ab")
            assert client.recv(10) == b"abab"
            server.join()

    world.run(main)


def test_connect_waits_while_the_queue_of_a_unix_socket_is_full(world, tmp_path):
    path = str(tmp_path / "socket")

    def main():
        with world.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(0)
            first, second = world.socket(socket.AF_UNIX), world.socket(socket.AF_UNIX)
            with first, second:
                first.connect(path)
                waiting = world.spawn(second.connect, path)
                accepted = [listener.accept()[0] for _ in range(2)]
                waiting.join()
                for sock in accepted:
                    sock.close()

    world.run(main)


def test_descriptors_that_are_passed_do_not_stop_the_stream():
    """On a unix socket, a read stops where descriptors were passed, so more data may be left after a short read."""

    def read(sock):
        received = b""
        while data := sock.recv(100):
            received += data
        return received

    def main():
        near, far = coro.socketpair()
        with near, far:
            reader = coro.spawn(read, far)
            coro.yield_slice()
            near.sendall(b"a")
            read_end, write_end = os.pipe()
            socket.send_fds(near, [b"b"], [read_end])
            near.sendall(b"c")
            near.shutdown(socket.SHUT_WR)
            os.close(read_end)
            os.close(write_end)
            assert reader.join() == b"abc"

    coro.run(main)


def test_urgent_data_does_not_stop_the_stream(world):
    """A read of TCP stops before urgent data, so more data may be left after a short read."""

    def read(sock):
        received = b""
        while not received.endswith(b"end"):
            received += sock.recv(100)
        return received

    def main():
        near, far = world.tcp_pair()
        with near, far:
            for _ in range(20):
                reader = world.spawn(read, far)
                near.sendall(b"ab")
                near.send(b"!", socket.MSG_OOB)
                near.sendall(b"cdend")
                assert reader.join() == b"abcdend"

    world.run(main)


def test_errors_are_the_same_as_with_plain_sockets(world):
    """The calls are made on a closed socket, on an unconnected socket, and with wrong arguments."""

    def outcome(call):
        try:
            return call()
        except Exception as error:
            return type(error).__mro__[-4:-2], getattr(error, "errno", None)

    def main(world):
        closed = world.socket()
        closed.close()
        unconnected = world.socket()
        listener = world.socket()
        listener.bind((HOST, 0))
        calls = [
            lambda: closed.recv(1),
            lambda: closed.recv_into(bytearray(1)),
            lambda: closed.recvfrom(1),
            lambda: closed.recvmsg(1),
            lambda: closed.send(b"x"),
            lambda: closed.sendall(b"x"),
            lambda: closed.sendto(b"x", (HOST, 1)),
            lambda: closed.sendmsg([b"x"]),
            lambda: closed.accept(),
            lambda: closed.connect((HOST, 1)),
            lambda: closed.connect_ex((HOST, 1)),
            lambda: closed.settimeout(1),
            lambda: closed.setblocking(True),
            lambda: closed.bind((HOST, 0)),
            lambda: unconnected.recv(1),
            lambda: unconnected.send(b"x"),
            lambda: unconnected.sendall(b"x"),
            lambda: unconnected.accept(),
            lambda: unconnected.recv(-1),
            lambda: unconnected.recv("1"),
            lambda: unconnected.recv(),
            lambda: unconnected.recv(1, 2, 3),
            lambda: unconnected.recv_into(b"readonly"),
            lambda: unconnected.recv_into(bytearray(2), 3),
            lambda: unconnected.recv_into(bytearray(2), -1),
            lambda: unconnected.send("text"),
            lambda: unconnected.sendall("text"),
            lambda: unconnected.sendall(),
            lambda: unconnected.sendall(b"", 0, 0),
            lambda: unconnected.sendto(b"x"),
            lambda: unconnected.sendto(b"x", "address"),
            lambda: unconnected.connect("address"),
            lambda: unconnected.connect((HOST,)),
            lambda: unconnected.connect((HOST, "port")),
            lambda: unconnected.connect((HOST, 70000)),
            lambda: unconnected.connect((1, 2)),
            lambda: unconnected.settimeout(-1),
            lambda: unconnected.settimeout("1"),
            lambda: unconnected.settimeout(float("nan")),
            lambda: unconnected.shutdown(socket.SHUT_RDWR),
            lambda: unconnected.connect(listener.getsockname()),
            lambda: unconnected.connect_ex(listener.getsockname()),
        ]
        outcomes = [outcome(call) for call in calls]
        unconnected.close()
        listener.close()
        return outcomes

    expected = type(world)("plain")
    assert world.run(main, world) == expected.run(main, expected)


def test_a_reset_connection(world):
    def main():
        near, far = world.tcp_pair()
        with near:
            far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            far.close()
            with pytest.raises(ConnectionResetError) as caught:
                near.recv(10)
            assert caught.value.args == (errno.ECONNRESET, os.strerror(errno.ECONNRESET))
            with pytest.raises(BrokenPipeError):
                near.sendall(b"x")

    world.run(main)


def test_a_refused_connection(world):
    def main():
        with world.socket() as listener, world.socket() as client:
            listener.bind((HOST, 0))
            address = listener.getsockname()
            with pytest.raises(ConnectionRefusedError) as caught:
                client.connect(address)
            assert caught.value.args == (errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            assert client.connect_ex(address) == errno.ECONNREFUSED
            # The socket can be used again.
            listener.listen()
            client.connect(address)

    world.run(main)


def test_ipv6(world):
    if not socket.has_ipv6:
        pytest.skip("no IPv6")

    def main():
        with world.socket(socket.AF_INET6) as listener, world.socket(socket.AF_INET6) as client:
            try:
                listener.bind(("::1", 0))
            except OSError:
                return
            listener.listen()
            client.connect(listener.getsockname())
            connection, address = listener.accept()
            with connection:
                assert address == client.getsockname()

    world.run(main)
