"""Lets several coros read from the same buffered file, one at a time.

The buffers of :mod:`io` have locks that belong to real threads: a second coro of the same thread would get the error
"reentrant call". So a coro acquires a lock for coros before it calls the buffer. Other coros run while the raw file
below the buffer waits for data.

If an exception interrupts such a wait, data that the buffer has already read for this call must not be lost:

1. The raw file stores the exception, and tells the buffer that no data is there yet.
2. The buffer then returns the data that it has so far.
3. That data is stored as unread, for the next read, and the exception is raised.
"""

from __future__ import annotations

from grapeshot import _core

from . import _waits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_is_among_coros = _core._coro_begins_thread
new_lock = _core.thread_rlock


def wait_for(lock: Any, file: object) -> None:
    """Acquire the lock of a file, after waiting for the coro or thread that holds the lock."""
    if not _waits.can_wait() and _is_among_coros():
        # This is a task or callback in the loop's thread: if it blocked, the coro that holds the lock could not go on.
        raise RuntimeError(
            f"a coro is using {file!r}: tasks and callbacks of the loop cannot wait for that; use the file in a coro or"
            " in another thread"
        )
    lock.acquire()


class SharedReads:
    """The lock of a raw file, and the data that interrupted reads have left. There is one object per raw file.

    A coro holds the lock while it calls the raw file through its buffer.
    """

    __slots__ = ("_unread", "interruption", "lock")

    def __init__(self) -> None:
        self.lock = new_lock()
        self.interruption: BaseException | None = None
        self._unread = b""

    def read(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the buffered file. The raw file below it calls :meth:`fill`, the only call that may wait."""
        lock = self.lock
        if not lock.acquire(False):
            wait_for(lock, args[0] if args else method)
        try:
            result = method(*args)
            if self.interruption is not None:
                self.unread_all(result, args)
            return result
        except BaseException:
            if self.interruption is not None:
                self.unread_all(None, args)
            raise
        finally:
            lock.release()

    def unread_all(self, result: Any, args: Any) -> None:
        interruption, self.interruption = self.interruption, None
        if isinstance(result, int):
            # The method is readinto or readinto1: only these return a number. They have put the data into their
            # argument.
            with memoryview(args[-1]) as view, view.cast("B") as octets:
                result = bytes(octets[:result])
        self._unread = (result or b"") + self._unread
        if interruption is not None:
            raise interruption

    def fill(self, readinto: Callable[[Any], int | None], buffer: Any) -> int | None:
        """Read into a buffer with ``readinto``, which may wait. Unread data comes first."""
        if self._unread:
            return self._take(buffer)
        if self.interruption is not None and self.lock._is_owned():
            return None
        try:
            return readinto(buffer)
        except OSError:
            raise
        except BaseException as exc:
            if not self.lock._is_owned():
                raise
            self.interruption = exc
            return None

    def _take(self, buffer: Any) -> int:
        with memoryview(buffer) as view, view.cast("B") as octets:
            count = min(len(octets), len(self._unread))
            octets[:count] = self._unread[:count]
        self._unread = self._unread[count:]
        return count
