"""Reads of a buffered file that several coros share: those of one thread wait for each other.

The buffers of :mod:`io` have locks, which belong to real threads: a second coro of the thread would get "reentrant
call". So a coro takes a lock of coros before it calls the buffer. The raw file below waits while others run.

An exception that ends such a wait must not lose what the buffer has read for this call. So the raw file keeps it back
and reports that nothing is there yet, for which the buffer returns what it has. That is unread, and then the exception
is raised.
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
    """Take the lock of a file when somebody else has it."""
    if not _waits.can_wait() and _is_among_coros():
        # The loop's thread. A coro that has the lock could not go on, and this could not return.
        raise RuntimeError(f"a coro uses {file!r}; only another coro or another thread can wait for it")
    lock.acquire()


class SharedReads:
    """Who reads a file now, and what interrupted reads have left. One object per raw file.

    The running coro has the lock if it calls the raw file by its buffer.
    """

    __slots__ = ("_unread", "interruption", "lock")

    def __init__(self) -> None:
        self.lock = new_lock()
        self.interruption: BaseException | None = None
        self._unread = b""

    def read(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the buffer, which calls :meth:`fill` and nothing else that waits."""
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
            # Of readinto: a file for bytes returns no other numbers.
            with memoryview(args[-1]) as view, view.cast("B") as octets:
                result = bytes(octets[:result])
        self._unread = (result or b"") + self._unread
        if interruption is not None:
            raise interruption

    def fill(self, readinto: Callable[[Any], int | None], buffer: Any) -> int | None:
        """Read into a buffer by a function that may wait: what was unread first."""
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
