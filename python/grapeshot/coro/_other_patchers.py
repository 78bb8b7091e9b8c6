"""gevent and eventlet, which also patch the standard library. In one process only one of them or grapeshot can do that.

What a program waits for would be in gevent's hub and in the loop, and each of them blocks the thread while it waits. So
coros are refused where another one has patched, and another one's patching is refused after ``coro.install()``: both
at once, and not by a program that stands still. The package imports this module first.
"""

from __future__ import annotations

import functools
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# The functions that patch, by module; those with an underscore at the end: all that begin so.
_PATCHING = {"gevent.monkey": "patch_", "eventlet.patcher": "monkey_patch", "eventlet": "monkey_patch"}
# Where they note what is patched.
_NOTES = {"gevent.monkey": "saved", "eventlet.patcher": "already_patched"}
_CALLS = {"gevent.monkey": "gevent.monkey.patch_all()", "eventlet.patcher": "eventlet.monkey_patch()"}

_ADVICE = "Use one of the two in a process; run what needs the other in a process of its own"


def check(what: str, kind: type[Exception]) -> None:
    """Raise ``kind`` if another one has patched the standard library. ``what`` cannot work then."""
    for name, note in _NOTES.items():
        if getattr(sys.modules.get(name), note, None):
            raise kind(
                f"{what} cannot work after {_CALLS[name]}: that has patched the standard library, and the program would"
                f" hang in one of the two loops. {_ADVICE}"
            )


def refuse() -> dict[str, Callable[[Any], None]]:
    """Return what has to be done, by name, with modules that patch: their functions raise RuntimeError from then on."""
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
            f"{name}() cannot work after grapeshot's coro.install(): both patch the standard library, and the program"
            f" would hang in one of the two loops. {_ADVICE}"
        )

    return refused


# What follows in the package takes its originals out of the standard library.
check("grapeshot.coro", ImportError)
