"""The client of a back door: ``python -m grapeshot attach PATH``.

The user edits lines with prompt_toolkit (the extra ``attach``), or with readline if prompt_toolkit is not installed. If
the input is not a terminal, lines are read as they come. The prompt runs in the process at the other end, which also
finds the completions.
"""

from __future__ import annotations

import argparse
import sys

from grapeshot.insight.backdoor._reach import connect_for_command

from ._editors import PipeEditor, ReadlineEditor
from ._link import Link

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# The client ends after the user has pressed Ctrl-C this many times without any answer from the process.
_MAX_UNANSWERED = 3


def main(arguments: list[str]) -> int:
    """Run ``python -m grapeshot attach`` with these arguments; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m grapeshot attach",
        description="Open a Python prompt inside a process that has opened a back door (grapeshot.insight.backdoor).",
    )
    parser.add_argument("path", metavar="PATH|PID", help="the unix socket of the back door, or the process id")
    parser.add_argument("--plain", action="store_true", help="do not use prompt_toolkit, even if it is installed")
    options = parser.parse_args(arguments)
    return _attach(options.path, options.plain)


def _attach(path: str, plain: bool) -> int:
    reached = connect_for_command(path)
    if reached is None:
        return 1
    with reached.sock:
        is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        link = Link(reached.sock, shows_banner=is_terminal, is_own=reached.is_own)
        editor = _make_editor(link, plain) if is_terminal else PipeEditor()
        link.start(editor.stop)
        return _talk(link, editor)


def _make_editor(link: Link, plain: bool) -> Any:
    if not plain:
        try:
            from ._prompt import PromptEditor
        except ImportError as exc:
            sys.stderr.write(f"{exc}: using plain line editing (for more: pip install 'grapeshot[attach]')\n")
        else:
            return PromptEditor(link)
    return ReadlineEditor(link)


def _talk(link: Link, editor: Any) -> int:
    unanswered = 0
    heard = -1
    has_ended = is_interrupted = False
    while True:
        try:
            if is_interrupted:
                is_interrupted = False
                unanswered = unanswered + 1 if link.heard == heard else 1
                heard = link.heard
                if unanswered == _MAX_UNANSWERED:
                    sys.stderr.write("\nThe process does not answer: something is blocking its event loop.\n")
                    return 1
                link.send(b"i")
            prompt = link.next_prompt()
            if prompt is None:
                return 0 if has_ended or link.is_greeted else 1
            link.send(b"s", editor.read(prompt))
        except KeyboardInterrupt:
            is_interrupted = True
        except EOFError:
            has_ended = True
            link.send(b"e")
