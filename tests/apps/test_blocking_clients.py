"""Unmodified blocking clients (redis-py and httpx) in coros (`coro.patch()`), beside asyncio's tasks.

Each script runs in a process of its own. In two of the tests, 50 calls wait in the server at the same time, which is
possible only if they are concurrent.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from support import CAP_S, coro_is_available

from tests.apps.certificates import Certificates
from tests.apps.daemons import HOST, RedisAddress

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

HEAD = """
from grapeshot import coro
coro.patch()
import asyncio, json, sys, threading
import grapeshot
arguments = json.loads(sys.argv[1])
"""


def run(code: str, arguments: Any, folder: Path) -> list[str]:
    script = folder / "script.py"
    script.write_text(HEAD + textwrap.dedent(code), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(arguments)],
        capture_output=True,
        text=True,
        timeout=3 * CAP_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(params=["tcp", "tls", "unix"])
def options(request: pytest.FixtureRequest, redis_server: RedisAddress, certificates: Certificates) -> dict[str, Any]:
    if request.param == "tls" and redis_server.tls_port is None:
        pytest.skip("this redis-server was built without TLS")
    return {
        "tcp": {"host": HOST, "port": redis_server.port},
        "unix": {"unix_socket_path": redis_server.path},
        "tls": {
            "host": "localhost",
            "port": redis_server.tls_port,
            "ssl": True,
            "ssl_ca_certs": str(certificates.authority_file),
        },
    }[request.param]


def test_50_blocking_calls_of_redis_at_once(options: dict[str, Any], tmp_path: Path) -> None:
    assert run(
        """
        import redis

        def wait_for(client, number):
            results[number] = client.blpop(f"blocking:{number}", timeout=30)[1]

        def blocking():
            # socket_timeout=None, because redis-py 8 would give up after 5 s: the first call waits until the last one
            # has connected, which may take longer on a busy machine.
            client = redis.Redis(**arguments, decode_responses=True, socket_timeout=None)
            threads = [threading.Thread(target=wait_for, args=(client, number)) for number in range(50)]
            for thread in threads:
                thread.start()
            # All 50 calls wait in the server before the first one gets its value.
            while client.info("clients")["blocked_clients"] < 50:
                pass
            for number in range(50):
                client.rpush(f"blocking:{number}", f"value {number}")
            for thread in threads:
                thread.join()
            client.close()
            return results == {number: f"value {number}" for number in range(50)}

        async def tick():
            global ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        async def main():
            ticker = asyncio.create_task(tick())
            print(await coro.run_blocking(blocking), ticks > 100)
            ticker.cancel()

        results, ticks = {}, 0
        grapeshot.run(main())
        """,
        options,
        tmp_path,
    ) == ["True True"]


def test_errors_of_redis(options: dict[str, Any], tmp_path: Path) -> None:
    assert run(
        """
        import redis, socket

        def main():
            with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as gone:
                port = gone.getsockname()[1]
                gone.close()
                for number, timeout_s in ((port, 5), (silent.getsockname()[1], 0.05)):
                    try:
                        redis.Redis(host="127.0.0.1", port=number, socket_timeout=timeout_s, retry=None).ping()
                    except redis.exceptions.RedisError as error:
                        print(type(error).__name__)
            client = redis.Redis(**arguments, socket_timeout=0.05, retry=None)
            try:
                client.blpop("nothing:here", timeout=20)
            except redis.exceptions.RedisError as error:
                print(type(error).__name__)
            print(client.ping())

        coro.run(main)
        """,
        options,
        tmp_path,
    ) == ["ConnectionError", "TimeoutError", "TimeoutError", "True"]


def test_50_blocking_requests_of_httpx_at_once(tmp_path: Path) -> None:
    """The server is asyncio code on the same loop. It answers only after all requests have arrived."""
    assert run(
        """
        import httpx

        async def answer(reader, writer):
            global asked
            head = await reader.readuntil(b"\\r\\n\\r\\n")
            asked += 1
            if asked == 50:
                everyone.set()
            await everyone.wait()
            path = head.split()[1]
            writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n" % len(path))
            writer.write(b"Connection: close\\r\\n\\r\\n" + path)
            await writer.drain()
            writer.close()

        def ask(base, number):
            with httpx.Client(base_url=base, timeout=30) as client:
                return client.get(f"/{number}").text

        async def main():
            global everyone
            everyone = asyncio.Event()
            async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
                base = "http://127.0.0.1:%d" % server.sockets[0].getsockname()[1]
                answers = await asyncio.gather(*(coro.run_blocking(ask, base, number) for number in range(50)))
            print(answers == [f"/{number}" for number in range(50)])

        asked = 0
        grapeshot.run(main())
        """,
        None,
        tmp_path,
    ) == ["True"]
