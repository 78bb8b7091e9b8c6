"""``Descriptors``: the registrations of a loop's io watchers."""

from __future__ import annotations

import contextlib
import contextvars
import select

import gevent.monkey  # type: ignore[import-untyped]

from ._watchers import READ, WRITE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ._loop import Loop
    from ._watchers import io

# gevent's monkey patching replaces select.poll.
_poll = gevent.monkey.get_original("select", "poll")


class Descriptors:
    """The io watchers of a loop. Any number of watchers may watch one descriptor.

    gevent's sockets start and stop a watcher for each wait. So a descriptor that nobody watches any more stays
    registered, and is deregistered only when an event shows that nobody wants it. (libev does the same.)
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        # By direction: descriptor -> its active watchers, an empty list if it is registered but not watched
        self._watchers: dict[int, dict[int, list[io]]] = {READ: {}, WRITE: {}}
        # Descriptor and direction of regular files, which are always ready, while they are watched
        self._always: set[tuple[int, int]] = set()

    def watch(self, watcher: io, *, is_known: bool) -> None:
        fd, events = watcher._fd, watcher._events
        for direction in (READ, WRITE):
            if events & direction:
                watchers = self._watchers[direction].get(fd)
                if watchers is None or (not watchers and not is_known):
                    if watchers is not None:
                        self._deregister(fd, direction)
                    self._register(fd, direction)
                    watchers = self._watchers[direction][fd] = []
                watchers.append(watcher)

    def of(self, events: int) -> dict[int, list[io]]:
        """Return the lists of one direction; an empty dict if the events are not exactly one."""
        return self._watchers.get(events, {})

    def unwatch(self, watcher: io) -> None:
        fd, events = watcher._fd, watcher._events
        for direction in (READ, WRITE) if events == READ | WRITE else (events,):
            watchers = self.of(direction).get(fd)
            if watchers is not None and watcher in watchers:
                watchers.remove(watcher)

    def _register(self, fd: int, direction: int) -> None:
        loop: Any = self._loop.asyncio_loop
        add = loop._add_reader if direction == READ else loop._add_writer
        try:
            contextvars.Context().run(add, fd, self._ready, fd, direction)
        except PermissionError:
            if (fd, direction) not in self._always:
                self._always.add((fd, direction))
                loop.call_soon(self._always_ready, fd, direction, context=contextvars.Context())
        except OSError:
            self._loop.run_callback(self._failed, fd, direction)  # the descriptor is closed

    def _always_ready(self, fd: int, direction: int) -> None:
        watchers = self._watchers[direction].get(fd)
        if watchers:
            self._loop.asyncio_loop.call_soon(self._always_ready, fd, direction, context=contextvars.Context())
            self._ready(fd, direction)
        else:
            self._always.discard((fd, direction))
            self._watchers[direction].pop(fd, None)

    def _failed(self, fd: int, direction: int) -> None:
        for watcher in self._watchers[direction].pop(fd, []):
            self._wake(watcher, -1)  # gevent.select makes POLLNVAL of it

    def _deregister(self, fd: int, direction: int) -> None:
        loop: Any = self._loop.asyncio_loop
        if loop.is_closed():
            return
        with contextlib.suppress(OSError):  # the descriptor may be closed already
            (loop._remove_reader if direction == READ else loop._remove_writer)(fd)

    def _ready(self, fd: int, direction: int) -> None:
        watchers = self._watchers[direction].get(fd)
        if not watchers:
            self._watchers[direction].pop(fd, None)
            self._deregister(fd, direction)
        elif len(watchers) == 1 and watchers[0]._events == direction:
            watchers[0]._fire(direction)
        else:
            for watcher in list(watchers):
                if watcher._is_active:
                    watcher._fire(direction if watcher._events == direction else self._events_now(fd, direction))

    @staticmethod
    def _events_now(fd: int, events: int) -> int:
        """Add the other direction to the events, if the descriptor is ready for it, too."""
        poll = _poll()
        poll.register(fd, select.POLLIN | select.POLLOUT)
        for _, ready in poll.poll(0):
            events |= READ if ready & select.POLLIN else 0
            events |= WRITE if ready & select.POLLOUT else 0
        return events

    def release(self, fd: int) -> None:
        """Deregister a descriptor that nobody watches."""
        for direction, found in self._watchers.items():
            if found.get(fd) == []:
                del found[fd]
                self._deregister(fd, direction)

    def closing(self, fd: int) -> bool:
        """The descriptor is about to be closed: wake its watchers, and return whether there are any."""
        woken: dict[io, int] = {}
        for direction, found in self._watchers.items():
            watchers = found.pop(fd, None)
            if watchers is not None:
                self._deregister(fd, direction)
                for watcher in watchers:
                    woken[watcher] = woken.get(watcher, 0) | direction
                    watcher._is_known = False
        for watcher, events in woken.items():
            self._loop.run_callback(self._wake, watcher, events)
        return bool(woken)

    @staticmethod
    def _wake(watcher: io, events: int) -> None:
        if watcher._is_active:
            watcher._fire(events)

    def forget(self) -> None:
        """In the child of a fork: the loop has forgotten all registrations."""
        self._always.clear()
        for found in self._watchers.values():
            found.clear()
