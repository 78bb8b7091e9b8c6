"""The data that sock_recv and the other sock_* methods transfer: every operation, at once and after a wait, with every
kind of buffer and size.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import random
import socket
import struct
import time

import pytest
from support import HOST, blocked_task, has_ipv6, iterations, listening, raw_pair, until


@pytest.fixture
def datagrams():
    """Two bound UDP sockets."""
    with socket.socket(type=socket.SOCK_DGRAM) as first, socket.socket(type=socket.SOCK_DGRAM) as second:
        for sock in (first, second):
            sock.bind((HOST, 0))
            sock.setblocking(False)
        yield first, second


async def test_recv_at_once_and_after_a_wait(loop, pair):
    ours, theirs = pair
    theirs.send(b"now")
    assert await loop.sock_recv(ours, 100) == b"now"
    task = await blocked_task(loop, loop.sock_recv(ours, 100))
    theirs.send(b"later")
    data = await task
    assert data == b"later"
    assert type(data) is bytes


async def test_recv_takes_no_more_than_asked_for(loop, pair):
    ours, theirs = pair
    theirs.send(b"abcdef")
    assert await loop.sock_recv(ours, 2) == b"ab"
    assert await loop.sock_recv(ours, 1) == b"c"
    assert await loop.sock_recv(ours, 100) == b"def"


@pytest.mark.skip_on(uvloop="waits for data even when asked for 0 bytes")
async def test_recv_of_nothing(loop, pair):
    ours, theirs = pair
    assert await loop.sock_recv(ours, 0) == b""
    theirs.send(b"x")
    assert await loop.sock_recv(ours, 0) == b""
    assert await loop.sock_recv(ours, 1) == b"x"


async def test_end_of_stream(loop, pair):
    ours, theirs = pair
    task = await blocked_task(loop, loop.sock_recv(ours, 10))
    theirs.shutdown(socket.SHUT_WR)
    assert await task == b""
    assert await loop.sock_recv(ours, 10) == b""
    assert await loop.sock_recv_into(ours, bytearray(4)) == 0


@pytest.mark.parametrize("size", [1, 100, 4096, 65536, 262144, 262145, 1 << 20, 1 << 24])
async def test_sizes_of_recv(loop, pair, size):
    ours, theirs = pair
    content = random.Random(size).randbytes(300_000)
    sending = loop.create_task(loop.sock_sendall(theirs, content))
    received = bytearray()
    while len(received) < len(content):
        data = await loop.sock_recv(ours, size if size > 1 or len(received) < 1000 else 1 << 16)
        assert 0 < len(data) <= max(size, 1 << 16)
        received += data
    await sending
    assert received == content


@pytest.mark.xfail_on(uvloop="#561: not implemented")
async def test_a_datagram_longer_than_any_buffer_of_the_loop_comes_whole(loop):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        content = os.urandom(300_000)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 400_000)
        try:
            theirs.send(content)
        except OSError as error:
            pytest.skip(f"no datagram of that size here: {error}")
        assert await loop.sock_recv(ours, 1 << 20) == content
        theirs.send(content)
        assert await loop.sock_recvfrom(ours, 1 << 20) == (content, None)


async def test_reads_of_a_steady_size_followed_by_other_sizes(loop, pair):
    ours, theirs = pair
    for size in [20_000] * 8 + [60_000, 5, 20_000] + [50_000] * 8 + [50_001, 3, 70_000]:
        content = random.Random(size).randbytes(size)
        task = await blocked_task(loop, loop.sock_recv(ours, 1 << 18), 1)
        theirs.send(content)
        received = await task
        while len(received) < size:
            received += await loop.sock_recv(ours, 1 << 18)
        assert received == content


async def test_datagrams_of_a_steady_size_followed_by_other_sizes(loop):
    """A datagram that is longer than the previous ones is not cut off."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        ours.setblocking(False)
        for size in [10_000] * 10 + [50_000, 10_000, 60_000]:
            task = await blocked_task(loop, loop.sock_recv(ours, 1 << 16), 1)
            theirs.send(bytes(size))
            assert len(await task) == size


