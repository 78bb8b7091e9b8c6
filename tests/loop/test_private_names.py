"""Private attributes of asyncio's loops, servers and transports that tools and test suites read."""

from __future__ import annotations

import asyncio
import socket

import pytest
from process.children import CAT, Events
from support import HOST, Recorder, connected, iterations, pipe_ends, until
from tls import endpoints
from transports.udp.endpoints import Datagrams

pytestmark = pytest.mark.skip_on(uvloop="it has none of these attributes")


def test_of_a_loop(new_loop):
    loop = new_loop()
    assert (loop._closed, loop._debug, loop._stopping, loop._thread_id) == (False, loop.get_debug(), False, None)
    factory = lambda loop, coroutine, **options: asyncio.Task(coroutine, loop=loop, **options)  # noqa: E731
    assert loop._task_factory is None
    loop.set_task_factory(factory)
    assert loop._task_factory is factory
    assert 0 < loop._clock_resolution <= 1e-6
    loop.call_soon(lambda: (loop.stop(), seen.append(loop._stopping)))
    seen = []
    loop.run_forever()
    assert seen == [True]
    assert loop._stopping is False
    loop.close()
    assert loop._closed is True


def test_a_stop_can_be_taken_back(loop):
    """Sanic resets `_stopping` before it runs the shutdown of an application."""
    loop.stop()
    loop._stopping = False
    assert loop.run_until_complete(asyncio.sleep(0, "done")) == "done"
    loop._stopping = True
    loop.run_forever()
    assert loop._stopping is False


def test_ready_and_scheduled(loop):
    """Home Assistant cancels timers through `_scheduled`. Monitoring tools read len() of `_ready` and `_scheduled`."""
    assert len(loop._ready) == len(loop._scheduled) == 0
    soon = [loop.call_soon(print, number) for number in range(3)]
    late, early = loop.call_later(2000, print), loop.call_later(1000, print)
    assert list(loop._ready) == soon
    assert loop._scheduled[0] is early
    assert set(map(id, loop._scheduled)) == {id(early), id(late)}
    for handle in [*loop._ready, *loop._scheduled]:
        handle.cancel()
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert len(loop._ready) == 0
    assert all(handle.cancelled() for handle in loop._scheduled)


@pytest.mark.skip_on(asyncio="its queues can be changed", uvloop="it has none of these attributes")
def test_nothing_is_put_into_the_queues_by_hand(loop):
    with pytest.raises(AttributeError):
        loop._ready.append(None)
    with pytest.raises(AttributeError):
        loop._scheduled.clear()


async def test_of_a_stream(loop):
    transport, protocol, peer = await connected(loop)
    with peer:
        sock = transport._sock
        assert sock.getsockname() == transport.get_extra_info("sockname")
        assert transport._sock_fd == sock.fileno() == transport.get_extra_info("socket").fileno()
        assert (transport._loop, transport._protocol, transport._server) == (loop, protocol, None)
        assert (transport._closing, transport._paused, transport._eof, transport._conn_lost) == (False, False, False, 0)
        transport.set_write_buffer_limits(high=100, low=10)
        assert (transport._high_water, transport._low_water, transport._protocol_paused) == (100, 10, False)
        transport.pause_reading()
        assert transport._paused is True
        transport.resume_reading()
        transport.write_eof()
        assert transport._eof is True
        transport.close()
        assert transport._closing is True
        await until(lambda: protocol.is_lost, "connection_lost")
        await iterations(1)
        assert transport._conn_lost > 0
        assert (transport._sock, transport._protocol) == (None, None)


async def test_of_datagrams(loop):
    transport, protocol = await loop.create_datagram_endpoint(Datagrams, local_addr=(HOST, 0))
    assert transport._sock.type == socket.SOCK_DGRAM
    assert transport._sock_fd == transport._sock.fileno()
    assert (transport._loop, transport._protocol, transport._address) == (loop, protocol, None)
    assert (transport._closing, transport._conn_lost, transport._buffer_size) == (False, 0, 0)
    assert transport._protocol_paused is False
    transport.close()
    await until(lambda: protocol.is_lost, "connection_lost")
    await iterations(1)
    assert (transport._sock, transport._closing) == (None, True)


