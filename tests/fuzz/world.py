"""The names that a fuzzed call can use: a loop, one object of each native type, and unexpected arguments.

native.py evaluates the text of a call with a `World` as its namespace. An object is created when a call first names it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import gc
import os
import socket
import ssl
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import grapeshot
from grapeshot import _core, streams

try:
    from grapeshot import coro
except ImportError:  # not available on some versions of Python and on unsupported processors
    coro = None  # type: ignore[assignment]


class Planned(Exception):
    """The exception that an argument raises when it is used."""


class Evil:
    """Does `deed` whenever it is used, and then returns a plausible value, or a bare object if the deed is `wrong`."""

    world: World

    def __init__(self, deed: str, number: Any = 1) -> None:
        self.deed = deed
        self.number = number

    def act(self) -> None:
        loop = Evil.world.get("loop")
        match self.deed:
            case "raise":
                raise Planned
            case "close" if loop is not None:
                loop.close()
            case "stop" if loop is not None:
                loop.stop()
            case "collect":
                gc.collect()
            case "forget":
                Evil.world.clear()
            case "end":
                for name in ("stream", "datagram", "read_pipe", "write_pipe", "tls"):
                    if name in Evil.world:
                        Evil.world[name].close()
            case "abort":
                for name in ("stream", "datagram", "write_pipe", "tls"):
                    if name in Evil.world:
                        Evil.world[name].abort()

    def answer(self, value: Any) -> Any:
        self.act()
        return object() if self.deed == "wrong" else value

    def __index__(self) -> Any:
        return self.answer(self.number)

    def __float__(self) -> Any:
        return self.answer(float(self.number))

    def __bool__(self) -> Any:
        return self.answer(True)

    def __eq__(self, other: object) -> Any:
        return self.answer(False)

    def __lt__(self, other: object) -> Any:
        return self.answer(True)

    def __hash__(self) -> Any:
        return self.answer(7)

    def __len__(self) -> Any:
        return self.answer(self.number)

    def __iter__(self) -> Any:
        return self.answer(iter([b"some", b"pieces"]))

    def __await__(self) -> Any:
        return self.answer(iter([None]))

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        return self.answer(None)

    def __repr__(self) -> Any:
        return self.answer("Evil()")

    def __buffer__(self, _flags: int) -> Any:
        return self.answer(memoryview(b"data"))

    def __fspath__(self) -> Any:
        return self.answer("no such path")

    def __enter__(self) -> Any:
        return self.answer(self)

    def __exit__(self, *_exc: object) -> Any:
        return self.answer(None)

    def __contains__(self, _item: object) -> Any:
        return self.answer(True)

    def __getitem__(self, _item: object) -> Any:
        return self.answer(b"item")

    def __getattr__(self, name: str) -> Any:
        self.act()
        if self.deed == "wrong" or name.startswith("__"):
            raise AttributeError(name)
        return functools.partial(self.answer, self.number)


class EvilText(str):
    """A str subclass whose __eq__ does `deed`."""

    deed = "collect"

    def __eq__(self, other: object) -> Any:
        return Evil(self.deed).answer(False)

    __hash__ = str.__hash__


class EvilProtocol(asyncio.Protocol, asyncio.DatagramProtocol):
    """A protocol whose callbacks do `deed`."""

    def __init__(self, deed: str) -> None:
        self.deed = deed

    def deal(self, *_args: Any) -> Any:
        return Evil(self.deed).answer(None)

    connection_made = data_received = eof_received = pause_writing = resume_writing = deal
    connection_lost = datagram_received = error_received = deal


class EvilBuffers(asyncio.BufferedProtocol):
    """A buffered protocol whose callbacks do `deed`."""

    def __init__(self, deed: str, length: int = 5) -> None:
        self.deed = deed
        self.length = length

    def get_buffer(self, _hint: int) -> Any:
        return Evil(self.deed).answer(bytearray(self.length))

    def buffer_updated(self, _count: int) -> Any:
        return Evil(self.deed).answer(None)


class EvilOwner:
    """A server that does `deed` when connections come and go."""

    def __init__(self, deed: str) -> None:
        self.deed = deed

    def deal(self, *_args: Any) -> Any:
        return Evil(self.deed).answer(None)

    _attach = _detach = _accepting = deal


def recursive() -> list[Any]:
    """Return a list that contains itself."""
    items: list[Any] = []
    items.append(items)
    return items


async def nothing() -> None:
    """A coroutine that ends in its first step."""


@functools.cache
def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return a client's and a server's context. The server has no certificate, so no handshake can complete."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    return client, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)


class World(dict[str, Any]):
    """The names of one example. `loop` and its objects are created when they are first used."""

    def __init__(self, shared: dict[str, Any]) -> None:
        super().__init__(shared)
        self.keep: list[Any] = []
        self.is_making = self.is_over = False

    def __missing__(self, name: str) -> Any:
        maker = MAKERS.get(name)
        if maker is None or self.is_over:
            raise KeyError(name)  # eval() then looks for a builtin of this name
        self.is_making = True
        try:
            value = maker(self)
        finally:
            self.is_making = False
        self[name] = value
        return value

    def near(self, kind: int = socket.SOCK_STREAM) -> socket.socket:
        """Return one end of a non-blocking socket pair. The other end stays open, and has sent a few bytes."""
        mine, other = socket.socketpair(socket.AF_UNIX, kind)
        mine.setblocking(False)
        other.setblocking(False)
        other.send(b"from the other end")
        self.keep.append(other)
        return mine

    def pipe(self, index: int) -> Any:
        ends = os.pipe()
        for number in ends:
            os.set_blocking(number, False)
        self.keep.append(open(ends[1 - index], "rb" if index else "wb", buffering=0))
        if index == 0:
            self.keep[-1].write(b"from the other end")
        return open(ends[index], "wb" if index else "rb", buffering=0)

    def finish(self) -> None:
        """Close everything that is open, and create nothing more. An object that an example has broken may fail to
        close; this is ignored.
        """
        self.is_over = True
        loop = self.get("loop")
        for _ in range(3):
            with contextlib.suppress(BaseException):
                loop.call_soon(loop.stop)  # type: ignore[union-attr]
                _core.Loop._run(loop)  # type: ignore[arg-type]
        for name in ("stream", "datagram", "write_pipe", "tls", "read_pipe"):
            with contextlib.suppress(BaseException):
                (self[name].abort if name in self and name != "read_pipe" else self[name].close)()
        with contextlib.suppress(BaseException):
            loop.call_soon(loop.stop)  # type: ignore[union-attr]
            _core.Loop._run(loop)  # type: ignore[arg-type]
        for value in [loop, *self.keep, *self.values()]:
            if isinstance(value, (asyncio.AbstractEventLoop, socket.socket)) or hasattr(type(value), "fileno"):
                with contextlib.suppress(BaseException):
                    value.close()
        self.clear()
        self.keep.clear()


def a_loop(_world: World) -> Any:
    loop = grapeshot.new_event_loop()
    loop.set_exception_handler(lambda _loop, _context: None)
    return loop


def a_reader(world: World) -> Any:
    reader = streams.StreamReader(loop=world["loop"])
    reader.feed_data(b"a line\nand more")
    return reader


def a_listener(world: World) -> Any:
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    sock.bind("")  # the kernel chooses an abstract address
    sock.listen()
    world.keep.append(sock)
    return world["loop"]._listen(sock, asyncio.Protocol, EvilOwner("none"), 5)


def a_coroutine(world: World) -> Any:
    return world["loop"].sock_recv(world["sock"], 100)


def a_file(_world: World) -> Any:
    file = tempfile.TemporaryFile()
    file.write(b"content of a file")
    file.flush()
    return file


MAKERS: dict[str, Callable[[World], Any]] = {
    "loop": a_loop,
    "handle": lambda world: world["loop"].call_soon(nothing_at_all),
    "timer": lambda world: world["loop"].call_later(0.001, nothing_at_all),
    "future": lambda world: world["loop"].create_future(),
    "task": lambda world: world["loop"].create_task(nothing()),
    "sock": lambda world: world.near(),
    "other_sock": lambda world: world.near(),
    "fd": lambda world: world["sock"].fileno(),
    "file": a_file,
    "protocol": lambda _world: asyncio.Protocol(),
    "stream": lambda world: world["loop"]._stream(world.near(), asyncio.Protocol()),
    "datagram": lambda world: world["loop"]._datagram(world.near(socket.SOCK_DGRAM), asyncio.DatagramProtocol()),
    "read_pipe": lambda world: world["loop"]._read_pipe(world.pipe(0), asyncio.Protocol()),
    "write_pipe": lambda world: world["loop"]._write_pipe(world.pipe(1), asyncio.Protocol()),
    "listener": a_listener,
    "tls": lambda world: world["loop"]._tls(asyncio.Protocol(), contexts()[0], None, False, None, 1.0, 1.0),
    "reader": a_reader,
    "reader_protocol": lambda world: streams.StreamReaderProtocol(world["reader"], loop=world["loop"]),
    "writer": lambda world: streams.StreamWriter(
        world["stream"], world["reader_protocol"], world["reader"], world["loop"]
    ),
    "coroutine": a_coroutine,
    "raw_loop": lambda _world: _core.Loop(),
}


def nothing_at_all(*_args: Any) -> None:
    """A callback that does nothing."""


if coro is not None:
    MAKERS |= {
        "a_coro": lambda _world: coro.new(nothing_at_all),
        "waiting": lambda _world: coro.spawn(coro.wait),
        "a_semaphore": lambda _world: _core.semaphore(2),
        "a_lock": lambda _world: _core.lock(),
        "a_mutex": lambda _world: _core.mutex(),
        "a_condition": lambda _world: _core.condition_variable(),
        "a_fifo": lambda _world: _core.fifo(3),
        "a_channel": lambda _world: _core.channel(),
        "a_thread_lock": lambda _world: _core.thread_lock(),
        "a_thread_rlock": lambda _world: _core.thread_rlock(),
        "a_thread_queue": lambda _world: _core.thread_queue(),
        "coro_sock": lambda _world: coro.socketpair()[0],
    }


def shared_names() -> dict[str, Any]:
    """Return the names that all examples share, with their objects. native.py counts the references to some of these
    objects before and after an example, and reports a difference.
    """
    return {
        "nan": float("nan"),
        "inf": float("inf"),
        "huge": 2**100,
        "text": str(b"a text", "ascii"),
        "surrogate": "a\ud800b",
        "nul": "a\0b",
        "data": bytes(bytearray(b"some data")),
        "much": bytes(300_000),
        "array": bytearray(b"an array"),
        "view": memoryview(bytearray(b"a view")),
        "strided": memoryview(bytearray(b"a view"))[::2],
        "address": ("127.0.0.1", int("40001")),
        "thing": object(),
        "error": ValueError("an argument"),
        "recursive": recursive,
        "function": nothing_at_all,
        "nothing": nothing,
        "context": contextvars.Context,
        "core": _core,
        "socket": socket.socket,
        "client_context": contexts()[0],
        "server_context": contexts()[1],
        "Evil": Evil,
        "EvilText": EvilText,
        "EvilProtocol": EvilProtocol,
        "EvilBuffers": EvilBuffers,
        "EvilOwner": EvilOwner,
    }


def native_types() -> Iterator[tuple[str, type]]:
    """Yield each native type together with the name of an object of that type. Types that have no public name are found
    through their objects.
    """
    world = World(shared_names())
    Evil.world = world
    seen = set()
    for name in MAKERS:
        if name == "waiting":  # no loop would run it; `a_coro` has the same type
            continue
        for base in type(world[name]).__mro__:
            if (base.__module__ == "grapeshot._core" or base in vars(_core).values()) and base not in seen:
                seen.add(base)
                yield name, base
    world["coroutine"].close()
    world.finish()
