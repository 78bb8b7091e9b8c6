"""The primitives with which coros synchronize. They serve waiting coros in the order in which the coros came.

``semaphore``, ``lock``, ``mutex``, ``condition_variable``, ``fifo`` and ``channel`` are native code, for speed. The
others are built on them in Python.

A primitive that wakes a coro gives it the lock, permit or item at once, before the coro runs. If the coro is
interrupted in between, the lock, permit or item goes back to the primitive, or on to the next coro. A coro that is
interrupted before it is woken leaves the queue at once. So nothing is lost, and no coro waits for something that is
available.

Only coros can wait; anywhere else, a call that would have to wait raises YieldFromMain. Callbacks and tasks of the loop
can make the calls that do not wait (``release``, ``push``, ``set``, ``wake_*``, ``acquire`` of a free semaphore, ...),
but only a coro can hold a lock, a mutex or an ``rw_lock``.

An object belongs to one thread: to the thread that makes it, if a loop is running there, and otherwise to the first
thread that uses the object while a loop runs there. Other threads must not use the object: most of its
methods raise ScheduleError there.

Most methods that wait take the arguments ``block`` and ``timeout``. With ``block=False``, or a timeout of 0 seconds or
below, they do not wait. When the timeout is over, a method that returns a bool returns False, and ``pop_all`` returns
an empty list; the other methods raise :class:`TimeoutError`, or its subclass Empty (``pop``) or Full (``push``).
"""

from __future__ import annotations

import threading
import weakref

from grapeshot import _core
from grapeshot._core import channel, condition_variable, fifo, lock, mutex, semaphore

from . import _errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_current = _core._coro_current


def _waiting(waiters: condition_variable) -> str:
    return f", {len(waiters)} waiting" if len(waiters) else ""


class inverted_semaphore:  # noqa: N801
    """Counts operations in progress. ``block_till_zero`` waits until there are none."""

    def __init__(self, value: int = 0) -> None:
        if value < 0:
            raise ValueError(f"the count must not be negative, got {value}")
        self.value = value
        self._waiters = condition_variable()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.value} under way{_waiting(self._waiters)}>"

    def __int__(self) -> int:
        return self.value

    def acquire(self, value: int = 1) -> None:
        """Add ``value`` to the count. Never waits."""
        if value < 1:
            raise ValueError(f"acquire() must add at least 1, got {value}")
        self._waiters._use()
        self.value += value

    def release(self, value: int = 1) -> None:
        """Subtract ``value`` from the count. At 0, wake all waiting coros.

        Raises:
            LockError: the count would fall below 0.
        """
        if value < 1:
            raise ValueError(f"release() must subtract at least 1, got {value}")
        self._waiters._use()
        if self.value < value:
            raise _errors.LockError("released more often than acquired")
        self.value -= value
        if self.value == 0:
            self._waiters.wake_all()

    def block_till_zero(self, timeout: float | None = None, block: bool = True) -> bool:
        """Wait until the count is 0, or was 0 for a moment; return False if that did not happen in time."""
        return not self.value or self._waiters._wait_as(0, block, timeout)

    def __enter__(self) -> inverted_semaphore:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


# How a waiting coro wants to hold an rw_lock.
_READ, _WRITE = 0, 1


