"""`loop.set_limits(coros=n)`: when the loop has n coros, `spawn` raises, and servers pause accepting."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading

import pytest
from support import HOST, coro_is_available, lowest_free_descriptor, run_script, until_in_coro

import grapeshot

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro


def in_limits(function, **limits):
    """Run the function in a coro of a loop with these limits."""

    def main():
        asyncio.get_running_loop().set_limits(**limits)
        return function()

    return coro.run(main)


def test_coros_of_another_loop_of_the_thread_do_not_count():
    async def spawn(count):
        return [coro.spawn(coro.wait) for _ in range(count)]

    first, second = grapeshot.new_event_loop(), grapeshot.new_event_loop()
    try:
        waiting = first.run_until_complete(spawn(5))
        second.set_limits(coros=2)
        waiting += second.run_until_complete(spawn(2))
        with pytest.raises(grapeshot.LimitError, match="2 coros of this loop are alive"):
            second.run_until_complete(spawn(1))
        assert not any(co.done() for co in waiting)
    finally:
        second.close()
        first.close()


def test_spawn_raises_at_the_limit_and_works_again_when_a_coro_has_ended():
    def body():
        waiting = [coro.spawn(coro.wait) for _ in range(2)]
        with pytest.raises(grapeshot.LimitError, match="3 coros of this loop are alive, and set_limits") as caught:
            coro.spawn(coro.wait)
        assert caught.value.errno == errno.EAGAIN
        late = coro.new(coro.wait)
        with pytest.raises(grapeshot.LimitError):
            late.start()
        waiting[0].shutdown()
        coro.yield_slice()
        late.start()
        for co in (waiting[1], late):
            co.shutdown()

    in_limits(body, coros=3)


def test_threads_that_are_coros_are_refused_as_the_system_refuses_threads():
    out = run_script(
        None,
        """
        import asyncio, threading
        from grapeshot import coro
        coro.patch("thread")
        def main():
            asyncio.get_running_loop().set_limits(coros=2)
            release = threading.Event()
            first = threading.Thread(target=release.wait)
            first.start()
            try:
                threading.Thread(target=release.wait).start()
            except RuntimeError as exc:
                print(type(exc).__name__, exc)
            release.set()
            first.join()
            second = threading.Thread(target=print, args=("second",))
            second.start()
            second.join()
        coro.run(main)
        """,
    )
    lines = out.splitlines()
    assert lines[0].startswith("LimitError [Errno 11] 2 coros of this loop are alive")
    assert lines[1:] == ["second"]


def is_answered(client):
    try:
        return bool(client.recv(10, socket.MSG_PEEK))
    except BlockingIOError:
        return False


class Clients:
    """Plain sockets that are connected to a server. Each has sent one byte."""

    def __init__(self, server, count):
        address = server.sockets[0].getsockname()
        self.all = [socket.create_connection(address, 10) for _ in range(count)]
        for client in self.all:
            client.setblocking(False)
            client.send(b"x")

    def answers(self):
        return sum(map(is_answered, self.all))

    def close_answered(self):
        """Close the first client that has an answer."""
        answered = next(client for client in self.all if is_answered(client))
        self.all.remove(answered)
        answered.close()

    def close(self):
        for client in self.all:
            client.close()


def echo(sock, _address):
    try:
        while data := sock.recv(100):
            sock.sendall(data)
    except ConnectionResetError:
        pass  # the client closed the connection before it read the answer


def iterate(count=50):
    for _ in range(count):
        coro.yield_slice()


@pytest.mark.parametrize("limit", ["coros", "descriptors"])
def test_a_server_of_coros_waits_for_a_place(limit, caplog):
    def body():
        loop = asyncio.get_running_loop()
        with coro.serve(echo, HOST, 0) as server:
            clients = Clients(server, 4)
            try:
                if limit == "coros":
                    loop.set_limits(coros=4)  # this coro, the one that accepts, and two connections
                else:
                    loop.set_limits(descriptors=lowest_free_descriptor() + 2)
                until_in_coro(lambda: clients.answers() >= 2)
                iterate()
                assert clients.answers() == 2
                assert server.connections == 2
                for _ in range(2):
                    clients.close_answered()
                    until_in_coro(lambda: clients.answers() >= 2)
            finally:
                clients.close()
                loop.set_limits()
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == 1
        assert "has paused accepting" in said[0]

    coro.run(body)


def test_the_child_of_a_fork_does_not_go_on_with_servers_that_waited():
    """The limit is one connection. The parent has one, so its second client must wait. The child forgets the parent's
    connection, so its own server accepts a client.
    """
    said = run_script(
        None,
        """
        import asyncio, os, socket
        import grapeshot
        from grapeshot.coro._bridge import run_sync

        class Tell(asyncio.Protocol):
            def connection_made(self, transport):
                transport.write(b"%d" % os.getpid())

        async def serve():
            server = await loop.create_server(Tell, "127.0.0.1", 0)
            return server, server.sockets[0].getsockname()

        def connect(address):
            client = socket.create_connection(address, 10)
            client.setblocking(False)
            return client

        async def hear(client):
            assert int(await asyncio.wait_for(loop.sock_recv(client, 100), 10)) == os.getpid()

        async def begin():
            server, address = await serve()
            loop.set_limits(connections=1)
            clients = connect(address), connect(address)
            await hear(clients[0])
            await asyncio.sleep(0.01)
            return server, clients

        async def in_child():
            assert loop._open_connections == 0
            own, address = await serve()
            client = connect(address)
            await hear(client)
            client.close()
            for _ in range(20):
                await asyncio.sleep(0.001)
            await hear(connect(address))

        async def in_parent():
            clients[0].close()
            await hear(clients[1])
            server.close()

        loop = grapeshot.new_event_loop()
        server, clients = loop.run_until_complete(begin())
        pid = loop.run_until_complete(run_sync(os.fork))  # in a coro
        if not pid:
            loop.run_until_complete(in_child())
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        loop.run_until_complete(in_parent())
        loop.close()
        print("ok")
        """,
        flags=("-W", "ignore"),
    )
    assert said.strip() == "ok"


def test_other_threads_have_their_own_loops_and_counts():
    def alone():
        return in_limits(lambda: coro.spawn(int).join(), coros=2)

    def body():
        results = []
        thread = threading.Thread(target=lambda: results.append(alone()))
        thread.start()
        thread.join()
        assert results == [0]
        with pytest.raises(grapeshot.LimitError):
            coro.spawn(int)

    in_limits(body, coros=1)
