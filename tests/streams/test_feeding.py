"""A StreamReader that is fed natively behaves like one that asyncio's Python code feeds.

If a subclass or a patch replaces that Python code, the loop calls the replacement.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import sys
import weakref

import pytest
from streams import readers
from streams.readers import PlainReader, PythonCalls, open_stream
from support import HOST, iterations, until
from tls.contexts import client_context, server_context

FRAMES = ["data_received", "feed_data", "_wakeup_waiter"]
IS_NOT_FATAL = "reports the error and keeps the connection open"


def check_frames(calls, loop_kind, deliveries=1):
    """Check which of asyncio's functions were called while data was delivered `deliveries` times.

    grapeshot's loop calls none of these functions. On another loop, asyncio's streams call each function in FRAMES once
    for each delivery; with grapeshot.streams, the calls are not checked.
    """
    if loop_kind == "grapeshot":
        assert calls.names == []
    elif readers.usual is asyncio:
        assert calls.names == FRAMES * deliveries


# ---------------------------------------------------------------- fed natively


async def test_no_python_code_runs(loop, loop_kind):
    stream = await open_stream(loop)
    with PythonCalls() as calls:
        await stream.send(b"x")
    check_frames(calls, loop_kind)
    assert await stream.reader.read(10) == b"x"


async def test_a_waiting_reader_is_woken(loop, loop_kind):
    stream = await open_stream(loop)
    task = loop.create_task(stream.reader.readline())
    await iterations(1)
    with PythonCalls() as calls:
        await stream.send(b"a li")
        assert stream.reader._buffer == b"a li"
        await stream.send(b"ne\nand")
    check_frames(calls, loop_kind, 2)
    assert await task == b"a line\n"
    assert stream.reader._buffer == b"and"
    assert stream.reader._waiter is None


async def test_the_buffer_stays_the_same_object(loop):
    stream = await open_stream(loop)
    buffer = stream.reader._buffer
    await stream.send(b"one")
    assert stream.reader._buffer is buffer
    assert await stream.reader.readexactly(3) == b"one"
    await stream.send(b"two")
    assert stream.reader._buffer is buffer
    assert buffer == b"two"


async def test_woken_in_order_with_other_callbacks(loop):
    stream = await open_stream(loop)
    log = []

    async def read():
        log.append(await stream.reader.read(10))

    task = loop.create_task(read())
    await iterations(1)
    waiter = stream.reader._waiter
    waiter.add_done_callback(lambda _: log.append("second callback"))
    await stream.peer.send(b"x")
    await task
    await iterations(1)
    assert log == [b"x", "second callback"]


@pytest.mark.parametrize("limit", [1, 100, 2**16])
async def test_paused_beyond_twice_the_limit(loop, limit):
    stream = await open_stream(loop, limit)
    await stream.send(b"x" * (2 * limit))
    assert not stream.reader._paused
    assert stream.transport.is_reading()
    await stream.send(b"y")
    assert stream.reader._paused is True
    assert not stream.transport.is_reading()
    await stream.send(b"z")
    assert len(stream.reader._buffer) == 2 * limit + 1
    assert await stream.reader.readexactly(limit) == b"x" * limit
    assert stream.reader._paused
    assert await stream.reader.read(1) in (b"x", b"y")
    assert stream.reader._paused is False
    assert stream.transport.is_reading()
    rest = b"x" * (limit - 1) + b"yz"
    assert await stream.reader.readexactly(limit + 1) == rest


async def test_reading_that_the_user_has_paused(loop):
    stream = await open_stream(loop, 10)
    stream.transport.pause_reading()
    await stream.send(b"x" * 50)
    assert stream.reader._buffer == b""
    stream.transport.resume_reading()
    await iterations(3)
    assert len(stream.reader._buffer) == 50
    assert stream.reader._paused


async def test_end_of_stream(loop):
    stream = await open_stream(loop)
    task = loop.create_task(stream.reader.read())
    await stream.send(b"data")
    stream.peer.shutdown()
    assert await task == b"data"
    assert stream.reader.at_eof()
    assert not stream.transport.is_closing()
    stream.transport.write(b"reply")
    assert await stream.peer.recv() == b"reply"


async def test_sizes_from_one_to_beyond_every_buffer(loop, loop_kind):
    """After several large reads of similar size, the loop receives straight into the reader's buffer."""
    stream = await open_stream(loop, 2**20)
    with PythonCalls() as calls:
        for size in (1, 7, 1000, *[30_000] * 8, 3, *[100_000] * 8, *[300_000] * 3, 5000, *[30_000] * 7):
            message = bytes([size % 251]) * size
            await stream.peer.send(message)
            assert await stream.reader.readexactly(size) == message
            assert stream.reader._buffer == b""
    check_frames(calls, loop_kind, len(calls.names) // len(FRAMES))


async def test_large_reads_after_buffered_data(loop):
    stream = await open_stream(loop, 2**20)
    for step in range(8):
        message = bytes([step]) * 30_000
        await stream.peer.send(message)
        assert await stream.reader.readexactly(29_990 if step == 0 else 30_000) == (
            message[:29_990] if step == 0 else bytes([step - 1]) * 10 + message[:29_990]
        )
    await until(lambda: len(stream.reader._buffer) == 10, "the rest")
    stream.peer.shutdown()
    assert await stream.reader.read() == bytes([7]) * 10


async def test_end_of_stream_when_a_large_read_is_due(loop):
    stream = await open_stream(loop, 2**20)
    for _ in range(8):
        await stream.peer.send(b"x" * 30_000)
        await stream.reader.readexactly(30_000)
    stream.peer.shutdown()
    assert await stream.reader.read() == b""
    assert stream.reader._buffer == b""
    assert stream.reader.at_eof()


async def test_a_reader_that_is_gone(loop):
    stream = await open_stream(loop)
    gone = weakref.ref(stream.reader)
    stream.reader = None
    gc.collect()
    assert gone() is None
    await stream.send(b"x" * 1000)
    assert stream.transport.is_reading()
    assert not stream.transport.is_closing()


async def test_a_reader_is_not_kept(loop):
    stream = await open_stream(loop)
    await stream.send(b"x")
    gone = weakref.ref(stream.reader)
    stream.reader = None
    gc.collect()
    assert gone() is None


async def test_over_tls(loop, loop_kind):
    accepted = loop.create_future()
    server = await readers.usual.start_server(
        lambda *streams: accepted.set_result(streams), HOST, 0, ssl=server_context("localhost")
    )
    address = server.sockets[0].getsockname()
    reader, writer = await readers.usual.open_connection(*address, ssl=client_context(), server_hostname="localhost")
    _, other = await accepted
    with PythonCalls() as calls:
        for size in (1, 1000, 100_000):
            other.write(b"x" * size)
            assert await reader.readexactly(size) == b"x" * size
    # only the presence of feed_data is compared, because the number of deliveries is not fixed
    assert ("feed_data" in calls.names) == (loop_kind != "grapeshot")
    for stream in (other, writer):
        stream.close()
        await stream.wait_closed()
    server.close()
    await server.wait_closed()


async def test_from_a_pipe(loop, loop_kind):
    source, sink = os.pipe()
    reader = readers.usual.StreamReader(loop=loop)
    transport, _ = await loop.connect_read_pipe(
        lambda: readers.usual.StreamReaderProtocol(reader, loop=loop), os.fdopen(source, "rb", 0)
    )
    with PythonCalls() as calls:
        os.write(sink, b"through the pipe\n")
        assert await reader.readline() == b"through the pipe\n"
    check_frames(calls, loop_kind)
    os.close(sink)
    assert await reader.read() == b""
    transport.close()
    await iterations(3)


async def test_another_protocol_and_back(loop, loop_kind):
    stream = await open_stream(loop)

    class Other(asyncio.Protocol):
        data = b""

        def data_received(self, data):
            self.data += data

    other = Other()
    stream.transport.set_protocol(other)
    await stream.send(b"for the other")
    assert other.data == b"for the other"
    stream.transport.set_protocol(stream.protocol)
    with PythonCalls() as calls:
        await stream.send(b"back")
    check_frames(calls, loop_kind)
    assert await stream.reader.read(100) == b"back"


# ---------------------------------------------------------------- fed by Python code


@pytest.mark.parametrize("what", ["reader", "protocol"])
async def test_subclasses(loop, what):
    seen = []

    class Reader(asyncio.StreamReader):
        def feed_data(self, data):
            seen.append(bytes(data))
            super().feed_data(data)

    class Protocol(asyncio.StreamReaderProtocol):
        def data_received(self, data):
            seen.append(bytes(data))
            super().data_received(data)

    kinds = {"reader_type": Reader} if what == "reader" else {"protocol_type": Protocol}
    stream = await open_stream(loop, **kinds)
    await stream.send(b"one")
    assert seen == [b"one"]
    assert await stream.reader.read(10) == b"one"


@pytest.mark.parametrize("target", ["class", "object"])
@pytest.mark.parametrize("name", ["feed_data", "_wakeup_waiter"])
async def test_patched_reader(loop, loop_kind, monkeypatch, name, target):
    """If a method is replaced while the connection is open, the replacement is called until the method is restored."""
    stream = await open_stream(loop)
    await stream.send(b"0")
    seen = []
    original = getattr(asyncio.StreamReader, name)

    def spy(reader, *args):
        seen.append(args)
        original(reader, *args)

    with monkeypatch.context() as patch:
        if target == "class":
            patch.setattr(asyncio.StreamReader, name, spy)
        else:
            patch.setattr(stream.reader, name, lambda *args: spy(stream.reader, *args), raising=False)
            assert name in vars(stream.reader)
        await stream.send(b"1")
        assert seen == [(b"1",) if name == "feed_data" else ()]
    if target == "object":
        vars(stream.reader).pop(name, None)
    with PythonCalls() as calls:
        await stream.send(b"2")
    check_frames(calls, loop_kind)
    assert len(seen) == 1
    assert await stream.reader.read(10) == b"012"


@pytest.mark.parametrize("name", ["_eof", "_buffer", "_limit"])
async def test_a_property_in_place_of_an_attribute(loop, monkeypatch, name):
    stream = await open_stream(loop)
    await stream.send(b"0")
    seen = []
    value = getattr(stream.reader, name)

    def read(_reader):
        seen.append(name)
        return value

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.StreamReader, name, property(read, lambda *_: None), raising=False)
        await stream.send(b"1")
        assert seen
    assert await stream.reader.read(10) == b"01"


