"""Line editing, history and completion with prompt_toolkit."""

from __future__ import annotations

import re
from collections.abc import Iterable

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import History as BaseHistory
from prompt_toolkit.patch_stdout import patch_stdout

from ._editors import History
from ._link import Link

_NAME = re.compile(r"[\w.]+$")


class _Completer(Completer):
    """Asks the process for completions."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        match = _NAME.search(document.text_before_cursor)
        if match is None:
            return
        for found in self._link.complete(match[0]):
            yield Completion(found, start_position=-len(match[0]))


class _History(BaseHistory):
    """Lets prompt_toolkit use the same history file as the plain editor."""

    def __init__(self) -> None:
        super().__init__()
        self._file = History()

    def load_history_strings(self) -> Iterable[str]:
        return reversed(self._file.load())

    def store_string(self, string: str) -> None:
        self._file.add(string)


class PromptEditor:
    """Reads lines from a terminal. Output of the process appears above the line that is being edited."""

    def __init__(self, link: Link) -> None:
        self._is_over = False
        # Completion inspects the objects of a live process, so it happens only when the user presses Tab.
        self._session: PromptSession[str] = PromptSession(
            history=_History(),
            completer=_Completer(link),
            complete_in_thread=True,
            complete_while_typing=False,
            enable_history_search=True,
        )

    def read(self, prompt: str) -> str:
        """Return the next line. Raises EOFError, KeyboardInterrupt."""
        with patch_stdout(raw=True):
            line: str = self._session.prompt(prompt, pre_run=self._begin)
        return line

    def stop(self) -> None:
        """Handle the end of the connection: end the read."""
        self._is_over = True
        app = self._session.app
        loop = app.loop
        if loop is not None and app.is_running:
            loop.call_soon_threadsafe(self._exit)

    def _begin(self) -> None:
        """End the read that is just beginning, if the connection has already ended."""
        if self._is_over:
            self._session.app.exit(exception=EOFError)

    def _exit(self) -> None:
        app = self._session.app
        if app.is_running and not app.is_done:
            app.exit(exception=EOFError)
