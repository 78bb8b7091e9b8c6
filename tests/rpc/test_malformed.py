"""A peer that sends malformed bytes loses its connection. Other connections continue.

If the hellos were valid, the server names the reason before it closes the connection.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import struct
from collections.abc import Iterator

import msgspec
import pytest
from rpc.ends import FRAMED_SERVER_HELLO, HELLO, ends, raw_client
from support import HOST, until

from grapeshot import rpc

pytestmark = pytest.mark.only_on("asyncio", "grapeshot")  # most files of tests/rpc also run on uvloop
encode = msgspec.msgpack.encode

NOT_DECODABLE = {
    "nothing": b"",
    "not msgpack": b"\xc1",
    "a part of a string": b"\x94\x01\x01\xa4bl",
    "bytes behind the message": encode((3, 1)) + b"\0",
    "a number": encode(7),
    "an empty list": encode([]),
    "a map": encode({"a": 1, "b": 2}),
    "a text": encode("ab"),
    "nested too deep": b"\x91" * 100_000,
    "many lists as keys": encode((1, 1, "add", [{(number,): 1 for number in range(1501)}])),
    "a dict as a key": b"\x94\x01\x01\xa3add\x92" + encode(bytes(1024)) + b"\x81\x80\x01",
    "a list longer than memory": b"\xdd\xff\xff\xff\xff",
    "an unknown kind": encode((99, 1)),
    "a kind that only servers send": encode((5, 1, "value")),
    "a kind that is a string": encode(("1", 1, "add", [])),
}
NO_REQUEST = {
    "too short": (1, 1),
    "too long": (1, 1, "add", [1], {}, None, 7, 8),
    "a call number of the wrong type": (1, "1", "add", [1]),
    "number 0": (1, 0, "add", [1]),
    "a method name of the wrong type": (1, 1, ["add"], [1]),
    "arguments that are not a list": (1, 1, "add", 1),
    "keywords that are not a map": (1, 1, "add", [1], [], None),
    "a deadline of the wrong type": (1, 1, "add", [1], {}, "soon"),
    "a deadline in the past": (1, 1, "add", [1], {}, -1.0),
    "a deadline that is not a number": (1, 1, "add", [1], {}, float("nan")),
    "an endless deadline": (1, 1, "add", [1], {}, float("inf")),
    "no credit": (2, 1, "numbers", [1], {}, None, 0),
    "too much credit": (2, 1, "numbers", [1], {}, None, 2**20 + 1),
    "credit of the wrong type": (2, 1, "numbers", [1], {}, None, "1"),
    "a stream without fields": (2, 1),
    "a cancellation whose number is a list": (3, [1]),
    "credit without a count": (4, 1),
    "negative credit": (4, 1, -5),
    "too much additional credit": (4, 1, 2**20 + 1),
}


async def test_errors_fit_into_the_smallest_packet(loop):
    async with ends() as both, raw_client(both.port) as raw:
        raw.say_hello(max_packet=512)
        raw.send_message(1, 1, "fail", ["\U0001f600" * 1000])
        raw.send_message(1, 2, "nothing" * 1000, [])
        raw.send_message(1, 3, "blob", [600])
        await raw.packet()
        assert sorted([(await raw.message())[:3] for _ in range(3)]) == [[6, 1, 0], [6, 2, 1], [6, 3, 3]]
        raw.send_message("\U0001f600" * 1000, 4)
        await refused(raw, both)


async def refused(raw, both) -> None:
    """Check that the server gives the reason, closes this connection, and still serves another client."""
    kind, _, reason = await raw.message()
    assert kind == 9
    assert reason
    assert await raw.rest() == b""
    assert await both.client().call("add", 1) == 2


@pytest.mark.parametrize("packet", NOT_DECODABLE.values(), ids=NOT_DECODABLE)
async def test_a_packet_that_is_not_a_message(loop, packet):
    async with ends() as both, raw_client(both.port) as raw:
        raw.say_hello()
        raw.send(packet)
        await raw.packet()
        await refused(raw, both)


def slots_of(key: int, size: int) -> Iterator[int]:
    """Yield the slots where a dict of `size` slots looks for the integer `key`, until the key's bits are used up."""
    slot = key % size
    yield slot
    while key:
        key >>= 5
        slot = (slot * 5 + key + 1) % size
        yield slot


async def test_integer_keys_that_make_a_dict_slow_are_refused(loop):
    # When the bits of a key are used up, a dict probes all slots in a fixed cycle. The first keys take 60 % of the
    # slots: one unbroken part of this cycle. For each of the other 900 keys, the dict first finds only taken slots, and
    # then has to follow the cycle to the first free slot.
    size, last = 2**14, 1
    taken = {last: None}
    while len(taken) < size * 6 // 10:
        last = (last * 5 + 1) % size
        taken[last] = None
    bad = (key for key in itertools.count(2**24) if all(slot in taken for slot in slots_of(key, size)))
    keys = [*taken, *itertools.islice(bad, 900)]
    async with ends() as both, raw_client(both.port) as raw:
        raw.say_hello()
        raw.send_message(1, 1, "add", [dict.fromkeys(keys)])
        await raw.packet()
        await refused(raw, both)


