"""`loop.statistics()`: each number is compared with what has really happened."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import socket
import threading
import time

import pytest
from project.markdown import ROOT
from support import CAP_S, HOST, coro_is_available, raw_pair, run_script, until, wait_until

import grapeshot

needs_coros = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")


@pytest.fixture
def loop():
    loop = grapeshot.new_event_loop()
    yield loop
    loop.close()


def names():
    return [field.name for field in dataclasses.fields(grapeshot.insight.Statistics)]


class Counted:
    """`counted.writes`, for example, tells how much `loop.statistics().writes` has grown since `counted` was made."""

    def __init__(self, loop):
        self.loop = loop
        self.before = loop.statistics()

    def __getattr__(self, name):
        return getattr(self.loop.statistics(), name) - getattr(self.before, name)


class Writer(asyncio.Protocol):
    """Calls `reply(transport, data)` for all data that arrives."""

    def __init__(self, reply):
        self.reply = reply
        self.is_lost = False

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.reply(self.transport, data)

    def connection_lost(self, exc):
        self.is_lost = True


async def talk(loop, reply, requests):
    """Return what the loop counts while a client thread sends requests one by one. `reply` answers with 4 bytes."""
    made = []

    def make():
        made.append(Writer(reply))
        return made[-1]

    server = await loop.create_server(make, HOST, 0)
    address = server.sockets[0].getsockname()
    counted = Counted(loop)

    def client():
        with socket.create_connection(address) as own:
            for _ in range(requests):
                own.sendall(b"ping")
                own.recv(4, socket.MSG_WAITALL)

    thread = threading.Thread(target=client)
    thread.start()
    await until(lambda: made and made[0].is_lost)
    thread.join()
    server.close()
    return counted


async def test_writes_and_events_of_an_echo(loop):
    counted = await talk(loop, lambda transport, data: transport.write(data), 50)
    assert counted.writes == counted.corked_writes == 50
    assert counted.bytes_written == 200
    assert counted.connections_accepted == 1
    assert counted.events == 50 + 2  # one event for the new connection, and one for its end
    assert counted.accept_errors == counted.wakeups == counted.threadsafe_calls == 0


async def test_writes_that_leave_together(loop):
    def reply(transport, data):
        for index in range(4):
            transport.write(data[index : index + 1])

    counted = await talk(loop, reply, 10)
    assert (counted.writes, counted.corked_writes, counted.bytes_written) == (10, 40, 40)


async def test_writes_of_a_task(loop):
    ours, theirs = raw_pair()
    with theirs:
        transport, _ = await loop.connect_accepted_socket(asyncio.Protocol, ours)
        counted = Counted(loop)
        transport.write(b"one")
        transport.write(b"two")
        transport.writelines([b"th", b"ree"])
        assert (counted.writes, counted.corked_writes) == (0, 3)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (counted.writes, counted.corked_writes, counted.bytes_written) == (1, 3, 11)
        transport.write(bytes(20_000))  # a write of this size is not delayed
        assert (counted.writes, counted.corked_writes, counted.bytes_written) == (2, 3, 20_011)
        transport.close()


async def test_bytes_that_the_kernel_refuses_are_not_counted(loop):
    ours, theirs = raw_pair(small=True)
    with theirs:
        transport, _ = await loop.connect_accepted_socket(asyncio.Protocol, ours)
        counted = Counted(loop)
        transport.write(bytes(4_000_000))
        assert counted.bytes_written == 4_000_000 - transport.get_write_buffer_size() < 4_000_000
        transport.abort()
        await asyncio.sleep(0)


async def test_datagrams_pipes_and_plain_sockets(loop):
    counted = Counted(loop)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        peer.bind((HOST, 0))
        transport, _ = await loop.create_datagram_endpoint(asyncio.DatagramProtocol, (HOST, 0))
        for _ in range(3):
            transport.sendto(b"12345", peer.getsockname())
        assert (counted.writes, counted.bytes_written) == (3, 15)
        transport.close()
        await asyncio.sleep(0)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plain:
            plain.setblocking(False)
            await loop.sock_sendto(plain, b"678", peer.getsockname())
    assert (counted.writes, counted.bytes_written) == (4, 18)
    read_end, write_end = os.pipe()
    with open(read_end, "rb"):
        transport, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, open(write_end, "wb"))
        transport.write(b"12")
        transport.writelines([b"3", b"4"])
        assert (counted.writes, counted.bytes_written) == (6, 22)
        transport.close()
        await asyncio.sleep(0)
    ours, theirs = raw_pair()
    with ours, theirs:
        ours.setblocking(False)
        await loop.sock_sendall(ours, b"abc")
    assert (counted.writes, counted.bytes_written) == (7, 25)


async def test_accepted_by_sock_accept(loop):
    counted = Counted(loop)
    with socket.create_server((HOST, 0)) as listener:
        listener.setblocking(False)
        with socket.create_connection(listener.getsockname()):
            accepted, _ = await loop.sock_accept(listener)
            accepted.close()
    assert (counted.connections_accepted, counted.accept_errors) == (1, 0)


EMFILE = """
    import asyncio, os, resource, socket
    loop = new_event_loop()
    reports = []
    loop.set_exception_handler(lambda loop, context: reports.append(context["message"]))
    loop.statistics()  # the first call imports what it needs

    async def main():
        server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
        client = socket.socket()
        client.setblocking(False)
        highest = max(int(fd) for fd in os.listdir("/dev/fd"))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
        hog = []
        while True:
            try:
                hog.append(os.dup(0))
            except OSError:
                break
        client.connect_ex(server.sockets[0].getsockname())
        while not reports:
            await asyncio.sleep(0.001)
        found = loop.statistics()
        print(found.accept_errors == len(reports), found.connections_accepted)
        for fd in hog:
            os.close(fd)
        while not loop.statistics().connections_accepted:
            await asyncio.sleep(0.001)
        print(loop.statistics().accept_errors == len(reports), loop.statistics().connections_accepted)
        client.close()
        server.close()
        await asyncio.sleep(0.01)

    loop.run_until_complete(main())
    loop.close()
