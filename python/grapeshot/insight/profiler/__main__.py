"""``python -m grapeshot.insight.profiler``: show a saved profile, make a web page of it, or convert it."""

from __future__ import annotations

import argparse
import os
import sys

from ._exports import write_pstats, write_speedscope
from ._page import write_page
from ._profile import SORTS, Profile


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m grapeshot.insight.profiler",
        description="Show a saved profile, make a web page of it, or convert it.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="print tables of the functions and of the coros, tasks and threads")
    show.add_argument("file", metavar="FILE")
    show.add_argument("--sort", choices=SORTS, default="cpu", help="the column to sort by (default: cpu)")
    show.add_argument("--limit", type=int, default=20, help="the number of rows in each table (default: 20)")
    show.add_argument("--owner", metavar="NAME", help="show only the functions of this coro, task or thread")
    show.add_argument("--each", action="store_true", help="give every coro and task a row of its own")
    show.add_argument("--speedscope", metavar="OUT", help="instead of printing, write a file for speedscope")
    show.add_argument("--pstats", metavar="OUT", help="instead of printing, write a file for pstats")
    page = commands.add_parser("html", help="make a single web page with tables and a graph")
    page.add_argument("file", metavar="FILE")
    page.add_argument("-o", "--output", metavar="OUT", help="the file to write (default: FILE.html)")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        profile = Profile.load(options.file)
        if options.command == "html":
            path = options.output or f"{options.file}.html"
            write_page(profile, path, os.path.basename(options.file))
            print(path)  # noqa: T201
            return 0
        if options.speedscope:
            write_speedscope(profile, options.speedscope)
        if options.pstats:
            write_pstats(profile, options.pstats)
        if not (options.speedscope or options.pstats):
            print(profile.table(options.sort, options.limit, options.owner, each=options.each))  # noqa: T201
    except (OSError, ValueError) as exc:
        print(exc, file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
