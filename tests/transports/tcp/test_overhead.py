"""Costs that the loop avoids: large buffers for small reads, a system call per write, threads, releasing the GIL."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import struct
import sys
import threading
import tracemalloc

import pytest
from support import HOST, Echo, Recorder, connected, gil_is_enabled, until

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads counters that only Linux has")


@pytest.mark.xfail_on(asyncio="allocates 256 KiB for each read, and shrinks it afterwards")
async def test_a_small_read_allocates_little(loop):
    """To receive 1 KiB, the loop never allocates 64 KiB or more."""
    _, protocol, peer = await connected(loop)
    with peer:
        await peer.send(b"warm up")
        await until(lambda: len(protocol.data) == 7)
        tracemalloc.start()
        try:
            for _ in range(3):
                before, _ = tracemalloc.get_traced_memory()
                tracemalloc.reset_peak()
                await peer.send(b"x" * 1024)
                length = len(protocol.data) + 1024
                await until(lambda length=length: len(protocol.data) == length)
                _, peak = tracemalloc.get_traced_memory()
                assert peak - before < 64 * 1024
        finally:
            tracemalloc.stop()


async def test_received_bytes_use_no_spare_memory(loop):
    """The bytes object that `data_received` gets has no unused memory at its end."""
    sizes = []

    class Sizes(Recorder):
        def data_received(self, data):
            sizes.append(sys.getsizeof(data) - len(data))
            super().data_received(data)

    _, protocol, peer = await connected(loop, Sizes)
    with peer:
        for length in (1, 1000, 70_000, 300_000):
            wanted = len(protocol.data) + length
            await asyncio.gather(peer.send(b"x" * length), until(lambda wanted=wanted: len(protocol.data) == wanted))
    assert set(sizes) == {sys.getsizeof(b"")}


def data_segments_sent(sock: socket.socket) -> int:
    """Return how many TCP segments with data this end has sent (Source: `struct tcp_info` of linux/tcp.h)."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
    [segments] = struct.unpack_from("=I", info, 156)
    return segments


@linux_only
@pytest.mark.xfail_on(asyncio="makes a system call for each write", uvloop="makes a system call for each write")
async def test_writes_of_one_callback_leave_together(loop):
    """Four writes in data_received make one system call. TCP_NODELAY is set, so each system call sends a segment."""

    class Pieces(Recorder):
        def data_received(self, data):
            for piece in (b"HTTP/1.1 200 OK\r\n", b"Content-Length: 5\r\n", b"\r\n", b"hello"):
                self.transport.write(piece)

    transport, _, peer = await connected(loop, Pieces)
    with peer:
        for _ in range(3):
            before = data_segments_sent(transport.get_extra_info("socket"))
            await peer.send(b"GET")
            assert await peer.read_exactly(43) == b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
            assert data_segments_sent(transport.get_extra_info("socket")) == before + 1


@linux_only
@pytest.mark.skip_on(
    uvloop="resolves an address literal in libuv's pool of threads, which an earlier test may have started"
)
async def test_no_thread_is_started(loop, serve):
    """The loop connects, serves, reads, writes and waits in its own thread."""

    def count() -> int:
        return len(os.listdir("/proc/self/task"))

    counts = [count()]
    server = await serve(Echo, HOST, 0)
    counts.append(count())
    transport, protocol = await loop.create_connection(Recorder, *server.sockets[0].getsockname())
    transport.write(b"hello")
    await until(lambda: protocol.data == b"hello")
    await asyncio.sleep(0.01)
    counts.append(count())
    transport.close()
    server.close()
    await server.wait_closed()
    assert max(counts) == counts[0]  # a thread of an earlier test may end during this one


@pytest.mark.skipif(not gil_is_enabled(), reason="there is no GIL to give up")
@pytest.mark.skip_on(
    asyncio="releases the GIL at each poll, and the system chooses the thread that gets it",
    uvloop="like asyncio",
)
async def test_the_gil_is_kept_while_work_is_ready(loop):
    """Another thread gets the GIL only after the switch interval, not after each callback."""
    rounds, seen, rounds_done = 2000, [], asyncio.Event()
    counter, stopped = [0], threading.Event()

    def count() -> None:
        while not stopped.is_set():
            counter[0] += 1

    def step(number: int) -> None:
        seen.append(counter[0])
        if number:
            loop.call_soon(step, number - 1)
        else:
            rounds_done.set()

    interval_s = sys.getswitchinterval()
    thread = threading.Thread(target=count)
    thread.start()
    try:
        while not counter[0]:
            await asyncio.sleep(0)
        sys.setswitchinterval(1.0)
        loop.call_soon(step, rounds)
        await rounds_done.wait()
    finally:
        sys.setswitchinterval(interval_s)
        stopped.set()
        thread.join()
    changes = sum(earlier != later for earlier, later in itertools.pairwise(seen))
    assert changes <= rounds // 100
