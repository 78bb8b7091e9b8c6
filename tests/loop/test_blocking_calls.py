"""The loop's calls that may block are native or made inside functions of asyncio, so that tools do not report them.

Tools that look for blocking calls (for example blockbuster) replace functions of the standard library. If a loop runs
in the thread, the replacements raise, unless the caller is one of the functions of asyncio that are known to make such
calls.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
import threading
import warnings

import pytest
from support import Recorder, connected, raw_pair, until

pytestmark = pytest.mark.skip_on(uvloop="it has no sendfile, and makes all of these calls natively")

KNOWN = {
    "sendfile",
    "_sock_sendfile_native_impl",
    "create_unix_server",
    "_stop_serving",
    "create_datagram_endpoint",
    "subprocess_exec",
    "subprocess_shell",
}
CALLS = ("stat", "remove", "unlink", "sendfile", "read", "write", "access", "getcwd", "listdir")


def is_known():
    frame = sys._getframe()
    while frame is not None:
        if "asyncio" in frame.f_code.co_filename.split(os.sep) and frame.f_code.co_name in KNOWN:
            return True
        if "importlib" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


@pytest.fixture
def watched(monkeypatch):
    """A function that starts to watch, and returns the list of the calls that tools would report."""
    seen = []

    def replacement(name, original):
        def call(*args, **kwargs):
            # Calls in threads that run no loop are allowed, and so are reads and writes of non-blocking descriptors.
            runs_loop = asyncio._get_running_loop() is not None
            may_block = name not in ("read", "write") or os.get_blocking(args[0])
            if runs_loop and may_block and not is_known():
                seen.append(name)
            return original(*args, **kwargs)

        return call

    def begin():
        for name in CALLS:
            monkeypatch.setattr(os, name, replacement(name, getattr(os, name)))
        return seen

    return begin


@pytest.fixture
def file(tmp_path):
    (tmp_path / "content").write_bytes(b"0123456789" * 1000)
    with open(tmp_path / "content", "rb") as opened:
        yield opened


async def test_sendfile(loop, file, watched):
    transport, protocol, peer = await connected(loop)
    with peer:
        seen = watched()
        assert await loop.sendfile(transport, file) == 10_000
        assert await peer.read_exactly(10_000) == b"0123456789" * 1000
        assert seen == []
        transport.close()
        await until(lambda: protocol.is_lost)


async def test_sock_sendfile(loop, file, watched):
    ours, theirs = raw_pair()
    with ours, theirs:
        ours.setblocking(False)
        seen = watched()
        assert await loop.sock_sendfile(ours, file, 5) == 9995
        assert seen == []


@pytest.mark.parametrize("is_stale", [False, True], ids=["new", "stale"])
async def test_a_unix_server(loop, tmp_path, watched, is_stale):
    path = str(tmp_path / "socket")
    if is_stale:
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(path)
    seen = watched()
    server = await loop.create_unix_server(Recorder, path)
    server.close()
    assert seen == []


async def test_a_datagram_endpoint_in_the_place_of_a_stale_one(loop, tmp_path, watched):
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(path)
    seen = watched()
    transport, protocol = await loop.create_datagram_endpoint(Recorder, path, family=socket.AF_UNIX)
    transport.close()
    await until(lambda: protocol.is_lost)
    assert seen == []


@pytest.mark.parametrize("how", ["exec", "shell"])
async def test_a_subprocess(loop, watched, how):
    async def run():
        if how == "exec":
            return await asyncio.create_subprocess_exec("echo", "hello", stdout=asyncio.subprocess.PIPE)
        return await asyncio.create_subprocess_shell("echo hello", stdout=asyncio.subprocess.PIPE)

    seen = watched()
    process = await run()
    assert await process.communicate() == (b"hello\n", None)
    assert seen == []


@pytest.mark.leaks_on(asyncio="the socket that was made for an invalid path")
async def test_errors_of_paths(loop, tmp_path):
    """A native call raises the same error as the standard library's function."""
    path = str(tmp_path / "none" / "socket")
    for name in (path, path.encode()):
        with pytest.raises(FileNotFoundError):
            await loop.create_unix_server(Recorder, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        with pytest.raises(ValueError, match="null"):
            await loop.create_unix_server(Recorder, str(tmp_path) + "/so\0cket")
        gc.collect()


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="from 3.13 on, a thread is joined without a lock")
@pytest.mark.skip_on(asyncio="waits in a frame of asyncio, which tools for blocking calls allow")
def test_no_living_thread_of_the_executor_is_joined_while_the_loop_runs(loop, monkeypatch):
    joined = []
    join = threading.Thread.join

    def watching(thread, *args):
        joined.append(thread.is_alive() and asyncio._get_running_loop() is not None)
        return join(thread, *args)

    loop.run_until_complete(loop.run_in_executor(None, id, 1))
    monkeypatch.setattr(threading.Thread, "join", watching)
    loop.run_until_complete(loop.shutdown_default_executor())
    assert joined
    assert not any(joined)
