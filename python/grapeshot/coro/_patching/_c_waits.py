"""Changes libraries that wait in C code so that they wait in Python code instead, with a patched function.

A library is changed when it is imported, or at once if it was imported before. psycopg has a Python function of its own
for that; for sqlite3, it is in ``_sqlite3``.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


def _change_psycopg(waiting: Any) -> None:
    """Make psycopg 3 wait with ``select.poll``, unless its user has chosen another wait function."""
    if "PSYCOPG_WAIT_FUNC" not in os.environ and waiting.wait is getattr(waiting, "wait_c", None):
        waiting.wait = getattr(waiting, "wait_poll", waiting.wait_selector)


def _change_sqlite3(_: Any) -> None:
    from . import _sqlite3

    _sqlite3.replace()


# module -> the function that changes it
_CHANGES: dict[str, Callable[[Any], None]] = {}


class _Finder:
    """The first finder in ``sys.meta_path``. It lets the others find a module, and has it changed after its import."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        change = _CHANGES.get(name)
        if change is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is _Finder else finder.find_spec(name, path, target)
            if spec is not None:
                _change_afterwards(spec.loader, change)
                return spec
        return None


def _change_afterwards(loader: Any, change: Callable[[Any], None]) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        change(module)

    loader.exec_module = exec_module


def _change(name: str, change: Callable[[Any], None]) -> None:
    """Change a module now if it is loaded, and each time that it is loaded later."""
    _CHANGES[name] = change
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
    if name in sys.modules:
        change(sys.modules[name])


def patch_clients() -> None:
    """Make libraries that wait for sockets in C wait in Python."""
    _change("psycopg.waiting", _change_psycopg)


def patch() -> None:
    """The part ``sqlite3`` of ``coro.patch()``: make sqlite3 let other coros run while it waits."""
    _change("sqlite3", _change_sqlite3)
