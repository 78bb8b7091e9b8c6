"""Timeouts of coros: ``with_timeout`` and ``timeout``.

Each has a bomb of its own, and an exploding bomb is an interruption that carries it. Only the frame that has set it
turns it into TimeoutError; in between nothing takes it for a timeout of its own (Shrapnel's timebombs).
"""

from __future__ import annotations

from grapeshot import _core

from . import _errors

TYPE_CHECKING = False  # typing is not imported at run time: from Python 3.14 on asyncio does without it
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any


class timeout:  # noqa: N801  # used like asyncio.timeout
    """A context manager: the block is interrupted after ``seconds`` and ends with :class:`TimeoutError`.

    Nested ones are told apart. ``None`` sets no limit.

    Raises:
        TimeoutError: the time is over.
        YieldFromMain: not in a coro.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._handle: Any = None
        self._coro: Any = None

    def __enter__(self) -> timeout:
        self._coro = coro = _core._coro_current()
        if self._seconds is not None:
            self._handle = coro._loop.call_later(self._seconds, self._explode)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._coro = None
        if isinstance(exc, _errors.Interrupted) and exc.value is self:
            raise _errors.TimeoutError from None

    def _explode(self) -> None:
        # The coro waits or is ready: it does not run while a timer does.
        if self._coro is not None:
            self._coro._throw_later(_errors.Interrupted(self))


def with_timeout(seconds: float | None, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return ``fn(*args, **kwargs)``, interrupted after ``seconds``. Raises: as :class:`timeout`."""
    with timeout(seconds):
        return fn(*args, **kwargs)
