"""The connection of the client. A thread reads what comes, so that output appears while a line is being edited."""

from __future__ import annotations

import codecs
import json
import queue
import socket
import sys
import threading

from grapeshot._tally import printable_lines
from grapeshot.backdoor._wire import HELLO, frame, take_frame

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_FIRST_PROMPT = ">>> "
# Kinds of frames that the other side answers with a prompt.
_ASKING = (b"s", b"i")
_COMPLETION_S = 2.0
_MOST_BANNER = 1 << 16


class Link:
    """Sends frames, and shows or keeps those that come."""

    def __init__(self, sock: socket.socket, shows_banner: bool, is_own: bool = True) -> None:
        """``is_own``: whether the process is this user's. What another one sends must not move the cursor."""
        self._sock = sock
        self._is_own = is_own
        self._shows_banner = shows_banner
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._prompts: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
        self._completions: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        self._asked = 0
        self.heard = 0
        """How much has come, in bytes."""
        self._has_ended = False
        self.is_greeted = False
        """Whether a back door has answered."""

    def start(self, on_end: Callable[[], None]) -> None:
        """Begin to talk; ``on_end`` is called in another thread when the other side has closed."""
        self._on_end = on_end
        self._send(HELLO)
        threading.Thread(target=self._read, name="attach", daemon=True).start()

    def send(self, kind: bytes, text: str = "") -> None:
        """Send a frame."""
        if kind in _ASKING:
            self._asked += 1
        self._send(frame(kind, text.encode("utf-8", "replace")))

    def next_prompt(self) -> str | None:
        """Wait until the other side wants a line; return its prompt, or None if it has closed."""
        while (entry := self._prompts.get()) is not None:
            answered, prompt = entry
            if answered >= self._asked and not self._has_ended:
                return prompt
        self._prompts.put(None)
        return None

    def complete(self, text: str) -> list[str]:
        """Return what could stand for a name with dots. The other side looks at its objects for that."""
        self.send(b"c", text)
        try:
            return self._completions.get(timeout=_COMPLETION_S)
        except queue.Empty:
            return []

    def _send(self, data: bytes) -> None:
        try:
            self._sock.sendall(data)
        except OSError:
            pass  # the thread that reads sees the end, too

    def _read(self) -> None:
        try:
            self._read_all()
        except OSError:
            pass
        except (ValueError, TypeError, RecursionError):  # what comes is no frame of a back door's
            sys.stderr.write("\nThe other side does not speak as a back door does.\n")
        self._has_ended = True
        self._prompts.put(None)
        self._completions.put([])
        self._on_end()

    def _read_all(self) -> None:
        received = bytearray()
        while data := self._sock.recv(1 << 16):
            self.heard += len(data)
            received += data
            if not self.is_greeted:
                banner, end, rest = received.partition(b"\0")
                if not end:
                    if len(received) > _MOST_BANNER:
                        raise ValueError("no greeting")
                    continue
                self.is_greeted = True
                received = rest
                if self._shows_banner:
                    self._show(banner.decode().removesuffix(_FIRST_PROMPT))
            while (taken := take_frame(received)) is not None:
                self._take(*taken)

    def _take(self, kind: bytes, data: bytes) -> None:
        if kind == b"o":
            self._show(self._decoder.decode(data))
        elif kind == b"p":
            answered, _, prompt = data.decode().partition(" ")
            self._prompts.put((int(answered), self._shown(prompt)))
        elif kind == b"c":
            self._completions.put([self._shown(str(found)) for found in json.loads(data)])

    def _shown(self, text: str) -> str:
        return text if self._is_own else printable_lines(text)

    def _show(self, text: str) -> None:
        text = self._shown(text)
        sys.stdout.write(text)
        sys.stdout.flush()
