"""Refuses to work together with gevent or eventlet: only one package can patch the standard library.

With two patchers, one part of the program would wait in gevent's hub and another in grapeshot's loop. Each of these
blocks the thread while it waits, so the program would hang. Two errors prevent that: importing ``grapeshot.coro``
raises an error if another package has patched the library, and after ``coro.patch()``, the patching functions of the
other packages raise one.

The package imports this module before all others.
"""

from __future__ import annotations

import functools
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# The names of the functions that patch, by module. A name that ends with an underscore stands for all functions whose
# names begin with it.
_PATCHING = {"gevent.monkey": "patch_", "eventlet.patcher": "monkey_patch", "eventlet": "monkey_patch"}
# The attributes in which the modules record the names that they have patched.
_NOTES = {"gevent.monkey": "saved", "eventlet.patcher": "already_patched"}
_CALLS = {"gevent.monkey": "gevent.monkey.patch_all()", "eventlet.patcher": "eventlet.monkey_patch()"}

_ADVICE = "Use only one of the two in a process, and run code that needs the other one in a process of its own"


def check(what: str, kind: type[Exception]) -> None:
    """Raise ``kind`` if another patcher has patched the standard library. ``what`` begins the error message."""
    for name, note in _NOTES.items():
        if getattr(sys.modules.get(name), note, None):
            raise kind(
                f"{what} cannot work after {_CALLS[name]}: both patch the standard library, and the program would hang"
                f" in one of the two loops. {_ADVICE}"
            )


def refuse() -> dict[str, Callable[[Any], None]]:
    """Return a dict that maps each module's name to a function that makes the module's patching functions fail."""
    return dict.fromkeys(_PATCHING, _refuse_in)


def _refuse_in(module: Any) -> None:
    prefix = _PATCHING[module.__name__]
    for name, function in list(vars(module).items()):
        is_meant = name.startswith(prefix) if prefix.endswith("_") else name == prefix
        if is_meant and callable(function) and not isinstance(function, type):
            setattr(module, name, _refusing(f"{module.__name__}.{name}", function))


def _refusing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def refused(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError(
            f"{name}() cannot work after grapeshot's coro.patch(): both patch the standard library, and the program"
            f" would hang in one of the two loops. {_ADVICE}"
        )

    return refused


# This runs before the package's other modules take their originals from the standard library. If another patcher had
# already patched the library, these modules would take its replacements instead.
check("grapeshot.coro", ImportError)
