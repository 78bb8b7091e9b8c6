"""Paused reading, unusual ends, and errors of the socket and of the protocol that do not end the endpoint."""

from __future__ import annotations

import asyncio
import errno
import gc
import weakref

import pytest
from support import HOST, iterations, run_script, until
from transports.udp.endpoints import (
    Datagrams,
    EchoDatagrams,
    endpoint,
    finish,
    logged,
    opened,
    raw_socket,
    received_by,
    unused_address,
)


class Broken(LookupError):
    pass


def failing(name, kind=Broken, base=Datagrams):
    def fails(self, *args):
        getattr(base, name)(self, *args)
        raise kind(name)

    return type("Failing", (base,), {name: fails})


# ---------------------------------------------------------------- the socket's errors


async def test_continues_after_a_refusal(loop):
    """uvloop #338: a connected socket gets the ICMP error and continues to work."""
    address = unused_address()
    transport, protocol, own = await endpoint(loop, remote_addr=address)
    for count in (1, 2):
        transport.sendto(b"anyone?")
        await until(lambda: len(protocol.errors) == count)
    assert [type(error) for error in protocol.errors] == [ConnectionRefusedError] * 2
    assert [error.errno for error in protocol.errors] == [errno.ECONNREFUSED] * 2
    assert not transport.is_closing()
    with raw_socket(address=address) as peer:
        transport.sendto(b"now?")
        assert await received_by(peer) == [b"now?"]
        peer.sendto(b"yes", own)
        await until(lambda: protocol.received)
    assert protocol.received == [(b"yes", address)]
    await finish(protocol)


async def test_a_refusal_that_sendto_reports(loop):
    """The refusal of the first datagram arrives at once. The second call reports it instead of sending its datagram."""
    transport, protocol, _ = await endpoint(loop, remote_addr=unused_address())
    transport.sendto(b"one")
    transport.sendto(b"two")
    transport.sendto(b"three")
    assert [type(error) for error in protocol.errors] == [ConnectionRefusedError]
    await until(lambda: len(protocol.errors) == 2)
    await finish(protocol)


async def test_refusals_inside_a_batch(loop):
    deaf = unused_address()
    transport, protocol, address = await endpoint(loop, EchoDatagrams)
    with raw_socket(address=deaf) as peer:
        for number in range(5):
            peer.sendto(b"%d" % number, address)
    await until(lambda: len(protocol.received) == 5)
    await iterations(3)
    assert protocol.errors == []
    assert not transport.is_closing()
    await finish(protocol)


# ---------------------------------------------------------------- the protocol's errors


async def test_an_error_in_datagram_received_is_only_reported(loop, reported):
    transport, protocol, address = await endpoint(loop, failing("datagram_received"))
    with raw_socket() as peer:
        for number in range(3):
            peer.sendto(b"%d" % number, address)
        await until(lambda: len(reported) == 3)
    assert protocol.data == [b"0", b"1", b"2"]
    assert [type(exception) for exception in reported.exceptions] == [Broken] * 3
    assert not transport.is_closing()
    reported.clear()
    await finish(protocol)


@pytest.mark.skip_on(uvloop="loses one of the errors")
async def test_an_error_in_error_received_is_only_reported(loop, reported):
    transport, protocol, _ = await endpoint(loop, failing("error_received"), remote_addr=unused_address())
    for count in (1, 2):
        transport.sendto(b"anyone?")
        await until(lambda: len(reported) == count)
    assert [type(exception) for exception in reported.exceptions] == [Broken] * 2
    assert not transport.is_closing()
    reported.clear()
    await finish(protocol)


@pytest.mark.xfail_on(asyncio="reports the handle of its own method", uvloop="no message")
async def test_the_report_names_transport_and_protocol(loop, reported):
    transport, protocol, address = await endpoint(loop, failing("datagram_received"))
    transport.sendto(b"x", address)
    await until(lambda: reported)
    [context] = reported
    assert context["message"] == "Exception in callback protocol.datagram_received()"
    assert context["transport"] is transport
    assert context["protocol"] is protocol
    reported.clear()
    await finish(protocol)


async def test_error_received_that_raises_inside_sendto(loop):
    """The caller of sendto gets the exception."""
    transport, protocol, _ = await endpoint(loop, failing("error_received"), local_addr=(HOST, 0))
    with pytest.raises(Broken):
        transport.sendto(b"everybody", ("255.255.255.255", 9))
    assert not transport.is_closing()
    await finish(protocol)


@pytest.mark.skip_on(uvloop="receives nothing after the error")
async def test_connection_made_that_raises(loop, reported):
    transport, protocol, address = await endpoint(loop, failing("connection_made"))
    transport.sendto(b"hello", address)
    await until(lambda: protocol.received)
    assert [type(exception) for exception in reported.exceptions] == [Broken]
    reported.clear()
    await finish(protocol)


async def test_connection_lost_that_raises(loop, reported):
    transport, protocol, _ = await endpoint(loop, failing("connection_lost"))
    sock = transport.get_extra_info("socket")
    transport.close()
    await until(lambda: reported)
    assert [type(exception) for exception in reported.exceptions] == [Broken]
    assert sock.fileno() == -1
    reported.clear()
    await iterations(2)
    assert protocol.events == ["made", "lost"]


async def test_a_protocol_without_the_methods(loop, reported):
    transport, protocol = await loop.create_datagram_endpoint(asyncio.BaseProtocol, local_addr=(HOST, 0))
    transport.sendto(b"x", transport.get_extra_info("sockname"))
    await until(lambda: reported)
    assert {type(exception) for exception in reported.exceptions} <= {AttributeError, TypeError}
    assert transport.get_protocol() is protocol
    reported.clear()
    transport.close()
    await iterations(5)


