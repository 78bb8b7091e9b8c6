"""``future``: a result that is set once, for which any number of coros and tasks can wait."""

from __future__ import annotations

from collections.abc import Callable, Generator
from types import GenericAlias

from grapeshot._core import condition_variable

from . import _errors
from ._bridge import find_running_loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any, Generic, TypeVar

    _T = TypeVar("_T")

    class _Generic(Generic[_T]): ...

else:

    class _Generic:
        __class_getitem__ = classmethod(GenericAlias)


class future(_Generic["_T"]):  # noqa: N801
    """A result that is set once, to a value or an exception. gevent calls this AsyncResult.

    Coros wait for it with :meth:`get` and :meth:`wait`, tasks with ``await``. Like all primitives for coros it belongs
    to one thread. An exception that is never retrieved goes to the loop's exception handler, as a coro's exception
    does.
    """

    # the loop to report the exception to if it is never retrieved; None when there is nothing to report
    _loop: Any = None  # a class attribute, for __del__ of an object whose __init__ was not called

    def __init__(self) -> None:
        self._is_set = False
        self._value: _T | None = None
        self._exception: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._waiters = condition_variable()
        self._callbacks: list[Callable[[Any], object]] = []

    def __repr__(self) -> str:
        state = "not set"
        if self._is_set:
            state = f"value={self._value!r}" if self._exception is None else f"exception={self._exception!r}"
        waiting = f", {len(self._waiters)} waiting" if len(self._waiters) else ""
        return f"<{type(self).__name__} {state}{waiting}>"

    def set(self, value: _T = None) -> None:  # type: ignore[assignment]  # for future[None]
        """Set the value, and wake all coros and tasks that wait. Raises asyncio.InvalidStateError if already set."""
        self._check_unset()
        self._value = value
        self._finish()

    def set_exception(self, exc: BaseException | type[BaseException]) -> None:
        """Set an exception, which ``get`` will raise. Raises asyncio.InvalidStateError if already set."""
        exc = exc() if isinstance(exc, type) else exc
        if not isinstance(exc, BaseException):
            raise TypeError(f"set_exception() needs an exception, got {exc!r}")
        self._check_unset()
        self._exception = exc
        self._traceback = exc.__traceback__
        self._loop = find_running_loop()
        self._finish()

    def _check_unset(self) -> None:
        self._waiters._use()
        if self._is_set:
            raise _errors.InvalidStateError("the future is already set, and can be set only once")

    def _finish(self) -> None:
        self._is_set = True
        self._waiters.wake_all()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._call_soon(callback)

    def done(self) -> bool:
        """Return True if a value or an exception was set."""
        return self._is_set

    ready = done  # gevent's name

    def successful(self) -> bool:
        """Return True if a value was set, and not an exception."""
        return self._is_set and self._exception is None

    @property
    def value(self) -> _T | None:
        """The value, or None if no value was set."""
        return self._value

    @property
    def exception(self) -> BaseException | None:
        """The exception, or None if no exception was set."""
        self._loop = None
        return self._exception

    def wait(self, timeout: float | None = None, block: bool = True) -> bool:
        """Wait until the future is set; return False if it was not set within ``timeout`` seconds.

        Without ``block``, return at once whether it is set.
        """
        return self._is_set or self._waiters._wait_as(0, block, timeout)

    def get(self, block: bool = True, timeout: float | None = None) -> _T:
        """Wait until the future is set; return the value or raise the exception.

        Raises:
            TimeoutError: the future was not set within ``timeout`` seconds, or, without ``block``, it is not set now.
            YieldFromMain: it would have to wait, and was not called in a coro.
        """
        if not self.wait(timeout, block):
            after = f" after {timeout:g} seconds" if block and timeout is not None else ""
            raise _errors.TimeoutError(f"the future is not set{after}")
        self._loop = None
        if self._exception is not None:
            try:
                raise self._exception.with_traceback(self._traceback)
            finally:
                del self  # the exception's traceback keeps this frame: break the cycle
        return self._value  # type: ignore[return-value]

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Have the loop call ``fn(self)`` once the future is set. If no loop runs then, ``fn`` is called directly."""
        self._waiters._use()
        if self._is_set:
            self._call_soon(fn)
        else:
            self._callbacks.append(fn)

    def remove_done_callback(self, fn: Callable[[Any], object]) -> int:
        """Remove the callbacks that are equal to ``fn``; return how many there were."""
        kept = [callback for callback in self._callbacks if callback != fn]
        removed = len(self._callbacks) - len(kept)
        self._callbacks = kept
        return removed

    def _call_soon(self, callback: Callable[[Any], object]) -> None:
        loop = find_running_loop()
        if loop is None:  # this thread runs no loop that could call it later
            callback(self)
        else:
            loop.call_soon(callback, self)

    def __await__(self) -> Generator[Any, None, _T]:
        if not self._is_set:
            loop = find_running_loop()
            if loop is None:
                raise RuntimeError("no running event loop")
            waiter = loop.create_future()

            def wake(_: object) -> None:
                if not waiter.done():
                    waiter.set_result(None)

            self.add_done_callback(wake)
            try:
                yield from waiter
            finally:
                self.remove_done_callback(wake)
        return self.get(block=False)

    def __del__(self) -> None:
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        message = f"{type(self).__name__} exception was never retrieved"
        loop.call_exception_handler({"message": message, "exception": self._exception, "future": self})
