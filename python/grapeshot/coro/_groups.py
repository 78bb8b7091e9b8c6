"""Several coros at once: ``in_parallel``, ``Group``, ``Pool``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from grapeshot import _core

from . import _errors
from ._coroutine import Coro, wait_for_end
from ._sync import semaphore

TYPE_CHECKING = False  # typing is not imported at run time: from Python 3.14 on asyncio does without it
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any


def in_parallel(fun_arg_list: Iterable[tuple[Callable[..., Any], Sequence[Any]]]) -> list[Any]:
    """Run ``fn(*args)`` for each ``(fn, args)`` in a coro of its own; return the results in order.

    If this coro is interrupted meanwhile, the others are shut down.

    Raises:
        InParallelError: at least one has raised; its ``result_list`` has all outcomes.
    """
    coros = [_core._coro_spawn(fn, *args) for fn, args in fun_arg_list]
    _wait_for_all(coros)
    outcomes = [_outcome(co) for co in coros]
    if all(is_result for is_result, _ in outcomes):
        return [value for _, value in outcomes]
    raise _errors.InParallelError(outcomes)


def _outcome(co: Coro) -> tuple[bool, Any]:
    exc = co._failure()
    return (True, co._outcome()) if exc is None else (False, exc)


def _wait_for_all(coros: Iterable[Coro]) -> None:
    """Wait until all have ended. Interrupted meanwhile, shut them down, wait again, and raise."""
    coros = list(coros)
    try:
        for co in coros:
            _wait_for_one(co)
    except BaseException:
        for co in coros:
            _shut_down(co)
        for co in coros:
            _wait_for_one(co)
        raise


def _wait_for_one(co: Coro) -> None:
    if not co.done():
        wait_for_end(co)


def _shut_down(co: Coro) -> None:
    if not co.done() and co._status != "new":
        co.shutdown()


class Group:
    """Coros that end together: the block is left when all have ended.

    If one raises, or the block does, the others are shut down, and the first exception comes out of the block. One that
    was shut down or cancelled does not count as failed.

    ::

        with coro.Group() as group:
            group.spawn(serve, connection)
            group.spawn(watch, connection)
    """

    def __init__(self) -> None:
        self._coros: set[Coro] = set()
        self._first_error: BaseException | None = None
        self._owner: Any = None
        self._is_ending = False
        # What interrupts the block after an error.
        self._interruption: _errors.Interrupted | None = None

    def spawn(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Coro:
        """Start ``fn(*args)`` as a coro of the group. RuntimeError when the group is ending after an error."""
        if self._first_error is not None:
            raise RuntimeError("the group is ending, because one of its coros has raised")
        co: Coro = _core._coro_spawn(fn, *args, **kwargs)
        self._coros.add(co)
        co.add_done_callback(self._on_end)
        return co

    def __enter__(self) -> Group:
        self._owner = _core._coro_current()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_ending = True
        if self._interruption is not None:
            self._owner._take_back(self._interruption)
        if exc is not None:
            if self._first_error is None and not self._is_own_interruption(exc):
                self._first_error = exc
            self._shut_all_down()
        while self._coros:
            try:
                co = next(iter(self._coros))
                _wait_for_one(co)
                self._on_end(co)
            except _errors.Interrupted as interruption:
                if not self._is_own_interruption(interruption):
                    self._first_error = self._first_error or interruption
                self._shut_all_down()
            except BaseException as error:
                self._first_error = self._first_error or error
                self._shut_all_down()
        first_error, self._first_error = self._first_error, None
        self._owner = self._interruption = None
        if first_error is not None and first_error is not exc:
            raise first_error

    def _is_own_interruption(self, exc: BaseException) -> bool:
        return exc is self._interruption

    def _shut_all_down(self) -> None:
        for co in self._coros:
            _shut_down(co)

    def _on_end(self, co: Coro) -> None:
        if co not in self._coros:
            return
        self._coros.remove(co)
        error = co._failure()
        if error is None or co.cancelled():
            return
        if self._first_error is not None:
            return
        self._first_error = error
        self._shut_all_down()
        if not self._is_ending and self._owner is not None and not self._owner.done():
            self._interruption = _errors.Interrupted(self)
            self._owner._throw_later(self._interruption)


class Pool:
    """At most ``size`` coros at once; ``spawn`` waits for a place.

    As a context manager it waits for its coros at the end of the block.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError("a pool has at least one place")
        self._places = semaphore(size)
        self._coros: set[Coro] = set()

    def __len__(self) -> int:
        return len(self._coros)

    def spawn(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Coro:
        """Wait for a place, then start ``fn(*args)`` in it."""
        self._places.acquire()
        try:
            co: Coro = _core._coro_spawn(fn, *args, **kwargs)
        except BaseException:
            self._places.release()
            raise
        self._coros.add(co)
        co.add_done_callback(self._on_end)
        return co

    def _on_end(self, co: Coro) -> None:
        self._coros.discard(co)
        self._places.release()

    def map(self, fn: Callable[..., Any], *iterables: Iterable[Any]) -> list[Any]:
        """Return ``[fn(*items), ...]``; the first exception in order is raised once all have ended."""
        coros = [self.spawn(fn, *items) for items in zip(*iterables, strict=False)]
        _wait_for_all(coros)
        return [co.result() for co in coros]

    def imap(self, fn: Callable[..., Any], *iterables: Iterable[Any]) -> Iterator[Any]:
        """Yield the results in order, each as soon as it and those before it are there."""
        coros = [self.spawn(fn, *items) for items in zip(*iterables, strict=False)]
        for co in coros:
            _wait_for_one(co)
            yield co.result()

    def join(self) -> None:
        """Wait until no coro is left."""
        _wait_for_all(self._coros)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.join()
