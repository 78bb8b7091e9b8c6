"""Shrapnel's ``coro.profiler``: a wrapper of :mod:`grapeshot.insight.profiler` with Shrapnel's functions.

::

    coro.profiler.go(coro.run, main, profile_filename="app.profile")
    coro.profiler.start()
    ...
    coro.profiler.stop("app.profile")

CPU, wall and waiting time are always measured, so there is no counterpart of Shrapnel's ``profile_bench``.
"""

from __future__ import annotations

import os
import sys

from grapeshot.insight.profiler import FunctionRow, OwnerRow, Profile, profile, run

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    _T = TypeVar("_T")

__all__ = ["FunctionRow", "OwnerRow", "Profile", "go", "profile", "run", "start", "stop"]

# The profile that `start` has begun.
_begun: tuple[profile, Profile] | None = None


def go(fun: Callable[..., _T], *args: Any, profile_filename: str | os.PathLike[str] | None = None, **kwargs: Any) -> _T:
    """Call a function under the profiler, and return its result.

    The profile is saved to the file ``profile_filename``. Without that argument, the profile's table is printed
    instead.
    """
    start()
    try:
        return fun(*args, **kwargs)
    finally:
        if _begun is not None:  # else, the function has stopped the profiler itself
            found = stop(profile_filename)
            if profile_filename is None:
                print(found.table(), file=sys.stdout)  # noqa: T201  # the caller asked for the table


def start() -> None:
    """Start the profiler.

    Raises:
        RuntimeError: the profiler is already running.
    """
    global _begun
    block = profile()
    _begun = block, block.__enter__()


def stop(filename: str | os.PathLike[str] | None = None) -> Profile:
    """Stop the profiler, save the profile if a filename is given, and return the profile.

    Raises:
        RuntimeError: :func:`start` was not called.
    """
    global _begun
    if _begun is None:
        raise RuntimeError("the profiler is not running: call start() first")
    (block, found), _begun = _begun, None
    block.__exit__(None, None, None)
    if filename is not None:
        found.save(filename)
    return found
