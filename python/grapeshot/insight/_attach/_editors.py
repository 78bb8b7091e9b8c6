"""Reading lines without prompt_toolkit, and the history of the lines that were typed."""

from __future__ import annotations

import os
import sys

from ._link import Link

_MAX_LINES = 2000
# The characters that cannot be part of a name to be completed. (A dot can be part of one.)
_DELIMITERS = " \t\n`~!@#$%^&*()-=+[{]}\\|;:'\",<>/?"


class History:
    """The lines of earlier sessions, in a file that only this user can read."""

    def __init__(self) -> None:
        self.path = os.environ.get("GRAPESHOT_HISTORY") or os.path.expanduser("~/.grapeshot_history")

    def load(self) -> list[str]:
        """Return the last lines of the history, the oldest first."""
        try:
            with open(self.path, encoding="utf-8", errors="replace") as file:
                return file.read().splitlines()[-_MAX_LINES:]
        except OSError:
            return []

    def add(self, line: str) -> None:
        """Append a line to the file, unless it is blank."""
        if not line.strip():
            return
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with open(fd, "w", encoding="utf-8", errors="replace") as file:
                file.write(line.rstrip("\n") + "\n")
        except OSError:
            pass  # the home directory is not writable, so no history is kept


class PipeEditor:
    """Reads lines from an input that is not a terminal, without showing prompts."""

    def read(self, _prompt: str) -> str:
        """Return the next line. Raises EOFError at the end of the input."""
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    def stop(self) -> None:
        """Do nothing: a read from the input cannot be ended early."""


class ReadlineEditor:
    """Reads lines from a terminal. Editing, history and completion work only if this Python has readline."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._found: list[str] = []
        self._history = History()
        self._is_reading = self._is_over = False
        try:
            import readline
        except ImportError:
            return
        is_libedit = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
        readline.set_completer_delims(_DELIMITERS)
        readline.set_completer(self._complete)
        for line in self._history.load():
            readline.add_history(line)

    def _complete(self, text: str, state: int) -> str | None:
        if state == 0:
            self._found = self._link.complete(text)
        return self._found[state] if state < len(self._found) else None

    def read(self, prompt: str) -> str:
        """Return the next line. Raises EOFError, KeyboardInterrupt."""
        self._is_reading = True
        if self._is_over:
            raise EOFError
        try:
            line = input(prompt)
        finally:
            self._is_reading = False
        self._history.add(line)
        return line

    def stop(self) -> None:
        """Handle the end of the connection. A read that has begun cannot be ended, so ask the user to press Enter."""
        self._is_over = True
        if self._is_reading:
            sys.stderr.write("\n[the process has closed the connection: press Enter]\n")