@pytest.mark.parametrize("factor", [1, -1, 2**20, 2**40, 0x9E3779B97F4A7C15 >> 20])
async def test_other_integers_are_accepted_as_keys(loop, factor):
    keys = {number * factor: None for number in range(20_000)}
    async with ends() as both:
        assert await both.client().call("later", keys) == keys


@pytest.mark.parametrize("message", NO_REQUEST.values(), ids=NO_REQUEST)
async def test_a_message_that_is_not_a_request(loop, message):
    async with ends() as both, raw_client(both.port) as raw:
        raw.say_hello()
        raw.send_message(*message)
        await raw.packet()
        await refused(raw, both)


async def test_a_call_number_that_was_used_before_is_refused(loop):
    async with ends() as both, raw_client(both.port) as raw:
        raw.say_hello()
        raw.send_message(1, 5, "add", [1])
        raw.send_message(1, 5, "add", [1])
        await raw.packet()
        assert await raw.message() == [5, 5, 2]
        await refused(raw, both)


async def test_keywords_that_are_not_names(loop):
    async with ends() as both, raw_client(both.port) as raw:
        raw.say_hello()
        raw.send_message(1, 1, "add", [1], {"b": 5}, None)
        raw.send_message(1, 2, "add", [1], {5: 5}, None)
        await raw.packet()
        assert await raw.message() == [5, 1, 6]
        assert (await raw.message())[:3] == [6, 2, 2]


async def test_cancelling_and_crediting_an_ended_call_does_nothing(loop):
    async with ends() as both, raw_client(both.port) as raw:
        raw.say_hello()
        raw.send_message(1, 1, "add", [1])
        raw.send_message(3, 1)
        raw.send_message(4, 1, 5)
        raw.send_message(3, 77)
        raw.send_message(1, 2, "add", [2])
        await raw.packet()
        assert [await raw.message() for _ in range(2)] == [[5, 1, 2], [5, 2, 3]]


@pytest.mark.parametrize("length", [1_000_001, 2**31, 2**32 - 1])
async def test_a_packet_that_is_too_long_is_refused_before_it_comes(loop, length):
    async with ends(max_packet=1_000_000) as both, raw_client(both.port) as raw:
        raw.say_hello()
        raw.send(b"begin", length)
        await raw.packet()
        await refused(raw, both)


HELLOS = {
    "http": b"GET / HTTP/1.1\r\n",
    "no hello": encode((1, 1, "add", [1])),
    "a list": b"[]",
    "deep": b"[" * 100_000,
    "another version": json.dumps({**HELLO, "grapeshot.rpc": 1}).encode(),
    "another codec": json.dumps({**HELLO, "codec": "pickle"}).encode(),
    "a limit that is a string": json.dumps({**HELLO, "max_packet": "1"}).encode(),
    "too small a limit": json.dumps({**HELLO, "max_packet": 511}).encode(),
    "no limits": json.dumps({"grapeshot.rpc": 2, "codec": "msgpack"}).encode(),
}


@pytest.mark.parametrize("hello", HELLOS.values(), ids=HELLOS)
async def test_a_wrong_hello(loop, hello):
    async with ends() as both, raw_client(both.port) as raw:
        raw.send(hello)
        raw.send_message(1, 1, "add", [1])
        await raw.packet()
        assert await raw.rest() == b""
        assert await both.client().call("add", 1) == 2


LONG = "a" * 100_000
DEEP: list = []
for _ in range(900):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "message",
    [
        (LONG, 1),
        (DEEP, 1),
        (1, LONG, "add", []),
        (1, DEEP, "add", []),
        (3, DEEP),
        (1, 1, "add", [], {}, LONG),
        (4, 1, LONG),
    ],
    ids=["kind", "deep kind", "number", "deep number", "deep cancel", "deadline", "credit"],
)
async def test_the_log_quotes_the_error_and_cuts_it(loop, caplog, message):
    async with ends() as both, raw_client(both.port) as raw:
        raw.say_hello()
        raw.send_message(*message)
        await raw.packet()
        await refused(raw, both)
    [record] = caplog.records
    text = record.getMessage()
    assert text.startswith("a client has violated the protocol")
    assert len(text) < 400
    assert record.exc_info is None


