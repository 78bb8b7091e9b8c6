"""Modules that are imported anew after patching, by ``importlib.reload`` or because they left ``sys.modules``.

Their code puts the originals back. So each import of a module of which something was replaced ends with replacing it.
The first import of a module is treated in the same way if something has to be changed in it.
"""

from __future__ import annotations

import sys

from . import _originals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# module -> what is done after its names are replaced
_more: dict[str, Callable[[Any], None]] = {}
# The modules that are being found.
_finding: set[str] = set()


class _Loader:
    """The module's own loader, and the patching afterwards."""

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
        if name in _more:
            _more[name](module)


class _Finder:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name in _finding or not (name in _more or _originals.replacements(name)):
            return None
        _finding.add(name)
        try:
            for finder in sys.meta_path:
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
                    return spec
        finally:
            _finding.discard(name)
        return None


def also(module_name: str, patch: Callable[[Any], None]) -> None:
    """Patch a module by a function after each import of it, and now if it is imported."""
    _more[module_name] = patch
    module = sys.modules.get(module_name)
    if module is not None:
        patch(module)


def is_watching() -> bool:
    """Whether modules are patched again that are imported anew."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def watch() -> None:
    """Patch modules again that are imported anew."""
    sys.meta_path.insert(0, _Finder())
