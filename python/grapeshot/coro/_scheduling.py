"""The native functions that make, schedule and find coros, under their public names."""

from __future__ import annotations

from grapeshot import _core

from ._coroutine import Coro

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, TypeVar, overload

    from ._signatures import Spawn

    _E = TypeVar("_E")

    new: Spawn
    spawn: Spawn

    def current() -> Coro[Any]:
        """Return the running coro. Raises YieldFromMain if no coro is running."""
        raise NotImplementedError

    @overload
    def wait() -> Any: ...
    @overload
    def wait(coros: Iterable[_E], timeout: float | None = None, count: int | None = None) -> list[_E]: ...
    def wait(coros: Any = None, timeout: float | None = None, count: int | None = None) -> Any:
        """Wait until all ``coros`` have ended, or ``count`` of them, or until ``timeout`` seconds are over.

        Returns a list of the coros that have ended. ``coros`` may also contain asyncio's futures and tasks. Without
        arguments, wait until :func:`schedule` is called for this coro, and return the value passed to it.
        """
        raise NotImplementedError
else:
    new = _core._coro_new
    spawn = _core._coro_spawn
    current = _core._coro_current
    wait = _core._coro_wait

yield_slice = _core._coro_yield_slice
sleep_relative = _core._coro_sleep_relative
sleep_absolute = _core._coro_sleep_absolute
set_exception_notifier = _core._coro_set_exception_notifier
set_selfishness = _core._coro_set_selfishness
set_stack_slots = _core._coro_set_stack_slots
stack_info = _core._coro_stack_info
now = _core._coro_now


def schedule(co: Coro[Any], value: Any = None) -> None:
    """Wake a coro that waits. Its ``wait()`` returns ``value``.

    Raises:
        ScheduleError: the coro is running or already scheduled, waits for a lock, a queue or the like, or belongs to
            another thread.
        DeadCoroutine: the coro has ended.
        NotStartedError: the coro was not started.
    """
    co._wake(value)


def get_live_coros() -> list[Coro[Any]]:
    """Return the coros of this thread that were started and have not ended."""
    return _core._coro_live()


def all_threads() -> dict[int, Coro[Any]]:
    """Return the coros of :func:`get_live_coros` as a dict, by their ids."""
    return {co.id: co for co in _core._coro_live()}


def get_thread_by_id(ident: int) -> Coro[Any]:
    """Return the live coro that has this id and belongs to this thread. Raises KeyError if there is none."""
    return all_threads()[ident]
