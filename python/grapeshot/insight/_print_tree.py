"""``python -m grapeshot tree PATH|PID``: print what a running process is doing, without opening a prompt in it."""

from __future__ import annotations

import argparse
import sys

from ._tally import printable_lines
from .backdoor._asking import Asker, LostError
from .backdoor._reach import connect_for_command


def main(arguments: list[str]) -> int:
    """Print the tree of the process at the other end of a back door; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m grapeshot tree",
        description="Print the coros and tasks of a process that has opened a back door, with what they wait for, "
        "and its timers, sockets and threads.",
    )
    parser.add_argument("path", metavar="PATH|PID", help="the unix socket of the back door, or the id of the process")
    options = parser.parse_args(arguments)
    reached = connect_for_command(options.path)
    if reached is None:
        return 1
    try:
        with reached.sock:
            text = Asker(reached.sock).ask("tree()")
    except LostError as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    sys.stdout.write(text if reached.is_own else printable_lines(text) + "\n")
    return 0
