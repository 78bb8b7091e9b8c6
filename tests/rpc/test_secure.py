"""Unix sockets, TLS with client certificates, and pickle between processes of one user."""

from __future__ import annotations

import asyncio
import collections
import json
import os
import pickle
import ssl
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import trustme
from rpc.ends import HELLO, Methods, framed
from support import HOST, until
from tls.contexts import HOSTNAME, authority, certificate, client_context, server_context

from grapeshot import rpc


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def new_server(**options) -> rpc.Server:
    server = rpc.Server(**options)
    Methods().register(server)
    return server


# ---------------------------------------------------------------- unix sockets


async def test_a_unix_socket(loop, folder):
    async with new_server() as server:
        await server.listen_unix(folder / "s")
        assert server.addresses == [str(folder / "s")]
        async with rpc.Client(path=folder / "s") as client:
            assert await client.call("add", 1) == 2
            assert "connected" in repr(client)
    assert not (folder / "s").exists()


async def test_one_server_listens_in_several_places(loop, folder):
    async with new_server() as server:
        await server.listen_unix(folder / "s")
        await server.listen(HOST, 0)
        async with rpc.Client(path=folder / "s") as first, rpc.Client(*server.addresses[1]) as second:
            assert await first.call("add", 1) == await second.call("add", 1) == 2
            assert server.connections == 2


# ---------------------------------------------------------------- TLS


def mutual(*, version: ssl.TLSVersion | None = None) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return a server's context that requires a client certificate, and a context of a client that has none."""
    server = server_context(version=version)
    server.verify_mode = ssl.CERT_REQUIRED
    authority().configure_trust(server)
    return server, client_context(version)


async def test_a_handshake_that_does_not_begin_is_ended_after_the_time_for_a_hello(loop, folder, monkeypatch):
    monkeypatch.setattr("grapeshot.rpc._server.HELLO_S", 0.02)
    server_side, _ = mutual()
    async with new_server() as server:
        await server.listen(HOST, 0, ssl=server_side)
        await server.listen_unix(folder / "s", ssl=server_side)
        for connecting in (
            asyncio.open_connection(*server.addresses[0]),
            asyncio.open_unix_connection(folder / "s"),
        ):
            reader, writer = await connecting
            try:
                assert await reader.read() == b""
            except ConnectionResetError:
                pass  # a loop may abort the connection if the handshake takes too long
            writer.close()


VERSIONS = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_client_with_a_certificate_is_served(loop, version):
    server_side, client_side = mutual(version=version)
    certificate("client.test").configure_cert(client_side)
    async with new_server() as server:
        await server.listen(HOST, 0, ssl=server_side)
        async with rpc.Client(*server.addresses[0], ssl=client_side, server_hostname=HOSTNAME) as client:
            assert await asyncio.gather(*(client.call("add", number) for number in range(50))) == list(range(1, 51))
            assert len(await client.call("blob", 1_000_000)) == 1_000_000
            assert [item async for item in client.stream("numbers", 40)] == list(range(40))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("who", ["nobody", "a stranger"])
async def test_a_client_without_the_right_certificate_is_refused(loop, version, who):
    server_side, client_side = mutual(version=version)
    if who == "a stranger":
        trustme.CA().issue_cert("client.test").configure_cert(client_side)
    async with new_server() as server:
        server.add("touch", lambda: pytest.fail("a stranger has called"))
        await server.listen(HOST, 0, ssl=server_side)
        client = rpc.Client(*server.addresses[0], ssl=client_side, server_hostname=HOSTNAME, connect_timeout=0.5)
        with pytest.raises(rpc.ConnectionLost) as caught:
            await client.call("touch")
        assert not caught.value.sent
        await client.close()
        await until(lambda: server.connections == 0)


async def test_a_server_without_the_right_certificate_is_refused(loop):
    client_side = client_context()
    async with new_server() as server:
        await server.listen(HOST, 0, ssl=server_context("other.test"))
        client = rpc.Client(*server.addresses[0], ssl=client_side, server_hostname=HOSTNAME)
        with pytest.raises(rpc.ConnectionLost) as caught:
            await client.call("add", 1)  # raises at once: the client does not try again after a wrong certificate
        assert isinstance(caught.value.__cause__, ssl.SSLCertVerificationError)
        assert not caught.value.sent
        await client.close()
        await until(lambda: server.connections == 0)


async def test_a_client_without_tls_gets_no_answer(loop):
    async with new_server() as server:
        await server.listen(HOST, 0, ssl=server_context())
        client = rpc.Client(*server.addresses[0], connect_timeout=0.2)
        with pytest.raises(rpc.ConnectionLost) as caught:
            await client.call("add", 1)
        assert not caught.value.sent
        await client.close()


# ---------------------------------------------------------------- pickle


Point = collections.namedtuple("Point", "x y")
Point.__module__ = "rpc.test_secure"


class Odd(Exception):
    pass


