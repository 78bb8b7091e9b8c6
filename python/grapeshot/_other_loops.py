"""What is done about programs that choose a loop by themselves, in a process that is to run on grapeshot.

``python -m grapeshot`` and GRAPESHOT_INSTALL reach what asks asyncio for a loop. Some servers take uvloop instead if it
is installed. A server that can be told otherwise by a variable of the environment is told here, unless the user has set
that variable. For the rest :func:`watch` writes one line to stderr for each kind of loop that is started; with
GRAPESHOT_QUIET=1 it writes none.

No thread owns this module. The package itself does not import it: :func:`grapeshot.install` neither sets variables nor
watches.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import types

from . import _run
from ._loop import Loop

# Variables of servers' commands with which they ask asyncio for a loop. In an environment without grapeshot, where a
# child process may run, they mean asyncio's own.
_SETTINGS = {"GRANIAN_LOOP": "asyncio", "SANIC_USE_UVLOOP": "false", "UVICORN_LOOP": "none"}

_OURS = "grapeshot:new_event_loop"
# What to change, by the package that has started the loop.
_ADVICE = {
    "fastapi_cli": f"use `uvicorn --loop {_OURS}` instead of fastapi's command",
    "granian": "use `granian --loop asyncio`",
    "gunicorn": "use `gunicorn --asgi-loop asyncio`",
    "robyn": "robyn has no setting for its loop",
    "sanic": "set `app.config.USE_UVLOOP = False`",
    "uvicorn": f"give uvicorn `loop='{_OURS}'`",
    "uvicorn_worker": "use `gunicorn -k grapeshot.gunicorn.UvicornWorker`",
}
_ADVICE_TO_OTHERS = "leave out the install(), the policy or the loop factory that chooses it"

_is_watching = False
_reported: set[type] = set()


def install_everywhere() -> None:
    """Install the loop, tell servers, watch: what GRAPESHOT_INSTALL does in each process."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    install_here()


def install_here() -> None:
    """Install the loop and watch: what ``python -m grapeshot`` does."""
    _run.install()
    watch()


def tell_uvicorn(arguments: list[str]) -> None:
    """If ``python -m grapeshot`` is to run uvicorn's command, have it use the loop, in its workers, too."""
    if arguments[:2] == ["-m", "uvicorn"] or os.path.basename(arguments[0]) == "uvicorn":
        os.environ.setdefault("UVICORN_LOOP", _OURS)


def watch() -> None:
    """From now on write a line to stderr when the first loop of another kind starts to run, in whichever thread.

    Every loop of asyncio calls ``_set_running_loop`` when it starts and when it stops. Loops that are imported later
    find the watched function in its place.
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
    if not _run.is_installed() or os.environ.get("GRAPESHOT_QUIET", "0") not in ("", "0") or sys.stderr is None:
        return
    kind = type(loop)
    _reported.add(kind)
    starters = _starters(frame, _package(kind.__module__))
    places = ", called from ".join(place for _, place in starters) or f"the thread {threading.current_thread().name!r}"
    names = [name for name, _ in starters]
    # Others start uvicorn, and have settings of their own.
    advisers = reversed(names) if names[:1] == ["uvicorn"] else names[:1]
    advice = next((_ADVICE[name] for name in advisers if name in _ADVICE), _ADVICE_TO_OTHERS)
    try:
        sys.stderr.write(
            f"grapeshot: {places} runs {kind.__module__}.{kind.__qualname__}, which is not grapeshot's loop: {advice} "
            "(GRAPESHOT_QUIET=1 silences this line)\n"
        )
    except (OSError, ValueError):
        pass  # stderr is closed


def _starters(frame: types.FrameType | None, of_loop: str) -> list[tuple[str, str]]:
    """Name and place of the package that starts the loop, and of the one that calls it, as far as there are any."""
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