@pytest.mark.skip_on(uvloop="reports the interrupt like any error")
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_loses_no_datagram(loop, kind):
    class Leaving(Datagrams):
        def datagram_received(self, data, addr):
            super().datagram_received(data, addr)
            if data == b"leave":
                raise kind

    protocols = []

    async def start():
        _, protocol, address = await endpoint(loop, Leaving)
        protocols.append(protocol)
        with raw_socket() as peer:
            for data in (b"1", b"leave", b"2", b"leave", b"3"):
                peer.sendto(data, address)
        await until(lambda: len(protocol.received) == 5)

    task = loop.create_task(start())
    for _ in range(2):
        with pytest.raises(kind):
            loop.run_until_complete(task)
    loop.run_until_complete(task)
    assert protocols[0].data == [b"1", b"leave", b"2", b"leave", b"3"]
    loop.run_until_complete(finish(*protocols))


@pytest.mark.skip_on(uvloop="reports the interrupt like any error")
def test_an_interrupt_in_connection_made_keeps_the_endpoint(loop):
    class Leaving(Datagrams):
        def connection_made(self, transport):
            super().connection_made(transport)
            raise KeyboardInterrupt

    protocols = []

    async def start():
        _, protocol, address = await endpoint(loop, Leaving)
        protocols.append(protocol)
        with raw_socket() as peer:
            peer.sendto(b"works", address)
        await until(lambda: protocol.data == [b"works"])

    task = loop.create_task(start())
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(task)
    loop.run_until_complete(task)
    loop.run_until_complete(finish(*protocols))


# ---------------------------------------------------------------- pausing


@pytest.mark.skip_on(uvloop="no such methods")
async def test_pause_reading_inside_a_batch(loop):
    class Pausing(Datagrams):
        def datagram_received(self, data, addr):
            super().datagram_received(data, addr)
            self.transport.pause_reading()

    transport, protocol, address = await endpoint(loop, Pausing)
    with raw_socket() as peer:
        for number in range(5):
            peer.sendto(b"%d" % number, address)
        for count in range(1, 6):
            await until(lambda: len(protocol.received) == count)
            await iterations(3)
            assert len(protocol.received) == count
            assert not transport.is_reading()
            transport.resume_reading()
            assert transport.is_reading()
            transport.resume_reading()
    assert protocol.data == [b"0", b"1", b"2", b"3", b"4"]
    await finish(protocol)
    assert not transport.is_reading()


@pytest.mark.skip_on(uvloop="no such methods")
async def test_closed_while_paused_inside_a_batch(loop):
    class Pausing(Datagrams):
        def datagram_received(self, data, addr):
            super().datagram_received(data, addr)
            self.transport.pause_reading()

    transport, protocol, address = await endpoint(loop, Pausing)
    with raw_socket() as peer:
        for number in range(5):
            peer.sendto(b"%d" % number, address)
        await until(lambda: protocol.received)
    transport.close()
    transport.resume_reading()
    await until(lambda: protocol.is_lost)
    await iterations(3)
    assert protocol.data == [b"0"]


# ---------------------------------------------------------------- ends


@pytest.mark.xfail_on(uvloop="gives other warnings")
def test_a_loop_closed_over_open_endpoints(loop_kind):
    out = run_script(
        loop_kind,
        """
        import asyncio, gc, warnings
        warnings.simplefilter("always")
        shown = []
        warnings.showwarning = lambda message, category, *rest: shown.append((category, str(message)))
        async def main():
            return await asyncio.get_running_loop().create_datagram_endpoint(
                asyncio.DatagramProtocol, local_addr=("127.0.0.1", 0))
        loop = new_event_loop()
        transport, protocol = loop.run_until_complete(main())
        sock = transport.get_extra_info("socket")
        name = repr(transport).split()[0]
        loop.close()
        del transport, protocol
        gc.collect()
        print(sock.fileno() == -1)
        print([text.startswith(f"unclosed transport {name}") for kind, text in shown if kind is ResourceWarning])
        """,
    )
    assert out.splitlines() == ["True", "[True]"]


async def test_a_closed_endpoint_is_not_kept(loop):
    transport, protocol, _ = await endpoint(loop)
    protocol.itself = transport  # makes a cycle, as many protocols do
    gone = weakref.ref(transport), weakref.ref(protocol)
    await finish(protocol)
    opened.clear()
    del transport, protocol
    await iterations(2)
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


@pytest.mark.xfail_on(uvloop="has the repr of its own class")
async def test_repr(loop):
    transport, protocol, address = await endpoint(loop)
    fd = transport.get_extra_info("socket").fileno()
    assert f"Transport fd={fd} read=polling write=<idle, bufsize=0>>" in repr(transport)
    transport.close()
    assert f"closing fd={fd} read=idle" in repr(transport)
    await until(lambda: protocol.is_lost)
    assert f"closed fd={fd}>" in repr(transport)
    assert address


@pytest.mark.xfail_on(uvloop="logs nothing")
async def test_debug_mode_logs_pauses(loop):
    loop.set_debug(True)
    loop.slow_callback_duration = 60
    transport, protocol, _ = await endpoint(loop)
    with logged() as messages:
        transport.pause_reading()
        transport.pause_reading()
        transport.resume_reading()
    assert [message.partition(" ")[2].partition("> ")[2] for message in messages] == [
        "pauses reading",
        "resumes reading",
    ]
    await finish(protocol)
