"""What coros synchronize with. All waiting is first come, first served.

Every primitive hands over what it grants (a lock, a permit, an item) to the coro that it wakes, before that one runs.
A coro that is interrupted after the grant gives it back or on, and one that is interrupted before is forgotten: nothing
is lost, and nobody waits for what is there. :func:`_wait_in` is where this is decided.
"""

from __future__ import annotations

import collections
import weakref

from grapeshot import _core

from . import _errors

TYPE_CHECKING = False  # typing is not imported at run time: from Python 3.14 on asyncio does without it
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

_current = _core._coro_current
_wait = _core._coro_wait


def _wait_in(waiters: collections.deque[Any], undo: Callable[[], object] | None = None) -> Any:
    """Wait until somebody takes this coro out of ``waiters`` and wakes it; return what it is woken with.

    If it is interrupted it leaves ``waiters``; if it had been taken out already, ``undo()`` gives the grant back.
    """
    coro = _current()
    waiters.append(coro)
    try:
        return _wait()
    except BaseException:
        try:
            waiters.remove(coro)
        except ValueError:
            if undo is not None:
                undo()
        raise


def _take(waiters: collections.deque[Any]) -> Any:
    """Take out and return the coro that has waited longest, None if none waits.

    Those that were interrupted, and have not run since, are passed over: they leave by themselves.
    """
    for co in waiters:
        if co._status == "waiting":
            waiters.remove(co)
            return co
    return None


