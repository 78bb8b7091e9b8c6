"""``python -m grapeshot top PATH|PID``: watch a process that has opened a back door, as ``top`` watches a machine."""

from __future__ import annotations

import argparse
import sys

from grapeshot.insight.backdoor._reach import connect_for_command

from ._probe import Probe

_MAX_S = 1e6


def main(arguments: list[str]) -> int:
    """Run ``python -m grapeshot top`` with these arguments; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m grapeshot top",
        description="Watch a process that has opened a back door (grapeshot.insight.backdoor): its statistics, the "
        "slowest callbacks with their stacks, its coros and tasks, and its descriptors.",
    )
    parser.add_argument("path", metavar="PATH|PID", help="the unix socket of the back door, or the process id")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds between updates (default: %(default)s)"
    )
    parser.add_argument(
        "--slow",
        type=float,
        default=0.01,
        metavar="S",
        help="show callbacks that take at least this many seconds (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    if not (0 < options.interval < _MAX_S and 0 < options.slow < _MAX_S):
        parser.error(f"--interval and --slow must be more than 0 and less than {_MAX_S:.0f} seconds")
    try:
        from ._screen import Screen
    except ImportError as exc:
        sys.stderr.write(f"{exc}: pip install 'grapeshot[top]'\n")
        return 1
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        sys.stderr.write("top needs a terminal; without one, use `await top()` in the back door, which prints once\n")
        return 1
    reached = connect_for_command(options.path)
    if reached is None:
        return 1
    with reached.sock:
        screen = Screen(Probe(reached.sock, options.slow), options.interval)
        return screen.run()
