"""Waits of coros for descriptors that others may wait for, too.

A descriptor has one entry per direction in the fd table of the loop. Blocking code knows no such limit: two threads may
read one pipe, or select what a third one receives from. Here a wait registers its descriptors with an epoll object of
its own, and waits for that. The caller repeats its own system call afterwards, so what it reports is level-triggered.
"""

from __future__ import annotations

import errno
import os
import select
import stat

from grapeshot import _core
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
# Programs may replace that of `time`, as tests do.
_monotonic = _core._coro_monotonic
_Epoll = select.epoll
_poll = select.poll
_fstat, _get_blocking = os.fstat, os.get_blocking

_EDGE = select.EPOLLET
_USED_UP = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC))
# The pauses between two looks at descriptors for which no epoll object can be made, in seconds.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02

READABLE, WRITABLE = select.POLLIN, select.POLLOUT
# How long a coro sleeps at most in one piece where nothing can wake it, in seconds: a day.
_LONGEST_S = 86400.0


def note_poll() -> None:
    """Note that the running coro has asked for something that is not there: after too many in a row it yields."""
    if can_wait():
        act()


class Countdown:
    """What is left of a limit in seconds; None: no limit."""

    __slots__ = ("_end_s",)

    def __init__(self, limit_s: float | None) -> None:
        self._end_s = None if limit_s is None else _monotonic() + limit_s

    def __call__(self) -> float | None:
        return None if self._end_s is None else max(self._end_s - _monotonic(), 0.0)

    def is_over(self) -> bool:
        return self._end_s is not None and self._end_s <= _monotonic()


class Interests:
    """Descriptors with the events (``POLLIN`` ...) that a coro waits for, again and again.

    The events may be gone after a wait. A state that lasts, such as a hang-up, ends one wait only: the kernel reports
    it whether somebody asks for it or not. A descriptor that is closed meanwhile has no more events.
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
            # A regular file. It is always ready, so nobody waits for it.
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
        """Wait for one of the events; return False if the time is over."""
        if self._own is None:
            return self._ask_again(limit_s)
        if not _waits_out(self._own.fileno(), limit_s):
            return False
        self._own.poll(0)
        return True

    def _ask_again(self, limit_s: float | None) -> bool:
        """Without a descriptor of its own, which the system has refused, the coro asks again and again."""
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
    """Wait until a descriptor has one of the events; return False if the time is over."""
    with Interests({fd: mask}) as interests:
        return interests.wait(limit_s)


def wait_for_descriptor(fd: int, mask: int, limit_s: float | None) -> bool:
    """The same for one descriptor, which costs less if nobody else waits for it."""
    try:
        (_wait_for_write if mask == WRITABLE else _wait_for_read)(fd, limit_s)
    except SimultaneousError:
        return wait_for_events(fd, mask, limit_s)
    except PermissionError:
        return True
    except TimeoutError:
        return False
    return True


def _waits_out(fd: int, limit_s: float | None) -> bool:
    try:
        _wait_for_read(fd, limit_s)
    except TimeoutError:
        return False
    return True


def sleep(limit_s: float | None) -> None:
    """Sleep as a coro; None: until something interrupts it."""
    left_s = Countdown(limit_s)
    while not left_s.is_over():
        rest_s = left_s()
        _sleep(_LONGEST_S if rest_s is None else min(rest_s, _LONGEST_S))


def is_blocking_socket(fd: int) -> bool:
    """Whether a descriptor in nonblocking mode is that of a patched socket without a timeout."""
    return _socket_numbers.is_blocking(fd)


def block_thread(fd: int, mask: int) -> None:
    """Block the thread until the descriptor is ready, where no coro runs."""
    poll = _poll()
    poll.register(fd, mask)
    poll.poll()


def wait_to_read(fd: int) -> Callable[[], object]:
    """Return a function that waits until the descriptor is ready to be read."""
    return lambda: wait_for_descriptor(fd, READABLE, None)


def wait_to_write(fd: int) -> Callable[[], object]:
    """Return a function that waits until there is room for a write."""
    return lambda: wait_for_descriptor(fd, WRITABLE, None)


def may_block(fd: int) -> bool:
    """Whether calls on this descriptor can block: pipes, sockets and terminals that the program believes to block."""
    try:
        mode = _fstat(fd).st_mode
        is_kind = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISCHR(mode)
        return is_kind and (_get_blocking(fd) or is_blocking_socket(fd))
    except (OSError, OverflowError):
        # The call itself reports it.
        return False
