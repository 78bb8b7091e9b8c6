"""What coros synchronize with. All waiting is first come, first served.

``semaphore``, ``lock``, ``mutex``, ``condition_variable``, ``fifo`` and ``channel`` are native, because they run at
each hand-over. The rest is built on them.

Every primitive grants what it has (the lock, a permit, an item) to the coro that has waited longest, before that coro
runs. A coro that is interrupted in between gives it back or on. A coro that is interrupted earlier leaves the queue at
once. So nothing is lost, and no coro waits for something that is available.

Only coros can wait: elsewhere a wait raises YieldFromMain. The loop's callbacks and tasks can call what does not wait
(``release``, ``push``, ``set``, ``wake_*``, ``acquire`` of a free semaphore, ...); but only a coro can hold a lock,
a mutex or an ``rw_lock``. An object belongs to the thread in whose running loop it is made. An object that is made
where no loop runs belongs to the first thread that uses it under a loop. In other threads it raises ScheduleError.

Methods that wait take ``block=False`` and ``timeout=`` in seconds; with a timeout of 0 or below they do not wait. When
the timeout is over, a method that returns a bool returns False, and the others raise :class:`TimeoutError` (``pop`` and
``push`` its subclasses Empty and Full).
"""

from __future__ import annotations

import threading
import weakref

from grapeshot import _core
from grapeshot._core import channel, condition_variable, fifo, lock, mutex, semaphore

from . import _errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    _T = TypeVar("_T")

_current = _core._coro_current


def _waiting(waiters: condition_variable) -> str:
    return f", {len(waiters)} waiting" if len(waiters) else ""


class inverted_semaphore:  # noqa: N801
    """Counts what is under way; ``block_till_zero`` waits until the count is 0."""

    def __init__(self, value: int = 0) -> None:
        if value < 0:
            raise ValueError("the count begins at 0 or above")
        self.value = value
        self._waiters = condition_variable()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.value} under way{_waiting(self._waiters)}>"

    def __int__(self) -> int:
        return self.value

    def acquire(self, value: int = 1) -> None:
        """Count up by ``value``. Never waits."""
        if value < 1:
            raise ValueError("acquire() takes 1 or more")
        self._waiters._use()
        self.value += value

    def release(self, value: int = 1) -> None:
        """Count down by ``value``; at 0 all waiting coros go on. Raises LockError below 0."""
        if value < 1:
            raise ValueError("release() takes 1 or more")
        self._waiters._use()
        if self.value < value:
            raise _errors.LockError("released more often than acquired")
        self.value -= value
        if self.value == 0:
            self._waiters.wake_all()

    def block_till_zero(self, timeout: float | None = None, block: bool = True) -> bool:
        """Wait until the count is 0, or was 0 meanwhile; return whether that was in time."""
        return not self.value or self._waiters._wait_as(0, block, timeout)

    def __enter__(self) -> inverted_semaphore:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


# What a waiting coro wants of an rw_lock.
_READ, _WRITE = 0, 1


class rw_lock:  # noqa: N801
    """Many readers or one writer, in the order in which they come.

    A waiting writer goes before readers that come after it. Both kinds are recursive: a reader may read again, even
    while a writer waits; a writer may write again, and read. A reader that wants to write gets LockError, because it
    would wait for itself. The lock is free after as many releases by the same coro.
    """

    def __init__(self) -> None:
        # how often each reader has taken it
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
        """Wait until no coro writes, and no earlier one waits; hold the lock for reading.

        Returns whether it could in time.
        """
        return self.try_acquire_read() or self._wait_as(_READ, block, timeout)

    def try_acquire_read(self) -> bool:
        """As :meth:`acquire_read`, but return False instead of waiting."""
        self._waiters._use()
        co = _current()
        if co not in self._readers and self._writer is not co and (self._writer is not None or len(self._waiters)):
            return False
        self._readers[co] = self._readers.get(co, 0) + 1
        return True

    def acquire_write(self, block: bool = True, timeout: float | None = None) -> bool:
        """Wait until no coro reads or writes, and no earlier one waits; hold the lock for writing.

        Returns whether it could in time.

        Raises:
            LockError: this coro reads.
        """
        if self.try_acquire_write():
            return True
        if _current() in self._readers:
            raise _errors.LockError("the coro holds the lock for reading: it would wait for itself")
        return self._wait_as(_WRITE, block, timeout)

    def try_acquire_write(self) -> bool:
        """As :meth:`acquire_write`, but return False instead of waiting."""
        self._waiters._use()
        co = _current()
        if self._writer is not co:
            if self._writer is not None or self._readers or len(self._waiters):
                return False
            self._writer = co
        self._depth += 1
        return True

    def release_read(self) -> None:
        """Undo one ``acquire_read``. Raises LockError if this coro does not read."""
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
        """Undo one ``acquire_write``. Raises LockError if this coro does not write."""
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
            # A waiting coro holds nothing, so what it holds now was granted.
            co = _current()
            if self._writer is co:
                self._writer = None
                self._depth = 0
            self._readers.pop(co, None)
            raise
        finally:
            if not is_granted:
                # The coros behind it may have waited only because it was first.
                self._pass_on()
        return is_granted

    def _pass_on(self) -> None:
        """Grant the lock to the first waiting coros, as far as they may hold it together."""
        while self._writer is None and (kind := self._waiters._first()) is not None:
            if kind == _READ:
                self._readers[self._waiters._wake_first()] = 1
            elif not self._readers:
                self._writer = self._waiters._wake_first()
                self._depth = 1
            else:
                return


class event:  # noqa: N801
    """A flag to wait for; the interface of :class:`threading.Event`."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiters = condition_variable()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'set' if self._is_set else 'not set'}{_waiting(self._waiters)}>"

    def is_set(self) -> bool:
        """Whether the flag is up."""
        return self._is_set

    def set(self) -> None:
        """Raise the flag and wake all that wait for it."""
        self._waiters.wake_all()
        self._is_set = True

    def clear(self) -> None:
        """Lower the flag."""
        self._waiters._use()
        self._is_set = False

    def wait(self, timeout: float | None = None, block: bool = True) -> bool:
        """Wait until the flag is up, or was up meanwhile; return whether it was in time."""
        return self._is_set or self._waiters._wait_as(0, block, timeout)


class mailbox(fifo["_T"]):  # noqa: N801
    """A fifo that many coros send to and one reads; ``pop_all`` takes what is there."""

    __slots__ = ()

    if TYPE_CHECKING:

        def send(self, item: _T, /, block: bool = True, timeout: float | None = None) -> None:
            """Another name of ``push``."""

        def receive(self, block: bool = True, timeout: float | None = None) -> _T:
            """Another name of ``pop``."""
            raise NotImplementedError

    else:
        send = fifo.push
        receive = fifo.pop


class ThreadLocal:
    """Attributes with a value per coro, and outside of coros per thread; ``__dict__`` has those of the running one.

    ``__init__`` of a subclass runs once, not for each coro.
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
    "mailbox",
    "mutex",
    "rw_lock",
    "semaphore",
]