@pytest.mark.parametrize(
    "make",
    [
        bytearray,
        lambda size: memoryview(bytearray(size)),
        lambda size: memoryview(bytearray(size + 20))[10 : 10 + size],
        lambda size: array.array("b", bytes(size)),
        lambda size: memoryview(bytearray(size)).cast("I"),
    ],
    ids=["bytearray", "memoryview", "slice", "array", "words"],
)
async def test_buffers_of_recv_into(loop, pair, make):
    ours, theirs = pair
    buffer = make(16)
    theirs.send(b"now")
    assert await loop.sock_recv_into(ours, buffer) == 3
    assert bytes(memoryview(buffer).cast("b").cast("B")[:3]) == b"now"
    task = await blocked_task(loop, loop.sock_recv_into(ours, buffer))
    theirs.send(b"0123456789abcdefXYZ")
    assert await task == 16
    assert bytes(memoryview(buffer).cast("b").cast("B")) == b"0123456789abcdef"
    assert await loop.sock_recv(ours, 10) == b"XYZ"


async def test_a_waiting_recv_into_leaves_the_buffer_to_its_owner(loop, pair):
    ours, theirs = pair
    buffer = bytearray(4)
    task = await blocked_task(loop, loop.sock_recv_into(ours, buffer))
    buffer += b"more"  # would raise BufferError if the waiting operation held the buffer
    theirs.send(b"0123456789")
    assert await task == 8
    assert buffer == b"01234567"


@pytest.mark.parametrize(
    "make",
    [
        bytes,
        bytearray,
        memoryview,
        lambda data: memoryview(bytearray(b"--" + data))[2:],
        lambda data: array.array("b", data),
    ],
    ids=["bytes", "bytearray", "memoryview", "slice", "array"],
)
@pytest.mark.parametrize("size", [0, 1, 5000, 3_000_000])
async def test_data_of_sendall(loop, pair, make, size):
    ours, theirs = pair
    content = random.Random(size).randbytes(size)
    received = bytearray()
    sending = loop.create_task(loop.sock_sendall(ours, make(content)))
    while len(received) < size:
        received += await loop.sock_recv(theirs, 1 << 18)
    assert await sending is None
    assert received == content


