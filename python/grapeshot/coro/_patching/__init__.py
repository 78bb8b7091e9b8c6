"""``coro.patch()``: patches the standard library, so that unmodified blocking code can run in coros.

Each part has a module with a function ``patch()``. Most of them replace names through ``_originals.replace``; some
change a class or an object. A replacement works everywhere: called in a coro, it waits as coros do; elsewhere, it does
what the original does. asyncio, the executors of concurrent.futures, the import system and grapeshot itself keep the
originals (``_originals``). Only the parts ``futures`` and ``to_thread`` change executors and asyncio; these two parts
are patched only if the caller of ``patch()`` names them.
"""

from __future__ import annotations

import importlib
import sys
import warnings

from grapeshot._loop.locks import real_rlock
from grapeshot.coro import _other_patchers

from . import _holders, _import_hooks, _originals
from ._originals import get_original

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["PatchWarning", "get_original", "is_patched", "patch"]

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
    "to_thread",
)
# Parts that are patched only if they are named.
_BY_CHOICE = {"futures", "to_thread"}
# The other parts that a part needs.
_NEEDS = {
    "ssl": ("socket",),
    "subprocess": ("time", "select", "os"),
    "open": ("os",),
    "stdin": ("os",),
    "stdout": ("os",),
    "multiprocessing": ("thread", "queue", "socket", "select", "os"),
    "sqlite3": ("time",),
    "futures": ("thread", "queue"),
    "to_thread": ("thread", "queue"),
}
# The parts whose module has another name.
_MODULES = {"sqlite3": "_c_waits"}

_patched: set[str] = set()
# Held during patch(). Without it, a thread could find a replacement that another thread has just made, and take it for
# the original. Reentrant: a module that patch() imports may call patch().
_lock = real_rlock()


class PatchWarning(RuntimeWarning):
    """Warns that modules imported before :func:`patch` held originals, or that the part ``to_thread`` has no effect."""


def _choose(parts: tuple[str, ...], switches: dict[str, bool]) -> list[str]:
    for name in (*parts, *switches):
        if name not in _PARTS:
            raise ValueError(f"patch() has no part {name!r}; the parts are: {', '.join(_PARTS)}")
    chosen = {name for name in _PARTS if switches.get(name, name in parts if parts else name not in _BY_CHOICE)}
    for name in list(chosen):
        chosen.update(needed for needed in _NEEDS.get(name, ()) if switches.get(needed, True))
    return [name for name in _PARTS if name in chosen]


def _load(part: str) -> Any:
    """Return the module of a part. Most modules are imported only when they are needed."""
    return importlib.import_module(f"{__name__}.{_MODULES.get(part, f'_{part}')}")


def patch(*parts: str, **switches: bool) -> None:
    """Patch the standard library's blocking calls so that other coros can run while one waits.

    Call it at the very beginning of a program, before other imports::

        from grapeshot import coro
        coro.patch()

    Without arguments it patches all parts except ``futures`` and ``to_thread``. With names, as in
    ``patch("thread", "time")``, it patches only these parts and the parts that they need. A keyword switches one part
    off (``patch(queue=False)``) or on: ``patch(futures=True)`` also turns threads of ``ThreadPoolExecutor`` into coros.
    With ``patch(to_thread=True)``, coros run the blocking functions that asyncio, anyio (and so Starlette and FastAPI)
    and asgiref (and so Django) otherwise run in threads. Parts that are already patched are skipped.

    The parts are ``thread queue time socket dns select ssl os open subprocess multiprocessing stdin stdout signal
    sqlite3 futures to_thread``.

    Outside of coros, the patched functions do what the originals do, and block.

    Warns:
        PatchWarning: modules that were imported earlier hold originals, for example after ``from time import sleep``.
            Such names are replaced, and so are module-level locks that are free and that only their module refers to.
            Other locks, and classes that inherit from an original, cannot be changed. The warning lists the names that
            were replaced, and the locks and classes that could not be changed. Another warning comes the first
            time that the part ``to_thread`` leaves a function to a thread because the loop is not grapeshot's.

    Raises:
        ValueError: a name is not the name of a part.
        RuntimeError: gevent or eventlet has already patched the standard library. Only one package can patch it: after
            ``patch()``, the patching functions of gevent and eventlet raise RuntimeError, too.
    """
    with _lock:
        chosen = [part for part in _choose(parts, switches) if part not in _patched]
        if not chosen:
            return
        _other_patchers.check("coro.patch()", RuntimeError)
        before = set(_originals.originals)
        if not _import_hooks.is_installed():
            _import_hooks.install()
            for name, refuse in _other_patchers.refuse().items():
                _import_hooks.after_import(name, refuse)
        for part in chosen:
            _load(part).patch()
            _patched.add(part)
        _originals.give_views()
        news = {}
        for key in _originals.originals.keys() - before:
            news[key] = getattr(sys.modules[key[0]], key[1])
        text = _holders.repair(news).describe()
    if text is not None:
        warnings.warn(text, PatchWarning, stacklevel=2)


def is_patched(name: str) -> bool:
    """Return True if a part (``"thread"``), a module (``"threading"``) or a name (``"time.sleep"``) is patched."""
    if name in _PARTS:
        return name in _patched
    if any(module == name for module, _ in list(_originals.originals)):
        return True
    module_name, _, attribute = name.rpartition(".")
    return (module_name, attribute) in _originals.originals
