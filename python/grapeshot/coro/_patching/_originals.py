"""Keeps the originals of the names that :func:`grapeshot.coro.patch` replaces.

Some modules must go on using the originals: asyncio, the executors of concurrent.futures, the import system and
grapeshot itself. These are called keepers here. In a keeper, each imported module that is patched is replaced by a
*view* of it (:func:`give_views`). A view is a module object that has the originals under the replaced names, and looks
all other names up in the module.
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
# module -> its replaced names, each with its replacement
_replacements: dict[str, dict[str, Any]] = {}
# module -> its view
_views: dict[str, types.ModuleType] = {}

# The keepers: modules and packages that go on using the originals.
_KEEPERS = ["asyncio", "grapeshot", "_frozen_importlib", "_frozen_importlib_external", "importlib"]
_KEEPERS += ["concurrent.futures.thread", "concurrent.futures.process"]
# Modules that patch() changes, and C modules that they import. If one of these modules has imported originals from
# another (`threading` has imported some from `_thread`), `_holders.repair` does not replace them. The parts of patch()
# replace such names themselves where that is necessary.
_PATCHED = {"threading", "_thread", "queue", "_queue", "time", "socket", "_socket", "select", "ssl", "os", "posix"}
_PATCHED |= {"selectors", "signal", "_signal", "concurrent.futures"}
# Modules that need no view, because keepers may call their replacements: outside of coros, the replacements do what the
# originals do. A view of `time` would only make loops slower, because they read the clock often.
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
    """Replace a module's attribute with ``new`` and keep the original, unless the attribute is already replaced."""
    module = sys.modules[module_name]
    if (module_name, name) not in originals:
        original = getattr(module, name)
        originals[module_name, name] = original
        show(module_name, name, original)
        setattr(module, name, new)
        _replacements.setdefault(module_name, {})[name] = new
        _name_as(new, original, module_name)


def _name_as(new: Any, original: Any, module_name: str) -> None:
    """Give a replacement the name of its original, for reprs and help, and for pickles, which refer to it by name."""
    if isinstance(new, types.FunctionType):
        new.__module__ = module_name
    elif callable(new) and isinstance(new, type) == isinstance(original, type):
        for name in ("__module__", "__name__", "__qualname__"):
            # The names of native functions cannot be changed.
            with contextlib.suppress(AttributeError, TypeError):
                setattr(new, name, getattr(original, name))


def replacements(module_name: str) -> list[tuple[str, Any]]:
    """Return the replaced names of a module, each with its replacement."""
    return list(_replacements.get(module_name, {}).items())


def is_replacement(function: object) -> bool:
    """Whether :func:`replace` has put this object somewhere."""
    return any(new is function for names in list(_replacements.values()) for new in list(names.values()))


def get_original(module: str, name: str) -> Any:
    """Return the original of ``module.name``, or its present value if :func:`patch` has not replaced it.

    For example, ``get_original("time", "sleep")`` is the function that blocks the whole thread.
    """
    try:
        return originals[module, name]
    except KeyError:
        return pkgutil.resolve_name(f"{module}:{name}")


def view(module_name: str) -> types.ModuleType:
    """Return the view of an imported module. There is one per module; :func:`replace` adds the originals to it."""
    found = _views.get(module_name)
    if found is None:
        found = _views.setdefault(module_name, _View(sys.modules[module_name]))
    return found


def other_view(module_name: str, **names: Any) -> types.ModuleType:
    """Return an additional view of a module, which has the given values under the given names."""
    made = _View(sys.modules[module_name])
    known = list(originals.items())
    made.__dict__.update({name: value for (module, name), value in known if module == module_name}, **names)
    return made


def show(module_name: str, name: str, value: object) -> None:
    """Set the value that the view of a module has under a name."""
    view(module_name).__dict__[name] = value


def is_keeper(module_name: str) -> bool:
    """Whether a module is a keeper, or is itself patched."""
    if module_name in _PATCHED:
        return True
    return any(module_name == keeper or module_name.startswith(f"{keeper}.") for keeper in _KEEPERS)


def give_views() -> None:
    """In all imported keepers except this package, replace the patched modules by their views."""
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
    """Return a copy of a Python function that uses ``names`` as its globals."""
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
    """Return a copy of a Python class whose methods use ``names`` as their globals, and put it into ``names``.

    If ``names`` has a class under the name of a base, that class becomes the base.
    """
    members = {}
    for name, value in vars(kind).items():
        if name in ("__dict__", "__weakref__"):
            continue
        members[name] = clone_function(value, names) if isinstance(value, types.FunctionType) else value
    bases = tuple(names.get(base.__name__, base) for base in kind.__bases__)
    made: type = type(kind)(kind.__name__, bases, members)
    # A function that the class has under two names (`__enter__ = acquire`) is copied twice, which does no harm.
    names[kind.__name__] = made
    return made
