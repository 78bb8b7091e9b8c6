"""Timeouts of coros: ``with_timeout`` and ``timeout``.

Each has a bomb of its own, and an exploding bomb is an interruption that carries it. Only the frame that has set it
turns it into TimeoutError; in between nothing takes it for a timeout of its own (Shrapnel's timebombs).
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
    """A context manager: the block is interrupted after ``seconds`` and ends with :class:`TimeoutError`.

    Nested ones are told apart, whichever is due first. ``None`` sets no limit. One of 0 or below interrupts the block
    where it waits first; a block that never waits is never interrupted. Once the block is left, whatever by, the limit
    has no effect.

    Raises:
        TimeoutError: the time is over.
        ValueError: ``seconds`` is NaN.
        YieldFromMain: not in a coro.
        RuntimeError: it is in use.
    """

    def __init__(self, seconds: float | None) -> None:
        if seconds is not None and seconds != seconds:
            raise ValueError("a limit in seconds cannot be NaN")
        self._seconds = seconds
        self._handle: Any = None
        self._coro: Any = None
        # The interruption that is under way, or was delivered.
        self._bomb: _errors.Interrupted | None = None

    def __enter__(self) -> timeout:
        coro = _core._coro_current()
        if self._coro is not None:
            raise RuntimeError("this timeout is in use")
        self._coro = coro
        seconds = self._seconds
        if seconds is None or seconds == math.inf:
            return self
        if seconds <= 0:
            self._explode()
        else:
            self._handle = coro._loop.call_later(seconds, self._explode)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        coro, self._coro = self._coro, None
        handle, self._handle = self._handle, None
        bomb, self._bomb = self._bomb, None
        if handle is not None:
            handle.cancel()
        if bomb is None:
            return
        if exc is bomb:
            raise _errors.TimeoutError(f"not done after {self._seconds:g} seconds") from exc
        coro._take_back(bomb)

    def _explode(self) -> None:
        self._bomb = _errors.Interrupted(self)
        self._coro._throw_later(self._bomb)


def with_timeout(seconds: float | None, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Return ``fn(*args, **kwargs)``, interrupted after ``seconds``. Raises: as :class:`timeout`."""
    _core._coro_check_function(fn, "with_timeout")
    with timeout(seconds):
        return fn(*args, **kwargs)