async def test_pickle_carries_any_object(loop, folder):
    async with new_server(codec=rpc.Pickle()) as server:
        server.add("unpicklable", lambda: lambda: 0)
        await server.listen_unix(folder / "s")
        assert stat.S_IMODE(os.stat(folder / "s").st_mode) == 0o600
        async with rpc.Client(path=folder / "s", codec=rpc.Pickle()) as client:
            assert await client.call("add", 3 + 4j, 1) == 4 + 4j
            assert await client.call("later", {(1, 2): {3}}) == {(1, 2): {3}}
            with pytest.raises((pickle.PicklingError, AttributeError)):
                await client.call("later", lambda: 0)
            with pytest.raises(rpc.BadResult):
                await client.call("unpicklable")
            assert [item async for item in client.stream("numbers", 3)] == [0, 1, 2]


async def test_pickle_is_refused_over_tcp(loop):
    server = new_server(codec=rpc.Pickle())
    with pytest.raises(ValueError, match="needs a Unix socket"):
        await server.listen(HOST, 0)
    with pytest.raises(ValueError, match="needs a Unix socket"):
        rpc.Client(HOST, 1, codec=rpc.Pickle())


@pytest.mark.parametrize("codecs", [(rpc.Pickle, rpc.Msgpack), (rpc.Msgpack, rpc.Pickle)])
async def test_ends_with_different_codecs_refuse_each_other(loop, folder, codecs):
    """Neither end decodes a message of the other one."""
    async with new_server(codec=codecs[0]()) as server:
        await server.listen_unix(folder / "s")
        client = rpc.Client(path=folder / "s", codec=codecs[1]())
        with pytest.raises(rpc.ConnectionLost, match="codec") as caught:
            await client.call("add", 1)
        assert isinstance(caught.value.__cause__, rpc.ProtocolError)
        await client.close()
        await until(lambda: server.connections == 0)


async def test_a_packet_that_pickle_cannot_read(loop, folder):
    async with new_server(codec=rpc.Pickle()) as server:
        await server.listen_unix(folder / "s")
        reader, writer = await asyncio.open_unix_connection(str(folder / "s"))
        hello = json.dumps({**HELLO, "codec": "pickle"}).encode()
        writer.write(framed(hello) + framed(b"abc"))
        assert b"cannot decode a message" in await reader.read()
        writer.close()
        await writer.wait_closed()


AS_NOBODY = """
import asyncio, contextlib, os, sys
sys.path[:0] = {path!r}
from grapeshot import rpc

class Bomb:
    def __reduce__(self):
        return (open, ({mark!r}, "w"))

async def call():
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
    client = rpc.Client(path={socket!r}, codec=rpc.Pickle(), connect_timeout=2)
    try:
        await client.call("later", Bomb())
    except rpc.ConnectionLost as error:
        print("sent" if error.sent else "not sent", repr(error.__cause__))
    await client.close()
    reader, writer = await asyncio.open_unix_connection({socket!r})
    writer.write(b"anything")
    try:
        print("read", await reader.read())
    except ConnectionError:
        print("read", b"")
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()

async def serve():
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
    server = rpc.Server(codec=rpc.Pickle())
    server.add("later", print)
    await server.listen_unix({socket!r})
    os.chmod({socket!r}, 0o666)
    print("ready", flush=True)
    await server.serve_forever()

asyncio.run({what}())
"""


def as_nobody(what: str, folder: Path) -> list[str]:
    code = AS_NOBODY.format(path=sys.path, socket=str(folder / "s"), mark=str(folder / "mark"), what=what)
    return [sys.executable, "-c", code]


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")


@needs_root
async def test_pickle_is_refused_to_a_client_of_another_user(loop, folder, caplog):
    """A Client in a process of another user refuses the server. If that process opens a plain connection instead, the
    server refuses the connection before it reads a byte.
    """
    folder.chmod(0o777)
    async with new_server(codec=rpc.Pickle()) as server:
        await server.listen_unix(folder / "s")
        os.chmod(folder / "s", 0o666)
        process = await asyncio.create_subprocess_exec(
            *as_nobody("call", folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        output, errors = await process.communicate()
    assert errors == b""
    lines = output.decode().splitlines()
    assert lines == ["not sent PermissionError('the peer is a process of user 0, not 65534')", "read b''"]
    assert not (folder / "mark").exists()
    assert "process of user 65534, not 0" in caplog.text


@needs_root
async def test_pickle_is_refused_to_a_server_of_another_user(loop, folder):
    folder.chmod(0o777)
    process = await asyncio.create_subprocess_exec(*as_nobody("serve", folder), stdout=subprocess.PIPE)
    try:
        assert await process.stdout.readline() == b"ready\n"
        client = rpc.Client(path=folder / "s", codec=rpc.Pickle())
        with pytest.raises(rpc.ConnectionLost) as caught:
            await client.call("later", 1)
        assert not caught.value.sent
        assert isinstance(caught.value.__cause__, PermissionError)
        await client.close()
    finally:
        process.kill()
        await process.communicate()
