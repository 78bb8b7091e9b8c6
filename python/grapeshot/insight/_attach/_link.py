"""The client's connection. A thread reads from it, so that output appears while the user is editing a line."""

from __future__ import annotations

import codecs
import json
import queue
import socket
import sys
import threading

from grapeshot.insight._tally import printable_lines
from grapeshot.insight.backdoor._wire import HELLO, frame, take_frame

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_FIRST_PROMPT = ">>> "
# The kinds of frames that the process answers with a prompt.
_ASKING = (b"s", b"i")
_COMPLETION_S = 2.0
_MAX_BANNER = 1 << 16


class Link:
    """Sends frames to the process. Shows the output that the process sends, and queues its prompts and completions."""

    def __init__(self, sock: socket.socket, shows_banner: bool, is_own: bool = True) -> None:
        """Use the connected ``sock``.

        ``is_own`` says whether the process belongs to this user. If not, control characters in its output are replaced,
        so that it cannot move the cursor.
        """
        self._sock = sock
        self._is_own = is_own
        self._shows_banner = shows_banner
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._prompts: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
        self._completions: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        self._completing = threading.Lock()
        # How many requests for completions have not been answered. The process answers them in order.
        self._unanswered = 0
        self._asked = 0
        self.heard = 0
        """The number of bytes received."""
        self._has_ended = False
        self.is_greeted = False
        """Whether a back door has answered."""

    def start(self, on_end: Callable[[], None]) -> None:
        """Send the greeting and start the reading thread, which calls ``on_end`` when the connection has ended."""
        self._on_end = on_end
        self._send(HELLO)
        threading.Thread(target=self._read, name="attach", daemon=True).start()

    def send(self, kind: bytes, text: str = "") -> None:
        """Send a frame."""
        if kind in _ASKING:
            self._asked += 1
        self._send(frame(kind, text.encode("utf-8", "replace")))

    def next_prompt(self) -> str | None:
        """Wait until the process asks for a line; return its prompt, or None if the connection has ended."""
        while (entry := self._prompts.get()) is not None:
            answered, prompt = entry
            if answered >= self._asked and not self._has_ended:
                return prompt
        self._prompts.put(None)
        return None

    def complete(self, text: str) -> list[str]:
        """Return the completions of ``text``, a name with dots. The process finds them by inspecting its objects."""
        with self._completing:
            self.send(b"c", text)
            self._unanswered += 1
            found: list[str] = []
            try:
                while self._unanswered and not self._has_ended:  # the first answers may belong to earlier requests
                    found = self._completions.get(timeout=_COMPLETION_S)
                    self._unanswered -= 1
            except queue.Empty:
                return []
            return found

    def _send(self, data: bytes) -> None:
        try:
            self._sock.sendall(data)
        except OSError:
            pass  # the reading thread notices the end, too

    def _read(self) -> None:
        try:
            self._read_all()
        except OSError:
            pass
        except (ValueError, TypeError, RecursionError):  # the data is not a frame of a back door
            sys.stderr.write("\nThe other end is not a back door: it does not follow the protocol.\n")
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
                    if len(received) > _MAX_BANNER:
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
