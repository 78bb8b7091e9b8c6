"""loop.sendfile and loop.sock_sendfile: by a system call, or by reading and writing where that call is not possible."""

from __future__ import annotations

import asyncio
import io
import os
import random
import socket
import sys

import pytest
from support import Peer, Recorder, connected, iterations, raw_pair, until
from tls.endpoints import connected as tls_connected

from grapeshot import _core

pytestmark = pytest.mark.skip_on(uvloop="#228: has neither sendfile() nor sock_sendfile()")

CONTENT = random.Random(5).randbytes(3_000_000)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "content"
    path.write_bytes(CONTENT)
    with open(path, "rb") as opened:
        yield opened


class Unmappable(io.BytesIO):
    """A file without a descriptor."""


# Since 3.12, asyncio's transports keep views of unsent data, but the fallback of sendfile() reads the next block into
# the buffer behind those views.
is_torn = pytest.mark.skip_on(when=sys.version_info >= (3, 12), asyncio="the fallback overwrites unsent data")
WAYS = [True, pytest.param(False, marks=is_torn)]


async def read_for(task, peer):
    """Reads until the task is done. Returns all data."""
    data = bytearray()
    while not task.done():
        try:
            data += peer.sock.recv(1 << 16)
        except BlockingIOError:
            await asyncio.sleep(0.0005)
    await asyncio.wait([task])
    return data


async def sent_through(loop, transport, peer, opened, *args, **kwargs):
    """Returns the result of sendfile and the data that the peer received."""
    task = loop.create_task(loop.sendfile(transport, opened, *args, **kwargs))
    data = await read_for(task, peer)
    count = await task
    data += await peer.read_exactly(count - len(data)) if count > len(data) else b""
    return count, data


WINDOWS = [
    ((), 0, 3_000_000),
    ((1000,), 1000, 3_000_000),
    ((0, 1), 0, 1),
    ((5, 200_000), 5, 200_005),
    ((2_999_000, 5000), 2_999_000, 3_000_000),
    ((3_000_000,), 3_000_000, 3_000_000),
    ((4_000_000,), 4_000_000, 4_000_000),
    ((4_000_000, 10), 4_000_000, 4_000_000),
]


@pytest.mark.parametrize(("args", "start", "end"), WINDOWS)
@pytest.mark.parametrize("is_native", WAYS, ids=["native", "fallback"])
async def test_windows_of_a_file(loop, file, args, start, end, is_native):
    opened = file if is_native else Unmappable(CONTENT)
    transport, _, peer = await connected(loop, small=True)
    with peer:
        count, data = await sent_through(loop, transport, peer, opened, *args)
        assert count == min(end, len(CONTENT)) - min(start, len(CONTENT))
        assert data == CONTENT[start:end]
        assert not count or opened.tell() == end
        transport.abort()
        await iterations(3)


@pytest.mark.parametrize(("args", "start", "end"), WINDOWS)
@pytest.mark.parametrize("is_native", WAYS, ids=["native", "fallback"])
async def test_windows_of_a_file_on_a_socket(loop, file, args, start, end, is_native):
    opened = file if is_native else Unmappable(CONTENT)
    ours, theirs = raw_pair(small=True)
    with ours, Peer(theirs) as peer:
        ours.setblocking(False)
        task = loop.create_task(loop.sock_sendfile(ours, opened, *args))
        data = await read_for(task, peer)
        count = await task
        data += await peer.read_exactly(count - len(data)) if count > len(data) else b""
        assert count == len(data)
        assert data == CONTENT[start:end]
        assert not count or opened.tell() == end


@pytest.mark.skip_on(when=sys.version_info < (3, 14, 7), asyncio="does not move the position in the file")
async def test_the_position_when_nothing_is_sent(loop, file):
    ours, theirs = raw_pair()
    with ours, theirs:
        ours.setblocking(False)
        for opened in (file, Unmappable(CONTENT)):
            assert await loop.sock_sendfile(ours, opened, 4_000_000) == 0
            assert opened.tell() == 4_000_000


async def test_an_empty_file(loop, tmp_path):
    path = tmp_path / "empty"
    path.touch()
    transport, _, peer = await connected(loop)
    with peer, open(path, "rb") as empty:
        assert await loop.sendfile(transport, empty) == 0
        assert await loop.sendfile(transport, Unmappable()) == 0
        transport.close()
        assert await peer.read_to_end() == b""


