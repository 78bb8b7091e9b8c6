"""Timeouts for coros: ``with_timeout`` and ``timeout``.

When the time is over, the coro is interrupted with an exception that carries the ``timeout`` object (Shrapnel's
timebomb). Only the block of this object turns the exception into TimeoutError. So timeouts can be nested, and no block
mistakes another block's timeout for its own.
"""

from __future__ import annotations

import math

from grapeshot import _core

from . import _errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, ParamSpec, TypeVar

    _P = ParamSpec("_P")
    _T = TypeVar("_T")


class timeout:  # noqa: N801  # used like asyncio.timeout
    """A context manager that interrupts its block after ``seconds``; the block then raises :class:`TimeoutError`.

    ``None`` means no limit. A timeout of 0 or below interrupts the first wait of the block. The interruption comes
    where the block waits, so a block that never waits is never interrupted. Timeouts can be nested: the block whose
    time is over raises TimeoutError. When the block has ended, the timeout has no effect any more.

    Raises:
        TimeoutError: the block took longer than ``seconds``.
        ValueError: ``seconds`` is NaN.
        YieldFromMain: not called in a coro.
        RuntimeError: this object is already in use.
    """

    def __init__(self, seconds: float | None) -> None:
        if seconds is not None and seconds != seconds:
            raise ValueError("the timeout in seconds must not be NaN")
        self._seconds = seconds
        self._handle: Any = None
        self._coro: Any = None
        # The interruption, which is pending or was raised. None until the time is over.
        self._interruption: _errors.Interrupted | None = None

    def __enter__(self) -> timeout:
        coro = _core._coro_current()
        if self._coro is not None:
            raise RuntimeError("this timeout is already in use: make another one for a nested block")
        self._coro = coro
        seconds = self._seconds
        if seconds is None or seconds == math.inf:
            return self
        try:
            if seconds <= 0:
                self._interrupt()
            else:
                self._handle = coro._loop.call_later(seconds, self._interrupt)
        except BaseException as exc:
            # A signal handler or finalizer may run in the lines above. If it waits, the interruption is raised there.
            self.__exit__(type(exc), exc, exc.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        coro, self._coro = self._coro, None
        handle, self._handle = self._handle, None
        interruption, self._interruption = self._interruption, None
        if handle is not None:
            handle.cancel()
        if interruption is None:
            return
        if exc is interruption:
            raise _errors.TimeoutError(f"not done after {self._seconds:g} seconds") from exc
        coro._take_back(interruption)

    def _interrupt(self) -> None:
        self._interruption = _errors.Interrupted(self)
        self._coro._throw_later(self._interruption)


def with_timeout(seconds: float | None, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Return ``fn(*args, **kwargs)``, but interrupt the call after ``seconds``.

    Raises the same exceptions as :class:`timeout`, and any exception that ``fn`` raises.
    """
    _core._coro_check_function(fn, "with_timeout")
    with timeout(seconds):
        return fn(*args, **kwargs)
