"""``loop.statistics()``: the counters of the native loop, as a dataclass."""

from __future__ import annotations

from dataclasses import dataclass

from grapeshot._loop.base import BaseLoop


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """A distribution of durations, counted in intervals. Values derived from it are off by at most one eighth."""

    count: int
    """The number of durations."""
    sum_s: float
    """The sum of all durations, in seconds."""
    max_s: float
    """The longest duration, in seconds."""
    buckets: tuple[tuple[float, int], ...]
    """``(end_s, number)`` for each interval, in ascending order: how many durations are below ``end_s`` seconds, and
    not below the end of the previous interval. Intervals without durations are omitted."""

    def percentile(self, percent: float) -> float:
        """Return a duration, in seconds, that this percentage of all durations does not exceed.

        The result is the end of an interval, but at most ``max_s``. It is 0.0 if there are no durations.
        """
        wanted = self.count * percent / 100
        seen = 0
        for end_s, number in self.buckets:
            seen += number
            if seen >= wanted:
                return min(end_s, self.max_s)
        return self.max_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """The statistics of a loop since it was created. :meth:`grapeshot.Loop.statistics` returns them.

    Fields whose name ends in ``_s`` are in seconds, fields with ``bytes`` in the name are in bytes, and all others are
    counts. Values never decrease, except the gauges (named in ``GAUGES``), which are a current or a maximum number. The
    fields named in ``HISTOGRAMS`` are a ``Histogram`` or None.
    """

    GAUGES = frozenset(("ready", "most_ready", "timers", "coros", "pinned_coros"))
    HISTOGRAMS = frozenset(("callback_durations", "scheduling_delays"))

    iterations: int
    """Iterations of the loop."""
    polls: int
    """How often the loop has asked the system for events. An iteration that finds ready work may skip this."""
    events: int
    """Events that the system has returned: ready descriptors, wake-ups by other threads, and signals."""
    callbacks: int
    """Handles taken from the ready queue: of ``call_soon``, timers, steps of tasks, readers and writers. Handles that
    were cancelled in the queue are included. Methods of protocols are not, because no handle calls them."""
    ready: int
    """Gauge: coros and handles in the ready queue."""
    most_ready: int
    """Gauge: the largest number of coros and handles that an iteration has found in the ready queue."""
    running_s: float
    """Time in ``run_forever`` and similar methods, without ``polling_s``. Waiting for the GIL counts as running."""
    polling_s: float
    """Time that the loop was blocked, waiting for events."""
    timers: int
    """Gauge: timers that are set and not cancelled."""
    timers_set: int
    """Calls of ``call_later`` and ``call_at``, and sleeps and timeouts of coros."""
    timers_run: int
    """Timers that became due."""
    threadsafe_calls: int
    """Calls of ``call_soon_threadsafe``, from any thread."""
    wakeups: int
    """How often another thread has woken the loop while it was blocked."""
    writes: int
    """System calls that have sent data: those of transports, of ``sock_sendall`` and ``sock_sendto``, and
    of three methods of coros' sockets: ``sendall``, ``write``, and ``send`` if it is called with a ``bytes`` and
    without flags. Not counted are the system call ``sendfile``; ``sendto``, ``sendmsg``, ``writev`` and all other calls
    of ``send`` on coros' sockets; and anything that coros' sockets send with TLS."""
    bytes_written: int
    """The bytes that these calls have sent. For a transport with TLS, these are the encrypted bytes."""
    corked_writes: int
    """Calls of ``write`` and ``writelines`` of a TCP or Unix transport that made no system call of their own. Their
    data was held back for a short time, to be sent together with other data."""
    connections_accepted: int
    """Connections accepted by servers, ``sock_accept`` and coros' sockets."""
    accept_errors: int
    """Failed attempts to accept a connection, for instance because no descriptor was left."""
    coros: int
    """Gauge: coros that have been started and have not ended."""
    pinned_coros: int
    """Gauge: how many of these coros have a stack of their own, which never moves."""
    coros_started: int
    """Coros that were started."""
    coro_switches: int
    """How often a coro was resumed."""
    coro_evictions: int
    """How often a coro's stack was copied away because another coro needed the memory."""
    coro_bytes_copied: int
    """Bytes of stacks that were copied away and back."""
    callback_durations: Histogram | None
    """How long the loop's callbacks took. None if they were never measured; see
    :meth:`grapeshot.Loop.measure_callbacks`."""
    scheduling_delays: Histogram | None
    """How long callbacks had to wait before they started, counted from the end of the callback that scheduled them,
    from the return of the poll, or from the deadline of the timer. None if callbacks were never measured."""


def statistics(self: BaseLoop) -> Statistics:
    """Return statistics about the loop since it was created: iterations, callbacks, writes and so on.

    Any thread may call this at any time, even after :meth:`close`. Each number is exact, but while the loop is running
    in another thread, two numbers may be from slightly different moments. In a free-threaded build, ``ready`` and
    ``timers`` are then the numbers at the beginning of the current iteration.
    """
    counted = self._statistics()
    ended, pinned_ended = counted.pop("coros_ended"), counted.pop("pinned_coros_ended")
    pinned_started = counted.pop("pinned_coros_started")
    return Statistics(
        ready=counted.pop("noted_ready"),
        timers=counted.pop("noted_timers"),
        coros=counted["coros_started"] - ended,
        pinned_coros=pinned_started - pinned_ended,
        callback_durations=_histogram(counted.pop("callback_durations", None)),
        scheduling_delays=_histogram(counted.pop("scheduling_delays", None)),
        **counted,
    )


def _histogram(measured: tuple[int, int, list[tuple[int, int]]] | None) -> Histogram | None:
    if measured is None:
        return None
    sum_ns, max_ns, buckets = measured
    return Histogram(
        count=sum(number for _, number in buckets),
        sum_s=sum_ns / 1e9,
        max_s=max_ns / 1e9,
        buckets=tuple((end_ns / 1e9, number) for end_ns, number in buckets),
    )
