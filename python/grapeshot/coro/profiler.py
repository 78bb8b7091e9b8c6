"""Shrapnel's ``coro.profiler``, which leads to :mod:`grapeshot.profiler`.

::

    coro.profiler.go(coro.run, main, profile_filename="app.profile")
    coro.profiler.start()
    ...
    coro.profiler.stop("app.profile")

CPU, wall and waiting time are always measured, so nothing corresponds to Shrapnel's ``profile_bench``.
"""

from __future__ import annotations

import os
import sys

from grapeshot.profiler import FunctionRow, OwnerRow, Profile, profile, run

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    _T = TypeVar("_T")

__all__ = ["FunctionRow", "OwnerRow", "Profile", "go", "profile", "run", "start", "stop"]

# What `start` has begun.
_begun: tuple[profile, Profile] | None = None


def go(fun: Callable[..., _T], *args: Any, profile_filename: str | os.PathLike[str] | None = None, **kwargs: Any) -> _T:
    """Call a function under the profiler, and return its result.

    The profile is saved to ``profile_filename``. Without one its table is printed.
    """
    start()
    try:
        return fun(*args, **kwargs)
    finally:
        found = stop(profile_filename)
        if profile_filename is None:
            print(found.table(), file=sys.stdout)  # noqa: T201  # what was asked for


def start() -> None:
    """Begin to profile.

    Raises:
        RuntimeError: a profile is being taken already.
    """
    global _begun
    block = profile()
    _begun = block, block.__enter__()


def stop(filename: str | os.PathLike[str] | None = None) -> Profile:
    """End what :func:`start` has begun, save the profile to a file if one is named, and return it.

    Raises:
        RuntimeError: nothing was started.
    """
    global _begun
    if _begun is None:
        raise RuntimeError("no profile is being taken: call start() first")
    (block, found), _begun = _begun, None
    block.__exit__(None, None, None)
    if filename is not None:
        found.save(filename)
    return found
