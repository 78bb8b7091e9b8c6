"""Datagrams in both directions: sizes, order, many at once, kinds of addresses, the protocol's context."""

from __future__ import annotations

import asyncio
import contextvars
import socket
import sys

import pytest
from support import HOST, has_ipv6, iterations, until
from transports.udp.endpoints import Datagrams, EchoDatagrams, endpoint, finish, raw_socket, received_by

SENDS_EMPTY = sys.version_info >= (3, 13)


@pytest.mark.parametrize("size", [1, 1024, 1472, 9000, 65507])
async def test_sizes(loop, size):
    _, server, address = await endpoint(loop, EchoDatagrams)
    transport, client, own = await endpoint(loop, remote_addr=address)
    data = bytes(index % 251 for index in range(size))
    transport.sendto(data)
    await until(lambda: client.received)
    assert server.received == [(data, own)]
    assert client.received == [(data, address)]
    await finish(server, client)


async def test_more_than_fits(loop):
    transport, protocol, address = await endpoint(loop)
    transport.sendto(bytes(65508), address)
    transport.sendto(b"fits", address)
    await until(lambda: protocol.received)
    assert protocol.received == [(b"fits", address)]
    [error] = protocol.errors
    assert error.strerror == "Message too long"
    assert not transport.is_closing()
    await finish(protocol)


async def test_empty_datagrams_are_received(loop):
    _, protocol, address = await endpoint(loop)
    with raw_socket() as peer:
        for data in (b"one", b"", b"", b"two"):
            peer.sendto(data, address)
        await until(lambda: len(protocol.received) == 4)
        assert protocol.received == [(data, peer.getsockname()) for data in (b"one", b"", b"", b"two")]
    await finish(protocol)


@pytest.mark.xfail_on(when=SENDS_EMPTY, uvloop="never sends empty datagrams")
@pytest.mark.parametrize("is_connected", [False, True])
async def test_empty_datagrams_are_sent_as_by_this_version_of_asyncio(loop, is_connected):
    with raw_socket() as peer:
        address = peer.getsockname()
        transport, protocol, _ = await endpoint(loop, **({"remote_addr": address} if is_connected else {}))
        for data in (b"", b"one", bytearray(), memoryview(b"")):
            transport.sendto(data, address)
        expected = [b"", b"one", b"", b""] if SENDS_EMPTY else [b"one"]
        assert await received_by(peer, len(expected)) == expected
        await finish(protocol)
        with pytest.raises(BlockingIOError):
            peer.recv(1)


async def test_order_is_kept_over_many(loop):
    """The datagrams of two senders are interleaved, and too many for one batch (what one system call receives)."""
    _, server, address = await endpoint(loop, EchoDatagrams)
    with raw_socket() as left, raw_socket() as right:
        sent = []
        for number in range(100):
            sender = (left, right, left, left)[number % 4]
            sent.append((b"%d" % number, sender.getsockname()))
            sender.sendto(sent[-1][0], address)
        await until(lambda: len(server.received) == 100)
        assert server.received == sent
        for sock in (left, right):
            expected = [data for data, address in sent if address == sock.getsockname()]
            assert await received_by(sock, len(expected)) == expected
    await finish(server)


async def test_many_clients(loop):
    _, server, address = await endpoint(loop, EchoDatagrams)
    clients = [(await endpoint(loop, remote_addr=address))[1] for _ in range(40)]
    for number in range(5):
        for index, client in enumerate(clients):
            client.transport.sendto(b"%d:%d" % (index, number))
        await until(lambda: all(len(client.received) == number + 1 for client in clients))
    for index, client in enumerate(clients):
        assert client.received == [(b"%d:%d" % (index, number), address) for number in range(5)]
    await finish(server, *clients)


async def test_addresses_of_senders_do_not_mix(loop):
    """Datagrams of one sender may share one address tuple. Each datagram still has the address of its own sender."""
    _, server, address = await endpoint(loop)
    with raw_socket() as left, raw_socket() as right:
        for sender in (left, left, right, left, right, right):
            sender.sendto(b"%d" % sender.getsockname()[1], address)
        await until(lambda: len(server.received) == 6)
    assert [data for data, _ in server.received] == [b"%d" % port for _, (_, port) in server.received]
    assert all(type(sender) is tuple and sender[0] == HOST for _, sender in server.received)
    await finish(server)


async def goes_to(loop, address_of):
    with raw_socket() as peer:
        transport, protocol, _ = await endpoint(loop)
        transport.sendto(b"hello", address_of(peer.getsockname()[1]))
        assert await received_by(peer) == [b"hello"]
        assert protocol.errors == []
        await finish(protocol)


@pytest.mark.parametrize(
    "address_of",
    [
        lambda port: (HOST, port),
        lambda port: type("Address", (tuple,), {})((HOST, port)),
        lambda port: (type("Host", (str,), {})(HOST), port),
        lambda port: (HOST, type("Port", (int,), {})(port)),
        lambda port: (HOST, type("Port", (), {"__index__": lambda _: port})()),
    ],
)
async def test_numeric_addresses(loop, address_of):
    await goes_to(loop, address_of)


