"""The connection of one client: lines come in, text goes out, and memory is limited.

The protocol is plain text, which ``nc -U`` can use, unless the client begins with a greeting, as ``python -m grapeshot
attach`` does. After the greeting both sides send frames, so that the client can recognize prompts and ask for
completions. In plain text, a byte 3 (Ctrl-C) is an interruption.

```text
   client -> server   HELLO, then frames          server -> client   text, then NUL, then frames
   frame              1 byte: kind    4 bytes: length, big endian    length bytes
   s source   i interrupt   c complete this   e end                o output   p prompt   c completions (JSON)
```

A client that uses frames gets a prompt only when all its lines have been run. The prompt begins with the number of all
``s`` and ``i`` frames that the server has received from the client so far. The client compares this number with how
many it has sent, and so can tell the prompt after an interruption from the one before it.

Writing never waits. Output that a client does not read is kept up to a limit and dropped beyond it; once the client
reads again, it is told how much was dropped. Until then, no further command is run. If the answers to a client's
requests (prompts, completions) exceed the limit, nothing more is read from that client.
"""

from __future__ import annotations

import asyncio
import collections
import json
import select
import socket
import struct
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

HELLO = b"\0grapeshot attach 1\n"
_HEADER = struct.Struct(">cI")
_ASKING = (b"s", b"i")

# Limits: bytes of output that a client has not read yet, and characters of input that has not been run yet.
MAX_OUTPUT_LEN = 4 << 20
MAX_INPUT_LEN = 1 << 20
_PIECE = 1 << 16
_INTERRUPT = 3
_GONE = select.POLLHUP | select.POLLERR
# How often to check whether a client that has ended its input is still there.
_CHECK_S = 1.0
# How long a client has to read the remaining output when the connection is closed.
_CLOSE_WITHIN_S = 5.0


def frame(kind: bytes, data: bytes) -> bytes:
    """Return the bytes of a frame."""
    return _HEADER.pack(kind, len(data)) + data


def take_frame(received: bytearray) -> tuple[bytes, bytes] | None:
    """Remove the first frame from the received data; return its kind and data, or None if it is not complete yet.

    Raises:
        ValueError: this is not a frame, because its length is larger than that of any frame that is ever sent.
    """
    if len(received) < _HEADER.size:
        return None
    kind, length = _HEADER.unpack_from(received)
    if length > MAX_OUTPUT_LEN:
        raise ValueError(f"invalid frame of {length} bytes: the limit is {MAX_OUTPUT_LEN}")
    end = _HEADER.size + length
    if len(received) < end:
        return None
    data = bytes(received[_HEADER.size : end])
    del received[:end]
    return kind, data