@pytest.mark.parametrize(
    "change",
    [
        {"codec": "c\n" * 1000},
        {"grapeshot.rpc": "v\n" * 1000},
        {"grapeshot.rpc": [[["deep"] * 100] * 10]},
        {"max_packet": "m\n" * 1000},
        {"max_calls": [LONG[:1000]] * 3},
        {"max_call_bytes": None},
        {"max_packet": 10**3000},
        {"max_calls": -(10**3000), "max_packet": 1},
    ],
)
async def test_a_wrong_hello_is_quoted_and_cut(loop, caplog, change):
    async with ends() as both, raw_client(both.port) as raw:
        raw.say_hello(**change)
        await raw.packet()
        if change == {"max_packet": 10**3000}:  # larger than any packet, but harmless
            raw.send_message(1, 1, "add", [1])
            assert await raw.message() == [5, 1, 2]
            return
        assert await raw.rest() == b""
        await until(lambda: caplog.records)
    [record] = caplog.records
    assert len(record.getMessage()) < 400
    assert "\n" not in record.getMessage()


@pytest.mark.parametrize("length", [4097, 1 << 20, 2**32 - 1])
async def test_a_long_hello_is_refused_before_it_comes(loop, caplog, length):
    async with ends() as both, raw_client(both.port) as raw:
        raw.send(b"{", length)
        await raw.packet()
        assert await raw.rest() == b""
        assert await both.client().call("add", 1) == 2
    [record] = caplog.records
    assert f"a packet has {length} bytes, but max_packet is 4096" in record.getMessage()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
async def test_packets_in_pieces(loop, size):
    async with ends() as both, raw_client(both.port) as raw:
        raw.say_hello()
        await raw.packet()
        data = b""
        for number in (1, 2, 3):
            request = encode((1, number, "add", ["x" * 200, "y"]))
            data += struct.pack(">I", len(request)) + request
        for start in range(0, len(data), size):
            raw.writer.write(data[start : start + size])
            await asyncio.sleep(0)
        assert [await raw.message() for _ in range(3)] == [[5, number, "x" * 200 + "y"] for number in (1, 2, 3)]


async def test_a_connection_that_ends_within_a_packet(loop):
    async with ends() as both:
        async with raw_client(both.port) as raw:
            raw.say_hello()
            raw.send_message(1, 1, "hold", [1])
            raw.send(b"the rest never comes", 1000)
            await until(lambda: both.methods.begun)
        await until(lambda: both.server.connections == 0 and both.methods.cancelled == [1])


# ---------------------------------------------------------------- servers that send wrong answers


ANSWERS = {
    "not msgpack": b"\xc1",
    "an unknown number": encode((5, 99, None)),
    "an unknown kind": encode((77, 1, None)),
    "an item for a call that is not a stream": encode((7, 1, None)),
    "an end of stream for a call that is not a stream": encode((8, 1)),
    "an error without fields": encode((6, 1)),
    "an error with an unknown code": encode((6, 1, 99, "a", "b", None)),
    "a result without a value": encode((5, 1)),
    "a call number that is a list": encode((5, [], 1)),
    "a goodbye without fields": encode((9, 1)),
    "a goodbye with a list": encode((9, 1, ["reason"])),
    "an error whose name is a number": encode((6, 1, 0, 5, "b", None)),
    "an error whose text is a map": encode((6, 1, 4, "a", {}, None)),
    "an error whose traceback is a number": encode((6, 1, 0, "a", "b", 5)),
    "a deep kind": b"\x92" + b"\x91" * 900 + b"\x01\x01",
    "a long number": encode((5, "n" * 900, 1)),
}


TOO_MANY_ITEMS = encode((7, 1, "item"))


@pytest.mark.parametrize("answer", [*ANSWERS.values(), TOO_MANY_ITEMS], ids=[*ANSWERS, "more items than the window"])
async def test_a_wrong_answer_ends_the_call(loop, answer):
    class Wrong(asyncio.Protocol):
        def connection_made(self, transport):
            self.transport = transport
            transport.write(FRAMED_SERVER_HELLO)

        def data_received(self, data):
            if b"add" in data:
                data = struct.pack(">I", len(answer)) + answer
                self.transport.write(data * 17)  # one more than the window allows

    server = await loop.create_server(Wrong, HOST, 0)
    client = rpc.Client(*server.sockets[0].getsockname())
    with pytest.raises(rpc.ConnectionLost) as caught:
        if answer == TOO_MANY_ITEMS:
            async for _ in client.stream("add", timeout=5):
                pass
        await client.call("add", 1, timeout=5)
    assert caught.value.sent
    assert isinstance(caught.value.__cause__, rpc.ProtocolError)
    assert len(str(caught.value)) < 500
    await client.close()
    server.close()


async def test_a_peer_that_speaks_another_protocol(loop):
    class Http(asyncio.Protocol):
        def connection_made(self, transport):
            connected.add(self)
            transport.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        def connection_lost(self, _reason):
            connected.discard(self)

    connected = set()
    server = await loop.create_server(Http, HOST, 0)
    client = rpc.Client(*server.sockets[0].getsockname())
    with pytest.raises(rpc.ConnectionLost) as caught:
        await client.call("add", 1)
    assert not caught.value.sent
    assert isinstance(caught.value.__cause__, rpc.ProtocolError)
    await client.close()
    await until(lambda: not connected, "the end of the connections")
    server.close()
