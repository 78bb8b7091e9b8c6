"""`coro.serve`: TCP and unix servers with a coro per connection."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import resource
import socket
import ssl
import stat
import threading

import pytest
from support import HOST, coro_is_available, run_script, until_in_coro
from tls import contexts

import grapeshot

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro


def echo(sock, address):
    while data := sock.recv(65536):
        sock.sendall(data)


def address_of(server):
    return server.sockets[0].getsockname()


def connect(server):
    sock = coro.sock(server.sockets[0].family)
    sock.connect(address_of(server))
    return sock


def ask(server, message):
    with connect(server) as sock:
        sock.sendall(message)
        return sock.recv_exact(len(message))


def run_quietly(main):
    """Run `main` in a coro; return what was reported to the loop's exception handler."""
    reports = []

    def begin():
        coro.current().get_loop().set_exception_handler(lambda loop, context: reports.append(context))
        main(reports)

    coro.run(begin)
    return reports


# ---- serving -------------------------------------------------------------------------------------------------------


def test_a_coro_for_each_connection():
    def main(reports):
        peers = []

        def handler(sock, address):
            peers.append((type(sock), address, sock.gettimeout(), coro.current().name))
            echo(sock, address)

        with coro.serve(handler, HOST, 0) as server:
            assert repr(server) == f"<Server on {address_of(server)}, 0 connections>"
            clients = [connect(server) for _ in range(20)]
            # Each client is answered while all others are open.
            for number, client in reversed(list(enumerate(clients))):
                client.sendall(b"%d" % number)
                assert client.recv(10) == b"%d" % number
            assert server.connections == 20
            names = {client.getsockname() for client in clients}
            assert {address for _, address, _, _ in peers} == names
            assert {(kind, timeout) for kind, _, timeout, _ in peers} == {(coro.sock, None)}
            assert all(name.endswith(f"handler {address}") for _, address, _, name in peers)
            for client in clients:
                client.close()
            until_in_coro(lambda: not server.connections)

    assert run_quietly(main) == []


def test_addresses(tmp_path):
    path = tmp_path / "socket"

    def main():
        with coro.serve(echo, None, 0) as server:
            families = {sock.family for sock in server.sockets}
            assert socket.AF_INET in families
            assert socket.AF_INET6 in families or not socket.has_dualstack_ipv6()
            for sock in server.sockets:
                with socket.socket(sock.family) as client:
                    client.connect(("::1" if sock.family == socket.AF_INET6 else HOST, sock.getsockname()[1]))
        with coro.serve(echo, "localhost", 0) as server:
            assert ask(server, b"name") == b"name"
        with coro.serve(echo, [HOST, "127.0.0.2"], 0) as server:
            assert [sock.getsockname()[0] for sock in server.sockets] == [HOST, "127.0.0.2"]
        with coro.serve(echo, path=path) as server:
            assert ask(server, b"path") == b"path"
            assert stat.S_ISSOCK(path.stat().st_mode)
        assert not path.exists()
        bound = socket.socket()
        bound.bind((HOST, 0))
        name = bound.getsockname()
        with coro.serve(echo, sock=bound) as server:
            assert bound.fileno() == -1
            assert address_of(server) == name
            assert ask(server, b"socket") == b"socket"

    coro.run(main)


def test_arguments_that_are_wrong():
    async def coroutine_function(sock, address): ...

    def main():
        with socket.socket() as busy, socket.socket(type=socket.SOCK_DGRAM) as datagrams:
            busy.bind((HOST, 0))
            for kind, arguments, options in (
                (TypeError, (5, HOST, 0), {}),
                (TypeError, (coroutine_function, HOST, 0), {}),
                (TypeError, (echo, HOST, 0), {"ssl": True}),
                (ValueError, (echo, HOST, 0), {"limit": 0}),
                (ValueError, (echo,), {}),
                (ValueError, (echo, HOST, 0), {"path": "socket"}),
                (ValueError, (echo,), {"path": "socket", "sock": busy}),
                (ValueError, (echo,), {"sock": datagrams}),
                (OverflowError, (echo, HOST, 65536), {}),
                (OverflowError, (echo, "localhost", -1), {}),
                (FileNotFoundError, (echo,), {"path": "/nowhere/socket"}),
                (socket.gaierror, (echo, "name.invalid", 0), {}),
            ):
                with pytest.raises(kind):
                    coro.serve(*arguments, **options)
            with pytest.raises(OSError) as caught:
                coro.serve(echo, HOST, busy.getsockname()[1])
            assert caught.value.errno == errno.EADDRINUSE

    coro.run(main)