@pytest.mark.parametrize("hook", ["__getattribute__", "__setattr__"])
async def test_attribute_hooks_of_the_class(loop, monkeypatch, hook):
    stream = await open_stream(loop)
    seen = []

    def get(reader, name):
        seen.append(name)
        return object.__getattribute__(reader, name)

    def put(reader, name, value):
        seen.append(name)
        object.__setattr__(reader, name, value)

    task = loop.create_task(stream.reader.readexactly(2))
    await iterations(1)
    with monkeypatch.context() as patch:
        patch.setattr(asyncio.StreamReader, hook, get if hook == "__getattribute__" else put)
        await stream.send(b"x")
    assert "_waiter" in seen
    assert ("_eof" in seen) == (hook == "__getattribute__" and __debug__)
    await stream.send(b"y")
    assert await task == b"xy"


async def test_data_received_patched_before_the_connection(loop, monkeypatch):
    seen = []
    original = asyncio.StreamReaderProtocol.data_received

    def spy(protocol, data):
        seen.append(data)
        original(protocol, data)

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.StreamReaderProtocol, "data_received", spy)
        stream = await open_stream(loop)
        await stream.send(b"1")
    assert seen == [b"1"]
    assert await stream.reader.read(10) == b"1"


async def test_data_received_of_the_object(loop):
    seen = []

    def prepare(_reader, protocol):
        protocol.data_received = seen.append

    stream = await open_stream(loop, prepare=prepare)
    await stream.send(b"1")
    assert seen == [b"1"]
    assert stream.reader._buffer == b""


