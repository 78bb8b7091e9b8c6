"""The same random traffic gives the same results and states: with a reader that is fed natively, with one that Python
code feeds, with the streams of grapeshot.streams, and on asyncio's own loop.
"""

from __future__ import annotations

import asyncio
import random

import pytest
from streams import readers
from streams.readers import PlainReader, open_stream
from support import iterations, loop_factory

import grapeshot.streams

SEPARATORS = (b"\n", b"ab", b"\r\n", b"x")
SEEDS = [
    pytest.param(range(start, start + 25), id=str(start), marks=pytest.mark.slow if start else ())
    for start in range(0, 100, 25)
]


def shown(value):
    """A result in a comparable form. An exception becomes its type with its text or its attributes."""
    if isinstance(value, asyncio.IncompleteReadError):
        return ("IncompleteReadError", value.partial, value.expected)
    if isinstance(value, asyncio.LimitOverrunError):
        return ("LimitOverrunError", value.args, value.consumed)
    if isinstance(value, BaseException):
        return (type(value).__name__, str(value))
    return value


class Traffic:
    """One seeded sequence of steps. After each step, the loop runs a few iterations, so that sent data arrives before
    the next step. Thus the data arrives in the same pieces in every run.
    """

    def __init__(self, seed, reader_type, module=asyncio, looks=True):
        self.rng = random.Random(seed)
        self.reader_type = reader_type
        self.module = module
        self.looks = looks
        self.limit = self.rng.choice((1, 2, 10, 100, 1000, 2**16))
        self.log = []
        self.pending = None
        self.is_over = False

    async def run(self, loop):
        self.loop = loop
        self.stream = await open_stream(loop, self.limit, self.reader_type, self.module.StreamReaderProtocol)
        # A StreamWriter closes its transport when the writer is freed, so this writer is kept until the end.
        self.writer = self.module.StreamWriter(self.stream.transport, self.stream.protocol, self.stream.reader, loop)
        for _ in range(self.rng.randrange(5, 40)):
            step = self.rng.choices(*zip(*self.steps(), strict=True))[0]
            self.log.append(step.__name__)
            await step()
            await iterations(4)
            self.note_state()
            if self.is_over:
                break
        await self.finish()
        return self.log

    def steps(self):
        return (
            (self.send, 10),
            (self.send_much, 1),
            (self.read, 10),
            (self.read_again, 1),
            (self.cancel, 1),
            (self.pause, 1),
            (self.resume, 1),
            (self.reply, 1),
            (self.feed, 1),
            (self.shut_down, 0.5),
            (self.set_exception, 0.2),
            (self.feed_eof, 0.2),
            (self.close, 0.3),
        )

    def note_state(self):
        reader = self.stream.reader
        if self.pending is not None and self.pending.done():
            task, self.pending = self.pending, None
            self.log.append(("cancelled",) if task.cancelled() else shown(task.exception() or task.result()))
        self.log.append(
            (
                bytes(reader._buffer) if self.looks else "not looked at",
                reader._eof,
                reader._paused,
                reader.at_eof(),
                reader._waiter is None,
                shown(reader.exception()),
                self.stream.transport.is_reading(),
                self.stream.transport.is_closing(),
            )
        )

    # ------------------------------------------------------------ steps

    async def send(self):
        text = bytes(self.rng.choices(b"abx\r\n-", k=self.rng.choice((1, 2, 3, 10, 50, 300))))
        await self.send_text(text)

    async def send_much(self):
        await self.send_text(bytes(self.rng.choices(b"abx\r\n-", k=4000)))

    async def send_text(self, text):
        try:
            await self.stream.peer.send(text)
        except BrokenPipeError:
            self.log.append("the peer's side is shut down")

    async def read(self):
        if self.pending is None:
            self.pending = self.loop.create_task(self.one_read())

    async def one_read(self):
        reader, rng = self.stream.reader, self.rng
        match rng.randrange(6):
            case 0:
                return await reader.read(rng.choice((0, 1, 5, 100, 5000)))
            case 1:
                return await reader.readline()
            case 2:
                return await reader.readexactly(rng.choice((0, 1, 7, 400, 3000)))
            case 3:
                return await reader.readuntil(rng.choice(SEPARATORS))
            case 4:
                return [line async for line in reader]
        return await reader.read()

    async def read_again(self):
        if self.pending is not None and self.stream.reader._waiter is not None:
            try:
                self.log.append(await self.stream.reader.read(1))
            except Exception as error:
                self.log.append(shown(error))

    async def cancel(self):
        if self.pending is not None:
            self.pending.cancel()

    async def pause(self):
        self.stream.transport.pause_reading()

    async def resume(self):
        self.stream.transport.resume_reading()

    async def reply(self):
        if not self.stream.transport.is_closing():
            self.writer.write(b"reply")
            try:
                await self.writer.drain()
            except Exception as error:
                self.log.append(shown(error))
            self.log.append(await self.stream.peer.recv(5))

    async def feed(self):
        if not self.stream.reader._eof:
            self.stream.reader.feed_data(b"fed by hand\n")

    async def shut_down(self):
        self.stream.peer.shutdown()

    async def set_exception(self):
        self.stream.reader.set_exception(ValueError("set by hand"))

    async def feed_eof(self):
        self.stream.reader.feed_eof()
        self.is_over = True

    async def close(self):
        self.stream.transport.close()
        self.is_over = True

    async def finish(self):
        if self.pending is not None:
            self.pending.cancel()
            await asyncio.wait([self.pending])
            self.note_state()
        self.stream.close()
        readers.opened.remove(self.stream)
        await iterations(4)
        self.note_state()


def log_of(kind, seed, reader_type, module=asyncio, looks=True):
    with asyncio.Runner(loop_factory=loop_factory(kind)) as runner:
        reported = []
        runner.get_loop().set_exception_handler(lambda _, context: reported.append(context["message"]))
        log = runner.run(Traffic(seed, reader_type, module, looks).run(runner.get_loop()))
        return [*log, *reported]


@pytest.mark.parametrize("seeds", SEEDS)
def test_same_traffic_same_results(seeds):
    kinds = [("grapeshot", asyncio.StreamReader), ("grapeshot", PlainReader), ("asyncio", asyncio.StreamReader)]
    lengths = []
    for seed in seeds:
        natively, in_python, on_asyncio = (log_of(kind, seed, reader_type) for kind, reader_type in kinds)
        assert natively == in_python, f"seed {seed}"
        assert natively == on_asyncio, f"seed {seed}"
        lengths.append(len(natively))
    assert sum(lengths) > 20 * len(seeds)


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("seeds", SEEDS)
def test_same_results_with_native_streams(seeds, looks):
    """Each access to `_buffer` moves a native reader's data into a bytearray. With looks=False, there is no access."""
    native = grapeshot.streams
    for seed in seeds:
        expected = log_of("asyncio", seed, asyncio.StreamReader, looks=looks)
        for kind in ("grapeshot", "asyncio"):
            assert log_of(kind, seed, native.StreamReader, native, looks) == expected, f"seed {seed} on {kind}"