def test_from_asyncio_and_before_the_loop():
    async def main():
        server = coro.serve(echo, HOST, 0)
        reader, writer = await asyncio.open_connection(*address_of(server))
        writer.write(b"from a task")
        assert await reader.readexactly(11) == b"from a task"
        writer.close()
        await writer.wait_closed()
        await coro.run_sync(server.stop)

    grapeshot.run(main())
    assert (
        run_script(
            None,
            f"""
            from grapeshot import coro
            server = coro.serve(lambda sock, address: coro.set_exit(sock.recv(5)), "{HOST}", 0)
            client = coro.tcp_sock()
            def ask():
                with client:
                    client.connect(server.sockets[0].getsockname())
                    client.sendall(b"hello")
                    coro.sleep_relative(60)
            coro.spawn(ask)
            print(coro.event_loop())
            """,
        )
        == "b'hello'\n"
    )


# ---- the limit -----------------------------------------------------------------------------------------------------


def test_no_more_connections_than_the_limit():
    def main(reports):
        most = 0

        def handler(sock, address):
            nonlocal most
            most = max(most, server.connections)
            echo(sock, address)

        with coro.serve(handler, HOST, 0, limit=2) as server:
            first, second, third, fourth = clients = [connect(server) for _ in range(4)]
            for number, client in enumerate(clients):
                client.sendall(b"%d" % number)
            assert (first.recv(1), second.recv(1)) == (b"0", b"1")
            # The other clients are connected, but wait in the listening socket's queue. Their data is not read.
            third.settimeout(0.05)
            with pytest.raises(TimeoutError):
                third.recv(1)
            assert server.connections == 2
            second.close()
            third.settimeout(None)
            assert third.recv(1) == b"2"
            first.close()
            third.close()
            assert fourth.recv(1) == b"3"
            fourth.close()
        assert most == 2

    assert run_quietly(main) == []


def test_the_limit_concerns_all_sockets_of_a_server():
    """A listening socket that only waits for a connection does not count toward the limit."""

    def main(reports):
        with coro.serve(echo, [HOST, "127.0.0.2"], 0, limit=1) as server:
            for _ in range(3):
                for sock in server.sockets:
                    with coro.sock() as client:
                        client.connect(sock.getsockname())
                        client.sendall(b"x")
                        assert client.recv(1) == b"x"

    assert run_quietly(main) == []


# ---- errors --------------------------------------------------------------------------------------------------------


def test_an_error_ends_only_its_connection():
    def main(reports):
        def handler(sock, address):
            data = sock.recv(10)
            if data == b"fail":
                raise ValueError("told to")
            sock.sendall(data)

        with coro.serve(handler, HOST, 0, limit=1) as server:
            with connect(server) as client:
                client.sendall(b"fail")
                assert client.recv(10) == b""
            until_in_coro(lambda: reports)
            [context] = reports
            assert context["message"] == "Exception in the handler of a connection"
            assert repr(context["exception"]) == "ValueError('told to')"
            assert context["coro"].done()
            assert ask(server, b"work") == b"work"
            # With a notifier, only the notifier gets the exception.
            told = []
            before = coro.set_exception_notifier(lambda co, exc: told.append(str(exc)))
            try:
                with connect(server) as client:
                    client.sendall(b"fail")
                    assert client.recv(10) == b""
                assert ask(server, b"work") == b"work"
            finally:
                coro.set_exception_notifier(before)
            assert told == ["told to"]

    assert len(run_quietly(main)) == 1


def test_an_error_is_reported_once():
    """A coro that is freed reports its error, unless the error was retrieved. Here the server has already reported the
    error, so the coro must not report it again.
    """
    messages = []

    def handler(sock, address):
        raise ValueError("told to")

    def main():
        coro.current().get_loop().set_exception_handler(lambda loop, context: messages.append(context["message"]))
        with coro.serve(handler, HOST, 0) as server:
            for count in (1, 2):
                with connect(server) as client:
                    assert client.recv(1) == b""
                until_in_coro(lambda count=count: len(messages) >= count and not server.connections)
        gc.collect()

    coro.run(main)
    gc.collect()
    assert messages == ["Exception in the handler of a connection"] * 2