async def test_the_property_of_the_protocol_patched(loop, monkeypatch):
    stream = await open_stream(loop)
    another = asyncio.StreamReader(loop=loop)
    with monkeypatch.context() as patch:
        patch.setattr(asyncio.StreamReaderProtocol, "_stream_reader", another)
        await stream.send(b"1")
    await stream.send(b"2")
    assert another._buffer == b"1"
    assert stream.reader._buffer == b"2"


async def test_the_reader_of_a_protocol_replaced(loop):
    stream = await open_stream(loop)
    another = asyncio.StreamReader(loop=loop)
    stream.protocol._stream_reader_wr = weakref.ref(another)
    await stream.send(b"1")
    stream.protocol._stream_reader_wr = None
    await stream.send(b"2")
    stream.protocol._stream_reader_wr = lambda: stream.reader
    await stream.send(b"3")
    assert another._buffer == b"1"
    assert stream.reader._buffer == b"3"


async def test_the_transport_of_a_reader_replaced(loop):
    """The loop calls `pause_reading` of the object that the reader has as its transport."""

    class CannotPause:
        count = 0

        def pause_reading(self):
            self.count += 1
            raise NotImplementedError

    stream = await open_stream(loop, 5)
    stream.reader._transport = instead = CannotPause()
    await stream.send(b"x" * 11)
    assert instead.count == 1
    assert stream.reader._transport is None
    assert stream.reader._paused is False
    await stream.send(b"x")
    assert stream.transport.is_reading()
    assert await stream.reader.readexactly(12) == b"x" * 12


