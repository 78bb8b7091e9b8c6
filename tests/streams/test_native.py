"""The same behaviour with asyncio's streams and with grapeshot.streams, on every loop."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import sys
import warnings
import weakref

import pytest
from streams.readers import PythonCalls, open_stream
from support import HOST, iterations, until
from tls.contexts import client_context, server_context

import grapeshot.streams

LINE = b"ab\r\n"


# The calls that wait until the whole LINE has arrived, and never return only a part of it.
WHOLE_LINE = {
    "readline": lambda reader: reader.readline(),
    "readuntil": lambda reader: reader.readuntil(b"\r\n"),
    "readuntil-default": lambda reader: reader.readuntil(),
    "readexactly": lambda reader: reader.readexactly(len(LINE)),
    "anext": lambda reader: anext(reader),
}
READS = {**WHOLE_LINE, "read": lambda reader: reader.read(len(LINE))}
each_read = pytest.mark.parametrize("read", READS.values(), ids=READS)
each_whole_line = pytest.mark.parametrize("read", WHOLE_LINE.values(), ids=WHOLE_LINE)


async def waiting(loop, awaitable):
    """Return a task that waits for `awaitable`."""

    async def main():
        return await awaitable

    task = loop.create_task(main())
    await iterations(2)
    assert not task.done()
    return task


async def connection(api, loop, handler=None, **options):
    """Open a TCP connection; return (reader, writer) of the client and (reader, writer) of the server. With `handler`,
    the handler gets the server's reader and writer, and None is returned in their place. The server no longer listens
    when this function returns.
    """
    accepted = loop.create_future()
    server = await api.start_server(handler or (lambda *ends: accepted.set_result(ends)), HOST, 0, **options)
    ours = await api.open_connection(*server.sockets[0].getsockname())
    theirs = None if handler else await accepted
    server.close()
    return ours, theirs


async def end(*writers):
    for writer in writers:
        writer.close()
    for writer in writers:
        await writer.wait_closed()


# ---------------------------------------------------------------- classes and functions


def test_types(api):
    for name in ("StreamReader", "StreamWriter", "StreamReaderProtocol"):
        assert issubclass(getattr(api, name), getattr(asyncio, name))
    for kind, name in [(api.StreamReader, n) for n in ("read", "readline", "readexactly", "readuntil")] + [
        (api.StreamWriter, "drain")
    ]:
        function = getattr(kind, name)
        theirs = getattr(getattr(asyncio, kind.__name__), name)
        assert inspect.iscoroutinefunction(function)
        assert inspect.signature(function) == inspect.signature(theirs)
        assert function.__doc__ == theirs.__doc__
        assert function.__name__ == name


async def test_reading_methods_return_coroutines(api, loop):
    stream = await open_stream(loop)
    for read in READS.values():
        coroutine = read(stream.reader)
        assert inspect.isawaitable(coroutine)
        assert asyncio.iscoroutine(coroutine)
        assert not asyncio.isfuture(coroutine)
        coroutine.close()
        task = loop.create_task(read(stream.reader))
        await iterations(1)
        stream.reader.feed_data(LINE)
        assert await task == LINE
    with pytest.warns(RuntimeWarning, match=r"StreamReader.readline' was never awaited"):
        stream.reader.readline()
    coroutine = stream.reader.read(1)
    await asyncio.gather(coroutine, loop.create_task(feed(stream.reader, b"x")))
    with pytest.raises(RuntimeError, match="cannot reuse already awaited coroutine"):
        await coroutine


async def feed(reader, data):
    reader.feed_data(data)


async def test_reprs(api, loop):
    (reader, writer), (_, other) = await connection(api, loop)
    reader.feed_data(b"12345")
    reader._paused = True
    text = repr(reader)
    assert text == f"<StreamReader 5 bytes transport={writer.transport!r} paused>"
    assert repr(writer) == f"<StreamWriter transport={writer.transport!r} reader={text}>"
    await end(writer, other)


# ---------------------------------------------------------------- cancellation


@each_whole_line
async def test_a_cancelled_read_takes_nothing(api, loop, read):
    stream = await open_stream(loop)
    for held in range(len(LINE)):
        await stream.send(LINE[:held])
        task = await waiting(loop, read(stream.reader))
        task.cancel("why")
        with pytest.raises(asyncio.CancelledError, match="why"):
            await task
        assert stream.reader._waiter is None
        assert stream.reader._buffer == LINE[:held]
        await stream.send(LINE[held:])
        assert await read(stream.reader) == LINE


@each_read
async def test_a_read_that_is_cancelled_as_data_comes_takes_nothing(api, loop, read):
    """The data comes before or after the cancellation, in either case before the task runs again."""
    stream = await open_stream(loop)
    for order in (0, 1):
        task = await waiting(loop, read(stream.reader))
        if order:
            task.cancel()
        stream.reader.feed_data(LINE)
        if not order:
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert stream.reader._waiter is None
        assert await read(stream.reader) == LINE


@each_read
async def test_a_timeout_takes_nothing(api, loop, read):
    stream = await open_stream(loop)
    await stream.send(b"")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(read(stream.reader), 0.001)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await read(stream.reader)
    await stream.send(LINE * 2)
    assert await asyncio.wait_for(read(stream.reader), 30) == LINE
    assert await read(stream.reader) == LINE


async def test_random_cancellations_lose_no_byte(api, loop):
    (reader, writer), (_, other) = await connection(api, loop)
    sent = bytes(range(256)) * 400
    received = bytearray()

    async def send():
        for start in range(0, len(sent), 1000):
            other.write(sent[start : start + 1000])
            await other.drain()
            await asyncio.sleep(0)
        other.write_eof()

    sending = loop.create_task(send())
    step = 0
    while len(received) < len(sent):
        step += 1
        size = (step * 37) % 300 + 1
        kinds = (reader.read(size), reader.readexactly(min(size, len(sent) - len(received))))
        chosen, other_one = kinds[step % 2], kinds[1 - step % 2]
        other_one.close()
        task = loop.create_task(chosen)
        await iterations(step % 3)
        if step % 5 == 0:
            task.cancel()
        try:
            received += await task
        except asyncio.CancelledError:
            pass
    await sending
    assert received == sent
    assert await reader.read() == b""
    await end(writer, other)


# ---------------------------------------------------------------- errors


@each_read
async def test_two_readers(api, loop, read):
    stream = await open_stream(loop)
    task = await waiting(loop, read(stream.reader))
    names = {"read(5)": "read", "readexactly(5)": "readexactly", "readline()": "readuntil", "readuntil()": "readuntil"}
    for call, name in names.items():
        with pytest.raises(RuntimeError) as caught:
            await eval(f"stream.reader.{call}")
        text = f"{name}() called while another coroutine is already waiting for incoming data"
        assert str(caught.value) == text
    await stream.send(LINE)
    assert await task == LINE


async def test_limits(api, loop):
    stream = await open_stream(loop, limit=5)
    reader = stream.reader
    reader.feed_data(b"123456\n7\n")
    for separator in (b"\n", b"\n7"):
        with pytest.raises(asyncio.LimitOverrunError) as caught:
            await reader.readuntil(separator)
        assert caught.value.args == ("Separator is found, but chunk is longer than limit",)
        assert caught.value.consumed == 6
    assert reader._buffer == b"123456\n7\n"
    with pytest.raises(ValueError, match="Separator is found, but chunk is longer than limit"):
        await reader.readline()
    assert await reader.readline() == b"7\n"
    reader.feed_data(b"12345678")
    with pytest.raises(asyncio.LimitOverrunError) as caught:
        await reader.readuntil(b"ab")
    assert caught.value.args == ("Separator is not found, and chunk exceed the limit",)
    assert caught.value.consumed == 7
    with pytest.raises(ValueError, match="Separator is not found, and chunk exceed the limit"):
        await reader.readline()
    assert reader._buffer == b""
    reader.feed_data(b"12345\n")
    assert await reader.readline() == b"12345\n"


async def test_a_line_that_grows_beyond_the_limit(api, loop):
    stream = await open_stream(loop, limit=5)
    task = await waiting(loop, stream.reader.readuntil(b"\n"))
    await stream.send(b"123")
    assert not task.done()
    await stream.send(b"4567")
    with pytest.raises(asyncio.LimitOverrunError) as caught:
        await task
    assert caught.value.consumed == 7
    assert await stream.reader.readexactly(7) == b"1234567"


@pytest.mark.parametrize("waits", [False, True])
async def test_the_end_of_the_stream(api, loop, waits):
    for read, expected in (("readexactly(5)", 5), ("readuntil(b'x')", None)):
        stream = await open_stream(loop)
        reader = stream.reader
        reader.feed_data(b"abc")
        if waits:
            task = await waiting(loop, eval(f"reader.{read}"))
        reader.feed_eof()
        with pytest.raises(asyncio.IncompleteReadError) as caught:
            await (task if waits else eval(f"reader.{read}"))
        assert (caught.value.partial, caught.value.expected) == (b"abc", expected)
        assert reader.at_eof()
        with pytest.raises(asyncio.IncompleteReadError) as caught:
            await eval(f"reader.{read}")
        assert (caught.value.partial, caught.value.expected) == (b"", expected)
        assert await reader.read(5) == await reader.read() == await reader.readline() == b""
        with pytest.raises(AssertionError, match="feed_data after feed_eof"):
            reader.feed_data(b"more")
        with pytest.raises(StopAsyncIteration):
            await anext(reader)


async def test_a_last_line_without_a_line_end(api, loop):
    stream = await open_stream(loop)
    stream.reader.feed_data(b"one\ntwo\nthree")
    stream.reader.feed_eof()
    assert [line async for line in stream.reader] == [b"one\n", b"two\n", b"three"]


@each_read
async def test_an_exception(api, loop, read):
    stream = await open_stream(loop)
    task = await waiting(loop, read(stream.reader))
    error = LookupError("set")
    stream.reader.set_exception(error)
    assert stream.reader.exception() is error
    assert stream.reader._waiter is None
    with pytest.raises(LookupError) as caught:
        await task
    assert caught.value is error
    stream.reader.feed_data(LINE)
    with pytest.raises(LookupError) as caught:
        await read(stream.reader)
    assert caught.value is error


async def test_wrong_arguments(api, loop):
    stream = await open_stream(loop)
    reader = stream.reader
    reader.feed_data(b"x")
    with pytest.raises(ValueError, match="readexactly size can not be less than zero"):
        await reader.readexactly(-1)
    with pytest.raises(ValueError, match="Separator should be at least one-byte string"):
        await reader.readuntil(b"")
    with pytest.raises(TypeError):
        await reader.read("1")
    with pytest.raises(TypeError):
        await reader.readuntil("\n")
    with pytest.raises(TypeError):
        reader.read(1, 2)
    with pytest.raises(TypeError):
        reader.readexactly()
    with pytest.raises(TypeError):
        reader.readline(what=1)
    for limit in (0, -1):
        with pytest.raises(ValueError, match="Limit cannot be <= 0"):
            api.StreamReader(limit=limit, loop=loop)
    assert await reader.read(n=True) == b"x"
    assert await reader.readexactly(n=0) == await reader.read(0) == b""


@pytest.mark.skipif(sys.version_info < (3, 13), reason="new in Python 3.13")
async def test_several_separators(api, loop):
    stream = await open_stream(loop)
    stream.reader.feed_data(b"one;two\n\nrest")
    assert await stream.reader.readuntil((b"\n\n", b";")) == b"one;"
    assert await stream.reader.readuntil((b"\n\n", b";")) == b"two\n\n"
    task = await waiting(loop, stream.reader.readuntil((b"abc", b"b")))
    await stream.send(b"ab")
    assert await task == b"restab"
    with pytest.raises(ValueError, match="at least one element"):
        await stream.reader.readuntil(())


# ---------------------------------------------------------------- data


@pytest.mark.parametrize("looks", [False, True])
async def test_parts_and_wholes(api, loop, looks):
    """A read can return less than one piece of data, or several pieces. Looking at the buffer changes nothing."""
    stream = await open_stream(loop, limit=1000)
    reader = stream.reader
    expected = bytearray()
    for round_ in range(200):
        data = bytes([round_ % 251]) * (round_ % 7 + 1)
        reader.feed_data(data if round_ % 3 else bytearray(data))
        expected += data
        if looks:
            assert reader._buffer == expected
        size = (round_ * 5) % 11
        if round_ % 4 == 0 and size:
            taken = await reader.read(size)
            assert taken == expected[: len(taken)]
            assert len(taken) == min(size, len(expected))
            assert type(taken) is bytes
            del expected[: len(taken)]
    reader.feed_eof()
    assert await reader.read() == expected


async def test_the_buffer_holds_the_unread_data(api, loop):
    stream = await open_stream(loop)
    reader = stream.reader
    await stream.send(b"12345")
    assert await reader.read(1) == b"1"
    assert len(reader._buffer) == 4
    del reader._buffer[:1]
    reader._buffer.extend(b"6")
    assert await reader.readexactly(4) == b"3456"
    buffer = reader._buffer
    await stream.send(b"7")
    assert buffer == b"7"
    reader._buffer.clear()
    await stream.send(b"89\n")
    assert await reader.readline() == b"89\n"
    reader._buffer = bytearray(b"put there")
    assert await reader.read(100) == b"put there"


async def test_a_large_exact_read_beyond_the_limit(api, loop):
    stream = await open_stream(loop, limit=10)
    task = await waiting(loop, stream.reader.readexactly(100_000))
    for _ in range(100):
        await stream.send(b"x" * 1000)
    assert await task == b"x" * 100_000
    assert not stream.reader._paused
    assert stream.transport.is_reading()


async def test_paused_and_resumed(api, loop):
    stream = await open_stream(loop, limit=10)
    await stream.send(b"x" * 21)
    assert stream.reader._paused
    assert not stream.transport.is_reading()
    assert await stream.reader.read(10) == b"x" * 10
    assert stream.reader._paused
    assert await stream.reader.readexactly(1) == b"x"
    assert not stream.reader._paused
    assert stream.transport.is_reading()
    await stream.send(b"y" * 20)
    task = await waiting(loop, stream.reader.readexactly(40))
    await stream.send(b"z" * 10)
    assert await task == b"x" * 10 + b"y" * 20 + b"z" * 10


async def test_no_python_code_runs(loop, loop_kind):
    """Neither a read that waits, nor a write, nor a drain runs Python code of asyncio."""
    if loop_kind != "grapeshot":
        pytest.skip("on other loops, asyncio's code does the work")
    (reader, writer), (other_reader, other) = await connection(grapeshot.streams, loop)
    with PythonCalls() as calls:
        calls.NAMES = (
            "data_received",
            "feed_data",
            "read",
            "readline",
            "readuntil",
            "_wait_for_data",
            "write",
            "drain",
        )
        for _ in range(3):
            writer.write(b"a request\n")
            await writer.drain()
            assert await other_reader.readline() == b"a request\n"
            other.write(b"reply")
            await other.drain()
            assert await reader.readexactly(5) == b"reply"
    assert calls.names == []
    await end(writer, other)


@pytest.mark.parametrize("name", ["readline", "feed_data", "_maybe_resume_transport"])
async def test_subclasses(api, loop, name):
    """If a subclass overrides a method, the method of the subclass is called."""
    seen = []

    def spied(reader, *args):
        seen.append(args)
        return getattr(api.StreamReader, name)(reader, *args)

    kind = type("Reader", (api.StreamReader,), {name: spied})
    stream = await open_stream(loop, reader_type=kind)
    await stream.send(LINE)
    assert await anext(stream.reader) == LINE
    assert seen == [(LINE,) if name == "feed_data" else ()]


# ---------------------------------------------------------------- writing


async def test_drain_calls_a_replaced_exception_method(api, loop):
    (reader, writer), (_, other) = await connection(api, loop)
    reader.exception = lambda: LookupError("replaced")
    with pytest.raises(LookupError, match="replaced"):
        await writer.drain()
    del reader.exception
    await writer.drain()

    class Protocol(api.StreamReaderProtocol):
        async def _drain_helper(self):
            raise ZeroDivisionError

    replaced = api.StreamWriter(writer.transport, Protocol(reader, loop=loop), reader, loop)
    with pytest.raises(ZeroDivisionError):
        await replaced.drain()
    await end(other, writer)


async def test_drain_calls_a_drain_helper_of_the_protocol(api, loop):
    (_, writer), (_, other) = await connection(api, loop)
    calls = []

    async def drain_helper():
        calls.append("on the object")

    protocol = writer.transport.get_protocol()
    protocol._drain_helper = drain_helper
    await writer.drain()
    assert calls == ["on the object"]
    del protocol._drain_helper
    await writer.drain()
    assert calls == ["on the object"]
    await end(other, writer)


async def test_drain_returns_if_the_drain_helper_catches_the_cancellation(api, loop):
    (reader, writer), (_, other) = await connection(api, loop)

    class Protocol(api.StreamReaderProtocol):
        async def _drain_helper(self):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                return

    replaced = api.StreamWriter(writer.transport, Protocol(reader, loop=loop), reader, loop)
    task = loop.create_task(replaced.drain())
    await asyncio.sleep(0)
    task.cancel()
    assert await task is None
    await end(other, writer)


async def test_a_stop_iteration_is_not_a_result(api, loop):
    """A StopIteration would end drain() like a return, so it becomes a RuntimeError (PEP 479)."""

    class Stops:
        def is_closing(self):
            raise StopIteration("no result")

    (_, writer), (_, other) = await connection(api, loop)
    writer._transport, real = Stops(), writer.transport
    with pytest.raises(RuntimeError, match="coroutine raised StopIteration") as raised:
        await writer.drain()
    assert isinstance(raised.value.__cause__, StopIteration)
    writer._transport = real
    await end(other, writer)


async def test_drain_after_the_connection_is_lost(api, loop):
    (_, writer), (_, other) = await connection(api, loop)
    await end(other)
    writer.transport.abort()
    await writer.wait_closed()
    with pytest.raises(ConnectionResetError, match="Connection lost"):
        await writer.drain()


async def test_drain_raises_the_readers_exception(api, loop):
    (reader, writer), (_, other) = await connection(api, loop)
    reader.set_exception(LookupError("of the reader"))
    with pytest.raises(LookupError, match="of the reader"):
        await writer.drain()
    await end(other, writer)


@pytest.mark.parametrize("how", ["resumed", "lost", "cancelled"])
async def test_drain_waits(api, loop, how):
    (_, writer), (reader, other) = await connection(api, loop)
    writer.transport.set_write_buffer_limits(1000)
    other.transport.pause_reading()
    size = 0
    while not writer._protocol._paused:
        writer.write(b"x" * 100_000)
        size += 100_000
    drains = [await waiting(loop, writer.drain()) for _ in range(2)]
    if how != "cancelled":
        other.transport.resume_reading()
    if how == "resumed":
        assert len(await reader.readexactly(size)) == size
        await asyncio.gather(*drains)
        await writer.drain()
    elif how == "cancelled":
        drains[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await drains[0]
        assert not drains[1].done()
        other.transport.resume_reading()
        assert len(await reader.readexactly(size)) == size
        await drains[1]
    else:
        error = BrokenPipeError("by the test")
        writer.transport._force_close(error) if hasattr(writer.transport, "_force_close") else writer.transport.abort()
        results = await asyncio.gather(*drains, return_exceptions=True)
        assert all(result is None or isinstance(result, OSError) for result in results)
    other.transport.abort()
    writer.transport.abort()
    await until(lambda: writer._protocol._connection_lost, "the end")
    for each in (writer, other):
        try:
            await each.wait_closed()
        except OSError:
            pass


async def test_the_rest_of_a_writer(api, loop):
    (reader, writer), (other_reader, other) = await connection(api, loop)
    assert writer.can_write_eof()
    assert writer.get_extra_info("peername") == other.get_extra_info("sockname")
    assert writer.get_extra_info("nothing", 5) == 5
    writer.writelines([b"a", bytearray(b"b"), memoryview(b"c")])
    assert await other_reader.readexactly(3) == b"abc"
    with pytest.raises(TypeError):
        writer.write("text")
    writer.write_eof()
    assert await other_reader.read() == b""
    other.write(b"still open")
    assert await reader.readexactly(10) == b"still open"
    assert not writer.is_closing()
    await end(writer, other)
    assert writer.is_closing()


async def test_a_transport_with_a_method_replaced(api, loop):
    (_, writer), (reader, other) = await connection(api, loop)
    seen = []
    writer._transport, real = Forwarding(writer.transport, seen), writer.transport
    writer.write(b"through")
    await writer.drain()
    assert await reader.readexactly(7) == b"through"
    assert seen[0] == "write"
    assert "is_closing" in seen
    writer._transport = real
    await end(writer, other)


class Forwarding:
    def __init__(self, target, seen):
        self.target, self.seen = target, seen

    def __getattr__(self, name):
        self.seen.append(name)
        return getattr(self.target, name)


@pytest.mark.skip_on(uvloop="keeps the transport alive")
async def test_an_unclosed_writer(api, loop):
    (reader, writer), (_, other) = await connection(api, loop)
    other_end = await waiting(loop, reader.read(1))
    other_end.cancel()
    await iterations(2)
    warns = (
        "warnings" in asyncio.StreamWriter.__del__.__code__.co_names + asyncio.StreamWriter.__del__.__code__.co_varnames
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del reader, writer
        gc.collect()
        await iterations(3)
    shown = [str(warning.message) for warning in caught if "StreamWriter" in str(warning.message)]
    assert [text.startswith("unclosed <StreamWriter transport=") for text in shown] == [True] * warns
    await end(other)


# ---------------------------------------------------------------- servers


async def test_a_handler_that_fails(api, loop, reported):
    async def handler(reader, writer):
        await reader.readline()
        raise LookupError("in the handler")

    (reader, writer), _ = await connection(api, loop, handler)
    writer.write(b"go\n")
    assert await reader.read() == b""
    [context] = reported
    assert context["message"] == "Unhandled exception in client_connected_cb"
    assert str(context["exception"]) == "in the handler"
    await end(writer)


async def test_types_of_a_connection(api, loop, loop_kind):
    """On other loops, the functions of grapeshot.streams call asyncio's functions and return asyncio's types."""
    ends = await connection(api, loop)
    module = api if loop_kind == "grapeshot" else asyncio
    for reader, writer in ends:
        assert type(reader) is module.StreamReader
        assert type(writer) is module.StreamWriter
    await end(*(writer for _, writer in ends))


async def echo(kinds, ended, reader, writer):
    kinds.append((type(reader), type(writer)))
    while line := await reader.readline():
        if line == b"STARTTLS\n":
            await writer.start_tls(server_context("localhost"))
            continue
        writer.write(line)
        await writer.drain()
    writer.close()
    ended.set()


async def exchange(reader, writer):
    for size in (1, 1000, 60_000):
        line = b"x" * size + b"\n"
        writer.write(line)
        await writer.drain()
        assert await reader.readline() == line


@pytest.mark.parametrize("way", ["tcp", "tls", "start_tls", "unix"])
async def test_ways(api, loop, loop_kind, tmp_path, way):
    if way == "start_tls" and loop_kind == "asyncio":
        pytest.skip("asyncio's start_tls loses the client's first message if the server has already received it")
    kinds, ended = [], asyncio.Event()
    handler = functools.partial(echo, kinds, ended)
    is_tls = way == "tls"
    if way == "unix":
        path = str(tmp_path / "socket")
        server = await api.start_unix_server(handler, path)
        reader, writer = await api.open_unix_connection(path)
    else:
        server = await api.start_server(handler, HOST, 0, ssl=server_context("localhost") if is_tls else None)
        options = {"ssl": client_context(), "server_hostname": "localhost"} if is_tls else {}
        reader, writer = await api.open_connection(*server.sockets[0].getsockname(), **options)
    await exchange(reader, writer)
    if way == "start_tls":
        writer.write(b"STARTTLS\n")
        await writer.start_tls(client_context(), server_hostname="localhost")
        assert writer.get_extra_info("sslcontext") is not None
        await exchange(reader, writer)
    await end(writer)
    await ended.wait()
    await iterations(3)
    server.close()
    await server.wait_closed()
    module = api if loop_kind == "grapeshot" else asyncio
    assert kinds == [(module.StreamReader, module.StreamWriter)]


async def test_nothing_is_kept(api, loop):
    """The objects of a closed connection are freed. Each reader refers to itself, so the collector has to free it."""

    async def handler(reader, writer):
        async for line in reader:
            writer.write(line)
        writer.close()

    kept = []
    for _ in range(3):
        (reader, writer), _ = await connection(api, loop, handler)
        writer.write(b"line\n")
        assert await reader.readline() == b"line\n"
        reader.itself = reader
        kept += [weakref.ref(reader), weakref.ref(writer), weakref.ref(writer._protocol)]
        await end(writer)
    del reader, writer
    await iterations(5)
    gc.collect()
    assert [reference() for reference in kept] == [None] * 9


async def test_a_reader_in_a_cycle_with_its_task(api, loop):
    reader = api.StreamReader(loop=loop)
    task = await waiting(loop, reader.read(1))
    reader.task = task
    gone = weakref.ref(reader)
    task.cancel()
    await iterations(2)
    del reader, task
    gc.collect()
    assert gone() is None