"""


def test_accept_errors():
    assert run_script("grapeshot", EMFILE).split("\n")[:2] == ["True 0", "True 1"]


def test_callbacks_and_iterations(loop):
    assert loop.statistics().iterations == 0
    for _ in range(10):
        loop.call_soon(int)
    loop.call_soon(loop.stop)
    assert loop.statistics().ready == 11
    loop.run_forever()
    found = loop.statistics()
    assert (found.iterations, found.callbacks, found.most_ready, found.ready) == (1, 11, 11, 0)
    loop.call_soon(loop.stop)
    loop.run_forever()
    found = loop.statistics()
    assert (found.iterations, found.callbacks, found.most_ready) == (2, 12, 11)


async def test_timers(loop):
    counted = Counted(loop)
    ran = []
    for delay in (0.001, 0.002, 3600):
        timer = loop.call_later(delay, ran.append, delay)
    loop.call_at(loop.time(), ran.append, 0)
    assert counted.timers == counted.timers_set == 4
    timer.cancel()
    assert counted.timers == 3
    await until(lambda: len(ran) == 3)
    assert counted.timers_run >= 3  # `until` sets timers, too
    assert loop.statistics().timers == 0
    assert counted.timers_set == counted.timers_run + 1


def test_wakeups_by_other_threads(loop):
    """The loop blocks repeatedly. Each time, another thread waits until `polling_s` has grown, and wakes the loop."""
    rounds, woken = 5, threading.Semaphore(1)

    def other():
        for index in range(rounds):
            assert woken.acquire(timeout=CAP_S)  # the last poll has ended, so only the next one makes `polling_s` grow
            blocked_s = loop.statistics().polling_s
            wait_until(lambda: loop.statistics().polling_s > blocked_s + 0.001)
            loop.call_soon_threadsafe(woken.release if index < rounds - 1 else loop.stop)

    thread = threading.Thread(target=other)
    loop.call_soon(thread.start)
    loop.run_forever()
    thread.join()
    found = loop.statistics()
    assert (found.wakeups, found.threadsafe_calls) == (rounds, rounds)
    assert found.callbacks == rounds + 1
    loop.call_soon_threadsafe(loop.stop)  # the loop is not asleep, so nothing has to wake it
    loop.run_forever()
    assert (loop.statistics().wakeups, loop.statistics().threadsafe_calls) == (rounds, rounds + 1)


def test_times(loop):
    def compute():
        end = time.monotonic() + 0.03
        while time.monotonic() < end:
            pass

    async def main():
        await asyncio.sleep(0.06)
        compute()

    started = time.monotonic()
    loop.run_until_complete(main())
    took_s = time.monotonic() - started
    time.sleep(0.01)  # the loop does not run, so neither number grows
    found = loop.statistics()
    assert found.running_s >= 0.03 * 0.98
    assert found.polling_s >= 0.06 * 0.98
    assert found.running_s + found.polling_s <= took_s * 1.02


def test_another_thread_reads_while_the_loop_runs(loop):
    gauges = grapeshot.insight.Statistics.GAUGES - {"most_ready"}  # a maximum never goes down
    seen = []
    is_over = threading.Event()

    def other():
        while not is_over.is_set():
            seen.append(loop.statistics())

    async def main():
        thread = threading.Thread(target=other)
        thread.start()
        for _ in range(50):
            await asyncio.sleep(0.001)
        await until(lambda: len(seen) > 2 and seen[0].iterations < seen[-1].iterations, "the other thread to look")
        is_over.set()
        await until(lambda: not thread.is_alive())

    loop.run_until_complete(main())
    assert len(seen) > 2
    for name in set(names()) - grapeshot.insight.Statistics.HISTOGRAMS:
        values = [getattr(each, name) for each in seen]
        assert min(values) >= 0
        if name not in gauges:
            assert values == sorted(values), name
    assert seen[0].iterations < seen[-1].iterations


async def test_a_callback_sees_the_iterations_before_it(loop):
    before = loop.statistics().iterations
    await asyncio.sleep(0)
    assert loop.statistics().iterations == before + 1


def test_a_closed_loop_has_its_last_numbers(loop):
    loop.run_until_complete(asyncio.sleep(0.001))
    before = loop.statistics()
    loop.close()
    after = loop.statistics()
    assert after == dataclasses.replace(before, **{name: getattr(after, name) for name in ("running_s", "polling_s")})
    assert after.running_s >= before.running_s > 0
    assert after.callbacks > 0


async def test_statistics_are_immutable(loop):
    found = loop.statistics()
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.writes = 0
    assert dataclasses.asdict(found).keys() == set(names())


def test_the_page_names_every_number():
    page = (ROOT / "docs" / "insight.md").read_text(encoding="utf-8")
    section = page.split("\n## What the loop counts\n")[1].split("\n## ")[0]
    assert set(re.findall(r"`([a-z_]+)`", section)) >= set(names())


@needs_coros
async def test_coros(loop):
    from grapeshot import coro

    counted = Counted(loop)
    before = coro.stack_info()

    def yields():
        for _ in range(5):
            coro.yield_slice()

    # There are more coros than stack slots, so the coros evict each other.
    coros = [coro.spawn(yields) for _ in range(40)] + [coro.spawn(yields, stack="own") for _ in range(2)]
    assert (counted.coros, counted.pinned_coros, counted.coros_started) == (42, 2, 42)
    await until(lambda: all(co.done() for co in coros))
    after = coro.stack_info()
    assert (loop.statistics().coros, loop.statistics().pinned_coros) == (0, 0)
    assert counted.coro_switches == after["switches"] - before["switches"] == 42 * 6
    assert counted.coro_evictions == after["evictions"] - before["evictions"] > 0
    assert counted.coro_bytes_copied == after["bytes_copied"] - before["bytes_copied"] > 0


@needs_coros
async def test_a_coro_that_goes_on_at_once(loop):
    from grapeshot import coro

    counted = Counted(loop)
    co = coro.spawn(lambda: [coro.yield_slice() for _ in range(10)])
    await until(co.done)
    assert counted.coro_switches == 11


@needs_coros
async def test_sockets_of_coros(loop):
    from grapeshot import coro

    counted = Counted(loop)

    def client(address):
        with coro.tcp_sock() as own:
            own.connect(address)
            own.sendall(b"12345")
            own.send(b"678")

    def server():
        with coro.tcp_sock() as listener:
            listener.bind((HOST, 0))
            listener.listen()
            other = coro.spawn(client, listener.getsockname())
            connection, _ = listener.accept()
            with connection:
                assert connection.recv_exact(8) == b"12345678"
            other.join()

    co = coro.spawn(server)
    await until(co.done)
    co.join()
    assert (counted.writes, counted.bytes_written) == (2, 8)
    assert (counted.connections_accepted, counted.accept_errors) == (1, 0)


@needs_coros
def test_coros_that_end_with_their_loop(loop):
    from grapeshot import coro

    async def main():
        coro.spawn(coro.sleep_relative, 3600)
        await asyncio.sleep(0.001)
        assert loop.statistics().coros == 1

    loop.run_until_complete(main())
    loop.close()
    assert loop.statistics().coros == 0