class rw_lock:  # noqa: N801
    """A lock that either many readers or one writer can hold. Coros get it in the order in which they come.

    So readers that come after a waiting writer wait until the writer is done. The lock is recursive: a coro that holds
    it for reading may acquire it for reading again, even while a writer waits; a coro that holds it for writing may
    acquire it again for writing or for reading. A coro that holds it only for reading and tries to write gets
    LockError, because it would wait for itself. A coro must release the lock as often as it has acquired it.
    """

    def __init__(self) -> None:
        # how often each reader has acquired the lock
        self._readers: dict[Any, int] = {}
        self._writer: Any = None
        self._depth = 0
        self._waiters = condition_variable()

    def __repr__(self) -> str:
        state = "unlocked"
        if self._writer is not None:
            state = "writing"
        elif self._readers:
            state = f"{len(self._readers)} reading"
        return f"<{type(self).__name__} {state}{_waiting(self._waiters)}>"

    def acquire_read(self, block: bool = True, timeout: float | None = None) -> bool:
        """Wait until it is this coro's turn and no other coro holds the lock for writing; then hold it for reading.

        Returns False if that was not possible in time.
        """
        return self.try_acquire_read() or self._wait_as(_READ, block, timeout)

    def try_acquire_read(self) -> bool:
        """Like :meth:`acquire_read`, but return False instead of waiting."""
        self._waiters._use()
        co = _current()
        if co not in self._readers and self._writer is not co and (self._writer is not None or len(self._waiters)):
            return False
        self._readers[co] = self._readers.get(co, 0) + 1
        return True

    def acquire_write(self, block: bool = True, timeout: float | None = None) -> bool:
        """Wait until it is this coro's turn and no other coro holds the lock; then hold it for writing.

        Returns False if that was not possible in time.

        Raises:
            LockError: this coro holds the lock, but only for reading.
        """
        if self.try_acquire_write():
            return True
        if _current() in self._readers:
            raise _errors.LockError("this coro holds the lock for reading, so acquire_write() would wait for itself")
        return self._wait_as(_WRITE, block, timeout)

    def try_acquire_write(self) -> bool:
        """Like :meth:`acquire_write`, but return False instead of waiting."""
        self._waiters._use()
        co = _current()
        if self._writer is not co:
            if self._writer is not None or self._readers or len(self._waiters):
                return False
            self._writer = co
        self._depth += 1
        return True

    def release_read(self) -> None:
        """Undo one :meth:`acquire_read`. Raises LockError if this coro does not hold the lock for reading."""
        co = _current()
        count = self._readers.get(co)
        if count is None:
            raise _errors.LockError("the lock is not held for reading by this coro")
        if count > 1:
            self._readers[co] = count - 1
        else:
            del self._readers[co]
            self._pass_on()

    def release_write(self) -> None:
        """Undo one :meth:`acquire_write`. Raises LockError if this coro does not hold the lock for writing."""
        if self._writer is None or self._writer is not _current():
            raise _errors.LockError("the lock is not held for writing by this coro")
        self._depth -= 1
        if not self._depth:
            self._writer = None
            self._pass_on()

    # Shrapnel's names
    read_lock = acquire_read
    read_unlock = release_read
    write_lock = acquire_write
    write_unlock = release_write

    def _wait_as(self, kind: int, block: bool, timeout: float | None) -> bool:
        is_granted = False
        try:
            is_granted = self._waiters._wait_as(kind, block, timeout)
        except BaseException:
            # A coro that waits holds nothing. If it holds the lock now, the lock was granted before the interruption.
            co = _current()
            if self._writer is co:
                self._writer = None
                self._depth = 0
            self._readers.pop(co, None)
            raise
        finally:
            if not is_granted:
                # Coros behind this one may have waited only because it came first.
                self._pass_on()
        return is_granted

    def _pass_on(self) -> None:
        """Grant the lock to the first waiting coros: to as many as can hold it together."""
        while self._writer is None and (kind := self._waiters._first()) is not None:
            if kind == _READ:
                self._readers[self._waiters._wake_first()] = 1
            elif not self._readers:
                self._writer = self._waiters._wake_first()
                self._depth = 1
            else:
                return


class event:  # noqa: N801
    """A flag that coros can wait for, with the interface of :class:`threading.Event`."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiters = condition_variable()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'set' if self._is_set else 'not set'}{_waiting(self._waiters)}>"

    def is_set(self) -> bool:
        """Return True if the flag is set."""
        return self._is_set

    def set(self) -> None:
        """Set the flag, and wake all coros that wait for it."""
        self._waiters.wake_all()
        self._is_set = True

    def clear(self) -> None:
        """Reset the flag."""
        self._waiters._use()
        self._is_set = False

    def wait(self, timeout: float | None = None, block: bool = True) -> bool:
        """Wait until the flag is set; return False if it was not set in time.

        The wait ends even if the flag is cleared again at once.
        """
        return self._is_set or self._waiters._wait_as(0, block, timeout)


class ThreadLocal:
    """An object that has separate attributes for each coro, and for each thread outside of coros.

    ``__dict__`` has the attributes of the running coro. ``__init__`` of a subclass runs once, not once per coro.
    """

    def __new__(cls, *_args: Any, **_kwargs: Any) -> ThreadLocal:
        self = super().__new__(cls)
        object.__setattr__(self, "_ThreadLocal__values", weakref.WeakKeyDictionary())
        object.__setattr__(self, "_ThreadLocal__outside", threading.local())
        return self

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        coro = _core._coro_current_or_none()
        if coro is None:
            own: dict[str, Any] = object.__getattribute__(self, "_ThreadLocal__outside").__dict__
            return own
        values = object.__getattribute__(self, "_ThreadLocal__values")
        return values.setdefault(coro, {})  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        try:
            del self.__dict__[name]
        except KeyError:
            raise AttributeError(name) from None


__all__ = [
    "ThreadLocal",
    "channel",
    "condition_variable",
    "event",
    "fifo",
    "inverted_semaphore",
    "lock",
    "mutex",
    "rw_lock",
    "semaphore",
]
