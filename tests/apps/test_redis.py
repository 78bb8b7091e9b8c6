"""redis-py's asyncio client with a real Redis server: over TCP, TLS and a unix socket."""

from __future__ import annotations

import asyncio
import itertools
import random
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import redis.asyncio
import redis.exceptions
from support import CAP_S

import grapeshot
from tests.apps.certificates import Certificates
from tests.apps.daemons import HOST, RedisAddress

Run = Callable[[Coroutine[Any, Any, Any]], Any]
Connect = Callable[..., Any]
BLOB = random.Random(7).randbytes(8 * 1024 * 1024)
_prefixes = itertools.count()
# How many tasks make requests at the same time. Each needs a connection, and for each TLS connection redis-py loads the
# system's certificates, which is slow.
REQUESTS = 40


@pytest.fixture
def prefix() -> str:
    """A prefix for the keys of one test."""
    return f"test{next(_prefixes)}:"


# For each name: the kind of loop, and whether grapeshot's functions replace the asyncio functions with which redis-py
# connects. grapeshot's functions give native streams.
LOOPS = {"asyncio": ("asyncio", False), "grapeshot": ("grapeshot", False), "native streams": ("grapeshot", True)}


@pytest.fixture(params=list(LOOPS))
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    loop, has_native_streams = LOOPS[request.param]
    if has_native_streams:
        grapeshot.install(streams=True)
        assert asyncio.open_connection is grapeshot.streams.open_connection
    yield loop
    grapeshot.uninstall()


@pytest.fixture(params=["tcp", "tls", "unix"])
def connect(request: pytest.FixtureRequest, redis_server: RedisAddress, certificates: Certificates) -> Connect:
    """`async with connect(**options) as client` connects to the server in one of the possible ways."""
    ways: dict[str, dict[str, Any]] = {
        "tcp": {"host": HOST, "port": redis_server.port},
        "unix": {"unix_socket_path": redis_server.path},
        "tls": {
            "host": "localhost",
            "port": redis_server.tls_port,
            "ssl": True,
            "ssl_ca_certs": str(certificates.authority_file),
        },
    }
    if request.param == "tls" and redis_server.tls_port is None:
        pytest.skip("this redis-server was built without TLS")

    @asynccontextmanager
    async def make(**options: Any) -> AsyncIterator[redis.asyncio.Redis]:
        async with redis.asyncio.Redis(**ways[request.param], **options) as client:
            yield client

    return make


async def wait_blocked(client: redis.asyncio.Redis, name: str, wanted: bool = True) -> None:
    """Wait until the server holds a blocking call of the named client or, if `wanted` is false, holds none."""
    give_up_s = asyncio.get_running_loop().time() + CAP_S
    while any(entry["name"] == name and "b" in entry["flags"] for entry in await client.client_list()) != wanted:
        assert asyncio.get_running_loop().time() < give_up_s


def test_strings_hashes_and_sets(run: Run, connect: Connect, prefix: str) -> None:
    async def main() -> None:
        async with connect(decode_responses=True) as client:
            assert await client.ping()
            key = prefix + "key"
            assert await client.set(key, "value", ex=100)
            assert await client.get(key) == "value"
            assert 0 < await client.ttl(key) <= 100
            assert await client.incrby(prefix + "count", 41) == 41
            assert await client.incr(prefix + "count") == 42
            await client.hset(prefix + "hash", mapping={"a": 1, "b": 2})
            assert await client.hgetall(prefix + "hash") == {"a": "1", "b": "2"}
            await client.sadd(prefix + "set", *range(100))
            assert {int(member) async for member in client.sscan_iter(prefix + "set")} == set(range(100))
            assert await client.get(prefix + "nothing") is None
            with pytest.raises(redis.exceptions.ResponseError, match="WRONGTYPE"):
                await client.incr(prefix + "hash")

    run(main())


def test_large_values(run: Run, connect: Connect, prefix: str) -> None:
    async def main() -> None:
        async with connect() as client:
            for length in (0, 1, 1023, 65536, len(BLOB)):
                await client.set(prefix + "blob", BLOB[:length])
                assert await client.get(prefix + "blob") == BLOB[:length]
            await client.delete(prefix + "blob")

    run(main())


def test_pipelines_and_transactions(run: Run, connect: Connect, prefix: str) -> None:
    async def main() -> None:
        async with connect() as client:
            async with client.pipeline(transaction=False) as pipeline:
                for number in range(1000):
                    pipeline.rpush(prefix + "list", number)
                assert await pipeline.execute() == list(range(1, 1001))
            assert await client.lrange(prefix + "list", 0, -1) == [b"%d" % number for number in range(1000)]

            counter, lost_races = prefix + "counter", 0

            async def increment() -> None:
                nonlocal lost_races
                async with client.pipeline() as pipeline:
                    while True:
                        try:
                            await pipeline.watch(counter)
                            value = int(await pipeline.get(counter) or 0)
                            pipeline.multi()
                            pipeline.set(counter, value + 1)
                            await pipeline.execute()
                            return
                        except redis.exceptions.WatchError:
                            lost_races += 1

            await asyncio.gather(*(increment() for _ in range(10)))
            assert int(await client.get(counter)) == 10

    run(main())


