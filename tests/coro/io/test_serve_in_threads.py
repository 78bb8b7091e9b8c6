"""`coro.serve(threads=N)`: a server whose connections are spread over several threads."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading

import pytest
from support import HOST, coro_is_available, gil_is_enabled, run_script, until, until_in_coro

pytestmark = [
    pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter"),
    pytest.mark.filterwarnings("error"),
]
if coro_is_available():
    from grapeshot import coro

THREADS = 3


@pytest.fixture(autouse=True)
def _quiet(caplog):
    """With a GIL, each server warns that several threads are not faster than one thread. Hide this warning."""
    caplog.set_level(logging.ERROR, logger="asyncio")


def tell_thread(sock, address):
    sock.sendall(threading.current_thread().name.encode() + b"\n")
    sock.recv(1)


def ask(address, family=socket.AF_INET):
    """Return a connected socket, and the name of the thread that serves it."""
    sock = coro.sock(family)
    try:
        sock.connect(address)
        return sock, sock.recv(100).decode().strip()
    except BaseException:
        sock.close()
        raise


def test_every_thread_serves():
    def main():
        with coro.serve(tell_thread, HOST, 0, threads=THREADS) as server:
            address = server.sockets[0].getsockname()
            socks, names = zip(*(ask(address) for _ in range(60)), strict=True)
            assert set(names) == {threading.current_thread().name, "tell_thread-2", "tell_thread-3"}
            assert server.connections == 60
            for sock in socks:
                sock.close()
            until_in_coro(lambda: server.connections == 0)
        assert server.sockets == ()
        with pytest.raises(ConnectionRefusedError):
            ask(address)

    before = threading.active_count()
    coro.run(main)
    # A thread is still there for a moment after its server has ended.
    asyncio.run(until(lambda: threading.active_count() == before))


@pytest.mark.parametrize("way", ["path", "sock"])
def test_threads_accept_from_one_socket(way, tmp_path):
    def main():
        if way == "path":
            path = str(tmp_path / "socket")
            server, address, family = coro.serve(tell_thread, path=path, threads=2), path, socket.AF_UNIX
        else:
            sock = socket.create_server((HOST, 0))
            server, family = coro.serve(tell_thread, sock=sock, threads=2), socket.AF_INET
            address = server.sockets[0].getsockname()
        with server:
            socks = [ask(address, family)[0] for _ in range(10)]
            assert server.connections == 10
            for sock in socks:
                sock.close()

    coro.run(main)
    assert not list(tmp_path.iterdir())


def test_stop_shuts_connections_down_in_all_threads():
    ended = []

    def wait(sock, address):
        try:
            sock.recv(1)
        finally:
            ended.append(threading.current_thread().name)

    def main():
        server = coro.serve(wait, HOST, 0, threads=THREADS)
        address = server.sockets[0].getsockname()
        socks = []
        for _ in range(30):
            socks.append(coro.sock())
            socks[-1].connect(address)
        until_in_coro(lambda: server.connections == 30)
        assert not server.wait_closed(0.01)
        server.close()
        assert not server.wait_closed(0.01)
        server.stop(0.01)
        assert server.wait_closed()
        assert (len(ended), len(set(ended))) == (30, THREADS)
        for sock in socks:
            sock.close()

    coro.run(main)


def test_the_threads_end_with_the_loop():
    """The threads end even if the program never closes the server."""
    before = threading.active_count()

    def main():
        coro.serve(tell_thread, HOST, 0, threads=THREADS)
        assert threading.active_count() == before + THREADS - 1

    coro.run(main)
    for thread in threading.enumerate():
        if thread.name.startswith("tell_thread-"):
            thread.join(30)
    assert threading.active_count() == before


def test_a_handler_in_another_thread_cannot_stop_the_server():
    outcomes = []

    def stop(sock, address):
        if threading.current_thread() is not threading.main_thread():
            try:
                server.stop()
            except coro.ScheduleError as exc:
                outcomes.append(exc)
        sock.sendall(threading.current_thread().name.encode())

    def main():
        nonlocal server
        with coro.serve(stop, HOST, 0, threads=2) as server:
            address = server.sockets[0].getsockname()
            names = set()
            while len(names) < 2 or len(outcomes) < 5:
                sock, name = ask(address)
                sock.close()
                names.add(name)

    server = None
    coro.run(main)


def test_the_process_ends_even_if_the_loop_never_runs():
    run_script(
        None,
        """
        import logging
        from grapeshot import coro
        logging.getLogger("asyncio").setLevel("ERROR")
        server = coro.serve(print, "127.0.0.1", 0, threads=2)
        server.close()
        """,
    )


def leave(sock, address):
    if threading.current_thread().name == "leave-2":
        raise SystemExit("enough")
    sock.sendall(b"here\n")


def test_a_thread_that_fails_closes_the_server():
    reports = []

    def main():
        coro.current().get_loop().set_exception_handler(lambda loop, context: reports.append(context))
        server = coro.serve(leave, HOST, 0, threads=2)
        address = server.sockets[0].getsockname()
        while server.sockets:
            try:
                ask(address)[0].close()
            except OSError:
                coro.sleep_relative(0.001)
        with pytest.raises(SystemExit, match="enough") as raised:
            server.wait_closed()
        assert raised.value.__notes__ == ["raised in thread 'leave-2'"]

    coro.run(main)
    assert [context["message"] for context in reports] == [
        "Thread 'leave-2' of a server has failed; the server is closed"
    ]


def test_accept_fails_in_all_threads():
    """The server closes itself only when no thread accepts any longer."""

    def main():
        reports = []
        coro.current().get_loop().set_exception_handler(lambda _, context: reports.append(context["message"]))
        with coro.serve(tell_thread, HOST, 0, threads=2) as server:
            server.sockets[0].shutdown(socket.SHUT_RD)
            until_in_coro(lambda: reports)
            assert reports == ["socket.accept() failed"]
            assert server.wait_closed(0.01) is False
            other = server._others[0].server
            other._sockets[0].shutdown(socket.SHUT_RD)
            assert server.wait_closed(10) is True

    coro.run(main)


def test_an_address_that_cannot_be_bound():
    def main():
        with socket.create_server((HOST, 0)) as other:
            with pytest.raises(OSError, match="in use"):
                coro.serve(tell_thread, HOST, other.getsockname()[1], threads=2)
        with coro.serve(tell_thread, HOST, 0, threads=2) as first:
            with pytest.raises(OSError, match="in use"):
                coro.serve(tell_thread, HOST, first.sockets[0].getsockname()[1], threads=2)
        assert first.wait_closed(0)
        for bad, error in ((0, ValueError), (-1, ValueError), (1.5, TypeError), ("2", TypeError)):
            with pytest.raises(error, match="threads must be"):
                coro.serve(tell_thread, HOST, 0, threads=bad)

    before = threading.active_count()
    coro.run(main)
    assert threading.active_count() == before


def test_limit_is_spread_over_the_threads():
    def main():
        with coro.serve(tell_thread, HOST, 0, threads=2, limit=3) as server:
            socks = [socket.create_connection(server.sockets[0].getsockname()) for _ in range(20)]
            until_in_coro(lambda: server.connections >= 3)
            coro.sleep_relative(0.02)
            assert server.connections == 3
            for sock in socks:
                sock.close()

    coro.run(main)


@pytest.mark.skipif(not gil_is_enabled(), reason="there is no GIL")
def test_the_gil_makes_threads_useless(caplog):
    caplog.set_level(logging.WARNING, logger="asyncio")
    coro.run(lambda: coro.serve(tell_thread, HOST, 0, threads=2).stop())
    assert "2 threads are not faster than one" in caplog.text
