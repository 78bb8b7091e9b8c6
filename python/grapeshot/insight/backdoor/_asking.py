"""Runs commands in a process through its back door, with the protocol of ``attach``, and returns what they print."""

from __future__ import annotations

import socket

from ._wire import HELLO, frame, take_frame

_CLOSED = "the process has closed the connection"
NOT_A_BACK_DOOR = "the other end is not a back door: it does not follow the protocol"
_MAX_BANNER = 1 << 16
# Enough for a line for each of a million coros.
_MAX_ANSWER = 1 << 28


class LostError(Exception):
    """The process has closed the connection, or it does not follow the back door's protocol."""


class Asker:
    """One connection to a back door. Only one thread may call :meth:`ask`; another one may call :meth:`tell`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._received = bytearray()
        self._has_begun = False
        self._asked = 0

    def ask(self, source: str) -> str:
        """Run a command in the process and return what it prints. Waits as long as the process takes.

        Raises:
            LostError: the connection has ended, or the other end is not a back door.
        """
        try:
            if not self._has_begun:
                self._greet()
                self._has_begun = True
            return self._ask(source)
        except OSError:
            raise LostError(_CLOSED) from None
        except ValueError:  # the data is not a frame of a back door
            raise LostError(NOT_A_BACK_DOOR) from None

    def tell(self, source: str) -> None:
        """Run a command in the process without waiting for it."""
        try:
            self._send(source)
        except OSError:
            pass

    def _greet(self) -> None:
        self._sock.sendall(HELLO)
        while b"\0" not in self._received:
            self._receive()
            if len(self._received) > _MAX_BANNER and b"\0" not in self._received:
                raise ValueError("no greeting")
        del self._received[: self._received.index(b"\0") + 1]

    def _send(self, source: str) -> None:
        self._sock.sendall(frame(b"s", source.encode()))

    def _ask(self, source: str) -> str:
        self._asked += 1
        self._send(source)
        output = bytearray()
        while True:
            kind, data = self._frame()
            if kind == b"o":
                output += data
                if len(output) > _MAX_ANSWER:
                    raise ValueError("the answer is too long")
            elif kind == b"p" and int(data.partition(b" ")[0]) >= self._asked:
                return output.decode("utf-8", "replace")

    def _frame(self) -> tuple[bytes, bytes]:
        while (taken := take_frame(self._received)) is None:
            self._receive()
        return taken

    def _receive(self) -> None:
        data = self._sock.recv(1 << 16)
        if not data:
            raise LostError(_CLOSED)
        self._received += data
