"""asyncpg with a real PostgreSQL server: over TCP with a password, over TLS, and over a unix socket."""

from __future__ import annotations

import asyncio
import datetime
import io
import itertools
import random
import ssl
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from support import CAP_S

from tests.apps.certificates import Certificates
from tests.apps.daemons import HOST, PostgresAddress

Run = Callable[[Coroutine[Any, Any, Any]], Any]
Arguments = dict[str, Any]
BLOB = random.Random(11).randbytes(4 * 1024 * 1024)
_tables = itertools.count()


@pytest.fixture
def table() -> str:
    """Return the name of a table that only this test uses."""
    return f"table_{next(_tables)}"


@pytest.fixture(params=["tcp", "tls", "unix"])
def address(request: pytest.FixtureRequest, postgres_server: PostgresAddress, certificates: Certificates) -> Arguments:
    """Return the arguments of `connect` and `create_pool` for one way to connect."""
    common = {"port": postgres_server.port, "user": postgres_server.user, "database": postgres_server.database}
    if request.param == "unix":
        return {"host": postgres_server.folder, **common}
    common["password"] = postgres_server.password
    if request.param == "tcp":
        return {"host": HOST, "ssl": False, **common}
    return {"host": "localhost", "ssl": certificates.for_client(), **common}  # the equivalent of sslmode=verify-full


def test_each_address_connects_in_its_own_way(run: Run, address: Arguments) -> None:
    async def main() -> None:
        connection = await asyncpg.connect(**address)
        row = await connection.fetchrow(
            "select ssl, inet_client_addr() is null as is_local from pg_stat_ssl where pid = pg_backend_pid()"
        )
        assert tuple(row) == (bool(address.get("ssl")), "password" not in address)
        await connection.close()

    run(main())


def test_queries_types_and_errors(run: Run, address: Arguments) -> None:
    async def main() -> None:
        connection = await asyncpg.connect(**address)
        try:
            now = datetime.datetime(2026, 2, 3, 4, 5, 6, 789, tzinfo=datetime.UTC)
            row = await connection.fetchrow(
                "select $1::int8 as n, $2::text as t, $3::bytea as b, $4::timestamptz as at, $5::int[] as a, null as z",
                *(2**40, "grün", b"\0\xff", now, [1, 2, 3]),
            )
            assert dict(row) == {"n": 2**40, "t": "grün", "b": b"\0\xff", "at": now, "a": [1, 2, 3], "z": None}
            rows = await connection.fetch("select i, i * i as square from generate_series(1, 20000) i")
            assert [tuple(row) for row in rows] == [(i, i * i) for i in range(1, 20001)]
            with pytest.raises(asyncpg.DivisionByZeroError):
                await connection.fetchval("select 1 / 0")
            with pytest.raises(asyncpg.PostgresSyntaxError):
                await connection.execute("selekt")
            statement = await connection.prepare("select $1::int + 1")
            assert [await statement.fetchval(number) for number in range(100)] == list(range(1, 101))
        finally:
            await connection.close()

    run(main())


def test_transactions_and_cursors(run: Run, address: Arguments, table: str) -> None:
    async def main() -> None:
        connection = await asyncpg.connect(**address)
        try:
            await connection.execute(f"create temporary table {table} (n int primary key)")
            with pytest.raises(asyncpg.UniqueViolationError):
                async with connection.transaction():
                    await connection.execute(f"insert into {table} values (1)")
                    await connection.execute(f"insert into {table} values (1)")
            assert await connection.fetchval(f"select count(*) from {table}") == 0
            async with connection.transaction():
                await connection.executemany(f"insert into {table} values ($1)", [(n,) for n in range(1000)])
                with pytest.raises(ValueError, match="inner"):
                    async with connection.transaction():  # a savepoint
                        await connection.execute(f"delete from {table}")
                        raise ValueError("inner")
            async with connection.transaction():
                seen = [row["n"] async for row in connection.cursor(f"select n from {table} order by n", prefetch=33)]
            assert seen == list(range(1000))
        finally:
            await connection.close()

    run(main())


def test_4_mb_there_and_back(run: Run, address: Arguments) -> None:
    async def main() -> None:
        connection = await asyncpg.connect(**address)
        try:
            assert await connection.fetchval("select $1::bytea", BLOB) == BLOB
            values = await asyncio.wait_for(
                connection.fetch("select $1::bytea from generate_series(1, 5)", BLOB), CAP_S
            )
            assert [value for (value,) in values] == [BLOB] * 5
        finally:
            await connection.close()

    run(main())


