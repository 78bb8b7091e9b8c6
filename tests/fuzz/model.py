"""One transport on one kind of loop, driven step by step, and the log of what its protocol and its caller see.

Two models that take the same steps, on asyncio's loop and on grapeshot's, must have the same log. After each step the
loop runs until nothing happens any more. The log leaves out everything that the kernel decides: how data is split, and
how much of it waits in a buffer. For that reason the peer always reads everything, except after the step `stall`. That
step writes more than the kernel takes, and the peer then reads nothing until the step `peer_reads`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
import zlib
from typing import Any

from support import loop_factory, raw_pair

STREAMS = ("tcp", "unix")
DATAGRAMS = ("udp", "connected udp", "unix datagram")
PIPES = ("read pipe", "write pipe")
MUCH = 400_000
REACTIONS = ("none", "write", "close", "abort", "pause", "raise", "eof", "lines", "write and close", "swap", "limits")


class Reaction(Exception):
    """The exception that a callback raises."""


class Logging(asyncio.Protocol, asyncio.DatagramProtocol):
    """Logs its callbacks and then does what the model has planned for them."""

    def __init__(self, model: Model, name: str = "first") -> None:
        self.model = model
        self.name = name

    def connection_made(self, transport: Any) -> None:
        self.model.note("made", self.name)

    def data_received(self, data: bytes) -> None:
        assert type(data) is bytes
        self.model.note_data(data)
        self.model.react("data")

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self.model.note("datagram", self.name, len(data), data[:1])
        self.model.react("data")

    def error_received(self, exc: Exception) -> None:
        self.model.note("error", self.name, type(exc).__name__)
        self.model.react("error")

    def eof_received(self) -> Any:
        self.model.has_eof = True
        self.model.note("eof", self.name)
        self.model.react("eof")
        return self.model.keep_open

    def pause_writing(self) -> None:
        self.model.note("pause", self.name)
        self.model.react("pause")

    def resume_writing(self) -> None:
        self.model.note("resume", self.name)
        self.model.react("resume")

    def connection_lost(self, exc: BaseException | None) -> None:
        self.model.note("lost", self.name, type(exc).__name__)
        self.model.lost += 1
        self.model.react("lost")


class Buffered(asyncio.BufferedProtocol):
    """Logs like `Logging`, and receives into a buffer of its own."""

    def __init__(self, model: Model, name: str = "first") -> None:
        self.model = model
        self.name = name
        self.buffer = bytearray(7)

    def get_buffer(self, _sizehint: int) -> bytearray:
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.model.note_data(bytes(self.buffer[:nbytes]))
        self.model.react("data")

    connection_made = Logging.connection_made  # type: ignore[assignment]
    eof_received = Logging.eof_received  # type: ignore[assignment]
    pause_writing = Logging.pause_writing  # type: ignore[assignment]
    resume_writing = Logging.resume_writing  # type: ignore[assignment]
    connection_lost = Logging.connection_lost  # type: ignore[assignment]


class Model:
    """A loop, a transport of `kind` and its peer."""

    def __init__(self, loop_kind: str, kind: str, is_buffered: bool, pace_s: float = 0.0) -> None:
        self.loop_kind = loop_kind
        self.kind = kind
        self.pace_s = pace_s
        self.log: list[tuple[Any, ...]] = []
        self.reactions: dict[str, list[str]] = {}
        self.handles: list[asyncio.Handle] = []
        self.keep_open = False
        self.has_eof = False
        self.lost = 0
        self.is_stalled = False
        self.received = bytearray()
        self.loop = loop_factory(loop_kind)()
        self.loop.set_exception_handler(self.report)
        self.peer: Any = None
        self.other = -1
        self.transport: Any = None
        self.protocol_type = Buffered if is_buffered else Logging
        self.loop.run_until_complete(self.connect())
        self.settle()

    # ---------------------------------------------------------------- the log

    def report(self, _loop: Any, context: dict[str, Any]) -> None:
        if (error := context.get("exception")) is not None:
            if not isinstance(error, AttributeError):  # asyncio's pipes fail when a callback closes them
                self.note("reported", type(error).__name__)
        else:
            self.note("reported")

    def note(self, *entry: Any) -> None:
        self.log.append(entry)

    def note_data(self, data: bytes) -> None:
        if self.log and self.log[-1][0] == "data":
            self.log[-1] = ("data", self.log[-1][1] + data)
        else:
            self.note("data", data)

    # ---------------------------------------------------------------- both ends

    async def connect(self) -> None:
        loop, make = self.loop, lambda: self.protocol_type(self)
        if self.kind in STREAMS:
            if self.kind == "tcp":
                mine, self.peer = raw_pair(small=True)
            else:
                mine, self.peer = socket.socketpair()
                mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
            mine.setblocking(False)
            self.transport, _ = await loop.connect_accepted_socket(make, mine)
        elif self.kind in PIPES:
            ends = os.pipe()
            if self.kind == "read pipe":
                file, self.other = open(ends[0], "rb", buffering=0), ends[1]
                self.transport, _ = await loop.connect_read_pipe(make, file)
            else:
                file, self.other = open(ends[1], "wb", buffering=0), ends[0]
                self.transport, _ = await loop.connect_write_pipe(make, file)
            os.set_blocking(self.other, False)
        else:
            await self.connect_datagram(make)
        if self.peer is not None:
            self.peer.setblocking(False)

    async def connect_datagram(self, make: Any) -> None:
        if self.kind == "unix datagram":
            mine, self.peer = (socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2))
            for sock in (mine, self.peer):
                sock.bind("")  # an abstract address
            self.peer.connect(mine.getsockname())
            mine.connect(self.peer.getsockname())
        else:
            mine, self.peer = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
            for sock in (mine, self.peer):
                sock.bind(("127.0.0.1", 0))
            self.peer.connect(mine.getsockname())
            if self.kind == "connected udp":
                mine.connect(self.peer.getsockname())
        mine.setblocking(False)
        self.address = self.peer.getsockname()
        self.transport, _ = await self.loop.create_datagram_endpoint(make, sock=mine)

    def settle(self) -> None:
        """Run iterations of the loop until nothing happens any more."""
        quiet = 0
        while quiet < 3:
            before = len(self.log), len(self.log[-1][-1]) if self.log and self.log[-1][0] == "data" else 0
            if self.pace_s:
                time.sleep(self.pace_s)
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()
            moved = not self.is_stalled and self.drain()
            after = len(self.log), len(self.log[-1][-1]) if self.log and self.log[-1][0] == "data" else 0
            quiet = 0 if moved or before != after else quiet + 1

    def drain(self) -> bool:
        """Read everything that the peer has received; return whether there was anything."""
        moved = False
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    if self.kind in DATAGRAMS:
                        data = self.peer.recv(70_000)
                        self.note("peer got", len(data))
                    elif self.peer is not None and self.peer.fileno() >= 0:
                        data = self.peer.recv(65_536)
                    elif self.kind == "write pipe" and self.other >= 0:
                        data = os.read(self.other, 65_536)
                    else:
                        return moved
                except ConnectionResetError:
                    self.note("peer reset")
                    self.peer.close()
                    return moved
                except ConnectionRefusedError:
                    continue
                except OSError:  # closed
                    return moved
                if not data and self.kind not in DATAGRAMS:
                    if self.log[-1] != ("peer eof",) and ("peer eof",) not in self.log:
                        self.note("peer eof")
                    return moved
                self.received += data
                moved = True
        return moved

    def finish(self) -> tuple[Any, ...]:
        """End the connection and close everything. Return how often `connection_lost` was called."""
        self.is_stalled = False
        self.reactions.clear()
        with contextlib.suppress(Exception):  # asyncio's own method fails on a transport that is already gone
            (self.transport.close if self.kind == "read pipe" else self.transport.abort)()
        for _ in range(3):
            self.settle()
        outcome = self.lost
        self.loop.close()
        if self.peer is not None:
            self.peer.close()
        if self.other >= 0:
            os.close(self.other)
            self.other = -1
        return ("calls of connection_lost", outcome)

    # ---------------------------------------------------------------- steps

    def step(self, name: str, *arguments: Any) -> None:
        self.note("step", name)
        self.do(name, *arguments)
        self.settle()
        if self.lost == 0:
            arrived = () if self.is_stalled else (zlib.crc32(self.received),)
            self.note("state", self.transport.is_closing(), *self.is_reading(), *arrived)

    def do(self, name: str, *arguments: Any) -> None:
        try:
            result = getattr(self, f"do_{name}")(*arguments)
        except NotImplementedError:  # asyncio's pipes inherit the methods of the other direction
            self.note("raised", "AttributeError")
        except AssertionError:  # asyncio's pipes assert the type of what is written
            self.note("raised", "TypeError")
        except Exception as error:
            self.note("raised", type(error).__name__)
        else:
            if result is not None:
                self.note("returned", result)

    def is_reading(self) -> tuple[Any, ...]:
        return (self.transport.is_reading(),) if self.kind in (*STREAMS, "read pipe") else ()

    def react(self, event: str) -> None:
        """Take the next action that is planned for this callback."""
        waiting = self.reactions.get(event)
        if not waiting or self.lost > 1:
            return
        action, transport = waiting.pop(0), self.transport
        self.note("reaction", action)
        if action == "raise":
            raise Reaction
        with contextlib.suppress(AttributeError, NotImplementedError):  # not every transport has this method
            if action.startswith("write"):
                self.send(b"in a callback")
            if action in {"close", "write and close"}:
                transport.close()
            elif action == "abort":
                transport.abort()
            elif action == "pause":
                transport.pause_reading()
            elif action == "eof":
                transport.write_eof()
            elif action == "lines":
                self.do_write_lines([b"one", b"", bytearray(b"two")])
            elif action == "swap":
                transport.set_protocol(Logging(self, "swapped"))
            # Not for a write pipe: asyncio's calls resume_writing only when its buffer is empty, grapeshot's earlier.
            elif action == "limits" and self.kind != "write pipe":
                transport.set_write_buffer_limits(high=0)

    def send(self, data: Any) -> None:
        if self.kind in DATAGRAMS:
            self.transport.sendto(data, self.address if self.kind == "udp" else None)
        else:
            self.transport.write(data)

    def do_write(self, data: Any) -> None:
        self.send(data)

    def do_write_lines(self, pieces: list[Any]) -> None:
        if sys.version_info[:2] in {(3, 12), (3, 13)} and self.transport.is_closing():
            # in 3.12.1 and 3.13.0, writelines() of a closing transport of asyncio calls connection_lost at once
            self.transport.write(b"".join(pieces))
        else:
            self.transport.writelines(pieces)

    def do_write_soon(self, data: bytes) -> None:
        self.handles.append(self.loop.call_soon(self.send, data))

    def do_write_and_cancel(self, data: bytes) -> None:
        self.loop.call_soon(self.send, data).cancel()

    def do_stall(self) -> None:
        """Write more than the kernel takes. The peer stops reading."""
        self.is_stalled = True
        self.send(bytes(MUCH))

    def do_peer_reads(self) -> None:
        self.is_stalled = False

    def do_write_eof(self) -> None:
        with contextlib.suppress(OSError):  # asyncio's own method raises the error of a dead socket
            self.transport.write_eof()

    def do_close(self) -> None:
        self.transport.close()

    def do_abort(self) -> None:
        self.transport.abort()

    def do_pause_reading(self) -> None:
        self.transport.pause_reading()

    def do_resume_reading(self) -> None:
        if not self.has_eof:  # asyncio would report the end of the stream again
            self.transport.resume_reading()

    def do_limits(self, high: Any, low: Any) -> Any:
        self.transport.set_write_buffer_limits(high=high, low=low)
        return self.transport.get_write_buffer_limits()

    def do_together(self, steps: list[tuple[Any, ...]]) -> None:
        """Do all of the steps in one callback of the loop."""

        def callback() -> None:
            for step in steps:
                self.do(*step)

        self.loop.call_soon(callback)

    def do_nothing(self) -> None:
        pass

    def do_has_written_all(self) -> bool:
        return bool(self.transport.get_write_buffer_size() == 0)

    def do_set_protocol(self, is_buffered: bool) -> None:
        self.transport.set_protocol((Buffered if is_buffered else Logging)(self, "another"))

    def do_protocol_name(self) -> Any:
        return getattr(self.transport.get_protocol(), "name", None)

    def do_plan(self, event: str, action: str) -> None:
        self.reactions.setdefault(event, []).append(action)

    def do_keep_open(self, answer: bool) -> None:
        self.keep_open = answer

    def do_send_elsewhere(self, address: Any) -> None:
        self.transport.sendto(b"elsewhere", address)

    # If the peer is already closed, the steps below do nothing, or fail in the same way in both models.

    def do_peer_sends(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            if self.other >= 0:
                os.write(self.other, data)
            else:
                self.peer.send(data)

    def do_peer_ends(self) -> None:
        with contextlib.suppress(OSError):
            self.peer.shutdown(socket.SHUT_WR)

    def do_peer_closes(self) -> None:
        if self.other >= 0:
            os.close(self.other)
            self.other = -1
        else:
            self.peer.close()

    def do_peer_resets(self) -> None:
        with contextlib.suppress(OSError):
            self.peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.peer.close()