class Limit:
    """A limit that is not an int."""

    def __init__(self, value):
        self.value = value

    def __rmul__(self, factor):
        return factor * self.value


@pytest.mark.parametrize("limit", [5.0, True, 2**70, -1, Limit(5)])
async def test_unusual_limits(loop, limit):
    stream = await open_stream(loop)
    stream.reader._limit = limit
    await stream.send(b"x" * 11)
    assert stream.reader._paused is (limit != 2**70)
    assert stream.transport.is_reading() is (limit == 2**70)


# ---------------------------------------------------------------- waiters


class Waiter:
    """Replaces the Future that a reader waits for."""

    tag: contextvars.ContextVar[str] = contextvars.ContextVar("tag", default="none")

    def __init__(self, reader, is_cancelled=False):
        self.reader = reader
        self.is_cancelled = is_cancelled
        self.log = []

    def cancelled(self):
        self.log.append(("cancelled", self.reader._waiter, bytes(self.reader._buffer), self.tag.get()))
        return self.is_cancelled

    def set_result(self, result):
        self.log.append(("set_result", result, bytes(self.reader._buffer), self.tag.get()))


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_any_object_may_wait(loop, is_cancelled):
    """The methods of the waiting object are called in asyncio's order, in the context of the connection."""
    Waiter.tag.set("of the connection")
    stream = await open_stream(loop)
    Waiter.tag.set("of the test")
    stream.reader._waiter = waiter = Waiter(stream.reader, is_cancelled)
    await stream.send(b"x")
    expected = [("cancelled", None, b"x", "of the connection"), ("set_result", None, b"x", "of the connection")]
    if sys.implementation.name == "cpython" and type(loop).__module__.startswith("asyncio"):
        expected = [(*each[:3], waiter.log[0][3]) for each in expected]  # asyncio's loop may use any context
    assert waiter.log == expected[: 1 if is_cancelled else 2]
    assert stream.reader._waiter is None


async def test_a_cancelled_waiter(loop):
    stream = await open_stream(loop)
    waiter = loop.create_future()
    waiter.cancel()
    stream.reader._waiter = waiter
    await stream.send(b"x")
    assert stream.reader._waiter is None
    assert stream.reader._buffer == b"x"


async def test_cancelled_in_the_same_iteration(loop):
    stream = await open_stream(loop)
    task = loop.create_task(stream.reader.readexactly(2))
    await iterations(1)
    await stream.peer.send(b"x")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await stream.send(b"y")
    assert await stream.reader.readexactly(2) == b"xy"


async def test_waiters_of_other_types(loop):
    class Future(asyncio.Future):
        pass

    for kind in (Future, asyncio.futures._PyFuture):
        stream = await open_stream(loop)
        stream.reader._waiter = waiter = kind(loop=loop)
        await stream.send(b"x")
        assert waiter.result() is None
        stream.reader._waiter = waiter = kind(loop=loop)
        waiter.cancel()
        await stream.send(b"y")
        assert await stream.reader.read(10) == b"xy"


