"""Several coros at once: ``in_parallel``, ``Group``, ``Pool``, ``wait``; and ``spawn_later``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from grapeshot import _core

from . import _errors
from ._coroutine import Coro, check_started, shut_down, wait_for_end
from ._scheduling import now
from ._sync import fifo, semaphore

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any, TypeVar, overload

    from ._signatures import Spawn, SpawnLater

    _A = TypeVar("_A")
    _B = TypeVar("_B")
    _C = TypeVar("_C")
    _T = TypeVar("_T")


def in_parallel(fun_arg_list: Iterable[tuple[Callable[..., _T], Sequence[Any]]]) -> list[_T]:
    """Run ``fn(*args)`` for each ``(fn, args)`` pair in a coro of its own; return the results in the same order.

    It waits until all have ended, even if some raise. If the calling coro is interrupted during the wait, or the
    iterable raises, the coros are shut down.

    Raises:
        InParallelError: at least one function has raised. Its ``result_list`` has all outcomes.
    """
    coros = _wait_for_all(_core._coro_spawn(fn, *args) for fn, args in fun_arg_list)
    outcomes = [_outcome(co) for co in coros]
    if all(is_result for is_result, _ in outcomes):
        return [value for _, value in outcomes]
    raise _errors.InParallelError(outcomes)


def _outcome(co: Coro[Any]) -> tuple[bool, Any]:
    exc = co._failure()
    return (True, co._outcome()) if exc is None else (False, exc)


def _wait_for_all(coros: Iterable[Coro[Any]]) -> list[Coro[Any]]:
    """Wait until all coros have ended, and return them. The iterable may start each coro as it yields it.

    If the iterable raises, or the wait is interrupted, shut the coros down, wait for them, and raise the exception.
    """
    started: list[Coro[Any]] = []
    try:
        for co in coros:
            started.append(co)  # noqa: PERF402  # if the iterable raises, list(coros) would lose the started coros
        for co in started:
            _wait_for_one(co)
    except BaseException:
        for co in started:
            shut_down(co)
        for co in started:
            _wait_for_one(co)
        raise
    return started


def _wait_for_one(co: Coro[Any]) -> None:
    if not co.done():
        wait_for_end(co)


class Group:
    """A context manager that waits at the end of its block until all its coros have ended.

    If a coro or the block raises, the group shuts the other coros down and interrupts the block. Once all have ended,
    it raises the first exception. Coros that were shut down or cancelled do not count as failed.

    ::

        with coro.Group() as group:
            group.spawn(serve, connection)
            group.spawn(watch, connection)
    """

    def __init__(self) -> None:
        self._coros: set[Coro[Any]] = set()
        self._first_error: BaseException | None = None
        self._owner: Any = None
        self._is_ending = False
        # the exception that interrupts the block after an error of a coro
        self._interruption: _errors.Interrupted | None = None

    def __repr__(self) -> str:
        state = ", ending after an error" if self._first_error is not None else ""
        return f"<{type(self).__name__} {len(self._coros)} coros{state}>"

    if TYPE_CHECKING:

        @property
        def spawn(self) -> Spawn:
            """Start ``fn(*args)`` in a coro of the group.

            Raises:
                RuntimeError: the group is ending because one of its coros, or its block, has raised.
            """
            raise NotImplementedError

    else:

        def spawn(self, fn, /, *args, **kwargs):
            """Start ``fn(*args)`` in a coro of the group.

            Raises:
                RuntimeError: the group is ending because one of its coros, or its block, has raised.
            """
            if self._first_error is not None:
                raise RuntimeError("the group is ending, because one of its coros or its block has raised")
            co = _core._coro_spawn(fn, *args, **kwargs)
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
        try:
            if first_error is not None and first_error is not exc:
                raise first_error
        finally:
            del first_error, exc  # the exception's traceback keeps this frame: break the cycle

    def _is_own_interruption(self, exc: BaseException) -> bool:
        return exc is self._interruption

    def _shut_all_down(self) -> None:
        for co in list(self._coros):
            shut_down(co)

    def _on_end(self, co: Coro[Any]) -> None:
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
    """Runs at most ``size`` coros at a time; :meth:`spawn` waits for a free place.

    As a context manager, it waits for its coros at the end of the block.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"the size of a pool must be at least 1, got {size}")
        self._size = size
        self._places = semaphore(size)
        self._coros: set[Coro[Any]] = set()

    def __len__(self) -> int:
        return len(self._coros)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self._coros)} of {self._size} places taken>"

    if TYPE_CHECKING:

        @property
        def spawn(self) -> Spawn:
            """Wait for a free place, then start ``fn(*args)`` in a coro, and return the coro."""
            raise NotImplementedError

    else:

        def spawn(self, fn, /, *args, **kwargs):
            """Wait for a free place, then start ``fn(*args)`` in a coro, and return the coro."""
            self._places.acquire()
            return self._spawn_in_place(fn, args, kwargs)

    def try_spawn(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Coro[_T] | None:
        """Like :meth:`spawn`, but return None instead of waiting if the pool is full."""
        return self._spawn_in_place(fn, args, kwargs) if self._places.try_acquire() else None

    def _spawn_in_place(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Coro[Any]:
        try:
            co: Coro[Any] = _core._coro_spawn(fn, *args, **kwargs)
        except BaseException:
            self._places.release()
            raise
        self._coros.add(co)
        co.add_done_callback(self._on_end)
        return co

    def _on_end(self, co: Coro[Any]) -> None:
        self._coros.discard(co)
        self._places.release()

    if TYPE_CHECKING:

        @overload
        def map(self, fn: Callable[[_A], _T], a: Iterable[_A], /) -> list[_T]: ...
        @overload
        def map(self, fn: Callable[[_A, _B], _T], a: Iterable[_A], b: Iterable[_B], /) -> list[_T]: ...
        @overload
        def map(
            self, fn: Callable[[_A, _B, _C], _T], a: Iterable[_A], b: Iterable[_B], c: Iterable[_C], /
        ) -> list[_T]: ...
        @overload
        def map(
            self,
            fn: Callable[..., _T],
            a: Iterable[Any],
            b: Iterable[Any],
            c: Iterable[Any],
            d: Iterable[Any],
            /,
            *more: Iterable[Any],
        ) -> list[_T]: ...

    def map(self, fn: Callable[..., Any], /, *iterables: Iterable[Any]) -> list[Any]:
        """Call ``fn`` in coros with the items of the iterables, like the builtin ``map``; return a list of the results.

        It waits until all coros have ended. If some have raised, it then raises the exception of the first of them, in
        the order of the items. If the calling coro is interrupted during the wait, or an iterable raises, the coros are
        shut down.
        """
        coros = deque(_wait_for_all(self.spawn(fn, *items) for items in zip(*iterables, strict=False)))
        results: list[Any] = []
        while coros:
            results.append(coros.popleft().result())  # an exception keeps this frame, which must not keep the coro
        return results

    if TYPE_CHECKING:

        @overload
        def imap(self, fn: Callable[[_A], _T], a: Iterable[_A], /) -> Iterator[_T]: ...
        @overload
        def imap(self, fn: Callable[[_A, _B], _T], a: Iterable[_A], b: Iterable[_B], /) -> Iterator[_T]: ...
        @overload
        def imap(
            self, fn: Callable[[_A, _B, _C], _T], a: Iterable[_A], b: Iterable[_B], c: Iterable[_C], /
        ) -> Iterator[_T]: ...
        @overload
        def imap(
            self,
            fn: Callable[..., _T],
            a: Iterable[Any],
            b: Iterable[Any],
            c: Iterable[Any],
            d: Iterable[Any],
            /,
            *more: Iterable[Any],
        ) -> Iterator[_T]: ...

    def imap(self, fn: Callable[..., Any], /, *iterables: Iterable[Any]) -> Iterator[Any]:
        """Return an iterator over the results, in the order of the items.

        It yields each result as soon as its call and all earlier calls have ended. When the iterator is made, and again
        at each ``next``, it starts a coro in each free place of the pool. At most ``size`` of its coros are running or
        have a result that was not taken yet. If a call raised, ``next`` raises that exception in place of the result,
        and the iterator can go on. If an iterable raises, its exception comes after the results of the items before it.
        Several coros may share the iterator.
        """
        return _Results(self, fn, zip(*iterables, strict=False), in_order=True)

    if TYPE_CHECKING:

        @overload
        def imap_unordered(self, fn: Callable[[_A], _T], a: Iterable[_A], /) -> Iterator[_T]: ...
        @overload
        def imap_unordered(self, fn: Callable[[_A, _B], _T], a: Iterable[_A], b: Iterable[_B], /) -> Iterator[_T]: ...
        @overload
        def imap_unordered(
            self, fn: Callable[[_A, _B, _C], _T], a: Iterable[_A], b: Iterable[_B], c: Iterable[_C], /
        ) -> Iterator[_T]: ...
        @overload
        def imap_unordered(
            self,
            fn: Callable[..., _T],
            a: Iterable[Any],
            b: Iterable[Any],
            c: Iterable[Any],
            d: Iterable[Any],
            /,
            *more: Iterable[Any],
        ) -> Iterator[_T]: ...

    def imap_unordered(self, fn: Callable[..., Any], /, *iterables: Iterable[Any]) -> Iterator[Any]:
        """Like :meth:`imap`, but it yields the results in the order in which the calls end."""
        return _Results(self, fn, zip(*iterables, strict=False), in_order=False)

    def join(self) -> None:
        """Wait until the pool has no coros left. Raises RuntimeError if called in a coro of the pool.

        If the calling coro is interrupted during the wait, the pool's coros are shut down.
        """
        if _core._coro_current_or_none() in self._coros:
            raise RuntimeError("a coro cannot wait for itself")
        while self._coros:
            if left := [co for co in self._coros if not co.done()]:
                _wait_for_all(left)
            else:  # all have ended, but their callbacks, which free their places, have not run yet
                _core._coro_yield_slice()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.join()


class _Results:
    """The iterator that ``imap`` and ``imap_unordered`` return."""

    def __init__(
        self, pool: Pool, fn: Callable[..., Any], inputs: Iterator[tuple[Any, ...]], *, in_order: bool
    ) -> None:
        _core._coro_check_function(fn, "imap")
        self._pool = pool
        self._fn = fn
        self._inputs = inputs
        self._in_order = in_order
        # the coros whose results were not taken yet, in the order in which they were started
        self._coros: deque[Coro[Any]] = deque()
        # for imap_unordered: the coros that have ended, in the order in which they ended
        self._ended: fifo[Coro[Any]] = fifo()
        # the arguments of the next call, for which there was no free place yet
        self._next: tuple[Any, ...] | None = None
        # the exception that an iterable has raised
        self._error: Exception | None = None
        # lets one coro at a time into __next__
        self._turn = semaphore()
        self._start()

    def __iter__(self) -> _Results:
        return self

    def __next__(self) -> Any:
        with self._turn:
            self._start()
            if not self._coros:
                if self._next is None:
                    error, self._error = self._error, None
                    try:
                        raise error or StopIteration
                    finally:
                        del error
                # Other users of the pool have all its places: wait for one.
                self._add(self._pool.spawn(self._fn, *self._next))
                self._next = None
            if self._in_order:
                _wait_for_one(self._coros[0])
                return self._coros.popleft().result()
            ended = self._ended.pop()
            self._coros.remove(ended)
            try:
                return ended.result()
            finally:
                del ended  # the exception's traceback keeps this frame: break the cycle

    def _start(self) -> None:
        """Start coros until no item or free place is left, or ``size`` of them are running or have a result to take."""
        while len(self._coros) < self._pool._size:
            if self._next is None and self._error is None:
                try:
                    self._next = next(self._inputs, None)
                except Exception as exc:
                    self._error = exc
            if self._next is None:
                return
            co = self._pool.try_spawn(self._fn, *self._next)
            if co is None:
                return
            self._next = None
            self._add(co)

    def _add(self, co: Coro[Any]) -> None:
        self._coros.append(co)
        if not self._in_order:
            co.add_done_callback(self._ended.push)


if TYPE_CHECKING:
    spawn_later: SpawnLater
else:

    def spawn_later(seconds, fn, /, *args, **kwargs):
        """Start a coro that sleeps for ``seconds`` and then calls ``fn(*args, **kwargs)``; return the coro.

        ``name``, ``context`` and ``stack`` have the same meaning as for ``spawn``. If the coro is shut down while it
        sleeps, ``fn`` is never called.
        """
        _core._coro_check_function(fn, "spawn_later")
        return _core._coro_spawn(_call_later, seconds, fn, *args, **kwargs)


def _call_later(seconds: float, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    _core._coro_sleep_relative(seconds)
    return fn(*args, **kwargs)


def wait_for(coros: Iterable[Any], timeout: float | None = None, count: int | None = None) -> list[Any]:
    """Implements ``wait`` with arguments: wait until all or ``count`` coros have ended, or ``timeout`` is over.

    The native function ``wait`` calls this if it gets arguments. Without arguments, native code does all the work.
    """
    coros = list(dict.fromkeys(coros))
    if count is not None and count < 0:
        raise ValueError(f"the count must not be negative, got {count}")
    own = _core._coro_current()
    for co in coros:
        if co is own:
            raise RuntimeError("a coro cannot wait for itself")
        if isinstance(co, Coro):
            check_started(co)
        elif not hasattr(co, "remove_done_callback"):
            raise TypeError(
                f"wait() takes coros, tasks and futures, got {co!r}: call the object's own wait(), acquire() or pop()"
            )
    wanted = len(coros) if count is None else min(count, len(coros))
    ended: list[Any] = []
    left: list[Any] = []
    for co in coros:  # ask each coro once: a signal handler may let other coros run between two calls of done()
        (ended if co.done() else left).append(co)
    if len(ended) >= wanted:
        return ended[:wanted]
    news: fifo[Any] = fifo()
    deadline = None if timeout is None else now() + timeout
    try:
        for co in left:
            co.add_done_callback(news.push)
        while len(ended) < wanted:
            ended.append(news.pop(timeout=None if deadline is None else deadline - now()))
    except _errors.Empty:
        pass
    finally:
        for co in left:
            co.remove_done_callback(news.push)
    return ended


# Python shows this name in a TypeError about the arguments.
wait_for.__qualname__ = "wait"
