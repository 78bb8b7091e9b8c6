"""``python -m grapeshot.profiler``: show a profile that was saved, make a page of it, or convert it."""

from __future__ import annotations

import argparse
import os
import sys

from ._exports import write_pstats, write_speedscope
from ._page import write_page
from ._profile import SORTS, Profile


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m grapeshot.profiler",
        description="Show a profile that was saved, make a page of it, or convert it.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="print tables of the functions and of the coros, tasks and threads")
    show.add_argument("file", metavar="FILE")
    show.add_argument("--sort", choices=SORTS, default="cpu", help="what to begin with (cpu)")
    show.add_argument("--limit", type=int, default=20, help="rows of each table (20)")
    show.add_argument("--owner", metavar="NAME", help="the functions of this coro, task or thread alone")
    show.add_argument("--each", action="store_true", help="a row for each coro and task, also for those that are alike")
    show.add_argument("--speedscope", metavar="OUT", help="write a file for speedscope instead")
    show.add_argument("--pstats", metavar="OUT", help="write a file for pstats instead")
    page = commands.add_parser("html", help="make one page, with tables and a graph")
    page.add_argument("file", metavar="FILE")
    page.add_argument("-o", "--output", metavar="OUT", help="where to (FILE.html)")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
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
