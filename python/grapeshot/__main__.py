"""``python -m grapeshot app.py``: run a program with :func:`grapeshot.install` called before it.

Arguments, exit status, tracebacks and Ctrl-C are the same as with ``python app.py``. ``enable``, ``disable``,
``attach`` and ``top`` are commands of this module; to run a script that has one of these names, write ``./enable``.
"""

from __future__ import annotations

import os
import sys

import grapeshot
from grapeshot._start import other_loops, program as _program

_USAGE = """\
usage: python -m grapeshot script.py [argument ...]
       python -m grapeshot -m module [argument ...]
       python -m grapeshot -c code [argument ...]
       python -m grapeshot - [argument ...]     (read the program from standard input)
       python -m grapeshot enable [--user]
       python -m grapeshot disable
       python -m grapeshot attach [--plain] PATH|PID
       python -m grapeshot top [--interval S] [--slow S] PATH|PID
       python -m grapeshot --version

Run a program with grapeshot as asyncio's event loop. If the program chooses another event loop itself, a line on stderr
says so, unless GRAPESHOT_QUIET=1 is set in the environment. GRAPESHOT_BACKDOOR=PATH opens a back door at PATH for
attach and top; if PATH is a directory, each process opens one there.
enable   Add a file to this Python's site-packages (--user: to the user's). From then on, setting GRAPESHOT_INSTALL=1 in
         the environment makes every process of this Python use grapeshot.
disable  Remove that file.
attach   Open a Python prompt inside a process that has opened a back door (grapeshot.insight.backdoor).
top      Watch such a process: its statistics, slow callbacks, coros and tasks, and descriptors.
"""


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[:1] in (["enable"], ["disable"]):
        from grapeshot._start import site

        sys.exit(site.main(arguments))
    if arguments[:1] == ["attach"]:
        from grapeshot.insight import _attach

        sys.exit(_attach.main(arguments[1:]))
    if arguments[:1] == ["top"]:
        from grapeshot.insight import _top

        sys.exit(_top.main(arguments[1:]))
    if arguments == ["--version"]:
        sys.stdout.write(f"grapeshot {grapeshot.__version__} on {sys.implementation.name} {sys.version.split()[0]}\n")
        sys.exit(0)
    program = _program.prepare(arguments)
    if program is None:
        _program.exit_with_usage(arguments, _USAGE)
    other_loops.tell_uvicorn(arguments)
    other_loops.install_here()
    if os.environ.get("GRAPESHOT_BACKDOOR"):
        from grapeshot.insight.backdoor import _enabling

        _enabling.open_by_environment()
    _program.end(_program.execute(program))


main()
