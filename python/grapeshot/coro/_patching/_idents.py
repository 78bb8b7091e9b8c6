"""Patches functions that pass the ident of a thread to the C library, which does not check it.

In a coro ``threading.get_ident()`` returns the coro's id. The replacements translate this id to the ident of the real
thread that runs the coro.
"""

from __future__ import annotations

import _thread
import errno
import os
import signal
import time

from grapeshot import _core

from . import _originals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_real_ident = _thread.get_ident
# Idents of real threads are addresses, which are far above this. Ids of coros are counted from 1.
_LEAST_REAL = 2**32


def _real(ident: Any) -> Any:
    """Turn the id of a coro into the ident of its real thread, and return other idents unchanged.

    Raises ProcessLookupError if no live coro of this thread has this id.
    """
    if not isinstance(ident, int) or not 0 < ident < _LEAST_REAL:
        return ident
    if any(coro.id == ident for coro in _core._coro_live()):
        return _real_ident()
    raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))


def _with_real(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(thread_id: Any, /, *args: Any) -> Any:
        return function(_real(thread_id), *args)

    call.__name__ = call.__qualname__ = function.__name__
    call.__doc__ = function.__doc__
    return call


def patch() -> None:
    """Replace the functions. The originals would crash the process if they got the id of a coro."""
    _originals.replace("signal", "pthread_kill", _with_real(signal.pthread_kill))
    if hasattr(time, "pthread_getcpuclockid"):
        _originals.replace("time", "pthread_getcpuclockid", _with_real(time.pthread_getcpuclockid))