def test_copy_in_and_out(run: Run, address: Arguments, table: str, tmp_path: Path) -> None:
    async def main() -> None:
        connection = await asyncpg.connect(**address)
        try:
            await connection.execute(f"create temporary table {table} (n int, t text)")
            records = [(number, f"text {number}" * 10) for number in range(20000)]
            assert await connection.copy_records_to_table(table, records=records) == "COPY 20000"

            async def lines() -> Any:
                for number in range(20000, 20100):
                    yield f"{number}\tlate\n".encode()

            assert await connection.copy_to_table(table, source=lines()) == "COPY 100"
            out = io.BytesIO()
            assert await connection.copy_from_query(f"select * from {table} order by n", output=out) == "COPY 20100"
            expected = [f"{n}\t{t}\n" for n, t in records] + [f"{n}\tlate\n" for n in range(20000, 20100)]
            assert out.getvalue().decode() == "".join(expected)
        finally:
            await connection.close()

    run(main())


def test_a_pool_under_more_work_than_connections(run: Run, address: Arguments) -> None:
    async def main() -> None:
        async with asyncpg.create_pool(**address, min_size=2, max_size=8) as pool:

            async def work(number: int) -> int:
                async with pool.acquire() as connection, connection.transaction():
                    return await connection.fetchval("select $1::int + pg_backend_pid() * 0", number)

            assert await asyncio.gather(*map(work, range(200))) == list(range(200))
            assert pool.get_size() <= 8

    run(main())


def test_notifications(run: Run, address: Arguments, table: str) -> None:
    async def main() -> None:
        listener, speaker = await asyncpg.connect(**address), await asyncpg.connect(**address)
        heard: asyncio.Queue[str] = asyncio.Queue()
        try:
            await listener.add_listener(table, lambda _connection, _pid, _channel, payload: heard.put_nowait(payload))
            for number in range(50):
                await speaker.execute("select pg_notify($1, $2)", table, str(number))
            assert [await asyncio.wait_for(heard.get(), CAP_S) for _ in range(50)] == [str(n) for n in range(50)]
            await listener.reset()
        finally:
            await speaker.close()
            await listener.close()

    run(main())


async def until_it_sleeps(watcher: asyncpg.Connection, pid: int) -> None:
    """Wait until the server's process `pid` runs pg_sleep. The server ignores a cancel request that arrives before
    the query runs.
    """
    is_sleeping = "select wait_event = 'PgSleep' from pg_stat_activity where pid = $1"
    give_up_s = asyncio.get_running_loop().time() + CAP_S
    while not await watcher.fetchval(is_sleeping, pid):
        assert asyncio.get_running_loop().time() < give_up_s


def test_a_query_is_cancelled_and_the_connection_goes_on(run: Run, address: Arguments) -> None:
    """asyncpg opens a second connection to cancel a query."""

    async def main() -> None:
        connection, watcher = await asyncpg.connect(**address), await asyncpg.connect(**address)
        try:
            with pytest.raises(TimeoutError):
                await connection.fetchval("select pg_sleep(60)", timeout=0.5)
            assert await connection.fetchval("select 1") == 1
            sleeping = asyncio.ensure_future(connection.fetchval("select pg_sleep(60)"))
            await until_it_sleeps(watcher, connection.get_server_pid())
            sleeping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sleeping
            assert await connection.fetchval("select 2") == 2
        finally:
            await watcher.close()
            await connection.close()

    run(main())


def test_the_server_ends_the_connection(run: Run, address: Arguments) -> None:
    async def main() -> None:
        victim, killer = await asyncpg.connect(**address), await asyncpg.connect(**address)
        lost = asyncio.Event()
        victim.add_termination_listener(lambda _connection: lost.set())
        try:
            sleeping = asyncio.ensure_future(victim.fetchval("select pg_sleep(60)"))
            await until_it_sleeps(killer, victim.get_server_pid())
            assert await killer.fetchval("select pg_terminate_backend($1)", victim.get_server_pid())
            with pytest.raises((asyncpg.AdminShutdownError, asyncpg.ConnectionDoesNotExistError)):
                await sleeping
            await asyncio.wait_for(lost.wait(), CAP_S)
            assert victim.is_closed()
            with pytest.raises(asyncpg.InterfaceError):
                await victim.fetchval("select 1")
        finally:
            await killer.close()
            await victim.close()

    run(main())


def test_a_wrong_password_and_a_wrong_authority(run: Run, postgres_server: PostgresAddress) -> None:
    async def main() -> None:
        address = {"port": postgres_server.port, "user": postgres_server.user, "database": postgres_server.database}
        with pytest.raises(asyncpg.InvalidPasswordError):
            await asyncpg.connect(host=HOST, password="another", ssl=False, **address)
        for _ in range(3):
            with pytest.raises(ssl.SSLCertVerificationError):
                await asyncpg.connect(
                    host="localhost", password=postgres_server.password, ssl=ssl.create_default_context(), **address
                )

    run(main())
