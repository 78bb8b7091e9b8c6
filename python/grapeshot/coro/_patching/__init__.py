"""``coro.install()``: unmodified blocking code runs in coros.

Each part has a module with a function ``patch()``, which replaces names through ``_originals.replace``. What is
replaced works everywhere: in a coro it waits as a coro does, and where no coro runs it does what the original does.
asyncio, the executors of concurrent.futures, the import system and grapeshot keep the originals (``_originals``).
"""

from __future__ import annotations

import sys
import warnings

from grapeshot.coro import _other_patchers

from . import _again, _holders, _originals
from ._originals import get_original

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["PatchWarning", "get_original", "install", "install_thread_emulation", "is_patched"]

# The parts, in the order in which they are patched.
_PARTS = (
    "thread",
    "queue",
    "time",
    "socket",
    "dns",
    "select",
    "ssl",
    "os",
    "open",
    "subprocess",
    "multiprocessing",
    "stdin",
    "stdout",
    "signal",
    "sqlite3",
    "futures",
)
# Those that have to be asked for.
_BY_CHOICE = {"futures"}
# What a part is built on.
_NEEDS = {
    "ssl": ("socket",),
    "subprocess": ("time", "select", "os"),
    "open": ("os",),
    "stdin": ("os",),
    "stdout": ("os",),
    "multiprocessing": ("thread", "queue", "socket", "select", "os"),
    "sqlite3": ("time",),
    "futures": ("thread", "queue"),
}
_patched: set[str] = set()


class PatchWarning(RuntimeWarning):
    """Modules that were imported before :func:`install` hold names that it replaces."""


def _choose(parts: tuple[str, ...], switches: dict[str, bool]) -> list[str]:
    for name in (*parts, *switches):
        if name not in _PARTS:
            raise ValueError(f"install() has no part {name!r}; the parts are: {', '.join(_PARTS)}")
    chosen = {name for name in _PARTS if switches.get(name, name in parts if parts else name not in _BY_CHOICE)}
    for name in list(chosen):
        chosen.update(needed for needed in _NEEDS.get(name, ()) if switches.get(needed, True))
    return [name for name in _PARTS if name in chosen]


def _load(part: str) -> Any:
    """Return the module of a part. They are imported only where they are used."""
    if part == "thread":
        from . import _thread

        return _thread
    if part == "queue":
        from . import _queue

        return _queue
    if part == "time":
        from . import _time

        return _time
    if part == "socket":
        from . import _socket

        return _socket
    if part == "dns":
        from . import _dns

        return _dns
    if part == "select":
        from . import _select

        return _select
    if part == "ssl":
        from . import _ssl

        return _ssl
    if part == "os":
        from . import _os

        return _os
    if part == "open":
        from . import _open

        return _open
    if part == "subprocess":
        from . import _subprocess

        return _subprocess
    if part == "multiprocessing":
        from . import _multiprocessing

        return _multiprocessing
    if part == "stdin":
        from . import _stdin

        return _stdin
    if part == "stdout":
        from . import _stdout

        return _stdout
    if part == "signal":
        from . import _signal

        return _signal
    if part == "sqlite3":
        from . import _c_waits

        return _c_waits
    from . import _futures

    return _futures


def install(*parts: str, **switches: bool) -> None:
    """Replace the blocking parts of the standard library by such that let other coros run while a coro waits.

    Without arguments it patches all parts but ``futures``. With names (``install("thread", "time")``) it patches these
    and what they need, and with keywords (``install(queue=False)``) it leaves parts out. ``install(futures=True)`` also
    makes the threads of ``ThreadPoolExecutor`` coros. It belongs first in a program; a second call does nothing for the
    parts that are patched already.

    The parts are ``thread queue time socket dns select ssl os open subprocess multiprocessing stdin stdout signal
    sqlite3 futures``.

    Warns:
        PatchWarning: modules that were imported earlier hold originals, such as ``from time import sleep``. Plain
            names, and locks of modules that nobody holds, are replaced; classes that inherit from an original are not.

    Raises:
        ValueError: there is no such part.
        RuntimeError: gevent or eventlet has patched the standard library. After this function, theirs raise it.
    """
    _install(parts, switches)


def install_thread_emulation(*parts: str, **switches: bool) -> None:
    """The same as :func:`install`, by its name in Shrapnel."""
    _install(parts, switches)


def _install(parts: tuple[str, ...], switches: dict[str, bool]) -> None:
    chosen = [part for part in _choose(parts, switches) if part not in _patched]
    if not chosen:
        return
    _other_patchers.check("coro.install()", RuntimeError)
    before = set(_originals.originals)
    for part in chosen:
        _load(part).patch()
        _patched.add(part)
    if not _again.is_watching():
        _again.watch()
        for name, change in _other_patchers.refuse().items():
            _again.also(name, change)
    _originals.give_views()
    news = {}
    for key in _originals.originals.keys() - before:
        news[key] = getattr(sys.modules[key[0]], key[1])
    text = _holders.repair(news).describe()
    if text is not None:
        warnings.warn(text, PatchWarning, stacklevel=3)


def is_patched(name: str) -> bool:
    """Whether a part (``"thread"``), a module (``"threading"``) or a name (``"time.sleep"``) is patched."""
    if name in _PARTS:
        return name in _patched
    if any(module == name for module, _ in _originals.originals):
        return True
    module_name, _, attribute = name.rpartition(".")
    return (module_name, attribute) in _originals.originals
