"""An error in a protocol's callback over TLS is reported, even if it is not an instance of `Exception`.

But KeyboardInterrupt and SystemExit leave the loop, and a CancelledError in eof_received is not reported. Each error
also closes the connection, unless it is raised in a callback of flow control.
"""

from __future__ import annotations

import asyncio

import pytest
from support import BufferedRecorder, Recorder, until
from tls.endpoints import SIDES, begin, connected


class Custom(BaseException):
    pass


FAULTS = [
    RuntimeError("fault"),
    Custom("fault"),
    GeneratorExit("fault"),
    asyncio.CancelledError("fault"),
    BaseExceptionGroup("fault", [Custom("inside")]),
]


@pytest.fixture(params=FAULTS, ids=lambda fault: type(fault).__name__)
def fault(request):
    yield request.param
    request.param.__traceback__ = request.param.__context__ = None


def failing(kind, method, fault):
    def fail(self, *_args):
        raise fault

    return type("Failing", (kind,), {method: fail})


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    ("kind", "method"),
    [(Recorder, "data_received"), (BufferedRecorder, "get_buffer"), (BufferedRecorder, "buffer_updated")],
)
@pytest.mark.skip_on(uvloop="raises out of libuv's callback")
async def test_while_data_is_delivered(loop, reported, side, kind, method, fault):
    transport, _, peer = await connected(loop, kind, side)
    # The connection gets this protocol only now. asyncio calls get_buffer() right after the handshake, so a
    # get_buffer() that fails would close the connection before the data is sent.
    protocol = failing(kind, method, fault)()
    protocol.connection_made(transport)
    transport.set_protocol(protocol)
    await peer.write(b"x")
    await until(lambda: protocol.is_lost, "connection_lost")
    assert protocol.lost_with == [fault]
    assert reported.exceptions == [fault]
    protocol.lost_with.clear()
    reported.clear()
    peer.close()


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.skip_on(uvloop="does not call eof_received()")
async def test_in_eof_received(loop, reported, side, fault):
    """As in asyncio, a CancelledError ends the connection without a report."""
    transport, protocol, peer = await connected(loop, failing(Recorder, "eof_received", fault), side)
    await peer.send_close_notify()
    await until(lambda: protocol.is_lost, "connection_lost")
    assert protocol.lost_with == [fault]
    assert reported.exceptions == ([] if isinstance(fault, asyncio.CancelledError) else [fault])
    protocol.lost_with.clear()
    reported.clear()
    peer.close()


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.skip_on(uvloop="raises out of libuv's callback")
async def test_in_connection_lost(loop, reported, side, fault):
    transport, protocol, peer = await connected(loop, failing(Recorder, "connection_lost", fault), side)
    transport.abort()
    await until(lambda: reported, "the report")
    assert reported.exceptions == [fault]
    reported.clear()
    peer.close()


@pytest.mark.parametrize("method", ["pause_writing", "resume_writing"])
@pytest.mark.skip_on(uvloop="pauses at other sizes")
async def test_in_flow_control(loop, reported, method, fault):
    """The exception is reported, and the connection stays open."""
    transport, protocol, peer = await connected(loop, failing(Recorder, method, fault), small=True)
    transport.set_write_buffer_limits(1000)
    for size in (1_000_000, 100_000):  # the first write fills the TCP transport under the TLS transport
        transport.write(bytes(size))
    await peer.read_exactly(1_100_000)
    await until(lambda: reported, "the report")
    assert reported.exceptions == [fault]
    assert not protocol.is_lost
    reported.clear()
    transport.abort()
    await until(lambda: protocol.is_lost, "connection_lost")
    peer.close()


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.skip_on(uvloop="raises out of libuv's callback")
async def test_in_connection_made(loop, reported, side, fault):
    """The connection fails, and the waiting task gets the exception."""
    connecting, peer = begin(loop, failing(Recorder, "connection_made", fault), side)
    handshake = asyncio.ensure_future(peer.handshake())
    with pytest.raises(type(fault)):
        await connecting
    handshake.cancel()
    await asyncio.wait([handshake])
    assert reported.exceptions == [fault]
    reported.clear()
    peer.close()
