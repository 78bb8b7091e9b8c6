"""Timeouts of sockets: calls that take too long, the default timeout, and a timeout of 0, with which no call waits."""

from __future__ import annotations

import contextlib
import errno
import os
import socket

import pytest
from support import HOST, coro_is_available, until_waiting

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro


def test_each_call_ends_after_the_timeout_of_its_socket(world):
    def fill(sock):
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                sock.send(b"x" * 100_000)

    def main():
        near, far = world.pair()
        with near, far, world.socket() as listener:
            listener.bind((HOST, 0))
            listener.listen()
            listener.settimeout(0.001)
            fill(near)
            near.settimeout(0.001)
            calls = [
                lambda: near.recv(1),
                lambda: near.recv(1, 0),
                lambda: near.recv_into(bytearray(1)),
                lambda: near.recvfrom(1),
                lambda: near.recvmsg(1),
                lambda: near.send(b"x"),
                lambda: near.sendall(b"x"),
                lambda: near.sendmsg([b"x"]),
                lambda: listener.accept(),
            ]
            for call in calls:
                with pytest.raises(TimeoutError, match=r"^timed out$") as caught:
                    call()
                assert type(caught.value) is TimeoutError
            assert near.gettimeout() == near.timeout == 0.001

    world.run(main)


def test_urgent_data_that_has_not_come(world):
    """Without urgent data, a call with MSG_OOB fails with EINVAL. A socket with a timeout first waits for any data."""
    calls = [
        lambda sock: sock.recv(1, socket.MSG_OOB),
        lambda sock: sock.recv_into(bytearray(1), flags=socket.MSG_OOB),
        lambda sock: sock.recvfrom(1, socket.MSG_OOB),
        lambda sock: sock.recvmsg(1, 0, socket.MSG_OOB),
    ]

    def error_of(call):
        try:
            call()
        except OSError as error:
            return error.errno

    def main():
        near, far = world.tcp_pair()
        with near, far:
            for call in calls:
                near.settimeout(0.001)
                with pytest.raises(TimeoutError):
                    call(near)
                for timeout in (None, 0):
                    near.settimeout(timeout)
                    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
                        call(near)
            near.settimeout(60)
            reader = world.spawn(error_of, lambda: calls[0](near))
            far.sendall(b"normal")
            assert reader.join() == errno.EINVAL
            for call in calls:
                with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
                    call(near)
            far.send(b"!", socket.MSG_OOB)
            assert near.recv(10) == b"normal"

    world.run(main)


def test_the_timeout_reads_as_that_of_a_plain_socket(world):
    def main():
        with world.socket() as sock:
            assert (sock.gettimeout(), sock.getblocking(), sock.timeout) == (None, True, None)
            for value, shown in ((0, 0.0), (0.0, 0.0), (2, 2.0), (2.5, 2.5), (None, None), (True, 1.0)):
                sock.settimeout(value)
                assert (sock.gettimeout(), sock.timeout, sock.getblocking()) == (shown, shown, shown != 0)
                assert type(sock.gettimeout()) is type(shown)
            sock.setblocking(False)
            assert sock.gettimeout() == 0.0
            sock.setblocking(True)
            assert sock.gettimeout() is None

    world.run(main)


@pytest.mark.parametrize("what", ["socket", "number"])
def test_waiting_again_for_a_socket_that_is_still_ready(what):
    """A wait for a socket that is ready ends at once, even if nothing was read after the last wait."""

    def main():
        listener = socket.socket()
        listener.bind((HOST, 0))
        listener.listen()
        near = coro.tcp_sock()
        near.connect(listener.getsockname())
        far, _ = listener.accept()
        target = near if what == "socket" else near.fileno()
        with listener, near, far, coro.timeout(10):
            for _ in range(3):
                # A short read, after which the socket is known to be empty.
                far.sendall(b"x")
                assert near.recv(100) == b"x"
                waiter = coro.spawn(coro.wait_for_read, target)
                until_waiting(waiter)
                far.sendall(b"abc")
                waiter.join()
                coro.wait_for_write(target)
                coro.wait_for_read(target)
                assert near.recv(1) == b"a"
                coro.wait_for_read(target)
                assert near.recv(100) == b"bc"
            far.shutdown(socket.SHUT_WR)
            coro.wait_for_read(target)
            coro.wait_for_read(target)
            assert near.recv(100) == b""

    coro.run(main)


def test_the_default_timeout(world):
    socket.setdefaulttimeout(5)
    try:

        def main():
            with world.socket() as listener, world.socket() as client:
                assert listener.gettimeout() == 5
                listener.bind((HOST, 0))
                listener.listen()
                client.connect(listener.getsockname())
                accepted, _ = listener.accept()
                with accepted:
                    assert accepted.gettimeout() == 5

        world.run(main)
    finally:
        socket.setdefaulttimeout(None)


def test_without_waiting(world):
    def main():
        near, far = world.pair()
        with near, far, world.socket() as listener, world.socket() as client:
            near.setblocking(False)
            listener.setblocking(False)
            listener.bind((HOST, 0))
            listener.listen()
            for call in (lambda: near.recv(1), lambda: near.recvfrom(1), listener.accept):
                with pytest.raises(BlockingIOError) as caught:
                    call()
                assert caught.value.args == (errno.EAGAIN, os.strerror(errno.EAGAIN))
            client.setblocking(False)
            with pytest.raises(BlockingIOError) as caught:
                client.connect(listener.getsockname())
            assert caught.value.errno == errno.EINPROGRESS
            far.sendall(b"x")
            assert near.recv(10) == b"x"
            with pytest.raises(BlockingIOError):
                near.recv(10)

    world.run(main)


def test_a_timeout_concerns_the_whole_sendall():
    """The timeout does not start again with each part that `sendall` sends."""

    def read_slowly(sock, stop):
        while not stop:
            sock.recv(1000)
            coro.sleep_relative(0.002)

    def main():
        near, far = coro.socketpair()
        with near, far:
            stop = []
            near.settimeout(0.05)
            reader = coro.spawn(read_slowly, far, stop)
            with pytest.raises(TimeoutError):
                near.sendall(bytes(50_000_000))
            stop.append(True)
            reader.join()

    coro.run(main)


def test_a_connection_that_takes_too_long():
    def main():
        with coro.tcp_sock() as listener:
            listener.bind((HOST, 0))
            listener.listen(0)
            clients = [coro.tcp_sock() for _ in range(4)]
            late = 0
            for client in clients:
                client.settimeout(0.05)
                try:
                    client.connect(listener.getsockname())
                except TimeoutError as error:
                    assert str(error) == "timed out"
                    late += 1
            if late:  # the kernel drops connections that do not fit into the listening socket's queue
                assert clients[-1].connect_ex(listener.getsockname()) in (errno.EWOULDBLOCK, errno.EALREADY)
            for client in clients:
                client.close()

    coro.run(main)
