"""``Countdown``: how much is left of a time limit that covers several waits."""

from __future__ import annotations

import time

from grapeshot import _core

# Not time.monotonic, because programs may replace that, as tests do.
_monotonic = _core._coro_monotonic


class Countdown:
    """A callable that returns how many seconds are left of a limit, or None if there is no limit."""

    __slots__ = ("_end_s",)

    def __init__(self, limit_s: float | None) -> None:
        self._end_s = None if limit_s is None else _monotonic() + limit_s

    def __call__(self) -> float | None:
        return None if self._end_s is None else max(self._end_s - _monotonic(), 0.0)

    def is_over(self) -> bool:
        return self._end_s is not None and self._end_s <= _monotonic()

    def pause(self, pause_s: float) -> None:
        """Sleep for ``pause_s``, or until the limit is reached. Raises TimeoutError if no time is left."""
        left_s = self()
        if left_s is not None and left_s <= 0:
            raise TimeoutError("timed out")
        pause_s = pause_s if left_s is None else min(pause_s, left_s)
        if _core._coro_is_on_loop():
            _core._coro_sleep_relative(pause_s)
        else:
            time.sleep(pause_s)
