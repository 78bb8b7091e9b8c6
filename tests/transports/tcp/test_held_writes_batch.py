"""The loop holds the writes of one iteration up to certain limits. It sends them before it blocks, and begins with the
transport that was the first to write.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import threading
import time

import pytest
from support import CAP_S, Peer, Recorder, run_script, until
from transports.tcp.socket_pairs import arrived, finish, unix_pair

LATER = "sends at the end of the iteration"


class Shared:
    """Transports on duplicates of one socket. `peer` receives their data in the order of the system calls."""

    def __init__(self, loop, count):
        self.loop = loop
        self.count = count
        self.pairs = []

    async def __aenter__(self):
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)  # the system allows at most 416 KiB by default
        self.peer = Peer(theirs)
        with ours:
            for _ in range(self.count):
                sock = ours.dup()
                sock.setblocking(False)
                transport, protocol = await self.loop.connect_accepted_socket(Recorder, sock)
                transport.pause_reading()
                self.pairs.append((transport, protocol))
        self.transports = [transport for transport, _ in self.pairs]
        return self

    async def __aexit__(self, *_exc):
        for pair in self.pairs:
            await finish(*pair)
        self.peer.close()

    async def batch(self, *callbacks):
        """Runs the callbacks in one iteration, and returns in a later one."""
        done = self.loop.create_future()
        for callback in callbacks:
            self.loop.call_soon(callback)
        self.loop.call_soon(done.set_result, None)
        await done


def spin(duration_s):
    end = time.perf_counter() + duration_s
    while time.perf_counter() < end:
        pass


# ---------------------------------------------------------------- order and bounds


async def test_the_first_to_write_is_the_first_to_send(loop):
    async with Shared(loop, 40) as shared:
        again = [lambda t=t: t.write(b"again") for t in shared.transports[:3]]
        writes = [lambda n=n, t=t: t.write(b"<%d>" % n) for n, t in enumerate(shared.transports)]
        await shared.batch(*writes)
        assert arrived(shared.peer) == b"".join(b"<%d>" % number for number in range(40))
        await shared.batch(*again)
        assert arrived(shared.peer) == b"again" * 3


async def test_the_next_iteration_finds_the_data(loop):
    async with Shared(loop, 3) as shared:
        found = []

        def write(transport):
            transport.write(b"x")
            loop.call_soon(lambda: found.append(arrived(shared.peer)))

        await shared.batch(*[lambda t=t: write(t) for t in shared.transports])
        await until(lambda: len(found) == 3)
        assert found == [b"xxx", b"", b""]


async def test_a_chain_of_callbacks_that_never_ends(loop):
    """Each iteration ends with a send, although the loop always has another callback to run."""
    async with Shared(loop, 1) as shared:
        found, [transport] = [], shared.transports
        done = loop.create_future()

        def link(number):
            found.append(arrived(shared.peer))
            transport.write(b"%d" % number)
            if number < 30:
                loop.call_soon(link, number + 1)
            else:
                done.set_result(None)

        link(0)
        await done
        assert found == [b"", *(b"%d" % number for number in range(30))]


async def most_held(loop, count, write, len_bytes, expected):
    """Return the highest number of bytes that were unsent when a step of a batch began.

    `write` writes `len_bytes` bytes to a transport. The loop also sends when held data gets too old, so on a busy
    machine this function may need several batches until it reaches `expected`.
    """
    most, give_up = 0, time.monotonic() + CAP_S
    async with Shared(loop, count) as shared:
        while most < expected and time.monotonic() < give_up:
            written = found = 0

            def step(transport):
                nonlocal written, found, most
                found += len(arrived(shared.peer))
                most = max(most, written - found)
                write(transport)
                written += len_bytes

            await shared.batch(*[lambda t=t: step(t) for t in shared.transports])
            found += len(arrived(shared.peer))
            assert found == count * len_bytes
    return most


@pytest.mark.skip_on(asyncio="sends at once", uvloop=LATER)
async def test_at_most_64_transports_wait(loop):
    assert await most_held(loop, 100, lambda transport: transport.write(b"x"), 1, 63) == 63


def write_in_pieces(transport):
    transport.write(b"x")
    transport.write(b"x" * 4_999)
    transport.writelines([b"x" * 4_000, b"x" * 1_000])


@pytest.mark.skip_on(asyncio="sends at once", uvloop=LATER)
@pytest.mark.parametrize("write", [lambda transport: transport.write(b"x" * 10_000), write_in_pieces])
async def test_at_most_256_kib_wait(loop, write):
    assert await most_held(loop, 28, write, 10_000, 260_000) == 260_000


@pytest.mark.skip_on(uvloop=LATER)
@pytest.mark.parametrize("who", ["the writer", "a later step"])
async def test_a_long_step_ends_with_a_send(loop, who):
    async with Shared(loop, 1) as shared:
        [transport], found = shared.transports, []

        def write():
            transport.write(b"x")
            if who == "the writer":
                spin(0.002)

        def compute():
            if who == "a later step":
                spin(0.002)

        await shared.batch(write, compute, lambda: found.append(arrived(shared.peer)))
        assert found == [b"x"]


async def test_everything_leaves_before_the_loop_blocks(loop):
    """The peers answer only when the data has arrived; if it were held, the loop would wait forever."""
    pairs = [await unix_pair(loop) for _ in range(5)]
    got = []

    def answer():
        for _, _, peer in pairs:
            peer.sock.settimeout(CAP_S)
            got.append(peer.sock.recv(100))
        for _, _, peer in pairs:
            peer.sock.send(b"answer")

    thread = threading.Thread(target=answer)
    for number, (transport, _, _) in enumerate(pairs):
        loop.call_soon(transport.write, b"%d" % number)
    thread.start()
    await until(lambda: all(protocol.data == b"answer" for _, protocol, _ in pairs), "the answers")
    thread.join()
    assert got == [b"%d" % number for number in range(5)]
    for transport, protocol, peer in pairs:
        with peer:
            await finish(transport, protocol)


# ---------------------------------------------------------------- what a later step of the batch does


LOOKS = {
    "get_write_buffer_size": lambda transport: transport.get_write_buffer_size(),
    "is_reading": lambda transport: transport.is_reading(),
    "socket": lambda transport: transport.get_extra_info("socket"),
    "set_write_buffer_limits": lambda transport: transport.set_write_buffer_limits(high=100),
    "high mark": lambda transport: transport.write(b"." * 100_000),
    "set_protocol": lambda transport: transport.set_protocol(transport.get_protocol()),
    "write_eof": lambda transport: transport.write_eof(),
    "close": lambda transport: transport.close(),
    "abort": lambda transport: transport.abort(),
}


@pytest.mark.skip_on(uvloop=LATER)
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
async def test_calls_of_a_later_step_that_could_reveal_held_data_send_it_first(loop, look):
    transport, protocol, peer = await unix_pair(loop)
    found = []

    def step():
        look(transport)
        found.append(arrived(peer).rstrip(b"."))

    with peer:
        loop.call_soon(transport.write, b"held")
        loop.call_soon(step)
        await until(lambda: found)
        assert found == [b"held"]
        await finish(transport, protocol)


async def test_one_waiting_transport_is_aborted_and_one_closed(loop):
    async with Shared(loop, 4) as shared:
        first, second, third, fourth = shared.transports

        def end():
            second.abort()
            third.close()
            fourth.write(b"4")

        def write():
            for number, transport in enumerate((first, second, third)):
                transport.write(b"%d" % (number + 1))

        await shared.batch(write, end)
        assert sorted(arrived(shared.peer)) == sorted(b"1234")


async def test_a_transport_that_only_the_list_of_held_writes_refers_to(loop):
    transport, protocol, peer = await unix_pair(loop)
    pair = [transport]
    del transport

    def drop():
        pair.pop().abort()
        gc.collect()

    with peer:
        loop.call_soon(pair[0].write, b"held")
        loop.call_soon(drop)
        loop.call_soon(gc.collect)
        await until(lambda: protocol.is_lost, "connection_lost")
        assert arrived(peer) == b"held"
        assert protocol.lost_with == [None]


async def test_one_waiting_transport_fails(loop):
    """The failed transport reports the error to its own protocol, and the others send their data."""
    pairs = [await unix_pair(loop) for _ in range(3)]
    _, failing, peer = pairs[1]
    pairs[1][0].pause_reading()
    peer.close()
    for transport, _, _ in pairs:
        loop.call_soon(transport.write, b"x")
    await until(lambda: failing.is_lost, "connection_lost")
    assert [type(error) for error in failing.lost_with] == [BrokenPipeError]
    for transport, protocol, peer in (pairs[0], pairs[2]):
        with peer:
            assert await peer.read_exactly(1) == b"x"
            assert not protocol.is_lost
            await finish(transport, protocol)


async def test_another_protocol_while_data_waits(loop):
    transport, first, peer = await unix_pair(loop)
    second = Recorder()
    with peer:
        loop.call_soon(transport.write, b"from the first, ")
        loop.call_soon(transport.set_protocol, second)
        loop.call_soon(transport.write, b"from the second")
        assert await peer.read_exactly(31) == b"from the first, from the second"
        transport.abort()
        await until(lambda: "lost" in second.events, "connection_lost")
        assert not first.is_lost


def test_loops_in_two_threads(new_loop):
    """Each loop sends the writes of its own transports."""

    async def work():
        loop = asyncio.get_running_loop()
        for _ in range(20):
            async with Shared(loop, 20) as shared:
                await shared.batch(*[lambda n=n, t=t: t.write(b"<%d>" % n) for n, t in enumerate(shared.transports)])
                assert arrived(shared.peer) == b"".join(b"<%d>" % number for number in range(20))

    loops = [new_loop() for _ in range(2)]
    failed = []

    def run(loop):
        try:
            loop.run_until_complete(work())
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(loop,)) for loop in loops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


# ---------------------------------------------------------------- the end of the run


KEPT = pytest.mark.skip_on(uvloop="data written before the exception is sent only in the next run")


@pytest.mark.parametrize(
    "how", ["stop", *(pytest.param(how, marks=KEPT) for how in ("KeyboardInterrupt", "SystemExit", "Ctrl-C"))]
)
def test_a_later_step_ends_the_run(loop, how):
    """Data written before the step that ends the run is sent in this run. After an exception, later steps run in the
    next run.
    """
    transport, protocol, peer = loop.run_until_complete(unix_pair(loop))

    def end():
        if how == "stop":
            loop.stop()
        elif how == "Ctrl-C":
            signal.raise_signal(signal.SIGINT)
        else:
            raise KeyboardInterrupt if how == "KeyboardInterrupt" else SystemExit

    with peer:
        loop.call_soon(transport.write, b"1")
        loop.call_soon(end)
        loop.call_soon(transport.write, b"2")
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            loop.run_forever()
        assert arrived(peer) == (b"12" if how == "stop" else b"1")
        loop.call_soon(loop.stop)
        loop.run_forever()
        assert arrived(peer) == (b"" if how == "stop" else b"2")
        loop.run_until_complete(finish(transport, protocol))


def test_an_exception_of_a_later_step(loop, reported):
    transport, protocol, peer = loop.run_until_complete(unix_pair(loop))

    def fail():
        raise LookupError("no")

    with peer:
        loop.call_soon(transport.write, b"1")
        loop.call_soon(fail)
        loop.call_soon(transport.write, b"2")
        loop.call_soon(loop.stop)
        loop.run_forever()
        assert arrived(peer) == b"12"
        loop.run_until_complete(finish(transport, protocol))
    assert [type(error) for error in reported.exceptions] == [LookupError]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.skip_on(uvloop="parent and child both send the data written before the fork")
def test_a_later_step_forks(loop_kind):
    """The child sends none of the parent's data, although the loop goes on in the child."""
    out = run_script(
        loop_kind,
        """
        import asyncio, os, socket

        theirs, transports, children = [], [], []

        def fork():
            if not (pid := os.fork()):
                loop.call_soon(os._exit, 0)
            else:
                os.waitpid(pid, 0)
                children.append(pid)
                loop.stop()

        async def connect():
            ours, other = socket.socketpair()
            theirs.append(other)
            transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
            transports.append(transport)

        loop = new_event_loop()
        for _ in range(3):
            loop.run_until_complete(connect())
        for number, transport in enumerate(transports):
            loop.call_soon(transport.write, b"%d" % number)
        loop.call_soon(fork)
        loop.run_forever()
        print([other.recv(100) for other in theirs], len(children))
        for transport, other in zip(transports, theirs):
            transport.abort()
            other.close()
        loop.call_soon(loop.stop)
        loop.run_forever()
        loop.close()
        """,
        flags=("-W", "ignore"),
    )
    assert out.strip() == "[b'0', b'1', b'2'] 1"
