"""create_unix_server: forms of addresses, files that exist at the path, cleanup, and invalid arguments."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
import sys

import pytest
from support import Echo, Peer, Recorder, iterations, until

FORMS = ("str", "bytes", "pathlike", "abstract str", "abstract bytes")
NO_ABSTRACT_CLIENT = pytest.mark.xfail_on(uvloop="cannot connect to abstract names")

BEFORE_CLEANUP = sys.version_info < (3, 13)


def client_of(address):
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(os.fspath(address))
    except OSError:
        sock.close()
        raise
    return Peer(sock)


@pytest.mark.parametrize("form", FORMS)
async def test_serves_on_any_form_of_address(loop, serve_unix, address_of, form):
    address = address_of(form)
    server = await serve_unix(Echo, address)
    assert server.is_serving()
    [listening] = server.sockets
    assert listening.family == socket.AF_UNIX
    with client_of(address) as peer:
        await peer.send(b"hello")
        assert await peer.read_exactly(5) == b"hello"
        large = os.urandom(1 << 20)
        sending = asyncio.ensure_future(peer.send(large))
        assert await peer.read_exactly(1 << 20) == large
        await sending
    server.close()
    assert not server.is_serving()
    with pytest.raises((ConnectionRefusedError, FileNotFoundError)):
        client_of(address)
    await iterations(3)


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[NO_ABSTRACT_CLIENT] if "abstract" in form else []) for form in FORMS]
)
async def test_addresses_of_both_ends(loop, serve_unix, address_of, form):
    address = address_of(form)
    made = []

    def factory():
        made.append(Recorder())
        return made[-1]

    server = await serve_unix(factory, address)
    transport, protocol = await loop.create_unix_connection(Recorder, address)
    await until(lambda: made and made[0].transport)
    accepted = made[0].transport
    shown = os.fspath(address)
    if "abstract" in form:
        shown = shown.encode() if isinstance(shown, str) else shown
    else:
        shown = os.fsdecode(shown)
    assert accepted.get_extra_info("sockname") == shown
    assert transport.get_extra_info("peername") == shown
    for sock in (accepted.get_extra_info("socket"), transport.get_extra_info("socket")):
        assert sock.family == socket.AF_UNIX
        assert sock.type == socket.SOCK_STREAM
    assert accepted.get_extra_info("peername", "") == ""
    assert transport.get_extra_info("sockname", "") == ""
    server.close()
    transport.close()
    await until(lambda: protocol.is_lost and made[0].is_lost)


async def test_streams(loop, address_of):
    async def answer(reader, writer):
        writer.write(await reader.readline())
        await writer.drain()
        writer.close()

    address = address_of("str")
    server = await asyncio.start_unix_server(answer, address)
    reader, writer = await asyncio.open_unix_connection(address)
    writer.write(b"line\nrest")
    assert await reader.read() == b"line\n"
    writer.close()
    await writer.wait_closed()
    server.close()
    await server.wait_closed()
    await iterations(3)


# ---------------------------------------------------------------- files that exist at the path


@pytest.mark.parametrize("form", ["str", "bytes", "pathlike"])
async def test_a_stale_socket_is_replaced(loop, serve_unix, address_of, form):
    address = address_of(form)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(os.fspath(address))
    server = await serve_unix(Echo, address)
    with client_of(address) as peer:
        await peer.send(b"new")
        assert await peer.read_exactly(3) == b"new"
    server.close()
    await iterations(3)


@pytest.mark.parametrize(
    "form",
    ["str", "bytes", pytest.param("pathlike", marks=pytest.mark.xfail_on(uvloop="shows the object, not the path"))],
)
async def test_another_file_is_not_replaced(loop, address_of, form):
    address = address_of(form)
    with open(address, "w") as file:
        file.write("content")
    with pytest.raises(OSError, match="is already in use") as caught:
        await loop.create_unix_server(Echo, address)
    assert caught.value.errno == errno.EADDRINUSE
    assert caught.value.strerror == f"Address {os.fspath(address)!r} is already in use"
    with open(address) as file:
        assert file.read() == "content"


async def test_an_abstract_name_in_use(loop, serve_unix, address_of):
    address = address_of("abstract str")
    await serve_unix(Echo, address)
    with pytest.raises(OSError, match="is already in use") as caught:
        await loop.create_unix_server(Echo, address)
    assert caught.value.errno == errno.EADDRINUSE


async def test_paths_that_cannot_be_bound(loop, folder):
    with pytest.raises(FileNotFoundError):
        await loop.create_unix_server(Echo, folder / "missing" / "sock")
    with pytest.raises(OSError, match="too long"):
        await loop.create_unix_server(Echo, str(folder / ("x" * 120)))
    with pytest.raises(TypeError):
        await loop.create_unix_server(Echo, 5)
    assert os.listdir(folder) == []


async def test_a_stale_file_that_cannot_be_looked_at_is_logged(loop, folder, caplog):
    (folder / "file").write_text("no folder")
    address = str(folder / "file" / "sock")
    with pytest.raises(NotADirectoryError):
        await loop.create_unix_server(Echo, address)
    [record] = caplog.records
    assert record.getMessage().startswith(f"Unable to check or remove stale UNIX socket {address!r}: NotADirectory")
    caplog.clear()


@pytest.mark.parametrize("form", ["str", "bytes", "pathlike"])
async def test_default_of_cleanup_socket(loop, serve_unix, address_of, form):
    address = address_of(form)
    server = await serve_unix(Echo, address)
    assert stat.S_ISSOCK(os.stat(address).st_mode)
    server.close()
    assert os.path.exists(address) == BEFORE_CLEANUP


@pytest.mark.xfail_on(when=BEFORE_CLEANUP, asyncio="a new argument of 3.13")
@pytest.mark.parametrize("is_wanted", [True, False])
@pytest.mark.parametrize("how", ["path", "sock"])
async def test_cleanup_socket_on_every_version(loop, serve_unix, address_of, how, is_wanted):
    address = address_of("str")
    with socket.socket(socket.AF_UNIX) as sock:
        if how == "path":
            server = await serve_unix(Echo, address, cleanup_socket=is_wanted)
        else:
            sock.bind(address)
            server = await serve_unix(Echo, sock=sock, cleanup_socket=is_wanted, start_serving=False)
        assert os.path.exists(address)
        server.close()
        server.close()
        assert os.path.exists(address) != is_wanted


@pytest.mark.xfail_on(when=BEFORE_CLEANUP, asyncio="a new argument of 3.13")
async def test_cleanup_keeps_the_socket_file_of_another_server(loop, serve_unix, address_of):
    address = address_of("str")
    first = await serve_unix(Echo, address, cleanup_socket=True)
    second = await serve_unix(Echo, address, cleanup_socket=True)
    first.close()
    assert os.path.exists(address)
    with client_of(address) as peer:
        await peer.send(b"second")
        assert await peer.read_exactly(6) == b"second"
    os.unlink(address)
    second.close()
    await iterations(3)


# ---------------------------------------------------------------- sock= and other arguments


async def test_bound_socket(loop, serve_unix, address_of):
    address = address_of("str")
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(address)
    server = await serve_unix(Echo, sock=sock)
    assert not sock.getblocking()
    with client_of(address) as peer:
        await peer.send(b"x")
        assert await peer.read_exactly(1) == b"x"
    server.close()
    assert sock.fileno() == -1
    await iterations(3)


async def test_start_serving_later(loop, serve_unix, address_of):
    address = address_of("str")
    server = await serve_unix(Echo, address, start_serving=False)
    assert not server.is_serving()
    with pytest.raises(ConnectionRefusedError):
        client_of(address)
    await server.start_serving()
    assert server.is_serving()
    with client_of(address) as peer:
        await peer.send(b"x")
        assert await peer.read_exactly(1) == b"x"
    server.close()
    await iterations(3)


@pytest.mark.skip_on(uvloop="the texts differ")
async def test_arguments_that_contradict_each_other(loop, address_of):
    address = address_of("str")
    cases = [
        ({"ssl": True, "path": address}, TypeError, "ssl argument must be an SSLContext or None"),
        ({"ssl_handshake_timeout": 1}, ValueError, "ssl_handshake_timeout is only meaningful with ssl"),
        ({"ssl_shutdown_timeout": 1}, ValueError, "ssl_shutdown_timeout is only meaningful with ssl"),
        ({}, ValueError, "path was not specified, and no sock specified"),
    ]
    for arguments, kind, text in cases:
        with pytest.raises(kind) as caught:
            await loop.create_unix_server(Echo, **arguments)
        assert str(caught.value) == text
    with socket.socket(socket.AF_UNIX) as sock:
        with pytest.raises(ValueError, match="path and sock can not be specified at the same time"):
            await loop.create_unix_server(Echo, address, sock=sock)
    for family, type_ in ((socket.AF_INET, socket.SOCK_STREAM), (socket.AF_UNIX, socket.SOCK_DGRAM)):
        with socket.socket(family, type_) as sock:
            with pytest.raises(ValueError) as caught:
                await loop.create_unix_server(Echo, sock=sock)
            assert str(caught.value) == f"A UNIX Domain Stream Socket was expected, got {sock!r}"
    assert not os.path.exists(address)


async def test_server_closes_no_client(loop, serve_unix, address_of):
    address = address_of("str")
    server = await serve_unix(Echo, address)
    with client_of(address) as peer:
        await peer.send(b"a")
        assert await peer.read_exactly(1) == b"a"
        server.close()
        await peer.send(b"b")
        assert await peer.read_exactly(1) == b"b"
    await iterations(3)


@pytest.mark.xfail_on(uvloop="has no such method")
@pytest.mark.xfail_on(when=sys.version_info < (3, 13), asyncio="a new method of 3.13")
@pytest.mark.parametrize("way", ["close_clients", "abort_clients"])
async def test_clients_can_be_closed(loop, serve_unix, address_of, way):
    address = address_of("str")
    server = await serve_unix(Echo, address)
    with client_of(address) as peer:
        await peer.send(b"a")
        assert await peer.read_exactly(1) == b"a"
        server.close()
        getattr(server, way)()
        assert await peer.is_ended()
        await server.wait_closed()
    await iterations(3)


@pytest.mark.skip_on(asyncio="reports nothing and leaves the client waiting", uvloop="leaves the client waiting")
async def test_a_factory_that_raises_closes_its_connection(loop, reported, serve_unix, address_of):
    answers = iter([LookupError("no"), Echo()])

    def factory():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    address = address_of("str")
    server = await serve_unix(factory, address)
    with client_of(address) as first:
        assert await first.is_ended()
    assert [type(error) for error in reported.exceptions] == [LookupError]
    with client_of(address) as second:
        await second.send(b"x")
        assert await second.read_exactly(1) == b"x"
    server.close()
    reported.clear()
    await iterations(3)
