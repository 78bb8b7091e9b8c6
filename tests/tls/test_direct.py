"""A TLS transport calls OpenSSL directly if it can, and otherwise uses `ssl.MemoryBIO`. Programs must not notice a
difference. (GRAPESHOT_MEMORY_BIO=1 selects MemoryBIO. `.ci/run` sets the variable for the tests on one version of
Python.)
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import ssl
import subprocess
import sys
import threading

import pytest
from fuzz.tls_model import HAS_LIBRARY, LIBRARY
from support import HOST, Echo, Recorder, loop_factory, until
from tls.contexts import HOSTNAME, certificate, client_context, server_context
from tls.endpoints import SIDES, connected
from tls.test_handshake import TLS12, TLS13

IS_OFF = os.environ.get("GRAPESHOT_MEMORY_BIO", "") not in {"", "0"}
TESTS = os.path.dirname(os.path.dirname(__file__))
ECHO = f"""
import asyncio, sys
sys.path[:0] = {[TESTS]!r}
from tls.contexts import HOSTNAME, client_context, server_context
import grapeshot

async def main():
    async def serve(reader, writer):
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server_context())
    address = server.sockets[0].getsockname()
    reader, writer = await asyncio.open_connection(*address, ssl=client_context(), server_hostname=HOSTNAME)
    for size in (1, 1000, 16_384, 16_385, 300_000):
        writer.write(bytes(size))
        assert len(await reader.readexactly(size)) == size
    writer.close()
    await writer.wait_closed()
    server.close()

grapeshot.run(main())
"""


def ways(code: str, **variables: str) -> list[str]:
    """Run the program. Return what each TLS connection calls according to the debug log: OpenSSL or MemoryBIO."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"GRAPESHOT_DEBUG": "tls"} | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return re.findall(r"and calls (\w+)", done.stderr)


@pytest.mark.skipif(not HAS_LIBRARY, reason="this Python does not load OpenSSL as a separate library")
@pytest.mark.parametrize(("value", "way"), [("", "OpenSSL"), ("0", "OpenSSL"), ("1", "MemoryBIO")])
def test_the_variable_selects_the_way(value, way):
    assert ways(ECHO, GRAPESHOT_MEMORY_BIO=value) == [way] * 2


def test_a_module_without_a_path():
    """In a frozen program, `_ssl` may have no path. TLS transports then use MemoryBIO."""
    assert ways("import _ssl\n_ssl.__file__ = None\n" + ECHO) == ["MemoryBIO"] * 2


# ---------------------------------------------------------------- the SSLObject that a program holds


@pytest.mark.parametrize("side", SIDES)
async def test_the_object_outlives_the_transport(loop, side):
    """After the transport has ended, the methods of the SSLObject still answer. They then read and write buffers that
    nothing else uses.
    """
    transport, protocol, peer = await connected(loop, Recorder, side)
    tls = transport.get_extra_info("ssl_object")
    await peer.write(b"hello")
    await until(lambda: bytes(protocol.data) == b"hello")
    transport.abort()
    await until(lambda: protocol.is_lost)
    peer.close()
    del transport
    gc.collect()
    assert tls.cipher() is not None
    assert tls.pending() == 0
    assert tls.write(b"x" * 40_000) == 40_000
    with pytest.raises(ssl.SSLWantReadError):
        tls.read(1)


class Replacing(ssl.SSLContext):
    """Calls `change` with the two BIOs and the object that `wrap_bio` returns."""

    change = None

    def wrap_bio(self, incoming, outgoing, **options):
        made = super().wrap_bio(incoming, outgoing, **options)
        self.change(incoming, outgoing, made)
        return made


def do_nothing(_incoming, _outgoing, _made):
    pass


def begin_handshake(_incoming, _outgoing, made):
    with pytest.raises(ssl.SSLWantReadError):
        made.do_handshake()


def make_others(_incoming, _outgoing, made):
    for _ in range(3):
        ssl.SSLContext.wrap_bio(made.context, ssl.MemoryBIO(), ssl.MemoryBIO(), server_side=made.server_side)
    gc.collect()


@pytest.mark.parametrize("change", [do_nothing, begin_handshake, make_others])
@pytest.mark.parametrize("side", SIDES)
async def test_a_context_with_a_wrap_bio_of_its_own(loop, side, change):
    """The `wrap_bio` of a context class may use the BIOs before the transport does, and may make further SSLObjects."""
    context = Replacing(ssl.PROTOCOL_TLS_SERVER if side == "server" else ssl.PROTOCOL_TLS_CLIENT)
    context.change = change
    if side == "server":
        certificate(HOSTNAME).configure_cert(context)
    else:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    transport, protocol, peer = await connected(loop, Recorder, side, ours=context)
    transport.write(b"ours")
    assert await peer.read() == b"ours"
    await peer.write(b"theirs")
    await until(lambda: bytes(protocol.data) == b"theirs")
    transport.abort()
    peer.close()


LEAK = "_ssl keeps the exception, whose frames lead to the task of the test"


@pytest.mark.leaks_on(grapeshot=LEAK, asyncio=LEAK)
async def test_a_message_callback_that_raises_ends_the_connection(loop):
    """If the callback raises during a read from OpenSSL, that read raises the callback's exception, as in asyncio."""
    raising, reported = [], []
    loop.set_exception_handler(lambda _loop, context: reported.append(context["exception"]))

    def callback(*_args):
        if raising:
            raise raising[0]

    context = server_context()
    context._msg_callback = callback
    _transport, protocol, peer = await connected(loop, Recorder, "server", ours=context)
    raising.append(RuntimeError("raised by the callback"))
    await peer.write(b"hello")
    await until(lambda: protocol.is_lost)
    assert protocol.lost_with == raising
    assert reported == raising
    peer.close()
    context._msg_callback = None


