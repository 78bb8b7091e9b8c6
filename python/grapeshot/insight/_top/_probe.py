"""Gets samples from a back door, with the same protocol that ``attach`` uses."""

from __future__ import annotations

import json
import socket

from grapeshot.insight.backdoor._wire import HELLO, frame, take_frame

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_CLOSED = "the process has closed the connection"
# If the answer is not a sample but, for instance, a traceback, show this many characters from its end.
_MOST_WORDS = 500
_MOST_BANNER = 1 << 16
# Enough for a line for each of a million coros.
_MOST_ANSWER = 1 << 28
_NOT_A_BACK_DOOR = "the other end is not a back door: it does not follow the protocol"
_BEGIN = "from grapeshot.insight.backdoor._sampling import Sampler as _Sampler; _sampler = _Sampler(loop, {slow_s!r})"


class LostError(Exception):
    """The process has closed the connection, or it does not follow the back door's protocol."""


class Probe:
    """One connection to a back door. Only one thread may use it."""

    def __init__(self, sock: socket.socket, slow_s: float) -> None:
        self._sock = sock
        self._slow_s = slow_s
        self._received = bytearray()
        self._has_begun = False
        self._asked = 0

    def sample(self, *parts: str) -> dict[str, Any]:
        """Return the result of ``Sampler.look(*parts)`` in the process. Waits as long as the process takes.

        Raises:
            LostError: the connection has ended, or the other end is not a back door.
        """
        try:
            if not self._has_begun:
                self._sock.sendall(HELLO)
                while b"\0" not in self._received:
                    self._receive()
                    if len(self._received) > _MOST_BANNER and b"\0" not in self._received:
                        raise ValueError("no greeting")
                del self._received[: self._received.index(b"\0") + 1]
                self._ask(_BEGIN.format(slow_s=self._slow_s))
                self._has_begun = True
            answer = self._ask(f"_sampler.sample(*{parts!r})")
        except OSError:
            raise LostError(_CLOSED) from None
        except ValueError:  # the data is not a frame of a back door
            raise LostError(_NOT_A_BACK_DOOR) from None
        try:
            found: dict[str, Any] = json.loads(answer)
        except ValueError:
            raise LostError(answer.strip()[-_MOST_WORDS:] or "no answer") from None
        except RecursionError:
            raise LostError(_NOT_A_BACK_DOOR) from None
        if not _is_sample(found, parts):
            raise LostError(_NOT_A_BACK_DOOR)
        return found

    def end(self) -> None:
        """Tell the process to stop measuring, without waiting for it."""
        try:
            self._send("_sampler.end()")
        except OSError:
            pass  # the process then stops by itself when no more requests arrive

    def _send(self, source: str) -> None:
        self._sock.sendall(frame(b"s", source.encode()))

    def _ask(self, source: str) -> str:
        """Run a command in the process and return what it prints."""
        self._asked += 1
        self._send(source)
        output = bytearray()
        while True:
            kind, data = self._frame()
            if kind == b"o":
                output += data
                if len(output) > _MOST_ANSWER:
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


def _is_sample(found: Any, parts: tuple[str, ...]) -> bool:
    """Whether an answer has the fields that the screen and the dump rely on. The views check the rest."""
    return (
        isinstance(found, dict)
        and type(found.get("pid")) is int
        and isinstance(found.get("took_s"), int | float)
        and all(part in found for part in parts)
    )