@pytest.mark.parametrize("direction", ["read", "write"])
async def test_of_pipes(loop, direction):
    with pipe_ends("pipe", direction) as ends:
        connect = {"read": loop.connect_read_pipe, "write": loop.connect_write_pipe}[direction]
        transport, protocol = await connect(Recorder, ends.file)
        assert (transport._loop, transport._protocol, transport._pipe) == (loop, protocol, ends.file)
        assert transport._fileno == ends.number
        assert transport._closing is False
        if direction == "read":
            transport.pause_reading()
            assert transport._paused is True
        else:
            assert transport._protocol_paused is False
        transport.close()
        assert transport._closing is True
        await until(lambda: protocol.is_lost, "connection_lost")
        await iterations(1)
        assert transport._pipe is None


async def test_of_tls(loop):
    transport, protocol, peer = await endpoints.connected(loop)
    below = transport._ssl_protocol
    assert (transport._loop, transport._closed) == (loop, False)
    assert (below._app_transport, below._app_protocol) == (transport, protocol)
    assert below._sslobj is transport.get_extra_info("ssl_object")
    assert below._sslcontext is transport.get_extra_info("sslcontext")
    assert below._app_reading_paused is False
    transport.pause_reading()
    assert below._app_reading_paused is True
    transport.abort()
    assert transport._closed is True
    await until(lambda: protocol.is_lost, "connection_lost")
    peer.close()


async def test_of_a_server(loop):
    server = await loop.create_server(Recorder, HOST, 0)
    assert server._serving is True
    server.close()
    assert server._serving is False
    await server.wait_closed()


async def test_of_a_subprocess(loop):
    transport, protocol = await loop.subprocess_exec(Events, *CAT, stderr=None)
    assert transport._proc is transport.get_extra_info("subprocess")
    assert (transport._loop, transport._protocol, transport._pid) == (loop, protocol, transport.get_pid())
    transport.close()
    await protocol.wait_lost()
    await iterations(1)
    assert transport._proc is None


def check_setting(owner, *names):
    """Check that a program can set the attributes and read them back. On grapeshot's objects, also check that deleting
    an attribute restores its original value.
    """
    for name in names:
        before, value = getattr(owner, name), object()
        setattr(owner, name, value)
        assert getattr(owner, name) is value
        if type(owner).__module__.startswith("grapeshot"):
            delattr(owner, name)
            with pytest.raises(AttributeError, match=name):
                delattr(owner, name)
            assert getattr(owner, name) == before or name == "_sock"
        else:
            setattr(owner, name, before)


async def test_attributes_can_be_set_on_a_stream(loop):
    transport, protocol, peer = await connected(loop)
    with peer:
        names = ["_sock", "_sock_fd", "_loop", "_protocol", "_server", "_closing", "_paused", "_eof", "_conn_lost"]
        check_setting(transport, *names, "_high_water", "_low_water", "_protocol_paused")
        transport.close()
        await until(lambda: protocol.is_lost, "connection_lost")


async def test_attributes_can_be_set_on_an_endpoint(loop):
    transport, protocol = await loop.create_datagram_endpoint(Datagrams, local_addr=(HOST, 0))
    names = ["_sock", "_sock_fd", "_loop", "_protocol", "_address", "_closing", "_conn_lost"]
    check_setting(transport, *names, "_protocol_paused")
    transport.close()
    await until(lambda: protocol.is_lost, "connection_lost")


@pytest.mark.parametrize("direction", ["read", "write"])
async def test_attributes_can_be_set_on_a_pipe(loop, direction):
    with pipe_ends("pipe", direction) as ends:
        connect = {"read": loop.connect_read_pipe, "write": loop.connect_write_pipe}[direction]
        transport, protocol = await connect(Recorder, ends.file)
        check_setting(transport, "_pipe", "_fileno", "_loop", "_protocol", "_closing")
        check_setting(transport, {"read": "_paused", "write": "_protocol_paused"}[direction])
        transport.close()
        await until(lambda: protocol.is_lost, "connection_lost")


async def test_attributes_can_be_set_on_tls_objects(loop):
    transport, protocol, peer = await endpoints.connected(loop)
    check_setting(transport, "_loop", "_closed", "_ssl_protocol")
    below = transport._ssl_protocol
    names = ["_transport", "_app_transport", "_app_protocol", "_sslcontext", "_sslobj", "_app_reading_paused"]
    check_setting(below, *names)
    transport.abort()
    await until(lambda: protocol.is_lost, "connection_lost")
    peer.close()


async def test_attributes_can_be_set_on_a_server_and_a_subprocess(loop):
    server = await loop.create_server(Recorder, HOST, 0)
    check_setting(server, "_serving")
    server.close()
    await server.wait_closed()
    transport, protocol = await loop.subprocess_exec(Events, *CAT, stderr=None)
    check_setting(transport, "_proc")
    transport.close()
    await protocol.wait_lost()
