"""Handlers of asyncio web frameworks (FastAPI and aiohttp) call a blocking driver (redis-py) in coros."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import textwrap
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support import CAP_S, HOST, coro_is_available

from tests.apps.daemons import RedisAddress

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

ROOT = Path(__file__).resolve().parents[2]
COUNT = 50


def request(url: str, method: str = "GET") -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=CAP_S) as response:
        return json.load(response)


def test_the_fastapi_example(redis_server: RedisAddress) -> None:
    """50 requests wait in the driver; each gets the text that is sent to its mailbox."""
    url = f"redis://{HOST}:{redis_server.port}"
    command = [sys.executable, str(ROOT / "examples" / "fastapi_redis.py"), "--port", "0", "--redis", url]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        match = re.fullmatch(r"listening on (127\.0\.0\.1:\d+)\n", process.stdout.readline())
        assert match, process.communicate(timeout=CAP_S)[1]
        base = f"http://{match[1]}/mail"
        with ThreadPoolExecutor(COUNT) as pool:
            waiting = [pool.submit(request, f"{base}/box{number}") for number in range(COUNT)]
            for number in range(COUNT):
                assert request(f"{base}/box{number}?text=text{number}", "POST")["unread"] == 1
            assert [future.result(CAP_S) for future in waiting] == [{"text": f"text{n}"} for n in range(COUNT)]
        assert request(f"{base}/box0?seconds=0.01") == {"text": None}
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=CAP_S)
        assert (process.returncode, out, err) == (-signal.SIGTERM, "", "")  # uvicorn raises the signal again
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


FRAMEWORKS = {
    "fastapi": """
        import fastapi, uvicorn

        async def serve(wait, ready):
            app = fastapi.FastAPI()

            @app.get("/{number}")
            async def handle(number: int):
                return await wait(number)

            server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            await ready()
            server.should_exit = True
            await serving
    """,
    "aiohttp": """
        import aiohttp.web

        async def serve(wait, ready):
            async def handle(request):
                return aiohttp.web.json_response(await wait(int(request.match_info["number"])))

            app = aiohttp.web.Application()
            app.add_routes([aiohttp.web.get("/{number}", handle)])
            runner = aiohttp.web.AppRunner(app)
            await runner.setup()
            await aiohttp.web.SockSite(runner, listener).start()
            await ready()
            await runner.cleanup()
    """,
}

PROGRAM = """
from grapeshot import coro
coro.patch()
import asyncio, json, socket, sys
import grapeshot, redis
{framework}
client = redis.Redis(
    host="127.0.0.1", port=int(sys.argv[1]), decode_responses=True, max_connections=200, socket_timeout=None
)
listener = socket.create_server(("127.0.0.1", 0), backlog=200)
COUNT = 50

def wait_for(number):
    return client.blpop(f"driver:{{number}}", timeout=30)[1]

def release():
    # All COUNT calls wait in the server before the first one gets its value.
    while client.info("clients")["blocked_clients"] < COUNT:
        pass
    for number in range(COUNT):
        client.rpush(f"driver:{{number}}", f"value {{number}}")

async def ask(number):
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    writer.write(b"GET /%d HTTP/1.1\\r\\nHost: here\\r\\nConnection: close\\r\\n\\r\\n" % number)
    answer = await reader.read()
    writer.close()
    return json.loads(answer.partition(b"\\r\\n\\r\\n")[2])

async def ready():
    releasing = asyncio.create_task(coro.run_blocking(release))
    answers = await asyncio.gather(*map(ask, range(COUNT)))
    await releasing
    print(answers == [f"value {{number}}" for number in range(COUNT)])

grapeshot.run(serve(lambda number: coro.run_blocking(wait_for, number), ready))
client.close()
"""


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_50_handlers_wait_in_a_blocking_driver(name: str, redis_server: RedisAddress, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM.format(framework=textwrap.dedent(FRAMEWORKS[name])), encoding="utf-8")
    command = [sys.executable, str(script), str(redis_server.port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * CAP_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
