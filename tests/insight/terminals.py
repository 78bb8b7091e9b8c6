"""Run programs on a pseudo-terminal: read what they show, and press keys."""

from __future__ import annotations

import os
import pty
import re
import select
import sys
import time
import warnings
from typing import Any

from support import CAP_S, wait_blocked

# Escape sequences that move the cursor or set colours and modes.
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|\r")
# The escape sequence with which a program asks its terminal for the cursor's position.
ASKS_PLACE = b"\x1b[6n"


class Terminal:
    """A Python program on its own terminal."""

    def __init__(self, *arguments: Any, **variables: str) -> None:
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24", **variables}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking warns if the test runner has threads
            self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, [sys.executable, *map(str, arguments)], environment)
        self._raw = b""
        self._places_told = 0
        self._text = ""
        self._seen = 0

    @property
    def shown(self) -> str:
        """The output after the text that `wait_for` has found last."""
        return self._text[self._seen :]

    def type(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def _take(self) -> bool:
        """Read the program's output. Return False if the program has ended."""
        if not select.select([self.fd], [], [], 0.05)[0]:
            return True
        try:
            data = os.read(self.fd, 65536)
        except OSError:
            return False
        self._raw += data
        while self._places_told < self._raw.count(ASKS_PLACE):  # count in all output: a read may end inside a sequence
            self._places_told += 1
            os.write(self.fd, b"\x1b[1;1R")
        self._text = CONTROL.sub("", self._raw.decode(errors="replace"))
        return bool(data)

    def wait_for(self, text: str) -> None:
        """Wait until the program shows this text, after the text that the previous call has found."""
        give_up = time.monotonic() + CAP_S
        while text not in self.shown:
            assert time.monotonic() < give_up, f"waited for {text!r}, but the program shows {self.shown!r}"
            assert self._take() or text in self.shown, f"the program has ended after {self.shown!r}"
        self._seen = self._text.index(text, self._seen) + len(text)

    def interrupt(self) -> None:
        """Press Ctrl-C when the program waits for input. Before that, readline echoes keys but loses the signal."""
        wait_blocked(self.pid)
        self.type("\x03")

    def press_until(self, key: str, text: str) -> None:
        """Press a key repeatedly until the program shows a text. Keys that follow too quickly count as one."""
        give_up = time.monotonic() + CAP_S
        while text not in self.shown:
            assert time.monotonic() < give_up, f"waited for {text!r}, but the program shows {self.shown!r}"
            self.type(key)
            next_press = time.monotonic() + 0.3
            while time.monotonic() < next_press and text not in self.shown:
                self._take()

    def finish(self) -> int:
        """Wait for the end of the program. Return the exit status."""
        give_up = time.monotonic() + CAP_S
        while self._take():
            assert time.monotonic() < give_up, f"the program does not end, and shows {self.shown!r}"
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_exc: object) -> None:
        if self.pid:
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)
        os.close(self.fd)
