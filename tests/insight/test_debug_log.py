"""`GRAPESHOT_DEBUG` names topics, and each event of these topics is a line in the log."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap

import pytest
from support import coro_is_available
from tls.contexts import server_context

ECHO = """
import asyncio, time, grapeshot

async def main():
    async def serve(reader, writer):
        writer.write(await reader.readline())
        writer.close()
        await writer.wait_closed()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"hello\\n")
    assert await reader.read() == b"hello\\n"
    writer.close()
    await writer.wait_closed()
    server.close()

grapeshot.run(main())
"""


def lines(code, topics, *flags):
    """Return the lines that the program writes to stderr, without date and time."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *flags, "-c", textwrap.dedent(code)],
        env={**os.environ, "GRAPESHOT_DEBUG": topics},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [re.sub(r"^\d+-\d+-\d+ [\d:,]+ ", "", line) for line in done.stderr.splitlines()]


def test_io():
    found = [re.sub("<.*>", "T", line) for line in lines(ECHO, "io")]
    assert set(found) == {
        "grapeshot.io T is open",
        "grapeshot.io T was accepted",
        "grapeshot.io T has sent 6 bytes",
        "grapeshot.io T has received 6 bytes",
        "grapeshot.io T received EOF",
        "grapeshot.io T is closed",
    }
    assert found.count("grapeshot.io T has sent 6 bytes") == 2
    assert found.count("grapeshot.io T has received 6 bytes") == 2
    assert found.count("grapeshot.io T is closed") == 2


def test_a_lost_connection_says_why():
    code = """
    import asyncio, socket, struct, grapeshot
    async def main():
        near, far = socket.socketpair()
        listener = socket.create_server(("127.0.0.1", 0))
        client = socket.create_connection(listener.getsockname())
        near, _ = listener.accept()
        reader, writer = await asyncio.open_connection(sock=near)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        try:
            await reader.read()
        except ConnectionResetError:
            print("reset")
        far.close(), listener.close()
    grapeshot.run(main())
    """
    assert any(re.search(r"is lost: ConnectionResetError\(104", line) for line in lines(code, "io"))


@pytest.mark.parametrize("buffered", [False, True])
def test_every_way_of_reading_is_logged(buffered):
    code = f"""
    import asyncio, socket, grapeshot
    class Plain(asyncio.Protocol):
        def data_received(self, data):
            done.set_result(None)
    class Buffered(asyncio.BufferedProtocol):
        def get_buffer(self, hint):
            self.buffer = bytearray(100)
            return self.buffer
        def buffer_updated(self, count):
            done.set_result(None)
    async def main():
        global done
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        near, far = socket.socketpair()
        transport, _ = await loop.create_connection({"Buffered" if buffered else "Plain"}, sock=near)
        far.send(b"12345")
        await done
        transport.abort()
        far.close()
    grapeshot.run(main())
    """
    assert any("has received 5 bytes" in line for line in lines(code, "io"))


def test_latency():
    code = """
    import asyncio, time, grapeshot
    async def slow():
        await asyncio.sleep(0)
        time.sleep(0.05)
    async def main():
        asyncio.get_running_loop().call_soon(time.sleep, 0.03)
        await asyncio.create_task(slow(), name="the slow one")
    grapeshot.run(main())
    """
    found = lines(code, "latency=0.02")
    # On a slow machine there may be lines about other steps, too.
    for name, wall in (("callback sleep", r"([3-9]\d|\d{3,})"), (r"task the slow one \(slow\)", r"([5-9]\d|\d{3,})")):
        wanted = rf"grapeshot\.latency {name} took {wall}\.\d ms \(CPU \d+\.\d ms\)"
        assert any(re.fullmatch(wanted, line) for line in found), found


@pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
def test_latency_of_coros():
    code = """
    import time
    from grapeshot import coro
    def main():
        co = coro.spawn(time.sleep, 0.05, name="sleeper")
        co.join()
    coro.run(main)
    """
    assert any(line.startswith("grapeshot.latency coro sleeper took ") for line in lines(code, "latency"))


def test_tls(tmp_path):
    assert server_context() is not None  # the program below calls this function, too
    code = """
    import asyncio, sys
    sys.path[:0] = TESTS
    from tls.contexts import client_context, server_context
    import grapeshot
    async def main():
        async def serve(reader, writer):
            writer.write(await reader.readline())
            writer.close()
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server_context())
        address = server.sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(*address, ssl=client_context(), server_hostname="grapeshot.test")
        writer.write(b"x\\n")
        assert await reader.read() == b"x\\n"
        writer.close()
        answer, plain = await asyncio.open_connection(*address)
        plain.write(b"GET / HTTP/1.0\\r\\n\\r\\n")
        try:
            await answer.read()
        except ConnectionError:
            pass
        plain.close()
        server.close()
    grapeshot.run(main())
    """
    tests = os.path.dirname(os.path.dirname(__file__))
    found = [re.sub("<.*?> ", "T ", line) for line in lines(code.replace("TESTS", repr([tests])), "tls")]
    assert found.count("grapeshot.tls T TLS handshake is complete") == 2
    assert sum("has agreed on" in line and "TLSv1." in line for line in found) == 2
    assert any("SSL handshake failed" in line for line in found)
    assert not any("grapeshot.io" in line for line in found)


def test_the_programs_own_logging_gets_the_records_instead_of_stderr():
    code = """
import logging, sys
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="own %(name)s")
"""
    assert lines(code + ECHO, "io") == []


def test_a_wrong_topic_is_reported_and_the_others_work():
    done = subprocess.run(
        [sys.executable, "-c", ECHO],
        env={**os.environ, "GRAPESHOT_DEBUG": "io,tsl"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "GRAPESHOT_DEBUG: unknown topic tsl; the topics are latency, io, tls" in done.stderr
    assert "grapeshot.io" in done.stderr


@pytest.mark.parametrize("limit", ["x", "nan", "-1", "1e400"])
def test_a_wrong_limit_is_reported_and_the_default_is_used(limit):
    done = subprocess.run(
        [sys.executable, "-c", "import time, grapeshot\nasync def main(): time.sleep(0.02)\ngrapeshot.run(main())"],
        env={**os.environ, "GRAPESHOT_DEBUG": f"latency={limit}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert f"GRAPESHOT_DEBUG=latency={limit}: not a valid number of seconds; using 0.01" in done.stderr
    assert "grapeshot.latency task main took" in done.stderr


def test_an_isolated_interpreter_reads_no_variable():
    code = ECHO.replace("import asyncio", f"import sys; sys.path[:0] = {sys.path!r}; import asyncio")
    assert lines(code, "io", "-E") == []
