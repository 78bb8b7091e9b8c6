"""What takes the ident of a thread and gives it to the C library, which believes it.

``threading.get_ident()`` in a coro is the coro's id. It stands for the thread that runs the coro.
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
# Idents of real threads are addresses, which begin far above this. Ids of coros count from 1.
_LEAST_REAL = 2**32


def _real(ident: Any) -> Any:
    """Return the ident of the real thread. Raises ProcessLookupError for a coro that is not in this one."""
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
    """Replace the names. A number that is no thread would crash the process."""
    _originals.replace("signal", "pthread_kill", _with_real(signal.pthread_kill))
    if hasattr(time, "pthread_getcpuclockid"):
        _originals.replace("time", "pthread_getcpuclockid", _with_real(time.pthread_getcpuclockid))