class _Locking:
    """``with``, by ``acquire`` and ``release``."""

    def acquire(self) -> Any:
        raise NotImplementedError

    def release(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Any:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class lock(_Locking):  # noqa: N801
    """A lock that one coro holds; a coro that locks it twice waits for itself."""

    def __init__(self) -> None:
        self._holder: Any = None
        self._waiters: collections.deque[Any] = collections.deque()

    def acquire(self) -> None:
        """Wait until the lock is free, and hold it. Raises YieldFromMain outside of a coro."""
        if self._holder is None:
            self._holder = _current()
        else:
            _wait_in(self._waiters, self._pass_on)

    def try_acquire(self) -> bool:
        """Hold the lock and return True if it is free, else return False."""
        if self._holder is not None:
            return False
        self._holder = _current()
        return True

    def release(self) -> None:
        """Give the lock to the coro that has waited longest. Raises LockError if another coro holds it, or none."""
        if self._holder is not _current():
            raise _errors.LockError("the lock is not held by this coro")
        self._pass_on()

    def locked(self) -> bool:
        """Whether a coro holds it."""
        return self._holder is not None

    def _pass_on(self) -> None:
        self._holder = holder = _take(self._waiters)
        if holder is not None:
            holder._wake()


class mutex(lock):  # noqa: N801
    """A lock that its holder may take again; it is free after as many releases."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0

    def acquire(self) -> None:
        """Wait until the lock is free or this coro's own, and hold it once more."""
        if self._holder is _current():
            self._depth += 1
        else:
            super().acquire()

    def try_acquire(self) -> bool:
        """Hold the lock once more and return True if it is free or this coro's own, else return False."""
        if self._holder is _current():
            self._depth += 1
            return True
        return super().try_acquire()

    def release(self) -> None:
        """Undo one ``acquire``. Raises LockError if another coro holds it, or none."""
        if self._depth and self._holder is _current():
            self._depth -= 1
        else:
            super().release()


class semaphore(_Locking):  # noqa: N801
    """``value`` permits."""

    def __init__(self, value: int = 1) -> None:
        if value < 0:
            raise ValueError("a semaphore has no fewer than 0 permits")
        self.avail = value
        self._waiters: collections.deque[Any] = collections.deque()

    def acquire(self) -> None:
        """Wait for a permit. Raises YieldFromMain outside of a coro if there is none."""
        if self.avail > 0:
            self.avail -= 1
        else:
            _wait_in(self._waiters, self.release)

    def try_acquire(self) -> bool:
        """Take a permit and return True if there is one, else return False."""
        if self.avail > 0:
            self.avail -= 1
            return True
        return False

    def release(self) -> None:
        """Give a permit to the coro that has waited longest, or put it back. Any coro may, and the loop's callbacks."""
        co = _take(self._waiters)
        if co is None:
            self.avail += 1
        else:
            co._wake()


class inverted_semaphore:  # noqa: N801
    """Counts what is under way; ``block_till_zero`` waits until nothing is."""

    def __init__(self, value: int = 0) -> None:
        if value < 0:
            raise ValueError("the count begins at 0 or above")
        self.value = value
        self._waiters: collections.deque[Any] = collections.deque()

    def acquire(self) -> None:
        """Count one up. Never waits."""
        self.value += 1

    def release(self) -> None:
        """Count one down; at 0 all that wait go on. Raises LockError below 0."""
        if self.value <= 0:
            raise _errors.LockError("released more often than acquired")
        self.value -= 1
        if self.value == 0:
            while (co := _take(self._waiters)) is not None:
                co._wake()

    def block_till_zero(self) -> None:
        """Wait until the count is 0."""
        if self.value:
            _wait_in(self._waiters)

    def __enter__(self) -> inverted_semaphore:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class rw_lock:  # noqa: N801
    """Many readers or one writer. A waiting writer goes before readers that come after it."""

    def __init__(self) -> None:
        self._readers = 0
        self._writer: Any = None
        # (coro, whether it wants to write), in the order in which they came
        self._waiters: collections.deque[tuple[Any, bool]] = collections.deque()

    def acquire_read(self) -> None:
        """Wait until nobody writes or waits to write, and hold the lock for reading."""
        if self._writer is None and not self._waiters:
            self._readers += 1
        else:
            self._wait_for(False)

    def acquire_write(self) -> None:
        """Wait until nobody reads or writes, and hold the lock for writing."""
        if self._writer is None and not self._readers and not self._waiters:
            self._writer = _current()
        else:
            self._wait_for(True)

    def release_read(self) -> None:
        """Raises LockError if nobody reads."""
        if not self._readers:
            raise _errors.LockError("the lock is not held for reading")
        self._readers -= 1
        self._pass_on()

    def release_write(self) -> None:
        """Raises LockError if this coro does not write."""
        if self._writer is not _current():
            raise _errors.LockError("the lock is not held for writing by this coro")
        self._writer = None
        self._pass_on()

    def _wait_for(self, is_writer: bool) -> None:
        entry = (_current(), is_writer)
        self._waiters.append(entry)
        try:
            _wait()
        except BaseException:
            if entry in self._waiters:
                self._waiters.remove(entry)
            elif is_writer:
                self._writer = None
            else:
                self._readers -= 1
            self._pass_on()
            raise

    def _pass_on(self) -> None:
        for entry in list(self._waiters):
            coro, is_writer = entry
            if coro._status != "waiting":
                continue  # interrupted: it leaves by itself
            if self._writer is not None or (is_writer and self._readers):
                return
            if is_writer:
                self._writer = coro
            else:
                self._readers += 1
            self._waiters.remove(entry)
            coro._wake()


class condition_variable:  # noqa: N801
    """Coros wait until they are woken; nothing is remembered for those that come later."""

    def __init__(self) -> None:
        self._waiters: collections.deque[Any] = collections.deque()

    def __len__(self) -> int:
        return len(self._waiters)

    def wait(self) -> Any:
        """Wait; return what ``wake_one`` or ``wake_all`` was given."""
        return _wait_in(self._waiters)

    def wake_one(self, value: Any = None) -> bool:
        """Wake the coro that has waited longest; return False if none waits."""
        co = _take(self._waiters)
        if co is None:
            return False
        co._wake(value)
        return True

    def wake_n(self, count: int, value: Any = None) -> int:
        """Wake up to ``count`` coros; return how many there were."""
        woken = 0
        while woken < count and self.wake_one(value):
            woken += 1
        return woken

    def wake_all(self, value: Any = None) -> int:
        """Wake all coros that wait now; return how many there were."""
        return self.wake_n(len(self._waiters), value)

    def raise_all(self, exc: BaseException | type[BaseException]) -> int:
        """Raise ``exc`` in all coros that wait now; return how many there were."""
        count = 0
        while (co := _take(self._waiters)) is not None:
            co.raise_exception(exc)
            count += 1
        return count


class event:  # noqa: N801
    """A flag to wait for; the interface of :class:`threading.Event`."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: collections.deque[Any] = collections.deque()

    def is_set(self) -> bool:
        """Whether the flag is up."""
        return self._is_set

    def set(self) -> None:
        """Raise the flag and wake all that wait for it."""
        self._is_set = True
        while (co := _take(self._waiters)) is not None:
            co._wake()

    def clear(self) -> None:
        """Lower the flag."""
        self._is_set = False

    def wait(self) -> bool:
        """Wait until the flag is up; return True."""
        if not self._is_set:
            _wait_in(self._waiters)
        return True


class fifo:  # noqa: N801
    """A queue without a limit: ``push`` never waits, ``pop`` waits for an item."""

    def __init__(self) -> None:
        self._items: collections.deque[Any] = collections.deque()
        self._waiters: collections.deque[Any] = collections.deque()

    def __len__(self) -> int:
        return len(self._items)

    def push(self, item: Any) -> None:
        """Hand ``item`` to the coro that has waited longest, or keep it. Any coro may, and the loop's callbacks."""
        co = _take(self._waiters)
        if co is None:
            self._items.append(item)
        else:
            co._wake((item,))

    def pop(self) -> Any:
        """Return the oldest item, waiting for one if there is none."""
        if self._items:
            return self._items.popleft()
        coro = _current()
        self._waiters.append(coro)
        try:
            return _wait()[0]
        except BaseException:
            try:
                self._waiters.remove(coro)
            except ValueError:
                self._give_back(coro)
            raise

    def _give_back(self, coro: Any) -> None:
        # Interrupted with an item in its hand: the item goes on to the next, or back to the front.
        granted = coro._undelivered()
        if granted is not None:
            co = _take(self._waiters)
            if co is None:
                self._items.appendleft(granted[0])
            else:
                co._wake(granted)


class mailbox(fifo):  # noqa: N801
    """A fifo that many coros send to and one reads; ``pop_all`` takes what is there."""

    send = fifo.push
    receive = fifo.pop

    def pop_all(self) -> list[Any]:
        """Return all items, waiting for one if there is none."""
        items = [self.pop()]
        items += self._items
        self._items.clear()
        return items


class channel:  # noqa: N801
    """A rendezvous: ``send`` and ``receive`` wait for each other (Stackless Python's channels).

    ``balance`` is the number of coros that wait to send, or, below 0, of those that wait to receive. Iteration receives
    until the channel is closed.
    """

    def __init__(self) -> None:
        self._senders: collections.deque[tuple[Any, Any, BaseException | None]] = collections.deque()
        self._receivers: collections.deque[Any] = collections.deque()
        self._is_closed = False

    @property
    def balance(self) -> int:
        """Senders that wait, or minus the receivers that wait."""
        return len(self._senders) - len(self._receivers)

    def send(self, value: Any) -> None:
        """Give ``value`` to a receiver, waiting for one. ClosedError if the channel is closed."""
        self._send(value, None)

    def send_exception(self, exc: BaseException | type[BaseException], *args: Any) -> None:
        """Raise ``exc`` in a receiver, waiting for one. ClosedError if the channel is closed."""
        self._send(None, exc(*args) if isinstance(exc, type) else exc)

    def _send(self, value: Any, exc: BaseException | None) -> None:
        if self._is_closed:
            raise _errors.ClosedError("the channel is closed")
        receiver = _take(self._receivers)
        if receiver is not None:
            receiver._wake((value, exc))
            return
        entry = (_current(), value, exc)
        self._senders.append(entry)
        try:
            _wait()
        except BaseException:
            # Taken out already: the receiver has the value.
            if any(waiting is entry for waiting in self._senders):
                self._senders = collections.deque(waiting for waiting in self._senders if waiting is not entry)
            raise

    def receive(self) -> Any:
        """Return the value of a sender, waiting for one. ClosedError if the channel is closed and nobody sends."""
        entry = next((entry for entry in self._senders if entry[0]._status == "waiting"), None)
        if entry is not None:
            self._senders.remove(entry)
            sender, value, exc = entry
            sender._wake()
        else:
            if self._is_closed:
                raise _errors.ClosedError("the channel is closed")
            value, exc = self._wait_for_sender()
        if exc is not None:
            raise exc
        return value

    def _wait_for_sender(self) -> Any:
        coro = _current()
        self._receivers.append(coro)
        try:
            granted = _wait()
        except BaseException:
            try:
                self._receivers.remove(coro)
            except ValueError:
                self._give_back(coro)
            raise
        if granted is None:
            raise _errors.ClosedError("the channel is closed")
        return granted

    def _give_back(self, coro: Any) -> None:
        granted = coro._undelivered()
        if granted is None:
            return
        receiver = _take(self._receivers)
        if receiver is not None:
            receiver._wake(granted)
        else:
            # The sender has gone on: what it has given stays, at the front.
            self._senders.appendleft((_Gone, *granted))

    def close(self) -> None:
        """Let receivers that wait, and later ones, end with ClosedError once nobody sends any more."""
        self._is_closed = True
        while (receiver := _take(self._receivers)) is not None:
            receiver._wake(None)

    def __iter__(self) -> Iterator[Any]:
        while True:
            try:
                value = self.receive()
            except _errors.ClosedError:
                return
            yield value


class _Gone:
    """In the place of a sender that has gone on."""

    _status = "waiting"

    @staticmethod
    def _wake() -> None:
        """Nobody is there to be woken."""


class ThreadLocal:
    """Attributes that each coro has of its own; outside of coros there is one more set, the thread's."""

    def __init__(self) -> None:
        object.__setattr__(self, "_values", weakref.WeakKeyDictionary())
        object.__setattr__(self, "_outside", {})

    def _own(self) -> dict[str, Any]:
        coro = _core._coro_current_or_none()
        if coro is None:
            own: dict[str, Any] = object.__getattribute__(self, "_outside")
            return own
        values = object.__getattribute__(self, "_values")
        return values.setdefault(coro, {})  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        try:
            return self._own()[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._own()[name] = value

    def __delattr__(self, name: str) -> None:
        try:
            del self._own()[name]
        except KeyError:
            raise AttributeError(name) from None
