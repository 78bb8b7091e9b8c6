"""The part ``time`` of :func:`grapeshot.coro.patch`: other coros run while one sleeps in ``time.sleep``."""

from __future__ import annotations

import time

from grapeshot import _core

from . import _originals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_sleep = time.sleep
_can_wait = _core._coro_can_wait
_sleep_for = _core._coro_sleep_relative
_yield_slice = _core._coro_yield_slice

# The longest sleep that CPython allows, which is the limit of its clock.
_LONGEST_S = 9223372036.0


def sleep(seconds: Any, /) -> None:
    """Delay execution for the given number of seconds. Other coros run while it sleeps."""
    if not _can_wait():
        return _sleep(seconds)
    if not isinstance(seconds, float):
        if not hasattr(type(seconds), "__index__"):
            return _sleep(seconds)  # raises TypeError: neither strings nor Decimals are allowed
        seconds = seconds.__index__()
    if seconds != seconds:
        raise ValueError("Invalid value NaN (not a number)")
    if seconds < 0:
        raise ValueError("sleep length must be non-negative")
    if seconds > _LONGEST_S:
        raise OverflowError("timestamp too large to convert to C _PyTime_t")
    if seconds:
        _sleep_for(seconds)
    else:
        _yield_slice()
    return None


def patch() -> None:
    """Replace the names."""
    _originals.replace("time", "sleep", sleep)