class Wire:
    """Owns the socket of a client. Only the loop's thread may use it, but any thread may call :meth:`write`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        on_interrupt: Callable[[], None],
        on_gone: Callable[[], None],
        complete: Callable[[str], list[str]],
    ) -> None:
        sock.setblocking(False)
        self._loop = loop
        self._sock = sock
        self._on_interrupt = on_interrupt
        self._on_gone = on_gone
        self._complete = complete
        self._thread = threading.get_ident()
        self._received = bytearray()
        self._lines: collections.deque[str] = collections.deque()
        self._lines_len = 0
        self._is_framed: bool | None = None  # None until the client has sent enough to tell
        self._answered = 0
        self._has_ended = False
        self._is_reading = True
        self._to_send = bytearray()
        self._dropped_len = 0
        self._from_threads: collections.deque[str] = collections.deque()
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_closing = False
        self.is_open = True
        loop.add_reader(sock, self._read)

    # ------------------------------------------------------------------ for the session

    async def next_line(self) -> str | None:
        """Return the next line of input, or None at its end. Other tasks and coros get to run first in any case."""
        await asyncio.sleep(0)
        while not self._lines:
            if self._has_ended or not self.is_open:
                return None
            await self._wait()
        line = self._lines.popleft()
        self._lines_len -= len(line) + 1
        self._resume()
        return line

    async def wait_read(self) -> None:
        """Wait until the unread output is at most half of its limit.

        If output was dropped, wait until everything that was kept is read.
        """
        while self.is_open and (self._dropped_len or len(self._to_send) > MAX_OUTPUT_LEN // 2):
            await self._wait()

    def write(self, text: str) -> bool:
        """Send output without waiting, from any thread. Return False if the connection is closed."""
        if not self.is_open or self._is_closing:
            return False
        if threading.get_ident() == self._thread:
            self._output(text)
            return True
        self._from_threads.append(text)
        try:
            self._loop.call_soon_threadsafe(self._output, "")
        except RuntimeError:
            return False  # the loop is closed
        return True

    def prompt(self, text: str) -> None:
        """Ask for the next line."""
        self._output("")
        if not self._is_framed:
            self._send(b"p", text.encode(), is_output=False)
        elif not self._lines:
            self._send(b"p", f"{self._answered} {text}".encode(), is_output=False)

    def close(self) -> None:
        """Send the remaining output, for at most some seconds, and close the connection. Idempotent."""
        if self._is_closing or not self.is_open:
            return
        self._is_closing = True
        self._stop_reading()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._to_send:
            self._timer = self._loop.call_later(_CLOSE_WITHIN_S, self.abort)
        else:
            self.abort()

    def abort(self) -> None:
        """Close the connection at once. Idempotent."""
        if not self.is_open:
            return
        self.is_open = False
        self._stop_reading()
        self._loop.remove_writer(self._sock)
        self._to_send.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._sock.close()
        self._wake()

    def forget(self) -> None:
        """In the child of a fork: close the descriptor without using the loop."""
        self.is_open = False
        self._sock.close()

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _lose(self) -> None:
        """Handle the loss of the connection."""
        self.abort()
        self._on_gone()

    # ------------------------------------------------------------------ output

    def _output(self, text: str) -> None:
        """Send what other threads have written, and then ``text``."""
        if self._from_threads:
            written = [self._from_threads.popleft() for _ in range(len(self._from_threads))]
            text = "".join([*written, text])
        data = text.encode("utf-8", "backslashreplace")
        for at in range(0, len(data), _PIECE):
            self._send(b"o", data[at : at + _PIECE])

    def _send(self, kind: bytes, data: bytes, is_output: bool = True) -> None:
        if not self.is_open:
            return
        if is_output and (self._dropped_len or len(self._to_send) + len(data) > MAX_OUTPUT_LEN):
            self._dropped_len += len(data)
            return
        self._send_bytes(frame(kind, data) if self._is_framed else data)

    def _send_bytes(self, data: bytes) -> None:
        was_empty = not self._to_send
        self._to_send += data
        if was_empty:
            self._write()

    def _write(self) -> None:
        try:
            while self._to_send:
                sent = self._sock.send(memoryview(self._to_send)[:_PIECE])
                del self._to_send[:sent]
        except BlockingIOError:
            self._loop.add_writer(self._sock, self._write)
        except OSError:
            self._lose()
            return
        else:
            self._loop.remove_writer(self._sock)
            if self._dropped_len:
                dropped, self._dropped_len = self._dropped_len, 0
                self._output(f"\n[{dropped} bytes of output were dropped: they were not read in time]\n")
            elif self._is_closing:
                self.abort()
        if len(self._to_send) <= MAX_OUTPUT_LEN // 2:
            self._wake()
            self._resume()

    # ------------------------------------------------------------------ input

    def _read(self) -> None:
        try:
            data = self._sock.recv(_PIECE)
        except BlockingIOError:
            return
        except OSError:
            self._lose()
            return
        if not data:
            self._end()
            return
        self._received += data
        if self._is_framed is None and not self._greet():
            return
        if self._is_framed:
            self._take_frames()
        else:
            self._take_text()
        self._wake()
        if self.is_open and self._lines_len + len(self._received) > MAX_INPUT_LEN:
            if self._lines:
                self._stop_reading()
            else:
                self._output("\n[this line is too long]\n")
                self._end()
        if len(self._to_send) > MAX_OUTPUT_LEN:
            self._stop_reading()  # the client does not read the answers to its input

    def _greet(self) -> bool:
        """Find out whether the client uses frames. Return False if it has not sent enough to tell."""
        start = self._received[: len(HELLO)]
        if len(start) < len(HELLO) and HELLO.startswith(start):
            return False
        self._is_framed = start == HELLO
        if self._is_framed:
            del self._received[: len(HELLO)]
            self._send_bytes(b"\0")
            self.prompt(">>> ")
        return True

    def _take_text(self) -> None:
        at = self._received.rfind(_INTERRUPT)
        if at >= 0:
            del self._received[: at + 1]
            self._interrupt()
        while (at := self._received.find(b"\n")) >= 0:
            self._add_line(self._received[:at])
            del self._received[: at + 1]

    def _take_frames(self) -> None:
        while self.is_open and not self._has_ended:
            try:
                taken = take_frame(self._received)
            except ValueError:
                self._lose()  # the client does not follow the protocol
                return
            if taken is None:
                return
            kind, data = taken
            self._answered += kind in _ASKING
            if kind == b"s":
                for line in data.split(b"\n"):
                    self._add_line(line)
            elif kind == b"i":
                self._interrupt()
            elif kind == b"c":
                has_room = len(self._to_send) <= MAX_OUTPUT_LEN
                found = self._complete(data.decode("utf-8", "replace")) if has_room else []
                self._send(b"c", json.dumps(found).encode(), is_output=False)
            elif kind == b"e":
                self._end()

    def _add_line(self, line: bytes | bytearray) -> None:
        text = line.decode("utf-8", "replace").removesuffix("\r")
        self._lines.append(text)
        self._lines_len += len(text) + 1

    def _interrupt(self) -> None:
        self._lines.clear()
        self._lines_len = 0
        self._on_interrupt()

    def _end(self) -> None:
        """Handle the end of the client's input. While the client stays connected, lines already received are run."""
        if not self.is_open:
            return
        if self._received and not self._is_framed:
            self._add_line(self._received)
            self._received.clear()
        self._has_ended = True
        self._stop_reading()
        self._wake()
        self._check_client()

    def _check_client(self) -> None:
        """Check whether the client has disconnected. After the end of its input, no event would report that."""
        self._timer = None
        poll = select.poll()
        poll.register(self._sock, 0)
        if any(events & _GONE for _fd, events in poll.poll(0)):
            self._lose()
        elif not self._is_closing:
            self._timer = self._loop.call_later(_CHECK_S, self._check_client)

    def _stop_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._sock)

    def _resume(self) -> None:
        if self._is_reading or self._has_ended or self._is_closing or not self.is_open:
            return
        if self._lines_len < MAX_INPUT_LEN // 2 and len(self._to_send) <= MAX_OUTPUT_LEN // 2:
            self._is_reading = True
            self._loop.add_reader(self._sock, self._read)
