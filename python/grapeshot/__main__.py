"""``python -m grapeshot app.py``: run a program with :func:`grapeshot.install` called before it.

Arguments, exit status, tracebacks and Ctrl-C are the same as with ``python app.py``. ``enable``, ``disable``,
``attach``, ``top``, ``tree`` and ``profile`` are commands of this module; to run a script that has one of these names,
write ``./`` before the name.
"""

from __future__ import annotations

import importlib
import os
import sys

import grapeshot
from grapeshot._start import other_loops
from grapeshot._start import program as _program

_USAGE = """\
usage: python -m grapeshot script.py [argument ...]
       python -m grapeshot -m module [argument ...]
       python -m grapeshot -c code [argument ...]
       python -m grapeshot - [argument ...]     (read the program from standard input)
       python -m grapeshot enable [--user]
       python -m grapeshot disable
       python -m grapeshot attach [--plain] PATH|PID
       python -m grapeshot top [--interval S] [--slow S] PATH|PID
       python -m grapeshot tree PATH|PID
       python -m grapeshot profile show|html FILE
       python -m grapeshot --version

Run a program with grapeshot as asyncio's event loop. If the program chooses another event loop itself, a line on stderr
says so, unless GRAPESHOT_QUIET=1 is set in the environment. GRAPESHOT_BACKDOOR=PATH opens a back door at PATH for
attach, top and tree; if PATH is a directory, each process opens one there.
enable   Add a file to this Python's site-packages (--user: to the user's). From then on, setting GRAPESHOT_INSTALL=1 in
         the environment makes every process of this Python use grapeshot.
disable  Remove that file.
attach   Open a Python prompt inside a process that has opened a back door (grapeshot.insight.backdoor).
top      Watch such a process: its statistics, slow callbacks, coros and tasks, and descriptors.
tree     Print its coros and tasks with what they wait for, and its timers, sockets and threads.
profile  Show a profile that grapeshot.insight.profiler has saved, or make a web page of it.
"""

# For each command, the function that takes its arguments and returns the exit status.
_COMMANDS = {
    "attach": "insight._attach:main",
    "disable": "_start.site:disable",
    "enable": "_start.site:enable",
    "profile": "insight.profiler.__main__:main",
    "top": "insight._top:main",
    "tree": "insight._print_tree:main",
}


def main() -> None:
    arguments = sys.argv[1:]
    if arguments and arguments[0] in _COMMANDS:
        module, _, function = _COMMANDS[arguments[0]].partition(":")
        sys.exit(getattr(importlib.import_module(f"grapeshot.{module}"), function)(arguments[1:]))
    if arguments == ["--version"]:
        sys.stdout.write(f"grapeshot {grapeshot.__version__} on {sys.implementation.name} {sys.version.split()[0]}\n")
        sys.exit(0)
    program = _program.prepare(arguments)
    if program is None:
        _program.exit_with_usage(arguments, _USAGE)
    other_loops.configure_uvicorn(arguments)
    other_loops.install_here()
    if os.environ.get("GRAPESHOT_BACKDOOR"):
        from grapeshot.insight.backdoor import _enabling

        _enabling.open_by_environment()
    _program.end(_program.execute(program))


main()
