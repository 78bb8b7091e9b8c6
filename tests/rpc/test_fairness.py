"""One peer does not monopolize the loop: after a limited number of its items or packets, other callbacks run."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator

import pytest
from rpc.ends import FRAMED_HELLO, FRAMED_SERVER_HELLO, ends, framed_messages, raw_client
from support import HOST, coro_is_available, run_script, until

from grapeshot import rpc

MAX_CREDIT = 2**20
# In one iteration of the loop, a stream sends at most 128 items, and all streams of a connection together send at most
# 1,024. Handling received packets has a time limit, which is checked after about every 512 bytes. Some tests set this
# limit to 0. The first check then starts the clock, and the second check ends the turn, after about 1,024 bytes. A
# packet has more than 10 bytes, so a turn handles at most 102 packets.
MAX_ITEMS = 128
MAX_SHARED = 1024
MAX_PACKETS = 2 * 512 // 10


class Ticks:
    """Counts the iterations of the loop, and how often something happens in each one."""

    def __init__(self) -> None:
        self._tick = 0
        self.in_tick: collections.Counter[int] = collections.Counter()

    def note(self) -> None:
        self.in_tick[self._tick] += 1

    async def _count(self) -> None:
        while True:
            self._tick += 1
            await asyncio.sleep(0)

    @contextlib.asynccontextmanager
    async def counted(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._count())
        try:
            yield
        finally:
            task.cancel()


async def test_a_stream_that_never_waits_lets_others_run(loop):
    ticks = Ticks()
    async with ends() as both, raw_client(both.port) as raw, ticks.counted():

        @both.server.method
        async def quick():
            for number in range(5000):
                ticks.note()
                yield number

        raw.say_hello()
        raw.send_message(2, 1, "quick", [], {}, None, MAX_CREDIT)
        await raw.packet()
        assert [await raw.message() for _ in range(5001)] == [*([7, 1, number] for number in range(5000)), [8, 1]]
    assert max(ticks.in_tick.values()) <= MAX_ITEMS


async def test_many_streams_share_a_turn(loop):
    ticks = Ticks()
    count = 500
    async with ends() as both, raw_client(both.port) as raw, ticks.counted():

        @both.server.method
        async def quick():
            await both.methods.released.wait()
            for number in range(20):
                ticks.note()
                yield number

        raw.say_hello()
        for number in range(1, count + 1):
            raw.send_message(2, number, "quick", [], {}, None, MAX_CREDIT)
        await until(lambda: both.server.calls == count)
        both.methods.released.set()
        await raw.packet()
        messages = [await raw.message() for _ in range(21 * count)]
        assert {message[1] for message in messages if message[0] == 8} == set(range(1, count + 1))
    assert max(list(ticks.in_tick.values())[1:]) <= MAX_SHARED


async def test_a_stream_whose_client_has_gone_ends(loop, caplog):
    """The handler itself closes the client's socket, and never waits."""
    async with ends() as both:
        client = socket.create_connection((HOST, both.port))
        made = 0

        @both.server.method
        async def quick():
            nonlocal made
            try:
                for made in range(MAX_CREDIT - 1):
                    if made == 10:
                        client.close()
                    yield bytes(10)
            finally:
                both.methods.ended.append("quick")

        client.sendall(FRAMED_HELLO + framed_messages((2, 1, "quick", [], {}, None, MAX_CREDIT)))
        await until(lambda: both.methods.ended == ["quick"] and both.server.connections == 0)
        assert made < 10_000
    assert caplog.records == []


async def test_credit_that_adds_up_to_too_much_is_refused(loop):
    async with ends() as both, raw_client(both.port) as raw:
        raw.say_hello()
        raw.send_message(1, 1, "hold", [1])
        raw.send_message(2, 2, "numbers", [1], {}, None, MAX_CREDIT)
        # From Python 3.12 on, stream 2 has already sent its one item and ended, so this credit is ignored. Before 3.12,
        # stream 2 has not started and still has all its credit, so this message is the one that is refused.
        raw.send_message(4, 2, 1)
        raw.send_message(4, 1, MAX_CREDIT)  # allowed: call 1 is not a stream, so it had no credit before
        raw.send_message(4, 1, 1)
        await raw.packet()
        messages = [await raw.message()]
        while messages[-1][0] != 9:
            messages.append(await raw.message())
        assert "stream credit must be at most 1048576" in messages[-1][2]
        assert await raw.rest() == b""
        await until(lambda: both.methods.cancelled == [1])


