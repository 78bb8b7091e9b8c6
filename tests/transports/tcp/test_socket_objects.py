"""A transport creates its `socket.socket` on demand. Each descriptor is closed only once, even after an interrupt."""

from __future__ import annotations

import gc
import os
import socket
import threading

import pytest
from support import HOST, Recorder, connected, is_open, iterations, listening, until


def descriptors() -> set[str]:
    return set(os.listdir("/dev/fd"))


class Interrupted(socket.socket):
    """Raises after the object has got its descriptor, as Ctrl-C may do."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        raise KeyboardInterrupt


class Refusing(socket.socket):
    def setblocking(self, flag):
        raise OSError("no mode")


class Nothing:
    """A class that makes no objects. The test puts it in the place of `socket.socket`, as a program may do."""

    def __init__(self, *args, **kwargs):
        raise AssertionError("this class makes no objects")


@pytest.mark.parametrize("kind", [Interrupted, Refusing])
async def test_a_socket_object_that_fails_does_not_close_the_connection(loop, monkeypatch, kind):
    transport, protocol, peer = await connected(loop, how="server")
    with peer:
        kept = None
        with monkeypatch.context() as patch:
            patch.setattr(socket, "socket", kind)
            try:
                transport.get_extra_info("socket")  # does not fail on asyncio, whose transports have the object already
            except (KeyboardInterrupt, OSError) as error:
                kept = error  # the error's traceback keeps the object alive
        del kept
        gc.collect()
        first, second = socket.socketpair()
        with first, second:
            await peer.send(b"still there")
            await until(lambda: protocol.data == b"still there")
            transport.write(b"both ways")
            assert await peer.read_exactly(9) == b"both ways"
            assert transport.get_extra_info("socket").getpeername() == peer.sock.getsockname()
            transport.abort()
            assert await peer.read_to_end() == b""
            await iterations(2)
            first.send(b"open")
            assert second.recv(10) == b"open"


@pytest.mark.skip_on(uvloop="has its own class of sockets")
async def test_the_socket_object_while_socket_socket_is_replaced(loop, monkeypatch):
    transport, protocol, peer = await connected(loop, how="server")
    with peer:
        with monkeypatch.context() as patch:
            patch.setattr(socket, "socket", Nothing)
            assert transport.get_extra_info("socket").getpeername() == peer.sock.getsockname()
        await peer.send(b"x")
        await until(lambda: protocol.data == b"x")
        transport.close()
        await until(lambda: protocol.is_lost)


@pytest.mark.skip_on(uvloop="the connection stays open")
@pytest.mark.leaks_on(asyncio="a socket is left to the collector")
async def test_an_interrupted_sock_accept_closes_its_descriptor_once(loop, monkeypatch):
    before = descriptors()
    with listening() as listener, socket.create_connection(listener.getsockname()) as client:
        listener.setblocking(False)
        original = socket.socket.__init__

        def interrupted(self, *args, **kwargs):
            original(self, *args, **kwargs)
            raise OSError("interrupted")

        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "__init__", interrupted)
            try:
                await loop.sock_accept(listener)
                raise AssertionError("not interrupted")
            except OSError as error:
                assert "interrupted" in str(error)  # the error's traceback keeps the object alive
                reused = os.pipe()
        gc.collect()
        assert client.recv(1) == b""
        os.write(reused[1], b"open")
        assert os.read(reused[0], 10) == b"open"
        os.close(reused[0])
        os.close(reused[1])
    assert descriptors() <= before


@pytest.mark.skip_on(uvloop="no such attribute")
async def test_a_connection_that_is_closed_while_another_thread_looks_for_its_socket(loop, monkeypatch):
    """A file that gets the connection's descriptor number before the socket object is made must stay open."""
    transport, protocol, peer = await connected(loop, how="server")
    begun, closed = threading.Event(), threading.Event()

    class Slow(socket.socket):
        def __init__(self, *args, **kwargs):
            begun.set()
            closed.wait(30)
            super().__init__(*args, **kwargs)

    def look():
        try:
            transport.get_extra_info("socket")
        except (RuntimeError, OSError):
            pass  # free-threaded builds refuse the call, or the number no longer belongs to a socket
        finally:
            begun.set()

    with peer, monkeypatch.context() as patch:
        number = transport._sock_fd
        patch.setattr(socket, "socket", Slow)
        looking = loop.run_in_executor(None, look)
        await until(begun.is_set, "the other thread")
        transport.abort()
        await until(lambda: protocol.is_lost, "connection_lost")
        await iterations(2)
        patch.undo()
        first, second = socket.socketpair()
        with first, second:
            is_free = not is_open(number)
            if is_free:
                os.dup2(first.fileno(), number)
            closed.set()
            await looking
            transport = protocol = None
            gc.collect()
            assert is_open(number)
            if is_free:
                os.close(number)


async def test_the_log_of_a_new_connection_does_not_close_it(loop, serve):
    """To log a new connection, debug mode makes a socket object. Freeing that object must not close the connection."""
    loop.set_debug(True)
    made = []

    def factory():
        made.append(Recorder())
        return made[-1]

    server = await serve(factory, HOST, 0)
    with socket.create_connection(server.sockets[0].getsockname()) as client:
        await until(lambda: made and made[0].transport is not None)
        gc.collect()
        client.send(b"x")
        await until(lambda: made[0].data == b"x")
        made[0].transport.close()
        await until(lambda: made[0].is_lost)
