"""With `install(transports=True)`, aiofastnet's functions create grapeshot's transports on grapeshot's loops."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("aiofastnet")

# `library` stands for aiohttp.net_helpers, which imports aiofastnet's functions by name.
PROGRAM = """
import asyncio, sys, types
import grapeshot

library = types.ModuleType("library")

def load():
    import aiofastnet
    library.create_connection = aiofastnet.create_connection
    library.create_server, library.start_tls = aiofastnet.create_server, aiofastnet.start_tls
    sys.modules["library"] = library

class Echo(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport, self.done = transport, asyncio.get_running_loop().create_future()

    def data_received(self, data):
        self.transport.write(data)
        self.done.set_result(data)

async def main():
    loop = asyncio.get_running_loop()
    servers = []
    def accept():
        servers.append(Echo())
        return servers[-1]
    server = await library.create_server(loop, accept, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    transport, protocol = await library.create_connection(loop, Echo, *address, ssl_incoming_bio_size=None)
    transport.write(b"hello")
    assert await servers[0].done == b"hello"
    print(*(type(each).__module__.partition(".")[0] for each in (transport, servers[0].transport)))
    transport.close()
    server.close()

load_early, steps, on_asyncio = {arguments}
if load_early:
    load()
exec(steps)
if not load_early:
    load()
if on_asyncio:
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(main())
else:
    grapeshot.run(main())
"""
OURS, THEIRS = "grapeshot grapeshot", "aiofastnet aiofastnet"
INSTALL = "grapeshot.install(transports=True)"


@pytest.mark.parametrize("load_early", [True, False])
@pytest.mark.parametrize(
    ("steps", "on_asyncio", "expected"),
    [
        ("grapeshot.install()", False, THEIRS),
        (INSTALL, False, OURS),
        (f"{INSTALL}; {INSTALL}", False, OURS),
        (f"{INSTALL}; grapeshot.uninstall()", False, THEIRS),
        (INSTALL, True, THEIRS),
    ],
)
def test_whose_transports(load_early, steps, on_asyncio, expected):
    code = textwrap.dedent(PROGRAM).replace("{arguments}", repr((load_early, steps, on_asyncio)))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split("\n")[0] == expected, done.stderr


def test_without_aiofastnet():
    code = """
import sys
sys.modules["aiofastnet"] = None
import grapeshot
grapeshot.install(transports=True)
grapeshot.uninstall()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