# ---------------------------------------------------------------- faults

FATAL = "Fatal error: protocol.data_received() call failed."


async def failed(stream, reported, kind):
    """Check that the connection ends with the error, which is reported once, with all the usual context."""
    await until(lambda: stream.protocol._closed.done(), "the end of the connection")
    [context] = reported
    assert context["message"] == FATAL
    assert isinstance(context["exception"], kind)
    assert context["transport"] is stream.transport
    assert context["protocol"] is stream.protocol
    assert stream.reader.exception() is context["exception"]
    assert stream.protocol._closed.exception() is context["exception"]


@pytest.mark.skip_on(uvloop=IS_NOT_FATAL)
async def test_data_after_feed_eof(loop, reported):
    stream = await open_stream(loop)
    stream.reader.feed_eof()
    await stream.send(b"x")
    await failed(stream, reported, AssertionError)
    assert stream.reader._buffer == b""


@pytest.mark.skip_on(uvloop=IS_NOT_FATAL)
async def test_a_view_of_the_buffer(loop, reported):
    stream = await open_stream(loop)
    await stream.send(b"x")
    view = memoryview(stream.reader._buffer)
    await stream.send(b"y")
    await failed(stream, reported, BufferError)
    assert view == b"x"
    view.release()


@pytest.mark.skip_on(uvloop=IS_NOT_FATAL)
async def test_a_view_of_the_buffer_when_a_large_read_is_due(loop, reported):
    stream = await open_stream(loop, 2**20)
    for _ in range(8):
        await stream.peer.send(b"x" * 30_000)
        await stream.reader.readexactly(30_000)
    with memoryview(stream.reader._buffer):
        await stream.send(b"y")
        await failed(stream, reported, BufferError)
    assert stream.reader._buffer == b""


@pytest.mark.skip_on(uvloop=IS_NOT_FATAL)
async def test_a_waiter_that_is_done(loop, reported):
    stream = await open_stream(loop)
    stream.reader._waiter = waiter = loop.create_future()
    waiter.set_result(5)
    await stream.send(b"x")
    await failed(stream, reported, asyncio.InvalidStateError)
    assert stream.reader._waiter is None
    assert stream.reader._buffer == b"x"


@pytest.mark.skip_on(uvloop=IS_NOT_FATAL)
@pytest.mark.parametrize("name", ["_buffer", "_limit"])
async def test_a_reader_without_an_attribute(loop, reported, name):
    stream = await open_stream(loop)
    delattr(stream.reader, name)
    await stream.send(b"x")
    await failed(stream, reported, AttributeError)


@pytest.mark.skip_on(uvloop=IS_NOT_FATAL)
async def test_a_transport_that_fails_to_pause(loop, reported):
    class Broken:
        def pause_reading(self):
            raise LookupError

    stream = await open_stream(loop, 1)
    stream.reader._transport = Broken()
    await stream.send(b"xyz")
    await failed(stream, reported, LookupError)
    assert stream.reader._buffer == b"xyz"
    assert stream.reader._paused is False


@pytest.mark.skip_on(uvloop=IS_NOT_FATAL)
async def test_a_limit_that_is_none(loop, reported):
    stream = await open_stream(loop)
    stream.reader._limit = None
    await stream.send(b"x")
    await failed(stream, reported, TypeError)


@pytest.mark.parametrize("kind", [bytearray, list])
async def test_a_buffer_of_another_type(loop, kind):
    class Buffer(kind):
        def extend(self, data):
            seen.append(data)
            super().extend(data)

    seen = []
    stream = await open_stream(loop)
    stream.reader._buffer = Buffer()
    await stream.send(b"x")
    assert seen == [b"x"]
    assert len(stream.reader._buffer) == 1
    stream.reader._buffer.clear()


async def test_a_reset_connection(loop):
    stream = await open_stream(loop, reader_type=PlainReader)
    task = loop.create_task(stream.reader.read(1))
    await iterations(1)
    stream.transport.abort()
    assert await task == b""
