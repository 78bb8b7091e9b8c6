"""Waits of coros for descriptors that others may wait for, too.

A descriptor has one entry per direction in the fd table of the loop. Blocking code knows no such limit: two threads may
read one pipe, or select what a third one receives from. Here a wait registers its descriptors with an epoll object of
its own, and waits for that. The caller repeats its own system call afterwards, so what it reports is level-triggered.
"""

from __future__ import annotations

import os
import select
import stat
import time

from grapeshot import _core
from grapeshot.coro._errors import SimultaneousError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

can_wait = _core._coro_can_wait
act = _core._coro_act
_wait_for_read = _core._coro_wait_for_read
_wait_for_write = _core._coro_wait_for_write
_sleep = _core._coro_sleep_relative
_Epoll = select.epoll
_poll = select.poll
_fstat = os.fstat

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
        self._end_s = None if limit_s is None else time.monotonic() + limit_s

    def __call__(self) -> float | None:
        return None if self._end_s is None else max(self._end_s - time.monotonic(), 0.0)

    def is_over(self) -> bool:
        return self._end_s is not None and self._end_s <= time.monotonic()


def wait_for_events(interests: Iterable[tuple[int, int]], limit_s: float | None) -> bool:
    """Wait until one of the descriptors has one of its events (``POLLIN`` ...); return False if the time is over.

    The events may be gone when this returns. A descriptor that is closed meanwhile has no more events.
    """
    own = _Epoll()
    try:
        masks: dict[int, int] = {}
        for fd, mask in interests:
            masks[fd] = masks.get(fd, 0) | mask
        for fd, mask in masks.items():
            try:
                own.register(fd, mask)
            except PermissionError:
                # A regular file. It is always ready, so nobody waits for it.
                continue
        return _waits_out(own.fileno(), limit_s)
    finally:
        own.close()


def wait_for_descriptor(fd: int, mask: int, limit_s: float | None) -> bool:
    """The same for one descriptor, which costs less if nobody else waits for it."""
    try:
        (_wait_for_write if mask == WRITABLE else _wait_for_read)(fd, limit_s)
    except SimultaneousError:
        return wait_for_events([(fd, mask)], limit_s)
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


def is_ready(fd: int, mask: int) -> bool:
    """Whether a system call on the descriptor would not block now, or would fail."""
    poll = _poll()
    poll.register(fd, mask)
    return bool(poll.poll(0))


def may_block(fd: object) -> bool:
    """Whether reads and writes of this descriptor can block: pipes, sockets and terminals that are in blocking mode."""
    if not isinstance(fd, int):
        return False
    try:
        mode = _fstat(fd).st_mode
        is_kind = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISCHR(mode)
        return is_kind and os.get_blocking(fd)
    except (OSError, OverflowError):
        # The call itself reports it.
        return False


def wait_until_ready(fd: int, mask: int) -> None:
    """Wait until a call on a blocking descriptor does not block. Nothing else of this thread runs before that call."""
    act()
    while not is_ready(fd, mask):
        if not wait_for_descriptor(fd, mask, None):
            return
