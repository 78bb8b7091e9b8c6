"""Calls a function after each import of a module, and patches a module again if it is imported a second time.

``importlib.reload`` runs a module's code again, and so does an import after the module was removed from
``sys.modules``. The module then has its originals again, so it is patched after each import.
"""

from __future__ import annotations

import importlib._bootstrap as _bootstrap
import sys

from grapeshot._loop.locks import real_rlock

from . import _originals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# module -> the function to call after each import of the module, once the module's names have been replaced
_calls: dict[str, Callable[[Any], None]] = {}
# The modules for which _Finder is asking all finders now. When it asks itself for one of these, it finds nothing.
_finding: set[str] = set()
# Held while _Finder changes its place in sys.meta_path.
_moving = real_rlock()


class _Loader:
    """Calls the module's own loader, then patches the module."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        name = module.__name__
        for attribute, new in _originals.replacements(name):
            if hasattr(module, attribute):
                setattr(module, attribute, new)
        if name in _calls:
            _calls[name](module)


class _Finder:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if sys.meta_path[0] is not self:
            with _moving:
                if sys.meta_path[0] is not self and self in sys.meta_path:
                    # pytest puts its own finder first, and that finder then loads some of the modules that have to be
                    # patched. So move this finder back to the first place. It must not be missing from the list in
                    # between, because other threads import at the same time.
                    sys.meta_path.insert(0, self)
                    del sys.meta_path[sys.meta_path.index(self, 1)]
        if name in _finding or not (name in _calls or _originals.replacements(name)):
            return None
        _finding.add(name)
        try:
            for finder in list(sys.meta_path):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
                    return spec
        finally:
            _finding.discard(name)
        return None


def after_import(module_name: str, call: Callable[[Any], None]) -> None:
    """Call ``call(module)`` after each import of a module, and now if it is already imported.

    If another thread is importing the module at this moment, ``call`` may be called twice.
    """
    _calls[module_name] = call
    module = sys.modules.get(module_name)
    if getattr(getattr(module, "__spec__", None), "_initializing", False):
        # Another thread is importing the module: wait until it has finished. If that import began before the module had
        # an entry in `_calls`, it may end without calling `call`. So the code below calls it in any case.
        _bootstrap._lock_unlock_module(module_name)  # type: ignore[attr-defined]
        module = sys.modules.get(module_name)
    if module is not None:
        call(module)


def is_installed() -> bool:
    """Whether :func:`install` was called."""
    return any(isinstance(finder, _Finder) for finder in list(sys.meta_path))


def install() -> None:
    """From now on, notice each import."""
    sys.meta_path.insert(0, _Finder())
