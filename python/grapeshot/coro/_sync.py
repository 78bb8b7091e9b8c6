"""What coros synchronize with. All waiting is first come, first served.

``semaphore``, ``lock``, ``mutex``, ``condition_variable``, ``fifo`` and ``channel`` are native, because they run at
each hand-over; the rest stands on them.

Every primitive grants what it has (the lock, a permit, an item) to the coro that has waited longest, before that one
runs. A coro that is interrupted in between gives it back or on, and one that is interrupted earlier leaves the line at
once: nothing is lost, and nobody waits for what is there.

Waiting is for coros: elsewhere it raises YieldFromMain. What does not wait (``release``, ``push``, ``set``, ``wake_*``,
``acquire`` of a free semaphore, ...) is for the loop's callbacks and for tasks as well; a lock, a mutex and an
``rw_lock`` have a coro as their holder. An object belongs to the thread of the loop that it is made in, one that is
made where no loop runs to the first thread that uses it under one; elsewhere it raises ScheduleError.

What waits takes ``block=False`` and ``timeout=`` in seconds; one of 0 or below does not wait either. A method that
returns a bool returns False when its time is over, the others raise :class:`TimeoutError` (``pop`` and ``push`` its
subclasses Empty and Full).
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
    """Counts what is under way; ``block_till_zero`` waits until nothing is."""

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
        """Count down by ``value``; at 0 all that wait go on. Raises LockError below 0."""
        if value < 1:
            raise ValueError("release() takes 1 or more")
        self._waiters._use()
        if self.value < value:
            raise _errors.LockError("released more often than acquired")
        self.value -= value
        if self.value == 0:
            self._waiters.wake_all()

    def block_till_zero(self, timeout: float | None = None, block: bool = True) -> bool:
        """Wait until the count is 0, or was 0 meanwhile; return whether it was in time."""
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

    A writer that waits goes before readers that come after it. Both kinds are recursive: who reads may read again, even
    while a writer waits, and who writes may write again, and read. Who reads and wants to write gets LockError, for it
    would wait for itself. A lock is free after as many releases, by the same coro.
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
        """Wait until nobody writes, and nobody waits who came before; hold the lock for reading.

        Returns whether it could in time.
        """
        return self.try_acquire_read() or self._wait_as(_READ, block, timeout)

    def try_acquire_read(self) -> bool:
        """The same without waiting; return False if it cannot be."""
        self._waiters._use()
        co = _current()
        if co not in self._readers and self._writer is not co and (self._writer is not None or len(self._waiters)):
            return False
        self._readers[co] = self._readers.get(co, 0) + 1
        return True

    def acquire_write(self, block: bool = True, timeout: float | None = None) -> bool:
        """Wait until nobody reads or writes, and nobody waits who came before; hold the lock for writing.

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
        """The same without waiting; return False if it cannot be."""
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
            # Who waits holds nothing, so that what it holds was granted.
            co = _current()
            if self._writer is co:
                self._writer = None
                self._depth = 0
            self._readers.pop(co, None)
            raise
        finally:
            if not is_granted:
                # Those behind it may have waited for it only.
                self._pass_on()
        return is_granted

    def _pass_on(self) -> None:
        """Grant the lock to those who stand first, as far as they fit together."""
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
    """Attributes that each coro has of its own, and outside of coros each thread; ``__dict__`` is the running one's.

    ``__init__`` of a subclass runs once, and not for each coro.
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
