"""``select`` and ``selectors`` of :func:`grapeshot.coro.install`: a coro that selects waits while others run.

What is reported comes from the original calls with a timeout of 0, so it is level-triggered and in their format. The
wait between two of them is that of ``_waits``.
"""

from __future__ import annotations

import select as _module
import selectors

from . import _c_waits, _originals, _waits
from ._waits import Countdown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Self

_select = _module.select
_Poll = _module.poll
_Epoll = _module.epoll


def _is_limit(timeout: Any) -> bool:
    return timeout is None or isinstance(timeout, float) or hasattr(type(timeout), "__index__")


def _limit_of(timeout: Any, unit_s: float) -> float | None:
    """Return a timeout in seconds, None for no limit. The errors are those of ``poll``."""
    if timeout is None:
        return None
    if not _is_limit(timeout):
        raise TypeError("timeout must be an integer or None")
    if timeout != timeout:
        raise ValueError("Invalid value NaN (not a number)")
    return timeout * unit_s  # type: ignore[no-any-return]


def _fd_of(file: Any) -> int:
    return file if isinstance(file, int) else file.fileno()


def select(rlist: Any, wlist: Any, xlist: Any, timeout: Any = None, /) -> tuple[list[Any], list[Any], list[Any]]:
    """Wait until one or more file descriptors are ready for some kind of I/O. Other coros run meanwhile."""
    if not _waits.can_wait():
        return _select(rlist, wlist, xlist, timeout)
    if not _is_limit(timeout):
        return _select([], [], [], timeout)  # raises TypeError, with the interpreter's own text
    limit_s = _limit_of(timeout, 1.0)
    if limit_s is not None and limit_s < 0:
        raise ValueError("timeout must be non-negative")
    _waits.act()
    left_s = Countdown(limit_s)
    while True:
        is_last = left_s.is_over()
        found = _select(rlist, wlist, xlist, 0)
        if any(found) or is_last:
            return found
        masks = ((rlist, _module.POLLIN), (wlist, _module.POLLOUT), (xlist, _module.POLLPRI))
        interests = [(_fd_of(file), mask) for files, mask in masks for file in files]
        if interests:
            _waits.wait_for_events(interests, left_s())
        else:
            _waits.sleep(left_s())


class _Polling:
    """What ``select.poll()`` returns: descriptors and the events to wait for."""

    _poll: Any
    _masks: dict[int, int]
    _is_polling: bool

    def __new__(cls) -> Self:
        raise TypeError("cannot create 'select.poll' instances")

    def register(self, fd: Any, eventmask: int = _module.POLLIN | _module.POLLPRI | _module.POLLOUT, /) -> None:
        self._poll.register(fd, eventmask)
        self._masks[_fd_of(fd)] = eventmask

    def modify(self, fd: Any, eventmask: int, /) -> None:
        self._poll.modify(fd, eventmask)
        self._masks[_fd_of(fd)] = eventmask

    def unregister(self, fd: Any, /) -> None:
        self._poll.unregister(fd)
        del self._masks[_fd_of(fd)]

    def poll(self, timeout: Any = None, /) -> list[tuple[int, int]]:
        """Wait for events; ``timeout`` is in milliseconds. Other coros run meanwhile."""
        if self._is_polling:
            raise RuntimeError("concurrent poll() invocation")
        self._is_polling = True
        try:
            if not _waits.can_wait():
                return self._poll.poll(timeout)  # type: ignore[no-any-return]
            return self._poll_as_coro(timeout)
        finally:
            self._is_polling = False

    def _poll_as_coro(self, timeout: Any) -> list[tuple[int, int]]:
        limit_s = _limit_of(timeout, 0.001)
        if limit_s is not None and limit_s > 0x7FFFFFFF / 1000:
            raise OverflowError("timeout is too large")
        left_s = Countdown(None if limit_s is None or limit_s < 0 else limit_s)
        _waits.act()
        while True:
            is_last = left_s.is_over()
            found: list[tuple[int, int]] = self._poll.poll(0)
            if found or is_last:
                return found
            if self._masks:
                _waits.wait_for_events(list(self._masks.items()), left_s())
            else:
                _waits.sleep(left_s())


