"""Lets several coros wait on the same descriptor.

In the fd table of the loop, a descriptor has only one entry per direction. Blocking code has no such limit: two threads
may read from the same pipe, or a thread may call ``select`` for a socket from which another one receives. So a wait
here registers its descriptors with an epoll object of its own, and waits on that. (A wait for a single descriptor does
so only if the loop's entry is taken.) When the wait returns, the event may already be gone, for instance because
another coro has read the data. So the caller then repeats its own system call, which reports the present state of the
descriptors.
"""

from __future__ import annotations

import errno
import os
import select
import stat

from grapeshot import _core
from grapeshot.coro._countdown import Countdown
from grapeshot.coro._errors import SimultaneousError

from . import _socket_numbers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Self

can_wait = _core._coro_can_wait
act = _core._coro_act
_wait_for_read = _core._coro_wait_for_read
_wait_for_write = _core._coro_wait_for_write
_sleep = _core._coro_sleep_relative
_Epoll = select.epoll
_poll = select.poll
_fstat, _get_blocking = os.fstat, os.get_blocking

_EDGE = select.EPOLLET
_USED_UP = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC))
# The first and the longest pause between two polls when no epoll object can be made, in seconds.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02

READABLE, WRITABLE = select.POLLIN, select.POLLOUT
# A longer sleep, or one without a limit, consists of sleeps of this length: one day, in seconds.
_LONGEST_S = 86400.0


def note_poll() -> None:
    """Count a call that did not wait. After a few in a row the coro yields, so a polling loop lets others run."""
    if can_wait():
        act()


class Interests:
    """Descriptors, each with the events (``POLLIN`` ...) for which a coro waits. The coro may wait more than once.

    The kernel reports some states, such as a hang-up, even if the caller does not wait for them. With epoll, such a
    state ends only one wait, because the registration is edge-triggered. A descriptor that is closed during the wait
    has no more events.
    """

    __slots__ = ("_masks", "_own", "_pause_s")

    def __init__(self, masks: dict[int, int]) -> None:
        self._masks = masks
        self._own: Any = None
        self._pause_s = _FIRST_PAUSE_S
        try:
            self._own = _Epoll()
            for fd, mask in masks.items():
                self._register(fd, mask)
        except OSError as error:
            self.close()
            if error.errno not in _USED_UP:
                raise

    def _register(self, fd: int, mask: int) -> None:
        try:
            self._own.register(fd, mask | _EDGE)
        except PermissionError:
            # A regular file, which epoll does not accept. It is always ready, so it never has to be waited for.
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._own is not None:
            self._own.close()
            self._own = None

    def wait(self, limit_s: float | None) -> bool:
        """Wait for one of the events; return False if none came in time."""
        if self._own is None:
            return self._poll_with_pauses(limit_s)
        if not _wait_until_readable(self._own.fileno(), limit_s):
            return False
        self._own.poll(0)
        return True

    def _poll_with_pauses(self, limit_s: float | None) -> bool:
        """Poll the descriptors with pauses. This is used when no epoll object can be made."""
        left_s = Countdown(limit_s)
        asked = _poll()
        for fd, mask in self._masks.items():
            asked.register(fd, mask)
        while not left_s.is_over():
            rest_s = left_s()
            sleep(self._pause_s if rest_s is None else min(rest_s, self._pause_s))
            self._pause_s = min(self._pause_s * 1.5, _LONGEST_PAUSE_S)
            if asked.poll(0):
                return True
        return False


def wait_for_events(fd: int, mask: int, limit_s: float | None) -> bool:
    """Wait until a descriptor has one of the events; return False if none came in time."""
    with Interests({fd: mask}) as interests:
        return interests.wait(limit_s)


def wait_for_descriptor(fd: int, mask: int, limit_s: float | None) -> bool:
    """Like :func:`wait_for_events`, but faster if no other coro waits on the descriptor in this direction."""
    try:
        (_wait_for_write if mask == WRITABLE else _wait_for_read)(fd, limit_s)
    except SimultaneousError:
        return wait_for_events(fd, mask, limit_s)
    except PermissionError:
        return True
    except TimeoutError:
        return False
    return True


def _wait_until_readable(fd: int, limit_s: float | None) -> bool:
    try:
        _wait_for_read(fd, limit_s)
    except TimeoutError:
        return False
    return True


def sleep(limit_s: float | None) -> None:
    """Let the coro sleep for ``limit_s`` seconds; None means until it is interrupted."""
    left_s = Countdown(limit_s)
    while not left_s.is_over():
        rest_s = left_s()
        _sleep(_LONGEST_S if rest_s is None else min(rest_s, _LONGEST_S))


def is_blocking_socket(fd: int) -> bool:
    """Whether a nonblocking descriptor belongs to a patched socket without a timeout."""
    return _socket_numbers.is_blocking(fd)


def block_thread(fd: int, mask: int) -> None:
    """Block the thread until the descriptor is ready. This is for calls outside of coros."""
    poll = _poll()
    poll.register(fd, mask)
    poll.poll()


def wait_to_read(fd: int) -> Callable[[], object]:
    """Return a function that waits until the descriptor is readable."""
    return lambda: wait_for_descriptor(fd, READABLE, None)


def wait_to_write(fd: int) -> Callable[[], object]:
    """Return a function that waits until the descriptor is writable."""
    return lambda: wait_for_descriptor(fd, WRITABLE, None)


def may_block(fd: int) -> bool:
    """Whether calls on this descriptor can block: it is a pipe, a socket or a character device (such as a terminal),
    and the program has not made it nonblocking.

    A patched socket without a timeout is blocking for the program, although its descriptor is nonblocking.
    """
    try:
        mode = _fstat(fd).st_mode
        is_kind = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISCHR(mode)
        return is_kind and (_get_blocking(fd) or is_blocking_socket(fd))
    except (OSError, OverflowError):
        # The caller's own call will raise the error.
        return False