@pytest.mark.skip_on(uvloop="resolves no addresses")
@pytest.mark.parametrize(
    "address_of",
    [
        lambda port: ("localhost", port),
        lambda port: ("", port),  # means 0.0.0.0, which Linux treats like 127.0.0.1 when it sends
        lambda port: ("0x7f000001", port),
        lambda port: (bytearray(b"127.0.0.1"), port),
    ],
)
async def test_addresses_that_the_socket_module_understands(loop, address_of):
    await goes_to(loop, address_of)


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
async def test_kinds_of_ipv6_addresses(loop):
    with raw_socket(socket.AF_INET6, ("::1", 0)) as peer:
        transport, protocol, _ = await endpoint(loop, local_addr=("::1", 0))
        port = peer.getsockname()[1]
        host = type("Host", (str,), {})("::1")
        addresses = [("::1", port), ("0::1", port, 0), ("::1", port, 7, 0), (host, port), ("::0.0.0.1", port)]
        for address in addresses:
            transport.sendto(str(address).encode(), address)
        assert await received_by(peer, len(addresses)) == [str(address).encode() for address in addresses]
        assert protocol.errors == []
        await finish(protocol)


async def test_bytes_like_data(loop):
    transport, protocol, address = await endpoint(loop)
    mutable = bytearray(b"bytearray")
    for data in (b"bytes", mutable, memoryview(b"-memoryview-")[1:-1], type("Bytes", (bytes,), {})(b"subclass")):
        transport.sendto(data, address)
    mutable[:] = b"changed.."
    await until(lambda: len(protocol.received) == 4)
    assert protocol.data == [b"bytes", b"bytearray", b"memoryview", b"subclass"]
    transport.sendto(data=b"keywords", addr=address)
    await until(lambda: len(protocol.received) == 5)
    await finish(protocol)


@pytest.mark.xfail_on(uvloop="another text")
@pytest.mark.parametrize(("data", "kind"), [("text", "str"), (None, "NoneType"), ([1], "list")])
async def test_data_of_a_wrong_type(loop, data, kind):
    transport, protocol, address = await endpoint(loop)
    with pytest.raises(TypeError, match=f"^data argument must be a bytes-like object, not '{kind}'$"):
        transport.sendto(data, address)
    assert not transport.is_closing()
    await finish(protocol)


async def test_replies_leave_while_the_batch_is_delivered(loop):
    """When datagram_received replies, the reply has left as soon as sendto() returns."""
    seen = []

    class Impatient(Datagrams):
        def datagram_received(self, data, addr):
            super().datagram_received(data, addr)
            self.transport.sendto(data, addr)
            seen.append(peer.recv(100))

    _, server, address = await endpoint(loop, Impatient)
    with raw_socket() as peer:
        for number in range(20):
            peer.sendto(b"%d" % number, address)
        await until(lambda: len(server.received) == 20)
        assert seen == server.data
    await finish(server)


async def test_callbacks_run_in_the_context_of_the_endpoint(loop):
    variable = contextvars.ContextVar("variable")
    seen = []

    class Looking(Datagrams):
        def connection_made(self, transport):
            super().connection_made(transport)
            seen.append(variable.get())

        def datagram_received(self, data, addr):
            super().datagram_received(data, addr)
            seen.append(variable.get())
            variable.set(f"after {data!r}")

        def connection_lost(self, exc):
            super().connection_lost(exc)
            seen.append(variable.get(None))

    variable.set("made here")
    transport, protocol, address = await endpoint(loop, Looking)
    variable.set("later")
    for data in (b"1", b"2"):
        transport.sendto(data, address)
    await until(lambda: len(protocol.received) == 2)
    assert seen[0] == "made here"
    assert seen[1] == "made here"
    await finish(protocol)
    assert variable.get() == "later"


async def test_set_protocol(loop):
    transport, first, address = await endpoint(loop)
    second = Datagrams()
    transport.set_protocol(second)
    assert transport.get_protocol() is second
    transport.sendto(b"hello", address)
    await until(lambda: second.received)
    assert first.received == []
    transport.close()
    await until(lambda: second.is_lost)
    assert first.events == ["made"]
    await iterations(2)


@pytest.mark.skip_on(uvloop="delivers a whole batch to the first protocol")
async def test_set_protocol_inside_a_batch(loop):
    second = Datagrams()

    class Leaving(Datagrams):
        def datagram_received(self, data, addr):
            super().datagram_received(data, addr)
            self.transport.set_protocol(second)

    _, first, address = await endpoint(loop, Leaving)
    with raw_socket() as peer:
        for number in range(5):
            peer.sendto(b"%d" % number, address)
        await until(lambda: len(second.received) == 4)
    assert first.data == [b"0"]
    assert second.data == [b"1", b"2", b"3", b"4"]
    first.transport.close()
    await until(lambda: second.is_lost)
    await iterations(2)


async def test_other_work_goes_on_beside_a_flood(loop):
    """A socket that always has data does not keep callbacks from running."""
    _, server, address = await endpoint(loop, EchoDatagrams)
    _, mirror, _ = await endpoint(loop, EchoDatagrams, remote_addr=address)
    for _ in range(50):
        mirror.transport.sendto(b"forever")
    ran = 0
    while len(server.received) < 2000:
        before = len(server.received)
        await asyncio.sleep(0)
        ran += 1
        assert len(server.received) - before <= 200
    assert ran >= 10
    await finish(server, mirror)


async def test_an_endpoint_that_is_bound_to_every_address(loop):
    """Answers go to the sender of the datagram."""
    transport, server, (_, port) = await endpoint(loop, EchoDatagrams, local_addr=("0.0.0.0", 0))
    with raw_socket() as peer:
        peer.sendto(b"hello", (HOST, port))
        assert await received_by(peer) == [b"hello"]
    assert transport.get_extra_info("sockname") == ("0.0.0.0", port)
    await finish(server)
