"""TLS on the sockets of coros: with each other, and with Python's own TLS in a thread."""

from __future__ import annotations

import socket
import ssl

import pytest
from support import HOST, coro_is_available, in_thread
from tls import contexts

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro
BIG = bytes(range(256)) * 4096 * 4


def pair(client, server):
    """TLS sockets of both ends of a connection, made at the same time."""
    near, far = coro.socketpair()
    other = coro.spawn(far.start_tls, server, server_side=True)
    secure = near.start_tls(client, server_hostname=contexts.HOSTNAME)
    return secure, other.join()


def test_both_sides():
    def main():
        near, far = pair(contexts.client_context(), contexts.server_context())
        with near, far:
            assert isinstance(near, ssl.SSLSocket)
            assert near.version() == far.version()
            reader = coro.spawn(far.recv, 100)
            coro.yield_slice()
            near.sendall(b"abc")
            assert reader.join() == b"abc"
            writer = coro.spawn(far.sendall, BIG)
            received = b""
            while len(received) < len(BIG):
                received += near.recv(50_000)
            assert received == BIG
            writer.join()
            with near.makefile("rb") as file:
                far.sendall(b"line\nrest")
                assert file.readline() == b"line\n"
                assert file.read(4) == b"rest"

    coro.run(main)


def test_the_end():
    def main():
        near, far = pair(contexts.client_context(), contexts.server_context())
        with far:
            ending = coro.spawn(near.unwrap)
            assert far.recv(10) == b""
            plain_far = far.unwrap()
            plain_near = ending.join()
            plain_near.sendall(b"in the clear")
            assert plain_far.recv(100) == b"in the clear"
            plain_near.close()
            near.close()

    coro.run(main)


def test_timeouts():
    def main():
        near, far = pair(contexts.client_context(), contexts.server_context())
        with near, far:
            near.settimeout(0.001)
            with pytest.raises(TimeoutError):
                near.recv(10)
            near.settimeout(None)
            far.sendall(b"x")
            assert near.recv(10) == b"x"
            near.setblocking(False)
            with pytest.raises(ssl.SSLWantReadError):
                near.recv(10)
        silent, quiet = coro.socketpair()
        with quiet:
            silent.settimeout(0.01)
            with pytest.raises(TimeoutError):
                silent.start_tls(contexts.client_context(), server_hostname=contexts.HOSTNAME)
            assert silent.fileno() == -1

    coro.run(main)


def test_a_failed_handshake_closes_the_connection():
    def main():
        near, far = coro.socketpair()

        def serve():
            with pytest.raises(ssl.SSLError):
                far.start_tls(contexts.server_context("other.test"), server_side=True)

        other = coro.spawn(serve)
        with pytest.raises(ssl.SSLCertVerificationError):
            near.start_tls(contexts.client_context(), server_hostname=contexts.HOSTNAME)
        other.join()
        assert near.fileno() == far.fileno() == -1

    coro.run(main)


def test_a_coro_that_is_interrupted_in_the_handshake():
    def main():
        near, far = coro.socketpair()
        with far:
            client = coro.spawn(near.start_tls, contexts.client_context(), server_hostname=contexts.HOSTNAME)
            coro.yield_slice()
            coro.yield_slice()
            client.shutdown()
            client.join()
            assert client.cancelled()
            assert near.fileno() == -1

    coro.run(main)


@pytest.mark.parametrize("side", ["client", "server"])
def test_against_pythons_own(side):
    """One side runs in a coro; the other one uses Python's own `ssl` in a thread."""

    def plain(sock, is_server):
        context = contexts.server_context() if is_server else contexts.client_context()
        hostname = None if is_server else contexts.HOSTNAME
        with context.wrap_socket(sock, server_side=is_server, server_hostname=hostname) as secure:
            received = b""
            while len(received) < len(BIG):
                received += secure.recv(100_000)
            secure.sendall(received[::-1])

    def main():
        near, far = socket.socketpair()
        other = coro.spawn(coro.threads.run, plain, far, side == "client")
        sock = coro.sock(near.family, near.type, 0, fileno=near.detach())
        context = contexts.client_context() if side == "client" else contexts.server_context()
        hostname = contexts.HOSTNAME if side == "client" else None
        with sock.start_tls(context, server_side=side == "server", server_hostname=hostname) as secure:
            secure.sendall(BIG)
            received = b""
            while len(received) < len(BIG):
                received += secure.recv(100_000)
            assert received == BIG[::-1]
        other.join()

    coro.run(main)


def test_accepting():
    def serve(listener):
        connection, _ = listener.accept()
        with connection:
            connection.sendall(connection.recv(100).upper())

    def main():
        with coro.tcp_sock() as listener:
            listener.bind((HOST, 0))
            listener.listen()
            secure = listener.start_tls(contexts.server_context(), server_side=True)
            with secure:
                server = coro.spawn(serve, secure)
                client = coro.tcp_sock()
                client.connect(secure.getsockname())
                with client.start_tls(contexts.client_context(), server_hostname=contexts.HOSTNAME) as talking:
                    talking.sendall(b"abc")
                    assert talking.recv(100) == b"ABC"
                server.join()

    coro.run(main)


def test_in_threads_without_coros():
    near, far = coro.socketpair()

    def serve():
        with far.start_tls(contexts.server_context(), server_side=True) as secure:
            secure.sendall(secure.recv(10).upper())

    import threading

    thread = threading.Thread(target=serve)
    thread.start()

    def talk():
        with near.start_tls(contexts.client_context(), server_hostname=contexts.HOSTNAME) as secure:
            secure.sendall(b"abc")
            assert secure.recv(10) == b"ABC"

    in_thread(talk)
    thread.join()
