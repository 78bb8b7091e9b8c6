"""``python -m grapeshot tree PATH|PID``: print what a running process does, without a prompt inside it."""

from __future__ import annotations

import argparse
import sys

from ._tally import printable_lines
from .backdoor._asking import Asker, LostError
from .backdoor._reach import RefusedError, connect


def main(arguments: list[str]) -> int:
    """Print the tree of the process at the other end of a back door; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m grapeshot tree",
        description="Print the coros and tasks of a process that has opened a back door, with what they wait for, "
        "and its timers, sockets and threads.",
    )
    parser.add_argument("path", metavar="PATH|PID", help="the unix socket of the back door, or the id of the process")
    options = parser.parse_args(arguments)
    try:
        sock, is_own = connect(options.path)
        with sock:
            text = Asker(sock).ask("tree()")
    except (RefusedError, LostError) as exc:
        # The text may contain a path that another user has chosen.
        sys.stderr.write(f"{printable_lines(exc)}\n")
        return 1
    sys.stdout.write(text if is_own else printable_lines(text) + "\n")
    return 0
