"""Finds what modules hold from before :func:`grapeshot.coro.patch`: originals, and locks and subclasses made from them.

Names of originals are replaced, and so are free locks that only the module refers to. For modules outside the standard
library, a PatchWarning reports the names that were replaced, and the locks and classes that could not be replaced.
"""

from __future__ import annotations

import _thread
import sys
import types

from grapeshot import _core

from . import _originals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_RealLock: Any = _thread.LockType
_RealRLock: Any = _thread.RLock


class Holders:
    """What to report for each module, as text: names that were replaced, and locks and classes that were not."""

    def __init__(self) -> None:
        self.repaired: dict[str, list[str]] = {}
        self.left: dict[str, list[str]] = {}

    def describe(self) -> str | None:
        """Return the text of the PatchWarning, or None if there is nothing to warn of."""
        parts = []
        if self.left:
            parts.append(f"these still use the originals: {_list(self.left)}")
        if self.repaired:
            parts.append(f"these held originals, which were replaced: {_list(self.repaired)}")
        if not parts:
            return None
        return f"modules were imported before coro.patch(), which should be called first; {'; '.join(parts)}"


def _list(found: dict[str, list[str]]) -> str:
    return ", ".join(f"{module} ({', '.join(sorted(names))})" for module, names in sorted(found.items()))


def _is_library(module_name: str) -> bool:
    return module_name.partition(".")[0] in sys.stdlib_module_names


def repair(news: dict[tuple[str, str], Any]) -> Holders:
    """Replace the originals that modules hold as plain names, and find the originals that cannot be replaced.

    ``news`` has the names that were patched just now, each with its replacement.
    """
    by_original = {id(_originals.originals[key]): new for key, new in news.items()}
    holders = Holders()
    locks = [lock for module_name in _module_names() for lock in _repair_names(holders, module_name, by_original)]
    if any(id(kind) in by_original for kind in (_RealLock, _RealRLock)):
        for module_name, name in locks:
            _repair_lock(holders, module_name, name)
        _repair_logging()
    return holders


def _module_names() -> list[str]:
    """Return one name per module. (multiprocessing gives ``__main__`` a second name.)"""
    return list({id(module): name for name, module in reversed(list(sys.modules.items()))}.values())


def _repair_names(holders: Holders, module_name: str, by_original: dict[int, Any]) -> list[tuple[str, str]]:
    """Replace the originals in a module's global names; return the names of its locks."""
    locks: list[tuple[str, str]] = []
    module = sys.modules.get(module_name)
    if type(module) is not types.ModuleType or _originals.is_keeper(module_name):
        return locks
    for name, value in list(vars(module).items()):
        new = by_original.get(id(value))
        if new is not None:
            setattr(module, name, new)
            if not _is_library(module_name):
                holders.repaired.setdefault(module_name, []).append(name)
        elif type(value) in (_RealLock, _RealRLock):
            locks.append((module_name, name))
        elif not _is_library(module_name) and _is_derived(value, module_name, by_original):
            holders.left.setdefault(module_name, []).append(f"class {name}")
    return locks


def _is_derived(value: object, module_name: str, by_original: dict[int, Any]) -> bool:
    """Whether a value is a class that the module defines and that inherits from an original."""
    # (isinstance() would read the `__class__` of proxy objects, such as Django's settings, which runs their code.)
    if not issubclass(type(value), type) or value.__module__ != module_name:
        return False
    return not by_original.keys().isdisjoint(map(id, type.mro(value)[1:]))  # type: ignore[arg-type]


def _is_free(lock: Any) -> bool:
    if not lock.acquire(False):
        return False
    lock.release()
    # acquire() also succeeds on an RLock that this thread already holds. Such an RLock is not free.
    return type(lock) is _RealLock or not lock._is_owned()


def _new_lock(lock: Any) -> Any:
    return _core.thread_lock() if type(lock) is _RealLock else _core.thread_rlock()


def _count_of_one() -> int:
    """Return the reference count that Python reports for an object to which only a dict and a variable refer.

    Up to Python 3.13, ``sys.getrefcount`` also counts the argument that it is called with.
    """
    names = {"object": object()}
    value = names["object"]
    return sys.getrefcount(value)


_COUNT_OF_ONE = _count_of_one()


def _repair_lock(holders: Holders, module_name: str, name: str) -> None:
    """Replace a lock if it is free and only the module's dict refers to it.

    Otherwise record that the lock was not replaced, unless the module belongs to the standard library.
    """
    names = vars(sys.modules[module_name])
    lock = names[name]
    if sys.getrefcount(lock) <= _COUNT_OF_ONE and _is_free(lock):
        names[name] = _new_lock(lock)
    elif not _is_library(module_name):
        holders.left.setdefault(module_name, []).append(f"lock {name}")


def _repair_logging() -> None:
    """Replace the locks of the logging module and of its handlers, if they are free."""
    logging: Any = sys.modules.get("logging")
    if logging is None:
        return
    lock = logging._lock
    if type(lock) is _RealRLock and _is_free(lock):
        logging._lock = _core.thread_rlock()
    for reference in list(logging._handlerList):
        handler = reference() if callable(reference) else reference
        lock = getattr(handler, "lock", None)
        if type(lock) is _RealRLock and _is_free(lock):
            handler.lock = _core.thread_rlock()