class Sipping(asyncio.Protocol):
    """Pauses reading after each piece of data, for a moment."""

    def __init__(self):
        self.count = 0

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.count += len(data)
        self.transport.pause_reading()
        asyncio.get_running_loop().call_later(0.0005, self.transport.resume_reading)


class Filling(asyncio.BufferedProtocol):
    def __init__(self):
        self.count, self.buffer = 0, bytearray(65536)

    def get_buffer(self, _hint):
        return self.buffer

    def buffer_updated(self, count):
        self.count += count


@pytest.mark.parametrize("factory", [Sipping, Filling])
async def test_what_was_read_does_not_stay_in_memory(loop, factory):
    """The memory is reused or freed even if each read leaves a part of a record unread."""
    psutil = pytest.importorskip("psutil")
    transport, protocol, peer = await connected(loop, factory, "server")
    process, piece = psutil.Process(), bytes(100_000)

    async def send(total):
        end = protocol.count + total
        for _ in range(total // len(piece)):
            await peer.write(piece)
        await until(lambda: protocol.count == end)

    await send(10_000_000)
    before = process.memory_info().rss
    await send(100_000_000)
    assert process.memory_info().rss - before < 30_000_000
    transport.abort()
    peer.close()


async def test_methods_of_the_object_in_another_thread(loop, serve):
    """The methods of the SSLObject may run at any moment, also while the loop reads or writes."""
    server = await serve(Echo, HOST, 0, ssl=server_context())
    address = server.sockets[0].getsockname()
    reader, writer = await asyncio.open_connection(*address, ssl=client_context(), server_hostname=HOSTNAME)
    tls, is_over, failures = writer.get_extra_info("ssl_object"), threading.Event(), []

    def ask():
        try:
            while not is_over.is_set():
                assert tls.cipher()
                tls.version()
                # On asyncio's loop, getpeercert() raises "handshake not done yet" while a session ticket is read.
                with contextlib.suppress(ValueError):
                    assert tls.getpeercert()
                assert tls.selected_alpn_protocol() is None
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for size in [1, 100, 16_384, 70_000] * 25:
            writer.write(bytes(size))
            assert len(await reader.readexactly(size)) == size
    finally:
        is_over.set()
        thread.join()
        writer.close()
    assert failures == []


# ---------------------------------------------------------------- errors


@pytest.mark.skipif(not hasattr(LIBRARY, "ERR_set_error"), reason="this Python's OpenSSL is older than 3.0")
@pytest.mark.skipif(IS_OFF, reason="with MemoryBIO, the next call to OpenSSL raises the error, as on asyncio's loop")
@pytest.mark.only_on("grapeshot")
async def test_errors_that_other_code_has_left_end_no_connection(loop, serve):
    """OpenSSL has one queue of errors per thread, and every library that uses OpenSSL puts its errors there."""
    server = await serve(Echo, HOST, 0, ssl=server_context())
    address = server.sockets[0].getsockname()

    def leave_error():
        LIBRARY.ERR_new()
        LIBRARY.ERR_set_error(9, 100, None)  # PEM_R_BAD_BASE64_DECODE

    try:
        transport, protocol = await loop.create_connection(
            Recorder, *address, ssl=client_context(), server_hostname=HOSTNAME
        )
        leave_error()
        transport.write(b"hello")
        await until(lambda: bytes(protocol.data) == b"hello")
        leave_error()
        transport.close()
        await until(lambda: protocol.is_lost)
        assert protocol.lost_with == [None]
    finally:
        LIBRARY.ERR_clear_error()


def spoiled(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


FAULTS = {
    "a record that was changed": lambda peer: spoiled(peer.seal(b"hello")),
    "no record": lambda _peer: b"GET / HTTP/1.1\r\n\r\n",
    "a record of an unknown type": lambda _peer: b"\x63\x03\x03\x00\x04abcd",
    "a record that is too long": lambda _peer: b"\x17\x03\x03\xff\xff" + bytes(65535),
    "an alert in plaintext": lambda _peer: b"\x15\x03\x03\x00\x02\x02\x28",
}


def described(error: BaseException) -> tuple:
    """The whole exception, without the line number of _ssl.c."""
    text = re.sub(r"_ssl\.c:\d+", "_ssl.c", str(error))
    attributes = [getattr(error, name, None) for name in ("reason", "library", "errno")]
    return type(error), text, *attributes


async def failure(loop, version, fault):
    ours, theirs = server_context(version=version), client_context(version)
    transport, protocol, peer = await connected(loop, Recorder, "server", ours=ours, theirs=theirs)
    await peer.write(b"before")
    await until(lambda: bytes(protocol.data) == b"before")
    await peer.peer.send(FAULTS[fault](peer))
    await until(lambda: protocol.is_lost)
    (error,) = protocol.lost_with
    assert transport.is_closing()
    peer.close()
    return described(error)


@pytest.mark.parametrize("version", [TLS12, TLS13], ids=["1.2", "1.3"])
@pytest.mark.parametrize("fault", FAULTS)
def test_errors_are_those_of_python(fault, version):
    seen = []
    for kind in ("grapeshot", "asyncio"):
        loop = loop_factory(kind)()
        try:
            seen.append(loop.run_until_complete(failure(loop, version, fault)))
        finally:
            loop.close()
    ours, theirs = seen
    assert ours == theirs
    assert issubclass(ours[0], ssl.SSLError)
