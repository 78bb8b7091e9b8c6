"""Handles programs that choose another event loop themselves, in a process that is meant to run on grapeshot.

``python -m grapeshot`` and GRAPESHOT_INSTALL only affect programs that ask asyncio for a loop. Some servers use uvloop
instead if it is installed. ``python -m grapeshot`` and GRAPESHOT_INSTALL set the environment variables that make
granian and Sanic ask asyncio for a loop. GRAPESHOT_INSTALL also sets uvicorn's variable; ``python -m grapeshot`` does
so only to run uvicorn's command. A variable that the user has set is kept. For other cases, :func:`watch` writes one
line to stderr for each class of loop that is not grapeshot's, when the first loop of that class starts; with
GRAPESHOT_QUIET=1 it writes nothing.

Any thread may use this module. Importing the package does not import this module. :func:`grapeshot.install` does not
use this module, so a plain ``install()`` neither sets variables nor watches.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import types

from grapeshot._loop import Loop

from . import run

# Environment variables that make servers ask asyncio for a loop. A child process that inherits them may run in an
# environment without grapeshot. There they select asyncio's own loop, which works as well.
_SETTINGS = {"GRANIAN_LOOP": "asyncio", "SANIC_USE_UVLOOP": "false"}

_OURS = "grapeshot:new_event_loop"
# For each package that may have started the loop, the advice to the user.
_ADVICE = {
    "fastapi_cli": f"use `uvicorn --loop {_OURS}` instead of fastapi's command",
    "granian": "use `granian --loop asyncio`",
    "gunicorn": "use `gunicorn --asgi-loop asyncio`",
    "robyn": "robyn has no setting for its loop",
    "sanic": "set `app.config.USE_UVLOOP = False`",
    "uvicorn": f"give uvicorn `loop='{_OURS}'`",
    "uvicorn_worker": "use `gunicorn -k grapeshot.gunicorn.UvicornWorker`",
}
_ADVICE_TO_OTHERS = "remove the install(), policy or loop factory that chooses it"

_is_watching = False
_reported: set[type] = set()


def install_everywhere() -> None:
    """Do what :func:`install_here` does, and set uvicorn's variable. GRAPESHOT_INSTALL does this in each process."""
    os.environ.setdefault("UVICORN_LOOP", "none")
    install_here()


def install_here() -> None:
    """Set the servers' variables, install the loop, and watch. ``python -m grapeshot`` does this."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    run.install()
    watch()


def configure_uvicorn(arguments: list[str]) -> None:
    """If these arguments of ``python -m grapeshot`` run uvicorn's command, make it and its workers use the loop."""
    if arguments[:2] == ["-m", "uvicorn"] or os.path.basename(arguments[0]) == "uvicorn":
        os.environ.setdefault("UVICORN_LOOP", _OURS)


def watch() -> None:
    """Write a line to stderr for each class of loop that is not grapeshot's, when the first loop of that class starts.

    Every asyncio loop calls ``_set_running_loop`` when it starts and when it stops, so that function is replaced. Loops
    whose modules are imported later use the replacement, too.
    """
    global _is_watching
    if _is_watching:
        return
    _is_watching = True
    original = asyncio._set_running_loop

    def _set_running_loop(loop: asyncio.AbstractEventLoop | None, /) -> None:
        if loop is not None and not isinstance(loop, Loop) and type(loop) not in _reported:
            _report(loop, sys._getframe(1))
        original(loop)

    asyncio._set_running_loop = asyncio.events._set_running_loop = _set_running_loop


def _report(loop: asyncio.AbstractEventLoop, frame: types.FrameType) -> None:
    if not run.is_installed() or os.environ.get("GRAPESHOT_QUIET", "0") not in ("", "0"):
        return
    stderr = sys.stderr
    if stderr is None:
        return
    kind = type(loop)
    _reported.add(kind)
    starters = _starters(frame, _package(kind.__module__))
    place, *callers = [place for _, place in starters] or [f"the thread {threading.current_thread().name!r}"]
    if callers:
        place += f" (called from {', called from '.join(callers)})"
    names = [name for name, _ in starters]
    # If another package has started uvicorn, the user has to change that package's setting.
    advisers = reversed(names) if names[:1] == ["uvicorn"] else names[:1]
    advice = next((_ADVICE[name] for name in advisers if name in _ADVICE), _ADVICE_TO_OTHERS)
    text = (
        f"grapeshot: {place} runs {kind.__module__}.{kind.__qualname__}, which is not grapeshot's loop: {advice} "
        "(GRAPESHOT_QUIET=1 silences this line)\n"
    )
    is_original = stderr is sys.__stderr__
    try:
        if is_original:
            # Bypass the buffer: if the descriptor is closed, text left in the buffer would make the exit status 120.
            stderr.flush()
            os.write(stderr.fileno(), text.encode(stderr.encoding, "backslashreplace"))
        else:
            stderr.write(text)
    except (OSError, ValueError):
        pass  # stderr is closed


def _starters(frame: types.FrameType | None, of_loop: str) -> list[tuple[str, str]]:
    """Return (package, location) for the package that starts the loop, and for its caller if there is one."""
    found: dict[str, str] = {}
    while frame is not None:
        package = _package(str(frame.f_globals.get("__name__")))
        if package not in ("asyncio", "grapeshot", "multiprocessing", "runpy", "threading", of_loop):
            path = frame.f_code.co_filename.rpartition("/site-packages/")[2]
            found.setdefault(package, f"{path}:{frame.f_lineno}")
        frame = frame.f_back
    return list(found.items())[:2]


def _package(module: str) -> str:
    return module.partition(".")[0]
