"""Probes of datagrams, unix sockets, pipes, subprocesses, signals, the sock_* calls and sendfile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
from typing import Any

from benchmarks.probes import (
    CAP_S,
    HOST,
    Collector,
    Echo,
    Recorder,
    contexts,
    exchange,
    probe,
    received,
    sync_probe,
    until,
)

# ---------------------------------------------------------------- datagrams, unix, pipes


class Datagrams(asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self.received: list[Any] = []
        self.errors: list[Exception] = []

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self.received.append((data, addr))

    def error_received(self, exc: Exception) -> None:
        self.errors.append(exc)


@probe
async def udp(loop: Any) -> None:
    ours, protocol = await loop.create_datagram_endpoint(Datagrams, local_addr=(HOST, 0))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        peer.bind((HOST, 0))
        peer.sendto(b"there", ours.get_extra_info("sockname"))
        await until(lambda: protocol.received)
        ours.sendto(b"back", peer.getsockname())
        assert await received(peer) == b"back"
    ours.close()


@probe
async def udp_after_refusal(loop: Any) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        peer.bind((HOST, 0))
        address = peer.getsockname()
    ours, protocol = await loop.create_datagram_endpoint(Datagrams, remote_addr=address)
    ours.sendto(b"nobody")
    await until(lambda: protocol.errors)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        peer.bind(address)
        peer.sendto(b"somebody", ours.get_extra_info("sockname"))
        await until(lambda: protocol.received)


@probe
async def unix_datagrams(loop: Any) -> None:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as peer:
        path = f"{folder}/datagrams"
        ours, protocol = await loop.create_datagram_endpoint(Datagrams, local_addr=path, family=socket.AF_UNIX)
        peer.sendto(b"there", path)
        await until(lambda: protocol.received)
        ours.close()


@probe
async def unix_streams(loop: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = await loop.create_unix_server(Echo, f"{folder}/streams")
        _, protocol = await loop.create_unix_connection(Recorder, f"{folder}/streams")
        protocol.transport.write(b"hello")
        await until(lambda: protocol.data == b"hello")
        server.close()


@probe
async def pipes(loop: Any) -> None:
    reading, writing = os.pipe()
    _, protocol = await loop.connect_read_pipe(Collector, os.fdopen(reading, "rb", 0))
    writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(writing, "wb", 0))
    writer.write(b"through a pipe")
    await until(lambda: protocol.data == b"through a pipe")
    writer.close()
    await until(lambda: "lost" in protocol.events)
    for fd in (reading, writing):
        try:
            os.fstat(fd)
        except OSError:
            continue
        raise AssertionError(f"descriptor {fd} is still open")


# ---------------------------------------------------------------- subprocesses and signals


@probe
async def subprocesses(loop: Any) -> None:
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec("cat", stdin=pipe, stdout=pipe)
    assert (await child.communicate(b"meow"))[0] == b"meow"
    assert child.returncode == 0


@probe
async def subprocess_pipes(loop: Any) -> None:
    code = "import os, stat; print(*(stat.S_ISFIFO(os.fstat(fd).st_mode) for fd in (0, 1, 2)))"
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdin=pipe, stdout=pipe, stderr=pipe)
    assert (await child.communicate())[0].split() == [b"True"] * 3, "not all of them are pipes"


@probe
async def sigchld_is_the_users(loop: Any) -> None:
    seen = asyncio.Event()
    loop.add_signal_handler(signal.SIGCHLD, seen.set)
    child = await asyncio.create_subprocess_exec("true")
    assert await asyncio.wait_for(child.wait(), CAP_S) == 0
    await asyncio.wait_for(seen.wait(), CAP_S)
    assert loop.remove_signal_handler(signal.SIGCHLD)


@probe
async def signals(loop: Any) -> None:
    seen = asyncio.Event()
    loop.add_signal_handler(signal.SIGUSR1, seen.set)
    os.kill(os.getpid(), signal.SIGUSR1)
    await asyncio.wait_for(seen.wait(), CAP_S)
    assert loop.remove_signal_handler(signal.SIGUSR1)


@sync_probe
def ctrl_c(factory: Any) -> None:
    """Ctrl-C ends a loop that is busy with its own callbacks."""
    loop = factory()

    def again() -> None:
        loop.call_soon(again)

    loop.call_soon(again)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        loop.run_forever()
    except KeyboardInterrupt:
        return
    raise AssertionError("run_forever ended without KeyboardInterrupt")


# ---------------------------------------------------------------- sock_*, sendfile


@probe
async def sock_streams(loop: Any) -> None:
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setblocking(False)
    await loop.sock_sendall(ours, b"x" * 1000)
    buffer = bytearray(2000)
    assert await loop.sock_recv(theirs, 10) == b"x" * 10
    assert await loop.sock_recv_into(theirs, buffer) == 990


@probe
async def sock_datagrams(loop: Any) -> None:
    ours, theirs = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
    for sock in (ours, theirs):
        sock.setblocking(False)
        sock.bind((HOST, 0))
    buffer = bytearray(10)
    await loop.sock_sendto(ours, b"one", theirs.getsockname())
    assert await loop.sock_recvfrom(theirs, 10) == (b"one", ours.getsockname())
    await loop.sock_sendto(ours, b"two", theirs.getsockname())
    assert await loop.sock_recvfrom_into(theirs, buffer) == (3, ours.getsockname())


@probe
async def sock_tasks(loop: Any) -> None:
    """A task can run `sock_recv` as a coroutine, and cancelling the task leaves the socket usable."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    task = asyncio.create_task(loop.sock_recv(ours, 10))
    await asyncio.sleep(0.01)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    theirs.send(b"later")
    assert await asyncio.wait_for(loop.sock_recv(ours, 10), CAP_S) == b"later"


@probe
async def sock_sendfile(loop: Any) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with tempfile.TemporaryFile() as file:
        file.write(b"0123456789")
        file.flush()
        assert await loop.sock_sendfile(ours, file, 2, 5) == 5
    assert theirs.recv(100) == b"23456"


async def send_file(loop: Any, **options: Any) -> None:
    _, transport, protocol = await exchange(loop, **options)
    protocol.data.clear()
    with tempfile.TemporaryFile() as file:
        file.write(b"0123456789")
        file.flush()
        assert await loop.sendfile(transport, file, 2, 5) == 5
    await until(lambda: protocol.data == b"23456")


@probe
async def sendfile(loop: Any) -> None:
    await send_file(loop)


@probe
async def sendfile_tls(loop: Any) -> None:
    await send_file(loop, tls=contexts())