_Polling.__name__ = _Polling.__qualname__ = "poll"
_Polling.__module__ = "select"


def poll() -> _Polling:
    """Return a new polling object, which has the methods of the original's. Its ``poll`` lets other coros run."""
    self = object.__new__(_Polling)
    self._poll = _Poll()
    self._masks = {}
    self._is_polling = False
    return self


class epoll:  # noqa: N801
    """``select.epoll``, whose ``poll`` lets other coros run."""

    _epoll: Any

    def __new__(cls, sizehint: int = -1, flags: int = 0) -> Self:
        self = super().__new__(cls)
        self._epoll = _Epoll(sizehint, flags)
        return self

    @classmethod
    def fromfd(cls, fd: int, /) -> Self:
        self = super().__new__(cls)
        self._epoll = _Epoll.fromfd(fd)
        return self

    @property
    def closed(self) -> bool:
        return self._epoll.closed  # type: ignore[no-any-return]

    def close(self) -> None:
        self._epoll.close()

    def fileno(self) -> int:
        return self._epoll.fileno()  # type: ignore[no-any-return]

    def register(self, fd: Any, eventmask: int = _module.EPOLLIN | _module.EPOLLPRI | _module.EPOLLOUT) -> None:
        self._epoll.register(fd, eventmask)

    def modify(self, fd: Any, eventmask: int) -> None:
        self._epoll.modify(fd, eventmask)

    def unregister(self, fd: Any) -> None:
        self._epoll.unregister(fd)

    def __enter__(self) -> Self:
        self._epoll.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def poll(self, timeout: Any = None, maxevents: int = -1) -> list[tuple[int, int]]:
        """Wait for events; ``timeout`` is in seconds. Other coros run meanwhile."""
        own = self._epoll
        if not _waits.can_wait():
            return own.poll(timeout, maxevents)  # type: ignore[no-any-return]
        limit_s = _limit_of(timeout, 1.0)
        left_s = Countdown(None if limit_s is None or limit_s < 0 else limit_s)
        _waits.act()
        while True:
            is_last = left_s.is_over()
            found: list[tuple[int, int]] = own.poll(0, maxevents)
            if found or is_last:
                return found
            # An epoll object is readable while it has events.
            _waits.wait_for_descriptor(own.fileno(), _waits.READABLE, left_s())


class _KeptSelectSelector(selectors.SelectSelector):
    _select = staticmethod(_select)


class _KeptPollSelector(selectors.PollSelector):
    _selector_cls = _Poll


class _KeptEpollSelector(selectors.EpollSelector):
    _selector_cls = _Epoll


for _kept in (_KeptSelectSelector, _KeptPollSelector, _KeptEpollSelector):
    _kept.__name__ = _kept.__qualname__ = _kept.__name__.removeprefix("_Kept")
    _kept.__module__ = "selectors"


def patch() -> None:
    """Replace the names. The classes of ``selectors`` stay, and what they select with is replaced."""
    kept: dict[str, Any] = {
        "SelectSelector": _KeptSelectSelector,
        "PollSelector": _KeptPollSelector,
        "EpollSelector": _KeptEpollSelector,
    }
    for name, value in kept.items():
        _originals.show("selectors", name, value)
    _originals.show("selectors", "DefaultSelector", kept[selectors.DefaultSelector.__name__])
    for name, new in (("select", select), ("poll", poll), ("epoll", epoll)):
        _originals.replace("select", name, new)
    changed: Any = selectors
    changed.SelectSelector._select = staticmethod(select)
    changed.PollSelector._selector_cls = staticmethod(poll)
    changed.EpollSelector._selector_cls = epoll
    _c_waits.patch()
