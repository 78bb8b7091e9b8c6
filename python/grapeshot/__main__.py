"""``python -m grapeshot app.py``: run a program with :func:`grapeshot.install` called before it.

Arguments, exit status, tracebacks and Ctrl-C are those of ``python app.py``. ``enable``, ``disable``, ``attach`` and
``top`` are commands of this module: a script of such a name is run as ``./enable``.
"""

from __future__ import annotations

import os
import sys

import grapeshot
from grapeshot import _other_loops, _program

_USAGE = """\
usage: python -m grapeshot script.py [argument ...]
       python -m grapeshot -m module [argument ...]
       python -m grapeshot -c code [argument ...]
       python -m grapeshot - [argument ...]     (a program on the standard input)
       python -m grapeshot enable [--user]
       python -m grapeshot disable
       python -m grapeshot attach [--plain] PATH|PID
       python -m grapeshot top [--interval S] [--slow S] PATH|PID
       python -m grapeshot --version

Runs a program with grapeshot as asyncio's event loop. A loop of another kind that it chooses itself is named on stderr,
unless GRAPESHOT_QUIET=1 is in the environment. GRAPESHOT_BACKDOOR=PATH opens a back door at PATH for attach and top, in
a directory one for each process.
enable: from now on GRAPESHOT_INSTALL=1 in the environment does the same in every process of this Python, by a file in
        its site-packages (--user: in the user's).
disable: removes that file.
attach: opens a Python prompt inside a process that has opened a back door (grapeshot.backdoor), at PATH or wherever.
top: watches such a process: its numbers, slow callbacks, coros and tasks, descriptors.
"""


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[:1] in (["enable"], ["disable"]):
        from grapeshot import _site

        sys.exit(_site.main(arguments))
    if arguments[:1] == ["attach"]:
        from grapeshot import _attach

        sys.exit(_attach.main(arguments[1:]))
    if arguments[:1] == ["top"]:
        from grapeshot import _top

        sys.exit(_top.main(arguments[1:]))
    if arguments == ["--version"]:
        sys.stdout.write(f"grapeshot {grapeshot.__version__} on {sys.implementation.name} {sys.version.split()[0]}\n")
        sys.exit(0)
    program = _program.prepare(arguments)
    if program is None:
        _program.exit_with_usage(arguments, _USAGE)
    _other_loops.tell_uvicorn(arguments)
    _other_loops.install_here()
    if os.environ.get("GRAPESHOT_BACKDOOR"):
        from grapeshot.backdoor import _enabling

        _enabling.open_by_environment()
    _program.end(_program.execute(program))


main()