def test_many_requests_in_flight_over_a_pool(run: Run, connect: Connect, prefix: str) -> None:
    async def main() -> None:
        async with connect(max_connections=REQUESTS) as client:

            async def exchange(number: int) -> None:
                key = f"{prefix}{number}"
                for round_number in range(5):
                    await client.set(key, f"{number}-{round_number}")
                    assert await client.get(key) == f"{number}-{round_number}".encode()

            await asyncio.gather(*map(exchange, range(REQUESTS)))

    run(main())


def test_publish_and_subscribe(run: Run, connect: Connect, prefix: str) -> None:
    async def main() -> None:
        async with connect(decode_responses=True) as client, AsyncExitStack() as stack:
            subscribers = [await stack.enter_async_context(client.pubsub()) for _ in range(10)]
            for number, subscriber in enumerate(subscribers):
                await (subscriber.psubscribe(prefix + "*") if number % 2 else subscriber.subscribe(prefix + "news"))
                assert (await subscriber.get_message(timeout=CAP_S))["type"].endswith("subscribe")

            async def collect(subscriber: Any) -> list[str]:
                messages = []
                async for message in subscriber.listen():
                    messages.append(message["data"])
                    if message["data"] == "end":
                        return messages
                raise AssertionError("the subscription ended by itself")

            collecting = [asyncio.ensure_future(collect(subscriber)) for subscriber in subscribers]
            news = [*(f"news {number}" for number in range(50)), "end"]
            for text in news:
                assert await client.publish(prefix + "news", text) == len(subscribers)
            assert await asyncio.gather(*collecting) == [news] * len(subscribers)

    run(main())


def test_a_blocking_pop_waits_is_cancelled_and_times_out(run: Run, connect: Connect, prefix: str) -> None:
    async def main() -> None:
        async with connect() as client, connect(client_name=prefix) as waiter:
            queue = prefix + "queue"
            popping = asyncio.ensure_future(waiter.blpop([queue], timeout=0))
            await wait_blocked(client, prefix)
            await client.rpush(queue, "first")
            assert tuple(await popping) == (queue.encode(), b"first")

            popping = asyncio.ensure_future(waiter.blpop([queue], timeout=0))
            await wait_blocked(client, prefix)
            popping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await popping
            await wait_blocked(client, prefix, False)  # the client closes the connection, which is unusable now
            await client.rpush(queue, "second")
            assert tuple(await waiter.blpop([queue], timeout=CAP_S)) == (queue.encode(), b"second")
            assert await waiter.blpop([queue], timeout=0.01) is None

    run(main())


def test_a_lost_connection_is_reported_and_replaced(run: Run, connect: Connect, prefix: str) -> None:
    async def main() -> None:
        async with connect() as client, connect(client_name=prefix, retry=None) as victim:
            for _ in range(5):
                await victim.set(prefix + "key", "value")
                [identity] = [entry["id"] for entry in await client.client_list() if entry["name"] == prefix]
                blocked = asyncio.ensure_future(victim.blpop([prefix + "never"], timeout=0))
                await wait_blocked(client, prefix)
                assert await client.client_kill_filter(_id=identity)
                with pytest.raises(redis.exceptions.ConnectionError):
                    await blocked
                assert await victim.get(prefix + "key") == b"value"

    run(main())


def test_a_script_and_a_stream(run: Run, connect: Connect, prefix: str) -> None:
    async def main() -> None:
        async with connect(decode_responses=True) as client:
            script = client.register_script("return {KEYS[1], ARGV[1], redis.call('incr', KEYS[1])}")
            assert await script(keys=[prefix + "n"], args=["x"]) == [prefix + "n", "x", 1]

            stream, seen = prefix + "stream", []

            async def read() -> None:
                last = "0"
                while len(seen) < 100:
                    reply = await client.xread({stream: last}, count=7, block=int(CAP_S * 1000))
                    [[_, entries]] = reply.items() if isinstance(reply, dict) else reply
                    entries = entries[0] if entries and isinstance(entries[0], list) else entries
                    seen.extend(fields["n"] for _, fields in entries)
                    last = entries[-1][0]

            reading = asyncio.ensure_future(read())
            for number in range(100):
                await client.xadd(stream, {"n": number})
            await reading
            assert seen == [str(number) for number in range(100)]

    run(main())


def test_an_unknown_authority_is_refused(run: Run, redis_server: RedisAddress) -> None:
    if redis_server.tls_port is None:
        pytest.skip("this redis-server was built without TLS")

    async def main() -> None:
        client = redis.asyncio.Redis(host="localhost", port=redis_server.tls_port, ssl=True, retry=None)
        async with client:
            with pytest.raises(redis.exceptions.ConnectionError) as caught:
                await client.ping()
            causes = [caught.value.__cause__, caught.value.__context__]
            assert any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes), causes

    run(main())
