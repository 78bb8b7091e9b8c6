"""``python -m grapeshot top PATH``: watch a process that has opened a back door, as ``top`` watches a machine."""

from __future__ import annotations

import argparse
import sys

from grapeshot._tally import printable_lines
from grapeshot.backdoor._reach import RefusedError, connect

from ._probe import Probe

_MAX_S = 1e6


def main(arguments: list[str]) -> int:
    """Show the process at the other end of a back door, with the arguments of the command; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m grapeshot top",
        description="Watch a process that has opened a back door (grapeshot.backdoor): its numbers, the slowest "
        "callbacks with their stacks, coros and tasks, and descriptors.",
    )
    parser.add_argument("path", metavar="PATH|PID", help="the unix socket of the back door, or the id of the process")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds between two looks (%(default)s)"
    )
    parser.add_argument(
        "--slow", type=float, default=0.01, metavar="S", help="what counts as a slow callback, in seconds (%(default)s)"
    )
    options = parser.parse_args(arguments)
    if not (0 < options.interval < _MAX_S and 0 < options.slow < _MAX_S):
        parser.error("--interval and --slow must be positive numbers of seconds")
    try:
        from ._screen import Screen
    except ImportError as exc:
        sys.stderr.write(f"{exc}: pip install 'grapeshot[top]'\n")
        return 1
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        sys.stderr.write("top needs a terminal; `await top()` in the back door prints once\n")
        return 1
    try:
        sock, _ = connect(options.path)
    except RefusedError as exc:
        # It may name paths that another user has chosen.
        sys.stderr.write(f"{printable_lines(exc)}\n")
        return 1
    with sock:
        screen = Screen(Probe(sock, options.slow), options.interval)
        return screen.run()
