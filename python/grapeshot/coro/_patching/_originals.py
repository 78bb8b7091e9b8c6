"""What was there before: the originals of every name that :func:`grapeshot.coro.install` replaces.

A *view* of a module is a module object in which the replaced names have their originals, and every other name is the
module's own at that moment. Modules that must not see replaced names get views in the place of the modules that they
have imported (:func:`keep`): asyncio, the executors of concurrent.futures, the import system and grapeshot itself.
"""

from __future__ import annotations

import contextlib
import pkgutil
import sys
import types

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# (module, name) -> the original
originals: dict[tuple[str, str], Any] = {}
# module -> its replaced names, and what was put in their place
_replacements: dict[str, dict[str, Any]] = {}
# module -> the view that stands for it in modules that keep the originals
_views: dict[str, types.ModuleType] = {}

# Modules and packages that keep the originals.
_KEEPERS = ["asyncio", "grapeshot", "_frozen_importlib", "_frozen_importlib_external", "importlib"]
_KEEPERS += ["concurrent.futures.thread", "concurrent.futures.process"]
# Modules that are patched themselves: what they have from each other is theirs.
_PATCHED = {"threading", "_thread", "queue", "_queue", "time", "socket", "_socket", "select", "ssl", "os", "posix"}
_PATCHED |= {"selectors", "signal", "_signal", "concurrent.futures"}
# Of these no keeper uses a replaced name, and a view would cost them time: loops read the clock.
_NOT_VIEWED = {"time", "builtins"}


class _View(types.ModuleType):
    def __init__(self, module: types.ModuleType) -> None:
        super().__init__(module.__name__, module.__doc__)
        self.__dict__["_grapeshot_module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_grapeshot_module"], name)

    def __dir__(self) -> list[str]:
        return dir(self.__dict__["_grapeshot_module"])


def replace(module_name: str, name: str, new: object) -> None:
    """Put ``new`` in the place of an imported module's attribute, and remember the original. Repeating does nothing."""
    module = sys.modules[module_name]
    if (module_name, name) not in originals:
        original = getattr(module, name)
        originals[module_name, name] = original
        show(module_name, name, original)
        setattr(module, name, new)
        _replacements.setdefault(module_name, {})[name] = new
        _name_as(new, original, module_name)


def _name_as(new: Any, original: Any, module_name: str) -> None:
    """Give what was replaced the name of the original: in reprs, in help, and in pickles, which refer to it."""
    if isinstance(new, types.FunctionType):
        new.__module__ = module_name
    elif callable(new) and isinstance(new, type) == isinstance(original, type):
        for name in ("__module__", "__name__", "__qualname__"):
            # The name of a native function is fixed.
            with contextlib.suppress(AttributeError, TypeError):
                setattr(new, name, getattr(original, name))


def replacements(module_name: str) -> list[tuple[str, Any]]:
    """Return the replaced names of a module, each with what is in its place."""
    return list(_replacements.get(module_name, {}).items())


def get_original(module: str, name: str) -> Any:
    """Return what ``module.name`` was before :func:`install`, or is, if that has not replaced it."""
    try:
        return originals[module, name]
    except KeyError:
        return pkgutil.resolve_name(f"{module}:{name}")


def view(module_name: str) -> types.ModuleType:
    """Return the view of an imported module. There is one per module; it grows with each replaced name."""
    found = _views.get(module_name)
    if found is None:
        found = _views[module_name] = _View(sys.modules[module_name])
    return found


def other_view(module_name: str, **names: Any) -> types.ModuleType:
    """Return a view of its own for one module, which has other values under some names."""
    made = _View(sys.modules[module_name])
    made.__dict__.update({name: value for (module, name), value in originals.items() if module == module_name}, **names)
    return made


def show(module_name: str, name: str, value: object) -> None:
    """Set what a view shows under that name."""
    view(module_name).__dict__[name] = value


def is_keeper(module_name: str) -> bool:
    """Whether a module keeps the originals, or is one of those that are patched."""
    if module_name in _PATCHED:
        return True
    return any(module_name == keeper or module_name.startswith(f"{keeper}.") for keeper in _KEEPERS)


def _import_keepers() -> None:
    """Import the modules that would be imported later, and would then find the replaced names."""
    from grapeshot import _datagram, _measuring, _pipes, _sendfile, _subprocess, _unix  # noqa: F401


def give_views() -> None:
    """Give the modules that keep the originals the views, for all modules that were imported."""
    _import_keepers()
    for module_name, module in list(sys.modules.items()):
        if not is_keeper(module_name) or module_name in _PATCHED or module_name.startswith(__package__):
            continue
        for name, value in list(vars(module).items()):
            if isinstance(value, types.ModuleType) and not isinstance(value, _View):
                seen = _views.get(value.__name__)
                if (
                    value.__name__ not in _NOT_VIEWED
                    and seen is not None
                    and seen.__dict__["_grapeshot_module"] is value
                ):
                    setattr(module, name, seen)


def clone_function(function: Callable[..., Any], names: dict[str, Any]) -> Any:
    """Return the same Python function with other global names."""
    clone = types.FunctionType(
        function.__code__,
        names,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    clone.__kwdefaults__ = function.__kwdefaults__
    clone.__doc__ = function.__doc__
    clone.__qualname__ = function.__qualname__
    return clone


def clone_class(kind: type, names: dict[str, Any]) -> type:
    """Return the same Python class with other global names; its bases are those that ``names`` has of that name."""
    members = {}
    for name, value in vars(kind).items():
        if name in ("__dict__", "__weakref__"):
            continue
        members[name] = clone_function(value, names) if isinstance(value, types.FunctionType) else value
    bases = tuple(names.get(base.__name__, base) for base in kind.__bases__)
    made: type = type(kind)(kind.__name__, bases, members)
    # In a class, `__enter__ = acquire` is the same function twice; nothing depends on that.
    names[kind.__name__] = made
    return made
