"""create_connection: arguments, errors, races between addresses."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import sys

import pytest
from support import HOST, Peer, Recorder, free_port, has_ipv6, link_local_address, listening, raw_pair, until

from grapeshot._loop.fixes import SHOWS_WHOLE_ERROR

ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")


async def finish(protocol):
    if protocol.transport is not None:
        protocol.transport.close()
    await until(lambda: protocol.is_lost)


async def test_connects(loop):
    with listening() as listener:
        transport, protocol = await loop.create_connection(Recorder, *listener.getsockname())
        assert protocol.transport is transport
        assert protocol.events == ["made"]
        accepted, address = listener.accept()
        assert transport.get_extra_info("sockname") == address
        assert transport.get_extra_info("peername") == listener.getsockname()
        accepted.close()
        await finish(protocol)


@ipv6
async def test_ipv6(loop):
    with listening(socket.AF_INET6, "::1") as listener:
        transport, protocol = await loop.create_connection(Recorder, "::1", listener.getsockname()[1])
        assert transport.get_extra_info("peername") == listener.getsockname()
        assert len(transport.get_extra_info("sockname")) == 4
        await finish(protocol)


@pytest.mark.skipif(link_local_address() is None, reason="no link-local address here")
async def test_link_local_addresses_have_their_scope_beside_the_host(loop):
    host, scope_id = link_local_address()
    with socket.socket(socket.AF_INET6) as listener:
        listener.bind((host, 0, 0, scope_id))
        listener.listen()
        address = listener.getsockname()
        transport, protocol = await loop.create_connection(Recorder, f"{host}%{scope_id}", address[1])
        assert transport.get_extra_info("peername") == address == (host, address[1], 0, scope_id)
        sock = transport.get_extra_info("socket")
        assert transport.get_extra_info("sockname") == sock.getsockname()
        await finish(protocol)


@pytest.mark.parametrize("host", ["localhost", b"127.0.0.1", "127.0.0.1"])
async def test_kinds_of_host(loop, host):
    with listening() as listener:
        port = listener.getsockname()[1]
        transport, protocol = await loop.create_connection(Recorder, host, port, family=socket.AF_INET)
        assert transport.get_extra_info("peername") == (HOST, port)
        await finish(protocol)


async def test_no_host_is_the_loopback(loop):
    with listening() as listener:
        port = listener.getsockname()[1]
        _, protocol = await loop.create_connection(Recorder, None, port, family=socket.AF_INET)
        await finish(protocol)


async def test_port_as_text(loop):
    with listening() as listener:
        _, protocol = await loop.create_connection(Recorder, HOST, str(listener.getsockname()[1]))
        await finish(protocol)


async def test_local_addr(loop):
    port = free_port()
    with listening() as listener:
        transport, protocol = await loop.create_connection(Recorder, *listener.getsockname(), local_addr=(HOST, port))
        assert transport.get_extra_info("sockname") == (HOST, port)
        accepted, _ = listener.accept()
        accepted.close()  # this end closes first, so that the TIME_WAIT state is not on `port`
        await until(lambda: protocol.is_lost)


@pytest.mark.xfail_on(uvloop="its message only describes the errno")
async def test_local_addr_in_use(loop):
    with listening() as listener, listening() as other:
        address = other.getsockname()
        with pytest.raises(OSError) as caught:
            await loop.create_connection(Recorder, *listener.getsockname(), local_addr=address)
        text = f"[errno {errno.EADDRINUSE}] address already in use" if SHOWS_WHOLE_ERROR else "address already in use"
        assert caught.value.strerror == f"error while attempting to bind on address {address!r}: {text}"


async def test_sock(loop):
    with listening() as listener:
        sock = socket.create_connection(listener.getsockname())
        sock.setblocking(False)
        transport, protocol = await loop.create_connection(Recorder, sock=sock)
        assert transport.get_extra_info("socket").fileno() >= 0
        with Peer(listener.accept()[0]) as peer:
            await peer.send(b"hello")
            await until(lambda: protocol.data == b"hello")
            await finish(protocol)
        assert sock.fileno() == -1


async def test_a_nonblocking_sock_is_accepted(loop):
    client, other = raw_pair()
    with other:
        client.setblocking(False)
        _, protocol = await loop.create_connection(Recorder, sock=client)
        await finish(protocol)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "host and port was not specified and no sock specified"),
        ({"host": "h", "port": 1, "sock": True}, "host/port and sock can not be specified at the same time"),
        ({"host": "h", "port": 1, "server_hostname": "x"}, "server_hostname is only meaningful with ssl"),
        ({"host": "h", "port": 1, "ssl_handshake_timeout": 1}, "ssl_handshake_timeout is only meaningful with ssl"),
        ({"host": "h", "port": 1, "ssl_shutdown_timeout": 1}, "ssl_shutdown_timeout is only meaningful with ssl"),
    ],
)
async def test_arguments_that_do_not_go_together(loop, kwargs, message):
    with socket.socket() as sock:
        if "sock" in kwargs:
            kwargs = {**kwargs, "sock": sock}
        with pytest.raises(ValueError, match=message):
            await loop.create_connection(Recorder, **kwargs)


async def test_a_datagram_socket_is_refused(loop):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        with pytest.raises(ValueError, match="A Stream Socket was expected"):
            await loop.create_connection(Recorder, sock=sock)


async def test_refused(loop):
    with pytest.raises(ConnectionRefusedError) as caught:
        await loop.create_connection(Recorder, HOST, free_port())
    assert caught.value.errno is not None


@pytest.mark.xfail_on(uvloop="its message only describes the errno")
async def test_the_message_of_a_refusal(loop):
    port = free_port()
    with pytest.raises(ConnectionRefusedError, match=r"Connect call failed \('127.0.0.1', %d\)" % port):
        await loop.create_connection(Recorder, HOST, port)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="all_errors is new in 3.12")
@pytest.mark.xfail_on(uvloop="#406: no such argument")
async def test_all_errors(loop):
    with pytest.raises(ExceptionGroup, match="create_connection failed") as caught:
        await loop.create_connection(Recorder, HOST, free_port(), all_errors=True)
    assert [type(error) for error in caught.value.exceptions] == [ConnectionRefusedError]


def answers(*addresses):
    async def getaddrinfo(host, port, **_kwargs):
        return [
            (socket.AF_INET6 if ":" in each else socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port))
            for each in addresses
        ]

    return getaddrinfo


def subclassed(loop, *addresses):
    """Return a loop of the same kind that resolves all names to the given addresses."""

    class Resolving(type(loop)):
        getaddrinfo = staticmethod(answers(*addresses))

    return Resolving()


def run_on(other, coroutine_function):
    try:
        other.run_until_complete(coroutine_function())
        other.run_until_complete(asyncio.sleep(0))
    finally:
        other.close()


def test_several_errors_in_one_message(loop, loop_kind):
    if loop_kind == "uvloop":
        pytest.skip("uvloop does not resolve with its method getaddrinfo()")
    other, port = subclassed(loop, "127.0.0.1", "127.0.0.2"), free_port()

    async def main():
        with pytest.raises(OSError, match=r"Multiple exceptions: .*127\.0\.0\.1.*127\.0\.0\.2"):
            await other.create_connection(Recorder, "name", port)

    run_on(other, main)


def test_the_next_address_is_tried(loop, loop_kind):
    if loop_kind == "uvloop":
        pytest.skip("uvloop does not resolve with its method getaddrinfo()")
    other = subclassed(loop, "127.0.0.2", "127.0.0.3", HOST)

    async def main():
        with listening() as listener:
            transport, protocol = await other.create_connection(Recorder, "name", listener.getsockname()[1])
            assert transport.get_extra_info("peername")[0] == HOST
            await finish(protocol)

    run_on(other, main)


@pytest.mark.parametrize("arguments", [{"happy_eyeballs_delay": 0.01}, {"happy_eyeballs_delay": 0.01, "interleave": 2}])
def test_happy_eyeballs(loop, loop_kind, arguments):
    if loop_kind == "uvloop":
        pytest.skip("#406: no such arguments")
    # Nothing listens on the first two addresses, so the third one is connected.
    other = subclassed(loop, "127.0.0.2", "127.0.0.3", HOST)

    async def main():
        with listening() as listener:
            transport, protocol = await other.create_connection(
                Recorder, "name", listener.getsockname()[1], **arguments
            )
            assert transport.get_extra_info("peername")[0] == HOST
            await finish(protocol)
        with pytest.raises(OSError, match="Multiple exceptions"):
            await other.create_connection(Recorder, "name", free_port(), **arguments)

    run_on(other, main)


def test_the_slow_address_loses_the_race(loop, loop_kind):
    """The backlog at the first address is full, so the connection attempt there hangs. The second address answers."""
    if loop_kind == "uvloop":
        pytest.skip("#406: no such argument")
    other = subclassed(loop, "127.0.0.2", HOST)

    async def main():
        with listening() as listener, socket.socket() as full:
            port = listener.getsockname()[1]
            full.bind(("127.0.0.2", port))
            full.listen(0)
            blocked = []
            for _ in range(4):
                sock = socket.socket()
                sock.setblocking(False)
                sock.connect_ex(("127.0.0.2", port))
                blocked.append(sock)
            transport, protocol = await other.create_connection(Recorder, "name", port, happy_eyeballs_delay=0.005)
            assert transport.get_extra_info("peername") == (HOST, port)
            await finish(protocol)
            for sock in blocked:
                sock.close()

    run_on(other, main)


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize(
    ("options", "order"),
    [
        ({}, "66644"),
        ({"interleave": 1}, "64646"),
        ({"interleave": 2}, "66464"),
        ({"interleave": 9}, "66644"),
        ({"happy_eyeballs_delay": 60.0}, "64646"),
    ],
)
def test_interleave_orders_the_addresses(loop, loop_kind, options, order):
    """Each connect is refused. The error lists the addresses in the order of the attempts."""
    if loop_kind == "uvloop":
        pytest.skip("#406: no such argument")
    other, port, asked = subclassed(loop, "::1", "::1", "::1", "127.0.0.1", "127.0.0.2"), free_port(), []

    async def main():
        with pytest.raises(OSError, match="Multiple exceptions: ") as caught:
            await other.create_connection(Recorder, "name", port, **options)
        asked.extend(re.findall(r"call failed \('([^']+)'", str(caught.value)))

    run_on(other, main)
    assert "".join("6" if ":" in address else "4" for address in asked) == order


def test_no_addresses(loop, loop_kind):
    if loop_kind == "uvloop":
        pytest.skip("uvloop does not resolve with its method getaddrinfo()")
    other = subclassed(loop)

    async def main():
        with pytest.raises(OSError, match=r"getaddrinfo\(.*\) returned empty list"):
            await other.create_connection(Recorder, "name", 1)

    run_on(other, main)


@pytest.mark.skip_on(uvloop="calls the factory before it connects")
@pytest.mark.leaks_on(asyncio="the socket is left to the collector")
async def test_a_failing_factory(loop):
    def factory():
        raise LookupError("no protocol")

    with listening() as listener:
        with pytest.raises(LookupError, match="no protocol"):
            await loop.create_connection(factory, *listener.getsockname())
        with Peer(listener.accept()[0]) as peer:
            assert await peer.read_to_end() == b""


async def test_cancelled_while_connecting(loop):
    with socket.socket() as full:
        full.bind((HOST, 0))
        full.listen(0)
        blocked = [socket.socket() for _ in range(4)]
        for sock in blocked:
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        task = loop.create_task(loop.create_connection(Recorder, *full.getsockname()))
        await asyncio.sleep(0.002)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for sock in blocked:
            sock.close()


async def test_connect_timeout(loop):
    with socket.socket() as full:
        full.bind((HOST, 0))
        full.listen(0)
        blocked = [socket.socket() for _ in range(4)]
        for sock in blocked:
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.005):
                await loop.create_connection(Recorder, *full.getsockname())
        for sock in blocked:
            sock.close()


async def test_accepted_socket_arguments(loop):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, pytest.raises(ValueError, match="Stream Socket"):
        await loop.connect_accepted_socket(Recorder, sock)
    with socket.socket() as sock, pytest.raises(ValueError, match="only meaningful with ssl"):
        await loop.connect_accepted_socket(Recorder, sock, ssl_handshake_timeout=1)


async def test_a_unix_stream_socket(loop):
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    transport, protocol = await loop.connect_accepted_socket(Recorder, ours)
    with Peer(theirs) as peer:
        transport.write(b"over unix")
        assert await peer.read_exactly(9) == b"over unix"
        await peer.send(b"back")
        await until(lambda: protocol.data == b"back")
        await finish(protocol)


async def test_nodelay_is_set(loop):
    with listening() as listener:
        transport, protocol = await loop.create_connection(Recorder, *listener.getsockname())
        sock = transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
        await finish(protocol)


async def test_many_at_once(loop):
    with listening() as listener:
        pairs = await asyncio.gather(*(loop.create_connection(Recorder, *listener.getsockname()) for _ in range(100)))
        peers = [listener.accept()[0] for _ in pairs]
        for peer in peers:
            peer.close()
        await until(lambda: all(protocol.is_lost for _, protocol in pairs))
    assert all(protocol.events == ["made", "eof", "lost"] for _, protocol in pairs)