@pytest.mark.parametrize("is_native", WAYS, ids=["native", "fallback"])
async def test_the_file_is_sent_between_writes(loop, loop_kind, file, is_native):
    opened = file if is_native else Unmappable(CONTENT)
    transport, protocol, peer = await connected(loop, small=True)
    with peer:
        before, after = b"before" * 100_000, b"after" * 100_000
        transport.write(before)
        assert "pause" in protocol.events
        task = loop.create_task(loop.sendfile(transport, opened))
        data = await read_for(task, peer)
        transport.write(after)
        transport.close()
        data += await peer.read_to_end()
        assert data == before + CONTENT + after
        assert transport.get_write_buffer_size() == 0
        if loop_kind == "asyncio" and not is_native:
            # If the protocol was paused at the start, asyncio's fallback calls resume_writing() before it returns, even
            # while the transport's buffer is full. So pause and resume do not alternate there.
            return
        # pause and resume alternate, although the fallback replaces the protocol during the transfer
        flow = [event for event in protocol.events if event in ("pause", "resume")]
        assert flow[::2] == ["pause"] * len(flow[::2])
        assert flow[1::2] == ["resume"] * len(flow[1::2])
        await until(lambda: protocol.is_lost)


@pytest.mark.parametrize("is_native", WAYS, ids=["native", "fallback"])
async def test_nothing_is_read_during_sendfile(loop, file, is_native):
    opened = file if is_native else Unmappable(CONTENT)
    transport, protocol, peer = await connected(loop, small=True)
    with peer:
        task = loop.create_task(loop.sendfile(transport, opened))
        await iterations(5)
        assert not transport.is_reading()
        await peer.send(b"hello")
        await iterations(5)
        assert protocol.data == b""
        await read_for(task, peer)
        assert transport.is_reading()
        assert transport.get_protocol() is protocol
        await until(lambda: protocol.data == b"hello")
        transport.abort()
        await iterations(3)


@pytest.mark.parametrize("is_native", WAYS, ids=["native", "fallback"])
async def test_a_paused_transport_stays_paused(loop, file, is_native):
    opened = file if is_native else Unmappable(CONTENT)
    transport, _, peer = await connected(loop)
    with peer:
        transport.pause_reading()
        await sent_through(loop, transport, peer, opened)
        assert not transport.is_reading()
        transport.abort()
        await iterations(3)


async def test_writes_are_refused_during_sendfile(loop, file):
    transport, _, peer = await connected(loop, small=True)
    with peer:
        task = loop.create_task(loop.sendfile(transport, file))
        await iterations(5)
        with pytest.raises(RuntimeError, match="unable to write; sendfile is in progress"):
            transport.write(b"x")
        with pytest.raises(RuntimeError, match="sendfile is in progress"):
            transport.writelines([b"x"])
        assert not task.done()
        data = await read_for(task, peer)
        data += await peer.read_exactly(len(CONTENT) - len(data))
        assert data == CONTENT
        transport.write(b"x")
        assert await peer.read_exactly(1) == b"x"
        transport.abort()
        await iterations(3)


@pytest.mark.xfail_on(asyncio="raises KeyError, and the first transfer loses its transport")
async def test_one_transfer_at_a_time(loop, file):
    transport, _, peer = await connected(loop, small=True)
    with peer:
        task = loop.create_task(loop.sendfile(transport, file))
        await iterations(5)
        try:
            with pytest.raises(RuntimeError):
                await loop.sendfile(transport, file)
        finally:
            data = await read_for(task, peer)
        data += await peer.read_exactly(len(CONTENT) - len(data))
        assert data == CONTENT
        assert transport.is_reading()
        transport.abort()
        await iterations(3)


@pytest.mark.parametrize("is_native", WAYS, ids=["native", "fallback"])
async def test_a_cancelled_transfer_leaves_the_transport_usable(loop, file, is_native):
    opened = file if is_native else Unmappable(CONTENT)
    transport, protocol, peer = await connected(loop, small=True)
    with peer:
        task = loop.create_task(loop.sendfile(transport, opened))
        data = bytearray()
        while len(data) < 100_000:
            data += await peer.recv(1000)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert transport.get_protocol() is protocol
        assert transport.is_reading()
        transport.write(b"end")
        transport.close()
        data += await peer.read_to_end()
        assert data.endswith(b"end")
        assert data[:-3] == CONTENT[: len(data) - 3]
        await until(lambda: protocol.is_lost)


