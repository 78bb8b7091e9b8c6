"""The part ``select`` of :func:`grapeshot.coro.patch`: other coros run while one waits in a ``select`` or ``poll``.

The results come from the original calls with a timeout of 0, so they are what the originals report. Between two such
calls the coro waits with ``_waits``.
"""

from __future__ import annotations

import errno
import operator
import os
import select as _module
import selectors

from grapeshot.coro._countdown import Countdown

from . import _c_waits, _originals, _waits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Self

_select = _module.select
_Poll = _module.poll
_Epoll = _module.epoll


def _is_limit(timeout: Any) -> bool:
    return timeout is None or isinstance(timeout, float) or hasattr(type(timeout), "__index__")


def _limit_of(timeout: Any, unit_s: float) -> float | None:
    """Return a timeout in seconds, or None for no limit. Raises the same errors as ``poll``."""
    if timeout is None:
        return None
    if not _is_limit(timeout):
        raise TypeError("timeout must be an integer or None")
    if timeout != timeout:
        raise ValueError("Invalid value NaN (not a number)")
    return (timeout if isinstance(timeout, float) else operator.index(timeout)) * unit_s


def _fd_of(file: Any) -> Any:
    return file if isinstance(file, int) else file.fileno()


class _Files:
    """One of the three lists for ``select``. Iterates the list once, and asks each file once for its descriptor."""

    def __init__(self, files: Any) -> None:
        if not hasattr(type(files), "__iter__") and not hasattr(type(files), "__getitem__"):
            _select(files, [], [], 0)  # raises TypeError, with the interpreter's own text
        self._files = [
            (file, self._fd_of(file)) for file in (files if isinstance(files, (list, tuple)) else list(files))
        ]
        self.fds = [fd for _, fd in self._files]

    @staticmethod
    def _fd_of(file: Any) -> Any:
        fd = _fd_of(file) if isinstance(file, int) or hasattr(file, "fileno") else None
        if not isinstance(fd, int):
            _select([file], [], [], 0)  # raises TypeError, with the interpreter's own text
        return fd

    def of(self, fds: list[int]) -> list[Any]:
        """Return the files whose descriptors are in ``fds``."""
        return [file for file, fd in self._files if fd in fds] if fds else []


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _select_now(files: tuple[_Files, _Files, _Files]) -> tuple[list[Any], list[Any], list[Any]]:
    return _select(files[0].fds, files[1].fds, files[2].fds, 0)


def _select_open(files: tuple[_Files, _Files, _Files]) -> Any:
    """Like :func:`_select_now`, but some of the descriptors may have been closed by other code during the wait.

    The original ``select`` goes on waiting for the open descriptors. When one of them is ready, it reports the closed
    ones as well.
    """
    closed = {fd for each in files for fd in each.fds if not _is_open(fd)}
    found = _select(*([fd for fd in each.fds if fd not in closed] for each in files), 0)  # type: ignore[call-arg,arg-type]
    return [[*fds, *closed] if fds else [] for fds in found] if any(found) else found


def select(rlist: Any, wlist: Any, xlist: Any, timeout: Any = None, /) -> tuple[list[Any], list[Any], list[Any]]:
    """Wait until one or more file descriptors are ready for some kind of I/O. Other coros run while the call waits."""
    if not _waits.can_wait():
        return _select(rlist, wlist, xlist, timeout)
    if not _is_limit(timeout):
        return _select([], [], [], timeout)  # raises TypeError, with the interpreter's own text
    limit_s = _limit_of(timeout, 1.0)
    if limit_s is not None and limit_s < 0:
        raise ValueError("timeout must be non-negative")
    _waits.act()
    files = _Files(rlist), _Files(wlist), _Files(xlist)
    found = _select_now(files)
    if not any(found) and limit_s != 0:
        found = _select_as_coro(files, Countdown(limit_s))
    return files[0].of(found[0]), files[1].of(found[1]), files[2].of(found[2])


def _select_as_coro(files: tuple[_Files, _Files, _Files], left_s: Countdown) -> Any:
    masks: dict[int, int] = {}
    for each, mask in zip(files, (_module.POLLIN, _module.POLLOUT, _module.POLLPRI), strict=True):
        for fd in each.fds:
            masks[fd] = masks.get(fd, 0) | mask
    if not masks:
        _waits.sleep(left_s())
        return [], [], []
    with _waits.Interests(masks) as interests:
        while True:
            is_last = not interests.wait(left_s())
            try:
                found = _select_now(files)
            except OSError as error:
                if error.errno != errno.EBADF:
                    raise
                found = _select_open(files)
            if any(found) or is_last:
                return found


class _Polling:
    """The object that ``select.poll()`` returns: descriptors, each with the events to wait for."""

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
        """Wait for events; ``timeout`` is in milliseconds. Other coros run while the call waits."""
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
        found: list[tuple[int, int]] = self._poll.poll(0)
        if found or limit_s == 0:
            return found
        if not self._masks:
            _waits.sleep(left_s())
            return found
        # Work on copies: if a descriptor is registered during the wait, only later calls wait for it.
        masks, asked = dict(self._masks), _Poll()
        for fd, mask in masks.items():
            asked.register(fd, mask)
        with _waits.Interests(masks) as interests:
            while True:
                is_last = not interests.wait(left_s())
                found = asked.poll(0)
                if found or is_last:
                    return found


_Polling.__name__ = _Polling.__qualname__ = "poll"
_Polling.__module__ = "select"


def poll() -> _Polling:
    """Return a new polling object with the methods of the original. Its ``poll`` lets other coros run."""
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
        """Wait for events; ``timeout`` is in seconds. Other coros run while the call waits."""
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
            # The descriptor of an epoll object is readable while there are events.
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
    """Replace the names in ``select``. The classes of ``selectors`` stay, but call the replacements.

    Modules that keep the originals get subclasses of the selectors, which call the original functions.
    """
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
    _c_waits.patch_clients()
