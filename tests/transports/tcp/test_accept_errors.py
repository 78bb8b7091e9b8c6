"""If `accept` fails because of one connection, as it may on Linux, the server still accepts the next one."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys

import pytest
from support import run_script

COMPILER = shutil.which("cc")
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="accept() reports errors of the new connection only on Linux"),
    pytest.mark.skipif(COMPILER is None, reason="NOT TESTED: a C compiler is missing"),
]

# Replaces the C library's accept4(): the first call that takes a connection off the queue closes the connection and
# returns an error.
SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

static int has_failed = 0;

int accept4(int fd, struct sockaddr *address, socklen_t *length, int flags) {
    int (*next)(int, struct sockaddr *, socklen_t *, int) = dlsym(RTLD_NEXT, "accept4");
    int connection = next(fd, address, length, flags);
    if (connection < 0 || has_failed)
        return connection;
    has_failed = 1;
    close(connection);
    errno = atoi(getenv("ACCEPT_ERROR"));
    return -1;
}
"""
HEAD = """
import asyncio, socket

HOST = "127.0.0.1"

def talk(port):
    with socket.create_connection((HOST, port), 20) as sock:
        try:
            return sock.recv(100)
        except ConnectionError:
            return b""
"""
PROTOCOL = """
class Hello(asyncio.Protocol):
    def connection_made(self, transport):
        transport.write(b"hello")
        transport.close()

async def main():
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: None)  # asyncio reports the first error
    server = await loop.create_server(Hello, HOST, 0)
    port = server.sockets[0].getsockname()[1]
    print(*[await loop.run_in_executor(None, talk, port) for _ in range(2)], server.is_serving())
    server.close()

loop = new_event_loop()
loop.run_until_complete(main())
loop.run_until_complete(loop.shutdown_default_executor())
loop.close()
"""
COROS = """
from grapeshot import coro
from grapeshot.coro import threads

def hello(connection, address):
    connection.sendall(b"hello")

def main():
    with coro.serve(hello, HOST, 0) as server:
        port = server.sockets[0].getsockname()[1]
        print(*[threads.run(talk, port) for _ in range(2)], True)

coro.run(main)
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM, encoding="utf-8")
    command = [COMPILER, "-shared", "-fPIC", "-o", folder / "shim.so", folder / "shim.c", "-ldl"]
    subprocess.run(command, check=True)
    return str(folder / "shim.so")


@pytest.mark.parametrize("error", [errno.EPROTO, errno.EPERM, errno.ENETDOWN, errno.EHOSTUNREACH])
@pytest.mark.parametrize(("kind", "program"), [("asyncio", PROTOCOL), ("grapeshot", PROTOCOL), ("grapeshot", COROS)])
def test_the_next_connection_is_served(shim, monkeypatch, kind, program, error):
    if program == COROS:
        pytest.importorskip("grapeshot.coro", reason="coros do not work here", exc_type=ImportError)
    monkeypatch.setenv("LD_PRELOAD", shim)
    monkeypatch.setenv("ACCEPT_ERROR", str(error))
    assert run_script(kind, HEAD + program) == "b'' b'hello' True\n"