def test_out_of_descriptors(monkeypatch):
    """The lack of descriptors is reported, and the server accepts again after a while."""
    from grapeshot.coro import _serve

    monkeypatch.setattr(_serve, "_RETRY_DELAY_S", 0.01)

    def main(reports):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with coro.serve(echo, HOST, 0, limit=3) as server, coro.tcp_sock() as client:
            assert ask(server, b"before") == b"before"
            until_in_coro(lambda: not server.connections)
            fill = []
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
            try:
                with contextlib.suppress(OSError):
                    while True:
                        fill.append(os.dup(client.fileno()))
                client.connect(address_of(server))
                client.sendall(b"patience")
                until_in_coro(lambda: len(reports) > 1)
                assert server.connections == 0
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                for number in fill:
                    os.close(number)
            assert client.recv_exact(8) == b"patience"

    reports = run_quietly(main)
    assert {context["message"] for context in reports} == {"socket.accept() out of system resource"}
    assert {context["exception"].errno for context in reports} == {errno.EMFILE}


def test_an_error_of_the_last_listening_socket_closes_the_server():
    def main(reports):
        with coro.serve(echo, HOST, 0) as server:
            server.sockets[0].shutdown(socket.SHUT_RD)
            assert server.wait_closed(10) is True
            assert server.sockets == ()
        assert [context["message"] for context in reports] == ["socket.accept() failed"]

    run_quietly(main)


# ---- the end -------------------------------------------------------------------------------------------------------


def test_close_lets_connections_go_on():
    def main(reports):
        server = coro.serve(echo, HOST, 0)
        address = address_of(server)
        client = connect(server)
        client.sendall(b"x")
        assert client.recv(1) == b"x"
        server.close()
        server.close()
        assert server.sockets == ()
        assert repr(server) == "<Server closed, 1 connections>"
        with coro.tcp_sock() as late, pytest.raises(ConnectionRefusedError):
            late.connect(address)
        assert server.wait_closed(0.01) is False
        waiter = coro.spawn(server.wait_closed)
        client.sendall(b"y")
        assert client.recv(1) == b"y"
        assert not waiter.done()
        client.close()
        assert waiter.join() is True
        assert server.connections == 0

    assert run_quietly(main) == []


def test_stop_waits_and_then_shuts_down():
    def main(reports):
        ends = []

        def handler(sock, address):
            try:
                echo(sock, address)
                ends.append("returned")
            except coro.Shutdown:
                ends.append("shut down")
                raise

        for seconds, way in ((10, "returned"), (0.02, "shut down"), (0, "shut down")):
            server = coro.serve(handler, HOST, 0)
            client = connect(server)
            client.sendall(b"x")
            assert client.recv(1) == b"x"
            stopping = coro.spawn(server.stop, seconds)
            until_in_coro(lambda: server.sockets == ())
            if way == "returned":
                client.close()
            stopping.join()
            assert server.connections == 0
            assert ends.pop() == way
            if way != "returned":
                assert client.recv(1) == b""
            client.close()

    assert run_quietly(main) == []


def test_an_interruption_of_stop_shuts_down_at_once():
    def main(reports):
        server = coro.serve(echo, HOST, 0)
        with connect(server) as client:
            until_in_coro(lambda: server.connections)
            stopping = coro.spawn(server.stop, None)
            until_in_coro(lambda: server.sockets == ())
            stopping.shutdown()
            assert client.recv(1) == b""
            stopping.join()
            assert stopping.cancelled()
            assert server.connections == 0

    assert run_quietly(main) == []


def test_a_connection_cannot_wait_for_its_own_end():
    def main(reports):
        def handler(sock, address):
            for wait in (server.wait_closed, server.stop):
                with pytest.raises(RuntimeError, match="its own end"):
                    wait()
            sock.sendall(b"ok")

        server = coro.serve(handler, HOST, 0)
        with connect(server) as client:
            assert client.recv(2) == b"ok"
        server.stop()

    assert run_quietly(main) == []


def test_a_handler_may_close_the_server():
    def main(reports):
        def handler(sock, address):
            server.close()
            echo(sock, address)

        server = coro.serve(handler, HOST, 0)
        assert ask(server, b"last") == b"last"
        assert server.wait_closed() is True

    assert run_quietly(main) == []