async def test_packets_of_one_read_are_taken_in_turns(loop, monkeypatch):
    monkeypatch.setattr("grapeshot.rpc._packet_stream._TURN_S", 0.0)
    ticks = Ticks()
    async with ends() as both, raw_client(both.port) as raw, ticks.counted():
        both.server.add("note", ticks.note)
        raw.writer.write(FRAMED_HELLO + framed_messages(*((1, number, "note", []) for number in range(1, 5001))))
        await raw.packet()
        assert [await raw.message() for _ in range(5000)] == [[5, number, None] for number in range(1, 5001)]
    assert max(ticks.in_tick.values()) <= MAX_PACKETS


async def test_an_end_of_file_behind_many_packets_waits_for_them(loop, monkeypatch):
    monkeypatch.setattr("grapeshot.rpc._packet_stream._TURN_S", 0.0)
    async with ends() as both:
        called = []
        both.server.add("note", lambda: called.append(1))
        async with raw_client(both.port) as raw:
            raw.writer.write(FRAMED_HELLO + framed_messages(*((1, number, "note", []) for number in range(1, 5001))))
            raw.writer.write_eof()
            await raw.rest()
        await until(lambda: both.server.connections == 0)
        assert len(called) == 5000


async def test_answers_that_have_come_are_not_lost_with_the_connection(loop, monkeypatch):
    """When the connection ends, the client has handled only a few of the many answers that one read has delivered."""
    monkeypatch.setattr("grapeshot.rpc._packet_stream._TURN_S", 0.0)

    class Answering(asyncio.Protocol):
        def connection_made(self, transport):
            self.transport, self.received = transport, b""
            transport.write(FRAMED_SERVER_HELLO)

        def data_received(self, data):
            self.received += data
            if self.received.count(b"method") == 500:
                self.transport.write(framed_messages(*((5, number, number) for number in range(1, 501))))

    server = await loop.create_server(Answering, HOST, 0)
    client = rpc.Client(*server.sockets[0].getsockname())
    await client.connect()
    connection = client._connection
    answered = itertools.count(1)
    tasks = [asyncio.create_task(client.call("method")) for _ in range(500)]
    tasks[0].add_done_callback(lambda _task: (next(answered), connection._transport.abort()))
    assert await asyncio.gather(*tasks) == list(range(1, 501))
    assert next(answered) == 2
    await client.close()
    server.close()


@pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
def test_a_generator_in_a_coro_gives_the_loop_back_and_ends_with_its_client():
    """This runs in a separate program: a generator that kept the loop to itself would never end."""
    run_script(
        None,
        f"""
        import socket, sys
        sys.path.insert(0, "tests")
        from rpc.ends import FRAMED_HELLO, framed_messages
        from grapeshot import coro
        from grapeshot.coro import rpc

        others, most, ended = 0, 0, []

        def quick(closes):
            global others, most
            made = 0
            try:
                for number in range({MAX_CREDIT - 1}):
                    made, others = (made + 1, 0) if not others else (1, 0)
                    most = max(most, made)
                    if number == 10 and closes:
                        client.close()
                    if number == 5000 and not closes:
                        return
                    yield bytes(10)
            finally:
                ended.append(number)

        def other():
            global others
            while True:
                others += 1
                coro.yield_slice()

        def read_all():
            client.setblocking(False)
            while len(ended) < 2:
                try:
                    client.recv(65536)
                except BlockingIOError:
                    coro.yield_slice()

        def main():
            global client
            counting = coro.spawn(other)
            with rpc.Server() as server:
                server.add("quick", quick)
                server.listen("127.0.0.1", 0)
                for closes in (True, False):
                    client = socket.create_connection(server.addresses[0])
                    client.sendall(FRAMED_HELLO + framed_messages((2, 1, "quick", [closes], {{}}, None, {MAX_CREDIT})))
                    if not closes:
                        coro.spawn(read_all)
                    with coro.timeout(20):
                        while len(ended) < 2 - closes:
                            coro.yield_slice()
                    client.close()
            counting.shutdown()

        coro.run(main)
        assert ended[0] < 10_000 and ended[1] == 5000, ended
        assert most <= {MAX_ITEMS}, most
        """,
    )
