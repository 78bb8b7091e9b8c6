"""Adds what kombu's blocking mode lacks for Redis. Pools that use kombu's own loop, such as prefork, have it already.

- The worker's main coro waits in kombu, a few seconds at a time. While the number of unacknowledged messages is at the
  prefetch limit, kombu does not ask Redis for another message. It does not notice when a coro of the pool then
  acknowledges one, so the pool would run out of tasks although Redis has more. Here the wait ends as soon as kombu
  could ask. (AMQP brokers send the next message by themselves.) The wait also ends after a signal, so that the worker
  begins its shutdown at once.
- kombu does not look for the messages of killed workers. Here a timer makes it look.
"""

from __future__ import annotations

import functools

from celery.worker import state  # type: ignore[import-untyped]

from grapeshot import _core

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# How often kombu's own event loop looks for messages that were not acknowledged in time
_RESTORE_INTERVAL_S = 10


class _Woken(Exception):  # noqa: N818  # not an error
    """Raised in the main coro, in order to end its wait."""


def _is_ending() -> bool:
    return any(code is not None and code is not False for code in (state.should_stop, state.should_terminate))


class MessageWait:
    """The wait of the worker's main coro for messages. With brokers other than Redis, the methods do nothing."""

    def __init__(self, controller: Any) -> None:
        consumer = controller.consumer
        consumer.connect = functools.partial(self._connect, consumer.connect)
        # The worker's timer, and the timer's entry that looks for the messages of killed workers
        self._timer = controller.timer
        self._restoring: Any = None
        # kombu's object that waits for the connections to Redis
        self._cycle: Any = None
        # The main coro while it waits, and the exception that ends the wait
        self._waiting: Any = None
        self._woken = _Woken()

    def _connect(self, connect: Callable[[], Any]) -> Any:
        connection = connect()
        if self._restoring is not None:
            self._timer.cancel(self._restoring)
        self._cycle = self._restoring = None
        cycle: Any = getattr(connection.transport, "cycle", None)
        if hasattr(cycle, "maybe_restore_messages"):  # only the cycle of Redis has it
            self._cycle = cycle
            cycle.poller = _Poller(cycle.poller, self)
            interval_s = connection.transport_options.get("unacked_restore_interval") or _RESTORE_INTERVAL_S
            self._restoring = self._timer.call_repeatedly(interval_s, cycle.maybe_restore_messages)
        return connection

    def end(self) -> None:
        """End the wait, so that the worker looks at its state."""
        if self._waiting is not None:
            self._waiting._throw_later(self._woken)
            self._waiting = None

    def end_if_more_fits(self) -> None:
        """End the wait if kombu could ask for a message, but has not done so."""
        if self._waiting is not None and any(map(self._could_ask, self._cycle._channels)):
            self.end()

    def _could_ask(self, channel: Any) -> bool:
        # If the prefetch limit is reached after kombu has asked, kombu stops polling the socket for the answer. It
        # polls that socket again only in its next wait, so the channel then counts as one that has not asked.
        has_asked = channel._in_poll and not getattr(self._cycle, "_paused_brpop", None)
        return bool(channel.active_queues) and not has_asked and bool(channel.qos.can_consume())

    def poll(self, poll: Callable[[Any], Any], timeout: Any) -> Any:
        if _is_ending():
            events = poll(0)
            if not events:
                raise TimeoutError
            return events
        coro = self._waiting = _core._coro_current_or_none()
        self._woken = _Woken()
        try:
            return poll(timeout)
        except _Woken:
            raise TimeoutError from None  # Celery takes this for the timeout of drain_events()
        finally:
            self._waiting = None
            if coro is not None:
                coro._take_back(self._woken)  # still pending if messages ended the wait first


class _Poller:
    """kombu's poller, whose ``poll`` can be ended early."""

    def __init__(self, poller: Any, message_wait: MessageWait) -> None:
        self._poller = poller
        self._message_wait = message_wait

    def poll(self, timeout: Any) -> Any:
        return self._message_wait.poll(self._poller.poll, timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._poller, name)