@pytest.mark.skip_on(asyncio="does not move the position in the file")
async def test_the_position_after_a_cancellation(loop, file):
    ours, theirs = raw_pair(small=True)
    with ours, Peer(theirs) as peer:
        ours.setblocking(False)
        task = loop.create_task(loop.sock_sendfile(ours, file, 10))
        data = bytearray()
        while len(data) < 100_000:
            data += await peer.recv(1000)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        ours.close()
        data += await peer.read_to_end()
        assert data == CONTENT[10 : 10 + len(data)]
        assert file.tell() == 10 + len(data)


@pytest.mark.parametrize("is_native", WAYS, ids=["native", "fallback"])
async def test_the_peer_disconnects(loop, file, is_native):
    opened = file if is_native else Unmappable(CONTENT)
    transport, protocol, peer = await connected(loop, small=True)
    task = loop.create_task(loop.sendfile(transport, opened))
    await peer.read_exactly(10_000)
    peer.reset()
    with pytest.raises(ConnectionError):
        await task
    assert 0 < opened.tell() < len(CONTENT)
    await until(lambda: protocol.is_lost)
    assert protocol.events.count("lost") == 1


@pytest.mark.skip_on(asyncio="the transfer never ends")
async def test_aborting_the_transport_ends_the_transfer(loop, file):
    transport, protocol, peer = await connected(loop, small=True)
    with peer:
        task = loop.create_task(loop.sendfile(transport, file))
        await peer.read_exactly(10_000)
        transport.abort()
        with pytest.raises(ConnectionError):
            await task
        assert protocol.lost_with == [None]
        assert file.tell() >= 10_000


@pytest.mark.skip_on(asyncio="the transfer never ends")
async def test_aborting_the_transport_while_it_waits_for_earlier_writes(loop, file):
    transport, protocol, peer = await connected(loop, small=True)
    with peer:
        transport.write(bytes(2_000_000))
        task = loop.create_task(loop.sendfile(transport, file))
        await iterations(3)
        transport.abort()
        with pytest.raises(ConnectionError):
            await task
        await until(lambda: protocol.is_lost)
        assert file.tell() == 0


async def test_the_connection_is_lost_during_the_fallback(loop):
    """The protocol gets connection_lost, although the fallback sets another protocol during the transfer."""
    transport, protocol, peer = await connected(loop, small=True)
    with peer:
        task = loop.create_task(loop.sendfile(transport, Unmappable(CONTENT)))
        await peer.read_exactly(10_000)
        transport.abort()
        with pytest.raises(ConnectionError):
            await task
        assert protocol.lost_with == [None]


async def test_a_closing_transport(loop, file):
    transport, _, peer = await connected(loop)
    with peer:
        transport.close()
        with pytest.raises(RuntimeError, match="closing"):
            await loop.sendfile(transport, file)
        await iterations(3)


async def test_without_the_fallback(loop):
    transport, _, peer = await connected(loop)
    ours, theirs = raw_pair()
    with peer, ours, theirs:
        ours.setblocking(False)
        with pytest.raises(asyncio.SendfileNotAvailableError):
            await loop.sendfile(transport, Unmappable(b"x"), fallback=False)
        with pytest.raises(asyncio.SendfileNotAvailableError):
            await loop.sock_sendfile(ours, Unmappable(b"x"), fallback=False)
        transport.write(b"usable")
        assert await peer.read_exactly(6) == b"usable"
        transport.abort()
        await iterations(3)


@pytest.mark.skip_on(when=sys.version_info >= (3, 12), asyncio="the fallback overwrites unsent data")
async def test_over_tls(loop, file):
    transport, protocol, peer = await tls_connected(loop, small=True)
    with peer:
        transport.write(b"before")
        task = loop.create_task(loop.sendfile(transport, file, 7))
        data = await peer.read_exactly(6 + len(CONTENT) - 7)
        assert await task == len(CONTENT) - 7
        assert file.tell() == len(CONTENT)
        with pytest.raises(RuntimeError, match="fallback is disabled"):
            await loop.sendfile(transport, file, fallback=False)
        transport.write(b"after")
        data += await peer.read_exactly(5)
        assert data == b"before" + CONTENT[7:] + b"after"
        transport.abort()
        await until(lambda: protocol.is_lost)


async def test_a_transport_that_does_not_support_sendfile(loop, file):
    reading, writing = os.pipe()
    with open(reading, "rb") as received:
        transport, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, open(writing, "wb", buffering=0))
        with pytest.raises(RuntimeError, match="not supported"):
            await loop.sendfile(transport, file)
        transport.close()
        await iterations(3)
        assert received.read() == b""