def test_another_thread_cannot_close_the_server():
    def main(reports):
        with coro.serve(echo, HOST, 0) as server:
            with pytest.raises(coro.ScheduleError):
                coro.threads.run(server.close)
            assert ask(server, b"x") == b"x"

    assert run_quietly(main) == []


def test_the_end_of_the_loop_ends_the_server():
    """Nothing is left behind: the fixture `_leftovers` (tests/conftest.py) compares the open descriptors."""
    clients = []

    def main():
        server = coro.serve(echo, HOST, 0, limit=2)
        for _ in range(3):
            clients.append(socket.create_connection(address_of(server)))
        until_in_coro(lambda: server.connections == 2)

    coro.run(main)
    for client in clients:
        with client, contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""


def test_a_loop_that_ends_before_the_server_has_begun():
    servers = []

    def main():
        servers.append(coro.serve(echo, HOST, 0))
        coro.current().get_loop().stop()

    with pytest.raises(RuntimeError):
        coro.run(main)
    [server] = servers
    assert [sock.fileno() for sock in server.sockets] == [-1]
    server.close()
    assert server.sockets == ()


def test_clients_that_come_and_go():
    def main(reports):
        with coro.serve(echo, HOST, 0, limit=8) as server:

            def client(number):
                for turn in range(10):
                    message = b"%d-%d" % (number, turn)
                    if (number + turn) % 3:
                        assert ask(server, message) == message
                    else:
                        sock = connect(server)
                        # With this option, close() resets the connection, which the server notices.
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                        sock.sendall(message)
                        sock.close()

            coro.in_parallel([(client, (number,)) for number in range(30)])

    for context in run_quietly(main):
        assert isinstance(context["exception"], ConnectionResetError)


# ---- TLS -----------------------------------------------------------------------------------------------------------


def test_a_slow_handshake_does_not_hold_up_others():
    def main(reports):
        seen = []

        def handler(sock, address):
            seen.append((isinstance(sock, ssl.SSLSocket), sock.gettimeout()))
            echo(sock, address)

        with coro.serve(handler, HOST, 0, ssl=contexts.server_context()) as server:
            with connect(server) as silent, connect(server) as babbler:
                babbler.sendall(b"no TLS at all\r\n\r\n")
                plain = connect(server)
                with plain.start_tls(contexts.client_context(), server_hostname=contexts.HOSTNAME) as secure:
                    secure.sendall(b"secret")
                    assert secure.recv(10) == b"secret"
                # The client gets an alert, or a reset because not all of its data was read.
                with contextlib.suppress(ConnectionResetError):
                    while babbler.recv(100):
                        pass
                assert silent.fileno() >= 0
                assert server.connections >= 1
            assert seen == [(True, None)]

    assert run_quietly(main) == []


def test_a_handshake_has_a_time_limit():
    def main(reports):
        with (
            coro.serve(echo, HOST, 0, ssl=contexts.server_context(), ssl_handshake_timeout=0.02) as server,
            connect(server) as silent,
        ):
            assert silent.recv(1) == b""

    assert run_quietly(main) == []


def test_the_end_of_a_tls_stream_is_announced():
    """The server announces the end of the stream, so that Python's own client does not report a broken connection."""

    def main(reports):
        def handler(sock, address):
            sock.sendall(b"all of it")

        def client(address):
            context = contexts.client_context()
            with (
                socket.create_connection(address) as plain,
                context.wrap_socket(plain, server_hostname=contexts.HOSTNAME, suppress_ragged_eofs=False) as secure,
            ):
                received = b""
                while data := secure.recv(100):
                    received += data
                return received

        with coro.serve(handler, HOST, 0, ssl=contexts.server_context()) as server:
            assert coro.threads.run(client, address_of(server)) == b"all of it"

    assert run_quietly(main) == []


def test_clients_in_real_threads():
    """In most other tests, the clients are coros. Here, as a control, the clients are threads with plain sockets."""
    results = []

    def client(address):
        with socket.create_connection(address) as sock:
            sock.sendall(b"thread")
            results.append(sock.recv(6))

    def main(reports):
        with coro.serve(echo, HOST, 0) as server:
            threads = [threading.Thread(target=client, args=(address_of(server),)) for _ in range(8)]
            for thread in threads:
                thread.start()
            until_in_coro(lambda: len(results) == 8)
        for thread in threads:
            thread.join()

    assert run_quietly(main) == []
    assert results == [b"thread"] * 8