@pytest.mark.parametrize("timeout", [None, 60])
async def test_data_of_sendall_on_a_blocking_socket(loop, timeout):
    """Debug mode refuses such a socket. Without debug mode, send() blocks the loop."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(timeout)
        content = random.Random(1).randbytes(3_000_000)

        def receive():
            time.sleep(0.05)  # until the buffers are full
            received = bytearray()
            while data := theirs.recv(1 << 16):
                received += data
            return received

        receiving = loop.run_in_executor(None, receive)
        await asyncio.sleep(0)
        await loop.sock_sendall(ours, content)
        ours.shutdown(socket.SHUT_WR)
        assert await receiving == content


async def test_sendall_keeps_a_bytearray_from_being_resized_while_it_waits(loop, pair):
    ours, _ = pair
    data = bytearray(8_000_000)
    task = await blocked_task(loop, loop.sock_sendall(ours, data))
    with pytest.raises(BufferError):
        data.append(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    data.append(0)


async def test_sendall_gives_way_to_others(loop):
    """A receiver in a thread takes data all the time, so the socket is always writable. Other callbacks still run."""
    ours, theirs = raw_pair()
    with ours, theirs:
        ours.setblocking(False)

        def drain():
            count = 0
            while data := theirs.recv(1 << 20):
                count += len(data)
            return count

        draining = loop.run_in_executor(None, drain)
        sending = loop.create_task(loop.sock_sendall(ours, bytes(64 << 20)))
        count = 0
        while not sending.done():
            count += 1
            await asyncio.sleep(0)
        await sending
        assert count > 3
        ours.shutdown(socket.SHUT_WR)
        assert await draining == 64 << 20


async def test_sending_to_a_peer_that_is_gone(loop, pair):
    ours, theirs = pair
    theirs.close()
    with pytest.raises(BrokenPipeError):
        await loop.sock_sendall(ours, b"x")


async def test_a_reset_ends_a_waiting_recv(loop):
    ours, theirs = raw_pair()
    with ours:
        ours.setblocking(False)
        task = await blocked_task(loop, loop.sock_recv(ours, 10))
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs.close()
        with pytest.raises(ConnectionResetError):
            await task


# ---------------------------------------------------------------- datagrams


@pytest.mark.xfail_on(uvloop="#561: not implemented")
async def test_datagrams_and_their_senders(loop, datagrams):
    ours, theirs = datagrams
    assert await loop.sock_sendto(theirs, b"now", ours.getsockname()) == 3
    assert await loop.sock_recvfrom(ours, 100) == (b"now", theirs.getsockname())
    task = await blocked_task(loop, loop.sock_recvfrom(ours, 4))
    theirs.sendto(b"too long", ours.getsockname())
    assert await task == (b"too ", theirs.getsockname())
    theirs.sendto(b"", ours.getsockname())
    assert await loop.sock_recvfrom(ours, 10) == (b"", theirs.getsockname())
    theirs.sendto(b"gone", ours.getsockname())
    assert await loop.sock_recvfrom(ours, 0) == (b"", theirs.getsockname())


@pytest.mark.xfail_on(uvloop="#561: not implemented")
async def test_datagrams_into_a_buffer(loop, datagrams):
    ours, theirs = datagrams
    buffer = bytearray(10)
    theirs.sendto(b"now", ours.getsockname())
    assert await loop.sock_recvfrom_into(ours, buffer) == (3, theirs.getsockname())
    task = await blocked_task(loop, loop.sock_recvfrom_into(ours, buffer, 2))
    theirs.sendto(b"later", ours.getsockname())
    assert await task == (2, theirs.getsockname())
    assert buffer == b"law" + bytes(7)
    theirs.sendto(b"abcdef", ours.getsockname())
    assert await loop.sock_recvfrom_into(ours, buffer, nbytes=0) == (6, theirs.getsockname())


@pytest.mark.xfail_on(uvloop="#561: not implemented")
@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
async def test_senders_over_ipv6(loop):
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as ours, socket.socket(ours.family, ours.type) as theirs:
        for sock in (ours, theirs):
            sock.bind(("::1", 0))
            sock.setblocking(False)
        assert await loop.sock_sendto(theirs, b"x", ours.getsockname()) == 1
        assert await loop.sock_recvfrom(ours, 5) == (b"x", theirs.getsockname())


@pytest.mark.xfail_on(uvloop="#561: not implemented")
async def test_senders_over_unix_sockets(loop, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ours, socket.socket(ours.family, ours.type) as theirs:
        ours.bind(str(tmp_path / "ours"))
        ours.setblocking(False)
        theirs.sendto(b"from nobody", ours.getsockname())
        expected = ours.recvfrom(100)
        theirs.sendto(b"from nobody", ours.getsockname())
        assert await loop.sock_recvfrom(ours, 100) == expected
        theirs.bind(str(tmp_path / "theirs"))
        theirs.sendto(b"named", ours.getsockname())
        assert await loop.sock_recvfrom(ours, 100) == (b"named", str(tmp_path / "theirs"))


@pytest.mark.xfail_on(uvloop="#561: not implemented")
async def test_sendto_waits_for_room(loop, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ours, socket.socket(ours.family, ours.type) as theirs:
        theirs.bind(str(tmp_path / "theirs"))
        ours.setblocking(False)
        theirs.setblocking(False)
        count = 0
        while True:
            task = loop.create_task(loop.sock_sendto(ours, b"x" * 100, str(tmp_path / "theirs")))
            await iterations(2)
            if not task.done():
                break
            count += await task
        while not task.done():
            assert len(theirs.recv(200)) == 100
            await iterations(2)
        assert await task == 100
        assert count > 0


# ---------------------------------------------------------------- connecting


async def test_connect_and_accept(loop):
    with listening() as listener, socket.socket() as client:
        listener.setblocking(False)
        client.setblocking(False)
        accepting = await blocked_task(loop, loop.sock_accept(listener))
        assert await loop.sock_connect(client, listener.getsockname()) is None
        connection, address = await accepting
        with connection:
            assert type(connection) is socket.socket
            assert (connection.family, connection.type) == (socket.AF_INET, socket.SOCK_STREAM)
            assert address == client.getsockname()
            assert connection.gettimeout() == 0
            assert not os.get_inheritable(connection.fileno())
            await loop.sock_sendall(connection, b"hello")
            assert await loop.sock_recv(client, 10) == b"hello"


async def test_accept_a_connection_that_is_already_pending(loop):
    with listening() as listener:
        listener.setblocking(False)
        with socket.create_connection(listener.getsockname()) as client:
            connection, address = await loop.sock_accept(listener)
            connection.close()
            assert address == client.getsockname()


async def test_accept_over_unix_sockets(loop, tmp_path):
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(tmp_path / "listener"))
        listener.listen()
        listener.setblocking(False)
        client.connect(str(tmp_path / "listener"))
        connection, address = await loop.sock_accept(listener)
        with connection:
            assert (connection.family, address) == (socket.AF_UNIX, "")
            client.send(b"x")
            assert await loop.sock_recv(connection, 10) == b"x"


async def test_a_refused_connection(loop):
    with listening() as listener:
        address = listener.getsockname()
    with socket.socket() as client:
        client.setblocking(False)
        with pytest.raises(ConnectionRefusedError, match=r"Connect call failed"):
            await loop.sock_connect(client, address)


async def test_connecting_again_after_a_refusal(loop):
    """A socket whose first attempt was refused can still connect."""
    with socket.socket() as client:
        client.setblocking(False)
        with listening() as listener:
            address = listener.getsockname()
        with pytest.raises(ConnectionRefusedError):
            await loop.sock_connect(client, address)
        with listening() as listener:
            with contextlib.suppress(ConnectionAbortedError):  # on Linux, the first call after a refusal fails
                await loop.sock_connect(client, listener.getsockname())
            await loop.sock_connect(client, listener.getsockname())
            accepted, _ = listener.accept()
            with accepted:
                await loop.sock_sendall(client, b"x")
                assert accepted.recv(1) == b"x"


async def test_many_at_once(loop):
    """Many connections transfer data at the same time. Later connections reuse the descriptors of closed ones."""
    pattern = random.Random(7)

    async def serve(connection):
        with connection:
            while data := await loop.sock_recv(connection, pattern.choice((1, 100, 70_000))):
                await loop.sock_sendall(connection, data)

    async def visit(address, number):
        for step in range(8):
            with socket.socket() as sock:
                sock.setblocking(False)
                await loop.sock_connect(sock, address)
                content = f"{number} {step} ".encode() * pattern.choice((1, 10, 40_000))
                sending = loop.create_task(loop.sock_sendall(sock, content))
                received = bytearray()
                while len(received) < len(content):
                    received += await loop.sock_recv(sock, 1 << 16)
                await sending
                assert received == content

    with listening() as listener:
        listener.setblocking(False)
        connections = set()

        async def accept():
            while True:
                connection, _ = await loop.sock_accept(listener)
                task = loop.create_task(serve(connection))
                connections.add(task)
                task.add_done_callback(connections.discard)

        accepting = loop.create_task(accept())
        await asyncio.gather(*(visit(listener.getsockname(), number) for number in range(20)))
        accepting.cancel()
        await until(lambda: not connections, "the connections to end")