async def test_a_pipe_as_the_file(loop):
    """A pipe is not a regular file: its size is 0, so sock_sendfile() sends nothing if no count is given."""
    reading, writing = os.pipe()
    os.write(writing, b"through a pipe")
    os.close(writing)
    ours, theirs = raw_pair()
    with ours, theirs, open(reading, "rb", buffering=0) as pipe:
        ours.setblocking(False)
        assert await loop.sock_sendfile(ours, pipe) == 0


def outcome(error):
    return type(error), str(error)


ARGUMENTS = {
    "negative offset": {"offset": -1},
    "offset": {"offset": "1"},
    "zero count": {"count": 0},
    "negative count": {"count": -5},
    "count": {"count": 1.5},
    "text": {"text": True},
    "datagrams": {"datagrams": True},
}
MESSAGES = {
    "negative offset": (ValueError, "offset must be a non-negative integer (got -1)"),
    "offset": (TypeError, "offset must be a non-negative integer (got '1')"),
    "zero count": (ValueError, "count must be a positive integer (got 0)"),
    "negative count": (ValueError, "count must be a positive integer (got -5)"),
    "count": (TypeError, "count must be a positive integer (got 1.5)"),
    "text": (ValueError, "file should be opened in binary mode"),
    "datagrams": (ValueError, "only SOCK_STREAM type sockets are supported"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
async def test_arguments(loop, file, name):
    arguments = dict(ARGUMENTS[name])
    kind = socket.SOCK_DGRAM if arguments.pop("datagrams", False) else socket.SOCK_STREAM
    with socket.socket(type=kind) as sock, open(file.name) as text:
        sock.setblocking(False)
        opened = text if arguments.pop("text", False) else file
        with pytest.raises((TypeError, ValueError)) as caught:
            await loop.sock_sendfile(sock, opened, **arguments)
        assert outcome(caught.value) == MESSAGES[name]
        if kind == socket.SOCK_STREAM:
            transport, _, peer = await connected(loop)
            with peer:
                with pytest.raises((TypeError, ValueError)) as caught:
                    await loop.sendfile(transport, opened, **arguments)
                assert outcome(caught.value) == MESSAGES[name]
                assert transport.is_reading()
                transport.abort()
                await iterations(3)


async def test_a_socket_that_is_not_connected(loop, file):
    with socket.socket() as sock:
        sock.setblocking(False)
        with pytest.raises(OSError):
            await loop.sock_sendfile(sock, file)
        assert file.tell() in (0, len(CONTENT), 262144)


async def test_the_descriptor_of_a_transport_is_refused(loop, file):
    ours, theirs = raw_pair(small=True)
    with theirs:
        ours.setblocking(False)
        transport, _ = await loop.connect_accepted_socket(Recorder, ours)
        with pytest.raises(RuntimeError, match="is used by transport"):
            await loop.sock_sendfile(ours, file)
        transport.abort()
        await iterations(3)


async def test_a_file_that_shrinks_during_the_transfer(loop, tmp_path):
    path = tmp_path / "changing"
    path.write_bytes(bytes(2_000_000))
    transport, _, peer = await connected(loop, small=True)
    with peer, open(path, "rb") as opened:
        task = loop.create_task(loop.sendfile(transport, opened))
        await peer.read_exactly(100_000)
        os.truncate(path, 1_000_000)
        await read_for(task, peer)
        assert 100_000 < await task < 2_000_000
        assert opened.tell() == await task
        transport.abort()
        await iterations(3)


@pytest.mark.only_on("grapeshot")
async def test_no_part_is_sent_before_it_was_looked_for_in_memory(loop, file, monkeypatch):
    """Before sock_sendfile() sends a part of the file, it checks whether the part is in memory. If the socket takes
    only the beginning of the part, the next system call must not send more than the rest of that part, because
    nothing after the part has been checked.
    """
    checked, sent = 0, []
    read_now, send_file = _core._aio_read_now, _core._send_file

    def note_check(fd, size, offset):
        nonlocal checked
        checked = max(checked, offset + size)
        return read_now(fd, size, offset)

    def note_send(sock, fd, offset, length):
        sent.append(offset + length <= checked)
        return send_file(sock, fd, offset, length)

    monkeypatch.setattr(_core, "_aio_read_now", note_check)
    monkeypatch.setattr(_core, "_send_file", note_send)
    ours, theirs = raw_pair(small=True)
    ours.setblocking(False)
    with ours, Peer(theirs) as peer:
        task = loop.create_task(loop.sock_sendfile(ours, file))
        await read_for(task, peer)
        assert await task == len(CONTENT)
    assert len(sent) > 3
    assert all(sent)
